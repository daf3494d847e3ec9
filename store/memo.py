"""Fingerprints of weight files, remembered between openings. Lost at no cost but time."""

import contextlib
from typing import Any, cast

import cbor2

from ..journal.files import Files

_NAME = "FINGERPRINTS"
_ENTRIES_MAX = 4096
_BYTES_MAX = 1 << 20


def load_memo(files: Files) -> dict[str, bytes]:
    """What was remembered; nothing if that cannot be read."""
    try:
        descriptor = files.open(_NAME)
    except OSError:
        return {}
    try:
        buffer = bytearray(_BYTES_MAX)
        count = files.read(descriptor, [memoryview(buffer)], 0)
        memo: Any = cbor2.loads(bytes(buffer[:count]))
    except (OSError, cbor2.CBORDecodeError):
        return {}
    finally:
        files.close_file(descriptor)
    if not isinstance(memo, dict):
        return {}
    entries = cast("dict[Any, Any]", memo)
    return {
        key: value
        for key, value in entries.items()
        if isinstance(key, str) and isinstance(value, bytes) and len(value) == 32
    }


def save_memo(files: Files, memo: dict[str, bytes]) -> None:
    """Remember the newest entries. Not durable: a hash is computed again at worst."""
    content = cbor2.dumps(dict(list(memo.items())[-_ENTRIES_MAX:]))
    new = f"{_NAME}.new"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(new)
    descriptor = files.create(new)
    try:
        files.write(descriptor, [content], 0)
    finally:
        files.close_file(descriptor)
    files.rename(new, _NAME)
