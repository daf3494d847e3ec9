"""Reconciling a journal that lost its last words with the payloads that are there.

One function for a journal that was rolled back, restored from a backup, made anew or found damaged.
Payloads describe and check themselves: one that no event names is adopted if every byte of it
verifies, and only under a parent that is live; of several for one key the newest name wins. What an
event names and is not there is lost. Nothing is deleted here; what was not adopted is swept later.
``quarantine/`` is never adopted from.

A block without bytes is a record in the journal and nothing else, so it cannot come back.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..journal.entries import Entry
from ..journal.errors import PayloadDamagedError
from ..journal.events import Adopted, Event, Lost
from ..journal.files import Files
from ..journal.state import State
from ..journal.words import FileName, Kind
from .verify import Header, opened, verify_payload

NUMBER = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What reconciling found: events to commit, and the epochs to sweep afterwards."""

    events: list[Event]
    epochs: tuple[int, ...]
    # Epochs with payloads that cannot be read just now: not to be swept by this opening.
    unreadable: frozenset[int]


def reconcile(files: Files, state: State, store_id: bytes) -> Findings:
    """Compare the state with every payload on disk. Reads all that the state does not name."""
    lost = list(_lost(files, state))
    gone = {(event.kind, event.key) for event in lost}
    found: dict[tuple[Kind, bytes], tuple[FileName, Header]] = {}
    epochs = {int(name[:8], 16) for name in files.names("staging") if NUMBER.fullmatch(name[:8])}
    unreadable: set[int] = set()
    named = set(named_files(state))
    for file in payloads_on_disk(files):
        epochs.add(file.epoch)
        if file in named:
            continue
        try:
            header = verify_payload(files, file.path, None)
        except PayloadDamagedError:
            continue
        except OSError:
            # Unreadable now is not damaged: left alone, and its epoch stays unswept.
            unreadable.add(file.epoch)
            continue
        description = header.description
        identity = (description.kind, description.key)
        if description.store_id != store_id or description.kind is not file.kind:
            continue
        older = found.get(identity)
        if older is None or older[0][1:] < file[1:]:
            found[identity] = (file, header)
    adopted = list(_adopted(state, found, gone))
    # If only the process died, their names may not be durable yet, and an event must not outlive
    # its file.
    for folder in sorted({event.file.path.rpartition("/")[0] for event in adopted if event.file}):
        files.sync_directory(folder)
    return Findings(
        events=[*lost, *adopted],
        epochs=tuple(sorted(epochs - unreadable)),
        unreadable=frozenset(unreadable),
    )


def is_of_another_cache(files: Files, store_id: bytes) -> bool:
    """Whether there are payloads and all that can be read were written under another STORE."""
    is_foreign = False
    for file in payloads_on_disk(files):
        try:
            with opened(files, file.path, nbytes=None, expected=None) as payload:
                if payload.header.description.store_id == store_id:
                    return False
        except (OSError, PayloadDamagedError):
            continue
        is_foreign = True
    return is_foreign


def payloads_on_disk(files: Files) -> Iterator[FileName]:
    """Every file under ``blocks/`` and ``sidecars/`` that has a payload's name."""
    for kind in Kind:
        for epoch in names_in(files, kind.folder):
            if NUMBER.fullmatch(epoch):
                for counter in files.names(f"{kind.folder}/{epoch}"):
                    if NUMBER.fullmatch(counter):
                        yield FileName(kind, int(epoch, 16), int(counter, 16))


def names_in(files: Files, folder: str) -> list[str]:
    """The sorted names in a folder of the root; none if it is not there, as in a copied cache."""
    return files.names(folder) if files.status(folder) is not None else []


def named_files(state: State) -> Iterator[FileName]:
    """Every file that the state names: live, doomed, quarantined."""
    for table in (state.blocks, state.sidecars):
        for entry in table.values():
            if entry.file is not None:
                yield entry.file
    yield from state.doomed
    yield from state.quarantined


def _lost(files: Files, state: State) -> Iterator[Lost]:
    """Named files that are not there: sidecars first, then blocks, deepest first."""
    for entry in [*state.sidecars.values(), *_deepest_first(state)]:
        if entry.file is not None and files.status(entry.file.path) is None:
            yield Lost(
                kind=entry.kind,
                key=entry.key,
                generation=entry.generation,
                reason="the journal was rolled back or restored, and its file is not there",
            )


def _deepest_first(state: State) -> list[Entry]:
    return sorted(state.blocks.values(), key=lambda entry: entry.end, reverse=True)


def _adopted(
    state: State,
    found: dict[tuple[Kind, bytes], tuple[FileName, Header]],
    gone: set[tuple[Kind, bytes]],
) -> Iterator[Adopted]:
    blocks = {key for key in state.blocks if (Kind.BLOCK, key) not in gone}
    for (kind, key), (file, header) in sorted(
        found.items(), key=lambda each: (each[0][0], each[1][1].description.start)
    ):
        description = header.description
        older = state.entry(kind, key) if (kind, key) not in gone else None
        if older is not None and older.file is not None and older.file[1:] > file[1:]:
            continue
        if kind is Kind.BLOCK:
            if description.parent != description.namespace and description.parent not in blocks:
                continue
            blocks.add(key)
        elif key not in blocks:
            continue
        yield Adopted(
            kind=kind,
            key=key,
            parent=description.parent,
            namespace=description.namespace,
            start=description.start,
            end=description.end,
            generation=description.generation,
            file=file,
            nbytes=header.nbytes,
            allocated_bytes=header.charge_bytes,
            header_digest=header.header_digest,
            plan_digest=description.plan_digest,
            prefill_seconds=0.0,
        )
