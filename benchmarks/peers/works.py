"""The works that every peer does, with their amounts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Work:
    """``call`` is a function of ``drive.py``, or "server" for one that needs no client."""

    name: str
    title: str
    call: str
    unit: str
    full: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    smaller: bool = False
    part: str = ""
    """Which number of the answer is meant, if it has several."""

    def amounts(self, quick: bool) -> dict[str, Any]:
        return {**self.full, **(self.quick if quick else {})}


def _latency(rate: int, part: str) -> Work:
    return Work(
        f"latency-{rate}-{part}",
        f"publish to delivery at {rate:,}/s, {part}",
        "latency",
        "µs",
        {"rate": rate, "seconds": 10, "size": 100},
        {"seconds": 3},
        smaller=True,
        part=part,
    )


WORKS = [
    Work("one", "publish one at a time, p50", "one", "µs", {"count": 3000, "size": 100}, {"count": 500}, True, "p50"),
    Work("one-p99", "publish one at a time, p99", "one", "µs", {"count": 3000, "size": 100}, {"count": 500}, True, "p99"),
    Work("loop", "plain loop, not waiting", "loop", "messages/s", {"count": 100_000, "size": 100}, {"count": 20_000}),
    Work("batch-100", "batches of 100 B", "batches", "messages/s", {"count": 500_000, "size": 100, "by": 10_000}, {"count": 50_000}),
    Work("batch-1k", "batches of 1 KB", "batches", "messages/s", {"count": 100_000, "size": 1000, "by": 1000}, {"count": 10_000}),
    Work("batch-10k", "batches of 10 KB", "batches", "messages/s", {"count": 20_000, "size": 10_000, "by": 100}, {"count": 2000}),
    Work("read", "read as a log, as objects", "read", "messages/s", {"count": 300_000, "size": 100}, {"count": 50_000}),
    Work("values", "read as a log, as values", "values", "messages/s", {"count": 300_000, "size": 100}, {"count": 50_000}),
    Work("queue", "queue, an ack for each", "queue", "messages/s", {"count": 100_000, "size": 100}, {"count": 20_000}),
    Work("singles", "queue, published one at a time", "singles", "messages/s", {"count": 20_000, "size": 100}, {"count": 3000}),
    Work("fan-out", "fan-out to 100 subscribers", "fan_out", "deliveries/s", {"count": 2000, "size": 100, "subscribers": 100}, {"count": 300}),
    *[_latency(rate, part) for rate in (100, 1000) for part in ("p50", "p99", "p99.9")],
    Work("http", "HTTP, one message a POST, 50 connections", "http", "messages/s", {"count": 30_000}, {"count": 3000}),
    Work("native", "its own load tool, pipelined, 100 B", "native", "messages/s", {"count": 500_000}, {"count": 50_000}),
    Work("memory-100k", "memory with 100,000 queued", "memory", "MB", {"count": 100_000, "size": 100}, {"count": 20_000}, True),
    Work("memory-1m", "memory with 1,000,000 queued", "memory", "MB", {"count": 1_000_000, "size": 100}, {"count": 50_000}, True),
    Work("start", "start, empty", "start", "s", {"count": 0, "size": 0}, {}, True),
    Work("restart", "restart with 1 GB", "start", "s", {"count": 1_000_000, "size": 1000}, {"count": 50_000}, True),
]  # fmt: skip
