"""One run of the demo: generate over a cache, measure, and keep what the oracle is to confirm."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..integration.binding import BoundModel
from ..integration.cache import Cache, open_cache
from ..integration.restoration import Restoration
from ..store.settings import GIB
from .oracle import FirstLogits

GREEDY_TOKENS = 32

_PATHS = ("directory", "model_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every process of one demo shares."""

    directory: Path
    model_dir: Path
    block_tokens: int
    checkpoint_tokens: int
    salt: str

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        return json.dumps(fields | {name: str(fields[name]) for name in _PATHS})

    @classmethod
    def from_json(cls, text: str) -> "Setup":
        fields: dict[str, Any] = json.loads(text)
        for name in _PATHS:
            fields[name] = Path(fields[name])
        return cls(**fields)

    def open(self) -> Cache:
        return open_cache(
            self.directory,
            free_floor_bytes=GIB,
            block_tokens=self.block_tokens,
            checkpoint_tokens=self.checkpoint_tokens,
            salt=self.salt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The figures of one run. Times in seconds, but for those that say milliseconds."""

    run: str
    prompt_tokens: int
    endpoint_tokens: int
    uncached_tokens: int
    sidecars: int
    walkbacks: int
    header_ms: float
    bytes_ms: float
    prefill_s: float
    first_token_s: float
    logits: str
    tokens: list[int]

    def fields(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run_prompt(bound: BoundModel, name: str, prompt: Sequence[int]) -> Run:
    """Generate greedily after a prompt, resumed from the cache and recorded into it."""
    restorations: list[Restoration] = []
    restored_at = 0.0

    def on_restore(restoration: Restoration) -> None:
        nonlocal restored_at
        restorations.append(restoration)
        restored_at = time.perf_counter()

    first = FirstLogits()
    started = time.perf_counter()
    generated = bound.generate_step(
        prompt, max_tokens=GREEDY_TOKENS, logits_processors=[first], on_restore=on_restore
    )
    tokens = [next(generated)[0]]
    first_token = time.perf_counter()
    tokens += [token for token, _ in generated]
    restoration = restorations[0]
    restoration.recording.wait()
    return Run(
        run=name,
        prompt_tokens=len(prompt),
        endpoint_tokens=restoration.endpoint,
        uncached_tokens=restoration.uncached,
        sidecars=restoration.sidecars,
        walkbacks=restoration.walkbacks,
        header_ms=restoration.header_seconds * 1e3,
        bytes_ms=restoration.bytes_seconds * 1e3,
        prefill_s=first_token - restored_at,
        first_token_s=first_token - started,
        logits=first.digest(),
        tokens=tokens,
    )


def made_up_prompt(token_count: int, *, seed: int, vocabulary: int) -> list[int]:
    """Token ids that depend on the seed alone, whatever Python or mlx make of random numbers."""
    found: list[int] = []
    for counter in itertools.count():
        if len(found) >= token_count:
            return found[:token_count]
        digest = hashlib.blake2b(f"{seed}:{counter}".encode()).digest()
        found += [
            int.from_bytes(digest[at : at + 4], "little") % vocabulary for at in range(0, 64, 4)
        ]
    raise AssertionError("counting does not end")


def vocabulary_of(model: Any) -> int:
    """How many token ids the model knows, from the width of its logits."""
    return int(model(mx.array([[0]])).shape[-1])
