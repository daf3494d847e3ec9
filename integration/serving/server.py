"""mlx-lm's server in this process, its seams joined to a cache.

The seams are module globals of ``mlx_lm.server``, resolved when they are called: nothing of it is
copied or changed on disk.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import contextlib
import functools
import logging
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx_lm.server as upstream

from ...journal.errors import CacheLockedError
from ..cache import Cache, open_cache
from .batching import RecordingBatchGenerator
from .options import ServeOptions, make_parser, parse_options
from .pages import Pages
from .requests import PreparingResponseGenerator
from .sequential import stream_generate
from .session import MutableSession
from .tiers import TieredPromptCache

log = logging.getLogger("walkback")


class BindingModelProvider(upstream.ModelProvider):
    """Binds each model that it loads, on the generation thread."""

    def __init__(self, session: MutableSession, cli_args: Any) -> None:
        self._session = session
        session.tell_of_settings()
        super().__init__(cli_args)

    def reset(self) -> None:
        self._session.unbind()
        super().reset()

    def _load(self, *key: Any, **options: Any) -> None:
        super()._load(*key, **options)
        self._session.bind(self)


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is told to stop; the cache is then closed in order.

    SettingsError for our flags; SystemExit for mlx-lm's.
    """
    if "--help" in arguments or "-h" in arguments:
        print(make_parser({}).format_help())
        options, rest = ServeOptions(cache_dir=Path()), ["--help"]
        session = MutableSession(None, options)
    else:
        options, rest = parse_options(arguments)
        session = MutableSession(_opened(options), options)
    with _stopped_by_a_signal(session), _joined(session, rest):
        upstream.main()


def _opened(options: ServeOptions) -> Cache | None:
    """The cache, or None if this server is to do without."""
    if options.off:
        return None
    try:
        return open_cache(
            options.cache_dir,
            budget_bytes=options.ssd_max,
            free_floor_bytes=options.disk_floor,
            staging_bytes=options.pending_max,
            block_tokens=options.block_tokens,
            checkpoint_tokens=options.checkpoint_tokens,
            salt=options.salt,
            junctions=True,
        )
    except CacheLockedError as error:
        print(f"walkback: serving uncached: {error}", file=sys.stderr)
        return None


@contextlib.contextmanager
def _joined(session: MutableSession, arguments: Sequence[str]) -> Generator[None]:
    """mlx-lm's server sees our classes and its own arguments while the context lasts."""
    seams = {
        "LRUPromptCache": functools.partial(TieredPromptCache, session),
        "BatchGenerator": functools.partial(RecordingBatchGenerator, session),
        "ModelProvider": functools.partial(BindingModelProvider, session),
        "stream_generate": functools.partial(stream_generate, session),
        "ResponseGenerator": functools.partial(PreparingResponseGenerator, session),
    }
    before = {name: getattr(upstream, name) for name in seams}
    argv = sys.argv
    sys.argv = ["walkback serve", *arguments]
    for name, seam in seams.items():
        setattr(upstream, name, seam)
    try:
        with _pages_of(session):
            yield
    finally:
        sys.argv = argv
        for name, seam in before.items():
            setattr(upstream, name, seam)


def _pages_of(session: MutableSession) -> contextlib.AbstractContextManager[None]:
    if session.cache is None:
        return contextlib.nullcontext()
    return Pages(
        session.cache, session.memory_figures, lambda: session.teller.watch.unstored
    ).joined(upstream.APIHandler)


@contextlib.contextmanager
def _stopped_by_a_signal(session: MutableSession) -> Generator[None]:
    """SIGTERM stops as Ctrl-C does, and no signal interrupts the close."""
    # A shell that starts a job in the background has it ignore SIGINT, and Python keeps that.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        log.info("stopped before it served")
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        session.close()
