"""What Headrace has to reach, as ratios within one run, and whether it did."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.works import NAMED, Work

NAMES = {
    "headrace": "Headrace",
    "redis": "Redis",
    "nats": "NATS",
    "rabbitmq": "RabbitMQ",
    "kafka": "Kafka",
}
OTHERS = tuple(name for name in NAMES if name != "headrace")
MODES = {"fsync": "synced before each answer", "default": "default durability"}


@dataclass(frozen=True)
class Bound:
    """Headrace has to be ``least`` times as good as each of the peers."""

    least: float
    peers: tuple[str, ...] = OTHERS
    mode: str = ""
    """That of the peers, if it is another."""
    work: str = ""
    """That of the peers, if it is another."""


@dataclass(frozen=True)
class Target:
    work: str
    mode: str
    text: str
    bounds: tuple[Bound, ...] = ()
    least: float = 0.0
    """In the unit of the work, if it is compared with nobody."""


@dataclass(frozen=True)
class Verdict:
    target: Target
    measured: str
    met: bool | None
    """None: it was not measured."""


def _both(work: str, text: str, *bounds: Bound) -> list[Target]:
    return [Target(work, mode, text, bounds) for mode in MODES]


_AT_LEAST_THE_FASTEST = (Bound(1),)
TARGETS = [
    *_both("loop", "≥ 1 × Kafka (never synced), ≥ 2 × Redis, ≥ 5 × NATS and RabbitMQ",
           Bound(1, ("kafka",), "default"), Bound(2, ("redis",)), Bound(5, ("nats", "rabbitmq"))),
    *_both("batch-100", "≥ 3 × the fastest peer", Bound(3)),
    *_both("batch-1k", "≥ 3 × the fastest peer", Bound(3)),
    *_both("batch-10k", "≥ 3 × the fastest peer", Bound(3)),
    *_both("queue", "≥ 3 × the fastest peer", Bound(3)),
    *_both("values", "≥ 3 × the fastest peer", Bound(3)),
    *_both("read", "≥ 1 × the fastest peer", *_AT_LEAST_THE_FASTEST),
    *_both("read-singly", "≥ 0.7 × its own rate of batches", Bound(0.7, ("headrace",), work="read")),
    *_both("queue-singly", "≥ 0.7 × its own rate of batches", Bound(0.7, ("headrace",), work="queue")),
    Target("subscriptions", "fsync", "≥ 100,000 deliveries/s", least=100_000),
    Target("native", "fsync", "≥ 2 × Redis, ≥ 10 × RabbitMQ and NATS, ≥ 1 × Kafka (never synced)",
           (Bound(2, ("redis",)), Bound(10, ("rabbitmq", "nats")), Bound(1, ("kafka",), "default"))),
    *_both("one-p50", "≤ every peer", *_AT_LEAST_THE_FASTEST),
    *_both("latency-1000-p50", "≤ every peer", *_AT_LEAST_THE_FASTEST),
    *_both("latency-1000-p99", "≤ every peer", *_AT_LEAST_THE_FASTEST),
    Target("http", "fsync", "≥ 0.6 × a bare httptools echo", (Bound(0.6, ("headrace",), work="echo"),)),
    Target("memory-many", "default", "≤ half of the best peer", (Bound(2),)),
    Target("topics", "fsync", "≥ 100,000 messages/s", least=100_000),
    Target("restart", "default", "≤ the fastest peer", _AT_LEAST_THE_FASTEST),
]  # fmt: skip


def samples_of(result: dict[str, Any], work: Work, mode: str) -> dict[str, list[float]]:
    """Peer -> values. Memory and restarts of a peer whose modes store the same bytes are measured in one mode."""
    labels = result["samples"].get(work.name, {})
    found = {}
    for peer in NAMES:
        values = labels.get(f"{peer} {mode}")
        if not values and work.call == "store":
            values = labels.get(f"{peer} default") or labels.get(f"{peer} fsync")
        if values:
            found[peer] = values
    return found


def better(work: Work, ours: float, theirs: float) -> float:
    """How many times as good ours is: above one is better, whether more or less is wanted."""
    if work.smaller:
        ours, theirs = theirs, ours
    return ours / theirs if theirs else float("inf")


def ratios(work: Work, samples: dict[str, list[float]]) -> dict[str, float]:
    """Headrace to each peer."""
    if "headrace" not in samples:
        return {}
    ours = statistics.median(samples["headrace"])
    return {
        peer: better(work, ours, statistics.median(values))
        for peer, values in samples.items()
        if peer != "headrace"
    }


def to_the_best(work: Work, samples: dict[str, list[float]]) -> tuple[float, str] | None:
    """The ratio to the best peer, and which peer that is."""
    found = ratios(work, samples)
    if not found:
        return None
    best = min(found, key=lambda peer: found[peer])
    return found[best], best


def judge(result: dict[str, Any], target: Target) -> Verdict:
    work = NAMED[target.work]
    ours = samples_of(result, work, target.mode).get("headrace")
    if not ours:
        return Verdict(target, "not measured", None)
    middle = statistics.median(ours)
    if target.least:
        return Verdict(target, f"{middle:,.0f} {work.unit}", middle >= target.least)
    texts, met = [], []
    for bound in target.bounds:
        other = NAMED[bound.work or target.work]
        theirs = samples_of(result, other, bound.mode or target.mode)
        if other.call == "echo":
            theirs = samples_of(result, other, "fsync")
        found = {
            peer: better(work, middle, statistics.median(theirs[peer]))
            for peer in bound.peers
            if peer in theirs
        }
        if found:
            worst = min(found, key=lambda peer: found[peer])
            met.append(found[worst] >= bound.least)
            texts.append(
                f"{found[worst]:.2f} ×"
                + (f" {NAMES[worst]}" if worst != "headrace" else "")
                + ("" if met[-1] or len(target.bounds) == 1 else " (missed)")
            )
    if not texts:
        return Verdict(target, "no peer was measured", None)
    return Verdict(target, ", ".join(texts), all(met))
