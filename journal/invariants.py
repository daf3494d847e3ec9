"""What must be true of a folded state, whatever happened. One sentence for each violation."""

from collections import Counter
from collections.abc import Iterator

from .state import State
from .words import FileName


def violations(state: State) -> Iterator[str]:
    """Every broken invariant of the state alone, without a look at the disk."""
    yield from _of_the_chains(state)
    yield from _of_the_names(state)
    yield from _of_the_ledger(state)


def _of_the_chains(state: State) -> Iterator[str]:
    children: Counter[bytes] = Counter()
    for block in (*state.blocks.values(), *state.holes.values()):
        children[block.parent] += 1
        above = state.blocks.get(block.parent)
        if above is None and block.parent not in state.holes and block.parent != block.namespace:
            yield f"block {block.key.hex()[:16]} has no parent"
        if above is not None and above.namespace != block.namespace:
            yield f"block {block.key.hex()[:16]} and its parent are of different namespaces"
    for entry in state.blocks.values():
        above = state.blocks.get(entry.parent)
        start = above.end if above is not None else 0
        if entry.parent not in state.holes and entry.start != start:
            yield f"block {entry.key.hex()[:16]} starts at {entry.start}, not at {start}"
        if entry.end <= entry.start:
            yield f"block {entry.key.hex()[:16]} holds no tokens"
        if entry.child_count != children[entry.key]:
            yield f"block {entry.key.hex()[:16]} counts {entry.child_count} children"
        length = entry.end - entry.start
        may_be_tail = above is None or length < above.end - above.start
        # Below a hole it depends on what stood there before.
        is_counted = length in state.short_lengths(entry.parent)
        if may_be_tail and not is_counted and entry.parent not in state.holes:
            yield f"block {entry.key.hex()[:16]} may be a tail and no lookup can know"
    if sum(entry.is_short for entry in state.blocks.values()) != sum(
        lengths.total() for lengths in state.short.values()
    ):
        yield "blocks that are gone are still counted as tails"
    for hole in state.holes.values():
        if not children[hole.key] or hole.child_count != children[hole.key]:
            yield f"hole {hole.key.hex()[:16]} counts {hole.child_count} children"
        if hole.key in state.blocks:
            yield f"{hole.key.hex()[:16]} is live and a hole"
    for sidecar in state.sidecars.values():
        block = state.blocks.get(sidecar.key)
        if block is None:
            yield f"sidecar {sidecar.key.hex()[:16]} has no block"
        elif sidecar.end != block.end:
            yield f"sidecar {sidecar.key.hex()[:16]} is of another position than its block"


def _of_the_names(state: State) -> Iterator[str]:
    names: Counter[FileName] = Counter()
    for entry in (*state.blocks.values(), *state.sidecars.values()):
        if entry.file is not None:
            names[entry.file] += 1
    for table in (state.doomed, state.quarantined, state.staged):
        names.update(table.keys())
    for file in state.staged:
        if file.epoch not in state.unswept:
            yield f"{file.path} is staged by epoch {file.epoch}, which has ended"
    for file, count in names.items():
        if count > 1:
            yield f"{file.path} is named {count} times"
    for table in (state.blocks, state.sidecars):
        recencies = Counter(entry.recency for entry in table.values())
        for recency, count in recencies.items():
            if count > 1:
                yield f"{count} entries share the recency {recency}"


def _of_the_ledger(state: State) -> Iterator[str]:
    for table, nbytes in state.sum_of_charges().items():
        charged = state.charges[table]
        if charged != nbytes:
            yield f"the ledger says {charged} bytes of {table.decode()}, the files are {nbytes}"
    refused = sum(bool(doomed.refusals) for doomed in state.doomed.values())
    if state.refused_count != refused:
        yield f"{refused} deletions were refused, the state counts {state.refused_count}"
