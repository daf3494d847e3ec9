"""What walkback joins in mlx-lm's server, and which of it the installed release has.

Nothing here asks for a version: each name that the seams use is looked for, with the parameters
that they pass, before anything is joined. Without what a way of joining needs, the next is taken.
"""

import enum
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import FunctionType
from typing import Any, NamedTuple


class Way(enum.Enum):
    """How much of the server is joined, the best first."""

    STOPS = "every stop of a prompt is stored, and the prompt's prefix is read ahead"
    WHOLE_PROMPTS = (
        "whole prompts are stored where mlx-lm itself keeps them, and read on its thread"
    )
    NOTHING = "nothing is stored"


# A flag of mlx-lm's server: how many prompts are prefilled together.
ONE_AT_A_TIME = "--prompt-concurrency"


class _Seam(NamedTuple):
    """A name in a module. What stands in ``attributes`` is named in its class, somehow."""

    module: str
    name: str
    # Parameters that are passed to the constructor or function.
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    # Methods, and parameters that are passed to them.
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # What a function speaks of.
    constants: tuple[str, ...] = ()


_SERVER, _GENERATE, _CACHE = "mlx_lm.server", "mlx_lm.generate", "mlx_lm.models.cache"

_FOR_WHOLE_PROMPTS = (
    _Seam(_SERVER, "main", constants=(ONE_AT_A_TIME,)),
    _Seam(
        _SERVER,
        "LRUPromptCache",
        ("max_size",),
        ("max_bytes", "nbytes"),
        (
            ("fetch_nearest_cache", ("model", "tokens")),
            ("insert_cache", ("model", "tokens", "prompt_cache", "cache_type")),
            ("trim_to", ("n_sequences", "n_bytes")),
        ),
    ),
    _Seam(
        _SERVER,
        "ModelProvider",
        ("cli_args",),
        ("model", "tokenizer", "draft_model", "model_key", "is_distributed"),
        (("_load", ()),),
    ),
    _Seam("mlx_lm.utils", "hf_repo_to_path"),
    _Seam(_CACHE, "KVCache", (), ("keys", "values", "offset")),
    _Seam(_CACHE, "ArraysCache", (), ("cache",)),
    _Seam(_CACHE, "CacheList", (), ("caches",)),
)
_FOR_STOPS = (
    _Seam(_SERVER, "BatchGenerator"),
    _Seam(
        _GENERATE,
        "BatchGenerator",
        ("model", "prefill_step_size", "prefill_batch_size"),
        ("_prompt_batch", "_generation_batch", "_unprocessed_sequences"),
        (
            ("insert_segments", ("segments", "max_tokens", "caches", "all_tokens")),
            ("remove", ("uids", "return_prompt_caches")),
            ("_make_batch", ("n",)),
            ("_next", ()),
            ("close", ()),
        ),
    ),
    _Seam(
        _GENERATE,
        "PromptProcessingBatch",
        ("model", "uids", "caches", "tokens"),
        ("prompt_cache",),
        (("prompt", ("tokens",)), ("extract_cache", ("idx",))),
    ),
    _Seam(
        _GENERATE,
        "PromptProcessingBatch.Response",
        (),
        ("uid", "progress", "end_of_segment", "end_of_prompt"),
    ),
    _Seam(_GENERATE, "GenerationBatch", (), ("uids", "tokens", "prompt_cache")),
    _Seam(
        _GENERATE,
        "GenerationBatch.Response",
        (),
        ("uid", "finish_reason", "all_tokens", "prompt_cache"),
    ),
    _Seam(
        _SERVER,
        "ResponseGenerator",
        ("model_provider", "prompt_cache"),
        ("cli_args",),
        (
            ("generate", ("request", "generation_args", "progress_callback")),
            ("_tokenize", ("tokenizer", "request", "args")),
        ),
    ),
    _Seam(_SERVER, "ModelProvider", (), ("_model_map", "_adapter_map", "_draft_model_map")),
    _Seam(_SERVER, "LRUPromptCache", (), ("_trie",)),
    _Seam(_CACHE, "PromptTrie", (), (), (("search", ("model", "tokens")), ("get", ()))),
    _Seam(_CACHE, "PromptTrieResult", (), ("model", "shorter", "longer", "common_prefix")),
    _Seam(_CACHE, "can_trim_prompt_cache"),
    _Seam(_CACHE, "BatchKVCache", ("left_padding",), ("keys", "values", "offset", "_idx")),
)
_FOR_SEQUENTIAL = (
    _Seam(_SERVER, "stream_generate"),
    _Seam(_GENERATE, "stream_generate", ("model", "tokenizer", "prompt")),
    _Seam(
        _GENERATE,
        "generate_step",
        ("prompt_cache", "prefill_step_size", "prompt_progress_callback", "logits_processors"),
    ),
)
_FOR_PAGES = (_Seam(_SERVER, "APIHandler"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What of the installed mlx-lm's server can be joined, and what is missing for the rest."""

    way: Way
    # Requests with a seed, which go one at a time; and our pages on the server's port.
    joins_sequential: bool
    joins_pages: bool
    # For people: what each thing that is not done would need. Empty if all is.
    lacks: tuple[str, ...]


def find_seams() -> Seams:
    """Look at the installed mlx-lm. Imports it; never raises for what it lacks."""
    whole = tuple(_missing(_FOR_WHOLE_PROMPTS))
    stops = tuple(_missing(_FOR_STOPS))
    sequential = tuple(_missing(_FOR_SEQUENTIAL))
    pages = tuple(_missing(_FOR_PAGES))
    way = Way.NOTHING if whole else Way.WHOLE_PROMPTS if stops else Way.STOPS
    lacks: list[str] = []
    if way is not Way.STOPS:
        lacks.append(f"{way.value}: there is no {', '.join(whole or stops)}")
    elif sequential:
        lacks.append(f"requests with a seed go uncached: there is no {', '.join(sequential)}")
    if pages:
        lacks.append(f"/metrics and /walkback/stats are not there: no {', '.join(pages)}")
    return Seams(
        way=way,
        joins_sequential=way is Way.STOPS and not sequential,
        joins_pages=not pages,
        lacks=tuple(f"mlx-lm {version('mlx-lm')}: {each}" for each in lacks),
    )


def _missing(seams: Sequence[_Seam]) -> Iterator[str]:
    """The names that are not there, or lack a parameter, as people would look for them."""
    for seam in seams:
        owner = _resolved(seam)
        if owner is None:
            yield f"{seam.module}.{seam.name}"
            continue
        yield from (each for each in seam.constants if each not in owner.__code__.co_consts)
        yield from (f"{seam.name}({each}=)" for each in _unknown(owner, seam.parameters))
        yield from (f"{seam.name}.{each}" for each in seam.attributes if not _names(owner, each))
        for name, parameters in seam.methods:
            method = getattr(owner, name, None)
            if method is None:
                yield f"{seam.name}.{name}"
            else:
                yield from (f"{seam.name}.{name}({each}=)" for each in _unknown(method, parameters))


def _resolved(seam: _Seam) -> Any:
    try:
        found: Any = importlib.import_module(seam.module)
    except ImportError:
        return None
    for part in seam.name.split("."):
        found = getattr(found, part, None)
    return found


def _unknown(function: Any, parameters: Sequence[str]) -> list[str]:
    if not parameters:
        return []
    known = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    return [] if takes_any else [each for each in parameters if each not in known]


def _names(owner: Any, attribute: str) -> bool:
    """Whether a class has an attribute, or a method of it speaks of one, as constructors do."""
    if hasattr(owner, attribute) or attribute in getattr(owner, "__dataclass_fields__", ()):
        return True
    return any(
        isinstance(method, FunctionType) and attribute in method.__code__.co_names
        for each in inspect.getmro(owner)
        for method in vars(each).values()
    )
