"""E1 off the grid: resumed at the end of a turn, the bits are those of mlx-lm with the same stops.

The storing run and the restoring one are two processes; the oracle is a third, which never imports
walkback and feeds mlx-lm the chunks of the plan that is written down here. Witnesses show that a
plan without the turns, and mutants of the restore, are seen.
"""

# mlx's stubs, mlx-lm's caches and its loader leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model
from zoo import CONFIGS, DTYPES, token_ids

import walkback
import walkback.integration.restoration as restoration_module
from walkback.integration.tiny import write_tiny_model
from walkback.restore.candidates import Candidate
from walkback.restore.plan import Grid, Plan
from walkback.restore.walkback import MutableResumption
from walkback.tools.oracle import FirstLogits

ROOT = Path(__file__).parent.parent

BLOCK_TOKENS = 64
STRIDE = 256
COUNT = 8
# Not on a block, nor on a multiple of 256: the grid's stops are 256 and 512.
TURN_ENDS = (90, 333, 530)
PROMPT = token_ids(600)
NAMES = ("llama", "qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "rwkv7")
# Which architectures another plan gives other bits, on a CPU.
PLAN_BOUND = ("falcon_h1", "nemotron_h")


def edited(at: int) -> list[int]:
    return [*PROMPT[:at], *((each + 1) % 512 for each in PROMPT[at : at + 8]), *PROMPT[at + 8 :]]


# The prompt, its turn ends, the chunks that a run from its start has, and where it resumes.
CASES: dict[str, tuple[list[int], tuple[int, ...], tuple[int, ...], int]] = {
    "replay": (PROMPT, TURN_ENDS, (90, 256, 333, 512), 512),
    "edited last turn": (edited(540), TURN_ENDS, (90, 256, 333, 512), 512),
    "edited turn": (edited(400), TURN_ENDS[:2], (90, 256, 333, 512), 333),
    "rewind": (PROMPT[:340], TURN_ENDS[:2], (90, 256, 333), 333),
    "second conversation": ([*PROMPT[:90], *token_ids(300, seed=4)], (90,), (90, 256), 90),
}

# Reads jobs: a model's directory, a prompt, and where its chunks end. Feeds all but the last token
# in those chunks, the rest in one, and the last alone.
ORACLE = """
import json, runpy, sys
import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

FirstLogits = runpy.run_path(sys.argv[1])["FirstLogits"]
models = {}
for line in sys.stdin:
    directory, prompt, ends, count = json.loads(line)
    if directory not in models:
        models[directory] = load_model(__import__("pathlib").Path(directory))[0]
    model, first, start = models[directory], FirstLogits(), 0
    cache = make_prompt_cache(model)
    with mx.stream(generation_stream):
        for end in ends:
            model(mx.array([prompt[start:end]]), cache=cache)
            mx.eval([each.state for each in cache])
            start = end
    generated = generate_step(
        mx.array(prompt[start:]), model, prompt_cache=cache, max_tokens=count,
        logits_processors=[first],
    )
    tokens = [int(token) for token, _ in generated]
    print(json.dumps([first.digest(), tokens]))
print(json.dumps("walkback" in sys.modules))
"""

Answer = list[Any]


def run(
    bound: walkback.BoundModel, prompt: list[int], turn_ends: tuple[int, ...]
) -> tuple[Answer, int, bool]:
    restorations: list[walkback.Restoration] = []
    first = FirstLogits()
    generated = bound.generate_step(
        prompt,
        max_tokens=COUNT,
        turn_ends=turn_ends,
        logits_processors=[first],
        on_restore=restorations.append,
    )
    tokens = [int(token) for token, _ in generated]
    return [first.digest(), tokens], restorations[0].endpoint, restorations[0].mixed_plan


def opened(root: Path, name: str) -> tuple[walkback.Cache, walkback.BoundModel]:
    cache = walkback.open_cache(
        root / f"{name}.cache",
        block_tokens=BLOCK_TOKENS,
        checkpoint_tokens=STRIDE,
        free_floor_bytes=0,
    )
    return cache, cache.bind(load_model(root / name)[0], root / name)


def serve_child(root: Path) -> None:
    """In the fresh process: run every case on every cache that the parent left."""
    for name in NAMES:
        cache, bound = opened(root, name)
        for case_name, (prompt, turn_ends, _, _) in CASES.items():
            print(json.dumps([f"{name}/{case_name}", *run(bound, prompt, turn_ends)]))
            cache.flush()
        violations = cache.violations()
        assert violations == [], violations
        cache.close()


def oracle(jobs: dict[str, tuple[Path, list[int], tuple[int, ...]]]) -> dict[str, Answer]:
    """What mlx-lm alone says, in a process of its own."""
    lines = [json.dumps([str(model), prompt, ends, COUNT]) for model, prompt, ends in jobs.values()]
    done = subprocess.run(
        [sys.executable, "-c", ORACLE, str(ROOT / "tools" / "oracle.py")],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *answers, imported_walkback = map(json.loads, done.stdout.splitlines())
    assert imported_walkback is False
    return dict(zip(jobs, answers, strict=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    root: Path
    expected: dict[str, Answer]
    stored: dict[str, Answer]
    restored: dict[str, tuple[Answer, int, bool]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    root = tmp_path_factory.mktemp("turns")
    jobs: dict[str, tuple[Path, list[int], tuple[int, ...]]] = {}
    stored: dict[str, Answer] = {}
    for name in NAMES:
        write_tiny_model(root / name, config=CONFIGS[name], dtype=DTYPES[name])
        cache, bound = opened(root, name)
        stored[name] = run(bound, PROMPT, TURN_ENDS)[0]
        cache.close()
        for case_name, (prompt, _, chunk_ends, _) in CASES.items():
            jobs[f"{name}/{case_name}"] = (root / name, prompt, chunk_ends)
            jobs[f"{name}/{case_name}/grid"] = (
                root / name,
                prompt,
                tuple(range(STRIDE, len(prompt), STRIDE)),
            )
        jobs[f"{name}/fresh"] = (root / name, FRESH, FRESH_CHUNKS)
    expected = oracle(jobs)
    child = subprocess.run(
        [sys.executable, __file__, str(root)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    restored = {
        key: (answer, endpoint, is_mixed)
        for key, answer, endpoint, is_mixed in map(json.loads, child.stdout.splitlines())
    }
    return Outcomes(root=root, expected=expected, stored=stored, restored=restored)


def test_the_chunks_of_the_oracle_are_the_plan_of_the_prompt() -> None:
    """530 is closer than 64 to the stop at 512, which comes first."""
    grid = Grid(block_tokens=BLOCK_TOKENS, checkpoint_tokens=STRIDE)

    for prompt, turn_ends, chunk_ends, _ in CASES.values():
        assert Plan(grid, len(prompt), turn_ends).stops == chunk_ends


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stores_its_turns_gives_the_bits_of_the_plan(
    name: str, outcomes: Outcomes
) -> None:
    assert outcomes.stored[name] == outcomes.expected[f"{name}/replay"]


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_process_resumes_at_a_turn_and_gives_the_bits_of_the_plan(
    name: str, case_name: str, outcomes: Outcomes
) -> None:
    answer, endpoint, is_mixed = outcomes.restored[f"{name}/{case_name}"]
    blocks = list(range(BLOCK_TOKENS, 513, BLOCK_TOKENS)) if name == "llama" else []
    prompt, turn_ends, chunk_ends, expected_endpoint = CASES[case_name]
    same = next((at for at, each in enumerate(PROMPT) if prompt[at : at + 1] != [each]), 600)
    cut = max((each for each in blocks if each <= min(same, len(prompt) - 1)), default=0)

    assert endpoint == max(expected_endpoint, cut)
    assert turn_ends and chunk_ends
    # What llama cuts elsewhere is of no plan; all the others resume at a stop of their own.
    assert not is_mixed or name == "llama"
    assert answer == outcomes.expected[f"{name}/{case_name}"]


@pytest.mark.parametrize("name", PLAN_BOUND)
def test_without_the_stops_at_turns_a_plan_bound_model_has_other_bits(
    name: str, outcomes: Outcomes
) -> None:
    """Without such a witness the comparison could not fail for the sake of a stop off the grid."""
    for case_name in CASES:
        expected = outcomes.expected[f"{name}/{case_name}"]
        assert outcomes.expected[f"{name}/{case_name}/grid"][0] != expected[0]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "rwkv7"])
def test_plan_free_models_have_the_bits_of_the_grid(name: str, outcomes: Outcomes) -> None:
    for case_name in CASES:
        expected = outcomes.expected[f"{name}/{case_name}"]
        assert outcomes.expected[f"{name}/{case_name}/grid"] == expected


# A prompt that nobody stored beyond the second turn's end, and the chunks of its plan.
FRESH = [*PROMPT[:333], *token_ids(200, seed=8)]
FRESH_TURN_ENDS = (90, 333, 420)
FRESH_CHUNKS = (90, 256, 333, 420, 512)


# Mutants of the product. Each is put in place before a restore at a tail, and each must be seen.


def prefill_on_without_the_stops(patch: pytest.MonkeyPatch) -> None:
    """The rest of the prompt is one segment: a plan-bound model must notice."""

    def stops_after(self: Plan, position: int) -> tuple[int, ...]:
        return ()

    patch.setattr(Plan, "stops_after", stops_after)


def take_the_state_of_another_turn(patch: pytest.MonkeyPatch) -> None:
    """The KV of the second turn's end under the state of the first's."""
    import walkback.restore.choosing as module

    real: Any = module.match

    def match(view: Any, chain: Any, **options: Any) -> Any:
        found = real(view, chain, **options)
        candidate: Candidate = found.candidate
        tail = chain.ending_at(TURN_ENDS[0])
        other = view.sidecar(tail.key)
        assert other is not None and other != candidate.sidecar
        return dataclasses.replace(found, candidate=dataclasses.replace(candidate, sidecar=other))

    patch.setattr(module, "match", match)


def take_a_tail_for_one_token_longer(patch: pytest.MonkeyPatch) -> None:
    real: Any = MutableResumption.finish

    def finish(self: Any, make: Any) -> Any:
        outcome = real(self, make)
        return dataclasses.replace(outcome, endpoint=outcome.endpoint + 1)

    patch.setattr(MutableResumption, "finish", finish)


def leave_the_rows_of_a_tail_out(patch: pytest.MonkeyPatch) -> None:
    """The rows of the tail stay zero, and everything else is as it should be."""
    real: Any = restoration_module.MutableAssembly.block_segments

    def block_segments(self: Any, spec: Any, *, start: int, end: int) -> Any:
        found = real(self, spec, start=start, end=end)
        if end - start == BLOCK_TOKENS:
            return found
        return [memoryview(bytearray(len(each))) for each in found]

    patch.setattr(restoration_module.MutableAssembly, "block_segments", block_segments)


Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: tuple[tuple[str, Mutant], ...] = (
    *((name, prefill_on_without_the_stops) for name in PLAN_BOUND),
    *((name, take_the_state_of_another_turn) for name in ("qwen3_5", "falcon_h1", "rwkv7")),
    *((name, take_a_tail_for_one_token_longer) for name in ("qwen3_5", "nemotron_h", "rwkv7")),
    *((name, leave_the_rows_of_a_tail_out) for name in ("qwen3_5", "falcon_h1", "lfm2")),
)


@pytest.mark.parametrize(("name", "mutate"), MUTANTS)
def test_a_mutant_of_the_restore_at_a_turn_does_not_pass_for_the_plan(
    name: str, mutate: Mutant, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = outcomes.root / f"{mutate.__name__}.{name}"
    shutil.copytree(outcomes.root / f"{name}.cache", copy / f"{name}.cache")
    (copy / name).symlink_to(outcomes.root / name)
    cache, bound = opened(copy, name)

    with cache:
        mutate(monkeypatch)
        answer, endpoint, _ = run(bound, FRESH, FRESH_TURN_ENDS)

    assert endpoint in (333, 334)
    assert answer[0] != outcomes.expected[f"{name}/fresh"][0]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_mutants_are_held_against_is_what_the_product_gives(
    name: str, outcomes: Outcomes
) -> None:
    cache, bound = opened(outcomes.root, name)

    with cache:
        answer, endpoint, is_mixed = run(bound, FRESH, FRESH_TURN_ENDS)

    assert (endpoint, is_mixed) == (333, False)
    assert answer == outcomes.expected[f"{name}/fresh"]


if __name__ == "__main__":
    serve_child(Path(sys.argv[1]))
