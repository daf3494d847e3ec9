"""Whether the padding of a batch reaches the state of a model.

Prompts of unlike length are prefilled together by padding the shorter ones. Several architectures
let that padding into their recurrent state, and which of them do changes from one mlx-lm to the
next. In RAM such a state is wrong for one conversation; stored, it would be wrong for good. So each
model is asked when it is loaded.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from ..leaves import is_kv, walk_leaves

# Where padding reaches the state it is off by its own size and more; where it does not, kernels for
# batches of other sizes differ in the last bits of bfloat16.
_DIFFERENCE_MAX = 0.1
_LENGTHS = (20, 60)


def padding_reaches_state(model: Any) -> bool:
    """Prefill a short row beside a long one, and alone; whether its point state differs.

    Takes two forwards of some tens of tokens.
    """
    rows = [[(7 * at + 3) % 250 for at in range(length)] for length in _LENGTHS]
    alone, beside = _prefilled(model, rows[:1]), _prefilled(model, rows)
    differences = [
        difference(left, right)
        for (_, one), (_, other) in zip(walk_leaves(alone), walk_leaves(beside), strict=True)
        if not is_kv(one)
        for left, right in zip(one.cache, other.cache, strict=True)
        if left is not None and right is not None
    ]
    return max(differences, default=0.0) > _DIFFERENCE_MAX


def _prefilled(model: Any, rows: Sequence[list[int]]) -> list[Any]:
    """The cache of the first row after all of them went through together."""
    batch = PromptProcessingBatch(
        model=model,
        uids=list(range(len(rows))),
        caches=[make_prompt_cache(model) for _ in rows],
        tokens=[[] for _ in rows],
    )
    batch.prompt([list(row) for row in rows])
    return batch.extract_cache(0)


def difference(expected: mx.array, found: mx.array) -> float:
    """The difference as a part of the expected's own size; infinite for what is no number."""
    wanted, got = expected.astype(mx.float32), found.astype(mx.float32)
    size = mx.sqrt(mx.sum(wanted * wanted)).item()
    off = mx.sqrt(mx.sum((got - wanted) ** 2)).item()
    assert isinstance(size, float) and isinstance(off, float)
    if not off < float("inf"):
        return float("inf")
    return off / max(size, 1e-9)
