"""A fault in every call of ours, one after the other: every request has its answer all the same."""

import json
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from faulty_server import ERRORS, Call, MutableFaults, serving_with_faults
from oracles import Oracle
from servers import Server

from walkback.store.audit import Audit
from walkback.store.findings import findings

OPTIONS = ("--disk-floor", "0", "--ssd-max", "64M", "--block-tokens", "16")
SHORT = (*OPTIONS, "--checkpoint-tokens", "64")
TOKENS = 4
# What the issue asks for; there are fewer calls, so some fail in several kinds of requests.
REQUESTS_MIN = 200
TRIES_MAX = 3

Message = dict[str, Any]

SYSTEM: Message = {
    "role": "system",
    "content": "You are a careful assistant, and kind to all who ask. " * 2,
}


def asking(about: str) -> list[Message]:
    return [SYSTEM, {"role": "user", "content": f"Tell me of {about}, and then of {about}."}]


def unseen(number: int) -> list[Message]:
    """A conversation that shares nothing with others."""
    return [{**SYSTEM, "content": f"{number}! {SYSTEM['content']}"}, *asking("us")[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way in which requests go through the server. ``ask`` gives what is wrong, "" if nothing."""

    name: str
    ask: Callable[[int], str]
    # Whether the tier in RAM is emptied before.
    from_disk: bool = False


class Requests:
    """The kinds of requests that one server is asked."""

    def __init__(self, server: Server, models: dict[str, Path]) -> None:
        self._server = server
        self._models = models
        self._oracles = {name: Oracle(path) for name, path in models.items()}
        self._model = "lfm2"
        self.kinds = (
            Kind(name="cold", ask=lambda number: self._chat(unseen(number))),
            Kind(name="memory", ask=lambda _: self._chat(asking("us"))),
            Kind(name="disk", ask=lambda _: self._chat(asking("us")), from_disk=True),
            Kind(name="next turn", ask=self._next_turn, from_disk=True),
            Kind(name="seeded", ask=lambda _: self._chat(asking("us"), seed=3), from_disk=True),
            Kind(name="cut off", ask=self._cut_off),
            Kind(name="pages", ask=self._pages),
            Kind(name="another model", ask=self._another_model),
        )

    def _chat(self, messages: list[Message], **options: Any) -> str:
        expected = self._oracles[self._model].tokens(messages, TOKENS)
        path = str(self._models[self._model])
        try:
            answer = self._server.chat(messages, max_tokens=TOKENS, model=path, **options)
        except OSError as error:
            return f"{error!r}"
        return "" if answer.tokens == expected else f"{answer.tokens}, not {expected}"

    def _next_turn(self, number: int) -> str:
        """A prompt that is resumed from disk and recorded from there on, beside its block grid."""
        return self._chat(asking(f"the {number}th"))

    def _cut_off(self, number: int) -> str:
        """A client that goes away; whoever comes next is answered."""
        body = {"messages": unseen(number), "max_tokens": 400}
        try:
            stream = self._server.stream(body)
            next(stream)
            stream.close()
        except OSError as error:
            return f"{error!r}"
        return self._chat(asking("us"))

    def _pages(self, _: int) -> str:
        """A page of figures that fails says so, and all others are answered."""
        for path in ("/metrics", "/walkback/stats"):
            try:
                self._server.get(path)
            except urllib.error.HTTPError as error:
                # Ours, or the server's, to which the page was left.
                if error.code not in (500, 404):
                    return f"{error!r}"
        return "" if json.loads(self._server.get("/health"))["status"] == "ok" else "no health"

    def _another_model(self, _: int) -> str:
        self._model = next(name for name in self._models if name != self._model)
        return self._chat(asking("us"))


def watched(kind: Kind, faults: MutableFaults) -> list[Call]:
    """The calls of one request in which nothing fails, after another one of its kind."""
    for number in (-2, -1):
        if kind.from_disk:
            faults.forget_memory()
        faults.watch()
        assert kind.ask(number) == ""
    return faults.calls()


def to_fail(calls: dict[str, list[Call]]) -> Iterator[tuple[str, Call]]:
    """Every call in the first kind of requests that makes it, then some in others too."""
    first: dict[Call, str] = {}
    others: list[tuple[str, Call]] = []
    for kind, each in calls.items():
        for call in each:
            if first.setdefault(call, kind) != kind and kind not in ("cut off", "another model"):
                others.append((kind, call))
    count = max(0, REQUESTS_MIN - len(first))
    step = max(1, len(others) // max(1, count))
    chosen = [*((kind, call) for call, kind in first.items()), *others[::step][:count]]
    yield from sorted(chosen, key=lambda each: list(calls).index(each[0]))


def asked_with_a_fault(
    kind: Kind, number: int, faults: MutableFaults, call: Call, error: str
) -> str:
    """What is wrong with the answer of a request in which a call fails, or with what it leaves."""
    has_raised, tries = False, 0
    while not has_raised:
        # Whether a thread waits for another may be a matter of moments, and with it a call.
        tries += 1
        if tries > TRIES_MAX:
            return "the call did not come again"
        if kind.from_disk:
            faults.forget_memory()
        faults.arm(call, error)
        found = kind.ask(number + tries * 1000)
        has_raised = faults.disarm()
        left = {what: count for what, count in faults.kept().items() if count}
        if found or left:
            return f"{found} {left or ''}"
    return ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    write_chat_model(root / "lfm2", "lfm2")
    write_chat_model(root / "other", "lfm2", seed=1)
    return {name: root / name for name in ("lfm2", "other")}


def test_a_fault_in_any_call_of_ours_costs_no_answer_and_leaves_nothing_behind(
    models: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options = ("--cache-dir", str(cache), *SHORT)
    wrong: list[str] = []
    with serving_with_faults(models["lfm2"], *options, directory=tmp_path) as (server, faults):
        requests = Requests(server, models)
        kinds = {kind.name: kind for kind in requests.kinds}
        calls = {kind.name: watched(kind, faults) for kind in requests.kinds}
        errors = cycle(each.__name__ for each in ERRORS)
        asked = 0
        before = ""
        for number, (name, call) in enumerate(to_fail(calls), start=1):
            kind, error = kinds[name], next(errors)
            if name != before and name != "another model":
                assert kind.ask(-1) == ""
            before = name
            found = asked_with_a_fault(kind, number, faults, call, error)
            asked += 1
            if found:
                wrong.append(f"{name}: {error} in {' -> '.join(call)}: {found}")

        hits = [kinds[name].ask(0) for name in ("another model", "memory", "disk", "seeded")]
        faults.forget_memory()
        again = server.chat(asking("us"), max_tokens=TOKENS)
        status = server.stop()

    assert not wrong, "\n".join(wrong)
    assert asked >= REQUESTS_MIN
    assert hits == [""] * 4
    assert again.cached_tokens > 100
    assert status == 0, server.log
    assert json.loads((tmp_path / "threads").read_text()) == []
    with Audit.open(cache) as audit:
        assert list(findings(audit)) == []
