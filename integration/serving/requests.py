"""mlx-lm's request queue, with each request tokenised and its prefix read before it joins.

Both happen on the thread of the HTTP request, so that the generation thread, which decodes for all
others meanwhile, waits neither for a tokenizer nor for a disk.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false

import copy
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from mlx_lm.server import ResponseGenerator

from ...restore.plan import Plan
from .images import images_of, unshared_key
from .in_flight import WAIT_SECONDS_MAX, Prefill
from .quiet import quietly
from .session import BoundTo, MutableSession, Prepared
from .tiers import TieredPromptCache
from .turns import turn_ends

log = logging.getLogger("walkback")

# A disk that hangs must not hang its request for ever: after this it joins, and the generation
# thread waits for what is left.
READ_AHEAD_SECONDS_MAX = 120.0

_ATTRIBUTE = "_walkback_prepared"


class PreparingResponseGenerator(ResponseGenerator):
    """``generate`` belongs to the threads of requests, everything else to the generation thread."""

    def __init__(
        self, session: MutableSession, model_provider: Any, prompt_cache: TieredPromptCache
    ) -> None:
        self._session = session
        self._tiers = prompt_cache
        super().__init__(model_provider, prompt_cache)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        with quietly("a request is prepared on the generation thread: it could not be ahead"):
            self._prepare_ahead(request, generation_args)
        try:
            return super().generate(request, generation_args, progress_callback)
        except BaseException:
            # It has an error for its answer, or nobody lives who would give it one.
            if (prepared := _taken_from(request)) is not None:
                with quietly("a request was not given up"):
                    prepared.cancel()
            raise

    def _prepare_ahead(self, request: Any, args: Any) -> None:
        provider = self.model_provider
        bound_to = self._session.bound_for(_key_of(provider, args.model))
        if bound_to is None:
            return
        prepared = self._prepare(bound_to, request, args, wait_seconds_max=WAIT_SECONDS_MAX)
        if prepared is None:
            return
        setattr(request, _ATTRIBUTE, prepared)
        if prepared.pending is not None:
            prepared.pending.wait(READ_AHEAD_SECONDS_MAX)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As upstream's, with the segments of our plan; what was prepared ahead is taken."""
        prepared = None
        with quietly("a request goes uncached: it was not prepared"):
            prepared = self._join(request, args)
        if prepared is None:
            tokenised = super()._tokenize(tokenizer, request, args)
            if not _are_token_ids(tokenised[0]):
                # The client is told; as a prompt it would end mlx-lm's generation thread.
                raise ValueError("the prompt is empty, or is not one text")
            with quietly("memory keeps a request under a key that no other has"):
                return self._told_apart(tokenised)
            token_ids, *_, vision = tokenised
            if vision is not None:
                vision.cache_key = unshared_key(token_ids, vision)
            return tokenised
        return (
            prepared.token_ids,
            prepared.segments,
            prepared.segment_types,
            prepared.initial_state,
            *([prepared.vision] if prepared.knows_images else []),
        )

    def _join(self, request: Any, args: Any) -> Prepared | None:
        """Leave a request, prepared ahead or now, for the next seam; None if it goes uncached."""
        prepared = _taken_from(request)
        try:
            self._session.put(None)
            bound_to = self._session.bound_for(self.model_provider.model_key)
            if prepared is not None and (
                bound_to is None or prepared.model_key != bound_to.model_key
            ):
                # Another model was loaded meanwhile.
                prepared.cancel()
                prepared = None
            if prepared is None and bound_to is not None:
                prepared = self._prepare(bound_to, request, args, wait_seconds_max=0.0)
            self._session.put(prepared)
        except BaseException:
            if prepared is not None:
                prepared.cancel()
            raise
        return prepared

    def _prepare(
        self, bound_to: BoundTo, request: Any, args: Any, *, wait_seconds_max: float
    ) -> Prepared | None:
        """Tokenise a copy of a request and begin to read its prefix; None if that cannot be.

        If another request is computing more of its prefix than there is, it may wait so long.
        """
        # The server's tokenising changes messages in place.
        try:
            # Before 0.32.1 there are no images, and nothing stands for them.
            token_ids, _, _, initial_state, *visions = super()._tokenize(
                bound_to.tokenizer, copy.deepcopy(request), args
            )
        except Exception:
            # The client's fault: upstream meets it again, and answers with it.
            log.debug("a request cannot be tokenised", exc_info=True)
            return None
        vision = visions[0] if visions else None
        if not _are_token_ids(token_ids):
            return None
        images, spans, key = None, (), token_ids
        if vision is not None:
            images = images_of(token_ids, vision) if bound_to.takes_images else None
            if images is None:
                return None
            spans, key = images.spans, images.key
            # The server appends to it.
            vision.cache_key = list(key)
        bound = bound_to.bound
        ends = turn_ends(token_ids, bound_to.closing, distance=bound.grid.merge_tokens)
        plan = Plan(bound.grid, len(token_ids), ends, images=spans)
        segments, types = _segments(token_ids, plan, ends)
        prefill = self._entered(
            bound_to,
            key,
            plan,
            restorable=lambda: max(
                self._tiers.depth(bound_to.model_key, key), bound.lookup(token_ids, images=spans)
            ),
            wait_seconds_max=wait_seconds_max,
        )
        try:
            beyond = self._tiers.depth(bound_to.model_key, key)
            pending = bound.start_restore(token_ids, turn_ends=ends, images=spans, beyond=beyond)
        except BaseException:
            if prefill is not None:
                prefill.end()
            raise
        return Prepared(
            model_key=bound_to.model_key,
            token_ids=token_ids,
            segments=segments,
            segment_types=types,
            initial_state=initial_state,
            knows_images=bool(visions),
            turn_ends=ends,
            beyond=beyond,
            pending=pending,
            images=images,
            vision=vision,
            prefill=prefill,
        )

    def _entered(
        self,
        bound_to: BoundTo,
        key: list[int],
        plan: Plan,
        *,
        restorable: Callable[[], int],
        wait_seconds_max: float,
    ) -> Prefill | None:
        """Let others wait for this prompt, after it has waited for them; None if none may."""
        if not self._session.stores:
            return None
        return self._session.prefills.enter(
            bound_to.model_key,
            key,
            [stop for stop in plan.stops if plan.keeps_state_at(stop)],
            restorable=restorable,
            wait_seconds_max=wait_seconds_max,
        )

    def _told_apart(self, tokenised: Any) -> Any:
        """What upstream made of a request that goes uncached, its images keyed by what they show.

        Memory keeps it all the same, and upstream's keys are of 60 bits of a URL's hash.
        """
        token_ids, *_, vision = tokenised
        if not hasattr(vision, "cache_key"):
            return tokenised
        bound_to = self._session.bound_for(self.model_provider.model_key)
        images = None
        if bound_to is None or bound_to.takes_images:
            with quietly("the images of a request are not told apart"):
                images = images_of(token_ids, vision)
            if images is None:
                self._session.refuse_images("its token ids do not tell where each image stands")
        vision.cache_key = unshared_key(token_ids, vision) if images is None else images.key
        return tokenised


def _are_token_ids(prompt: list[Any]) -> bool:
    """Whether a tokenizer was given one text, which was not empty."""
    return bool(prompt) and isinstance(prompt[0], int)


def _taken_from(request: Any) -> Prepared | None:
    """What was prepared for a request. Whoever gets it, once, is the one who ends it."""
    return vars(request).pop(_ATTRIBUTE, None)


def _segments(
    token_ids: list[int], plan: Plan, ends: list[int]
) -> tuple[list[list[int]], list[str]]:
    """What RAM is to keep of a prompt: its first turn, its last, and all of it.

    As upstream does for a system prompt and a user's turn, but at stops of the plan, so that they
    add none to it.
    """
    turns = [stop for stop in plan.stops if stop in ends]
    cuts = sorted({*turns[:1], *turns[-1:]})
    pieces = [token_ids[start:end] for start, end in pairwise((0, *cuts, len(token_ids)))]
    types = ["system", "user", "assistant"] if len(cuts) == 2 else ["user", "assistant"]
    return pieces, types[-len(pieces) :]


def _key_of(provider: Any, model: Any) -> tuple[Any, Any, Any]:
    """The key under which the provider would load what a request asks for."""
    return (
        provider._model_map.get(model.model, model.model),
        provider._adapter_map.get(model.model, model.adapter),
        provider._draft_model_map.get(model.draft, model.draft),
    )
