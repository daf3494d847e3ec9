"""What the commands share: how they print, and how they end."""

import enum
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer
from rich.console import Console

from ..journal.errors import CacheLockedError, WalkbackError
from ..journal.words import FileName, Kind

CLEAN = 0
FINDINGS = 1
COULD_NOT_LOOK = 2

# What a shell reports of a program that a signal ended: SIGINT, and SIGPIPE.
_INTERRUPTED = 130
_PIPE_CLOSED = 141

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The cache's directory.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


def run(look: Callable[[], int]) -> NoReturn:
    """Do what a command does, print what stopped it, and end with its exit status."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        status = look()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _PIPE_CLOSED
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except CacheLockedError as error:
        holder = "another process" if error.pid is None else f"process {error.pid}"
        print_error(
            f"{error.path} is open in {holder}, and a cache can be looked into at rest only: "
            "stop that process, or ask it: a server has GET /walkback/stats, a script "
            "cache.statistics() and cache.violations()"
        )
        status = COULD_NOT_LOOK
    except (WalkbackError, OSError) as error:
        print_error(str(error))
        status = COULD_NOT_LOOK
    except Exception:  # noqa: BLE001 - Python's own status for this is 1, and that means findings
        traceback.print_exc()
        status = COULD_NOT_LOOK
    raise typer.Exit(status)


def print_line(text: str) -> None:
    print(printable(text))


def print_error(text: str) -> None:
    print(printable(f"walkback: {text}"), file=sys.stderr)


def print_json(fields: Mapping[str, object]) -> None:
    """One line with one object."""
    print(json.dumps(plain(fields)))


class Tables(Console):
    """A console for tables: text is never markup, and a closed pipe is ours to handle."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain(value: object) -> object:
    """A value as JSON has it: bytes in hex, files as paths, kinds and reasons as words."""
    match value:
        case FileName():
            return value.path
        case Kind():
            return value.word
        case enum.Enum():
            return value.value
        case bytes():
            return value.hex()
        case Mapping():
            pairs = cast(Mapping[str, object], value)
            return {name: plain(each) for name, each in pairs.items()}
        case tuple() | list():
            return [plain(each) for each in cast(tuple[object, ...], value)]
        case _:
            return value


def printable(text: str) -> str:
    """The text without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def short(key: bytes) -> str:
    """The first 8 bytes of a key: what the journal knows of some keys, and enough for people."""
    return key[:8].hex()


def size(nbytes: int) -> str:
    """Bytes for people: "0 B", "1.5 MiB"."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def local_time(wall_ns: int) -> str:
    return f"{datetime.fromtimestamp(wall_ns // 10**9):%Y-%m-%d %H:%M:%S}"


def utc_time(wall_ns: int) -> str:
    moment = datetime.fromtimestamp(wall_ns / 10**9, tz=UTC)
    return moment.isoformat(timespec="milliseconds")
