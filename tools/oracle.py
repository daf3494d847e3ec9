"""The oracle of the demo: mlx-lm alone, in a process that never imports walkback.

Run by its path, not as a module of the package. Reads one prompt a line from standard input, as
``[token id, ...]``, and answers each with a line ``{"logits": hex, "tokens": [...]}``: the BLAKE2b
of the next token's logits, and the greedy continuation.

    python oracle.py MODEL_DIR PREFILL_STEP TOKENS
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


class FirstLogits:
    """A logits processor that changes nothing and remembers the first logits that it sees."""

    def __init__(self) -> None:
        self.logits: mx.array | None = None

    def __call__(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        if self.logits is None:
            self.logits = logits
        return logits

    def digest(self) -> str:
        """The logits' bytes, hashed."""
        assert self.logits is not None
        content = mx.contiguous(self.logits).view(mx.uint8)
        return hashlib.blake2b(bytes(memoryview(cast(Any, content)))).hexdigest()


def main() -> None:
    model_dir, step, token_count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    model = load_model(model_dir)[0]
    for line in sys.stdin:
        first = FirstLogits()
        generated = generate_step(
            mx.array(json.loads(line)),
            model,
            prefill_step_size=step,
            max_tokens=token_count,
            logits_processors=[first],
        )
        tokens = [int(cast(Any, token)) for token, _ in generated]
        print(json.dumps({"logits": first.digest(), "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
