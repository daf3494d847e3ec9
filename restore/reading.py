"""Reading what a candidate needs into its final buffers: the sidecar first, then its blocks."""

import contextlib
import functools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..journal.errors import PayloadDamagedError
from ..journal.files import Files
from ..store.lookup import Located
from ..store.tensors import TensorSpec
from .candidates import Candidate
from .layout import Layout
from .reader import Expected, read_payload

# Two readers overlap one's disk with the other's hashing; less than this is not worth a thread.
READERS = 2
_PARALLEL_BYTES = 32 << 20


class Assembly(Protocol):
    """The buffers of one endpoint. ``restore.materialise`` has the real one.

    Segments are asked for on the thread that owns it, and may be filled on any.
    """

    def block_segments(self, spec: TensorSpec, *, start: int, end: int) -> list[memoryview]: ...

    def point_segments(self, spec: TensorSpec) -> list[memoryview]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One payload that was read and verified, or could not be."""

    located: Located
    header_seconds: float = 0.0
    bytes_seconds: float = 0.0
    error: PayloadDamagedError | OSError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    located: Located
    layout_digest: bytes
    specs: tuple[TensorSpec, ...]
    segments: dict[str, list[memoryview]]


def read_candidate(
    files: Files,
    layout: Layout,
    candidate: Candidate,
    assembly: Assembly,
    *,
    clock: Callable[[], float],
) -> Generator[Reading]:
    """Fill the assembly, payload by payload. The caller stops at the first that failed.

    Every reader has ended, and let go of its segments, when the iterator is exhausted or closed.
    """
    digest = layout.digest()
    if candidate.sidecar is not None:
        specs = layout.point_specs()
        segments = {spec.name: assembly.point_segments(spec) for spec in specs}
        job = _Job(located=candidate.sidecar, layout_digest=digest, specs=specs, segments=segments)
        yield _read(files, job, clock=clock)
    jobs: list[_Job] = []
    for block in candidate.blocks:
        specs = layout.block_specs(block.start, block.end)
        if sum(spec.nbytes for spec in specs):
            segments = {
                spec.name: assembly.block_segments(spec, start=block.start, end=block.end)
                for spec in specs
            }
            jobs.append(_Job(located=block, layout_digest=digest, specs=specs, segments=segments))
    if sum(job.located.nbytes for job in jobs) < _PARALLEL_BYTES:
        yield from (_read(files, job, clock=clock) for job in jobs)
        return
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(READERS, thread_name_prefix="walkback-read"))
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(functools.partial(_read, files, clock=clock), jobs)


def _read(files: Files, job: _Job, *, clock: Callable[[], float]) -> Reading:
    located = job.located
    try:
        if located.tensors is not None:
            return _copy(job, clock)
        assert located.file is not None, "a payload with bytes has a file"
        result = read_payload(
            files,
            located.file.path,
            expected=Expected(
                header_digest=located.header_digest,
                kind=located.kind,
                key=located.key,
                parent=located.parent,
                namespace=located.namespace,
                layout_digest=job.layout_digest,
                start=located.start,
                end=located.end,
                generation=located.generation,
                nbytes=located.nbytes,
                tensors=job.specs,
            ),
            segments_of=lambda spec: job.segments[spec.name],
            clock=clock,
        )
    except (PayloadDamagedError, OSError) as error:
        return Reading(located=located, error=error)
    return Reading(
        located=located,
        header_seconds=result.header_seconds,
        bytes_seconds=result.data_seconds,
    )


def _copy(job: _Job, clock: Callable[[], float]) -> Reading:
    """Fill the segments from the buffers of a payload that is still being stored."""
    started = clock()
    tensors = job.located.tensors or ()
    if tuple(tensor.spec for tensor in tensors) != job.specs:
        raise PayloadDamagedError("what is being stored under this key has another layout")
    for tensor in tensors:
        offset = 0
        for segment in job.segments[tensor.spec.name]:
            segment[:] = tensor.buffer[offset : offset + len(segment)]
            offset += len(segment)
    return Reading(located=job.located, bytes_seconds=clock() - started)
