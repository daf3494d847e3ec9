"""E1: what the public facade restores in a fresh process gives the bits of plain mlx-lm.

Three processes. One stores a prompt; a fresh one replays it, rewinds it, edits it and goes on with
the next turn; a third, which never imports walkback, runs every prompt with mlx-lm alone and the
same stops. Mutants and a witness show that a difference is seen.
"""

# mlx's stubs, mlx-lm's caches and its loader leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model
from zoo import CONFIGS, DTYPES, token_ids

import walkback
import walkback.integration.restoration as restoration_module
import walkback.restore.choosing as choosing_module
from walkback.integration.leaves import walk_leaves
from walkback.integration.tiny import write_tiny_model
from walkback.restore.identity import Chain
from walkback.restore.materialise import MutableAssembly
from walkback.restore.walkback import MutableResumption
from walkback.tools.oracle import FirstLogits

ROOT = Path(__file__).parent.parent

# A stride on the grid of 256, so that every chunk of every plan starts where kernels regroup.
BLOCK_TOKENS = 64
STRIDE = 256
GREEDY_COUNT = 16
PROMPT = token_ids(600)
OTHER_PROMPT = token_ids(600, seed=2)

# Reads jobs, one a line: a model's directory, a prompt and the prefill step. Last it says whether
# walkback was ever imported.
ORACLE = """
import json, runpy, sys
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

FirstLogits = runpy.run_path(sys.argv[1])["FirstLogits"]
models = {}
for line in sys.stdin:
    directory, prompt, step, count = json.loads(line)
    first = FirstLogits()
    if directory not in models:
        models[directory] = load_model(__import__("pathlib").Path(directory))[0]
    generated = generate_step(
        mx.array(prompt),
        models[directory],
        prefill_step_size=step,
        max_tokens=count,
        logits_processors=[first],
    )
    tokens = [int(token) for token, _ in generated]
    print(json.dumps({"logits": first.digest(), "tokens": tokens}))
print(json.dumps("walkback" in sys.modules))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A digest of the raw logits of the next token, and the greedy token ids from there on."""

    logits: str
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run over the cache, and where it resumed."""

    answer: Answer
    endpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt that another process sends after PROMPT was stored, and where it resumes."""

    make: Callable[[list[int]], list[int]]
    endpoint: int
    # Without point state a prefix is cut after any block, not only at a checkpoint.
    endpoint_of_llama: int


def edited(at: int) -> list[int]:
    """PROMPT with eight other token ids at a position."""
    changed = [(each + 1) % 512 for each in PROMPT[at : at + 8]]
    return [*PROMPT[:at], *changed, *PROMPT[at + 8 :]]


CASES = {
    "replay": Case(make=lambda _: PROMPT, endpoint=512, endpoint_of_llama=512),
    "rewind": Case(make=lambda _: PROMPT[:400], endpoint=256, endpoint_of_llama=384),
    "late edit": Case(make=lambda _: edited(560), endpoint=512, endpoint_of_llama=512),
    # llama resumes inside a stride here, and realigns at the next stop.
    "early edit": Case(make=lambda _: edited(400), endpoint=256, endpoint_of_llama=384),
    "next turn": Case(
        make=lambda answer: [*PROMPT, *answer, *token_ids(60, seed=3)],
        endpoint=512,
        endpoint_of_llama=512,
    ),
}
# Which architectures another plan gives other bits, on a CPU.
PLAN_BOUND = ("falcon_h1", "nemotron_h")
OFF_GRID_STEP = 200


def run(bound: walkback.BoundModel, prompt: list[int]) -> Ran:
    restorations: list[walkback.Restoration] = []
    first = FirstLogits()
    generated = bound.generate_step(
        prompt,
        max_tokens=GREEDY_COUNT,
        logits_processors=[first],
        on_restore=restorations.append,
    )
    tokens = [int(token) for token, _ in generated]
    return Ran(
        answer=Answer(logits=first.digest(), tokens=tokens), endpoint=restorations[0].endpoint
    )


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
    for line in sys.stdin:
        name, answer = json.loads(line)
        cache, bound = opened(root, name)
        for case_name, case in CASES.items():
            ran = run(bound, case.make(answer))
            cache.flush()
            print(json.dumps([name, case_name, asdict(ran.answer), ran.endpoint]))
        violations = cache.violations()
        assert violations == [], violations
        cache.close()


class Oracle:
    """mlx-lm alone, in a process of its own. Jobs are collected, then run, equal ones once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._jobs: dict[str, str] = {}

    def add(self, key: str, name: str, prompt: list[int], step: int = STRIDE) -> None:
        self._jobs[key] = json.dumps([str(self._root / name), prompt, step, GREEDY_COUNT])

    def run(self) -> dict[str, Answer]:
        lines = list(dict.fromkeys(self._jobs.values()))
        done = subprocess.run(
            [sys.executable, "-c", ORACLE, str(ROOT / "tools" / "oracle.py")],
            input="\n".join(lines),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        *answers, imported_walkback = map(json.loads, done.stdout.splitlines())
        assert imported_walkback is False
        found = dict(zip(lines, answers, strict=True))
        return {key: Answer(**found[job]) for key, job in self._jobs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Where the models and caches are, what plain mlx-lm says, and what the runs said."""

    root: Path
    expected: dict[str, Answer]
    storing: dict[str, Ran]
    restored: dict[str, Ran]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    root = tmp_path_factory.mktemp("e1")
    oracle = Oracle(root)
    storing: dict[str, Ran] = {}
    for name, config in CONFIGS.items():
        write_tiny_model(root / name, config=config, dtype=DTYPES[name])
        cache, bound = opened(root, name)
        storing[name] = run(bound, PROMPT)
        cache.close()
        oracle.add(f"{name}/cold", name, PROMPT)
        for case_name, case in CASES.items():
            oracle.add(f"{name}/{case_name}", name, case.make(storing[name].answer.tokens))
    for name in PLAN_BOUND:
        oracle.add(f"{name}/another plan", name, PROMPT, OFF_GRID_STEP)
    for name, mutate in MUTANTS:
        if mutate is ignore_token_ids_in_keys:
            oracle.add(f"{name}/other prompt", name, OTHER_PROMPT)
    with subprocess.Popen(
        [sys.executable, __file__, str(root)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.writelines(
            json.dumps([name, ran.answer.tokens]) + "\n" for name, ran in storing.items()
        )
        child.stdin.close()
        expected = oracle.run()
        lines = [json.loads(line) for line in child.stdout]
    assert child.returncode == 0
    return Outcomes(
        root=root,
        expected=expected,
        storing=storing,
        restored={
            f"{name}/{case_name}": Ran(answer=Answer(**answer), endpoint=endpoint)
            for name, case_name, answer, endpoint in lines
        },
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_that_stores_gives_the_bits_of_plain_mlx_lm(name: str, outcomes: Outcomes) -> None:
    stored = outcomes.storing[name]

    assert stored.endpoint == 0
    assert stored.answer == outcomes.expected[f"{name}/cold"]
    assert len(stored.answer.tokens) == GREEDY_COUNT


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_process_resumes_and_gives_the_bits_of_plain_mlx_lm(
    name: str, case_name: str, outcomes: Outcomes
) -> None:
    case = CASES[case_name]
    restored = outcomes.restored[f"{name}/{case_name}"]

    assert restored.endpoint == (case.endpoint_of_llama if name == "llama" else case.endpoint)
    assert restored.answer == outcomes.expected[f"{name}/{case_name}"]


@pytest.mark.parametrize("name", PLAN_BOUND)
def test_another_plan_changes_the_bits_of_a_plan_bound_model(name: str, outcomes: Outcomes) -> None:
    """Without such a witness the comparison could not fail for the sake of a plan."""
    expected = outcomes.expected

    assert expected[f"{name}/another plan"].logits != expected[f"{name}/cold"].logits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_that_differs_late_has_other_logits(name: str, outcomes: Outcomes) -> None:
    """Without such a witness a model that forgets would make every comparison pass."""
    expected = outcomes.expected

    assert expected[f"{name}/late edit"].logits != expected[f"{name}/replay"].logits


# Mutants of the product. Each is put in place before a restore, and each must be seen.


def restore_one_checkpoint_too_early(patch: pytest.MonkeyPatch) -> None:
    """The cache stands at the first checkpoint, and the restore says the second."""
    begin: Any = MutableResumption.__init__
    real: Any = MutableResumption.finish

    def begin_shorter(self: Any, store: Any, lookup: Any, **options: Any) -> None:
        chain = Chain(
            PROMPT[: STRIDE + 1],
            namespace=lookup.namespace,
            secret=store.secret,
            block_tokens=BLOCK_TOKENS,
        )
        begin(self, store, dataclasses.replace(lookup, chain=chain), **options)

    def finish(self: Any, make: Any) -> Any:
        outcome = real(self, make)
        assert outcome.endpoint == STRIDE
        return dataclasses.replace(outcome, endpoint=2 * STRIDE)

    patch.setattr(MutableResumption, "__init__", begin_shorter)
    patch.setattr(MutableResumption, "finish", finish)


def shift_offsets_by_one(patch: pytest.MonkeyPatch) -> None:
    real: Any = MutableAssembly.finish

    def finish(self: MutableAssembly, make_cache: Any) -> list[Any]:
        cache = real(self, make_cache)
        for _, leaf in walk_leaves(cache):
            if hasattr(leaf, "offset"):
                leaf.offset -= 1
        return cache

    patch.setattr(MutableAssembly, "finish", finish)


def take_the_sidecar_of_another_boundary(patch: pytest.MonkeyPatch) -> None:
    real: Any = choosing_module.match

    def match(view: Any, chain: Any, **options: Any) -> Any:
        found = real(view, chain, **options)
        other = view.sidecar(found.blocks[STRIDE // BLOCK_TOKENS - 1].key)
        assert other is not None and other != found.candidate.sidecar
        return dataclasses.replace(
            found, candidate=dataclasses.replace(found.candidate, sidecar=other)
        )

    patch.setattr(choosing_module, "match", match)


def swap_the_values_of_two_blocks(patch: pytest.MonkeyPatch) -> None:
    """Swapping the keys with them is no mutant: attention does not ask in which order rows stand,
    and keys were rotated before they were stored.
    """
    real: Any = MutableAssembly.block_segments
    swapped = {0: 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS: 0}

    def block_segments(self: MutableAssembly, spec: Any, *, start: int, end: int) -> Any:
        if spec.name.endswith("/values"):
            start = swapped.get(start, start)
        return real(self, spec, start=start, end=start + BLOCK_TOKENS)

    patch.setattr(MutableAssembly, "block_segments", block_segments)


def ignore_token_ids_in_keys(patch: pytest.MonkeyPatch) -> None:
    """Another prompt's KV and state stand under this prompt's keys."""

    def chain(token_ids: list[int], **options: Any) -> Any:
        return Chain(PROMPT[: len(token_ids)], **options)

    patch.setattr(restoration_module, "Chain", chain)


Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: tuple[tuple[str, Mutant], ...] = (
    *(
        (name, restore_one_checkpoint_too_early)
        for name in ("llama", "qwen3_5", "falcon_h1", "lfm2", "rwkv7")
    ),
    *((name, shift_offsets_by_one) for name in ("llama", "falcon_h1", "nemotron_h", "lfm2")),
    *(
        (name, take_the_sidecar_of_another_boundary)
        for name in ("qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "rwkv7")
    ),
    *((name, swap_the_values_of_two_blocks) for name in ("llama", "qwen3_next", "nemotron_h")),
    *((name, ignore_token_ids_in_keys) for name in ("llama", "qwen3_5", "rwkv7")),
)


@pytest.mark.parametrize(("name", "mutate"), MUTANTS)
def test_a_mutant_of_the_restore_does_not_pass_for_plain_mlx_lm(
    name: str, mutate: Mutant, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_other = mutate is ignore_token_ids_in_keys
    expected = outcomes.expected[f"{name}/other prompt" if is_other else f"{name}/replay"]
    cache, bound = opened(outcomes.root, name)

    with cache:
        mutate(monkeypatch)
        ran = run(bound, OTHER_PROMPT if is_other else PROMPT)

    assert ran.endpoint == 2 * STRIDE
    assert ran.answer.logits != expected.logits


if __name__ == "__main__":
    serve_child(Path(sys.argv[1]))
