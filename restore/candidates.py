"""What a prompt could resume from, longest first. Pure: no file is opened to choose an endpoint.

Ranked by restorable depth, not by matched depth: blocks whose state is gone do not make a
candidate.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from ..store.lookup import Located
from .identity import BlockLink


class Entries(Protocol):
    """What candidates are made from: the store's view, or anything like it."""

    def block(self, key: bytes) -> Located | None: ...

    def sidecar(self, key: bytes) -> Located | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A boundary to resume from: its sidecar, if the layout has point state, and its blocks."""

    endpoint: int
    blocks: tuple[Located, ...]
    sidecar: Located | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a lookup saw: the blocks that matched, and the longest candidate among them."""

    blocks: tuple[Located, ...]
    candidate: Candidate | None


def match(
    entries: Entries,
    chain: Sequence[BlockLink],
    *,
    prompt_tokens: int,
    needs_sidecar: bool,
    refused: Set[bytes] = frozenset(),
) -> Match:
    """Follow a prompt's chain through the entries and take the longest candidate.

    ``refused`` holds the keys of blocks and sidecars that could not be read just now.
    """
    blocks = matched_blocks(entries, chain)
    found = candidates(
        entries,
        blocks,
        prompt_tokens=prompt_tokens,
        needs_sidecar=needs_sidecar,
        refused=refused,
    )
    return Match(blocks=tuple(blocks), candidate=next(found, None))


def matched_blocks(entries: Entries, chain: Sequence[BlockLink]) -> list[Located]:
    """The blocks of the chain that are there, up to the first that is not."""
    blocks: list[Located] = []
    for link in chain:
        block = entries.block(link.key)
        if block is None or block.end != link.end:
            break
        blocks.append(block)
    return blocks


def candidates(
    entries: Entries,
    blocks: Sequence[Located],
    *,
    prompt_tokens: int,
    needs_sidecar: bool,
    refused: Set[bytes] = frozenset(),
) -> Iterator[Candidate]:
    """The restorable prefixes among matched blocks, longest first.

    At most ``prompt_tokens - 1`` tokens are restored: one is left to compute.
    """
    readable = next(
        (index for index, block in enumerate(blocks) if block.key in refused), len(blocks)
    )
    for count in range(readable, 0, -1):
        tip = blocks[count - 1]
        if tip.end >= prompt_tokens:
            continue
        sidecar = entries.sidecar(tip.key) if needs_sidecar else None
        if needs_sidecar and (sidecar is None or sidecar.end != tip.end):
            continue
        yield Candidate(endpoint=tip.end, blocks=tuple(blocks[:count]), sidecar=sidecar)
