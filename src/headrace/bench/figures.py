"""What a load test found, in numbers."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

PERCENTILES = (50, 90, 99)


class Latencies:
    """Seconds, as they were measured; asked for when the test is over."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self.add = self._seconds.append

    def __len__(self) -> int:
        return len(self._seconds)

    def as_dict(self) -> dict[str, Any] | None:
        """Milliseconds; None when nothing was measured."""
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        found: dict[str, Any] = {f"p{p}": _ms(percentile(ordered, p)) for p in PERCENTILES}
        found |= {
            "min": _ms(ordered[0]),
            "mean": _ms(math.fsum(ordered) / len(ordered)),
            "max": _ms(ordered[-1]),
        }
        found["histogram"] = histogram(ordered)
        return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed (nearest rank)."""
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


def histogram(ordered: Sequence[float]) -> list[dict[str, float]]:
    """Counts between 1, 2, 5, 10, 20, 50… of a unit, from the smallest value to the largest."""
    counts: Counter[int] = Counter()
    for seconds in ordered:
        counts[_step(seconds * 1000)] += 1
    steps = range(min(counts), max(counts) + 1)
    return [
        {"from_ms": _bound(step), "to_ms": _bound(step + 1), "count": counts[step]}
        for step in steps
    ]


def _bound(step: int) -> float:
    """… 0.5, 1, 2, 5, 10 …: step 0 begins at one millisecond."""
    power, digit = divmod(step, 3)
    return float(f"{(1, 2, 5)[digit]}e{power}")


def _step(ms: float) -> int:
    ms = max(ms, 1e-3)
    power = math.floor(math.log10(ms))
    step = 3 * power
    while ms >= _bound(step + 1):
        step += 1
    return step


class Figures:
    """Counted while the test runs."""

    def __init__(self) -> None:
        self.connections = 0
        self.sent = 0
        self.published = 0
        self.delivered = 0
        self.errors: Counter[str] = Counter()
        self.acknowledging = Latencies()
        self.delivering = Latencies()
        self.seconds = 0.0
        self.interrupted = False
        self.time_was_up = False

    def as_dict(self, size: int, *, consume: bool) -> dict[str, Any]:
        rate = self.published / self.seconds if self.seconds else 0.0
        return {
            "connections": self.connections,
            "sent": self.sent,
            "published": self.published,
            "delivered": self.delivered if consume else None,
            "errors": dict(self.errors.most_common()),
            "seconds": round(self.seconds, 6),
            "messages_per_second": round(rate, 1),
            "bytes_per_second": round(rate * size, 1),
            "latency_ms": self.acknowledging.as_dict(),
            "delivery_ms": self.delivering.as_dict(),
            "interrupted": self.interrupted,
            "time_was_up": self.time_was_up,
        }
