"""Who may use a payload, and what its key is. Pure.

A namespace is the digest of everything that must be equal for a payload to be usable. A block key
is a keyed hash over the parent's key, the block's token ids and the images that stand in it, so a
key names its whole prefix, and without the cache's secret it confirms no guess of a prompt.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import cbor2
from blake3 import blake3

from .images import ImageSpan, in_order, overlapping
from .layout import Layout

_NAMESPACE_CONTEXT = "walkback 2026 namespace v1"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a payload is computed from besides its tokens.

    Nothing of the process is in it: no name, path, port, context length or batch size. Two fields
    never share a place, so a salt cannot pass for an adapter.
    """

    weights: bytes
    adapter: bytes
    layout: Layout
    block_tokens: int
    kv_quantisation: str = "none"
    # Which shard of how many, for a model that is spread over machines.
    rank: int = 0
    world: int = 1
    salt: str = ""

    def fields(self, *, secret: bytes) -> tuple[tuple[str, str], ...]:
        """The fields as text, for the journal: a miss can then say which one differs.

        The salt is there as a digest only, keyed with the cache's secret: it confirms no guess.
        """
        salt = blake3(self.salt.encode(), key=secret).hexdigest()[:16] if self.salt else "none"
        return (
            ("format", str(_FORMAT)),
            ("weights", self.weights.hex()),
            ("adapter", self.adapter.hex()),
            ("layout", self.layout.digest().hex()),
            ("block_tokens", str(self.block_tokens)),
            ("kv_quantisation", self.kv_quantisation),
            ("rank", f"{self.rank} of {self.world}"),
            ("salt", salt),
        )

    def digest(self) -> bytes:
        """32 bytes, injective over the typed fields: canonical CBOR keeps type and length."""
        content = cbor2.dumps(
            [
                _FORMAT,
                self.weights,
                self.adapter,
                self.layout.canonical(),
                self.block_tokens,
                self.kv_quantisation,
                self.rank,
                self.world,
                self.salt,
            ],
            canonical=True,
        )
        return blake3(content, derive_key_context=_NAMESPACE_CONTEXT).digest()


def difference(wanted: Sequence[tuple[str, str]], found: Sequence[tuple[str, str]]) -> list[str]:
    """The names of the fields in which two namespaces differ."""
    theirs = dict(found)
    return [name for name, text in wanted if theirs.get(name) != text]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLink:
    """One block of a prompt: token positions ``start:end``, its key and its parent's.

    A tail is shorter than the others, and no block follows it.
    """

    key: bytes
    parent: bytes
    start: int
    end: int


class Chain:
    """A prompt as blocks: every full one, and any tail that is asked for. Never changes.

    Token ids are signed 64-bit integers; ValueError for others. Hashing packed integers is
    twice as fast as hashing their text.
    """

    # In order; token ids alone do not tell them apart.
    images: tuple[ImageSpan, ...] = ()

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        namespace: bytes,
        secret: bytes,
        block_tokens: int,
        images: Iterable[ImageSpan] = (),
    ) -> None:
        self.images = in_order(images, len(token_ids))
        self._begin(_packed(token_ids), (), namespace, secret, block_tokens)

    def _begin(
        self,
        packed: bytes,
        links: tuple[BlockLink, ...],
        namespace: bytes,
        secret: bytes,
        block_tokens: int,
    ) -> None:
        self._packed = packed
        self._namespace = namespace
        self._secret = secret
        self.block_tokens = block_tokens
        # The full blocks, first to last.
        self.links = (*links, *self._links_after(links))

    @property
    def token_count(self) -> int:
        return len(self._packed) // 8

    @property
    def tip(self) -> bytes:
        """The key of the last full block, empty without one."""
        return self.links[-1].key if self.links else b""

    def ending_at(self, end: int) -> BlockLink:
        """The block that ends at a position: a full one, or else the tail under the last of them.

        ValueError for a position that the prompt does not reach, and for 0.
        """
        if not 0 < end <= self.token_count:
            raise ValueError(f"no block of {self.token_count} tokens ends at {end}")
        full_count, rest = divmod(end, self.block_tokens)
        if not rest:
            return self.links[full_count - 1]
        return self._link(self.parent_at(end - rest), end - rest, end)

    def parent_at(self, start: int) -> bytes:
        """The parent of the blocks that begin at a multiple of ``block_tokens``."""
        return self.links[start // self.block_tokens - 1].key if start else self._namespace

    def between(self, start: int, end: int) -> list[BlockLink]:
        """The full blocks that end behind ``start`` and up to ``end``, parents first.

        The first of them may begin before ``start``.
        """
        return list(self.links[start // self.block_tokens : end // self.block_tokens])

    def under(self, namespace: bytes) -> "Chain":
        """The chain of this prompt in another namespace."""
        chain = Chain.__new__(Chain)
        chain.images = self.images
        chain._begin(self._packed, (), namespace, self._secret, self.block_tokens)
        return chain

    def longer(self, token_ids: Sequence[int]) -> "Chain":
        """The chain of this prompt with more token ids behind it."""
        chain = Chain.__new__(Chain)
        chain.images = self.images
        chain._begin(
            self._packed + _packed(token_ids),
            self.links,
            self._namespace,
            self._secret,
            self.block_tokens,
        )
        return chain

    def _links_after(self, links: tuple[BlockLink, ...]) -> Iterator[BlockLink]:
        parent = links[-1].key if links else self._namespace
        size = self.block_tokens
        for start in range(len(links) * size, self.token_count - size + 1, size):
            link = self._link(parent, start, start + size)
            yield link
            parent = link.key

    def _link(self, parent: bytes, start: int, end: int) -> BlockLink:
        hasher = blake3(key=self._secret)
        hasher.update(parent)
        hasher.update((end - start).to_bytes(8, "little"))
        hasher.update(self._packed[8 * start : 8 * end])
        images = overlapping(self.images, start, end)
        hasher.update(len(images).to_bytes(8, "little"))
        for image in images:
            hasher.update(image.start.to_bytes(8, "little") + image.end.to_bytes(8, "little"))
            hasher.update(image.digest)
        return BlockLink(key=hasher.digest(), parent=parent, start=start, end=end)


def block_chain(
    token_ids: Sequence[int], *, namespace: bytes, secret: bytes, block_tokens: int
) -> tuple[BlockLink, ...]:
    """The full blocks of a prompt, first to last. A shorter rest at the end has no link."""
    chain = Chain(token_ids, namespace=namespace, secret=secret, block_tokens=block_tokens)
    return chain.links


def _packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian signed 64-bit integers."""
    try:
        return struct.pack(f"<{len(token_ids)}q", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids are signed integers of 64 bits: {error}") from error
