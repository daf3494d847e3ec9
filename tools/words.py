"""Events in words, for people who ask what happened."""

from typing import assert_never

from ..journal.events import (
    Abandoned,
    Adopted,
    Closed,
    Committed,
    Compacted,
    Deleted,
    DeletionRefused,
    Event,
    Evicted,
    Lost,
    Missed,
    NamespaceSeen,
    NotStored,
    Opened,
    OperatorEvent,
    Pinned,
    Purged,
    Quarantined,
    Rebuilt,
    Reinstated,
    Replaced,
    ReportedBad,
    RequestEvent,
    Restored,
    SegmentDropped,
    SegmentSealed,
    SettingSet,
    Staged,
    Superseded,
    Swept,
    Touched,
    Unpinned,
)
from ..journal.words import Kind
from .output import counted, short, size

# Keys of a Touched that are shown; a restore touches one, and a batch may hold a thousand.
_KEYS_SHOWN = 4


def words_of(event: Event) -> str:
    """What an event says, on one line."""
    match event:
        case Opened():
            versions = f", {event.versions}" if event.versions else ""
            return f"by process {event.pid}{versions}"
        case Closed():
            return "in order"
        case Swept():
            return f"epoch {event.epoch}: {counted(event.file_count, 'file')}, {size(event.nbytes)}"
        case Compacted():
            return f"up to event {event.watermark}, {counted(event.record_count, 'record')}"
        case SegmentSealed():
            return f"events {event.first} to {event.last}, {size(event.allocated_bytes)}"
        case SegmentDropped():
            return f"events {event.first} to {event.last}: {event.reason}"
        case Rebuilt():
            return f"{event.cause}; HEAD had event {event.old_sequence}"
        case Restored() | Missed() | NotStored() | Touched() | Superseded():
            return _of_a_request(event)
        case NamespaceSeen() | SettingSet() | Pinned() | Unpinned() | Purged() | ReportedBad():
            return _of_the_operator(event)
        case _:
            return _of_a_payload(event)


def _of_a_payload(
    event: Staged
    | Committed
    | Replaced
    | Abandoned
    | Evicted
    | Deleted
    | DeletionRefused
    | Quarantined
    | Lost
    | Adopted
    | Reinstated,
) -> str:
    match event:
        case Staged():
            source = f", resumed from event {event.restored_from}" if event.restored_from else ""
            return (
                f"{_name(event.kind, event.key)} as {event.file.path}, {size(event.nbytes)}, "
                f"{event.cause}{source}"
            )
        case Committed() | Adopted():
            tokens = f"position {event.end}"
            if event.kind is Kind.BLOCK:
                tokens = f"tokens {event.start} to {event.end}"
            place = "no bytes"
            if event.file is not None:
                place = f"{event.file.path}, {size(event.allocated_bytes)}"
            generation = f", generation {event.generation}" if event.generation > 1 else ""
            seconds = f", prefill {event.prefill_seconds:.2f} s" if event.prefill_seconds else ""
            return f"{_name(event.kind, event.key)} {tokens}, {place}{generation}{seconds}"
        case Replaced():
            return (
                f"{_name(event.kind, event.key)} generation {event.generation}, {event.file.path}"
            )
        case Abandoned():
            return f"{event.file.path}: {event.reason}"
        case Evicted():
            need = f", {size(event.need_bytes)} needed" if event.need_bytes else ""
            return (
                f"{_name(event.kind, event.key)}: {event.reason}, by {event.policy}, "
                f"budget {size(event.budget_bytes)}{need}"
            )
        case Deleted():
            return f"{event.file.path}{', was gone already' if event.already_gone else ''}"
        case DeletionRefused():
            return f"{event.file.path}: {event.reason}, attempt {event.attempts}"
        case Quarantined() | Lost():
            return f"{_name(event.kind, event.key)}: {event.reason}"
        case Reinstated():
            return event.file.path
        case _:
            assert_never(event)


def _of_a_request(event: RequestEvent) -> str:
    match event:
        case Restored():
            return (
                f"request {event.request}: {event.endpoint_tokens} of {event.prompt_tokens} tokens "
                f"from event {event.endpoint}, tip {short(event.tip)}{_walkbacks(event.walkbacks)}"
                f"{', mixed plan' if event.mixed_plan else ''}"
            )
        case Missed():
            return (
                f"request {event.request}: {event.reason}{_detail(event.detail)}, "
                f"{event.prompt_tokens} tokens, tip {short(event.tip)}"
                f"{_walkbacks(event.walkbacks)}"
            )
        case NotStored():
            times = f", {event.repeats} times" if event.repeats > 1 else ""
            return (
                f"{short(event.key)} position {event.position}, request {event.request}: "
                f"{event.reason}{_detail(event.detail)}{times}"
            )
        case Touched() | Superseded():
            keys = " ".join(short(key) for key in event.keys[:_KEYS_SHOWN])
            more = len(event.keys) - _KEYS_SHOWN
            return f"{keys} and {more} more" if more > 0 else keys
        case _:
            assert_never(event)


def _of_the_operator(event: OperatorEvent) -> str:
    match event:
        case NamespaceSeen():
            fields = ", ".join(f"{name}={value}" for name, value in event.fields)
            return f"{short(event.namespace)}: {fields}"
        case SettingSet():
            is_size = event.name.endswith("_bytes")
            return f"{event.name} = {event.value}{f' ({size(event.value)})' if is_size else ''}"
        case Pinned() | Unpinned():
            return f"block {short(event.key)}"
        case Purged():
            return f"namespace {short(event.namespace)}"
        case ReportedBad():
            return f"{_name(event.kind, event.key)}{_detail(event.detail)}"
        case _:
            assert_never(event)


def _name(kind: Kind, key: bytes) -> str:
    return f"{kind.word} {short(key)}"


def _detail(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _walkbacks(count: int) -> str:
    return f", {counted(count, 'walk-back')}" if count else ""
