"""Whole prompts behind mlx-lm's prompt cache alone: for a release whose batches cannot be joined.

What the server keeps in RAM is stored too, and read when RAM has less. It prefills as it likes, so
there are no stops; what it looks for is read on its generation thread, and others wait for that.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import logging
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from .figures import MemoryTier
from .quiet import quietly
from .session import MutableSession
from .telling import Told

log = logging.getLogger("walkback")


class WholePromptCache(LRUPromptCache):
    """The duck type that mlx-lm's server uses. One owner: the generation thread."""

    def __init__(self, session: MutableSession, max_size: int = 10) -> None:
        super().__init__(max_size)
        self._session = session
        self._hits = 0
        session.memory_tier = self.figures

    def figures(self) -> MemoryTier:
        """What it holds now. Any thread."""
        return MemoryTier(
            sequences=len(self),
            used_bytes=self.nbytes,
            limit_bytes=self._session.hot_max,
            hits=self._hits,
        )

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """The deepest cache of either tier, and the token ids that it lacks: at least one."""
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        depth = len(tokens) - 1 - len(rest)
        source = "memory"
        restored = None
        with quietly("the disk is not looked at for a prompt"):
            restored = self._restored(model, tokens, depth)
        if restored is not None:
            (cache, depth), source = restored, "disk"
        self._hits += bool(depth) and source == "memory"
        log.info(
            "prompt of %d tokens: %d from %s, %d to compute",
            len(tokens),
            depth,
            source,
            len(tokens) - depth,
        )
        return cache, tokens[depth:]

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep a cache in RAM, and store it."""
        with quietly("a prompt is not stored"):
            self._store(model, tokens, prompt_cache)
        if self._session.hot_max is not None:
            self.max_bytes = self._session.hot_max
        super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def _restored(self, model: Any, tokens: list[int], depth: int) -> tuple[list[Any], int] | None:
        """A cache from disk and its position, if it is deeper than that."""
        bound_to = self._session.bound_for(model)
        if bound_to is None or _has_images(tokens) or bound_to.bound.lookup(tokens) <= depth:
            return None
        restoration = bound_to.bound.restore(tokens)
        restoration.recording.finish()
        return (restoration.cache, restoration.endpoint) if restoration.endpoint > depth else None

    def _store(self, model: Any, tokens: list[int], prompt_cache: list[Any]) -> None:
        bound_to, why = self._session.bound_for(model), self._session.why_unstored
        why = "it has images" if _has_images(tokens) else why
        recording = None
        if bound_to is not None and not why:
            recording = bound_to.bound.record(tokens)
            recording.stop(len(tokens), prompt_cache)
            recording.finish()
        told = Told(had=f"a cache of {len(tokens)} tokens", why_unstored=why)
        self._session.teller.tell(told, recording)


def _has_images(tokens: list[int]) -> bool:
    """Upstream's ids for what an image shows are negative, and of too few bits to store it by."""
    return min(tokens) < 0
