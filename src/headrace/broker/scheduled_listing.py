"""The list of delayed messages, soonest first, made a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from headrace.broker.pace import Pace
from headrace.log.interface import ReadPending
from headrace.model import Scheduled

if TYPE_CHECKING:
    from headrace.broker.schedule import WaitingMessage

LOOKED_AT_ONCE = 1000
"""Messages that are looked at between two looks at the clock: half a millisecond."""


class ScheduledListing:
    """Looks for the soonest of the messages that wait. ``collect`` is called again after each piece."""

    def __init__(
        self,
        waiting: Iterator[WaitingMessage | None],
        wanted: Callable[[WaitingMessage], bool],
        limit: int,
        pace: Pace,
    ):
        self._waiting, self._wanted, self._limit, self._pace = waiting, wanted, limit, pace
        self._soonest: list[tuple[int, int, WaitingMessage]] = []
        self._latest = math.inf
        """When the last of the soonest so far is due; later ones are left out."""
        self._left: Iterator[tuple[int, int, WaitingMessage]] | None = None
        self._found: list[Scheduled] = []

    def collect(self) -> list[Scheduled]:
        deadline = self._pace.deadline()
        soonest = self._soonest
        while part := list(islice(self._waiting, LOOKED_AT_ONCE)):
            soonest += [
                (w.deliver_at, w.offset, w)
                for w in part
                if w is not None and w.deliver_at <= self._latest and self._wanted(w)
            ]
            if len(soonest) > self._limit + LOOKED_AT_ONCE:
                soonest.sort()
                del soonest[self._limit :]
                self._latest = soonest[-1][0] if soonest else -1
            if self._pace.is_past(deadline):
                raise ReadPending(self._pace.soon)
        if self._left is None:
            soonest.sort()
            self._left = iter(soonest[: self._limit])
        for deliver_at, _, waiting in self._left:
            self._found.append(Scheduled(waiting.id, waiting.control["topic"], deliver_at))
            if self._pace.is_past(deadline):
                raise ReadPending(self._pace.soon)
        return self._found
