"""The closed sets that events speak of: kinds of payload, file names, and every reason.

The text of a reason is part of the journal's format: it is never changed, only added to.
"""

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """What a payload holds: the KV of one block, or the point state of one boundary."""

    BLOCK = 0
    SIDECAR = 1

    @property
    def folder(self) -> str:
        return "blocks" if self is Kind.BLOCK else "sidecars"

    @property
    def word(self) -> str:
        return self.name.lower()


class FileName(NamedTuple):
    """A payload's file: unique for ever, never derived from a key."""

    kind: Kind
    epoch: int
    counter: int

    @property
    def path(self) -> str:
        return f"{self.kind.folder}/{self.epoch:08x}/{self.counter:08x}"

    @property
    def staging_path(self) -> str:
        return f"staging/{self.epoch:08x}-{self.counter:08x}"

    @property
    def quarantine_path(self) -> str:
        return f"quarantine/{self.kind.word}-{self.epoch:08x}-{self.counter:08x}"


class Cause(enum.StrEnum):
    """Why a payload was staged."""

    PREFILL = "prefill"
    REPAIR = "repair"
    REPLACEMENT = "replacement"


class AbandonReason(enum.StrEnum):
    """Why a staged payload did not become an entry."""

    CRASH = "crash"
    WRITE_FAILED = "write_failed"
    PARENT = "parent"
    JOURNAL = "journal"


class EvictReason(enum.StrEnum):
    """Why an entry had to go."""

    BUDGET = "budget"
    FLOOR = "floor"
    UNREACHABLE = "unreachable"
    PAIR = "pair"
    THINNED = "thinned"


class MissReason(enum.StrEnum):
    """Why a lookup gave nothing to resume from."""

    EMPTY = "empty"
    TOO_SHORT = "too_short"
    UNSEEN = "unseen"
    NO_CHECKPOINT = "no_checkpoint"
    OTHER_NAMESPACE = "other_namespace"
    DAMAGED = "damaged"
    READ_ERROR = "read_error"
    OFFLINE = "offline"
    CLOSED = "closed"
    FAILED = "failed"
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    ABORTED = "aborted"
    IN_MEMORY = "in_memory"


class NotStoredReason(enum.StrEnum):
    """Why a boundary was not stored."""

    UNSUPPORTED_LAYOUT = "unsupported_layout"
    LAYOUT = "layout"
    POSITION = "position"
    NON_FINITE = "non_finite"
    OFF_GRID = "off_grid"
    BUDGET = "budget"
    FLOOR = "floor"
    FLOOR_UNREACHABLE = "floor_unreachable"
    PARENT = "parent"
    WRITE_FAILED = "write_failed"
    DISK_FULL = "disk_full"
    JOURNAL = "journal"
    WRITING_STOPPED = "writing_stopped"
    OFFLINE = "offline"
    CLOSED = "closed"
    ABORTED = "aborted"
    FAILED = "failed"
    DRAFT_MODEL = "draft_model"
    DISTRIBUTED = "distributed"
    PADDED = "padded"
    INSIDE_IMAGE = "inside_image"
    IMAGES = "images"
