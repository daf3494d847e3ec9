"""Ways to break the payload code on purpose, each with the check that has to notice."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from payload_examples import (
    FilesIn,
    RecordingFiles,
    altered_data_refused,
    another_header_refused,
    another_place_refused,
    another_size_refused_unread,
    failed_sync_given_up,
    written_in_order,
)

from walkback.journal.files import Files
from walkback.restore import reader
from walkback.store import decoder, payload, verify


def _nothing(patch: pytest.MonkeyPatch) -> None:
    pass


class Mutant(NamedTuple):
    """What is broken, by a patch or by its files, and the check that has to fail."""

    name: str
    check: Callable[[Path, FilesIn], None]
    patch: Callable[[pytest.MonkeyPatch], None] = _nothing
    files: FilesIn = RecordingFiles


class EqualToAll(bytes):
    """A digest that no comparison tells from another."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def data_digest_not_compared(patch: pytest.MonkeyPatch) -> None:
    def decoded(first: bytes, file_bytes: int) -> tuple[payload.Description, bytes]:
        description, digest = decoder.decode_header(first, file_bytes)
        return description, EqualToAll(digest)

    patch.setattr(verify, "decode_header", decoded)


def header_digest_not_compared(patch: pytest.MonkeyPatch) -> None:
    def digest(header: bytes) -> bytes:
        return EqualToAll(payload.header_digest(header))

    patch.setattr(verify, "header_digest", digest)


def description_not_compared(patch: pytest.MonkeyPatch) -> None:
    def compare(found: payload.Description, expected: reader.Expected) -> None:
        pass

    patch.setattr("walkback.restore.reader._compare", compare)


def size_not_compared(patch: pytest.MonkeyPatch) -> None:
    def opened(files: Files, path: str, *, nbytes: int | None, expected: bytes | None) -> object:
        return verify.opened(files, path, nbytes=None, expected=expected)

    patch.setattr(reader, "opened", opened)


class HeaderFirst(RecordingFiles):
    """Holds data back until the header is written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._held: list[tuple[bytes, int]] = []

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        if offset:
            self._held.append((b"".join(buffers), offset))
            return
        super().write(descriptor, buffers, offset)
        for data, data_offset in self._held:
            super().write(descriptor, [data], data_offset)


class NeverSynced(RecordingFiles):
    def sync(self, descriptor: int) -> None:
        pass


class SyncedTwice(RecordingFiles):
    """Tries a failed sync again, and believes the second answer."""

    def sync(self, descriptor: int) -> None:
        try:
            super().sync(descriptor)
        except OSError as error:
            assert error.errno == errno.EIO
            super().sync(descriptor)


class NeverUnlinked(RecordingFiles):
    def unlink(self, name: str) -> None:
        pass


class NeverForgotten(RecordingFiles):
    """Closes nothing, as far as the count can tell; the test process must not run out."""

    def close_file(self, descriptor: int) -> None:
        Files.close_file(self, descriptor)


MUTANTS = (
    Mutant("data digest not compared", altered_data_refused, patch=data_digest_not_compared),
    Mutant("header digest not compared", another_header_refused, patch=header_digest_not_compared),
    Mutant("description not compared", another_place_refused, patch=description_not_compared),
    Mutant("size not compared", another_size_refused_unread, patch=size_not_compared),
    Mutant("header written first", written_in_order, files=HeaderFirst),
    Mutant("sync left out", written_in_order, files=NeverSynced),
    Mutant("failed sync tried again", failed_sync_given_up, files=SyncedTwice),
    Mutant("staging file left behind", failed_sync_given_up, files=NeverUnlinked),
    Mutant("descriptor kept", written_in_order, files=NeverForgotten),
    Mutant("descriptor kept by a reader", altered_data_refused, files=NeverForgotten),
)
