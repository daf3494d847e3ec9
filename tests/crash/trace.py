"""What the interposer saw: calls with their bytes, and the lines that the process said between."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .interposer import Kind

# Kind, is durable, error, bytes of content, of path and of other path, inode, offset.
_RECORD = struct.Struct("=IIiIIIQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that changed something, or failed to sync it. Paths are below the watched root.

    ``offset`` is where a write began, and what size a truncation or an allocation asked for.
    ``is_durable`` is a write through a descriptor that syncs each. ``error`` is the errno of a
    sync or a write that was made to fail; ``content`` is what it wrote all the same.
    """

    kind: Kind
    path: str
    other_path: str
    inode: int
    offset: int
    content: bytes
    is_durable: bool
    error: int

    def __str__(self) -> str:
        words = [str(self.kind.name).lower().replace("_", " "), self.path, self.other_path]
        if self.kind is Kind.WRITE:
            words.append(f"{len(self.content)} at {self.offset}")
        if self.error:
            words.append("(failed)")
        return " ".join(word for word in words if word)


def calls_of(trace: bytes) -> Iterator[Call]:
    """The calls of a trace in their order, marks among them."""
    position = 0
    while position < len(trace):
        kind, is_durable, error, *lengths, inode, offset = _RECORD.unpack_from(trace, position)
        position += _RECORD.size
        parts: list[bytes] = []
        for length in lengths:
            parts.append(trace[position : position + length])
            position += length
        content, path, other_path = parts
        yield Call(
            kind=Kind(kind),
            path=path.decode(),
            other_path=other_path.decode(),
            inode=inode,
            offset=offset,
            content=content,
            is_durable=bool(is_durable),
            error=error,
        )
