"""Sealed segments: the events that have left LMDB, one immutable file for each run of them.

``archive/{first:016x}`` is a sequence of CBOR items: the array [format, store id, first, last, link
before first], then for each event one byte string, its bytes and its link. The event that seals a
segment holds the BLAKE3 of the file.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator
from typing import Any

import cbor2
from blake3 import blake3

from . import chain
from .errors import FormatError, JournalDamagedError
from .events import Record, SegmentSealed
from .files import Files

FORMAT = 1
FOLDER = "archive"


def segment_path(first: int) -> str:
    return f"{FOLDER}/{first:016x}"


def seal_segment(
    files: Files,
    *,
    store_id: bytes,
    first: int,
    last: int,
    previous: bytes,
    stored: Iterable[bytes],
) -> SegmentSealed:
    """Durably write the events ``first`` to ``last``, each with its link, under their final name.

    A file that a crashed attempt left there is replaced: no event had named it.
    """
    header = cbor2.dumps([FORMAT, store_id, first, last, previous])
    content = b"".join([header, *(cbor2.dumps(each) for each in stored)])
    path, new_path = segment_path(first), f"{segment_path(first)}.new"
    make_folder(files, FOLDER)
    with contextlib.suppress(FileNotFoundError):
        files.unlink(new_path)
    descriptor = files.create(new_path)
    try:
        files.write(descriptor, [content], 0)
        files.sync(descriptor)
        allocated_bytes = files.status_of(descriptor).charge_bytes
    finally:
        files.close_file(descriptor)
    files.rename(new_path, path)
    files.sync_directory(FOLDER)
    return SegmentSealed(
        first=first,
        last=last,
        allocated_bytes=allocated_bytes,
        digest=blake3(content).digest(),
    )


def discard_segment(files: Files, first: int) -> None:
    """Remove what an attempt to seal a segment left. Best effort, not synced."""
    for path in (f"{segment_path(first)}.new", segment_path(first)):
        with contextlib.suppress(OSError):
            files.unlink(path)


def read_segment(files: Files, name: str, *, digest: bytes | None = None) -> Iterator[Record]:
    """The events of the segment in file ``name``, each verified against the one before.

    Only ``digest``, from the event that sealed the segment, tells whether the last one is genuine.
    """
    content = _content(files, name)
    if digest is not None and blake3(content).digest() != digest:
        raise JournalDamagedError(f"{name} is not the file that was sealed")
    decoder = cbor2.CBORDecoder(io.BytesIO(content))
    try:
        header: list[Any] = decoder.decode()
        if header[0] != FORMAT:
            raise FormatError(f"{name} has format {header[0]}; this walkback reads {FORMAT}")
        _, _, first, last, previous = header
        entries = [
            (chain.sequence_key(sequence), bytes(decoder.decode()))
            for sequence in range(first, last + 1)
        ]
    except (cbor2.CBORDecodeError, TypeError, ValueError, IndexError) as error:
        raise JournalDamagedError(f"{name} does not decode: {error}") from error
    stored = chain.linked(entries, first=first, previous=previous)
    for sequence, each in enumerate(stored, first):
        yield chain.record_of(each, sequence)


def make_folder(files: Files, name: str) -> None:
    """Durably make a folder of the root, if it is not there."""
    if files.status(name) is None:
        files.make_directory(name)
        files.sync_directory("")


def _content(files: Files, name: str) -> bytes:
    descriptor = files.open(name)
    try:
        content = bytearray(files.status_of(descriptor).nbytes)
        if files.read(descriptor, [memoryview(content)], 0) < len(content):
            raise JournalDamagedError(f"{name} became shorter while it was read")
    finally:
        files.close_file(descriptor)
    return bytes(content)
