"""LMDB's meta pages, read without LMDB, which a damaged file can kill."""

import struct
from typing import NamedTuple

from .environment import FOLDER
from .files import Files

# Where LMDB 0.9 keeps things in a meta page, on machines of 64 bits: a page header of 16 bytes,
# magic, version, address and map size, then two databases of 48 bytes, the first of which begins
# with the page size; behind them the last page and the transaction.
_META_PAGE_BYTES = 40
_META_LAST_PAGE = 136
_META_END = 152


def may_be_truncated(files: Files, folder: str = FOLDER) -> bool:
    """Whether the file is shorter than its newest meta page says, so that reading it may kill.

    Pages at the end may never have been written, so this is a reason to look, not damage.
    """
    name = f"{folder}/data.mdb"
    status = files.status(name)
    if status is None or not status.is_file:
        return False
    descriptor = files.open(name)
    try:
        first = _meta_of(files, descriptor, 0)
        second = None if first is None else _meta_of(files, descriptor, first.page_bytes)
    finally:
        files.close_file(descriptor)
    if first is None or second is None:
        return True
    newest = max(first, second, key=lambda meta: meta.transaction)
    return status.nbytes < (newest.last_page + 1) * newest.page_bytes


class _Meta(NamedTuple):
    page_bytes: int
    last_page: int
    transaction: int


def _meta_of(files: Files, descriptor: int, offset: int) -> _Meta | None:
    """LMDB 0.9's meta page at ``offset``: None if it is not all there."""
    content = bytearray(_META_END)
    if files.read(descriptor, [memoryview(content)], offset) < _META_END:
        return None
    page_bytes = struct.unpack_from("=I", content, _META_PAGE_BYTES)[0]
    last_page, transaction = struct.unpack_from("=QQ", content, _META_LAST_PAGE)
    return _Meta(page_bytes, last_page, transaction)
