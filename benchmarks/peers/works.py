"""The works that every peer does, with their amounts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Work:
    """One number of the report. ``call`` says how it is measured: a function of ``drive.py``, or a method of
    ``Run`` (``echo``, ``http``, ``native``, ``store``)."""

    name: str
    template: str
    """The title; amounts stand in braces, so a quick run says what it measured."""
    call: str
    unit: str
    full: dict[str, Any]
    quick: dict[str, Any] = field(default_factory=dict)
    smaller: bool = False
    part: str = ""
    """Which number of the answer is meant, if it has several."""

    def amounts(self, quick: bool) -> dict[str, Any]:
        return {**self.full, **(self.quick if quick else {})}

    def title(self, quick: bool) -> str:
        return self.template.format(**self.amounts(quick))


_ONE: tuple[dict[str, Any], dict[str, Any]] = ({"count": 3000, "size": 100}, {"count": 400})
_READ: tuple[dict[str, Any], dict[str, Any]] = ({"count": 500_000, "size": 100}, {"count": 200_000})
_SINGLY: tuple[dict[str, Any], dict[str, Any]] = (
    {"count": 100_000, "size": 100},
    {"count": 20_000},
)
_STORE: tuple[dict[str, Any], dict[str, Any]] = (
    {"few": 100_000, "many": 1_000_000, "megabytes": 1000, "restarts": 3},
    {"few": 10_000, "many": 50_000, "megabytes": 50, "restarts": 1},
)
PARTS = ("p50", "p99", "p99.9")


def _batches(name: str, size: int, text: str, by: int, count: int) -> Work:
    title = f"batches of {by:,} × {text}"
    amounts = {"count": count, "size": size, "by": by}
    return Work(name, title, "batches", "messages/s", amounts, {"count": max(count // 5, 2 * by)})


def _latency(rate: int, part: str) -> Work:
    amounts = {"rate": rate, "seconds": 5, "size": 100}
    title = f"publish to delivery at {{rate:,}}/s, {part}"
    return Work(
        f"latency-{rate}-{part}", title, "latency", "µs", amounts, {"seconds": 1.5}, True, part
    )


WORKS = [
    *[Work(f"one-{part}", f"publish one at a time, {part}", "one", "µs", *_ONE, True, part) for part in PARTS[:2]],
    Work("loop", "publish in a plain loop, not waiting", "loop", "messages/s", {"count": 400_000, "size": 100}, {"count": 100_000}),
    _batches("batch-100", 100, "100 B", 10_000, 1_000_000),
    _batches("batch-1k", 1000, "1 KB", 1000, 200_000),
    _batches("batch-10k", 10_000, "10 KB", 100, 20_000),
    Work("read", "read as a log, as objects", "read", "messages/s", *_READ, part="objects"),
    Work("values", "read as a log, as values", "read", "messages/s", *_READ, part="values"),
    Work("queue", "queue, an ack for each message", "queue", "messages/s", *_READ),
    Work("read-singly", "read as a log, published one at a time", "singly", "messages/s", *_SINGLY, part="read"),
    Work("queue-singly", "queue, published one at a time", "singly", "messages/s", *_SINGLY, part="queue"),
    Work("fan-out", "fan-out of one topic to {subscribers} subscribers", "fan_out", "deliveries/s",
         {"count": 2000, "size": 100, "subscribers": 100}, {"count": 300}),
    Work("subscriptions", "{many} subscriptions with a member, a message at a time", "subscriptions", "deliveries/s",
         {"count": 400, "size": 100, "many": 500}, {"count": 40}),
    Work("topics", "round robin over {many:,} topics, not waiting", "topics", "messages/s",
         {"count": 100_000, "size": 100, "many": 5000}, {"count": 10_000, "many": 500}),
    *[_latency(rate, part) for rate in (100, 1000) for part in PARTS],
    Work("http", "HTTP, one message a POST, 50 connections", "http", "messages/s", {"seconds": 3}, {"seconds": 1}),
    Work("echo", "the same, answered by a bare httptools echo", "echo", "messages/s", {"seconds": 3}, {"seconds": 1}),
    Work("native", "its own load tool, pipelined, 100 B", "native", "messages/s", {"count": 500_000}, {"count": 50_000}),
    Work("start", "start without data", "store", "s", *_STORE, True, "start"),
    Work("memory-0", "resident memory without data", "store", "MB", *_STORE, True, "empty"),
    Work("memory-few", "resident memory with {few:,} queued", "store", "MB", *_STORE, True, "few"),
    Work("memory-many", "resident memory with {many:,} queued", "store", "MB", *_STORE, True, "many"),
    Work("restart", "restart with {megabytes:,} MB", "store", "s", *_STORE, True, "restart"),
]  # fmt: skip
NAMED = {work.name: work for work in WORKS}
