"""The command line: what it prints, how it exits, and what it leaves alone."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cache_maker import boundary, store_one
from quiet_caches import (
    FIELDS,
    NAMESPACE,
    crashed_copy,
    edit_events,
    image_of,
    key_of,
    make_cache,
    open_store,
    remove_event,
    store_boundary,
)
from typer.testing import CliRunner, Result

from walkback.journal import chain
from walkback.journal.events import Missed, Restored
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.store.boundary import NotStored
from walkback.store.settings import StoreSettings
from walkback.tools.main import app
from walkback.tools.output import printable, size

COMMANDS = ("check", "log", "stats", "demo")
LOOKING = ("check", "log", "stats")

_CHILD_SECONDS = 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache")


@pytest.fixture
def eventful(tmp_path: Path) -> Path:
    """A cache with one of everything that people ask about."""
    root = tmp_path / "cache"
    with open_store(root, StoreSettings(budget_bytes=1 << 20, free_floor_bytes=0)) as store:
        store.operator.see_namespace(NAMESPACE, FIELDS)
        for index in range(2):
            assert store_boundary(store, index) is None
        for tokens in (4, 8):
            event = restored(endpoint=6, tokens=tokens)
            store.note_restored(event, endpoint=key_of(0), sidecars_read=1)
        # Enough that the budget makes the oldest go.
        for index in range(30):
            store_one(store, boundary(f"other {index}", 0, nbytes=2048))
        store.note_missed(missed())
        # The first is recorded, then the third, which stands for two.
        for _ in range(3):
            refusal = NotStored(NotStoredReason.OFF_GRID, "no stop of the plan")
            store.refuse(refusal, request=9, key=key_of(40), position=656)
    return root


def restored(*, endpoint: int, tokens: int) -> Restored:
    return Restored(
        request=7,
        tip=key_of(1)[:8],
        block_count=2,
        matched=endpoint,
        endpoint=endpoint,
        endpoint_tokens=tokens,
        prompt_tokens=10,
        walkbacks=1,
        mixed_plan=False,
    )


def missed() -> Missed:
    return Missed(
        request=8,
        tip=key_of(2)[:8],
        block_count=2,
        prompt_tokens=10,
        walkbacks=2,
        reason=MissReason.UNSEEN,
        detail="",
    )


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def lines_of(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def events_of(*arguments: str | Path) -> list[dict[str, Any]]:
    result = run("log", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return lines_of(result)


def in_child(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "walkback.tools", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
    )


@contextlib.contextmanager
def held_by_another_process(root: Path) -> Generator[int]:
    """Another process has the cache open; its pid."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from walkback.store.store import MutableStore\n"
        "store = MutableStore.open(Path(sys.argv[1]))\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.read()\n"
        "store.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            yield int(child.stdout.readline())
        finally:
            child.communicate(timeout=_CHILD_SECONDS)


def write_an_event_of_a_newer_format(root: Path) -> None:
    """Append an event as a later walkback would write it, with a link that is right."""

    def append(transaction: Any, database: Any) -> None:
        cursor = transaction.cursor(database)
        assert cursor.last()
        sequence = chain.sequence_of(cursor.key()) + 1
        data = cbor2.dumps([2, 99, sequence, 0, 1])
        link = chain.link_of(cursor.value()[-chain.LINK_BYTES :], data)
        transaction.put(chain.sequence_key(sequence), data + link, db=database)

    edit_events(root, append)


# Every command.


@pytest.mark.parametrize("command", LOOKING)
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")

    assert result.exit_code == 0
    assert "DIR" in result.stdout
    assert "--json" in result.stdout


def test_the_list_of_commands_has_a_line_for_each() -> None:
    result = run("--help")

    assert result.exit_code == 0
    for command in COMMANDS:
        lines = [each.split() for each in result.stdout.splitlines()]
        (line,) = [each for each in lines if each[1:2] == [command]]
        assert len(line) > 4, line


@pytest.mark.parametrize("arguments", [(), ("--json",)])
@pytest.mark.parametrize("command", LOOKING)
def test_no_command_changes_anything(
    command: str, arguments: tuple[str, ...], eventful: Path
) -> None:
    before = image_of(eventful)

    result = run(command, eventful, *arguments)

    assert result.exit_code == 0, result.output
    assert image_of(eventful) == before


@pytest.mark.parametrize("command", LOOKING)
def test_a_cache_that_cannot_be_looked_at_is_exit_2_and_on_stderr(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, message in (
        ("missing", "there is no cache"),
        ("missing/below", "does not exist"),
        ("empty", "holds no STORE"),
        ("full", "thesis.tex"),
        ("file", "is a file"),
    ):
        result = run(command, tmp_path / name)

        assert result.exit_code == 2, name
        assert result.stdout == ""
        assert message in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", LOOKING)
def test_a_running_holder_is_named_by_pid(command: str, root: Path) -> None:
    with held_by_another_process(root) as pid:
        result = run(command, root)

    assert result.exit_code == 2
    assert f"process {pid}" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", LOOKING)
def test_a_newer_format_asks_for_an_upgrade(command: str, root: Path) -> None:
    write_an_event_of_a_newer_format(root)

    result = run(command, root)

    assert result.exit_code == 2
    assert "Upgrade walkback" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("--help",), ("check",), ("log",), ("stats",)])
def test_no_command_but_demo_imports_mlx(arguments: tuple[str, ...], root: Path) -> None:
    code = (
        "import sys\n"
        "from walkback.tools.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = [name for name in sys.modules if name.partition('.')[0] in\n"
        "             ('mlx', 'mlx_lm', 'numpy', 'transformers')]\n"
        "    heavy += [name for name in sys.modules if name.startswith('walkback.integration')]\n"
        "    print('heavy', heavy, file=sys.stderr)\n"
    )
    place = [] if arguments == ("--help",) else [str(root)]

    child = subprocess.run(
        [sys.executable, "-c", code, *arguments, *place],
        capture_output=True,
        text=True,
        timeout=_CHILD_SECONDS,
        check=False,
    )

    assert child.returncode == 0, child.stderr
    assert child.stderr.strip() == "heavy []"


def test_the_package_is_a_program_too(root: Path) -> None:
    child = in_child("check", root)

    assert (child.returncode, child.stdout, child.stderr) == (0, "clean\n", "")


def test_a_defect_of_the_command_is_not_taken_for_a_finding(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("walkback.tools.check.findings", fail)

    result = run("check", root)

    assert result.exit_code == 2
    assert "ZeroDivisionError" in result.stderr


def test_an_interrupted_command_ends_quietly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("walkback.tools.check.findings", interrupt)

    result = run("check", root)

    assert result.exit_code == 128 + signal.SIGINT
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [("log",), ("log", "--json"), ("stats",)])
def test_a_closed_pipe_ends_a_command_quietly(arguments: tuple[str, ...], eventful: Path) -> None:
    command = [sys.executable, "-m", "walkback.tools", *arguments, str(eventful)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        errors = child.stderr.read()

    assert errors == b""
    assert child.returncode == 128 + signal.SIGPIPE


# demo


def test_demo_is_imported_when_it_is_called_and_gets_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = type(sys)("walkback.tools.demo")

    def demo(prompt: str, *, tokens: int = 1) -> None:
        """Show something."""
        print(prompt, tokens)

    vars(module)["demo"] = demo
    monkeypatch.setitem(sys.modules, "walkback.tools.demo", module)

    assert run("demo", "hello", "--tokens", "3").stdout == "hello 3\n"
    assert "--tokens" in run("demo", "--help").stdout
    assert run("demo").exit_code == 2


def test_a_demo_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "walkback.tools.demo", None)

    result = run("demo")

    assert result.exit_code == 2
    assert "the demo cannot run here" in result.stderr


# check


def test_check_of_a_clean_cache_says_clean(root: Path) -> None:
    result = run("check", root, "--payloads")

    assert result.exit_code == 0
    assert result.stdout == "clean\n"
    assert lines_of(run("check", root, "--json")) == [{"type": "summary", "findings": 0}]


def test_check_names_each_finding_with_what_to_do(root: Path) -> None:
    (root / "blocks" / "00000001" / "000000aa").write_bytes(b"orphan")
    (root / "sidecars" / "00000001" / "00000002").unlink()

    result = run("check", root)

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "files: sidecars/00000001/00000002 is missing",
        "    a restore of position 16 will miss it",
        "files: blocks/00000001/000000aa is named by no event",
        "    nothing uses it, delete it",
        "2 findings",
    ]


def test_check_reads_the_payloads_only_if_asked(root: Path) -> None:
    payload = root / "blocks" / "00000001" / "00000001"
    content = bytearray(payload.read_bytes())
    content[-1] ^= 1
    payload.write_bytes(content)

    assert run("check", root).exit_code == 0
    result = run("check", root, "--payloads")

    assert result.exit_code == 1
    assert "payload: blocks/00000001/00000001: its data" in result.stdout
    assert result.stdout.endswith("1 finding\n")


def test_check_finds_a_removed_event(root: Path) -> None:
    remove_event(root, 5)

    result = run("check", root, "--json")

    assert result.exit_code == 1
    finding, summary = lines_of(result)
    assert finding["type"] == "finding"
    assert finding["area"] == "journal"
    assert "event 5 is missing" in finding["text"]
    assert "journal.bad" in finding["remedy"]
    assert summary == {"type": "summary", "findings": 1}


def test_a_journal_that_would_kill_its_reader_is_a_finding(root: Path) -> None:
    data = root / "journal" / "data.mdb"
    data.write_bytes(data.read_bytes()[:12288])

    result = run("check", root)

    assert result.exit_code == 1
    assert result.stdout.startswith("journal: ")


def test_notes_are_no_findings(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        store_boundary(store, 0)
        crashed = crashed_copy(store, tmp_path / "crashed")

    result = run("check", crashed)

    assert result.exit_code == 0
    note, end = result.stdout.splitlines()
    assert note.startswith("note: epoch 1 was not closed")
    assert end == "clean"
    assert lines_of(run("check", crashed, "--json"))[0]["type"] == "note"


# log


def test_log_prints_one_line_for_each_event(root: Path) -> None:
    result = run("log", root)

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [int(line.split()[0]) for line in lines] == list(range(1, len(lines) + 1))
    assert "Opened" in lines[0]
    assert "Closed" in lines[-1]
    assert f"block {key_of(0)[:8].hex()} tokens 0 to 16, blocks/00000001/00000001" in result.stdout


def test_log_as_json_has_every_field(root: Path) -> None:
    (first, *_) = events_of(root, "--event", "committed")

    assert list(first) == ["type", "sequence", "time", "wall_ns", "epoch", "event", "fields"]
    fields = first["fields"]
    assert fields["kind"] == "block"
    assert fields["key"] == key_of(0).hex()
    assert fields["parent"] == NAMESPACE.hex()
    assert fields["file"] == "blocks/00000001/00000001"
    assert fields["prefill_seconds"] == 0.5
    assert first["time"].endswith("+00:00")


def test_log_tells_what_happened_to_a_key(eventful: Path) -> None:
    events = events_of(eventful, "--key", key_of(0)[:10].hex())

    names = [each["event"] for each in events]
    assert names[:4] == ["Staged", "Staged", "Committed", "Committed"]
    assert sorted(names[4:7]) == ["Restored", "Restored", "Touched"]
    assert names[7:] == ["Evicted", "Evicted", "Deleted", "Deleted"]
    assert [each["fields"]["reason"] for each in events[7:9]] == ["pair", "budget"]


def test_log_tells_of_a_key_what_happened_to_all_its_namespace_or_to_what_leads_to_it(
    root: Path,
) -> None:
    with open_store(root) as store:
        store.operator.report_bad(Kind.BLOCK, key_of(1), "wrong answers")
        store.operator.purge(NAMESPACE)

    names = [each["event"] for each in events_of(root, "--key", key_of(2).hex())]

    assert names[4] == "ReportedBad"
    assert sorted(names[5:]) == ["Deleted", "Deleted", "Purged"]


def test_log_tells_why_something_was_not_stored(eventful: Path) -> None:
    (first, _) = events_of(eventful, "--key", key_of(40).hex())

    assert first["event"] == "NotStored"
    assert first["fields"]["reason"] == "off_grid"
    result = run("log", eventful, "--event", "not-stored")
    assert "off_grid (no stop of the plan)" in result.stdout


def test_log_is_cut_by_last_epoch_and_since(root: Path) -> None:
    whole = events_of(root)
    with open_store(root) as store:
        store_boundary(store, 3)

    assert events_of(root, "--epoch", "1") == whole
    assert [each["epoch"] for each in events_of(root, "--epoch", "2")] != []
    assert [each["event"] for each in events_of(root, "--last", "1")] == ["Closed"]
    assert len(events_of(root, "--event", "staged", "--last", "3")) == 3
    assert events_of(root, "--since", "2999-01-01") == []
    assert len(events_of(root, "--since", "2001-01-01")) > len(whole)


@pytest.mark.parametrize(
    "arguments", [("--event", "Evict"), ("--key", "xyz"), ("--key", ""), ("--last", "0")]
)
def test_a_question_that_makes_no_sense_is_exit_2(arguments: tuple[str, ...], root: Path) -> None:
    result = run("log", root, *arguments)

    assert result.exit_code == 2
    assert result.stdout == ""


def test_log_shows_what_it_can_of_a_damaged_journal(root: Path) -> None:
    remove_event(root, 5)

    result = run("log", root, "--json")

    assert result.exit_code == 1
    *events, gap = lines_of(result)
    assert [each["sequence"] for each in events] == [1, 2, 3, 4]
    assert gap["type"] == "gap"
    assert gap["first"] == 5
    assert gap["is_damage"]
    assert "       5  to 16: event 5 is missing" in run("log", root).stdout


# stats


def test_stats_adds_everything_up(eventful: Path) -> None:
    result = run("stats", eventful, "--json")

    assert result.exit_code == 0
    (stats,) = lines_of(result)
    (namespace,) = stats["namespaces"]
    assert namespace["fields"] == dict(FIELDS)
    assert namespace["block_count"] == stats["holdings"]["block_count"] > 0
    assert namespace["recency"]["newest_ns"] >= namespace["recency"]["oldest_ns"] > 0
    assert stats["budget_bytes"] == 1 << 20
    assert stats["charged_bytes"] <= 1 << 20
    assert stats["not_stored"] == {"off_grid": 3}
    assert stats["missed"] == {"unseen": 1}
    assert stats["evicted"]["budget"] > 0
    assert stats["restores"] == {
        "count": 2,
        "endpoint_tokens_min": 4,
        "endpoint_tokens_median": 4,
        "endpoint_tokens_max": 8,
        "endpoint_tokens_total": 12,
        "prompt_tokens_total": 20,
        "walkbacks": 4,
        "mixed_plans": 0,
    }
    journal = stats["journal"]
    assert journal["first_sequence"] == 1
    assert sum(stats["events"].values()) == journal["last_sequence"] == journal["head_sequence"]
    assert stats["gaps"] == []
    assert stats["is_closed"]


def test_stats_for_people_names_what_there_is(eventful: Path) -> None:
    result = run("stats", eventful)

    assert result.exit_code == 0
    for text in ("1.0 MiB", "off_grid", "unseen", "weights", "Committed", "4 to 8 tokens"):
        assert text in result.stdout


def test_stats_of_a_damaged_journal_sends_to_check(root: Path) -> None:
    remove_event(root, 5)

    result = run("stats", root)

    assert result.exit_code == 2
    assert "walkback check" in result.stderr


# Words.


def test_what_a_terminal_would_obey_is_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[31mb\nc") == "a\\x1b[31mb\\nc"
    assert printable("é [bold]") == "é [bold]"


def test_sizes_are_for_people() -> None:
    assert [size(each) for each in (0, 1023, 1536, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
    ]
