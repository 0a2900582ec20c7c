"""The latencies, attempts and dead letters of a subscription since the last event about it.

It is updated once for each lease, not for each message: a lease holds records of one batch for one member,
and the batch's time is close enough for all of them. So a latency is that of the newest record of the
batch, from its timestamp to its first delivery, counted for each record delivered. Later deliveries are not
latencies; they are counted by their attempt.

Everything is bounded: latencies are counted by powers of two, attempts up to ``ATTEMPTS_APART``, reasons up
to ``REASONS_APART``.
"""

from __future__ import annotations

from typing import Any

ATTEMPTS_APART = 10
"""Deliveries from this attempt on are counted together."""
REASONS_APART = 20
"""Different reasons for dead letters in one event; the rest are ``OTHER``."""
REASON_CHARS = 200
OTHER = "(others)"


class Activity:
    __slots__ = ("_again", "_buckets", "_max_ms", "_reasons", "_sum_ms")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._buckets: dict[int, int] = {}
        """Number of bits of the latency in ms -> first deliveries."""
        self._sum_ms = 0
        self._max_ms = 0
        self._again: dict[int, int] = {}
        """Attempt, from the second on -> deliveries."""
        self._reasons: dict[str, int] = {}

    # --- counting ---------------------------------------------------------------------------
    def first(self, late_ms: int, count: int) -> None:
        """Count first deliveries, ``late_ms`` after the messages were published."""
        if late_ms < 0:  # published with a future time, or the clock was set back
            late_ms = 0
        buckets = self._buckets
        bits = late_ms.bit_length()
        buckets[bits] = buckets.get(bits, 0) + count
        self._sum_ms += late_ms * count
        if late_ms > self._max_ms:
            self._max_ms = late_ms

    def mixed(self, late_ms: int, attempts: list[int]) -> None:
        """Count deliveries, some of them repeated."""
        fresh = attempts.count(1)
        if fresh:
            self.first(late_ms, fresh)
        for attempt in attempts:
            if attempt > 1:
                attempt = min(attempt, ATTEMPTS_APART)
                self._again[attempt] = self._again.get(attempt, 0) + 1

    def buried(self, reason: str) -> None:
        """Count a dead letter."""
        reason = " ".join(reason[: 2 * REASON_CHARS].split())[:REASON_CHARS]
        if reason not in self._reasons and len(self._reasons) >= REASONS_APART:
            reason = OTHER
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    # --- telling ----------------------------------------------------------------------------
    def take(self) -> dict[str, Any]:
        """Everything since the last call, in the form of an event."""
        count = sum(self._buckets.values())
        attempts = {"1": count} if count else {}
        for attempt, deliveries in sorted(self._again.items()):
            name = f"{attempt}+" if attempt == ATTEMPTS_APART else str(attempt)
            attempts[name] = deliveries
        taken = {
            "attempts": attempts,
            "latency_ms": {
                "count": count,
                "sum": self._sum_ms,
                "max": self._max_ms,
                "p50": self._quantile(0.5, count),
                "p99": self._quantile(0.99, count),
            },
            "dead_letters": self._reasons,
        }
        self._clear()
        return taken

    def _quantile(self, part: float, count: int) -> int:
        """The latency that ``part`` of the messages did not exceed, interpolated within a power of 2."""
        rank = part * count
        below = 0
        for bits, here in sorted(self._buckets.items()):
            if below + here >= rank and here:
                low, high = (0, 0) if not bits else (1 << bits - 1, (1 << bits) - 1)
                return min(round(low + (high - low) * (rank - below) / here), self._max_ms)
            below += here
        return 0
