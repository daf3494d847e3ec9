"""The processes of the demo that are killed, and that come after a kill.

python -m walkback.tools.demo_worker victim|replay SETUP_JSON PROMPT_JSON
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from .demo_run import Setup, run_prompt


def main() -> None:
    role, setup_text, prompt_file = sys.argv[1:4]
    setup = Setup.from_json(setup_text)
    prompt: list[int] = json.loads(Path(prompt_file).read_text())
    model: Any = load_model(setup.model_dir)[0]
    cache = setup.open()
    bound = cache.bind(model, setup.model_dir)
    if role == "replay":
        run = run_prompt(bound, "fresh process after SIGKILL", prompt)
        cache.close()
        print(json.dumps(run.fields()), flush=True)
        return
    restoration = bound.restore(prompt)
    for stop in bound.grid.stops(len(prompt)):
        start = restoration.recording.position
        model_step(model, prompt[start:stop], restoration.cache)
        restoration.recording.stop(stop, restoration.cache)
        # From here on the parent may kill this process at any moment: stores are under way.
        print(f"storing {stop}", flush=True)


def model_step(model: Any, token_ids: list[int], cache: list[Any]) -> None:
    """Prefill one chunk, evaluated."""
    model(mx.array([token_ids]), cache=cache)
    mx.eval([leaf.state for leaf in cache])


if __name__ == "__main__":
    main()
