"""Which entries go when room is needed: a pure choice over the folded state.

The order, each step only as far as it is needed:

1. what no restore can reach: blocks below a hole, deepest first; 2. the least recently used leaf
block, with its sidecar; its parent is then a leaf itself; 3. sidecars that have a live sidecar
below them, least recently used first, which makes the checkpoints
   of a long prompt sparser and keeps its newest: so the last checkpoint of a lineage goes last.

Superseded ends of answers have the lowest recency, so they are the first leaves.

What is protected (leased, pinned, in flight, already chosen) is passed over, and so is everything
above it, since only leaves go.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..journal.entries import Entry
from ..journal.state import State
from ..journal.words import EvictReason, Kind

POLICY = "lru-leaf-first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One entry to evict, and why."""

    kind: Kind
    key: bytes
    generation: int
    allocated_bytes: int
    reason: EvictReason


def choose_victims(
    state: State,
    *,
    need_bytes: int,
    reason: EvictReason,
    is_protected: Callable[[Entry], bool],
) -> list[Victim]:
    """Victims that free at least ``need_bytes`` together, in the order in which they must go.

    Fewer bytes come back only if nothing else may go. A block comes after its sidecar and after
    every block below it.
    """
    chosen: list[Victim] = []
    freed = 0
    for victims in _in_order(state, reason, is_protected):
        if freed >= need_bytes:
            break
        chosen.extend(victims)
        freed += sum(victim.allocated_bytes for victim in victims)
    return chosen


def _in_order(
    state: State, reason: EvictReason, is_protected: Callable[[Entry], bool]
) -> Iterator[list[Victim]]:
    gone: set[bytes] = set()
    children_left: dict[bytes, int] = {}
    # A block that has become a leaf takes its last child's place in the order: only endpoints are
    # touched, so it looks older than it is. As the fold does, when the tombstones are applied.
    handed: dict[bytes, int] = {}
    promoted: list[tuple[int, bytes]] = []

    def leave(block: Entry) -> None:
        """Count a child less above; a hole without children goes too."""
        parent = block.parent
        above = state.blocks.get(parent)
        if above is not None:
            recency = handed.get(block.key, block.recency)
            handed[parent] = max(handed.get(parent, above.recency), recency)
        while (hole := state.holes.get(parent)) is not None:
            children_left[parent] = children_left.get(parent, hole.child_count) - 1
            if children_left[parent]:
                return
            parent = hole.parent
        above = state.blocks.get(parent)
        if above is not None:
            children_left[parent] = children_left.get(parent, above.child_count) - 1
            if not children_left[parent]:
                heapq.heappush(promoted, (handed.get(parent, above.recency), parent))

    def take(block: Entry, why: EvictReason) -> list[Victim] | None:
        sidecar = state.sidecars.get(block.key)
        if is_protected(block) or (sidecar is not None and is_protected(sidecar)):
            return None
        gone.add(block.key)
        leave(block)
        pair = [] if sidecar is None else [_victim(sidecar, EvictReason.PAIR)]
        return [*pair, _victim(block, why)]

    def is_leaf(block: Entry) -> bool:
        return children_left.get(block.key, block.child_count) == 0

    for key in _unreachable(state):
        block = state.blocks[key]
        if is_leaf(block) and (victims := take(block, EvictReason.UNREACHABLE)):
            yield victims

    leaves = state.coldest_leaves()
    try:
        leaf = next(leaves, None)
        while leaf is not None or promoted:
            if leaf is not None and (not promoted or (leaf.recency, leaf.key) < promoted[0]):
                block = leaf
                leaf = next(leaves, None)
            else:
                block = state.blocks[heapq.heappop(promoted)[1]]
            if block.key not in gone and (victims := take(block, reason)):
                yield victims
    finally:
        leaves.close()

    for sidecar in _with_a_sidecar_below(state, gone):
        if not is_protected(sidecar):
            yield [_victim(sidecar, EvictReason.THINNED)]


def _unreachable(state: State) -> list[bytes]:
    """The blocks below holes, deepest first. Holes are rare, and without one this is free."""
    found = state.descendants(*state.holes) if state.holes else []
    return sorted(set(found), key=lambda key: (state.blocks[key].end, key), reverse=True)


def _with_a_sidecar_below(state: State, gone: set[bytes]) -> list[Entry]:
    """The sidecars that are not their lineage's last, least recently used first."""
    inner: set[bytes] = set()
    for key in state.sidecars:
        if key in gone:
            continue
        above = state.blocks[key].parent
        while above in state.blocks and above not in inner:
            inner.add(above)
            above = state.blocks[above].parent
    found = [entry for key, entry in state.sidecars.items() if key in inner and key not in gone]
    return sorted(found, key=lambda entry: entry.recency)


def _victim(entry: Entry, reason: EvictReason) -> Victim:
    return Victim(
        kind=entry.kind,
        key=entry.key,
        generation=entry.generation,
        allocated_bytes=entry.allocated_bytes,
        reason=reason,
    )
