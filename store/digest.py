"""BLAKE3 over a payload's data, beside the reads or writes of the thread that moves it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from blake3 import blake3

# Cold reads in pieces of 8 MiB were 2-3 times faster than in pieces of 1 MiB, and a piece of this
# size is still in the processor's cache when it is hashed.
CHUNK_BYTES = 8 * 1024 * 1024


def chunks_of(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut buffers of bytes, in order, into lists of at most ``CHUNK_BYTES`` together."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        while len(buffer) >= room:
            yield [*chunk, buffer[:room]]
            buffer, chunk, room = buffer[room:], [], CHUNK_BYTES
        if len(buffer):
            chunk.append(buffer)
            room -= len(buffer)
    if chunk:
        yield chunk


class DataDigest:
    """The digest of buffers in the order in which they are added.

    Data of more than one chunk is hashed on a thread of its own, at most one chunk behind, while
    the caller reads or writes the next one; less is hashed in place, where a thread would cost more
    than it saves. Used by one thread, as a context: on leaving, no buffer is held any longer.
    """

    def __init__(self, total_bytes: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._hash = blake3()
        self._pool = ThreadPoolExecutor(1, "walkback-digest") if total_bytes > CHUNK_BYTES else None
        self._behind: Future[None] | None = None
        self._clock = clock
        self.wait_seconds = 0.0

    def add(self, chunk: Sequence[memoryview]) -> None:
        """Hash ``chunk`` next. The chunk before it has been let go of when this returns."""
        if self._pool is None:
            started = self._clock()
            self._update(chunk)
            self.wait_seconds += self._clock() - started
        else:
            self._catch_up()
            try:
                self._behind = self._pool.submit(self._update, chunk)
            except RuntimeError:
                # No thread to be had: too many of them, or the interpreter is on its way out while
                # the last payloads are written. The bytes count, not the overlap.
                self._update(chunk)

    def digest(self) -> bytes:
        """The digest of all that was added."""
        self._catch_up()
        return self._hash.digest()

    def _update(self, chunk: Sequence[memoryview]) -> None:
        for buffer in chunk:
            self._hash.update(buffer)

    def _catch_up(self) -> None:
        started = self._clock()
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()
        self.wait_seconds += self._clock() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._behind = None
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
