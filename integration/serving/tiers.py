"""Two tiers behind mlx-lm's prompt cache: RAM, as upstream keeps it, over the SSD.

The deeper restorable of the two serves. Whatever goes wrong here is a miss: an exception would end
the server's one generation thread.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import dataclasses
import functools
import logging
import threading
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, PromptTrie, can_trim_prompt_cache

from ..restoration import Restoration
from .figures import MemoryTier
from .images import is_inside_image
from .quiet import QuietRecording, quietly
from .rows import compact
from .session import MutableSession, Prepared
from .telling import MutableSeen, Told, had, parting_words

log = logging.getLogger("walkback")


# No tokenizer has it, and ids of images are negative.
_NO_TOKEN_ID = 1 << 62


class _Trie(PromptTrie):
    """Finds no sequence that would be cut to where its cache has another form.

    KV that is quantised from some position on is not what a run from the start has before it.
    """

    def __init__(self, session: MutableSession) -> None:
        super().__init__()
        self._session = session

    def search(self, model: Any, tokens: list[int]) -> Any:
        result = super().search(model, tokens)
        bound_to = self._session.bound_for(model)
        turning_point = None if bound_to is None else bound_to.bound.turning_point
        if turning_point is not None and result.longer is not None:
            cut = min(len(tokens) - 1, result.common_prefix)
            if cut < turning_point <= len(result.longer):
                return dataclasses.replace(result, longer=None)
        return result


class TieredPromptCache(LRUPromptCache):
    """The duck type that mlx-lm's server uses, over both tiers.

    Its calls come from the generation thread; ``depth`` may be asked on any.
    """

    def __init__(self, session: MutableSession, max_size: int = 10) -> None:
        super().__init__(max_size)
        self._session = session
        self._trie = _Trie(session)
        # RAM's trie changes on the generation thread while others ask how deep it reaches.
        self._lock = threading.RLock()
        self._hits = 0
        self._seen = MutableSeen()
        session.memory_tier = self.figures

    def figures(self) -> MemoryTier:
        """What it holds now. Any thread."""
        with self._lock:
            return MemoryTier(
                sequences=len(self),
                used_bytes=self.nbytes,
                limit_bytes=self._session.hot_max,
                hits=self._hits,
            )

    def depth(self, model: Any, tokens: list[int]) -> int:
        """How many tokens of a prompt RAM can serve: at most all but the last."""
        with self._lock:
            result = self._trie.search(model, _without_its_last(tokens))
            shorter = 0 if result.shorter is None else len(result.shorter)
            if result.longer is not None and result.common_prefix > shorter:
                entry = self._trie.get(result.model, result.longer)
                if can_trim_prompt_cache(entry.prompt_cache):
                    shorter = min(len(tokens) - 1, result.common_prefix)
            return 0 if is_inside_image(tokens, shorter) else shorter

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The deepest cache of either tier, and the part of ``tokens`` that it lacks: at least one.

        ``tokens`` are the prompt's, with ids made of its digest for each image.

        Upstream gives none for a prompt that it holds entirely, and its batch generator raises.
        """
        with quietly("a look into the cache failed; the prompt is prefilled from its start"):
            prepared = self._session.current(tokens)
            if prepared is None or prepared.pending is None:
                cache, rest = self._from_memory(model, tokens)
                self._tell_of_uncached(len(tokens), len(tokens) - len(rest))
                return cache, rest
            return self._deeper(model, tokens, prepared)
        with quietly("a request was not given up"):
            self._session.put(None)
        return None, tokens

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep a cache in RAM, without the buffers that it may be a view of."""
        with quietly("a cache was not kept in memory"):
            compact(prompt_cache)
            hot_max = self._session.hot_max
            with self._lock:
                if hot_max is not None:
                    self.max_bytes = hot_max
                super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        with self._lock:
            super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)

    def _from_memory(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        with self._lock:
            cache, rest = super().fetch_nearest_cache(model, _without_its_last(tokens))
        if is_inside_image(tokens, len(tokens) - len(rest)):
            # Upstream embeds no image of which a part is cached.
            return None, tokens
        return cache, tokens[len(tokens) - len(rest) :]

    def _deeper(
        self, model: Any, tokens: list[int], prepared: Prepared
    ) -> tuple[list[Any] | None, list[int]]:
        pending = prepared.pending
        assert pending is not None
        cache, rest = self._from_memory(model, tokens)
        depth = len(tokens) - len(rest)
        if depth < prepared.beyond:
            # What memory held when the reading began is gone: what the disk has was left unread.
            prepared.pending = pending = self._start_anew(prepared, depth)
        restoration = pending.finish()
        source = "disk"
        if restoration.endpoint <= depth and cache is not None:
            source = "memory"
            self._hits += 1
            QuietRecording(restoration.recording).finish()
            restoration = pending.adopt(cache, depth)
        recording = QuietRecording(restoration.recording, prepared.prefill)
        if prepared.prefill is not None:
            prepared.prefill.begin(restoration.endpoint)
        # From here on whoever cancels the request ends its recording.
        prepared.restoration, prepared.recording = restoration, recording
        with quietly("a request is not told of"):
            told = self._told(restoration, source, tokens, prepared)
            recording.at_end = functools.partial(self._session.teller.tell, told)
        if not self._session.stores:
            restoration = dataclasses.replace(restoration, stops=())
        prepared.restoration = restoration
        endpoint = restoration.endpoint
        return (restoration.cache if endpoint else None), tokens[endpoint:]

    def _told(
        self, restoration: Restoration, source: str, tokens: list[int], prepared: Prepared
    ) -> Told:
        exact = self._seen.parting(prepared.model_key, tokens)
        bound_to = self._session.bound_for(prepared.model_key)
        assert bound_to is not None, "the model of a request is bound until it is served"
        parting = parting_words(
            exact,
            restoration.matched_tokens,
            restoration.reason,
            bound_to.bound.grid.block_tokens,
        )
        return Told(
            had=had(restoration, source, parting),
            why_unstored=self._session.why_unstored,
            # Who asked for nothing to be stored is told so in each line, and needs no warning.
            is_eligible=bool(restoration.stops) and self._session.stores,
        )

    def _tell_of_uncached(self, prompt_tokens: int, endpoint: int) -> None:
        """Tell of a request that goes by the disk, though there is a cache."""
        if self._session.cache is not None:
            words = f"{endpoint} from memory, {prompt_tokens - endpoint}" if endpoint else "all"
            told = Told(
                had=f"prompt of {prompt_tokens} tokens: {words} to compute",
                why_unstored=self._session.why_unstored or "it is served as mlx-lm does",
            )
            self._session.teller.tell(told)

    def _start_anew(self, prepared: Prepared, depth: int) -> Any:
        prepared.cancel()
        bound_to = self._session.bound_for(prepared.model_key)
        assert bound_to is not None, "the model of a request is bound until it is served"
        return bound_to.bound.start_restore(
            prepared.token_ids,
            turn_ends=prepared.turn_ends,
            images=prepared.spans,
            beyond=depth,
        )


def _without_its_last(tokens: list[int]) -> list[int]:
    """A prompt that nothing holds entirely, of the same length."""
    return [*tokens[:-1], _NO_TOKEN_ID]
