"""Who may use a payload, and what its key is. Pure.

A namespace is the digest of everything that must be equal for a payload to be usable. A block key
is a keyed hash over the parent's key and the block's token ids, so a key names its whole prefix,
and without the cache's secret it confirms no guess of a prompt.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cbor2
from blake3 import blake3

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
    """One full block of a prompt: token positions ``start:end``, its key and its parent's."""

    key: bytes
    parent: bytes
    start: int
    end: int


def block_chain(
    token_ids: Sequence[int], *, namespace: bytes, secret: bytes, block_tokens: int
) -> tuple[BlockLink, ...]:
    """The full blocks of a prompt, first to last. A shorter rest at the end has no link.

    Token ids are signed 64-bit integers; ValueError for others. Hashing packed integers is
    twice as fast as hashing their text.
    """
    return tuple(_links(token_ids, namespace, secret, block_tokens))


def _links(
    token_ids: Sequence[int], namespace: bytes, secret: bytes, block_tokens: int
) -> Iterator[BlockLink]:
    packed = _packed(token_ids)
    parent = namespace
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        end = start + block_tokens
        hasher = blake3(key=secret)
        hasher.update(parent)
        hasher.update(block_tokens.to_bytes(8, "little"))
        hasher.update(packed[8 * start : 8 * end])
        # Extra keys (images, embeddings) will follow here, behind their count.
        hasher.update(bytes(8))
        key = hasher.digest()
        yield BlockLink(key=key, parent=parent, start=start, end=end)
        parent = key


def _packed(token_ids: Sequence[int]) -> memoryview:
    """Token ids as little-endian signed 64-bit integers."""
    try:
        return memoryview(struct.pack(f"<{len(token_ids)}q", *token_ids))
    except struct.error as error:
        raise ValueError(f"token ids are signed integers of 64 bits: {error}") from error
