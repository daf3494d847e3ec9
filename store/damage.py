"""What a restore does about an entry that it could not use."""

from ..journal.errors import WalkbackError
from ..journal.events import Event, Evicted, Lost, Quarantined
from ..journal.words import EvictReason, Kind
from .committer import MutableCommitter
from .core import MutableCore
from .eviction import POLICY
from .lookup import Located


class Damage:
    """Takes bad entries out of the index. Any thread may call it; each call waits for its commit.

    If the journal does not take the event the restore goes on all the same: the entry is found bad
    again next time.
    """

    def __init__(self, core: MutableCore, committer: MutableCommitter) -> None:
        self._core = core
        self._committer = committer

    def quarantine(self, located: Located, reason: str) -> None:
        """Take an entry that did not verify out of the index; its file is put aside."""
        self._take_out(Quarantined, located, reason)
        with self._core.lock:
            if located.file is not None and located.file in self._core.state.quarantined:
                self._core.overlay.to_move.add(located.file)
            self._core.lock.notify_all()

    def lose(self, located: Located, reason: str) -> None:
        """Take an entry whose file is not there out of the index."""
        self._take_out(Lost, located, reason)

    def suspect(self, located: Located) -> None:
        """Have an entry that could not be read stored again when its boundary comes by."""
        with self._core.lock:
            if self._is_still(located):
                self._core.overlay.suspects.add((located.kind, located.key))

    def _is_still(self, located: Located) -> bool:
        entry = self._core.state.entry(located.kind, located.key)
        return (
            entry is not None
            and entry.sequence == located.sequence
            and (located.kind, located.key) not in self._core.overlay.victims
        )

    def _pair_of(self, located: Located) -> list[Event]:
        """The tombstone of the sidecar that goes with a block."""
        sidecar = self._core.state.sidecars.get(located.key)
        is_victim = (Kind.SIDECAR, located.key) in self._core.overlay.victims
        if located.kind is Kind.SIDECAR or sidecar is None or is_victim:
            return []
        return [
            Evicted(
                kind=Kind.SIDECAR,
                key=sidecar.key,
                generation=sidecar.generation,
                reason=EvictReason.PAIR,
                policy=POLICY,
                budget_bytes=self._core.budget_bytes,
                need_bytes=0,
            )
        ]

    def _take_out(
        self, event: type[Quarantined] | type[Lost], located: Located, reason: str
    ) -> None:
        def build() -> list[Event]:
            if not self._is_still(located):
                return []
            return [
                *self._pair_of(located),
                event(
                    kind=located.kind,
                    key=located.key,
                    generation=located.generation,
                    reason=reason[:200],
                ),
            ]

        try:
            self._committer.change(build)
        except WalkbackError as error:
            # The restore that asks for it goes on.
            self._core.counts.events[f"unrecorded: {type(error).__name__}"] += 1
