"""Making room on disk: the budget, the free-space floor, and whom that costs its place."""

from dataclasses import dataclass

from ..journal.entries import DoomedFile
from ..journal.events import Evicted
from ..journal.files import rounded_to_blocks
from ..journal.words import EvictReason, FileName, NotStoredReason
from .boundary import Claim, NotStored
from .core import MutableCore
from .eviction import POLICY, Victim, choose_victims
from .payload import file_bytes

# Commits in a row that fail before stores do not wait for what the tombstones in them would free.
FAILED_COMMITS_MAX = 2


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Bytes that are missing, and for what."""

    nbytes: int
    reason: EvictReason
    refusal: NotStoredReason


@dataclass(frozen=True, slots=True)
class _Going:
    """Quarantined files and entries that are to go, and what that gives back."""

    files: list[FileName]
    victims: list[Victim]
    nbytes: int


def reserve_room(core: MutableCore, claim: Claim) -> NotStored | None:
    """Set the disk bytes of a whole boundary aside, evicting for them; a refusal if they cannot be.

    Waits for evicted files to be off the disk, at most ``room_wait_seconds``. Blocks and sidecar
    are reserved together: neither is stored without the other.
    """
    need = sum(
        rounded_to_blocks(file_bytes(writing.description))
        for writing in claim.writings
        if writing.part.nbytes
    )
    deadline = core.clock.monotonic() + core.settings.room_wait_seconds
    # Free bytes before the last eviction for the floor, and what it was to free.
    before_floor: tuple[int, int] | None = None
    while True:
        free_bytes = core.files.free_bytes()
        with core.lock:
            refusal = core.refusal_by_mode()
            if refusal is not None:
                return refusal
            shortage = _shortage(core, need, free_bytes)
            if shortage is None:
                core.overlay.reserved_bytes += need
                claim.reserved_bytes = need
                core.floor_unreachable = False
                return None
            if not _is_moving(core):
                going = _choose(core, shortage.nbytes, shortage.reason)
                if going.nbytes < shortage.nbytes:
                    # Nothing is evicted for a store that would not fit even so.
                    return _refusal(core, shortage, need)
                if shortage.reason is EvictReason.FLOOR:
                    if before_floor is not None and not _followed(free_bytes, before_floor):
                        core.floor_unreachable = True
                    if core.floor_unreachable:
                        return _refusal(core, shortage, need)
                    before_floor = (free_bytes, going.nbytes)
                _mark(core, going, shortage.nbytes)
            # A commit that failed left the tombstones riding: the journal thread, which looks once
            # a second without being called, is to try again. If that fails too, nobody waits for
            # a disk that is full of what cannot be evicted.
            core.overlay.is_urgent |= bool(core.overlay.victims)
            is_stuck = core.overlay.victims and core.failed_commits >= FAILED_COMMITS_MAX
            if not _is_moving(core) or is_stuck or core.clock.monotonic() >= deadline:
                return _refusal(core, shortage, need)
            core.lock.wait(timeout=0.05)


def evict_ahead(core: MutableCore) -> None:
    """Evict to a little below the budget, so that the next store need not wait. Needs the lock."""
    ahead = max(core.budget_bytes // 100, 2 * core.boundary_bytes_max)
    target = core.budget_bytes - min(ahead, core.budget_bytes // 10)
    over = core.charged_bytes - target - _going_bytes(core)
    if over > 0 and not core.overlay.victims and not core.overlay.is_exclusive:
        _mark(core, _choose(core, over, EvictReason.BUDGET), over)


def _choose(core: MutableCore, need_bytes: int, reason: EvictReason) -> _Going:
    """What is to go for ``need_bytes``, or all that may: quarantined files, then victims.

    To be marked in the same critical section. Needs the lock.
    """
    overlay, pins = core.overlay, core.state.pins
    files: list[FileName] = []
    nbytes = 0
    for file, kept in core.state.quarantined.items():
        if nbytes < need_bytes and not overlay.is_condemned(file) and not overlay.leased[file]:
            files.append(file)
            nbytes += kept.entry.allocated_bytes
    victims = choose_victims(
        core.state,
        need_bytes=need_bytes - nbytes,
        reason=reason,
        is_protected=lambda entry: overlay.is_protected(entry, pins),
    )
    nbytes += sum(victim.allocated_bytes for victim in victims)
    return _Going(files, victims, nbytes)


def _mark(core: MutableCore, going: _Going, need_bytes: int) -> None:
    """Mark what was chosen; the tombstones ride with the next commit. Needs the lock."""
    overlay = core.overlay
    overlay.condemned.update(going.files)
    for victim in going.victims:
        overlay.victims.add((victim.kind, victim.key))
        core.ride(_tombstone(core, victim, need_bytes))
    # Only if there is something: the journal thread would ask again, and for ever.
    overlay.is_urgent |= bool(going.victims)
    core.lock.notify_all()


def _tombstone(core: MutableCore, victim: Victim, need_bytes: int) -> Evicted:
    return Evicted(
        kind=victim.kind,
        key=victim.key,
        generation=victim.generation,
        reason=victim.reason,
        policy=POLICY,
        budget_bytes=core.budget_bytes,
        need_bytes=need_bytes,
    )


def _shortage(core: MutableCore, need: int, free_bytes: int) -> _Shortage | None:
    over = core.charged_bytes + need - core.budget_bytes
    if over > 0:
        return _Shortage(over, EvictReason.BUDGET, NotStoredReason.BUDGET)
    # Bytes that other stores have reserved are not on the volume yet.
    short = core.settings.free_floor_bytes + need + core.overlay.reserved_bytes - free_bytes
    if short > 0:
        return _Shortage(short, EvictReason.FLOOR, NotStoredReason.FLOOR)
    return None


def _going_bytes(core: MutableCore) -> int:
    """Bytes that will be given back soon without any new victim."""
    condemned = (core.state.quarantined.get(file) for file in core.overlay.condemned)
    return sum(each.allocated_bytes for each in _going(core)) + sum(
        kept.entry.allocated_bytes for kept in condemned if kept is not None
    )


def _is_moving(core: MutableCore) -> bool:
    """Whether room is on its way: chosen victims, files to be deleted."""
    overlay = core.overlay
    return bool(overlay.is_exclusive or overlay.victims or overlay.condemned or _going(core))


def _followed(free_bytes: int, before: tuple[int, int]) -> bool:
    """Whether the volume gained at least half of what was evicted: a snapshot may hold it."""
    free_bytes_then, evicted = before
    return free_bytes - free_bytes_then >= evicted // 2


def _going(core: MutableCore) -> list[DoomedFile]:
    """The doomed files that will be gone soon: refused ones may stay for ever."""
    return [
        doomed
        for doomed in core.state.doomed.values()
        if not doomed.refusals and not core.overlay.leased[doomed.file]
    ]


def _refusal(core: MutableCore, shortage: _Shortage, need: int) -> NotStored:
    stuck = sum(each.allocated_bytes for each in core.state.doomed.values() if each.refusals)
    detail = f"{need} bytes needed, {shortage.nbytes} missing after every eviction that is allowed"
    if stuck:
        detail += f"; {stuck} bytes belong to files whose deletion is refused"
    if shortage.refusal is NotStoredReason.FLOOR:
        detail += f"; {core.settings.free_floor_bytes} bytes of the volume are to stay free"
        if core.floor_unreachable:
            return NotStored(NotStoredReason.FLOOR_UNREACHABLE, detail)
    return NotStored(shortage.refusal, detail)
