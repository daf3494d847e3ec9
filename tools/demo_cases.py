"""The rows of the demo: what is asked of the cache, and where each prompt must resume."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..integration.binding import BoundModel
from ..integration.cache import Cache
from ..journal.words import Kind
from .demo_run import Run, Setup, made_up_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a prompt, where it must resume, and what is done to the cache before it."""

    name: str
    prompt: list[int]
    endpoint: int
    walkbacks: int = 0
    before: Callable[[Cache, BoundModel], None] | None = None


def step_of(setup: Setup, bound: BoundModel) -> int:
    """Where a prompt can be cut: plain attention at every block, point state at checkpoints."""
    assert bound.layout is not None
    return setup.checkpoint_tokens if bound.layout.has_point_state else setup.block_tokens


def first_tokens(setup: Setup) -> int:
    """The first prompt: four checkpoints and a rest."""
    return 4 * setup.checkpoint_tokens + setup.checkpoint_tokens // 3


def cases_of(
    setup: Setup, bound: BoundModel, first: list[int], vocabulary: int, runs: list[Run]
) -> Iterator[Callable[[], Case]]:
    """The rows, in order, each made when its turn comes: a next turn needs an answer before it."""
    stride = setup.checkpoint_tokens
    step = step_of(setup, bound)

    def resumes_at(token_count: int) -> int:
        return min(token_count // step * step, 4 * stride)

    def more(token_count: int, seed: int) -> list[int]:
        return made_up_prompt(token_count, seed=seed, vocabulary=vocabulary)

    yield lambda: Case(name="cold", prompt=first, endpoint=0)
    yield lambda: Case(name="exact replay", prompt=first, endpoint=4 * stride)
    for checkpoint in (3, 2, 1):
        length = checkpoint * stride + stride // 2
        yield lambda length=length: Case(
            name=f"rewind to {length}", prompt=first[:length], endpoint=resumes_at(length - 1)
        )
    yield lambda: Case(
        name="next turn",
        prompt=[*first, *runs[0].tokens, *more(stride // 4, seed=3)],
        endpoint=4 * stride,
    )
    middle = 2 * stride + stride // 4
    yield lambda: Case(
        name=f"edit at {middle}",
        prompt=[*first[:middle], *more(8, seed=4), *first[middle + 8 :]],
        endpoint=resumes_at(middle),
    )
    yield lambda: Case(
        name="newest sidecar deleted",
        prompt=first,
        endpoint=4 * stride - step,
        walkbacks=1,
        before=lambda cache, bound: _newest_path(cache, bound, first).unlink(),
    )
    yield lambda: Case(
        name="newest sidecar: a byte flipped",
        prompt=first,
        endpoint=4 * stride - step,
        walkbacks=1,
        before=lambda cache, bound: _flip_a_byte(_newest_path(cache, bound, first)),
    )
    yield lambda: Case(
        name=f"exactly {3 * stride} tokens",
        prompt=first[: 3 * stride],
        endpoint=resumes_at(3 * stride - 1),
    )


def _newest_path(cache: Cache, bound: BoundModel, prompt: list[int]) -> Path:
    """The file of a prompt's newest sidecar, or block if there are none: found as anybody could."""
    endpoint = bound.grid.stops(len(prompt))[-1]
    assert bound.layout is not None
    kind = Kind.SIDECAR if bound.layout.has_point_state else Kind.BLOCK
    state = {
        entry.key: entry
        for entry in cache.store.entries(kind)
        if entry.end == endpoint and entry.namespace == bound.namespace
    }
    entry = next(state[link.key] for link in bound.chain(prompt) if link.key in state)
    assert entry.file is not None
    return cache.store.files.root / entry.file.path


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 0x10
    path.write_bytes(content)
