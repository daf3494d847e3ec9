"""The facade that a script or a scheduler uses: open a cache, bind a model, restore, record, close.

cache = walkback.open_cache("prefixes")
bound = cache.bind(model, "path/to/model")
for response in bound.stream_generate(tokenizer, prompt, max_tokens=256):
    ...
cache.close()
"""

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..journal.errors import SettingsError, UnsupportedLayoutError, WalkbackError
from ..restore.identity import Namespace
from ..restore.plan import GRID_TOKENS, Grid
from ..store.core import Clock
from ..store.memo import load_memo, save_memo
from ..store.operator import Operator
from ..store.settings import GIB, StoreSettings, staging_bytes_for
from ..store.statistics import Statistics
from ..store.store import MutableStore
from .binding import BoundModel
from .depths import Depths, MutableDepths
from .fingerprint import (
    combined,
    fingerprint_adapter,
    fingerprint_parameters,
    fingerprint_structure,
    fingerprint_weights,
)
from .forms import KV_GROUP_SIZE, QUANTIZED_KV_START, KVQuantisation
from .probe import learn_layout

log = logging.getLogger("walkback")

# Each restore has two readers of its own once it is large, and those keep a disk busy.
RESTORES_AT_ONCE = 2


class Cache:
    """An open cache. One process at a time; any number of models."""

    def __init__(self, store: MutableStore, grid: Grid, *, salt: str) -> None:
        self.store = store
        self.grid = grid
        self._salt = salt
        self._requests = itertools.count(1)
        self._depths = MutableDepths()
        self._readers: ThreadPoolExecutor | None = None
        self._readers_lock = threading.Lock()

    def bind(
        self,
        model: Any,
        weights: str | Path | None = None,
        *,
        adapter: str | Path | None = None,
        make_cache: Callable[[], list[Any]] | None = None,
        shard: tuple[int, int] = (0, 1),
        kv_bits: int | None = None,
        kv_group_size: int = KV_GROUP_SIZE,
        quantized_kv_start: int = QUANTIZED_KV_START,
    ) -> BoundModel:
        """Bind a model: learn its layout by a probe forward and fingerprint its weights.

        ``weights`` is the model's local directory; without one the parameters in memory are hashed,
        at every binding, which is what to do for weights that were changed in memory. ``adapter``
        is the directory of the adapter that was loaded into the model. ``shard`` is this process's
        part of how many, for a model that is spread over machines: parts of one never meet.

        With ``kv_bits`` mlx-lm quantises KV, here from the first stop of the grid on that is not
        before ``quantized_kv_start``. Boundaries before it are those of the model without
        ``kv_bits``; later ones serve nobody who quantises otherwise. SettingsError when the KV
        cannot be quantised so.

        A model whose cache has leaves that walkback does not store is bound all the same: it
        restores nothing, and each stop is a NotStored(unsupported_layout).
        """
        self.store.require_open()
        make = make_cache or (lambda: make_prompt_cache(model))
        quantisation = None
        if kv_bits is not None:
            quantisation = KVQuantisation.on(
                self.grid, bits=kv_bits, group_size=kv_group_size, start=quantized_kv_start
            )
        try:
            layout = learn_layout(model, make)
        except UnsupportedLayoutError as error:
            log.warning("nothing of this model is stored: %s", error)
            return BoundModel(
                model=model,
                make_cache=make,
                store=self.store,
                grid=self.grid,
                namespace=None,
                unsupported=str(error),
                quantisation=quantisation,
                quantised=None,
                requests=self._requests,
                readers=self._make_readers,
                depths=self._depths,
            )
        namespace = Namespace(
            weights=self._fingerprint(model, weights),
            adapter=self._adapter_fingerprint(adapter),
            layout=layout,
            block_tokens=self.grid.block_tokens,
            rank=shard[0],
            world=shard[1],
            salt=self._salt,
        )
        if layout.has_point_state and not self.grid.is_chunk_safe:
            log.warning(
                "a stride of %d tokens is no multiple of %d: models that regroup tokens in chunks "
                "give other bits than with mlx-lm's own stops",
                self.grid.checkpoint_tokens,
                GRID_TOKENS,
            )
        stride_bytes = layout.block_nbytes(0, self.grid.checkpoint_tokens) + layout.point_nbytes()
        self.store.operator.raise_staging_limit(staging_bytes_for(stride_bytes))
        quantised = None
        if quantisation is not None:
            quantised = _quantised(model, make, namespace, quantisation)
        for each in (namespace, quantised):
            if each is not None:
                self._see(each)
        return BoundModel(
            model=model,
            make_cache=make,
            store=self.store,
            grid=self.grid,
            namespace=namespace,
            unsupported="",
            quantisation=quantisation,
            quantised=quantised,
            requests=self._requests,
            readers=self._make_readers,
            depths=self._depths,
        )

    @property
    def operator(self) -> Operator:
        """Pins, purges, reports of bad entries, the budget: what an operator does to a cache."""
        return self.store.operator

    def flush(self) -> None:
        """Return when all that was recorded is durable or refused."""
        self.store.flush()

    def statistics(self) -> Statistics:
        """What the cache holds and what happened since it was opened."""
        return self.store.statistics()

    def depths(self) -> Depths:
        """How deep the restores since the opening reached; any thread may ask."""
        return self._depths.now()

    def violations(self) -> list[str]:
        """Every broken invariant, of the journal's state and of the disk."""
        return list(self.store.violations())

    def close(self) -> None:
        """Store what was recorded and let go of the directory. Twice is harmless."""
        # Kept, and made if there are none: a restore that comes too late gets no thread from them.
        self._make_readers().shutdown(cancel_futures=True)
        self.store.close()

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, namespace: Namespace) -> None:
        try:
            self.store.operator.see_namespace(
                namespace.digest(), namespace.fields(secret=self.store.secret)
            )
        except WalkbackError as error:
            log.warning("a miss may not be able to say which field differs: %s", error)

    def _make_readers(self) -> ThreadPoolExecutor:
        with self._readers_lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(
                    RESTORES_AT_ONCE, thread_name_prefix="walkback-restore"
                )
            return self._readers

    def _fingerprint(self, model: Any, weights: str | Path | None) -> bytes:
        if weights is None:
            return fingerprint_parameters(model)
        memo = load_memo(self.store.files)
        known = len(memo)
        fingerprint = fingerprint_weights(Path(weights).expanduser(), memo)
        if len(memo) != known:
            self._remember(memo)
        return combined(fingerprint, fingerprint_structure(model))

    def _adapter_fingerprint(self, adapter: str | Path | None) -> bytes:
        memo = load_memo(self.store.files)
        known = len(memo)
        fingerprint = fingerprint_adapter(
            None if adapter is None else Path(adapter).expanduser(), memo
        )
        if len(memo) != known:
            self._remember(memo)
        return fingerprint

    def _remember(self, memo: dict[str, bytes]) -> None:
        try:
            save_memo(self.store.files, memo)
        except OSError as error:
            log.warning("fingerprints are not remembered: %s", error)


def _quantised(
    model: Any,
    make_cache: Callable[[], list[Any]],
    namespace: Namespace,
    quantisation: KVQuantisation,
) -> Namespace | None:
    """The namespace from where KV is quantised on; None if nothing of this cache ever is.

    mlx-lm leaves some kinds of caches as they are, those in a CacheList among them.
    """
    try:
        layout = learn_layout(model, lambda: quantisation.of_fresh(make_cache))
    except ValueError as error:
        raise SettingsError(f"KV of {quantisation} cannot be: {error}") from error
    if namespace.layout.difference(layout) is None:
        return None
    return dataclasses.replace(namespace, layout=layout, kv_quantisation=str(quantisation))


def open_cache(
    directory: str | Path,
    *,
    budget_bytes: int | None = None,
    free_floor_bytes: int = 10 * GIB,
    staging_bytes: int | None = None,
    block_tokens: int = 256,
    checkpoint_tokens: int = 2048,
    salt: str = "",
    junctions: bool = False,
    clock: Clock | None = None,
) -> Cache:
    """Open the cache in a directory, or make one; the directory's parent must exist.

    Args:
        budget_bytes: what the cache may take of the disk, journal included. None keeps the
            recorded budget; a new cache takes a quarter of what is free.
        free_floor_bytes: what the volume keeps free, whatever the budget says.
        staging_bytes: memory that may wait for the disk. None: what the bound models need.
        block_tokens: KV is cut in blocks of this many tokens.
        checkpoint_tokens: prefill stops, and the state is kept, every so many tokens: a multiple of
            ``block_tokens``, and of 256 for models that regroup tokens in chunks.
        salt: keeps tenants apart: what one stored no other salt restores.
        junctions: prefill also stops where a prompt parts from others that are stored.

    Raises:
        CacheLockedError: another process holds it, named by pid.
        RootRefusedError: the directory cannot be a cache; the message says what to do.
        FormatError: a newer walkback wrote it.
        SettingsError: settings that make no sense together.
    """
    if not isinstance(salt, str):  # pyright: ignore[reportUnnecessaryIsInstance] callers lack types
        raise SettingsError(f"salt is {salt!r}; it must be a str")
    grid = Grid(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens, junctions=junctions)
    defaults = StoreSettings()
    settings = StoreSettings(
        budget_bytes=budget_bytes,
        free_floor_bytes=free_floor_bytes,
        staging_bytes=defaults.staging_bytes if staging_bytes is None else staging_bytes,
        is_staging_fixed=staging_bytes is not None,
    )
    versions = f"walkback {version('walkback')}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    root = Path(directory).expanduser()
    store = MutableStore.open(root, settings, versions=versions, clock=clock)
    free_bytes = store.files.free_bytes()
    if free_bytes < free_floor_bytes:
        log.warning(
            "nothing will be stored: %s has %d MiB free, and free_floor_bytes keeps %d MiB free",
            root,
            free_bytes >> 20,
            free_floor_bytes >> 20,
        )
    statistics = store.statistics()
    if statistics.journal_bytes > statistics.budget_bytes // 2:
        log.warning(
            "little or nothing will be stored: the journal of %s takes %d KiB of a budget of "
            "%d KiB, so give it a larger one",
            root,
            statistics.journal_bytes >> 10,
            statistics.budget_bytes >> 10,
        )
    return Cache(store, grid, salt=salt)
