"""What an operator does to a cache, each durable on return."""

import contextlib

from ..journal.errors import SettingsError, WalkbackError
from ..journal.events import (
    Event,
    NamespaceSeen,
    Pinned,
    Purged,
    Reinstated,
    ReportedBad,
    SettingSet,
    Unpinned,
)
from ..journal.words import FileName, Kind
from .committer import MutableCommitter
from .core import Mode, MutableCore
from .recovery import BUDGET
from .room import evict_ahead
from .settings import MIB, require_bytes
from .verify import verify_payload


class Operator:
    """Pins, purges, reports and settings. Any thread may call it; each call waits for its commit.

    Raises CacheClosedError if the cache takes no changes, NotRecordedError if the journal failed.
    """

    def __init__(self, core: MutableCore, committer: MutableCommitter) -> None:
        self._core = core
        self._committer = committer

    def see_namespace(self, namespace: bytes, fields: tuple[tuple[str, str], ...]) -> None:
        """Record what a namespace is made of, once."""
        with self._core.lock:
            if namespace in self._core.state.namespaces or self._core.mode is not Mode.WRITING:
                return
        self._committer.change(
            lambda: (
                []
                if namespace in self._core.state.namespaces
                else [NamespaceSeen(namespace=namespace, fields=fields)]
            )
        )

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget durably; the cache converges to it in the background."""
        require_bytes("budget_bytes", budget_bytes)
        if budget_bytes < MIB:
            raise SettingsError(f"a budget of {budget_bytes} bytes is less than {MIB}")
        self._committer.change(lambda: [SettingSet(name=BUDGET, value=budget_bytes)])
        with self._core.lock:
            self._core.budget_bytes = budget_bytes
            evict_ahead(self._core)

    def raise_staging_limit(self, limit_bytes: int) -> None:
        """Let at least this much memory wait for the disk, unless the bound was set for good."""
        with self._core.lock:
            if self._core.settings.is_staging_fixed:
                return
            self._core.staging_limit_bytes = max(self._core.staging_limit_bytes, limit_bytes)
            self._core.lock.notify_all()

    def pin(self, key: bytes) -> bool:
        """Keep a live block and its sidecar, and so all that leads there, until ``unpin``.

        False if there is no such block, or if it is on its way out.
        """
        core = self._core

        def build() -> list[Event]:
            is_there = key in core.state.blocks and (Kind.BLOCK, key) not in core.overlay.victims
            return [Pinned(key=key)] if is_there and key not in core.state.pins else []

        self._committer.change(build)
        with core.lock:
            return key in core.state.pins

    def unpin(self, key: bytes) -> None:
        self._committer.change(lambda: [Unpinned(key=key)] if key in self._core.state.pins else [])

    def purge(self, namespace: bytes) -> None:
        """Drop all entries of a namespace, pinned ones too. Their files go as leases end."""
        self._committer.change(lambda: [Purged(namespace=namespace)])

    def report_bad(self, kind: Kind, key: bytes, detail: str) -> None:
        """Drop an entry that gave wrong results, and all that was computed from it.

        What of that is still being stored is refused.
        """

        def build() -> list[Event]:
            self._taint_below(key)
            state = self._core.state
            bad = [state.entry(kind, key)]
            for below in state.descendants(key):
                bad += [state.blocks.get(below), state.sidecars.get(below)]
            self._core.overlay.bad_sequences |= {each.sequence for each in bad if each}
            return [ReportedBad(kind=kind, key=key, detail=detail[:200])]

        self._committer.change(build)

    def _taint_below(self, key: bytes) -> None:
        """Mark every claim under way that descends from a block. Needs the lock."""
        bad = {key, *self._core.state.descendants(key)}
        claims = [each.claim for each in self._core.overlay.in_flight.values()]
        is_growing = True
        while is_growing:
            is_growing = False
            for claim in claims:
                parts = claim.boundary.parts
                if not claim.is_tainted and any(part.parent in bad for part in parts):
                    claim.is_tainted = is_growing = True
                    bad.update(part.key for part in parts)

    def reinstate(self, file: FileName) -> None:
        """Verify a quarantined payload again, and if it is good make it an entry again.

        Raises PayloadDamagedError if it is not, and WalkbackError if its place is taken or gone.
        """
        core = self._core
        with core.lock:
            kept = core.state.quarantined.get(file)
            if kept is None or core.overlay.is_condemned(file):
                raise WalkbackError(f"{file.path} is not in quarantine")
            while file in core.overlay.to_move and core.mode is Mode.WRITING:
                core.lock.wait(timeout=1.0)
            # Until this is over the file is neither deleted nor condemned.
            core.overlay.leased[file] += 1
        try:
            self._verify_in_place(file, kept.entry.header_digest)
            self._committer.change(lambda: self._reinstated(file))
        finally:
            with core.lock:
                core.overlay.leased[file] -= 1
                if not core.overlay.leased[file]:
                    del core.overlay.leased[file]
                is_quarantined = file in core.state.quarantined
                if is_quarantined:
                    core.overlay.to_move.add(file)
                core.lock.notify_all()
        if is_quarantined:
            raise WalkbackError(f"{file.path} verifies, but its place in the index is taken")

    def _verify_in_place(self, file: FileName, header_digest: bytes) -> None:
        """Verify a quarantined payload and give it its first name back."""
        files = self._core.files
        if files.status(file.quarantine_path) is None:
            verify_payload(files, file.path, header_digest)
            return
        verify_payload(files, file.quarantine_path, header_digest)
        folder = file.path.rpartition("/")[0]
        # A sweep removes the folder of an old epoch when nothing is left in it.
        with contextlib.suppress(FileExistsError):
            files.make_directory(folder)
            files.sync_directory(file.kind.folder)
        files.rename(file.quarantine_path, file.path)
        for each in ("quarantine", folder):
            files.sync_directory(each)

    def _reinstated(self, file: FileName) -> list[Event]:
        """Nothing, if its place is taken, or if what it hangs on is gone or about to go."""
        overlay, state = self._core.overlay, self._core.state
        kept = state.quarantined.get(file)
        if kept is None or overlay.is_condemned(file):
            return []
        entry = kept.entry
        above = entry.key if entry.kind is Kind.SIDECAR else entry.parent
        is_live = above in state.blocks and (Kind.BLOCK, above) not in overlay.victims
        is_first = entry.kind is Kind.BLOCK and entry.parent == entry.namespace
        if not (is_live or is_first) or state.entry(entry.kind, entry.key) is not None:
            return []
        return [Reinstated(file=file)]
