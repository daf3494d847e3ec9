"""E0: a restored cache holds the captured bytes, and goes on like one that never left RAM.

The oracle is plain mlx-lm: its own cache, the same chunks, none of our code. The restore happens
in a fresh process, from files; one child serves all architectures. Mutants show that a difference
is seen.
"""

# mlx's stubs and mlx-lm's caches leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from zoo import CONFIGS, build, token_ids

from walkback.integration.capture import capture
from walkback.integration.leaves import walk_leaves
from walkback.integration.probe import learn_layout
from walkback.restore.layout import Layout
from walkback.restore.materialise import MutableAssembly
from walkback.store.tensors import Tensor, TensorSpec

# The plan: the ends of all chunks. A restore at STOP goes on with what is left of it.
PLAN = (256, 512, 560)
STOP = 512
RANGES = ((0, 256), (256, 512))
PROMPT = token_ids(561)
GREEDY_COUNT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a run did after STOP: a digest of all logits of each step, and the greedy token ids."""

    logits: list[str]
    token_ids: list[int]


def forward(model: Any, cache: list[Any], ids: list[int]) -> mx.array:
    """One chunk; the logits of its tokens, (tokens, vocabulary)."""
    logits = model(mx.array([ids]), cache=cache)[0].astype(mx.float32)
    mx.eval(logits, [leaf.state for leaf in cache])
    return logits


def prefill(model: nn.Module, cache: list[Any], *, start: int, ends: tuple[int, ...]) -> None:
    for end in ends:
        forward(model, cache, PROMPT[start:end])
        start = end


def go_on(model: nn.Module, cache: list[Any]) -> Continuation:
    """From STOP through the rest of the plan, the last token alone, then greedily."""
    last = PLAN[-1]
    digests = [digest_of(forward(model, cache, PROMPT[STOP:last]))]
    chosen, step = list[int](), PROMPT[last:]
    for _ in range(GREEDY_COUNT):
        logits = forward(model, cache, step)
        digests.append(digest_of(logits))
        chosen.append(cast(int, mx.argmax(logits).item()))
        step = chosen[-1:]
    return Continuation(logits=digests, token_ids=chosen)


def digest_of(logits: mx.array) -> str:
    return sha256(memoryview(cast(Any, logits))).hexdigest()


def oracle(model: nn.Module) -> Continuation:
    cache = make_prompt_cache(model)
    prefill(model, cache, start=0, ends=tuple(end for end in PLAN if end <= STOP))
    return go_on(model, cache)


def store(model: nn.Module, folder: Path) -> Continuation:
    """Capture at each stop of the plan, write what a payload would hold, and go on."""
    layout, cache = learn_layout(model), make_prompt_cache(model)
    for start, end in RANGES:
        prefill(model, cache, start=start, ends=(end,))
        stop = capture(cache, layout, position=end, ranges=[(start, end)], with_point=end == STOP)
        write(folder / f"block-{start}-{end}", stop.blocks[0])
        if end == STOP:
            write(folder / "point", stop.point)
    return go_on(model, cache)


def write(path: Path, tensors: tuple[Tensor, ...]) -> None:
    header = json.dumps([(t.spec.name, t.spec.dtype, t.spec.shape) for t in tensors]).encode()
    with path.open("wb") as file:
        file.write(header + b"\n")
        for tensor in tensors:
            file.write(tensor.buffer)


def read(path: Path, segments_of: Callable[[TensorSpec], list[memoryview]]) -> None:
    with path.open("rb", buffering=0) as file:
        header = json.loads(file.readline())
        for each in header:
            name, dtype, shape = each
            spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
            for segment in segments_of(spec):
                assert file.readinto(segment) == segment.nbytes


def restore(model: nn.Module, folder: Path) -> tuple[Layout, list[Any]]:
    layout = learn_layout(model)
    assembly = MutableAssembly(layout, endpoint=STOP, capacity_tokens=STOP + 100)
    for start, end in RANGES:
        read(
            folder / f"block-{start}-{end}",
            lambda spec, start=start, end=end: assembly.block_segments(spec, start=start, end=end),
        )
    read(folder / "point", assembly.point_segments)
    return layout, assembly.finish(lambda: make_prompt_cache(model))


def stored_bytes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def captured_again(layout: Layout, cache: list[Any], folder: Path) -> dict[str, str]:
    """The digests of the files that a capture of the restored cache would write."""
    folder.mkdir()
    stop = capture(cache, layout, position=STOP, ranges=RANGES, with_point=True)
    for (start, end), block in zip(RANGES, stop.blocks, strict=True):
        write(folder / f"block-{start}-{end}", block)
    write(folder / "point", stop.point)
    return stored_bytes(folder)


def serve_child(root: Path) -> None:
    """In the fresh process: restore everything and print what it holds and how it goes on."""
    for name in CONFIGS:
        model = build(name)
        layout, cache = restore(model, root / name)
        held = captured_again(layout, cache, root / f"{name}-again")
        print(json.dumps([name, held, asdict(go_on(model, cache))]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    expected: Continuation
    went_on: Continuation
    restored: Continuation
    stored: dict[str, str]
    held: dict[str, str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each architecture has a folder of what a run captured."""
    return tmp_path_factory.mktemp("e0")


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[str, Outcome]:
    went_on: dict[str, Continuation] = {}
    for name in CONFIGS:
        (root / name).mkdir()
        went_on[name] = store(build(name), root / name)
    source = Path(__file__).parent.parent / "src"
    child = subprocess.run(
        [sys.executable, __file__, str(root)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    restored = {line[0]: line for line in map(json.loads, child.stdout.splitlines())}
    return {
        name: Outcome(
            expected=oracle(build(name)),
            went_on=went_on[name],
            restored=Continuation(**restored[name][2]),
            stored=stored_bytes(root / name),
            held=restored[name][1],
        )
        for name in CONFIGS
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_restored_bytes_are_captured_bytes(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].held == outcomes[name].stored
    assert len(outcomes[name].held) == 3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_process_goes_on_bit_for_bit_like_a_cache_that_never_left_ram(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    assert outcomes[name].restored == outcomes[name].expected
    assert len(outcomes[name].restored.logits) == 1 + GREEDY_COUNT


@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_cache_goes_on_as_if_it_had_not_been_captured(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    assert outcomes[name].went_on == outcomes[name].expected


def first_slots(cache: list[Any]) -> list[Any]:
    """The slots of the first leaf of arrays: a window at 0 and a recurrent state at 1, mostly."""
    return next(leaf.cache for _, leaf in walk_leaves(cache) if hasattr(leaf, "cache"))


def flip_one_bit(cache: list[Any]) -> None:
    """The lowest bit of the exponent of the largest number of a recurrent state."""
    slots = first_slots(cache)
    state: mx.array = slots[1]
    words, bit = (mx.uint32, 1 << 23) if state.dtype == mx.float32 else (mx.uint16, 1 << 7)
    flat = mx.array(state).view(words).reshape(-1)
    index = cast(int, mx.argmax(mx.abs(state.reshape(-1))).item())
    flat[index] = flat[index] ^ bit
    slots[1] = flat.view(state.dtype).reshape(state.shape)


def forget_one_state(cache: list[Any]) -> None:
    slots = first_slots(cache)
    slots[1] = mx.zeros_like(slots[1])


def shift_position_by_one(cache: list[Any]) -> None:
    for _, leaf in walk_leaves(cache):
        if hasattr(leaf, "offset"):
            leaf.offset -= 1


def rotate_rows_by_one(cache: list[Any]) -> None:
    for _, leaf in walk_leaves(cache):
        if hasattr(leaf, "offset"):
            leaf.keys[:, :, :STOP] = mx.roll(leaf.keys[:, :, :STOP], 1, 2)


def drop_one_row_of_a_window(cache: list[Any]) -> None:
    slots = first_slots(cache)
    slots[0] = mx.concatenate([mx.zeros_like(slots[0][:, :1]), slots[0][:, :-1]], axis=1)


RECURRENT = ("qwen3_5", "qwen3_next", "falcon_h1", "nemotron_h", "rwkv7")
MUTANTS = (
    *((name, flip_one_bit) for name in RECURRENT),
    ("llama", shift_position_by_one),
    ("qwen3_5", shift_position_by_one),
    ("nemotron_h", rotate_rows_by_one),
    ("falcon_h1", drop_one_row_of_a_window),
    ("lfm2", drop_one_row_of_a_window),
    ("qwen3_5", drop_one_row_of_a_window),
)


@pytest.mark.parametrize(("name", "mutate"), MUTANTS)
def test_a_mutant_of_the_restored_cache_does_not_pass_for_the_oracle(
    name: str, mutate: Callable[[list[Any]], None], root: Path, outcomes: dict[str, Outcome]
) -> None:
    model = build(name)
    _, cache = restore(model, root / name)

    mutate(cache)

    assert go_on(model, cache).logits[0] != outcomes[name].expected.logits[0]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_witness_still_remembers_its_state_fifty_tokens_later(
    name: str, root: Path, outcomes: dict[str, Outcome]
) -> None:
    """Weights as architectures start them forget within a few tokens, and prove nothing."""
    model = build(name)
    _, cache = restore(model, root / name)

    forget_one_state(cache)

    assert go_on(model, cache).logits[1] != outcomes[name].expected.logits[1]


if __name__ == "__main__":
    serve_child(Path(sys.argv[1]))
