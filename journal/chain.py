"""What makes a removed, moved or altered record show. Pure.

LMDB has no checksums: half of all single bit flips in its file are silently other data. So each
event carries a link to the one before it, and every other record a check over its name and value.
Links and checks are found wrong, never mended; what they cannot see is that the newest records are
missing, which is what HEAD stands outside the journal for.
"""

import struct
from collections.abc import Iterable, Iterator

from blake3 import blake3

from .codec import decode
from .errors import JournalDamagedError
from .events import Record

LINK_BYTES = 16
FIRST_LINK = bytes(LINK_BYTES)

_SEQUENCE = struct.Struct(">Q")
SET_HASH_MODULUS = 1 << 128


def sequence_key(sequence: int) -> bytes:
    """Eight bytes that sort as the number does."""
    return _SEQUENCE.pack(sequence)


def sequence_of(key: bytes) -> int:
    if len(key) != _SEQUENCE.size:
        raise JournalDamagedError(f"the key of an event has {len(key)} bytes")
    return _SEQUENCE.unpack(key)[0]


def link_of(previous: bytes, data: bytes) -> bytes:
    """The link of an event with the bytes ``data`` that follows the event with ``previous``."""
    return blake3(previous + data).digest(length=LINK_BYTES)


def linked(
    entries: Iterable[tuple[bytes, bytes]], *, first: int, previous: bytes
) -> Iterator[bytes]:
    """The stored bytes of each entry (key, stored), which must begin at ``first`` and be a chain.

    Nothing is decoded, which is what takes the time.
    """
    for sequence, (key, stored) in enumerate(entries, first):
        if key != _SEQUENCE.pack(sequence):
            raise JournalDamagedError(
                f"event {sequence} is missing: event {sequence_of(key)} stands in its place"
            )
        link = blake3(previous + stored[:-LINK_BYTES]).digest(length=LINK_BYTES)
        if stored[-LINK_BYTES:] != link:
            raise JournalDamagedError(
                f"event {sequence} does not link to the one before it: one of the two was altered"
            )
        yield stored
        previous = link


def record_of(stored: bytes, sequence: int) -> Record:
    """The record in what ``linked`` yielded for ``sequence``."""
    record = decode(stored[:-LINK_BYTES])
    if record.sequence != sequence:
        raise JournalDamagedError(f"event {sequence} says that it is {record.sequence}")
    return record


def check_of(name: bytes, value: bytes) -> bytes:
    return blake3(name + value).digest(length=LINK_BYTES)


def with_check(name: bytes, value: bytes) -> bytes:
    """What is stored under ``name`` in place of ``value``."""
    return value + check_of(name, value)


def without_check(name: bytes, stored: bytes) -> bytes:
    """The value that ``with_check`` was given, or JournalDamagedError."""
    value = stored[:-LINK_BYTES]
    if stored[-LINK_BYTES:] != check_of(name, value):
        raise JournalDamagedError(f"the record {name.hex()} of the journal was altered")
    return value


def set_hash(before: int, *, added: bytes | None, removed: bytes | None) -> int:
    """A sum over the checks of a set of records, which does not depend on their order."""
    for stored, sign in ((added, 1), (removed, -1)):
        if stored is not None:
            before += sign * int.from_bytes(stored[-LINK_BYTES:], "big")
    return before % SET_HASH_MODULUS
