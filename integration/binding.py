"""A model bound to a cache: restoring its prompts."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from ..journal.errors import CacheClosedError
from ..journal.words import Kind
from ..restore.choosing import endpoint_of
from ..restore.identity import BlockLink, Namespace
from ..restore.images import ImageSpan
from ..restore.layout import Layout
from ..restore.plan import Grid, Plan
from ..store.store import MutableStore
from .depths import MutableDepths
from .forms import Binding, KVQuantisation, lookup_of
from .generation import generate_step, stream_generate
from .prompts import DECODE_HEADROOM_TOKENS, token_ids_of
from .recording import MutableRecording
from .restoration import PendingRestore, Restoration, chain_of


class BoundModel:
    """One model on one cache.

    ``start_restore``, ``lookup``, ``report_bad`` and ``chain`` may be called on any thread, the
    rest on the thread that owns the model's arrays. README, "Writing a scheduler", has the whole
    protocol, and ``examples/scheduler.py`` is one.
    """

    def __init__(
        self,
        *,
        model: Any,
        make_cache: Callable[[], list[Any]],
        store: MutableStore,
        grid: Grid,
        namespace: Namespace | None,
        unsupported: str,
        quantisation: KVQuantisation | None,
        quantised: Namespace | None,
        requests: "itertools.count[int]",
        readers: Callable[[], Executor],
        depths: MutableDepths,
    ) -> None:
        """``quantised`` is the namespace from ``quantisation.start`` on, None if nothing is."""
        self.model = model
        self.make_cache = make_cache
        self.grid = grid
        self.layout: Layout | None = None if namespace is None else namespace.layout
        self.unsupported = unsupported
        self.quantisation = quantisation
        self.namespace = bytes(32) if namespace is None else namespace.digest()
        self._requests = requests
        self._readers = readers
        self._binding = Binding(
            make_cache=make_cache,
            store=store,
            grid=grid,
            layout=self.layout,
            unsupported=unsupported,
            namespace=self.namespace,
            fields=() if namespace is None else namespace.fields(secret=store.secret),
            producer=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, {mx.default_device()}",
            depths=depths,
        )
        if quantisation is not None and quantised is not None:
            later = dataclasses.replace(
                self._binding,
                make_cache=lambda: quantisation.of_fresh(make_cache),
                layout=quantised.layout,
                namespace=quantised.digest(),
                fields=quantised.fields(secret=store.secret),
                start=quantisation.start,
            )
            self._binding = dataclasses.replace(self._binding, later=later)

    @property
    def turning_point(self) -> int | None:
        """Where the cache takes another form, which one cut to fewer tokens must not have."""
        return self._binding.turning_point

    def restore(
        self,
        prompt: Sequence[int] | mx.array,
        *,
        turn_ends: Iterable[int] = (),
        images: Iterable[ImageSpan] = (),
        headroom_tokens: int = DECODE_HEADROOM_TOKENS,
    ) -> Restoration:
        """Resume a prompt from the newest valid point. A miss gives a fresh cache and a reason.

        ``turn_ends`` are positions where a conversation may go on from: prefill stops there too.
        ``images`` are those of the prompt, all of them: what is computed from other images is not
        taken, and the endpoint is in none of them, so that each image is wholly cached or wholly
        the caller's to embed. The buffers have room for the prompt and ``headroom_tokens`` more.
        Nothing that the disk holds or does raises here.
        """
        return self._pending(prompt, turn_ends, images, headroom_tokens, 0, None).finish()

    def start_restore(
        self,
        prompt: Sequence[int] | mx.array,
        *,
        turn_ends: Iterable[int] = (),
        images: Iterable[ImageSpan] = (),
        headroom_tokens: int = DECODE_HEADROOM_TOKENS,
        beyond: int = 0,
    ) -> PendingRestore:
        """Begin to resume a prompt on a reader's thread, and return at once.

        May be called on any thread. Finish it on the thread that owns the model's arrays, or cancel
        it. Two are read at a time; each takes the memory of its prompt. A caller that has a cache
        of ``beyond`` tokens has nothing read unless it is deeper.
        """
        return self._pending(prompt, turn_ends, images, headroom_tokens, beyond, self._readers())

    def _pending(
        self,
        prompt: Sequence[int] | mx.array,
        turn_ends: Iterable[int],
        images: Iterable[ImageSpan],
        headroom_tokens: int,
        beyond: int,
        readers: Executor | None,
    ) -> PendingRestore:
        return PendingRestore(
            self._binding,
            chain_of(self._binding, token_ids_of(prompt), images),
            turn_ends=turn_ends,
            request=next(self._requests),
            headroom_tokens=headroom_tokens,
            beyond=beyond,
            readers=readers,
        )

    def record(self, prompt: Sequence[int] | mx.array) -> MutableRecording:
        """A recording of token ids whose cache the caller has, from their start; nothing is read.

        What is stored of their beginning is not stored again.
        """
        return self._pending(prompt, (), (), 0, 0, None).adopt([], 0).recording

    def lookup(self, prompt: Sequence[int] | mx.array, *, images: Iterable[ImageSpan] = ()) -> int:
        """How many tokens of a prompt the index can restore now, to order or to route requests by.

        Opens no file, keeps nothing from eviction and counts nothing; a restore may yet find less.
        Any thread may call it, and it does not wait for the disk. 0 once the cache is closed.
        """
        layout, binding = self.layout, self._binding
        if layout is None:
            return 0
        chain = chain_of(binding, token_ids_of(prompt), images)
        plan = Plan(binding.grid, chain.token_count)
        lookup = lookup_of(binding, layout, chain, plan, request=0, beyond=0)
        try:
            found, _ = binding.store.choose(lambda view: (endpoint_of(view, lookup), ()))
        except CacheClosedError:
            return 0
        return found

    def report_bad(
        self,
        prompt: Sequence[int] | mx.array,
        endpoint: int,
        *,
        images: Iterable[ImageSpan] = (),
        detail: str = "",
    ) -> None:
        """Drop what a prompt resumed from at ``endpoint``, after it gave wrong results.

        With it goes all that may have been computed from it, other prompts' entries included; what
        leads there stays, and serves the next restore. ``detail`` goes into the journal. Any thread
        may call it; it waits for one or two commits.

        Raises:
            ValueError: the prompt has no boundary there, as at 0.
            CacheClosedError, NotRecordedError: nothing was dropped.
        """
        chain = chain_of(self._binding, token_ids_of(prompt), images)
        form, later = self._binding.at(endpoint), self._binding.later
        chains = [chain if form is self._binding else chain.under(form.namespace)]
        if later is not None and form is not later:
            # What was computed from it and then took the later form stands there.
            chains.append(chain.under(later.namespace))
        # What was computed behind a tail hangs below the full block above it, or, in the first
        # block, is the full block itself.
        full = endpoint // chain.block_tokens * chain.block_tokens
        for each in chains:
            tip = each.ending_at(endpoint)
            for link in [each.ending_at(full)] if full else [tip, *each.links[:1]]:
                self._binding.store.operator.report_bad(Kind.BLOCK, link.key, detail)

    def chain(
        self, token_ids: Sequence[int], images: Iterable[ImageSpan] = ()
    ) -> tuple[BlockLink, ...]:
        """The full blocks of a prompt with their keys in this cache."""
        return chain_of(self._binding, token_ids, images).links

    def generate_step(self, prompt: Sequence[int] | mx.array, **options: Any) -> Any:
        """mlx-lm's ``generate_step`` over this cache: see ``walkback.generate_step``."""
        return generate_step(self, prompt, **options)

    def stream_generate(self, tokenizer: Any, prompt: Any, **options: Any) -> Any:
        """mlx-lm's ``stream_generate`` over this cache: see ``walkback.stream_generate``."""
        return stream_generate(self, tokenizer, prompt, **options)
