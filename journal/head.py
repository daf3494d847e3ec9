"""HEAD: the newest event that this cache is known to have had, kept outside the journal.

A journal that ends before HEAD, or has another link at HEAD's sequence, was rolled back: by a
restored volume, or by LMDB itself when the newer of its two meta pages is damaged.

The file has two slots of 4096 bytes, written in turn. A slot is 480 bytes of CBOR, padded with
zeros, and their BLAKE3; the rest is unused. Assumption about the disk: a sector of 512 bytes is
written whole or not at all. So a slot may be written without a sync: at worst the other one counts.
HEAD follows the commit that it describes, hence HEAD is never newer than the journal.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import cbor2
from blake3 import blake3

from .errors import FormatError
from .files import Files, FileStatus

FORMAT = 1

_NAME = "HEAD"
_NEW_NAME = "HEAD.new"
_SLOT_BYTES = 4096
_BODY_BYTES = 480
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanMark:
    """``data.mdb`` as a clean close left it."""

    nbytes: int
    inode: int
    mtime_ns: int

    def matches(self, status: FileStatus | None) -> bool:
        """Whether the file is still the one that was closed."""
        if status is None:
            return False
        return (self.nbytes, self.inode, self.mtime_ns) == (
            status.nbytes,
            status.inode,
            status.mtime_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The newest commit: its last event's sequence and link, and the epoch that wrote it."""

    sequence: int
    link: bytes
    epoch: int
    clean: CleanMark | None = None


class MutableHead:
    """The file HEAD, held open. ``value`` is its newest valid slot, None if there is none.

    Owned by the thread that owns the journal; not thread-safe. ``OSError`` passes through.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._turn = 0
        self._descriptor = -1
        # Whether a slot on the disk may still hold a clean mark.
        self._may_be_marked = False
        self.value: Head | None = None
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = files.open_for_update(_NAME)
            try:
                self._read()
            except BaseException:
                self.close()
                raise

    def write(self, head: Head) -> None:
        """Replace the older slot, not synced. A missing file is made, durably."""
        turn = self._turn + 1
        slot = _encode(head, turn)
        if self._descriptor < 0:
            self._create(slot)
        else:
            self._files.write(self._descriptor, [slot], turn % 2 * _SLOT_BYTES)
        self._turn, self.value = turn, head
        self._may_be_marked |= head.clean is not None

    def unmark(self) -> None:
        """Durably take the clean mark away. To be done before the journal is written again.

        A commit makes the journal's bytes durable but not its times, so after a power loss a mark
        that is still there could match a file that was in use. Until a sync has said yes it is
        written anew each time: the one that failed may have lost it.
        """
        if self.value is not None and self._may_be_marked:
            self.write(replace(self.value, clean=None))
            self.sync()
            self._may_be_marked = False

    def sync(self) -> None:
        """Make the last ``write`` durable."""
        if self._descriptor >= 0:
            self._files.sync(self._descriptor)

    def close(self) -> None:
        """Let go of the file. Closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # What had to be kept was synced; an error now must not keep the lock from being let go.
            with contextlib.suppress(OSError):
                self._files.close_file(descriptor)

    def _read(self) -> None:
        slots = _slots(self._files, self._descriptor)
        if slots:
            self._turn, self.value = slots[-1]
        self._may_be_marked = any(head.clean is not None for _, head in slots)

    def _create(self, slot: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(_NEW_NAME)
        descriptor = self._files.create(_NEW_NAME)
        try:
            # Turn 1, the first of a new file, belongs into the second slot.
            self._files.write(descriptor, [bytes(_SLOT_BYTES), slot.ljust(_SLOT_BYTES, b"\0")], 0)
            self._files.sync(descriptor)
            self._files.rename(_NEW_NAME, _NAME)
            self._files.sync_directory("")
        except BaseException:
            self._files.close_file(descriptor)
            raise
        self._descriptor = descriptor


def read_head(files: Files) -> Head | None:
    """The newest valid slot of HEAD, None if there is none. Needs no right to write."""
    try:
        descriptor = files.open(_NAME)
    except FileNotFoundError:
        return None
    try:
        slots = _slots(files, descriptor)
    finally:
        files.close_file(descriptor)
    return slots[-1][1] if slots else None


def _slots(files: Files, descriptor: int) -> list[tuple[int, Head]]:
    """The turns and values of the valid slots, the newest last."""
    content = bytearray(2 * _SLOT_BYTES)
    nbytes = files.read(descriptor, [memoryview(content)], 0)
    ends = [start + _BODY_BYTES + _DIGEST_BYTES for start in (0, _SLOT_BYTES)]
    slots = [
        _decode(bytes(content[end - _BODY_BYTES - _DIGEST_BYTES : end]))
        for end in ends
        if end <= nbytes
    ]
    return sorted((each for each in slots if each is not None), key=lambda each: each[0])


def _encode(head: Head, turn: int) -> bytes:
    mark = head.clean
    clean = None if mark is None else [mark.nbytes, mark.inode, mark.mtime_ns]
    body = cbor2.dumps([FORMAT, head.sequence, head.link, head.epoch, clean, turn])
    assert len(body) <= _BODY_BYTES
    body = body.ljust(_BODY_BYTES, b"\0")
    return body + blake3(body).digest()


def _decode(slot: bytes) -> tuple[int, Head] | None:
    """The turn and value of a slot; None if it is torn or was never written."""
    body, digest = slot[:_BODY_BYTES], slot[_BODY_BYTES:]
    if digest != blake3(body).digest():
        return None
    fields: list[Any] = cbor2.loads(body)
    if fields[0] != FORMAT:
        raise FormatError(f"HEAD has format {fields[0]}; this walkback reads {FORMAT}. Upgrade it.")
    _, sequence, link, epoch, clean, turn = fields
    mark = None
    if clean is not None:
        mark = CleanMark(nbytes=clean[0], inode=clean[1], mtime_ns=clean[2])
    return turn, Head(sequence=sequence, link=link, epoch=epoch, clean=mark)
