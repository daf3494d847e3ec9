"""Measuring side by side: everything compared runs interleaved, in random order, in one run.

A machine's speed drifts by more than most differences that matter. So nothing is compared but by
the ratio of two measurements of the same round, and a ratio comes with its spread.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Seconds by part. The part TOTAL is what is compared; the others say where it went.
Sample = dict[str, float]
TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to do a thing. ``run`` measures itself, so that what prepares it does not count."""

    name: str
    run: Callable[[], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The seconds of an arm with their ratio to another arm's, or of a part with its share."""

    topic: str
    what: str
    part: str = TOTAL
    seconds: Spread
    against: str | None = None
    ratio: Spread | None = None
    share: Spread | None = None

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        fields: dict[str, Any] = {"topic": self.topic, "what": self.what, "part": self.part}
        if self.against is not None:
            fields["against"] = self.against
        for name in ("seconds", "ratio", "share"):
            spread: Spread | None = getattr(self, name)
            if spread is not None:
                fields[name] = round(spread.median, 6)
                fields[f"{name}_quartiles"] = [round(spread.low, 6), round(spread.high, 6)]
        return fields


def interleave(
    arms: Sequence[Arm], *, rounds: int, order: random.Random
) -> dict[str, list[Sample]]:
    """Run every arm once a round, each round in another order.

    One round before does not count, unless there is only one.
    """
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    for number in range(0 if rounds > 1 else 1, rounds + 1):
        for arm in order.sample(arms, len(arms)):
            sample = arm.run()
            if number:
                samples[arm.name].append(sample)
    return samples


def spread_of(values: Sequence[float]) -> Spread:
    """The quartiles of the values themselves; of two or three, the lowest and the highest."""
    if len(values) < 4:
        return Spread(median=statistics.median(values), low=min(values), high=max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median=median, low=low, high=high)


def compare(
    topic: str,
    samples: Mapping[str, Sequence[Sample]],
    against: Mapping[str, str],
) -> list[Row]:
    """A row for each arm, with its ratio to the arm that ``against`` names for it, round by round.

    The parts of an arm follow it.
    """
    rows: list[Row] = []
    for name, each in samples.items():
        other = against.get(name)
        ratio = None
        if other is not None:
            pairs = zip(each, samples[other], strict=True)
            ratio = spread_of([mine[TOTAL] / theirs[TOTAL] for mine, theirs in pairs])
        total = spread_of([sample[TOTAL] for sample in each])
        rows.append(Row(topic=topic, what=name, seconds=total, against=other, ratio=ratio))
        for part in [part for part in each[0] if part != TOTAL]:
            rows.append(
                Row(
                    topic=topic,
                    what=name,
                    part=part,
                    seconds=spread_of([sample[part] for sample in each]),
                    share=spread_of([sample[part] / sample[TOTAL] for sample in each]),
                )
            )
    return rows
