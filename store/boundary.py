"""What is stored at one stop: the blocks that end there and, on a checkpoint, its sidecar.

A boundary is stored whole or not at all. It says what its payloads hold before there are any bytes,
so that room in memory and on disk is reserved before anything is copied.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..journal.words import Cause, FileName, Kind, NotStoredReason
from .payload import Description
from .stage import StagedPayload
from .tensors import Tensor, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One payload to be: a block of tokens ``start:end``, or the sidecar of position ``end``.

    ``parent`` is the key of the block before, or the namespace. A part without bytes gets no file.
    """

    kind: Kind
    key: bytes
    parent: bytes
    start: int
    end: int
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A token position, what leads there, and what its payloads will hold.

    ``parts`` are the blocks of this stop, parents first, then the sidecar if it is a checkpoint.
    """

    namespace: bytes
    layout_digest: bytes
    plan_digest: bytes
    position: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class NotStored:
    """A refusal, as a value: the request goes on, and the journal has the reason."""

    reason: NotStoredReason
    detail: str


@dataclass(slots=True, kw_only=True)
class Writing:
    """One payload on its way: its buffers serve restores until its commit is applied."""

    part: Part
    generation: int
    cause: Cause
    description: Description
    # Set when the bytes are handed over; emptied when nobody needs them any more.
    tensors: Sequence[Tensor] = ()
    is_handed_over: bool = False
    file: FileName | None = None
    staged: StagedPayload | None = None


@dataclass(slots=True, kw_only=True)
class Claim:
    """The exclusive right to store the missing parts of one boundary.

    Its fields change under the store's lock only. ``settled`` is set when the outcome is known:
    ``refusal`` is None if the boundary's missing parts are durable.
    """

    boundary: Boundary
    request: int
    writings: tuple[Writing, ...]
    restored_from: int | None
    # Block keys that this claim keeps from being victims.
    held: tuple[bytes, ...]
    # The block of an answer's end that is superseded once this boundary is durable.
    passed: bytes | None = None
    prefill_seconds: float = 0.0
    # Bytes of memory and of disk that are set aside for it.
    staging_bytes: int = 0
    reserved_bytes: int = 0
    readers: int = 0
    # From ``put`` on it is the store that settles it; published files are not renamed again.
    is_put: bool = False
    is_published: bool = False
    # Its files are complete and wait for a parent: its buffers are not needed any more.
    is_parked: bool = False
    # Computed from an entry that was reported bad meanwhile.
    is_tainted: bool = False
    refusal: NotStored | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_empty(self) -> bool:
        """Whether everything is stored, or being stored by somebody else, already."""
        return not self.writings

    @property
    def nbytes(self) -> int:
        """The bytes that a capture for this claim takes."""
        return sum(writing.part.nbytes for writing in self.writings)
