"""The writer thread: it stages what waits, oldest first."""

import threading

from .boundary import Claim
from .core import Mode, MutableCore
from .ordering import stage_claim
from .outcomes import settle_claim


class MutableWriter:
    """A thread between the staging queue and the disk. It owns nothing but itself."""

    def __init__(self, core: MutableCore) -> None:
        self._core = core
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="walkback-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stage all that waits, and end the thread."""
        with self._core.lock:
            self._is_stopping = True
            self._core.lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        core = self._core
        try:
            while (claim := self._next()) is not None:
                stage_claim(core, claim)
        except Exception as error:  # noqa: BLE001 - a dead thread must not look like a slow one
            core.stop_writing(Mode.READING, f"the writer died: {error!r}")
            with core.lock:
                refusal = core.refusal_by_mode()
                assert refusal is not None
                while core.to_stage:
                    settle_claim(core, core.to_stage.popleft(), refusal)

    def _next(self) -> Claim | None:
        core = self._core
        with core.lock:
            while not core.to_stage and not self._is_stopping:
                core.lock.wait(timeout=1.0)
            if not core.to_stage:
                return None
            core.staging_now += 1
            return core.to_stage.popleft()
