"""Leases that end without an answer, in pieces: a member that vanishes may hold two million messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.broker.delivery import Lease
from headrace.broker.pace import Pace

TIMED_OUT = "ack timeout"


class Ending(NamedTuple):
    lease: Lease
    reason: str
    at_once: bool
    """Deliver its messages again at once, not after the backoff."""
    counts: bool
    """It uses up a delivery."""


class Endings:
    """Calls ``end`` for each, in order: the first ones now, the rest in later turns of the loop.

    A lease that is settled while it waits here is empty when its turn comes.
    """

    def __init__(self, pace: Pace, end: Callable[[Ending], None]):
        self._pace = pace
        self._end = end
        self._queue: deque[Ending] = deque()
        self._running = False

    def add(self, leases: Iterable[Lease], reason: str, *, at_once: bool, counts: bool) -> None:
        self._queue.extend([Ending(lease, reason, at_once, counts) for lease in leases])
        if not self._running:
            self._run()

    def _run(self) -> None:
        deadline = self._pace.deadline()
        while self._queue:
            self._end(self._queue.popleft())
            if self._queue and self._pace.is_past(deadline):
                self._running = True
                self._pace.soon(self._run)
                return
        self._running = False
