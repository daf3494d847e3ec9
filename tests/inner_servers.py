"""``walkback serve`` in this process, on threads of its own, so that a test can reach into it."""

# mlx-lm has no types of its own, and the seams are the server's own business.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import contextlib
import functools
import queue
import threading
from collections.abc import Generator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx_lm.server as upstream
import pytest
from servers import Client

from walkback.integration.cache import Cache
from walkback.integration.serving import server
from walkback.integration.serving.options import parse_options
from walkback.integration.serving.session import MutableSession

START_SECONDS_MAX = 60.0


class InnerServer(Client):
    """A server whose session, response generator and cache are at hand."""

    def __init__(self, port: int, session: MutableSession, response_generator: Any) -> None:
        super().__init__(port=port)
        self.session = session
        self.response_generator = response_generator

    @property
    def cache(self) -> Cache:
        assert self.session.cache is not None
        return self.session.cache

    def forget_memory(self) -> None:
        """Drop what the tier in RAM holds; what is asked for next is read from the disk."""
        self.cache.flush()
        self.response_generator.prompt_cache.trim_to(n_sequences=0)


@contextlib.contextmanager
def serving_here(model: Path, *arguments: str) -> Generator[InnerServer]:
    """A server in this process. Its cache is still open at the end of the context's body."""
    options, rest = parse_options([*arguments], {})
    session = MutableSession(server._opened(options), options)
    started: queue.Queue[tuple[ThreadingHTTPServer, Any]] = queue.Queue()
    with (
        contextlib.closing(session),
        pytest.MonkeyPatch.context() as patch,
        server._joined(session, ["--model", str(model), *rest]),
    ):
        patch.setattr(upstream, "_run_http_server", functools.partial(_serve, started))
        thread = threading.Thread(target=upstream.main)
        thread.start()
        httpd, response_generator = started.get(timeout=START_SECONDS_MAX)
        try:
            yield InnerServer(httpd.server_port, session, response_generator)
        finally:
            httpd.shutdown()
            thread.join()


def _serve(
    started: "queue.Queue[tuple[ThreadingHTTPServer, Any]]",
    host: str,
    port: int,
    response_generator: Any,
    **_: Any,
) -> None:
    def handler(*arguments: Any) -> Any:
        return upstream.APIHandler(response_generator, *arguments, system_fingerprint="test")

    with ThreadingHTTPServer((host, 0), handler) as httpd:
        started.put((httpd, response_generator))
        httpd.serve_forever(poll_interval=0.02)
    response_generator.stop_and_join()
