"""Two pages in a server that is there anyway: /metrics for Prometheus, /walkback/stats as JSON.

They only look. Whatever goes wrong in them is an answer of 500 and a line in the log.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler
from typing import Any

from ..cache import Cache
from .figures import Figures, MemoryFigures, UnstoredPrompts, dict_of, figures_of
from .metrics import text_of
from .quiet import quietly

log = logging.getLogger("walkback")

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """The pages of one cache. Any thread may call it: servers answer each request on its own."""

    def __init__(
        self,
        cache: Cache,
        memory: MemoryFigures | None = None,
        unstored: UnstoredPrompts | None = None,
    ) -> None:
        """``memory`` and ``unstored`` are asked at each request, on the request's thread."""
        self._figures = functools.partial(figures_of, cache, memory, unstored)
        self._pages: dict[str, tuple[str, Callable[[Figures], bytes]]] = {
            "/metrics": (PROMETHEUS_TEXT, text_of),
            "/walkback/stats": ("application/json", _json_of),
        }

    def answer(self, handler: BaseHTTPRequestHandler) -> bool:
        """Answer a GET if it is for one of the pages; whether it was. Never raises.

        Without the headers that would let other sites' scripts read it.
        """
        page = self._pages.get(handler.path.partition("?")[0])
        if page is None:
            return False
        content_type, render = page
        status = 200
        try:
            body = render(self._figures())
        except Exception:
            log.exception("%s was not answered", handler.path)
            status, content_type, body = 500, "text/plain", b"see the log\n"
        # A client that has gone needs no answer.
        with contextlib.suppress(OSError):
            handler.send_response(status)
            handler.send_header("Content-Type", content_type)
            handler.send_header("Content-Length", str(len(body)))
            handler.send_header("Cache-Control", "no-store")
            handler.end_headers()
            handler.wfile.write(body)
        return True

    @contextlib.contextmanager
    def joined(self, handler_class: type[BaseHTTPRequestHandler]) -> Generator[None]:
        """Every GET that the class handles comes here first, while the context lasts.

        The class itself is changed: mlx-lm's server names its handler where no other can be put in.
        """
        served_before: Any = vars(handler_class).get("do_GET")
        do_get: Callable[[Any], None] = getattr(handler_class, "do_GET", _not_found)

        @functools.wraps(do_get)
        def answer_first(handler: Any) -> None:
            is_answered = False
            with quietly("a page was left to the server"):
                is_answered = self.answer(handler)
            if not is_answered:
                do_get(handler)

        setattr(handler_class, "do_GET", answer_first)  # noqa: B010 the class has no such type
        try:
            yield
        finally:
            if served_before is None:
                delattr(handler_class, "do_GET")
            else:
                setattr(handler_class, "do_GET", served_before)  # noqa: B010


def _json_of(figures: Figures) -> bytes:
    return json.dumps(dict_of(figures)).encode() + b"\n"


def _not_found(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(404)
