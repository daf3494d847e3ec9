"""The forms of a model's cache: as the model makes it and, from some position on, quantised."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mlx_lm.generate import maybe_quantize_kv_cache

from ..restore.choosing import Lookup
from ..restore.identity import Chain
from ..restore.layout import Layout
from ..restore.plan import Grid, Plan
from ..store.store import MutableStore
from .depths import MutableDepths
from .recording import LaterForm

# mlx-lm's own defaults.
KV_GROUP_SIZE = 64
QUANTIZED_KV_START = 5000

_maybe_quantize = cast(Any, maybe_quantize_kv_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVQuantisation:
    """How mlx-lm quantises KV: ``bits`` each, in groups, from ``start`` on.

    ``start`` is a stop of the grid. mlx-lm looks at the end of each chunk whether so many tokens
    are in the cache. A chunk of every run ends there: so all tokens before it are computed with KV
    as it is and all others with quantised KV, wherever a run stopped or resumed.
    """

    bits: int
    group_size: int
    start: int

    @classmethod
    def on(cls, grid: Grid, *, bits: int, group_size: int, start: int) -> "KVQuantisation":
        """With the first stop of the grid at ``start`` or behind it."""
        return cls(bits=bits, group_size=group_size, start=grid.stop_of(max(start, 1)))

    def options(self) -> dict[str, int]:
        """The arguments of mlx-lm's ``generate_step`` that say so."""
        return {
            "kv_bits": self.bits,
            "kv_group_size": self.group_size,
            "quantized_kv_start": self.start,
        }

    def apply(self, cache: list[Any]) -> None:
        """Quantise what mlx-lm would after a chunk or a token: in place, entry by entry."""
        _maybe_quantize(cache, **self.options())

    def of_fresh(self, make_cache: Callable[[], list[Any]]) -> list[Any]:
        """A fresh cache whose KV is quantised from its first token on, where mlx-lm does it."""
        cache = make_cache()
        _maybe_quantize(cache, **{**self.options(), "quantized_kv_start": 0})
        return cache

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size} from {self.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What a restore needs to know of the model that it is for."""

    make_cache: Callable[[], list[Any]]
    store: MutableStore
    grid: Grid
    # None if the model's cache has leaves that are not stored; ``unsupported`` says which.
    layout: Layout | None
    unsupported: str
    namespace: bytes
    fields: tuple[tuple[str, str], ...]
    producer: str
    depths: MutableDepths
    # From where on the cache has this form, and the form that it takes on later, if it does.
    start: int = 0
    later: "Binding | None" = None

    def at(self, position: int) -> "Binding":
        """The form in which the cache stands at a position."""
        later = self.later
        return later if later is not None and position >= later.start else self

    def later_form(self) -> LaterForm | None:
        """The later form, as a recording wants it."""
        later = self.later
        if later is None or later.layout is None:
            return None
        return LaterForm(start=later.start, namespace=later.namespace, layout=later.layout)

    @property
    def turning_point(self) -> int | None:
        """Where the cache takes its later form: plans always stop there."""
        return None if self.later is None else self.later.start


def lookup_of(
    binding: Binding, layout: Layout, chain: Chain, plan: Plan, *, request: int, beyond: int
) -> Lookup:
    """What a prompt looks for: boundaries of the later form first, and otherwise those before it.

    ``layout`` is the binding's, which has one. A cache never has a form where that form does not
    belong: what ran on from there would have other bits than a run from the start.
    """
    later = binding.later
    lookup = Lookup(
        request=request,
        namespace=binding.namespace,
        fields=binding.fields,
        layout=layout,
        chain=chain,
        plan=plan,
        beyond=beyond,
        below=None if later is None else later.start,
    )
    if later is None or later.layout is None or chain.token_count <= later.start:
        return lookup
    return dataclasses.replace(
        lookup,
        namespace=later.namespace,
        fields=later.fields,
        layout=later.layout,
        chain=chain.under(later.namespace),
        beyond=max(beyond, later.start - 1),
        below=None,
        form_start=later.start,
        otherwise=lookup,
    )
