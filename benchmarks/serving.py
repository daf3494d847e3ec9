"""Serving: how much of each prompt mlx-lm's server and ours need not compute, over HTTP.

Counts, not seconds: ``usage.prompt_tokens_details.cached_tokens`` of real servers on a tiny hybrid
model, so every run gives the same ones.
"""

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# These two are the tests' own; `make bench` puts their folder on the path.
from chat_models import write_chat_model
from servers import Answer, Server, serving

ARCHITECTURE = "lfm2"
# Far below the defaults of 256 and 2,048, as the prompts are: so the grids show.
GRIDS = ("--block-tokens", "64", "--checkpoint-tokens", "256")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as a client sends it. The set-up of another one is asked, and not reported."""

    shape: str
    messages: Sequence[Message]
    options: dict[str, Any]
    is_set_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How many tokens of a prompt each server had, in the same life and after a restart."""

    shape: str
    prompt_tokens: int
    stock: int
    walkback: int
    # None for what is no such request any more once it has been asked.
    stock_restarted: int | None
    walkback_restarted: int | None

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        return {"topic": "serving", "what": fields.pop("shape"), **fields}


def measure_serving(directory: Path, *, quick: bool) -> list[Served]:
    """Ask each server all requests in one life; and again in another, killed after the set-up.

    Killed means SIGKILL. What is restarted has no tier in RAM, and ours stores nothing then, so
    that each request finds what it would as the first one after the restart.
    """
    model = directory / "model"
    write_chat_model(model, ARCHITECTURE)
    scale = 1 if quick else 4
    ours = ("--disk-floor", "0", *GRIDS)
    lasting = (*ours, "--cache-dir", str(directory / "lasting"))

    with serving(model, log_path=directory / "1.log", is_stock=True) as server:
        requests, stock = _converse(server, scale)
        server.stop(signal.SIGKILL)
    without_ram = ("--prompt-cache-size", "0")
    with serving(model, *without_ram, log_path=directory / "2.log", is_stock=True) as server:
        stock_restarted = [_restarted(server, request) for request in requests]
    once = (*ours, "--cache-dir", str(directory / "once"))
    with serving(model, *once, log_path=directory / "3.log") as server:
        requests, walkback = _converse(server, scale)
    with serving(model, *lasting, log_path=directory / "4.log") as server:
        for request in requests:
            if request.is_set_up:
                _asked(server, request)
        server.await_durable()
        server.stop(signal.SIGKILL)
    with serving(
        model, *lasting, "--hot-max", "0", "--read-only", log_path=directory / "5.log"
    ) as server:
        walkback_restarted = [_restarted(server, request) for request in requests]

    columns = zip(requests, stock, walkback, stock_restarted, walkback_restarted, strict=True)
    return [
        Served(
            shape=request.shape,
            prompt_tokens=one.prompt_tokens,
            stock=one.cached_tokens,
            walkback=other.cached_tokens,
            stock_restarted=one_later,
            walkback_restarted=other_later,
        )
        for request, one, other, one_later, other_later in columns
    ]


def markdown(rows: Sequence[Served]) -> str:
    """The rows as a table."""
    head = ("cached tokens of the prompt's", "", "`mlx_lm.server`", "`walkback serve`")
    later = ("restarted: `mlx_lm.server`", "restarted: `walkback serve`")
    lines = [_line(*head, *later), "|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        figures = (row.prompt_tokens, row.stock, row.walkback)
        restarted = (row.stock_restarted, row.walkback_restarted)
        shown = ("" if each is None else f"{each:,}" for each in (*figures, *restarted))
        lines.append(_line(row.shape, *shown))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _converse(server: Server, scale: int) -> tuple[list[Request], list[Answer]]:
    """Every shape of request, one after the other. The requests, and their answers."""
    requests: list[Request] = []
    answers: list[Answer] = []

    def ask(
        shape: str, messages: Sequence[Message], *, is_set_up: bool = False, **options: Any
    ) -> Message:
        request = Request(shape=shape, messages=messages, options=options, is_set_up=is_set_up)
        requests.append(request)
        answers.append(_asked(server, request))
        return _said("assistant", answers[-1].text)

    def user(text: str) -> Message:
        return _said("user", text * scale)

    system = _said("system", "You are a careful assistant, who says what is known. " * 3 * scale)
    rivers = [system, user("Tell me of rivers, from the spring down to the sea. ")]
    rivers += [_said("assistant", "They carry what the mountains lose. " * 2 * scale)]
    lakes = [*rivers, user("And of lakes, which have no way out but up, what of those? ")]
    whole = [*lakes, _said("assistant", "They keep it, and become land. " * 2 * scale)]
    wells = [*whole, user("And what of wells, which somebody had to dig first of all? ")]

    answer = ask("cold", wells, is_set_up=True)
    ask("replay", wells)
    ask("regenerate: another sample", wells, temperature=1.0)
    ask("regenerate, with a seed", wells, temperature=1.0, seed=7)
    ask("next turn", [*wells, answer, user("Thank you, and is the water of wells any good? ")])
    ask("edit of the last message", [*whole, user("And what of springs, if they run dry? ")])
    marshes = [*rivers, user("And of marshes, that nobody can cross, what of those? ")]
    ask("edit of an earlier message", [*marshes, *wells[len(lakes) :]])
    ask("rewind by a turn", lakes)
    weather = [system, user("What is the weather in the north? Look it up, then tell me. ")]
    call = ask("tool loop: the question", weather, is_set_up=True)
    result = _said("tool", "Snow, and wind from the east all day. " * scale)
    ask("tool loop: the result", [*weather, call, result])
    ask("second conversation, same system prompt", [system, user("Is there water on the moon? ")])
    return requests, answers


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _asked(server: Server, request: Request) -> Answer:
    return server.chat(request.messages, **request.options)


def _restarted(server: Server, request: Request) -> int | None:
    return None if request.is_set_up else _asked(server, request).cached_tokens
