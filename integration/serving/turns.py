"""Where the turns of a rendered conversation end: found in its token ids, whoever spoke last.

mlx-lm's own server makes a checkpoint for a user's turn only, so an agent, whose last message is
the result of a tool, has none. Chat templates close every turn with a token of its own; behind it
the next turn begins, and no tokenizer joins anything across it.
"""

from collections.abc import Sequence, Set
from typing import Any

from ...restore.plan import PROMPT_END_TOKENS

# What closes a turn where it is not the token that ends generation too.
CLOSING_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "<|return|>",
    "<|call|>",
    "[/INST]",
    "[/SYSTEM_PROMPT]",
    "[/TOOL_RESULTS]",
)


def closing_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that close a turn in this tokenizer's vocabulary."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    known = (vocabulary.get(each) for each in CLOSING_TOKENS)
    return frozenset(tokenizer.eos_token_ids) | {each for each in known if each is not None}


def turn_ends(token_ids: Sequence[int], closing: Set[int], *, distance: int) -> list[int]:
    """The positions behind the token that closes each turn, in order.

    If none is within ``distance`` of the prompt's end, as in a bare completion, a position a few
    tokens before its end is added: what is written on may join the very last of them.
    """
    ends = [at + 1 for at, each in enumerate(token_ids) if each in closing]
    last = len(token_ids) - PROMPT_END_TOKENS
    if last > 0 and not any(len(token_ids) - distance <= end < len(token_ids) for end in ends):
        ends.append(last)
    return ends
