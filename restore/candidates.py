"""What a prompt could resume from, longest first. Pure: no file is opened to choose an endpoint.

Ranked by restorable depth, not by matched depth: blocks whose state is gone do not make a
candidate. A chain does not know where tails end, so the entries are asked for the lengths that
stand below a block, and only those are hashed.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from ..store.lookup import Located
from .identity import BlockLink, Chain
from .images import is_inside


class Entries(Protocol):
    """What candidates are made from: the store's view, or anything like it."""

    def block(self, key: bytes) -> Located | None: ...

    def sidecar(self, key: bytes) -> Located | None: ...

    def short_lengths(self, parent: bytes) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A boundary to resume from: its sidecar, if the layout has point state, and its blocks.

    The last block may be a tail.
    """

    endpoint: int
    blocks: tuple[Located, ...]
    sidecar: Located | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a lookup saw: the full blocks that matched, and the longest candidate."""

    blocks: tuple[Located, ...]
    candidate: Candidate | None

    @property
    def matched_tokens(self) -> int:
        """The end of the full blocks that matched."""
        return self.blocks[-1].end if self.blocks else 0

    @property
    def deepest(self) -> Located | None:
        """The deepest block that matched, be it a full one or the candidate's tail."""
        found = [*self.blocks[-1:], *(self.candidate.blocks[-1:] if self.candidate else ())]
        return max(found, key=lambda block: block.end, default=None)


def match(
    entries: Entries,
    chain: Chain,
    *,
    needs_sidecar: bool,
    refused: Set[bytes] = frozenset(),
    beyond: int = 0,
    below: int | None = None,
) -> Match:
    """Follow a prompt's chain through the entries and take the longest candidate.

    Only what ends behind ``beyond``, and before ``below``, is one. ``refused`` holds the keys of
    blocks and sidecars that could not be read just now.
    """
    blocks = matched_blocks(entries, chain.links)
    found = candidates(
        entries, chain, blocks, needs_sidecar=needs_sidecar, refused=refused, below=below
    )
    longest = next(found, None)
    is_deep_enough = longest is not None and longest.endpoint > beyond
    return Match(blocks=tuple(blocks), candidate=longest if is_deep_enough else None)


def matched_blocks(entries: Entries, links: Sequence[BlockLink]) -> list[Located]:
    """The full blocks of the chain that are there, up to the first that is not."""
    blocks: list[Located] = []
    for link in links:
        block = entries.block(link.key)
        if block is None or block.end != link.end:
            break
        blocks.append(block)
    return blocks


def candidates(
    entries: Entries,
    chain: Chain,
    blocks: Sequence[Located],
    *,
    needs_sidecar: bool,
    refused: Set[bytes] = frozenset(),
    below: int | None = None,
) -> Iterator[Candidate]:
    """The restorable prefixes among matched blocks and the tails below them, longest first.

    One token less than the chain has is restored at most: one is left to compute. All end before
    ``below``, and none inside an image.
    """
    end_limit = chain.token_count if below is None else min(below, chain.token_count)
    readable = next(
        (index for index, block in enumerate(blocks) if block.key in refused), len(blocks)
    )
    for count in range(readable, -1, -1):
        above = tuple(blocks[:count])
        tips = [*_tails(entries, chain, count * chain.block_tokens, refused), *above[-1:]]
        for tip in tips:
            if tip.end >= end_limit or is_inside(chain.images, tip.end):
                continue
            sidecar = entries.sidecar(tip.key) if needs_sidecar else None
            if needs_sidecar and (sidecar is None or sidecar.end != tip.end):
                continue
            path = above if above and tip is above[-1] else (*above, tip)
            yield Candidate(endpoint=tip.end, blocks=path, sidecar=sidecar)


def _tails(entries: Entries, chain: Chain, start: int, refused: Set[bytes]) -> Iterator[Located]:
    """The tails of the chain that begin at a position, longest first."""
    if start >= chain.token_count - 1:
        return
    for length in entries.short_lengths(chain.parent_at(start)):
        if length >= chain.block_tokens or start + length >= chain.token_count:
            continue
        link = chain.ending_at(start + length)
        if link.key in refused:
            continue
        tail = entries.block(link.key)
        if tail is not None and tail.end == link.end:
            yield tail
