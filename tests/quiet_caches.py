"""Caches at rest, with one chain of boundaries, and what tests do to them behind their back."""

import contextlib
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import cache_maker
import lmdb
from cache_maker import NAMESPACE, SETTINGS

from walkback.journal import chain
from walkback.store.boundary import Boundary, NotStored
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore

FIELDS = (("format", "1"), ("weights", "ab" * 32))

# One payload with its header is charged 20 KiB.
_TENSOR_BYTES = 2048


def key_of(index: int) -> bytes:
    """The key of the chain's block ``index``."""
    return cache_maker.key_of("quiet", index)


def boundary_of(index: int) -> Boundary:
    """The boundary at the end of block ``index``, a checkpoint."""
    return cache_maker.boundary("quiet", index, nbytes=_TENSOR_BYTES)


def store_boundary(store: MutableStore, index: int) -> NotStored | None:
    """Store the boundary at the end of block ``index`` and return its outcome."""
    return cache_maker.outcome(cache_maker.put(store, boundary_of(index)))


@contextlib.contextmanager
def open_store(path: Path, settings: StoreSettings = SETTINGS) -> Generator[MutableStore]:
    """The store at ``path``, closed in order at the end and free of violations."""
    with MutableStore.open(path, settings, versions="test") as store:
        yield store
        cache_maker.settle(store)
        assert list(store.violations()) == []


def make_cache(path: Path, *, boundary_count: int = 3, settings: StoreSettings = SETTINGS) -> Path:
    """A cache at rest with one chain of boundaries."""
    with open_store(path, settings) as store:
        store.operator.see_namespace(NAMESPACE, FIELDS)
        for index in range(boundary_count):
            refusal = store_boundary(store, index)
            assert refusal is None, refusal
    return path


def crashed_copy(store: MutableStore, target: Path) -> Path:
    """The cache of an open store as it would stand if the process died now."""
    store.flush()
    return Path(shutil.copytree(store.files.root, target))


def edit_events(root: Path, edit: Callable[[Any, Any], object]) -> None:
    """Change the database of events behind the journal's back."""
    with lmdb.open(str(root / "journal"), lock=False, max_dbs=3) as env:
        database = env.open_db(b"events", create=False)
        with env.begin(write=True) as transaction:
            edit(transaction, database)


def remove_event(root: Path, sequence: int) -> None:
    """Take one event out of LMDB."""

    def remove(transaction: Any, database: Any) -> None:
        assert transaction.delete(chain.sequence_key(sequence), db=database)

    edit_events(root, remove)


def image_of(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder with its mtime and its bytes."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [root, *sorted(root.rglob("*"))]
    }
