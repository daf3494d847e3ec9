"""The figures as programs see them: over HTTP, from a cache that is open and has done things."""

# mlx's stubs and mlx-lm's classes leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import http.client
import json
import logging
import re
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from cache_maker import HookedFiles, core_of, file_of, flip_byte
from mlx import nn
from mlx_lm.server import APIHandler
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from zoo import build, token_ids

from walkback.integration.binding import BoundModel
from walkback.integration.cache import Cache
from walkback.integration.serving.figures import MemoryTier, dict_of, figures_of
from walkback.integration.serving.metrics import CacheCollector, families, text_of
from walkback.integration.serving.pages import Pages
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.restore.plan import Grid
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

PROMPT = token_ids(100)
MEMORY = MemoryTier(sequences=3, used_bytes=5_000, limit_bytes=9_000, hits=7)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def cache(tmp_path: Path) -> Generator[Cache]:
    settings = StoreSettings(budget_bytes=256 * MIB, free_floor_bytes=0, staging_bytes=256 * MIB)
    store = MutableStore.open(tmp_path / "cache", settings, make_files=HookedFiles)
    with Cache(store, Grid(block_tokens=16, checkpoint_tokens=32), salt="") as cache:
        yield cache


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("lfm2")


@pytest.fixture
def lively(cache: Cache, model: nn.Module) -> Cache:
    """A cache that has stored, restored, missed twice, refused, and walked back from damage."""
    bound = cache.bind(model)
    generate(bound, PROMPT)
    cache.flush()
    generate(bound, PROMPT)
    generate(bound, token_ids(60, seed=2))
    found = bound.restore(PROMPT)
    found.recording.stop(7, found.cache)
    found.recording.finish()
    cache.flush()
    key = next(link.key for link in bound.chain(PROMPT) if link.end == 96)
    flip_byte(cache.store.files.root / file_of(cache.store, Kind.SIDECAR, key).path)
    generate(bound, PROMPT)
    cache.flush()
    return cache


def generate(bound: BoundModel, prompt: list[int]) -> None:
    list(bound.generate_step(prompt, max_tokens=1))


def samples_of(text: bytes) -> Samples:
    """Every sample of a text as its reader sees it; the same one twice is an error."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def labelled(samples: Samples, name: str) -> dict[str, float]:
    """The samples of one name by the value of their one label."""
    return {labels[0][1]: value for (each, labels), value in samples.items() if each == name}


# The text.


def test_what_prometheus_reads_is_what_the_statistics_say(lively: Cache) -> None:
    now = lively.statistics()

    samples = samples_of(text_of(figures_of(lively)))

    plain = {
        "walkback_restores_total": now.restores,
        "walkback_walkbacks_total": now.walkbacks,
        "walkback_sidecars_read_total": now.sidecars_read,
        "walkback_boundaries_stored_total": now.boundaries_stored,
        "walkback_payload_written_bytes_total": now.payload_bytes_written,
        "walkback_staging_bytes": now.staging_bytes,
        "walkback_staging_high_water_bytes": now.staging_bytes_high_water,
        "walkback_staging_limit_bytes": now.staging_limit_bytes,
        "walkback_backpressure_seconds_total": now.backpressure_seconds,
        "walkback_inline_writes_total": now.inline_writes,
        "walkback_stage_seconds_total": now.stage_seconds,
        "walkback_commit_seconds_count": now.commits,
        "walkback_commit_seconds_sum": now.commit_seconds,
        "walkback_budget_bytes": now.budget_bytes,
        "walkback_quarantines_total": now.events["Quarantined"],
        "walkback_evictions_total": 0,
        "walkback_losses_total": 0,
        "walkback_deletion_refusals_total": 0,
    }
    assert {name: samples[name, ()] for name in plain} == plain
    # What happened in this cache, so that two wrong zeros do not agree.
    assert (now.restores, now.walkbacks, now.events["Quarantined"]) == (3, 1, 1)
    assert min(now.commit_seconds, now.stage_seconds, now.payload_bytes_written) > 0
    assert now.staging_bytes_high_water > 0


def test_every_reason_has_a_sample_and_the_reasons_add_up(lively: Cache) -> None:
    now = lively.statistics()

    samples = samples_of(text_of(figures_of(lively)))

    misses = labelled(samples, "walkback_misses_total")
    assert misses.keys() == {str(reason) for reason in MissReason}
    assert {reason: count for reason, count in misses.items() if count} == now.misses
    refusals = labelled(samples, "walkback_refusals_total")
    assert refusals.keys() == {str(reason) for reason in NotStoredReason}
    assert {reason: count for reason, count in refusals.items() if count} == now.not_stored
    assert now.misses == {"empty": 1, "unseen": 1}
    assert now.not_stored == {"off_grid": 1}


def test_the_kinds_of_charged_bytes_add_up_to_what_is_charged(lively: Cache) -> None:
    now = lively.statistics()

    kinds = labelled(samples_of(text_of(figures_of(lively))), "walkback_charged_bytes")

    assert sum(kinds.values()) == now.charged_bytes
    assert kinds["block"] == now.holdings.block_bytes > 0
    assert kinds["quarantined"] == now.holdings.quarantined_bytes > 0


def test_entries_are_counted_by_kind(lively: Cache) -> None:
    held = lively.statistics().holdings

    kinds = labelled(samples_of(text_of(figures_of(lively))), "walkback_entries")

    assert kinds["block"] == held.block_count > 0
    assert kinds["sidecar"] == held.sidecar_count > 0
    assert (kinds["quarantined"], kinds["namespace"]) == (1, 1)


def test_the_depths_are_a_cumulative_histogram(lively: Cache) -> None:
    samples = samples_of(text_of(figures_of(lively)))

    buckets = labelled(samples, "walkback_endpoint_tokens_bucket")
    assert buckets["256"] == buckets["+Inf"] == 3
    assert samples["walkback_endpoint_tokens_count", ()] == samples["walkback_restores_total", ()]
    # Twice at 96, then 64, since the state at 96 was damaged.
    assert samples["walkback_endpoint_tokens_sum", ()] == 96 + 96 + 64
    assert samples["walkback_uncached_tokens_total", ()] == 4 + 4 + 36


def test_the_mode_is_the_one_that_is_1(cache: Cache) -> None:
    assert labelled(samples_of(text_of(figures_of(cache))), "walkback_mode") == {
        "writing": 1,
        "reading": 0,
        "offline": 0,
        "closed": 0,
    }

    cache.close()

    assert labelled(samples_of(text_of(figures_of(cache))), "walkback_mode")["closed"] == 1


def test_a_tier_in_memory_shows_if_there_is_one(cache: Cache) -> None:
    without = samples_of(text_of(figures_of(cache)))
    samples = samples_of(text_of(figures_of(cache, lambda: MEMORY)))

    assert not any(name.startswith("walkback_memory") for name, _ in without)
    assert {key: value for key, value in samples.items() if key not in without} == {
        ("walkback_memory_sequences", ()): 3,
        ("walkback_memory_used_bytes", ()): 5_000,
        ("walkback_memory_limit_bytes", ()): 9_000,
        ("walkback_memory_hits_total", ()): 7,
    }


def test_two_scrapes_of_a_cache_that_does_nothing_are_the_same(lively: Cache) -> None:
    assert text_of(figures_of(lively)) == text_of(figures_of(lively))


def test_a_registry_of_the_callers_own_collects_a_cache_each_time_anew(
    lively: Cache, model: nn.Module
) -> None:
    registry = CollectorRegistry()
    registry.register(CacheCollector(lively))

    before = registry.get_sample_value("walkback_restores_total")
    generate(lively.bind(model), PROMPT)
    after = registry.get_sample_value("walkback_restores_total")

    assert (before, after) == (3, 4)


def all_families(cache: Cache) -> list[Metric]:
    return list(families(figures_of(cache, lambda: MEMORY)))


def test_names_and_units_are_as_prometheus_has_them(cache: Cache) -> None:
    for family in all_families(cache):
        assert re.fullmatch(r"walkback(_[a-z]+)+", family.name)
        assert not family.name.endswith(("_count", "_sum", "_bucket", "_total", "_info"))
        for word in ("byte", "second", "token"):
            if word in family.name:
                assert family.name.endswith(f"_{word}s"), "the unit comes last"
    text = text_of(figures_of(cache)).decode()
    counters = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
    assert len(counters) > 10
    assert all(name.endswith("_total") for name in counters)


def test_every_help_text_is_a_sentence_and_no_two_are_the_same(cache: Cache) -> None:
    texts = [family.documentation for family in all_families(cache)]

    assert all(text.endswith(".") and "\n" not in text for text in texts)
    assert len(set(texts)) == len(texts)


def test_commits_are_a_cumulative_histogram_of_seconds(cache: Cache) -> None:
    before = labelled(samples_of(text_of(figures_of(cache))), "walkback_commit_seconds_bucket")
    for seconds in (0.0005, 0.03, 0.03, 60.0):
        core_of(cache.store).counts.commit_seconds.note(seconds)

    figures = figures_of(cache)
    buckets = labelled(samples_of(text_of(figures)), "walkback_commit_seconds_bucket")

    more = {bound: count - before[bound] for bound, count in buckets.items()}
    assert (more["0.001"], more["0.02"], more["0.05"], more["10.0"], more["+Inf"]) == (
        1,
        1,
        3,
        3,
        4,
    )
    assert dict_of(figures)["commit_seconds_p99"] == 10


# The dict.


def test_the_dict_has_every_figure_by_its_name_and_survives_json(lively: Cache) -> None:
    now = lively.statistics()

    found = json.loads(json.dumps(dict_of(figures_of(lively, lambda: MEMORY))))

    assert found["restores"] == now.restores
    assert found["misses"] == now.misses
    assert found["holdings"]["block_bytes"] == now.holdings.block_bytes
    assert sum(found["depths"]["counts"]) == 3
    assert found["memory"]["used_bytes"] == 5_000
    assert found.keys() > set(type(now).__dataclass_fields__)


# The pages.


class OwnHandler(BaseHTTPRequestHandler):
    """A server's own pages."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"own {self.path}".encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 its name upstream
        """Says nothing."""


class MuteAPIHandler(APIHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 its name upstream
        """Says nothing."""


@contextlib.contextmanager
def served(handler: Callable[..., Any]) -> Generator[Callable[..., tuple[int, str, bytes]]]:
    """A running server; yields what asks it for a page: status, content type, body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(path: str, method: str = "GET") -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.getheader("Content-Type", ""), reply.read()

    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_answers_both_pages_and_its_own(lively: Cache) -> None:
    OwnHandler.asked.clear()

    with Pages(lively, lambda: MEMORY).joined(OwnHandler), served(OwnHandler) as ask:
        text, stats, query = ask("/metrics"), ask("/walkback/stats"), ask("/metrics?x=1")
        own = [ask(path)[2] for path in ("/", "/metrics/", "/walkback", "/v1/models")]
        post = ask("/metrics", "POST")

    assert text[:2] == query[:2] == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert samples_of(text[2])["walkback_restores_total", ()] == 3
    assert stats[:2] == (200, "application/json")
    assert json.loads(stats[2]) == json.loads(
        json.dumps(dict_of(figures_of(lively, lambda: MEMORY)))
    )
    assert OwnHandler.asked == ["/", "/metrics/", "/walkback", "/v1/models"]
    assert own == [b"own /", b"own /metrics/", b"own /walkback", b"own /v1/models"]
    assert post[0] == 501


def test_the_handler_of_mlx_lm_answers_both_pages_and_its_own(lively: Cache) -> None:
    generator: Any = SimpleNamespace(
        is_healthy=True, cli_args=SimpleNamespace(allowed_origins=["*"])
    )

    def handler(*args: Any) -> APIHandler:
        return MuteAPIHandler(generator, *args, system_fingerprint="none")

    with Pages(lively).joined(APIHandler), served(handler) as ask:
        assert samples_of(ask("/metrics")[2])["walkback_restores_total", ()] == 3
        assert json.loads(ask("/walkback/stats")[2])["memory"] is None
        assert ask("/health")[2] == b'{"status": "ok"}'
        assert ask("/nowhere")[0] == 404
        generator.is_healthy = False
        assert ask("/metrics")[0] == 200


def test_a_class_is_as_it_was_when_the_pages_leave(cache: Cache) -> None:
    class Inheriting(OwnHandler):
        pass

    class Mute(BaseHTTPRequestHandler):
        pass

    before = OwnHandler.do_GET
    for handler in (OwnHandler, Inheriting, Mute):
        with Pages(cache).joined(handler):
            assert "do_GET" in vars(handler)

    assert OwnHandler.do_GET is before
    assert "do_GET" not in vars(Inheriting)
    assert not hasattr(Mute, "do_GET")


def test_a_closed_cache_still_answers(lively: Cache) -> None:
    with Pages(lively).joined(OwnHandler), served(OwnHandler) as ask:
        lively.close()

        status, _, body = ask("/walkback/stats")

    assert (status, json.loads(body)["mode"]) == (200, "closed")


def test_a_page_that_fails_is_a_500_and_the_server_goes_on(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> MemoryTier:
        raise RuntimeError("dictionary changed size during iteration")

    with (
        caplog.at_level(logging.ERROR, "walkback"),
        Pages(cache, broken).joined(OwnHandler),
        served(OwnHandler) as ask,
    ):
        failed, own = ask("/metrics"), ask("/")

    assert (failed[0], failed[2]) == (500, b"see the log\n")
    assert own[2] == b"own /"
    assert "dictionary changed size" in caplog.text


def test_a_client_that_has_gone_does_not_raise(cache: Cache) -> None:
    class Gone:
        path = "/metrics"

        def __getattr__(self, name: str) -> Any:
            raise BrokenPipeError

    gone: Any = Gone()
    assert Pages(cache).answer(gone)


def test_scrapes_while_prompts_are_served_disturb_neither(cache: Cache, model: nn.Module) -> None:
    bound = cache.bind(model)
    seen: list[float] = []
    is_over = threading.Event()

    def scrape(ask: Callable[..., tuple[int, str, bytes]]) -> None:
        while not is_over.is_set():
            samples = samples_of(ask("/metrics")[2])
            seen.append(samples["walkback_boundaries_stored_total", ()])

    with Pages(cache).joined(OwnHandler), served(OwnHandler) as ask:
        scraper = threading.Thread(target=scrape, args=(ask,))
        scraper.start()
        for seed in range(6):
            generate(bound, token_ids(70, seed=seed))
        cache.flush()
        is_over.set()
        scraper.join()

    assert seen == sorted(seen)
    assert cache.statistics().boundaries_stored == 12
    assert cache.violations() == []
