"""Where prefill stops, and how a plan of stops is named. Pure.

A plan is a function of the prompt and the settings: stops stand on an absolute grid of
``checkpoint_tokens``, counted from the start of the prompt, and off it where a conversation may go
on from: the ends of its turns, of the system prompt, the junction of two prompts. Segments run
from stop to stop, and chunks count from a segment's start. After a restore the next grid stop
realigns; there is no extra chunk.

Of stops closer than ``merge_tokens`` the earlier wins, and the start counts as one. So whether a
prefix stops somewhere is decided by what stands before that place, and a longer prompt with the
same beginning stops there too: only a junction depends on what the cache has seen.

No stop stands inside an image: one that would is left out, and prefill goes on to the next. Moved
to the image's start, it would depend on what stands behind that place.

Kernels that regroup tokens from the start of a chunk give other bits under another plan, so each
payload records the digest of the plan that led to it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from ..journal.errors import SettingsError
from .images import ImageSpan, is_inside

# Mamba2's kernels regroup every 256 tokens from the start of a chunk: only multiples of it are
# safe.
GRID_TOKENS = 256

# Of a prompt without turns the last stop is this much before its end: a tokenizer may join the last
# token ids of a text with the first of what is written behind it.
PROMPT_END_TOKENS = 4

_CONTEXT = "walkback 2026 plan v1"
_UNKNOWN = "walkback 2026 plan of unknown stops v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The settings of plans: KV is cut every ``block_tokens``, prefill stops every
    ``checkpoint_tokens``, which is the prefill step too.

    Of the stops off the grid a prompt keeps the state of at most ``turn_checkpoints_max``: the
    first, which is the end of a system prompt if there is one, and the last. So a prompt of n
    tokens has at most n / checkpoint_tokens + turn_checkpoints_max checkpoints.

    With ``junctions`` a prompt also stops where it parts from others that were seen. That serves
    the next prompt which parts there, and makes a plan depend on what the cache holds: the bits of
    a plan-bound model are then those of another chunking than a run without a cache has.
    """

    block_tokens: int = 256
    checkpoint_tokens: int = 2048
    merge_tokens: int = 64
    turn_checkpoints_max: int = 32
    junctions: bool = False

    def __post_init__(self) -> None:
        for name in ("block_tokens", "checkpoint_tokens", "merge_tokens", "turn_checkpoints_max"):
            if type(getattr(self, name)) is not int:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; it must be an int")
        if self.block_tokens < 1 or self.checkpoint_tokens < 1:
            raise SettingsError("block_tokens and checkpoint_tokens must be at least 1")
        if self.merge_tokens < 1 or self.turn_checkpoints_max < 0:
            raise SettingsError("merge_tokens must be at least 1, turn_checkpoints_max at least 0")
        if self.checkpoint_tokens % self.block_tokens:
            raise SettingsError(
                f"checkpoint_tokens is {self.checkpoint_tokens}, which is not a multiple of "
                f"block_tokens, {self.block_tokens}"
            )

    @property
    def is_chunk_safe(self) -> bool:
        """Whether every chunk of a plan starts where kernels regroup, turns left aside."""
        return self.checkpoint_tokens % GRID_TOKENS == 0

    @property
    def distance(self) -> int:
        """The smallest distance of two stops: those of the grid are never too close."""
        return min(self.merge_tokens, self.checkpoint_tokens)

    def stops(self, prompt_tokens: int) -> range:
        """The stops of a prompt. The last token is never cached: it must be left to compute."""
        return range(self.checkpoint_tokens, prompt_tokens, self.checkpoint_tokens)

    def is_on_grid(self, position: int) -> bool:
        return position % self.checkpoint_tokens == 0

    def stop_of(self, position: int) -> int:
        """The grid stop at which the token before ``position`` is captured, without turns."""
        return -(-position // self.checkpoint_tokens) * self.checkpoint_tokens


class Plan:
    """The stops of one prompt, and which of them keep their state. Never changes."""

    def __init__(
        self,
        grid: Grid,
        prompt_tokens: int,
        turn_ends: Iterable[int] = (),
        *,
        junction: int | None = None,
        images: Sequence[ImageSpan] = (),
        turning_point: int | None = None,
    ) -> None:
        """Plan a prompt. ``turn_ends`` are positions, in any order; those outside are left out, and
        those inside one of the ``images``, which are in order.

        A junction is where prompts that the cache has seen part ways. It makes way for any stop
        that is close, and is no stop unless the grid says so. A ``turning_point`` is the stop of
        the grid at which the cache takes another form: it is one however close the stop before it.
        """
        self.grid = grid
        self.prompt_tokens = prompt_tokens
        self._images = images
        if junction is not None and (
            not 0 < junction < prompt_tokens or is_inside(images, junction)
        ):
            junction = None
        stops = list(_apart(grid, prompt_tokens, turn_ends, images, turning_point))
        if grid.junctions and junction is not None:
            at = bisect_left(stops, junction)
            near = [0, *stops[max(at - 1, 0) : at + 1]]
            if all(abs(each - junction) >= grid.distance for each in near):
                stops.insert(at, junction)
        self.stops: tuple[int, ...] = tuple(stops)
        off_grid = [each for each in stops if not grid.is_on_grid(each)]
        kept = max(grid.turn_checkpoints_max - 1, 0)
        thinned = off_grid[min(1, grid.turn_checkpoints_max) : max(len(off_grid) - kept, 0)]
        # Prefill stops there all the same: the bits of a prompt do not depend on its length.
        self._without_state = frozenset(thinned)
        self._digests = [plan_start(grid)]
        for stop in stops:
            self._digests.append(plan_after(self._digests[-1], stop))

    def keeps_state_at(self, stop: int) -> bool:
        """Whether the state of a stop is worth storing, or only the KV that leads there."""
        return stop not in self._without_state

    def passes(self, endpoint: int) -> bool:
        """Whether a prompt that resumes there leaves it behind for good: a tail at no stop of it.

        So it is the end of an answer, or of a text that was written on. Longer prompts resume at
        the stops of this one, and the next tail stands at none of theirs either.
        """
        return endpoint % self.grid.block_tokens != 0 and endpoint not in self.stops

    def stops_after(self, position: int) -> tuple[int, ...]:
        return self.stops[bisect_right(self.stops, position) :]

    def digest_of(self, end: int) -> bytes:
        """The digest of the plan up to the stop at which a block that ends at ``end`` is captured.

        Behind the last stop the plan goes on along the grid, as that of a longer prompt would.
        """
        at = bisect_left(self.stops, end)
        if at < len(self.stops):
            return self._digests[at + 1]
        digest, reached = self._digests[-1], self.stops[-1] if self.stops else 0
        stride = self.grid.checkpoint_tokens
        stop = reached // stride * stride
        while reached < end:
            stop += stride
            if not is_inside(self._images, stop):
                digest, reached = plan_after(digest, stop), stop
        return digest


def plan_digests(grid: Grid, position: int) -> Iterator[tuple[int, bytes]]:
    """Each grid stop up to ``position`` with the digest of the plan without turns up to it."""
    plan = Plan(grid, position + 1)
    return ((stop, plan.digest_of(stop)) for stop in plan.stops)


def plan_start(grid: Grid) -> bytes:
    """The digest of a plan without stops."""
    content = grid.checkpoint_tokens.to_bytes(8, "little")
    return blake3(content, derive_key_context=_CONTEXT).digest()


def plan_after(digest: bytes, stop: int) -> bytes:
    """The digest of a plan that goes on to ``stop``."""
    content = digest + stop.to_bytes(8, "little")
    return blake3(content, derive_key_context=_CONTEXT).digest()


def plan_after_decoding(digest: bytes, start: int, stop: int) -> bytes:
    """The digest of a plan whose last segment was decoded token by token from ``start`` on.

    No prompt has such a plan: whoever prefills those tokens does it in chunks.
    """
    content = digest + start.to_bytes(8, "little") + stop.to_bytes(8, "little")
    return blake3(content, derive_key_context=_CONTEXT).digest()


def plan_of_unknown_stops(position: int) -> bytes:
    """The digest of a plan of which only its end is known: no prompt's is the same."""
    return blake3(position.to_bytes(8, "little"), derive_key_context=_UNKNOWN).digest()


def _apart(
    grid: Grid,
    prompt_tokens: int,
    turn_ends: Iterable[int],
    images: Sequence[ImageSpan],
    turning_point: int | None,
) -> Iterator[int]:
    """The stops of the grid and the ends of turns, each far enough behind the one before.

    Only the turning point may be closer.
    """
    last = 0
    for stop in sorted({*grid.stops(prompt_tokens), *turn_ends}):
        is_far_enough = last + grid.distance <= stop or stop == turning_point
        if is_far_enough and stop < prompt_tokens and not is_inside(images, stop):
            yield stop
            last = stop
