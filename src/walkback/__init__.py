"""walkback: a durable, crash-safe, bounded prefix cache for MLX language models, hybrids first.

Names are resolved when they are first used: a bare ``import walkback`` loads neither mlx nor lmdb.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .integration.binding import BoundModel
    from .integration.cache import Cache, open_cache
    from .integration.generation import generate_step, stream_generate
    from .integration.recording import MutableRecording
    from .integration.restoration import PendingRestore, Restoration
    from .journal.errors import (
        CacheClosedError,
        CacheLockedError,
        FormatError,
        NotRecordedError,
        RootRefusedError,
        SettingsError,
        WalkbackError,
    )
    from .journal.words import MissReason, NotStoredReason
    from .restore.images import ImageSpan
    from .store.boundary import NotStored
    from .store.statistics import Statistics

_HOMES = {
    "BoundModel": "integration.binding",
    "Cache": "integration.cache",
    "CacheClosedError": "journal.errors",
    "CacheLockedError": "journal.errors",
    "FormatError": "journal.errors",
    "ImageSpan": "restore.images",
    "MissReason": "journal.words",
    "MutableRecording": "integration.recording",
    "NotRecordedError": "journal.errors",
    "NotStored": "store.boundary",
    "NotStoredReason": "journal.words",
    "PendingRestore": "integration.restoration",
    "Restoration": "integration.restoration",
    "RootRefusedError": "journal.errors",
    "SettingsError": "journal.errors",
    "Statistics": "store.statistics",
    "WalkbackError": "journal.errors",
    "generate_step": "integration.generation",
    "open_cache": "integration.cache",
    "stream_generate": "integration.generation",
}

__all__ = [
    "BoundModel",
    "Cache",
    "CacheClosedError",
    "CacheLockedError",
    "FormatError",
    "ImageSpan",
    "MissReason",
    "MutableRecording",
    "NotRecordedError",
    "NotStored",
    "NotStoredReason",
    "PendingRestore",
    "Restoration",
    "RootRefusedError",
    "SettingsError",
    "Statistics",
    "WalkbackError",
    "generate_step",
    "open_cache",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
