"""Verify a journal without risking the process that wants to use it.

A damaged page can make LMDB abort the process, and a truncated file kills it with SIGBUS. So after
an unclean stop a child looks first, and whatever happens to it is the answer:

    python -m walkback.journal.verify ROOT [FOLDER]

exits 0 if the journal verifies, 1 with the reason on stdout if not, 2 if it could not look, 3 if a
newer walkback wrote it. It checks LMDB's structure without LMDB, then every event's link and every
record of the snapshot.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import lmdb
from lmdb.verify import VerifyError, verify  # pyright: ignore[reportUnknownVariableType] untyped

from .environment import FOLDER
from .errors import FormatError, JournalDamagedError
from .files import Files
from .log_reader import LogReader

_DAMAGED = 1
_COULD_NOT_LOOK = 2
_NEWER_FORMAT = 3

# The structure is checked at 27-100 MB/s and the chain at about 20 MB/s. An idle start takes 0.2 s.
_START_SECONDS = 60
_BYTES_PER_SECOND = 1_000_000


def verify_in_child(root: Path, folder: str = FOLDER) -> str | None:
    """None if the journal below ``root`` verifies, else what is wrong with it.

    Raises FormatError if a newer walkback wrote it, ``OSError`` if the child could not look.
    """
    path = root / folder / "data.mdb"
    nbytes = path.stat().st_size if path.is_file() else 0
    package_parent = str(Path(__file__).parents[2])
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    # -P: a module that lies in the working directory is none of ours.
    command = [sys.executable, "-P", "-m", "walkback.journal.verify", str(root), folder]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS + nbytes / _BYTES_PER_SECOND,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"verifying {root / folder} took {error.timeout:.0f} s") from error
    if child.returncode == 0:
        return None
    if child.returncode == _DAMAGED and child.stdout:
        return child.stdout.strip()
    if child.returncode == _NEWER_FORMAT:
        raise FormatError(child.stderr.strip())
    if child.returncode < 0:
        return f"verifying it died of {signal.Signals(-child.returncode).name}"
    raise OSError(f"{root / folder} could not be verified: {child.stderr.strip()[-500:]}")


def damage_of(files: Files, folder: str = FOLDER) -> str | None:
    """What is wrong with a journal, None if nothing is. May kill the process: see above."""
    structure = damaged_structure_of(files, folder)
    if structure is not None:
        return structure
    try:
        log = LogReader.open_to_read(files, folder)
        try:
            for _ in log.read(log.first_sequence):
                pass
            log.load()
        finally:
            log.close()
    except (JournalDamagedError, lmdb.Error) as error:
        return str(error)
    return None


def damaged_structure_of(files: Files, folder: str = FOLDER) -> str | None:
    """What is wrong with LMDB's pages, told without LMDB: safe in any process."""
    status = files.status(f"{folder}/data.mdb")
    if status is None or not status.is_file:
        return "data.mdb is missing, or not a regular file"
    try:
        problems = cast(list[str], verify(str(files.root / folder)))
    except VerifyError as error:
        return str(error)
    return f"{problems[0]} ({len(problems)} problems)" if problems else None


def main(arguments: list[str]) -> int:
    """The child. 0, 1, 2 or 3, as the module says."""
    try:
        files = Files(Path(arguments[0]))
        reason = damage_of(files, *arguments[1:2])
    except FormatError as error:
        print(error, file=sys.stderr)
        return _NEWER_FORMAT
    except (OSError, IndexError) as error:
        print(error, file=sys.stderr)
        return _COULD_NOT_LOOK
    if reason is None:
        return 0
    print(reason)
    return _DAMAGED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
