"""What a running server tells of its cache: JSON for people, and Prometheus' text for machines."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from mlx_lm.server import APIHandler

from .session import MutableSession

STATS_PATH = "/walkback/stats"
METRICS_PATH = "/metrics"


def figures(session: MutableSession) -> dict[str, Any]:
    """Every figure of the cache and of this server, nested by what it is about."""
    found: dict[str, Any] = {
        "mode": "uncached",
        "bound": session.bound_to is not None,
        "stores": session.cache is not None and session.stores,
        "prompt_tokens": dict(session.prompt_tokens),
    }
    if session.cache is not None:
        found |= dataclasses.asdict(session.cache.statistics())
    return found


def exposition(found: Mapping[str, Any], prefix: str = "walkback") -> Iterator[str]:
    """The lines of Prometheus' text format: numbers only; a dictionary by reason becomes labels."""
    for name, value in found.items():
        match value:
            case dict() if name in _LABELS:
                yield f"# TYPE {prefix}_{name} gauge"
                for label, each in cast(dict[str, float], value).items():
                    yield f'{prefix}_{name}{{{_LABELS[name]}="{label}"}} {each}'
            case dict():
                yield from exposition(cast(dict[str, Any], value), f"{prefix}_{name}")
            case int() | float():
                yield f"# TYPE {prefix}_{name} gauge"
                yield f"{prefix}_{name} {float(value):g}"
            case _:
                pass


_LABELS = {"misses": "reason", "not_stored": "reason", "events": "event", "prompt_tokens": "from"}


class FiguresHandler(APIHandler):
    """mlx-lm's handler, with two more places to look at."""

    def __init__(
        self, response_generator: Any, *arguments: Any, session: MutableSession, **options: Any
    ) -> None:
        self._session = session
        super().__init__(response_generator, *arguments, **options)

    def do_GET(self) -> None:
        if self.path == STATS_PATH:
            text = json.dumps(figures(self._session), indent=1, default=str)
            self._reply("application/json", text)
        elif self.path == METRICS_PATH:
            text = "\n".join(exposition(figures(self._session)))
            self._reply("text/plain; version=0.0.4", text)
        else:
            super().do_GET()

    def _reply(self, content_type: str, text: str) -> None:
        content = f"{text}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
