"""What the seams of a server share: the cache, the bound model, the request between two of them.

mlx-lm's server calls its prompt cache, its batch generator and its tokenizer one after the other
for a request, without telling them of each other. They meet here.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownVariableType=false

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.utils import hf_repo_to_path

from ...journal.errors import WalkbackError
from ...journal.words import NotStoredReason
from ...restore.images import ImageSpan
from ...store.boundary import NotStored
from ..binding import BoundModel
from ..cache import Cache
from ..restoration import PendingRestore, Restoration
from .figures import MemoryFigures, MemoryTier
from .images import RequestImages
from .in_flight import MutablePrefills, Prefill
from .memory import hot_bytes_for
from .options import ServeOptions, size_text
from .quiet import QuietRecording, quietly
from .seams import Way
from .telling import MutableTeller
from .turns import closing_ids
from .vision import why_images_do_not_resume

log = logging.getLogger("walkback")


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A request that is tokenised and whose prefix is being read."""

    model_key: Any
    token_ids: list[int]
    # What mlx-lm's server makes of a request besides: segments, their types, the initial state.
    segments: list[list[int]]
    segment_types: list[str]
    initial_state: str
    turn_ends: list[int]
    # What memory held when the reading began, and the reading; None if nothing is stored for it.
    beyond: int
    pending: PendingRestore | None
    # Its images, and what mlx-lm's server makes of them.
    images: RequestImages | None = None
    vision: Any = None
    # Whether this mlx-lm says what it makes of images, of prompts without any too.
    knows_images: bool = True
    # What others may wait for; None if nothing is stored of it.
    prefill: Prefill | None = None
    # What it resumes from, once that is known, and what is told of its stops: of both or neither.
    restoration: Restoration | None = None
    recording: QuietRecording | None = None

    @property
    def key(self) -> list[int]:
        """What names it in memory."""
        return self.token_ids if self.images is None else self.images.key

    @property
    def spans(self) -> tuple[ImageSpan, ...]:
        return () if self.images is None else self.images.spans

    def cancel(self) -> None:
        """Give up what nobody will finish, so that nothing stays leased or held. Never raises."""
        recording, self.restoration, self.recording = self.recording, None, None
        if self.prefill is not None:
            self.prefill.end()
        if recording is not None:
            recording.finish()
        elif self.pending is not None:
            with quietly("a restore was not given up; what it keeps goes with it"):
                self.pending.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTo:
    """A loaded model that is bound: replaced as a whole, so that any thread may look at it."""

    model_key: Any
    tokenizer: Any
    bound: BoundModel
    closing: frozenset[int]
    # Whether prompts of unlike length may be prefilled together.
    is_padding_safe: bool
    # Whether what it computes of prompts with images may be kept.
    takes_images: bool = True


class MutableSession:
    """One owner: the generation thread.

    Others may read ``bound_to``, ask ``memory_figures`` and wait in ``prefills``.
    """

    def __init__(self, cache: Cache | None, options: ServeOptions, way: Way = Way.STOPS) -> None:
        """Without a cache everything is as in mlx-lm, but for what would kill its thread."""
        self.cache = cache
        self._way = way
        self.options = options
        self.bound_to: BoundTo | None = None
        # What the tier in memory may hold, in bytes; None before a model is loaded, or always.
        self.hot_max = options.hot_max
        self.teller = MutableTeller()
        self.prefills = MutablePrefills()
        # What the tier in memory holds; it says so itself once mlx-lm has made it. For any thread.
        self.memory_tier: MemoryFigures = lambda: None
        self._current: Prepared | None = None
        self._told: set[NotStoredReason] = set()
        self._why_unbound = "no model is loaded"

    def memory_figures(self) -> MemoryTier | None:
        """What the tier in memory holds now, None before there is one. Any thread."""
        return self.memory_tier()

    def bind(self, provider: Any) -> None:
        """Bind what the provider has just loaded. A failure leaves it uncached, and says so."""
        self.bound_to = None
        if self.cache is None:
            return
        if self.options.hot_max is None:
            with quietly("caches in RAM have no bound in bytes: it could not be worked out"):
                self.hot_max = hot_bytes_for(provider.model)
        self._why_unbound = "its model could not be bound"
        self._bind(self.cache, provider)
        self._tell_of_memory(self.cache, provider)

    def _bind(self, cache: Cache, provider: Any) -> None:
        if provider.draft_model is not None:
            self._refuse(NotStoredReason.DRAFT_MODEL, "a draft model rewinds, a state cannot")
            self._why_unbound = "there is a draft model"
            return
        if provider.is_distributed:
            self._refuse(NotStoredReason.DISTRIBUTED, "ranks would have to agree on a prefix")
            self._why_unbound = "it is distributed"
            return
        model_path, adapter_path, _ = provider.model_key
        try:
            bound = cache.bind(
                provider.model,
                local_directory(model_path),
                adapter=adapter_path,
                **_quantisation_of(getattr(provider, "cli_args", None)),
            )
            layout = bound.layout
            has_state = layout is not None and layout.has_point_state
            is_safe = not (has_state and self._padding_reaches_state(provider.model))
            self.bound_to = BoundTo(
                model_key=provider.model_key,
                tokenizer=provider.tokenizer,
                bound=bound,
                closing=closing_ids(provider.tokenizer),
                is_padding_safe=is_safe,
                takes_images=self._may_keep_images(bound, provider),
            )
            if not is_safe:
                self._tell_of_padding()
        except WalkbackError as error:
            log.warning("%s is served uncached: %s", model_path, error)
        except Exception:
            log.exception("%s is served uncached: it could not be bound", model_path)

    def _padding_reaches_state(self, model: Any) -> bool:
        if self._way is Way.WHOLE_PROMPTS:
            # Nothing is padded then unless the user wants it, and the model cannot be asked.
            return self.options.unsafe_batching
        from .padding import padding_reaches_state

        return padding_reaches_state(model)

    @property
    def stores(self) -> bool:
        """Whether what requests compute is stored."""
        return not self.why_unstored

    @property
    def why_unstored(self) -> str:
        """Why nothing that requests compute is stored, in words; "" if it is.

        A row whose state padding has reached is wrong, and so is all that is computed from it, in
        memory too. It cannot be told from others later, so with --unsafe-batching none is stored.
        """
        bound_to = self.bound_to
        if bound_to is None:
            return self._why_unbound
        if self.options.read_only:
            return "--read-only"
        if not bound_to.is_padding_safe and self.options.unsafe_batching:
            return "--unsafe-batching"
        return ""

    def unbind(self) -> None:
        self.bound_to = None

    def bound_for(self, model_key: Any) -> BoundTo | None:
        """The bound model, if it is the one with this key."""
        bound_to = self.bound_to
        return bound_to if bound_to is not None and bound_to.model_key == model_key else None

    def put(self, prepared: Prepared | None) -> None:
        """Leave a request for the next seam; one that nobody took is given up."""
        before, self._current = self._current, prepared
        if before is not None:
            before.cancel()

    def current(self, key: list[int]) -> Prepared | None:
        """The request that was left, if it is the one with this key."""
        current = self._current
        return current if current is not None and current.key == key else None

    def take(self) -> Prepared | None:
        """The request that was left, which is not there any more."""
        current, self._current = self._current, None
        return current

    def close(self) -> None:
        """Store what was recorded and let go of the directory."""
        with quietly("a request was not given up"):
            self.put(None)
        self.unbind()
        if self.cache is not None:
            self.cache.close()
        self.teller.close()

    def tell_of_settings(self) -> None:
        """Say what the server does with its cache, once the log is set up."""
        cache, options = self.cache, self.options
        if cache is None:
            log.info("walkback: no cache; this is mlx-lm's server as it is")
            return
        log.info(
            "walkback: the cache %s may take %s and leaves %s of its volume free; blocks of %d "
            "tokens, checkpoints every %d%s",
            options.cache_dir,
            size_text(cache.statistics().budget_bytes),
            size_text(options.disk_floor),
            options.block_tokens,
            options.checkpoint_tokens,
            ", nothing is stored" if options.read_only else "",
        )

    def _tell_of_memory(self, cache: Cache, provider: Any) -> None:
        log.info(
            "walkback: for %s, caches in RAM may take %s, and %s may wait for the disk",
            provider.model_key[0],
            "any size" if self.hot_max is None else size_text(self.hot_max),
            size_text(cache.statistics().staging_limit_bytes),
        )

    def _tell_of_padding(self) -> None:
        if self.options.unsafe_batching:
            detail = "padding reaches this model's state, and --unsafe-batching pads"
            self._refuse(NotStoredReason.PADDED, detail)
            return
        log.warning(
            "prompts are prefilled one at a time: in this mlx-lm the padding of a batch reaches "
            "the state of this model. --unsafe-batching does it all the same, and stores nothing"
        )

    def _may_keep_images(self, bound: BoundModel, provider: Any) -> bool:
        processor = getattr(provider, "processor", None)
        if processor is None or bound.layout is None:
            return True
        try:
            reason = why_images_do_not_resume(bound, processor, provider.tokenizer)
        except Exception as error:
            log.debug("a model could not be asked about its images", exc_info=True)
            reason = f"it cannot be asked: {type(error).__name__}: {error}"
        if reason:
            self.refuse_images(reason)
        return not reason

    def refuse_images(self, detail: str) -> None:
        """Say, once, that nothing of prompts with images is stored. The generation thread's."""
        self._refuse(NotStoredReason.IMAGES, detail, what="nothing of prompts with images")

    def _refuse(self, reason: NotStoredReason, detail: str, *, what: str = "nothing") -> None:
        if self.cache is None or reason in self._told:
            return
        self._told.add(reason)
        log.warning("%s is stored: %s", what, detail)
        with quietly("the journal is not told so"):
            self.cache.store.refuse(NotStored(reason, detail), request=0, key=b"", position=0)


def _quantisation_of(cli_args: Any) -> dict[str, Any]:
    """mlx-lm's flags of quantised KV, where its server has them."""
    names = ("kv_bits", "kv_group_size", "quantized_kv_start")
    return {name: getattr(cli_args, name) for name in names if hasattr(cli_args, name)}


def local_directory(model: str) -> Path:
    """Where the files of a model are on this machine: a directory, or a hub's that was fetched."""
    path = Path(model).expanduser()
    return path if path.exists() else hf_repo_to_path(model)
