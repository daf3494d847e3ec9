"""``walkback serve`` in a process of its own, in which any call of ours can be made to fail.

Started as a program it serves, and obeys whoever connects to the Unix socket that its first
argument names; ``MutableFaults`` is that client's side. A call is named by who calls whom, as it
was seen while requests were served, so what can fail is found by running and not listed by hand.
"""

# mlx-lm has no types of its own, and what is wrapped is anything.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Client as Connect
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from servers import Server, serving

PACKAGE = "walkback"
CONTROL = "control"
# What mlx-lm's seams and the pages call: the integration, and the store as it is seen from there.
FACADE = ("walkback.store.store", "walkback.store.damage", "walkback.store.operator")
# What a fault of ours does not pass: of these only the inside fails.
_QUIET = "walkback.integration.serving.quiet"
GUARDS = {
    f"{_QUIET}.quietly",
    f"{_QUIET}._guard",
    *(f"{_QUIET}.QuietRecording.{each}" for each in ("stop", "extend", "finish", "_try")),
}

ERRORS: Sequence[type[Exception]] = (RuntimeError, OSError, MemoryError)

Call = tuple[str, str]


class MutableFaults:
    """The calls of one server: what they are, and which of them fail. One client at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def watch(self) -> None:
        """Forget the calls that were seen."""
        self._ask("watch")

    def calls(self) -> list[Call]:
        """Who has called whom of ours since, in the order of the first time."""
        return self._ask("calls")

    def arm(self, call: Call, error: str) -> None:
        """Let the next such call raise."""
        self._ask("arm", call, error)

    def disarm(self) -> bool:
        """Let nothing fail any more; whether anything did."""
        return self._ask("disarm")

    def forget_memory(self) -> None:
        """Make all durable, and drop what the tier in RAM holds."""
        self._ask("forget_memory")

    def kept(self) -> dict[str, int]:
        """How much is still kept for requests, once nothing is on its way."""
        return self._ask("kept")

    def _ask(self, *words: Any) -> Any:
        self._connection.send(words)
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextlib.contextmanager
def serving_with_faults(
    model: Path, *options: str, directory: Path
) -> Generator[tuple[Server, MutableFaults]]:
    """A server and its faults; its log and its control stand in ``directory``."""
    address = str(directory / "control")
    program = (__file__, address)
    with (
        serving(model, *options, log_path=directory / "log", program=program) as server,
        Connect(address) as connection,
    ):
        yield server, MutableFaults(connection)


# In the server.


class _Faults:
    """Wraps every function of ours, and knows which calls were seen and which are to fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Call, None] = {}
        self._armed: dict[Call, str] = {}
        self._has_raised = False
        self.tiers: Any = None
        self.store: Any = None
        self.teller: Any = None

    def watch(self) -> None:
        with self._lock:
            self._seen.clear()

    def calls(self) -> list[Call]:
        with self._lock:
            return list(self._seen)

    def arm(self, call: Call, error: str) -> None:
        with self._lock:
            self._has_raised = False
            self._armed[call] = error

    def disarm(self) -> bool:
        # Of a request that was answered its line may still be written.
        self.store.flush()
        self.teller._lines.submit(int).result()
        with self._lock:
            self._armed.clear()
            return self._has_raised

    def forget_memory(self) -> None:
        self.store.flush()
        self.tiers.trim_to(n_sequences=0)

    def kept(self) -> dict[str, int]:
        gc.collect()
        self.store.flush()
        core = self.store._core
        with core.lock:
            overlay = core.overlay
            return {
                "held": sum(overlay.held.values()),
                "leased": sum(overlay.leased.values()),
                "in flight": len(overlay.in_flight),
                "reserved": overlay.reserved_bytes,
                "staging": core.staging_bytes,
                "to stage": len(core.to_stage),
                "to commit": len(core.to_commit) + len(core.awaiting_parent),
            }

    def meet(self, function: str, caller: FrameType | None) -> None:
        """Note a call, and fail if it is to."""
        if caller is None or function in GUARDS:
            return
        module = caller.f_globals.get("__name__", "")
        if module.partition(".")[0] != PACKAGE:
            # A seam, which mlx-lm calls, or the main program.
            return
        call = (f"{module}.{caller.f_code.co_qualname}", function)
        with self._lock:
            self._seen.setdefault(call)
            error = self._armed.pop(call, None)
            self._has_raised |= error is not None
        if error is not None:
            raise next(each for each in ERRORS if each.__name__ == error)("injected")

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def meeting(*arguments: Any, **options: Any) -> Any:
            self.meet(name, sys._getframe(1))
            return function(*arguments, **options)

        return meeting


def _wrap_everything(faults: _Faults) -> None:
    replaced: dict[Any, Any] = {}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType) and module.__name__ not in FACADE:
                replaced[value] = faults.wrapped(value, f"{module.__name__}.{name}")
            elif inspect.isclass(value):
                _wrap_class(faults, value)
    for module in [each for name, each in sys.modules.items() if name.startswith(PACKAGE)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in replaced:
                setattr(module, name, replaced[value])


def _modules() -> Iterator[ModuleType]:
    integration = importlib.import_module(f"{PACKAGE}.integration")
    for found in pkgutil.walk_packages(integration.__path__, f"{PACKAGE}.integration."):
        yield importlib.import_module(found.name)
    yield from map(importlib.import_module, FACADE)


def _wrap_class(faults: _Faults, owner: type) -> None:
    for name, value in list(vars(owner).items()):
        full = f"{owner.__module__}.{owner.__qualname__}.{name}"
        is_internal = name.startswith("_") and owner.__module__ in FACADE
        if (name.startswith("__") and name != "__init__") or is_internal:
            continue
        match value:
            case FunctionType() if value.__code__.co_filename != "<string>":
                setattr(owner, name, faults.wrapped(value, full))
            case property() if value.fget is not None:
                setattr(owner, name, property(faults.wrapped(value.fget, full)))
            case classmethod() | staticmethod():
                setattr(owner, name, type(value)(faults.wrapped(value.__func__, full)))
            case _:
                pass


def _obey(faults: _Faults, address: str) -> None:
    with Listener(address) as listener, listener.accept() as connection:
        while True:
            try:
                verb, *rest = connection.recv()
            except EOFError:
                return
            try:
                connection.send(getattr(faults, verb)(*rest))
            except Exception as error:  # noqa: BLE001 - the client raises it
                connection.send(error)


def _note_threads(path: Path) -> None:
    known = {"MainThread", CONTROL}
    left = [each.name for each in threading.enumerate() if each.name not in known]
    path.write_text(json.dumps(left))


def main() -> None:
    """Serve with the arguments from the second on, and write which threads were left."""
    from walkback.integration.serving import server, session, tiers

    address, *arguments = sys.argv[1:]
    faults = _Faults()
    _wrap_everything(faults)

    make = tiers.TieredPromptCache.__init__

    def noted(self: Any, shared: session.MutableSession, *arguments: Any) -> None:
        make(self, shared, *arguments)
        faults.tiers = self
        faults.store = None if shared.cache is None else shared.cache.store
        faults.teller = shared.teller

    setattr(tiers.TieredPromptCache, "__init__", noted)  # noqa: B010 - a method is not a variable
    gc.freeze()
    threading.Thread(target=_obey, args=(faults, address), name=CONTROL, daemon=True).start()
    server.serve(arguments)
    _note_threads(Path(address).with_name("threads"))
    # As ``walkback serve`` does: mlx aborts at exit if another thread has computed.
    os._exit(0)


if __name__ == "__main__":
    main()
