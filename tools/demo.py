"""``walkback demo``: the whole path on a real hybrid architecture, with an oracle beside it."""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import resource
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from mlx_lm.utils import load_model
from rich.console import Console
from rich.table import Table

from ..integration.tiny import TINY_QWEN3_5, write_tiny_model
from ..journal.errors import SettingsError
from ..journal.events import Record
from ..restore.plan import Grid
from ..store.audit import Audit
from ..store.findings import findings
from ..store.statistics import holdings_of
from .demo_cases import Case, cases_of, first_tokens, step_of
from .demo_processes import kill_while_storing, oracle, replay_in_a_fresh_process
from .demo_run import GREEDY_TOKENS, Run, Setup, made_up_prompt, run_prompt, vocabulary_of
from .output import CLEAN, FINDINGS, run

_COLUMNS = ("prompt_tokens", "endpoint_tokens", "uncached_tokens", "sidecars", "walkbacks")
_TIMES = ("header_ms", "bytes_ms", "prefill_s", "first_token_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    run: Run
    equal: bool
    # What is not as it must be, in words.
    faults: list[str]

    def fields(self) -> dict[str, Any]:
        fields = self.run.fields()
        shown = {name: fields[name] for name in ("run", *_COLUMNS)}
        return shown | {name: round(fields[name], 4) for name in _TIMES} | {"equal": self.equal}


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A local MLX model to run on, instead of a tiny one.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep the cache, in this new directory."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON lines.")] = False,
    block_tokens: Annotated[int, typer.Option(help="KV is cut in blocks of so many tokens.")] = 256,
    checkpoint_tokens: Annotated[
        int, typer.Option(help="Prefill stops and keeps its state every so many tokens.")
    ] = 512,
) -> None:
    """Run a hybrid model over a cache through rewinds, edits, damage and a kill, and compare.

    Each row must resume where it should, and give the same bits as mlx-lm alone. Exit status 1 if
    one does not, or if an invariant of the cache is broken; 2 if it could not run.
    """
    run(
        lambda: _demo(
            model,
            directory,
            as_json=as_json,
            grid=Grid(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens),
        )
    )


def _demo(model: Path | None, directory: Path | None, *, as_json: bool, grid: Grid) -> int:
    if model is not None and not (model / "config.json").is_file():
        raise SettingsError(f"{model} is no local MLX model: it holds no config.json")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        # It deletes, damages and kills in there.
        raise SettingsError(f"{directory} is not empty: the demo makes a cache of its own")
    progress = Console(stderr=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="walkback-demo-")))
        if model is None:
            progress.print("making a tiny random-weight Qwen3.5: Gated DeltaNet and attention")
            model = scratch / "model"
            write_tiny_model(model, config=TINY_QWEN3_5)
        setup = Setup(
            directory=(directory or scratch / "cache").absolute(),
            model_dir=model.absolute(),
            block_tokens=grid.block_tokens,
            checkpoint_tokens=grid.checkpoint_tokens,
            salt=f"demo {secrets.token_hex(8)}",
        )
        ask = stack.enter_context(oracle(setup))
        rows, summary = _run_all(setup, scratch, ask, progress, as_json=as_json)
    summary["faults"] = [f"{row.run.run}: {fault}" for row in rows for fault in row.faults]
    if as_json:
        print(json.dumps({"summary": summary}), flush=True)
    else:
        _print(rows, summary)
    return FINDINGS if summary["faults"] or summary["violations"] else CLEAN


def _run_all(
    setup: Setup,
    scratch: Path,
    ask: Callable[[list[int]], dict[str, Any]],
    progress: Console,
    *,
    as_json: bool,
) -> tuple[list[_Row], dict[str, Any]]:
    model: Any = load_model(setup.model_dir)[0]
    vocabulary = vocabulary_of(model)
    rows: list[_Row] = []
    runs: list[Run] = []

    def add(case: Case, run: Run) -> None:
        runs.append(run)
        rows.append(_judged(case, run, ask(case.prompt)))
        if as_json:
            print(json.dumps(rows[-1].fields()), flush=True)

    with setup.open() as cache:
        bound = cache.bind(model, setup.model_dir)
        if bound.layout is None:
            raise SettingsError(f"nothing of this model would be stored: {bound.unsupported}")
        first = made_up_prompt(first_tokens(setup), seed=1, vocabulary=vocabulary)
        step = step_of(setup, bound)
        cases = list(cases_of(setup, bound, first, vocabulary, runs))
        for number, make in enumerate(cases, start=1):
            case = make()
            progress.print(f"{number:2} of {len(cases) + 1}  {case.name}")
            if case.before is not None:
                case.before(cache, bound)
            add(case, run_prompt(bound, case.name, case.prompt))
            cache.flush()
        statistics = cache.statistics()
    name = "fresh process after SIGKILL"
    progress.print(f"{len(cases) + 1:2} of {len(cases) + 1}  {name}")
    victim = made_up_prompt(first_tokens(setup), seed=2, vocabulary=vocabulary)
    kill_while_storing(setup, scratch, victim)
    # The next turn, which begins like the first prompt, may have stored more of it.
    next_turn = len(first) + GREEDY_TOKENS + setup.checkpoint_tokens // 4
    stored = (next_turn - 1) // setup.checkpoint_tokens * setup.checkpoint_tokens
    endpoint = min((len(first) - 1) // step * step, stored)
    case = Case(name=name, prompt=first, endpoint=endpoint)
    add(case, replay_in_a_fresh_process(setup, scratch, first))
    with Audit.open(setup.directory) as audit:
        assert audit.state is not None, audit.damage
        holdings = holdings_of(audit.state)
        events = Counter(
            type(record.event).__name__ for record in audit.records() if isinstance(record, Record)
        )
        summary: dict[str, Any] = {
            "sidecar_count": holdings.sidecar_count,
            "sidecar_bytes": holdings.sidecar_bytes,
            "block_count": holdings.block_count,
            "block_bytes": holdings.block_bytes,
            "staging_bytes_high_water": statistics.staging_bytes_high_water,
            "backpressure_seconds": round(statistics.backpressure_seconds, 4),
            "peak_rss_bytes": _peak_rss_bytes(),
            "events": dict(events),
            "violations": [finding.text for finding in findings(audit)],
        }
    return rows, summary


def _judged(case: Case, run: Run, answer: dict[str, Any]) -> _Row:
    faults: list[str] = []
    equal = run.logits == answer["logits"] and run.tokens == answer["tokens"]
    if not equal:
        faults.append("differs from mlx-lm alone")
    if run.endpoint_tokens != case.endpoint:
        faults.append(f"resumed from {run.endpoint_tokens}, not from {case.endpoint}")
    if run.walkbacks != case.walkbacks:
        faults.append(f"walked back {run.walkbacks} times, not {case.walkbacks}")
    return _Row(run=run, equal=equal, faults=faults)


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print(rows: list[_Row], summary: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table("run", *(_heading(each) for each in (*_COLUMNS, *_TIMES)), "equal")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        fields = row.fields()
        table.add_row(
            row.run.run,
            *(f"{fields[name]:,}" for name in _COLUMNS),
            *(f"{fields[name]:.2f}" for name in _TIMES),
            "yes" if row.equal else "NO",
        )
    console.print(table)
    mib = 1 << 20
    console.print(
        f"sidecars {summary['sidecar_count']}, {summary['sidecar_bytes'] / mib:.1f} MiB; "
        f"blocks {summary['block_count']}, {summary['block_bytes'] / mib:.1f} MiB; "
        f"staging peak {summary['staging_bytes_high_water'] / mib:.2f} MiB, "
        f"backpressure {summary['backpressure_seconds']:.2f} s; "
        f"peak RSS {summary['peak_rss_bytes'] / mib:,.0f} MiB"
    )
    events = ", ".join(f"{name} {count}" for name, count in sorted(summary["events"].items()))
    console.print(f"events: {events}")
    for fault in [*summary["faults"], *summary["violations"]]:
        console.print(f"[bold red]fault:[/] {fault}")
    if not summary["violations"]:
        console.print("invariants: all hold")


def _heading(name: str) -> str:
    words, _, unit = name.rpartition("_")
    if unit == "tokens":
        return words
    return f"{words.replace('_', ' ')} {unit}" if words else name
