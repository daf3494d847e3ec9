"""Reading a payload file as far as it can be trusted: its header, or all of it.

What is wrong with the bytes is a ``PayloadDamagedError``. What is wrong with the disk is an
``OSError``, unchanged: a file that could not be read is not a damaged one.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from ..journal.errors import PayloadDamagedError
from ..journal.files import Files
from .decoder import decode_header, header_end
from .digest import CHUNK_BYTES, DataDigest, chunks_of
from .payload import ALIGNMENT_BYTES, Description, header_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a payload says of itself, and what the file system says of the file."""

    description: Description
    data_digest: bytes
    header_digest: bytes
    data_offset: int
    nbytes: int
    charge_bytes: int


@dataclass(slots=True, kw_only=True)
class OpenPayload:
    """An open file whose header has been checked. The data has not."""

    files: Files
    descriptor: int
    header: Header

    def read_data(
        self,
        buffers: Iterable[memoryview],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> float:
        """Fill ``buffers`` with the whole data and check it; return the seconds spent on hashing.

        Buffers may come lazily: each chunk is read before the next one is asked for, and two chunks
        later its buffers are free again. What a failed check leaves in them must not be used.
        """
        offset = self.header.data_offset
        with DataDigest(self.header.nbytes - offset, clock=clock) as digest:
            for chunk in chunks_of(buffers):
                wanted = sum(map(len, chunk))
                got = self.files.read(self.descriptor, chunk, offset)
                if got != wanted:
                    raise PayloadDamagedError(
                        f"it ends at {offset + got}, and the journal or the header says later"
                    )
                digest.add(chunk)
                offset += wanted
            assert offset == self.header.nbytes, "the buffers do not hold the data"
            if digest.digest() != self.header.data_digest:
                raise PayloadDamagedError("its data does not match its digest")
        return digest.wait_seconds


@contextlib.contextmanager
def opened(
    files: Files, path: str, *, nbytes: int | None, expected: bytes | None
) -> Generator[OpenPayload]:
    """Open a payload and check its size and header: against the journal's, where that is known.

    A ``PayloadDamagedError`` from inside the context gets the path in front of it.
    """
    descriptor = files.open(path)
    try:
        header = _read_header(files, descriptor, nbytes=nbytes, expected=expected)
        yield OpenPayload(files=files, descriptor=descriptor, header=header)
    except PayloadDamagedError as error:
        raise PayloadDamagedError(f"{path}: {error}") from None
    finally:
        files.close_file(descriptor)


def verify_payload(files: Files, path: str, expected_header_digest: bytes | None) -> Header:
    """Check every byte of a file without keeping any; what it says of itself is then true."""
    with opened(files, path, nbytes=None, expected=expected_header_digest) as payload:
        payload.read_data(_scratch(payload.header.nbytes - payload.header.data_offset))
        return payload.header


def _scratch(total_bytes: int) -> Generator[memoryview]:
    """Buffers for ``total_bytes`` that are dropped: two, since the digest is one chunk behind."""
    two = [memoryview(bytearray(min(CHUNK_BYTES, total_bytes))) for _ in range(2)]
    while total_bytes:
        yield two[0][:total_bytes]
        total_bytes -= min(CHUNK_BYTES, total_bytes)
        two.reverse()


def _read_header(
    files: Files, descriptor: int, *, nbytes: int | None, expected: bytes | None
) -> Header:
    status = files.status_of(descriptor)
    if nbytes is not None and status.nbytes != nbytes:
        raise PayloadDamagedError(f"it has {status.nbytes} bytes, and the journal says {nbytes}")
    first = _read(files, descriptor, min(ALIGNMENT_BYTES, status.nbytes), offset=0)
    end = header_end(first, status.nbytes)
    if end > len(first):
        first += _read(files, descriptor, end - len(first), offset=len(first))
    found = header_digest(first)
    if expected is not None and found != expected:
        raise PayloadDamagedError("its header is not the one that the journal committed")
    description, data_digest = decode_header(first, status.nbytes)
    return Header(
        description=description,
        data_digest=data_digest,
        header_digest=found,
        data_offset=end,
        nbytes=status.nbytes,
        charge_bytes=status.charge_bytes,
    )


def _read(files: Files, descriptor: int, nbytes: int, *, offset: int) -> bytes:
    buffer = bytearray(nbytes)
    got = files.read(descriptor, [memoryview(buffer)], offset)
    if got != nbytes:
        raise PayloadDamagedError(f"it ends at {offset + got}, inside its header")
    return bytes(buffer)
