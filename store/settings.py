"""The settings of a cache, checked together, with the evidence for each default."""

import os
from dataclasses import dataclass

from ..journal.errors import SettingsError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store may use of disk and memory. All sizes are bytes.

    ``budget_bytes`` None means the recorded value, or a quarter of what is free when the cache is
    made. ``staging_bytes`` bounds the memory that waits to be written.
    """

    budget_bytes: int | None = None
    # Peers on Macs settled on 10 GiB: below it the system starts to purge and to warn.
    free_floor_bytes: int = 10 * GIB
    staging_bytes: int = 256 * MIB
    # Whether binding a model may raise it to what its checkpoints need.
    is_staging_fixed: bool = False
    # One event per restore would be an fsync per restore; a lost touch only ages an entry.
    request_events_max: int = 1000
    request_events_seconds: float = 30.0
    compact_every_events: int = 5_000
    journal_events_kept: int = 50_000
    # How long a writer waits for its own evictions before it refuses the store.
    room_wait_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in ("budget_bytes", "free_floor_bytes", "staging_bytes"):
            require_bytes(field, getattr(self, field), is_optional=field == "budget_bytes")
        if self.budget_bytes is not None and self.budget_bytes < MIB:
            raise SettingsError(
                f"budget_bytes is {self.budget_bytes}; a cache needs at least {MIB} bytes"
            )
        for name in ("free_floor_bytes", "staging_bytes", "journal_events_kept"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} must not be negative")
        if self.request_events_max < 1 or self.compact_every_events < 1:
            raise SettingsError("request_events_max and compact_every_events must be at least 1")


def require_bytes(name: str, value: object, *, is_optional: bool = False) -> None:
    """SettingsError unless a setting is a whole number of bytes that a file system could hold."""
    if value is None and is_optional:
        return
    if type(value) is not int or not -1 << 62 < value < 1 << 62:
        raise SettingsError(
            f"{name} is {value!r}; it must be an int, a number of bytes such as 128 << 30"
        )


def staging_bytes_for(stride_bytes: int) -> int:
    """The default staging bound for a model that captures ``stride_bytes`` at each checkpoint.

    Two checkpoints, so that one is captured while another is written; at least 256 MiB, so that
    small models do not write inline; at most 5% of memory, unless that is less than one checkpoint.
    """
    wanted = max(2 * stride_bytes, 256 * MIB)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(wanted, memory // 20), stride_bytes, 1)
