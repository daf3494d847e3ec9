"""Where prefill stops, and how a plan of stops is named. Pure.

A plan is a function of the prompt and the settings, never of what the cache holds: stops stand on
an absolute grid of ``checkpoint_tokens``, counted from the start of the prompt. After a restore the
next grid stop realigns; there is no extra chunk.

Kernels that regroup tokens from the start of a chunk give other bits under another plan, so each
payload records the digest of the plan that led to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from ..journal.errors import SettingsError

# Mamba2's kernels regroup every 256 tokens from the start of a chunk: only multiples of it are
# safe.
GRID_TOKENS = 256

_CONTEXT = "walkback 2026 plan v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The two grids: KV is cut every ``block_tokens``, prefill stops every ``checkpoint_tokens``.

    ``checkpoint_tokens`` is the prefill step too.
    """

    block_tokens: int = 256
    checkpoint_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("block_tokens", "checkpoint_tokens"):
            if type(getattr(self, name)) is not int:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; it must be an int")
        if self.block_tokens < 1 or self.checkpoint_tokens < 1:
            raise SettingsError("block_tokens and checkpoint_tokens must be at least 1")
        if self.checkpoint_tokens % self.block_tokens:
            raise SettingsError(
                f"checkpoint_tokens is {self.checkpoint_tokens}, which is not a multiple of "
                f"block_tokens, {self.block_tokens}"
            )

    @property
    def is_chunk_safe(self) -> bool:
        """Whether every chunk of a plan starts where kernels regroup."""
        return self.checkpoint_tokens % GRID_TOKENS == 0

    def stops(self, prompt_tokens: int) -> range:
        """The stops of a prompt. The last token is never cached: it must be left to compute."""
        return range(self.checkpoint_tokens, prompt_tokens, self.checkpoint_tokens)

    def next_stop(self, position: int) -> int:
        """The first stop after a position."""
        return (position // self.checkpoint_tokens + 1) * self.checkpoint_tokens

    def stop_of(self, position: int) -> int:
        """The stop at which the token before ``position`` was captured."""
        return -(-position // self.checkpoint_tokens) * self.checkpoint_tokens

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The full blocks that end in ``start:stop``, both on the block grid."""
        return [
            (position, position + self.block_tokens)
            for position in range(start, stop, self.block_tokens)
        ]


def plan_digests(grid: Grid, position: int) -> Iterator[tuple[int, bytes]]:
    """Each stop up to ``position`` with the digest of the plan up to it."""
    digest = plan_start(grid)
    for stop in range(grid.checkpoint_tokens, position + 1, grid.checkpoint_tokens):
        digest = plan_after(digest, stop)
        yield stop, digest


def plan_start(grid: Grid) -> bytes:
    """The digest of a plan without stops."""
    content = grid.checkpoint_tokens.to_bytes(8, "little")
    return blake3(content, derive_key_context=_CONTEXT).digest()


def plan_after(digest: bytes, stop: int) -> bytes:
    """The digest of a plan that goes on to ``stop``."""
    content = digest + stop.to_bytes(8, "little")
    return blake3(content, derive_key_context=_CONTEXT).digest()
