"""The restore loop over the real store: what is read, what is refused, and what the journal says.

Tensors are made up and the assembly is a fake, so no mlx is involved.
"""

import contextlib
import dataclasses
import errno
import random
import shutil
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blake3 import blake3
from cache_maker import (
    SETTINGS,
    CacheMaker,
    Failing,
    Gate,
    HookedFiles,
    core_of,
    file_of,
    files_of,
    flip_byte,
    made_caches,
    outcome,
    settle,
    wait_until,
)

from walkback.journal.errors import PayloadDamagedError
from walkback.journal.events import Event, Missed, Record, Restored, Touched
from walkback.journal.words import Cause, EvictReason, Kind, MissReason
from walkback.restore.choosing import Lookup, NotResumed
from walkback.restore.identity import Chain, Namespace
from walkback.restore.layout import ArraysLeaf, KVLeaf, Layout, PerToken, Slot
from walkback.restore.plan import Grid, Plan, plan_digests
from walkback.restore.walkback import Resumed, resume
from walkback.store.audit import Audit
from walkback.store.boundary import Boundary, Claim, Part
from walkback.store.core import Mode
from walkback.store.eviction import choose_victims
from walkback.store.store import MutableStore
from walkback.store.tensors import Tensor, TensorSpec

GRID = Grid(block_tokens=4, checkpoint_tokens=8)
KV = KVLeaf(
    path="0",
    keys=PerToken(heads=2, width=8, dtype="F16"),
    values=PerToken(heads=1, width=4, dtype="F16"),
)
STATE = ArraysLeaf(path="1", slots=(Slot(dtype="F32", shape=(1, 3)), None))
HYBRID = Layout(leaves=(KV, STATE))
STATELESS = Layout(leaves=(KV,))
RECURRENT = Layout(leaves=(STATE,))
PROMPT = list(range(100, 126))  # three checkpoints, at 8, 16 and 24, and a rest of two


def namespace_of(layout: Layout, *, salt: str = "") -> Namespace:
    return Namespace(
        weights=b"w" * 32,
        adapter=b"a" * 32,
        layout=layout,
        block_tokens=GRID.block_tokens,
        salt=salt,
    )


def lookup_of(
    store: MutableStore,
    prompt: list[int] = PROMPT,
    *,
    layout: Layout = HYBRID,
    namespace: Namespace | None = None,
) -> Lookup:
    namespace = namespace or namespace_of(layout)
    return Lookup(
        request=7,
        namespace=namespace.digest(),
        fields=namespace.fields(secret=bytes(32)),
        layout=namespace.layout,
        chain=Chain(
            prompt,
            namespace=namespace.digest(),
            secret=store.secret,
            block_tokens=GRID.block_tokens,
        ),
        plan=Plan(GRID, len(prompt)),
    )


def content(kind: Kind, key: bytes, spec: TensorSpec) -> bytes:
    """Bytes that differ from one payload and one tensor to the next."""
    return blake3(kind.word.encode() + key + spec.name.encode()).digest(length=spec.nbytes)


def boundary_at(lookup: Lookup, stop: int, *, plan_digest: bytes | None = None) -> Boundary:
    """What the stop of a prompt stores: the blocks of its stride and its sidecar."""
    layout = lookup.layout
    links = [
        link for link in lookup.chain.links if stop - GRID.checkpoint_tokens < link.end <= stop
    ]
    parts = [
        Part(
            kind=Kind.BLOCK,
            key=link.key,
            parent=link.parent,
            start=link.start,
            end=link.end,
            tensors=layout.block_specs(link.start, link.end),
        )
        for link in links
    ]
    if layout.has_point_state:
        parts.append(
            Part(
                kind=Kind.SIDECAR,
                key=links[-1].key,
                parent=links[-1].parent,
                start=stop,
                end=stop,
                tensors=layout.point_specs(),
            )
        )
    return Boundary(
        namespace=lookup.namespace,
        layout_digest=layout.digest(),
        plan_digest=plan_digest or dict(plan_digests(GRID, stop))[stop],
        position=stop,
        parts=tuple(parts),
    )


def tensors_for(claim: Claim) -> list[list[Tensor]]:
    return [
        [
            Tensor(spec=spec, buffer=memoryview(content(writing.part.kind, writing.part.key, spec)))
            for spec in writing.part.tensors
        ]
        for writing in claim.writings
    ]


def put(store: MutableStore, boundary: Boundary) -> Claim:
    claim = store.claim(boundary, request=7, producer="a test")
    assert isinstance(claim, Claim), claim
    if not claim.is_empty:
        store.reserve(claim)
        store.put(claim, tensors_for(claim), prefill_seconds=0.1)
    return claim


def store_prompt(store: MutableStore, lookup: Lookup, stops: Iterable[int] = (8, 16, 24)) -> None:
    store.operator.see_namespace(lookup.namespace, lookup.fields)
    for stop in stops:
        refusal = outcome(put(store, boundary_at(lookup, stop)))
        assert refusal is None, refusal


@dataclass
class Assembly:
    """The buffers of one endpoint, as plain memory."""

    endpoint: int
    blocks: dict[tuple[str, int, int], bytearray] = field(
        default_factory=dict[tuple[str, int, int], bytearray]
    )
    point: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def block_segments(self, spec: TensorSpec, *, start: int, end: int) -> list[memoryview]:
        assert end <= self.endpoint
        buffer = self.blocks[spec.name, start, end] = bytearray(spec.nbytes)
        half = spec.nbytes // 2
        return [memoryview(buffer)[:half], memoryview(buffer)[half:]]

    def point_segments(self, spec: TensorSpec) -> list[memoryview]:
        buffer = self.point[spec.name] = bytearray(spec.nbytes)
        return [memoryview(buffer)]


@dataclass
class Caller:
    """What asks for a restore: it remembers what it was asked for, and may fail as it is told."""

    on_assembly: Callable[[int], None] = lambda _endpoint: None
    on_finish: Callable[[Assembly], None] = lambda _assembly: None
    asked: list[int] = field(default_factory=list[int])
    finished: list[int] = field(default_factory=list[int])

    def resume(self, store: MutableStore, lookup: Lookup) -> Resumed[Assembly] | NotResumed:
        def make_assembly(endpoint: int) -> Assembly:
            self.asked.append(endpoint)
            self.on_assembly(endpoint)
            return Assembly(endpoint)

        def finish(assembly: Assembly) -> Assembly:
            self.finished.append(assembly.endpoint)
            self.on_finish(assembly)
            return assembly

        return resume(store, lookup, make_assembly=make_assembly, finish=finish)


def resumed(store: MutableStore, lookup: Lookup) -> Resumed[Assembly]:
    found = Caller().resume(store, lookup)
    assert isinstance(found, Resumed), found
    assert_is_sound(found, lookup)
    return found


def missed(store: MutableStore, lookup: Lookup) -> NotResumed:
    caller = Caller()
    found = caller.resume(store, lookup)
    assert isinstance(found, NotResumed), found
    assert caller.finished == []
    return found


def assert_is_sound(found: Resumed[Assembly], lookup: Lookup) -> None:
    """What was restored is what was stored, whole: every block and slot up to the endpoint."""
    layout, made = lookup.layout, found.made
    links = [link for link in lookup.chain.links if link.end <= found.endpoint]
    blocks = {
        (spec.name, link.start, link.end): content(Kind.BLOCK, link.key, spec)
        for link in links
        for spec in layout.block_specs(link.start, link.end)
    }
    point = {spec.name: content(Kind.SIDECAR, links[-1].key, spec) for spec in layout.point_specs()}
    assert made.endpoint == found.endpoint
    assert made.blocks == blocks
    assert made.point == point


def key_at(lookup: Lookup, end: int) -> bytes:
    return next(link.key for link in lookup.chain.links if link.end == end)


def path_at(store: MutableStore, lookup: Lookup, kind: Kind, end: int) -> Path:
    return store.files.root / file_of(store, kind, key_at(lookup, end)).path


def entry_at(store: MutableStore, lookup: Lookup, kind: Kind, end: int) -> object:
    return core_of(store).state.entry(kind, key_at(lookup, end))


def opened_payloads(store: MutableStore) -> list[str]:
    return [
        name
        for step, name in files_of(store).log
        if step == "open" and name.startswith(("blocks/", "sidecars/"))
    ]


def names_of(store: MutableStore, lookup: Lookup, kind: Kind, ends: Iterable[int]) -> list[str]:
    return [file_of(store, kind, key_at(lookup, end)).path for end in ends]


def events_of(root: Path) -> list[Event]:
    """Every event of a closed cache."""
    with Audit.open(root) as audit:
        return [each.event for each in audit.records() if isinstance(each, Record)]


def assert_nothing_is_held(store: MutableStore) -> None:
    core = core_of(store)
    with core.lock:
        assert not core.overlay.leased
        assert not core.overlay.held


def evictable(store: MutableStore) -> set[tuple[Kind, bytes]]:
    """What an eviction that needs all the room in the world could take now."""
    core = core_of(store)
    with core.lock:
        victims = choose_victims(
            core.state,
            need_bytes=1 << 60,
            reason=EvictReason.BUDGET,
            is_protected=lambda entry: core.overlay.is_protected(entry, core.state.pins),
        )
    return {(victim.kind, victim.key) for victim in victims}


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


@pytest.fixture
def store(caches: CacheMaker) -> MutableStore:
    return caches.open()


@pytest.fixture
def lookup(store: MutableStore) -> Lookup:
    """A prompt that is stored, at each of its checkpoints."""
    lookup = lookup_of(store)
    store_prompt(store, lookup)
    files_of(store).log.clear()
    return lookup


# What is restored, and what is read for it.


def test_a_restore_gives_the_newest_checkpoint_with_all_that_leads_there(
    store: MutableStore, lookup: Lookup
) -> None:
    found = resumed(store, lookup)

    assert (found.endpoint, found.walkbacks, found.sidecars) == (24, 0, 1)
    assert not found.mixed_plan


@pytest.mark.parametrize(
    ("layout", "token_count", "endpoint"),
    [
        (HYBRID, 26, 24),
        (HYBRID, 25, 24),
        (HYBRID, 24, 16),
        (HYBRID, 23, 16),
        (HYBRID, 17, 16),
        (HYBRID, 16, 8),
        (HYBRID, 9, 8),
        (STATELESS, 25, 24),
        (STATELESS, 24, 20),
        (STATELESS, 21, 20),
        (STATELESS, 20, 16),
        (STATELESS, 5, 4),
        (RECURRENT, 25, 24),
        (RECURRENT, 24, 16),
    ],
)
def test_the_endpoint_is_the_deepest_boundary_that_leaves_a_token_to_compute(
    layout: Layout, token_count: int, endpoint: int, store: MutableStore
) -> None:
    store_prompt(store, lookup_of(store, layout=layout))

    found = resumed(store, lookup_of(store, PROMPT[:token_count], layout=layout))

    assert found.endpoint == endpoint


def test_the_sidecar_is_opened_first_and_no_block_beyond_the_endpoint_is(
    store: MutableStore, lookup: Lookup
) -> None:
    shorter = lookup_of(store, PROMPT[:20])

    resumed(store, shorter)

    assert opened_payloads(store) == [
        *names_of(store, lookup, Kind.SIDECAR, [16]),
        *names_of(store, lookup, Kind.BLOCK, [4, 8, 12, 16]),
    ]


def test_a_checkpoint_whose_sidecar_is_known_to_be_gone_costs_no_open_file(
    store: MutableStore, lookup: Lookup
) -> None:
    path_at(store, lookup, Kind.SIDECAR, 24).unlink()
    resumed(store, lookup)
    files_of(store).log.clear()

    found = resumed(store, lookup)

    assert (found.endpoint, found.walkbacks) == (16, 0)
    assert opened_payloads(store) == [
        *names_of(store, lookup, Kind.SIDECAR, [16]),
        *names_of(store, lookup, Kind.BLOCK, [4, 8, 12, 16]),
    ]


def test_a_bad_sidecar_costs_no_block(store: MutableStore, lookup: Lookup) -> None:
    [bad] = names_of(store, lookup, Kind.SIDECAR, [24])
    flip_byte(store.files.root / bad)

    resumed(store, lookup)

    assert opened_payloads(store) == [
        bad,
        *names_of(store, lookup, Kind.SIDECAR, [16]),
        *names_of(store, lookup, Kind.BLOCK, [4, 8, 12, 16]),
    ]


@pytest.mark.usefixtures("lookup")
def test_a_miss_opens_no_file(store: MutableStore) -> None:
    missed(store, lookup_of(store, [1, *PROMPT]))

    assert opened_payloads(store) == []


def test_blocks_without_bytes_are_records_and_open_no_file(store: MutableStore) -> None:
    lookup = lookup_of(store, layout=RECURRENT)
    store_prompt(store, lookup)
    files_of(store).log.clear()

    resumed(store, lookup)

    assert opened_payloads(store) == names_of(store, lookup, Kind.SIDECAR, [24])


def test_large_payloads_that_are_read_by_two_threads_arrive_whole(
    store: MutableStore, lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walkback.restore.reading._PARALLEL_BYTES", 1)

    assert resumed(store, lookup).endpoint == 24


def test_a_bad_block_among_those_that_two_threads_read_walks_back(
    store: MutableStore, lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("walkback.restore.reading._PARALLEL_BYTES", 1)
    flip_byte(path_at(store, lookup, Kind.BLOCK, 20))

    found = resumed(store, lookup)

    assert (found.endpoint, found.walkbacks) == (16, 1)
    assert_nothing_is_held(store)


def test_what_is_being_stored_is_read_from_its_buffers(store: MutableStore) -> None:
    lookup = lookup_of(store)
    store_prompt(store, lookup, stops=(8,))
    gate = Gate("create", "staging/")
    files_of(store).hook = gate
    claim = put(store, boundary_at(lookup, 16))
    gate.await_thread()
    files_of(store).log.clear()

    found = resumed(store, lookup)

    assert found.endpoint == 16
    assert opened_payloads(store) == names_of(store, lookup, Kind.BLOCK, [4, 8])
    gate.open()
    assert outcome(claim) is None


def test_buffers_outlive_their_commit_until_a_restore_has_read_them(store: MutableStore) -> None:
    lookup = lookup_of(store)
    gate = Gate("create", "staging/")
    files_of(store).hook = gate
    claim = put(store, boundary_at(lookup, 8))
    gate.await_thread()

    def let_it_commit(_endpoint: int) -> None:
        gate.open()
        assert outcome(claim) is None
        assert core_of(store).staging_bytes == claim.nbytes

    found = Caller(on_assembly=let_it_commit).resume(store, lookup)

    assert isinstance(found, Resumed)
    assert_is_sound(found, lookup)
    assert core_of(store).staging_bytes == 0


def test_what_was_stored_under_another_plan_serves_and_is_said_to_be_mixed(
    store: MutableStore,
) -> None:
    lookup = lookup_of(store)
    store_prompt(store, lookup, stops=(8,))
    outcome(put(store, boundary_at(lookup, 16, plan_digest=b"another plan, 32 bytes in length")))

    assert resumed(store, lookup).mixed_plan
    assert not resumed(store, lookup_of(store, PROMPT[:10])).mixed_plan


# Walking back.


def test_a_damaged_sidecar_is_put_aside_and_the_next_older_serves(
    store: MutableStore, lookup: Lookup
) -> None:
    file = file_of(store, Kind.SIDECAR, key_at(lookup, 24))
    flip_byte(store.files.root / file.path)

    first, second = resumed(store, lookup), resumed(store, lookup)

    assert (first.endpoint, first.walkbacks) == (16, 1)
    assert (second.endpoint, second.walkbacks) == (16, 0)
    assert file in core_of(store).state.quarantined
    wait_until((store.files.root / file.quarantine_path).exists, "the file is put aside")
    assert entry_at(store, lookup, Kind.BLOCK, 24) is not None


def test_a_damaged_block_is_a_hole_and_the_restore_stops_before_it(
    store: MutableStore, lookup: Lookup
) -> None:
    flip_byte(path_at(store, lookup, Kind.BLOCK, 12))

    found = resumed(store, lookup)

    assert (found.endpoint, found.walkbacks) == (8, 1)
    assert set(core_of(store).state.holes) == {key_at(lookup, 12)}


def test_a_hole_is_healed_when_its_boundary_is_stored_again(
    store: MutableStore, lookup: Lookup
) -> None:
    flip_byte(path_at(store, lookup, Kind.BLOCK, 12))
    resumed(store, lookup)

    assert outcome(put(store, boundary_at(lookup, 16))) is None

    assert resumed(store, lookup).endpoint == 24
    assert not core_of(store).state.holes


def test_a_truncated_file_walks_back(store: MutableStore, lookup: Lookup) -> None:
    path = path_at(store, lookup, Kind.SIDECAR, 24)
    path.write_bytes(path.read_bytes()[:100])

    assert resumed(store, lookup).endpoint == 16


@pytest.mark.parametrize(("kind", "end"), [(Kind.SIDECAR, 24), (Kind.BLOCK, 20)])
def test_an_entry_whose_file_is_missing_is_lost_and_not_offered_again(
    kind: Kind, end: int, caches: CacheMaker, store: MutableStore, lookup: Lookup
) -> None:
    path_at(store, lookup, kind, end).unlink()

    first, second = resumed(store, lookup), resumed(store, lookup)

    assert (first.endpoint, first.walkbacks) == (16, 1)
    assert (second.endpoint, second.walkbacks) == (16, 0)
    assert entry_at(store, lookup, kind, end) is None
    store.close()
    assert [type(each).__name__ for each in events_of(caches.root)].count("Lost") == 1


def test_a_lost_sidecar_is_repaired_when_its_boundary_comes_by(
    store: MutableStore, lookup: Lookup
) -> None:
    path_at(store, lookup, Kind.SIDECAR, 24).unlink()
    resumed(store, lookup)

    claim = put(store, boundary_at(lookup, 24))

    assert [(each.part.kind, each.cause) for each in claim.writings] == [
        (Kind.SIDECAR, Cause.REPAIR)
    ]
    assert outcome(claim) is None
    assert resumed(store, lookup).endpoint == 24


@pytest.mark.parametrize(("folder", "endpoint"), [("sidecars/", 16), ("blocks/", 0)])
def test_after_one_failed_read_the_entry_is_still_there(
    folder: str, endpoint: int, store: MutableStore, lookup: Lookup
) -> None:
    files_of(store).hook = Failing("open", errno.EIO, path=folder, times=1)

    found = Caller().resume(store, lookup)

    assert (found.endpoint if isinstance(found, Resumed) else 0) == endpoint
    assert found.walkbacks == 1
    assert resumed(store, lookup).endpoint == 24
    assert not core_of(store).state.quarantined


def test_an_entry_that_could_not_be_read_is_replaced_when_its_boundary_comes_by(
    store: MutableStore, lookup: Lookup
) -> None:
    before = file_of(store, Kind.SIDECAR, key_at(lookup, 24))
    files_of(store).hook = Failing("open", errno.EIO, path="sidecars/", times=1)
    resumed(store, lookup)

    claim = put(store, boundary_at(lookup, 24))

    assert outcome(claim) is None
    assert [(each.part.kind, each.cause, each.generation) for each in claim.writings] == [
        (Kind.SIDECAR, Cause.REPLACEMENT, 2)
    ]
    assert file_of(store, Kind.SIDECAR, key_at(lookup, 24)) != before
    assert put(store, boundary_at(lookup, 24)).is_empty
    assert resumed(store, lookup).endpoint == 24


def test_state_that_the_caller_refuses_is_put_aside_with_its_sidecar_only(
    store: MutableStore, lookup: Lookup
) -> None:
    def refuse(assembly: Assembly) -> None:
        if assembly.endpoint == 24:
            raise PayloadDamagedError("1/slot0 holds a value that is not finite")

    found = Caller(on_finish=refuse).resume(store, lookup)

    assert isinstance(found, Resumed)
    assert (found.endpoint, found.walkbacks) == (16, 1)
    assert entry_at(store, lookup, Kind.SIDECAR, 24) is None
    assert entry_at(store, lookup, Kind.BLOCK, 24) is not None


def test_a_payload_with_a_part_of_its_layers_is_refused(store: MutableStore) -> None:
    lookup = lookup_of(store)
    store_prompt(store, lookup, stops=(8,))
    whole = boundary_at(lookup, 16)
    partial = dataclasses.replace(
        whole,
        parts=tuple(
            dataclasses.replace(part, tensors=part.tensors[:1]) if part.end == 12 else part
            for part in whole.parts
        ),
    )
    assert outcome(put(store, partial)) is None

    found = resumed(store, lookup)

    assert (found.endpoint, found.walkbacks) == (8, 1)
    [kept] = core_of(store).state.quarantined.values()
    assert "'0/values' is missing" in kept.reason


def empty(path: Path) -> None:
    path.write_bytes(b"")


RUINS: tuple[Callable[[Path], None], ...] = (Path.unlink, flip_byte, empty)


@pytest.fixture
def rotten_store(tmp_path: Path) -> Generator[MutableStore]:
    """A store that is not held to its invariants: files that no restore needed stay missing."""
    with MutableStore.open(tmp_path / "rotten", SETTINGS, make_files=HookedFiles) as store:
        yield store


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_damaged_the_deepest_sound_checkpoint_serves(
    seed: int, rotten_store: MutableStore
) -> None:
    store, lookup = rotten_store, lookup_of(rotten_store)
    store_prompt(store, lookup)
    choice = random.Random(seed)
    bad: set[tuple[Kind, int]] = set()
    for kind, end in [(Kind.SIDECAR, 8), (Kind.SIDECAR, 16), (Kind.SIDECAR, 24)] + [
        (Kind.BLOCK, end) for end in (4, 8, 12, 16, 20, 24)
    ]:
        if choice.random() < 0.25:
            path = path_at(store, lookup, kind, end)
            ruin = choice.choice(RUINS)
            ruin(path)
            bad.add((kind, end))
    sound = [
        stop
        for stop in (8, 16, 24)
        if (Kind.SIDECAR, stop) not in bad
        and not any((Kind.BLOCK, end) in bad for end in range(4, stop + 1, 4))
    ]

    found = Caller().resume(store, lookup)

    if sound:
        assert isinstance(found, Resumed)
        assert found.endpoint == sound[-1]
        assert_is_sound(found, lookup)
    else:
        assert isinstance(found, NotResumed)
        assert found.reason is MissReason.DAMAGED
    assert_nothing_is_held(store)


def test_when_every_candidate_is_bad_it_is_a_safe_miss_that_says_so(
    caches: CacheMaker, store: MutableStore, lookup: Lookup
) -> None:
    for stop in (8, 16, 24):
        flip_byte(path_at(store, lookup, Kind.SIDECAR, stop))

    found = missed(store, lookup)

    assert (found.reason, found.walkbacks) == (MissReason.DAMAGED, 3)
    assert "digest" in found.detail
    store.close()
    [event] = [each for each in events_of(caches.root) if isinstance(each, Missed)]
    assert (event.reason, event.walkbacks, event.request) == (MissReason.DAMAGED, 3, 7)


# Misses, each with its reason.


def test_a_cache_that_holds_nothing_is_said_to_be_empty(store: MutableStore) -> None:
    assert missed(store, lookup_of(store)).reason is MissReason.EMPTY


@pytest.mark.usefixtures("lookup")
@pytest.mark.parametrize("token_count", [0, 1, 3, 4])
def test_a_prompt_without_a_whole_block_before_its_last_token_is_too_short(
    token_count: int, store: MutableStore
) -> None:
    found = missed(store, lookup_of(store, PROMPT[:token_count]))

    assert found.reason is MissReason.TOO_SHORT


@pytest.mark.usefixtures("lookup")
def test_a_prompt_that_begins_like_no_other_is_unseen(store: MutableStore) -> None:
    assert missed(store, lookup_of(store, [1, *PROMPT])).reason is MissReason.UNSEEN


@pytest.mark.usefixtures("lookup")
def test_blocks_without_a_checkpoint_are_a_miss_that_says_how_much_matched(
    store: MutableStore,
) -> None:
    found = missed(store, lookup_of(store, PROMPT[:7]))

    assert found.reason is MissReason.NO_CHECKPOINT
    assert "4 tokens match" in found.detail


def test_blocks_that_are_still_being_stored_do_not_leave_a_cache_empty(
    store: MutableStore,
) -> None:
    gate = Gate("create", "staging/")
    files_of(store).hook = gate
    claim = put(store, boundary_at(lookup_of(store), 8))
    gate.await_thread()

    found = missed(store, lookup_of(store, PROMPT[:7]))

    gate.open()
    assert found.reason is MissReason.NO_CHECKPOINT
    assert outcome(claim) is None


def test_what_another_configuration_stored_is_a_miss_that_names_the_field(
    store: MutableStore, lookup: Lookup
) -> None:
    other = lookup_of(store, namespace=namespace_of(HYBRID, salt="another tenant"))

    found = missed(store, other)

    assert found.reason is MissReason.OTHER_NAMESPACE
    assert found.detail == "what is stored differs in salt"
    assert lookup.namespace != other.namespace


def test_when_nothing_could_be_read_the_miss_says_so(store: MutableStore, lookup: Lookup) -> None:
    files_of(store).hook = Failing("open", errno.EIO)

    found = missed(store, lookup)

    assert found.reason is MissReason.READ_ERROR
    files_of(store).hook = None
    assert resumed(store, lookup).endpoint == 24


def test_a_closed_cache_misses(store: MutableStore, lookup: Lookup) -> None:
    store.close()

    assert missed(store, lookup).reason is MissReason.CLOSED


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_directory_that_is_gone_is_a_miss_and_nothing_is_recovered(
    is_replaced: bool, tmp_path: Path
) -> None:
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    with MutableStore.open(root, SETTINGS, make_files=HookedFiles) as store:
        lookup = lookup_of(store)
        store_prompt(store, lookup)
        shutil.copytree(root, elsewhere)
        shutil.rmtree(root)
        if is_replaced:
            root.mkdir()

        first, second = missed(store, lookup), missed(store, lookup)

        assert (first.reason, second.reason) == (MissReason.OFFLINE, MissReason.OFFLINE)
        assert "is gone or was replaced" in first.detail
        assert store.mode is Mode.OFFLINE
        assert entry_at(store, lookup, Kind.SIDECAR, 24) is not None
    assert not root.exists() or list(root.iterdir()) == []


@pytest.mark.usefixtures("lookup")
def test_every_miss_is_an_event_with_its_reason(caches: CacheMaker, store: MutableStore) -> None:
    reasons = [
        missed(store, lookup_of(store, prompt)).reason for prompt in ([1], [1, *PROMPT], PROMPT[:7])
    ]

    store.close()
    events = [each for each in events_of(caches.root) if isinstance(each, Missed)]
    assert [each.reason for each in events] == reasons
    assert len(set(reasons)) == 3


# What a failure must leave alone, and what it must not count.


def test_a_failed_candidate_never_reaches_the_caller(store: MutableStore, lookup: Lookup) -> None:
    flip_byte(path_at(store, lookup, Kind.BLOCK, 24))
    caller = Caller()

    caller.resume(store, lookup)

    assert caller.asked == [24, 16]
    assert caller.finished == [16]


def test_a_hit_is_neither_counted_nor_touched_before_it_is_verified(
    store: MutableStore, lookup: Lookup
) -> None:
    core = core_of(store)
    seen: list[tuple[int, int, int]] = []

    def look(_assembly: Assembly) -> None:
        seen.append((core.counts.restores, core.counts.sidecars_read, len(core.overlay.touches)))

    Caller(on_finish=look).resume(store, lookup)

    assert seen == [(0, 0, 0)]
    assert (core.counts.restores, core.counts.sidecars_read) == (1, 1)


def test_a_restore_that_fails_counts_no_hit_and_touches_nothing(
    caches: CacheMaker, store: MutableStore, lookup: Lookup
) -> None:
    for stop in (8, 16, 24):
        flip_byte(path_at(store, lookup, Kind.SIDECAR, stop))

    missed(store, lookup)

    assert store.statistics().restores == 0
    assert store.statistics().misses == {"damaged": 1}
    store.close()
    assert not [each for each in events_of(caches.root) if isinstance(each, Restored | Touched)]


def test_a_hit_touches_its_endpoint_only_and_says_how_deep_it_was(
    caches: CacheMaker, store: MutableStore, lookup: Lookup
) -> None:
    path_at(store, lookup, Kind.SIDECAR, 24).unlink()

    found = resumed(store, lookup)

    store.close()
    events = events_of(caches.root)
    [event] = [each for each in events if isinstance(each, Restored)]
    assert (event.endpoint_tokens, event.prompt_tokens, event.walkbacks) == (16, 26, 1)
    assert (event.endpoint, event.block_count, event.tip) == (
        found.sequence,
        6,
        lookup.chain.tip[:8],
    )
    [touched] = [each for each in events if isinstance(each, Touched)]
    assert touched.keys == (key_at(lookup, 16),)


# Leases.


def admit_another_prompt(store: MutableStore) -> None:
    """What was stored last is no victim for a while: let that be something else."""
    store_prompt(store, lookup_of(store, [1, *PROMPT]), stops=(8,))


def test_what_is_being_read_is_no_victim(store: MutableStore, lookup: Lookup) -> None:
    admit_another_prompt(store)
    during: list[set[tuple[Kind, bytes]]] = []

    found = Caller(on_finish=lambda _: during.append(evictable(store))).resume(store, lookup)

    assert isinstance(found, Resumed)
    assert during == [set()]
    assert len(evictable(store)) == 9


def test_what_a_shorter_prompt_does_not_need_may_go_while_it_reads(
    store: MutableStore, lookup: Lookup
) -> None:
    admit_another_prompt(store)
    during: list[set[tuple[Kind, bytes]]] = []

    Caller(on_finish=lambda _: during.append(evictable(store))).resume(
        store, lookup_of(store, PROMPT[:20])
    )

    assert during == [
        {
            (Kind.BLOCK, key_at(lookup, 20)),
            (Kind.BLOCK, key_at(lookup, 24)),
            (Kind.SIDECAR, key_at(lookup, 24)),
        }
    ]


def test_a_purge_in_the_middle_of_a_restore_unlinks_nothing_that_it_reads(
    store: MutableStore, lookup: Lookup
) -> None:
    paths = [store.files.root / name for name in names_of(store, lookup, Kind.BLOCK, (4, 24))]

    def purge(_endpoint: int) -> None:
        store.operator.purge(lookup.namespace)
        store.settle_deletions(0.2)

    found = Caller(on_assembly=purge).resume(store, lookup)

    assert isinstance(found, Resumed)
    assert_is_sound(found, lookup)
    settle(store)
    assert not any(path.exists() for path in paths)


class StoppedError(Exception):
    """What a caller may raise in the middle of a restore."""


def interrupt(_: object) -> None:
    raise StoppedError


@pytest.mark.parametrize(
    "caller",
    [
        Caller(),
        Caller(on_assembly=interrupt),
        Caller(on_finish=interrupt),
    ],
)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_no_lease_outlives_a_restore_however_it_ends(
    is_damaged: bool, caller: Caller, store: MutableStore, lookup: Lookup
) -> None:
    if is_damaged:
        flip_byte(path_at(store, lookup, Kind.BLOCK, 4))

    with contextlib.suppress(StoppedError):
        caller.resume(store, lookup)

    assert_nothing_is_held(store)


def test_a_failed_read_of_a_buffer_on_its_way_gives_its_memory_back(store: MutableStore) -> None:
    lookup = lookup_of(store)
    gate = Gate("create", "staging/")
    files_of(store).hook = gate
    claim = put(store, boundary_at(lookup, 8))
    gate.await_thread()

    with pytest.raises(StoppedError):
        Caller(on_finish=interrupt).resume(store, lookup)

    assert claim.readers == 0
    gate.open()
    assert outcome(claim) is None
    assert core_of(store).staging_bytes == 0


def test_a_file_that_rots_again_and_again_ends_in_a_miss(
    store: MutableStore, lookup: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound, for a cache whose entries come back as fast as they are refused."""
    monkeypatch.setattr("walkback.restore.walkback.WALKBACKS_MAX", 1)
    files_of(store).hook = Failing("open", errno.EIO)

    found = missed(store, lookup)

    assert (found.reason, found.walkbacks) == (MissReason.READ_ERROR, 2)
