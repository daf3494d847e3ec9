"""The invariant checker: what the state says, held against the state itself and against the disk.

The command line, the teardown of the tests and every crash test call it. It reads names and sizes,
no payload; ``damaged_payloads`` reads every byte.
"""

from collections.abc import Iterator, Set

from ..journal import invariants
from ..journal.errors import PayloadDamagedError
from ..journal.files import Files
from ..journal.state import State
from ..journal.words import FileName
from .reconcile import NUMBER, names_in, payloads_on_disk
from .verify import verify_payload


def violations(
    state: State, files: Files, *, in_flight: Set[FileName] | None = None
) -> Iterator[str]:
    """Every broken invariant, as a sentence. Files of epochs that are not closed may be leftovers.

    ``in_flight`` are the files of stores under way; of an epoch that is open or was not swept, more
    files may be on their way to being swept, and are passed over unless ``in_flight`` is given.
    """
    yield from invariants.violations(state)
    yield from violations_on_disk(state, files, in_flight=in_flight)


def violations_on_disk(
    state: State,
    files: Files,
    *,
    in_flight: Set[FileName] | None = None,
    leftovers: Set[str] = frozenset(),
) -> Iterator[str]:
    """As ``violations``, of the files alone. ``leftovers`` are paths that the close will remove."""
    expected = {
        entry.file: entry
        for table in (state.blocks, state.sidecars)
        for entry in table.values()
        if entry.file is not None
    }
    on_disk = set(payloads_on_disk(files))
    for file, entry in expected.items():
        status = files.status(file.path)
        if status is None:
            yield f"{file.path} is missing: a restore of position {entry.end} will miss it"
        elif status.nbytes != entry.nbytes:
            yield (
                f"{file.path} has {status.nbytes} bytes, the journal says {entry.nbytes}: "
                "the next restore that needs it quarantines it"
            )
    unswept = state.unswept if in_flight is None else set[int]()
    in_flight = in_flight or frozenset()
    for file in sorted(on_disk - expected.keys() - state.doomed.keys() - in_flight):
        if file not in state.quarantined and file.epoch not in unswept:
            yield f"{file.path} is named by no event: nothing uses it, delete it"
    yield from _misplaced(state, files, unswept, in_flight, leftovers)


def _misplaced(
    state: State,
    files: Files,
    unswept: Set[int],
    in_flight: Set[FileName],
    leftovers: Set[str],
) -> Iterator[str]:
    staged = {file.staging_path for file in in_flight} | leftovers
    for name in names_in(files, "staging"):
        path = f"staging/{name}"
        is_ours = NUMBER.fullmatch(name[:8]) is not None
        if path not in staged and not (is_ours and int(name[:8], 16) in unswept):
            yield f"{path} belongs to no store under way: delete it"
    quarantined = {file.quarantine_path for file in state.quarantined}
    doomed = {file.quarantine_path for file in state.doomed}
    for name in names_in(files, "quarantine"):
        if f"quarantine/{name}" not in quarantined | doomed:
            yield f"quarantine/{name} is named by no event: delete it, or keep it elsewhere"
    segments = {segment.path for segment in state.segments.values()} | leftovers
    for name in names_in(files, "archive"):
        if f"archive/{name}" not in segments and not unswept:
            yield f"archive/{name} is named by no event: delete it, or keep it elsewhere"


def damaged_payloads(state: State, files: Files) -> Iterator[str]:
    """Every live payload whose bytes do not verify, as a sentence. Reads all of them."""
    for table in (state.blocks, state.sidecars):
        for entry in table.values():
            if entry.file is None:
                continue
            try:
                verify_payload(files, entry.file.path, entry.header_digest)
            except PayloadDamagedError as error:
                yield f"{error}: the next restore that needs it quarantines it"
            except FileNotFoundError:
                continue  # ``violations`` says so already
            except OSError as error:
                yield f"{entry.file.path} cannot be read ({error.strerror}): look at the disk"
