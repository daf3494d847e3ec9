"""A model bound to a cache: restoring its prompts, and what a restore gives."""

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..journal.events import Missed
from ..journal.words import MissReason
from ..restore.identity import BlockLink, Namespace, block_chain
from ..restore.layout import Layout
from ..restore.materialise import MutableAssembly
from ..restore.plan import Grid, plan_after, plan_start
from ..restore.walkback import Lookup, NotResumed, Resumed, resume
from ..store.store import MutableStore
from .recording import MutableRecording, Recorded

log = logging.getLogger("walkback")

# Room behind a restored prefix, so that decoding some hundred tokens copies no buffer.
DECODE_HEADROOM_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """What a prompt resumes from. ``cache`` stands at ``endpoint``; it is fresh if that is 0.

    ``cache`` belongs to the caller. ``uncached`` token ids are left to prefill, at least one.
    """

    cache: list[Any]
    endpoint: int
    uncached: int
    # Why there is nothing to resume from, and in words; None and "" after a restore.
    reason: MissReason | None
    detail: str
    sidecars: int
    walkbacks: int
    mixed_plan: bool
    header_seconds: float
    bytes_seconds: float
    recording: MutableRecording


class _Made(NamedTuple):
    """A restored cache, and the block keys that are held for its recording."""

    cache: list[Any]
    held: tuple[bytes, ...]


class BoundModel:
    """One model on one cache. Its calls belong to the thread that owns the model's arrays."""

    def __init__(
        self,
        *,
        model: Any,
        make_cache: Callable[[], list[Any]],
        store: MutableStore,
        grid: Grid,
        namespace: Namespace | None,
        unsupported: str,
        requests: "itertools.count[int]",
    ) -> None:
        self.model = model
        self.make_cache = make_cache
        self.grid = grid
        self.layout: Layout | None = None if namespace is None else namespace.layout
        self.unsupported = unsupported
        self._store = store
        self._fields = () if namespace is None else namespace.fields(secret=store.secret)
        self._requests = requests
        self._producer = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, {mx.default_device()}"
        self.namespace = bytes(32) if namespace is None else namespace.digest()

    def restore(
        self, prompt: Sequence[int] | mx.array, *, headroom_tokens: int = DECODE_HEADROOM_TOKENS
    ) -> Restoration:
        """Resume a prompt from the newest valid point. A miss gives a fresh cache and a reason.

        Nothing that the disk holds or does raises here. The buffers have room for the prompt and
        ``headroom_tokens`` more.
        """
        token_ids = token_ids_of(prompt)
        request = next(self._requests)
        chain = self.chain(token_ids)
        layout = self.layout
        if layout is None:
            outcome: Resumed[_Made] | NotResumed = self._failed(
                request,
                chain,
                len(token_ids),
                self.unsupported,
                reason=MissReason.UNSUPPORTED_LAYOUT,
            )
        else:
            lookup = Lookup(
                request=request,
                namespace=self.namespace,
                fields=self._fields,
                layout=layout,
                grid=self.grid,
                chain=chain,
                prompt_tokens=len(token_ids),
            )
            outcome = self._resume(lookup, layout, len(token_ids) + headroom_tokens)
        resumed = outcome if isinstance(outcome, Resumed) else None
        recording = MutableRecording(
            Recorded(
                store=self._store,
                namespace=self.namespace,
                layout=layout,
                unsupported=self.unsupported,
                grid=self.grid,
                producer=self._producer,
                request=request,
                chain=chain,
                endpoint=0 if resumed is None else resumed.endpoint,
                plan_digest=self._plan_digest(resumed),
                restored_from=None if resumed is None else resumed.sequence or None,
                held=() if resumed is None else resumed.made.held,
            )
        )
        if isinstance(outcome, Resumed):
            return Restoration(
                cache=outcome.made.cache,
                endpoint=outcome.endpoint,
                uncached=len(token_ids) - outcome.endpoint,
                reason=None,
                detail="",
                sidecars=outcome.sidecars,
                walkbacks=outcome.walkbacks,
                mixed_plan=outcome.mixed_plan,
                header_seconds=outcome.header_seconds,
                bytes_seconds=outcome.bytes_seconds,
                recording=recording,
            )
        return Restoration(
            cache=self.make_cache(),
            endpoint=0,
            uncached=len(token_ids),
            reason=outcome.reason,
            detail=outcome.detail,
            sidecars=0,
            walkbacks=outcome.walkbacks,
            mixed_plan=False,
            header_seconds=0.0,
            bytes_seconds=0.0,
            recording=recording,
        )

    def chain(self, token_ids: Sequence[int]) -> tuple[BlockLink, ...]:
        """The full blocks of a prompt with their keys in this cache."""
        return block_chain(
            token_ids,
            namespace=self.namespace,
            secret=self._store.secret,
            block_tokens=self.grid.block_tokens,
        )

    def generate_step(self, prompt: Sequence[int] | mx.array, **options: Any) -> Any:
        """mlx-lm's ``generate_step`` over this cache: see ``walkback.generate_step``."""
        from .generation import generate_step

        return generate_step(self, prompt, **options)

    def stream_generate(self, tokenizer: Any, prompt: Any, **options: Any) -> Any:
        """mlx-lm's ``stream_generate`` over this cache: see ``walkback.stream_generate``."""
        from .generation import stream_generate

        return stream_generate(self, tokenizer, prompt, **options)

    def _resume(
        self, lookup: Lookup, layout: Layout, capacity_tokens: int
    ) -> Resumed[_Made] | NotResumed:
        def finish(assembly: MutableAssembly) -> _Made:
            cache = assembly.finish(self.make_cache)
            # While the lease still stands: what the recording continues must not go in between.
            tip = lookup.chain[assembly.endpoint // self.grid.block_tokens - 1]
            self._store.hold((tip.key,))
            return _Made(cache, (tip.key,))

        try:
            return resume(
                self._store,
                lookup,
                make_assembly=lambda endpoint: MutableAssembly(
                    layout, endpoint=endpoint, capacity_tokens=capacity_tokens
                ),
                finish=finish,
            )
        except Exception as error:
            # The one place that catches broadly: whatever went wrong, the request prefills.
            log.exception("a restore failed; the prompt is prefilled from its start")
            detail = f"{type(error).__name__}: {error}"
            return self._failed(lookup.request, lookup.chain, lookup.prompt_tokens, detail)

    def _failed(
        self,
        request: int,
        chain: Sequence[BlockLink],
        prompt_tokens: int,
        detail: str,
        *,
        reason: MissReason = MissReason.FAILED,
    ) -> NotResumed:
        """A miss that no entry is to blame for; the journal is told as of any other."""
        self._store.note_missed(
            Missed(
                request=request,
                tip=chain[-1].key[:8] if chain else b"",
                block_count=len(chain),
                prompt_tokens=prompt_tokens,
                walkbacks=0,
                reason=reason,
                detail=detail[:200],
            )
        )
        return NotResumed(reason=reason, detail=detail)

    def _plan_digest(self, resumed: Resumed[_Made] | None) -> bytes:
        """The digest of the plan that the rest of the prompt continues."""
        if resumed is None:
            return plan_start(self.grid)
        stored = resumed.plan_digest
        if resumed.endpoint % self.grid.checkpoint_tokens == 0:
            return stored
        # Cut inside a stride: from here on the chunks are not those of the stored plan.
        return plan_after(stored, resumed.endpoint)


def token_ids_of(prompt: Any) -> list[int]:
    """A prompt as a list of integers: a sequence of them, or an mlx or NumPy array.

    ValueError for anything else, which names the first token id that is none.
    """
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is a sequence of token ids, not {type(prompt).__name__}")
    items = cast(Any, prompt)
    dimensions = getattr(items, "ndim", 1)
    if dimensions != 1:
        raise ValueError(f"a prompt has one dimension, not {dimensions}")
    values: list[Any] = items.tolist() if hasattr(items, "tolist") else list(items)
    try:
        return list(map(operator.index, values))
    except TypeError:
        position = next(at for at, each in enumerate(values) if not hasattr(each, "__index__"))
        raise ValueError(
            f"token id {position} is {values[position]!r}, which is not an integer"
        ) from None
