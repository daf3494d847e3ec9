"""What the facade has for schedulers: a look without a read, a report, how deep restores reach."""

# mlx's stubs and mlx-lm's caches leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false

import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_maker import HookedFiles, core_of, file_of, files_of, flip_byte
from mlx import nn
from zoo import build, token_ids

from walkback.integration.binding import BoundModel
from walkback.integration.cache import Cache
from walkback.integration.depths import DEPTH_BOUNDS, MutableDepths
from walkback.journal.errors import CacheClosedError
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.restore.plan import Grid
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

README = Path(__file__).parent.parent / "README.md"
PROMPT = token_ids(100)
TURN_ENDS = (21, 90)


@pytest.fixture
def cache(tmp_path: Path) -> Generator[Cache]:
    settings = StoreSettings(budget_bytes=256 * MIB, free_floor_bytes=0, staging_bytes=256 * MIB)
    store = MutableStore.open(tmp_path / "cache", settings, make_files=HookedFiles)
    grid = Grid(block_tokens=16, checkpoint_tokens=32, merge_tokens=4)
    with Cache(store, grid, salt="") as cache:
        yield cache


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("lfm2")


@pytest.fixture
def bound(cache: Cache, model: nn.Module) -> BoundModel:
    """A model whose prompt is stored, with checkpoints at 21, 32, 64, 90 and 96."""
    bound = cache.bind(model)
    generate(bound, PROMPT)
    cache.flush()
    return bound


def generate(bound: BoundModel, prompt: list[int]) -> None:
    list(bound.generate_step(prompt, max_tokens=1, turn_ends=TURN_ENDS))


def endpoint_of(bound: BoundModel, prompt: list[int]) -> int:
    found = bound.restore(prompt, turn_ends=TURN_ENDS)
    found.recording.finish()
    return found.endpoint


# Looking.


@pytest.mark.parametrize("length", [1, 16, 22, 33, 64, 90, 91, 96, 97, 100])
def test_a_lookup_tells_where_a_restore_resumes(length: int, bound: BoundModel) -> None:
    assert bound.lookup(PROMPT[:length]) == endpoint_of(bound, PROMPT[:length])


def test_a_lookup_opens_no_file_counts_nothing_and_keeps_nothing(
    cache: Cache, bound: BoundModel
) -> None:
    before = cache.statistics()
    files_of(cache.store).log.clear()

    assert bound.lookup(PROMPT) == 96

    assert files_of(cache.store).log == []
    assert cache.statistics() == before
    core = core_of(cache.store)
    assert not core.overlay.leased
    assert not core.overlay.held


def test_a_lookup_after_the_close_finds_nothing(cache: Cache, bound: BoundModel) -> None:
    cache.close()

    assert bound.lookup(PROMPT) == 0


# Reporting.


def test_what_was_reported_bad_is_not_restored_again_and_what_leads_there_is(
    cache: Cache, bound: BoundModel
) -> None:
    bound.report_bad(PROMPT, 64, detail="its answer was gibberish")

    assert bound.lookup(PROMPT) == 32
    assert endpoint_of(bound, PROMPT) == 32
    assert cache.statistics().events["ReportedBad"] == 1


@pytest.mark.parametrize(("endpoint", "left"), [(90, 64), (21, 0)])
def test_a_bad_tail_takes_with_it_what_was_computed_behind_it(
    endpoint: int, left: int, bound: BoundModel
) -> None:
    bound.report_bad(PROMPT, endpoint)

    assert bound.lookup(PROMPT) == left


def test_a_bad_tail_in_the_first_block_takes_that_block_with_it(
    cache: Cache, bound: BoundModel
) -> None:
    prompt = token_ids(40, seed=4)
    list(bound.generate_step(prompt, max_tokens=1, turn_ends=[9]))
    cache.flush()

    bound.report_bad(prompt, 9)

    assert bound.lookup(prompt) == 0
    assert bound.lookup(PROMPT) == 96


def test_what_is_stored_again_after_a_report_serves(cache: Cache, bound: BoundModel) -> None:
    bound.report_bad(PROMPT, 64)

    generate(bound, PROMPT)
    cache.flush()

    assert bound.lookup(PROMPT) == 96


def test_nothing_can_be_reported_where_a_prompt_has_no_boundary(bound: BoundModel) -> None:
    with pytest.raises(ValueError, match="ends at 0"):
        bound.report_bad(PROMPT, 0)
    with pytest.raises(ValueError, match="ends at 101"):
        bound.report_bad(PROMPT, 101)


def test_a_report_after_the_close_says_that_it_was_not_recorded(
    cache: Cache, bound: BoundModel
) -> None:
    cache.close()

    with pytest.raises(CacheClosedError):
        bound.report_bad(PROMPT, 64)


# How deep restores reach.


def test_each_restore_is_counted_by_its_endpoint_and_a_miss_is_not(
    cache: Cache, bound: BoundModel
) -> None:
    endpoint_of(bound, PROMPT)
    bound.start_restore(PROMPT[:50]).finish().recording.finish()
    endpoint_of(bound, token_ids(50, seed=8))

    depths = cache.depths()

    assert depths.counts == (2, *[0] * len(DEPTH_BOUNDS))
    assert (depths.restored_tokens, depths.uncached_tokens) == (96 + 32, 4 + 18)
    assert sum(depths.counts) == cache.statistics().restores


def test_a_walk_back_is_counted_where_it_ended(cache: Cache, bound: BoundModel) -> None:
    key = next(link.key for link in bound.chain(PROMPT) if link.end == 96)
    flip_byte(cache.store.files.root / file_of(cache.store, Kind.SIDECAR, key).path)

    endpoint_of(bound, PROMPT)

    assert cache.depths().restored_tokens == 90


def test_a_depth_on_a_bound_is_counted_below_it_and_the_deepest_beyond_all() -> None:
    depths = MutableDepths()

    for endpoint in (1, 256, 257, 1 << 20, (1 << 20) + 1):
        depths.note(endpoint=endpoint, uncached=1)

    counts = depths.now().counts
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == 5


# The README.


def test_the_request_in_the_readme_resumes_where_it_says(cache: Cache, model: nn.Module) -> None:
    _, _, section = README.read_text().partition("### Writing a scheduler")
    code = textwrap.dedent(section.split("```python\n")[1].split("```")[0])

    def prefill(model: Any, token_ids: list[int], kv: list[Any]) -> Any:
        logits = model(mx.array([token_ids]), cache=kv)
        mx.eval(logits, [leaf.state for leaf in kv])
        return logits

    def prefill_and_decode(model: Any, token_ids: list[int], kv: list[Any]) -> list[int]:
        fed: list[int] = []
        for _ in range(3):
            logits = prefill(model, token_ids, kv)
            chosen: Any = mx.argmax(logits[0, -1]).item()
            token_ids = [int(chosen)]
            fed += token_ids
        prefill(model, token_ids, kv)
        return fed

    bound = cache.bind(model)
    conversation = list(PROMPT)
    endpoints: list[int] = []
    for _ in range(2):
        names: dict[str, Any] = {
            "bound": bound,
            "model": model,
            "token_ids": conversation,
            "turn_ends": TURN_ENDS,
            "prefill": prefill,
            "prefill_and_decode": prefill_and_decode,
        }
        exec(code, names)
        assert names["restoration"].recording.wait() == []
        endpoints.append(names["restoration"].endpoint)
        conversation += [*names["fed"], 7, 8]

    assert endpoints == [0, 103]


def test_the_readme_has_every_call_of_a_schedulers_protocol() -> None:
    _, _, section = README.read_text().partition("### Writing a scheduler")
    table = section[: section.index("### ")]

    for owner, name in [
        *[("bound", each) for each in ("lookup", "start_restore", "report_bad")],
        *[("pending", each) for each in ("is_ready", "cancel", "finish", "adopt")],
        *[("recording", each) for each in ("stop", "extend", "finish", "abort", "wait")],
        *[("cache", each) for each in ("bind", "flush", "close")],
    ]:
        assert f"`{owner}.{name}" in table


def test_what_begins_after_the_close_is_refused_as_closed(cache: Cache, bound: BoundModel) -> None:
    found = bound.restore(PROMPT)
    model: Any = bound.model
    model(mx.array([PROMPT[96:]]), cache=found.cache)
    mx.eval([leaf.state for leaf in found.cache])

    cache.close()

    refusal = found.recording.stop(100, found.cache)
    again = bound.start_restore(PROMPT).finish()
    assert refusal is not None
    assert (refusal.reason, again.reason) == (NotStoredReason.CLOSED, MissReason.CLOSED)
