"""``walkback log``: the history of a cache, and of one key."""

import dataclasses
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ..journal.codec import EVENT_TYPES
from ..journal.events import (
    Abandoned,
    Adopted,
    Committed,
    Deleted,
    DeletionRefused,
    Event,
    Missed,
    NotStored,
    Purged,
    Record,
    Reinstated,
    ReportedBad,
    Restored,
    Staged,
    Superseded,
    Touched,
)
from ..journal.words import FileName, Kind
from ..store.audit import Audit, Gap
from .output import (
    CLEAN,
    FINDINGS,
    AsJson,
    Directory,
    local_time,
    print_error,
    print_json,
    print_line,
    run,
    utc_time,
)
from .words import words_of

_NAMES = {event.__name__.lower(): event for event in EVENT_TYPES}
_NAME_WIDTH = max(len(event.__name__) for event in EVENT_TYPES)
_TIME_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which events are asked for. None and empty mean all."""

    events: frozenset[type[Event]] = frozenset()
    key: str | None = None
    epoch: int | None = None
    since_ns: int | None = None

    @property
    def is_about_all(self) -> bool:
        return self == Question()


def log(
    directory: Directory,
    event: Annotated[
        list[str] | None,
        typer.Option(help="Only this event, like Evicted or not-stored. May be repeated."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="HEX",
            help="Only what happened to the block and sidecar whose key begins like this.",
        ),
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="Only this opening of the cache.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            formats=_TIME_FORMATS, metavar="TIME", help="From this local time on: 2026-01-31T12:00."
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the last N of them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the history of a cache: what was stored, evicted, restored, refused, and why.

    One line for each event, oldest first, those in sealed segments too. Gaps are named. Exits 0,
    1 if events are missing that should be there, 2 if it could not look.
    """
    question = Question(
        events=frozenset(_event_of(name) for name in event or ()),
        key=None if key is None else _prefix_of(key),
        epoch=epoch,
        since_ns=None if since is None else int(since.timestamp() * 10**9),
    )
    run(lambda: _log(directory, question, last=last, as_json=as_json))


def _log(directory: Path, question: Question, *, last: int | None, as_json: bool) -> int:
    with Audit.open(directory) as audit:
        first = 1
        if last is not None and question.is_about_all and audit.log is not None:
            # The archive need not be read for what LMDB has.
            first = max(1, audit.log.sequence - last + 1)
        status, count = CLEAN, 0
        answers = answered(audit.records(first), question)
        for each in answers if last is None else deque(answers, maxlen=last):
            count += 1
            if isinstance(each, Gap):
                _print_gap(each, as_json=as_json)
            else:
                _print_record(each, as_json=as_json)
            if isinstance(each, Gap) and each.is_damage:
                status = FINDINGS
        if audit.damage is not None and status == CLEAN:
            _print_damage(audit.damage, as_json=as_json)
            status = FINDINGS
        if not count:
            print_error("no such events")
        return status


def answered(records: Iterable[Record | Gap], question: Question) -> Iterator[Record | Gap]:
    """The records that the question asks for, and every gap."""
    trail = None if question.key is None else _Trail(question.key)
    for each in records:
        if isinstance(each, Gap):
            yield each
            continue
        # The trail must see every event, also those that are not asked for.
        is_on_trail = trail is None or trail.follow(each)
        if (
            is_on_trail
            and (not question.events or type(each.event) in question.events)
            and (question.epoch is None or each.epoch == question.epoch)
            and (question.since_ns is None or each.wall_ns >= question.since_ns)
        ):
            yield each


class _Trail:
    """What concerns the keys with one prefix, also where an event names a file or a sequence."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._files: set[FileName] = set()
        self._commits: set[int] = set()
        self._namespaces: set[bytes] = set()
        self._keys: set[bytes] = set()
        self._parents: dict[bytes, bytes] = {}

    def follow(self, record: Record) -> bool:
        """Whether the record is on the trail. To be asked of each one, in order."""
        event = record.event
        match event:
            case Committed() | Adopted():
                if event.kind is Kind.BLOCK:
                    self._parents[event.key] = event.parent
                if not self._fits(event.key):
                    return False
                self._commits.add(record.sequence)
                self._keys.add(event.key)
                self._namespaces.add(event.namespace)
                if event.file is not None:
                    self._files.add(event.file)
                return True
            case Staged():
                if self._fits(event.key):
                    self._files.add(event.file)
                    return True
                return False
            case Abandoned() | Deleted() | DeletionRefused() | Reinstated():
                return event.file in self._files
            case Restored():
                is_used = bool({event.matched, event.endpoint} & self._commits)
                return is_used or self._fits(event.tip)
            case Missed():
                return self._fits(event.tip)
            case NotStored():
                return self._fits(event.key)
            case Touched() | Superseded():
                return any(self._fits(key) for key in event.keys)
            case Purged():
                return event.namespace in self._namespaces
            case ReportedBad():
                return self._fits(event.key) or any(
                    self._is_below(key, event.key) for key in self._keys
                )
            case _:
                key = getattr(event, "key", None)
                return isinstance(key, bytes) and self._fits(key)

    def _fits(self, key: bytes) -> bool:
        """Some events know only the first 8 bytes of a key."""
        text = key.hex()
        return text.startswith(self._prefix) or (bool(text) and self._prefix.startswith(text))

    def _is_below(self, key: bytes, above: bytes) -> bool:
        while key in self._parents:
            key = self._parents[key]
            if key == above:
                return True
        return False


def _event_of(name: str) -> type[Event]:
    found = _NAMES.get(name.replace("-", "").replace("_", "").lower())
    if found is None:
        known = ", ".join(event.__name__ for event in EVENT_TYPES)
        raise typer.BadParameter(f"{name} is no event. Events: {known}.", param_hint="--event")
    return found


def _prefix_of(key: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{1,64}", key):
        raise typer.BadParameter(f"{key} is not the beginning of a key in hex", param_hint="--key")
    return key.lower()


def _print_record(record: Record, *, as_json: bool) -> None:
    event = record.event
    name = type(event).__name__
    if as_json:
        fields = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
        print_json(
            {
                "type": "event",
                "sequence": record.sequence,
                "time": utc_time(record.wall_ns),
                "wall_ns": record.wall_ns,
                "epoch": record.epoch,
                "event": name,
                "fields": fields,
            }
        )
    else:
        print_line(
            f"{record.sequence:>8}  {local_time(record.wall_ns)}  {record.epoch:>4}  "
            f"{name:<{_NAME_WIDTH}}  {words_of(event)}"
        )


def _print_gap(gap: Gap, *, as_json: bool) -> None:
    if as_json:
        print_json({"type": "gap"} | dataclasses.asdict(gap))
    else:
        end = f"to {gap.last}" if gap.last is not None else "and those after it"
        print_line(f"{gap.first:>8}  {end}: {gap.reason}")


def _print_damage(damage: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"type": "damage", "reason": damage})
    else:
        print_line(f"the journal is damaged: {damage}. walkback check says what to do")
