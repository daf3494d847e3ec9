"""mlx-lm's server in this process, its seams joined to a cache.

The seams are module globals of ``mlx_lm.server``, resolved when they are called: nothing of it is
copied or changed on disk. Which of them there are is looked at first.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import contextlib
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx_lm.server as upstream

from ...journal.errors import CacheLockedError, SettingsError
from ..cache import Cache, open_cache
from .options import ServeOptions, address_of, make_parser, parse_options
from .pages import Pages
from .seams import ONE_AT_A_TIME, Seams, Way, find_seams

if TYPE_CHECKING:
    from .session import MutableSession

log = logging.getLogger("walkback")

# Clients that may wait to be accepted, while those before are tokenised; http.server has 5, and all
# others are reset.
BACKLOG = 128


def serve(arguments: Sequence[str]) -> None:
    """Run the server until it is told to stop; the cache is then closed in order.

    SettingsError for our flags; SystemExit for mlx-lm's.
    """
    seams = find_seams()
    is_help = "--help" in arguments or "-h" in arguments
    options, rest = ServeOptions(cache_dir=Path(), off=True), ["--help"]
    if is_help:
        print(make_parser({}).format_help())
    else:
        options, rest = parse_options(arguments)
        _require_address(*address_of(rest))
        for each in () if options.off else seams.lacks:
            print(f"walkback: WARNING: {each}", file=sys.stderr)
    if seams.way is Way.NOTHING:
        with _arguments(rest):
            upstream.main()
        return
    from .session import MutableSession

    session = MutableSession(_opened(options), options, seams.way)
    with _stopped_by_a_signal(session), _joined(session, rest, seams):
        upstream.main()


def _require_address(host: str, port: str) -> None:
    """SettingsError unless mlx-lm can listen there: it would find out with its threads running."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {host}, port {port}: {error}") from None


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
def _joined(
    session: "MutableSession", arguments: Sequence[str], seams: Seams | None = None
) -> Generator[None]:
    """mlx-lm's server sees our classes and its own arguments while the context lasts."""
    seams = find_seams() if seams is None else seams
    ours = _ours(session, seams)
    before = {name: getattr(upstream, name) for name in ours}
    backlog = ThreadingHTTPServer.request_queue_size
    ThreadingHTTPServer.request_queue_size = BACKLOG
    pages = _pages_of(session) if seams.joins_pages else contextlib.nullcontext()
    if seams.way is Way.WHOLE_PROMPTS and not session.options.unsafe_batching:
        # Its batches cannot be asked whether their padding reaches a model's state.
        arguments = [*arguments, ONE_AT_A_TIME, "1"]
    for name, seam in ours.items():
        setattr(upstream, name, seam)
    try:
        with _arguments(arguments), pages:
            yield
    finally:
        for name, seam in before.items():
            setattr(upstream, name, seam)
        ThreadingHTTPServer.request_queue_size = backlog


def _ours(session: "MutableSession", seams: Seams) -> dict[str, Callable[..., Any]]:
    """What stands for which name of mlx-lm's server. Imported here: each needs its seams."""
    from .provider import BindingModelProvider

    if seams.way is Way.WHOLE_PROMPTS:
        from .whole import WholePromptCache

        return {
            "LRUPromptCache": functools.partial(WholePromptCache, session),
            "ModelProvider": functools.partial(BindingModelProvider, session),
        }
    from .batching import RecordingBatchGenerator
    from .requests import PreparingResponseGenerator
    from .tiers import TieredPromptCache

    ours: dict[str, Callable[..., Any]] = {
        "LRUPromptCache": functools.partial(TieredPromptCache, session),
        "BatchGenerator": functools.partial(RecordingBatchGenerator, session),
        "ModelProvider": functools.partial(BindingModelProvider, session),
        "ResponseGenerator": functools.partial(PreparingResponseGenerator, session),
    }
    if seams.joins_sequential:
        from .sequential import stream_generate

        ours["stream_generate"] = functools.partial(stream_generate, session)
    return ours


@contextlib.contextmanager
def _arguments(arguments: Sequence[str]) -> Generator[None]:
    """mlx-lm parses these while the context lasts."""
    before = sys.argv
    sys.argv = ["walkback serve", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _pages_of(session: "MutableSession") -> contextlib.AbstractContextManager[None]:
    if session.cache is None:
        return contextlib.nullcontext()
    return Pages(
        session.cache, session.memory_figures, lambda: session.teller.watch.unstored
    ).joined(upstream.APIHandler)


@contextlib.contextmanager
def _stopped_by_a_signal(session: "MutableSession") -> Generator[None]:
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
