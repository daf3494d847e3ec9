"""Reading all that a cache holds as a restore does, and storing again what is not there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from walkback.journal.words import Kind
from walkback.restore.choosing import Lookup
from walkback.restore.identity import BlockLink, Chain
from walkback.restore.layout import Layout
from walkback.restore.plan import Grid, Plan
from walkback.restore.walkback import Resumed, resume
from walkback.store.store import MutableStore
from walkback.store.tensors import TensorSpec

from .specimen import BARE, PLACES, boundary_of, chain_of, entries_of
from .world import EntryId, key, put
from .world import state_of as state_in

HEALED = 9

_BLOCK_BYTES, _SIDECAR_BYTES = (len(each) for each in entries_of("a1", 1).values())
_GRID = Grid(block_tokens=4, checkpoint_tokens=4)


class PlainLayout(Layout):
    """One tensor for each payload, as the histories store them; ``is_bare`` blocks have none."""

    is_bare = False

    @property
    def has_point_state(self) -> bool:
        return True

    def digest(self) -> bytes:
        return b"l" * 32

    def block_specs(self, start: int, end: int) -> tuple[TensorSpec, ...]:
        return () if self.is_bare else (TensorSpec(name="0", dtype="U8", shape=(_BLOCK_BYTES,)),)

    def point_specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="0", dtype="U8", shape=(_SIDECAR_BYTES,)),)


class BareLayout(PlainLayout):
    is_bare = True


@dataclass(slots=True)
class Buffers:
    """What one restore fills."""

    endpoint: int
    blocks: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    point: bytearray = field(default_factory=bytearray)

    def block_segments(self, spec: TensorSpec, *, start: int, end: int) -> list[memoryview]:
        buffer = self.blocks[end] = bytearray(spec.nbytes)
        return [memoryview(buffer)]

    def point_segments(self, spec: TensorSpec) -> list[memoryview]:
        self.point = bytearray(spec.nbytes)
        return [memoryview(self.point)]


class NamedChain(Chain):
    """The chain of blocks that have a name for a key, and a token behind them."""

    def __init__(self, links: tuple[BlockLink, ...]) -> None:
        super().__init__(
            [0] * (4 * len(links) + 1),
            namespace=links[0].parent,
            secret=bytes(32),
            block_tokens=_GRID.block_tokens,
        )
        self.links = links


def lookup_of(name: str) -> Lookup:
    """A prompt that ends one token after this block."""
    place, names = PLACES[name], chain_of(name)
    namespace = key(place.namespace)
    links = tuple(
        BlockLink(
            key=key(each),
            parent=key(PLACES[each].parent or place.namespace),
            start=4 * depth,
            end=4 * depth + 4,
        )
        for depth, each in enumerate(names)
    )
    return Lookup(
        request=1,
        namespace=namespace,
        fields=(),
        layout=(BareLayout if name in BARE else PlainLayout)(leaves=()),
        chain=NamedChain(links),
        plan=Plan(_GRID, 4 * len(names) + 1),
    )


def restored(
    store: MutableStore, name: str, on_assembly: Callable[[], None] = lambda: None
) -> dict[EntryId, bytes]:
    """What a restore of the prompt that ends with ``name`` serves; nothing if it misses.

    ``on_assembly`` is called when it has chosen what to read, and read nothing yet.
    """
    counts = store._core.counts  # pyright: ignore[reportPrivateUsage]
    hits = counts.restores

    def make(endpoint: int) -> Buffers:
        on_assembly()
        return Buffers(endpoint)

    found = resume(store, lookup_of(name), make_assembly=make, finish=lambda buffers: buffers)
    assert counts.restores - hits == isinstance(found, Resumed), "a hit was miscounted"
    if not isinstance(found, Resumed):
        return {}
    names = chain_of(name)[: found.endpoint // 4]
    blocks = {
        (Kind.BLOCK, key(each)): bytes(found.made.blocks.get(4 * depth + 4, b""))
        for depth, each in enumerate(names)
    }
    return {**blocks, (Kind.SIDECAR, key(names[-1])): bytes(found.made.point)}


def restored_whole(store: MutableStore) -> dict[EntryId, bytes]:
    """What restores of all prompts serve; they never differ about an entry.

    What was served counts as used, and nothing else.
    """
    recencies = _recencies(store)
    served: dict[EntryId, bytes] = {}
    tips: set[bytes] = set()
    for name in PLACES:
        found = restored(store, name)
        tips |= {each for kind, each in found if kind is Kind.SIDECAR}
        for entry, content in found.items():
            assert served.setdefault(entry, content) == content, f"{entry} was served as two"
    store.flush()
    for each, recency in _recencies(store).items():
        is_same = recency == recencies.get(each, recency)
        assert is_same or each in tips, f"{each!r} was touched and not restored"
    return served


def heal(store: MutableStore, wanted: Mapping[EntryId, bytes]) -> dict[EntryId, bytes]:
    """Store again what is not there of what is wanted, with other bytes; what was stored."""
    stored: dict[EntryId, bytes] = {}
    for name in PLACES:
        state = state_in(store)
        entries = {
            entry: content
            for entry, content in entries_of(name, HEALED).items()
            if entry in wanted and state.entry(*entry) is None
        }
        if entries:
            wanted_boundary = boundary_of(name, entries)
            claim = put(store, wanted_boundary, entries)
            assert claim.refusal is None, f"{name} could not be stored again: {claim.refusal}"
            stored |= entries
    return stored


def _recencies(store: MutableStore) -> dict[bytes, int]:
    core = store._core  # pyright: ignore[reportPrivateUsage]
    with core.lock:
        return {each: entry.recency for each, entry in core.state.blocks.items()}
