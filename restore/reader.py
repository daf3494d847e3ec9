"""Reading a payload into buffers of the caller's, and believing nothing before it is checked.

The shell of the restore on the disk's side: no mlx. A reader holds no state, so any number of
threads may read at once.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ..journal.errors import PayloadDamagedError
from ..journal.files import Files
from ..journal.words import Kind
from ..store.payload import Description
from ..store.tensors import TensorSpec
from ..store.verify import Header, opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the journal and the lookup know of a payload before it is opened.

    ``start`` and ``end`` are the positions that every tensor in it must be valid for; ``tensors``
    are those that the layout demands, in its order.
    """

    header_digest: bytes
    kind: Kind
    key: bytes
    parent: bytes
    namespace: bytes
    layout_digest: bytes
    start: int
    end: int
    generation: int
    nbytes: int
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """A payload that was read and verified. Opening counts as header time."""

    header: Header
    header_seconds: float
    data_seconds: float
    hash_wait_seconds: float


def read_header(files: Files, path: str, *, expected: Expected) -> Header:
    """Return the header of a payload that is what ``expected`` says. No tensor is read."""
    with opened(files, path, nbytes=expected.nbytes, expected=expected.header_digest) as payload:
        _compare(payload.header.description, expected)
        return payload.header


def read_payload(
    files: Files,
    path: str,
    *,
    expected: Expected,
    segments_of: Callable[[TensorSpec], Sequence[memoryview]],
    clock: Callable[[], float] = time.perf_counter,
) -> ReadResult:
    """Read a payload straight into the buffers that ``segments_of`` gives for each tensor.

    It is asked once per tensor, in order, and only after size, header, position and layout agree.
    Its buffers are writable, contiguous, and together as long as the tensor. After an exception
    what they hold must not be used. ``OSError`` passes unchanged.
    """
    started = clock()
    with opened(files, path, nbytes=expected.nbytes, expected=expected.header_digest) as payload:
        _compare(payload.header.description, expected)
        checked = clock()
        buffers = [buffer for spec in expected.tensors for buffer in _buffers(spec, segments_of)]
        hash_wait_seconds = payload.read_data(buffers, clock=clock)
        return ReadResult(
            header=payload.header,
            header_seconds=checked - started,
            data_seconds=clock() - checked,
            hash_wait_seconds=hash_wait_seconds,
        )


def _buffers(
    spec: TensorSpec, segments_of: Callable[[TensorSpec], Sequence[memoryview]]
) -> Generator[memoryview]:
    total = 0
    for segment in segments_of(spec):
        total += segment.nbytes
        if segment.readonly:
            raise ValueError(f"{spec.name}: a segment cannot be written to")
        if segment.nbytes:
            plain = segment.format == "B" and segment.ndim == 1
            yield segment if plain else segment.cast("B")
    if total != spec.nbytes:
        raise ValueError(f"{spec.name}: segments of {total} bytes for {spec.nbytes}")


def _compare(found: Description, expected: Expected) -> None:
    """Refuse a payload that is well formed but not the one that was asked for."""
    for name, value, wanted in (
        ("kind", found.kind, expected.kind),
        ("key", found.key, expected.key),
        ("parent", found.parent, expected.parent),
        ("namespace", found.namespace, expected.namespace),
        ("layout digest", found.layout_digest, expected.layout_digest),
        ("generation", found.generation, expected.generation),
        ("token range", (found.start, found.end), (expected.start, expected.end)),
    ):
        if value != wanted:
            raise PayloadDamagedError(
                f"its {name} is {_shown(value)}, and should be {_shown(wanted)}"
            )
    if found.tensors != expected.tensors:
        raise PayloadDamagedError(_difference(found.tensors, expected.tensors))


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


def _difference(found: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]) -> str:
    """The first way in which the tensors of a payload are not those of the layout."""
    by_name = {spec.name: spec for spec in found}
    demanded = {spec.name for spec in expected}
    for spec in expected:
        other = by_name.get(spec.name)
        if other is None:
            return f"{spec.name!r:.80} is missing"
        if other != spec:
            return (
                f"{spec.name!r:.80} is {other.dtype} {other.shape}, "
                f"and the layout says {spec.dtype} {spec.shape}"
            )
    for spec in found:
        if spec.name not in demanded:
            return f"{spec.name!r:.80} is in no layout"
    return "its tensors stand in another order than the layout's"
