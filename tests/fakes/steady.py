"""Watches the loops of servers during a test.

The broker's own bound is 50 ms by the wall. A test measures processor time of the loop's thread and is more
generous, so that neither a busy machine nor a slow one makes it fail. If the watchdog's thread was late and saw nothing that
ran, many short turns have passed, not one long one.
"""

from __future__ import annotations

import asyncio

from headrace.server.watchdog import NOTHING, Watchdog
from headrace.testing import RunningServer

BLOCKED_S_MAX = 0.1
INTERVAL_S = 0.005


class Steadiness:
    def __init__(self) -> None:
        self._watchdogs: list[Watchdog] = []

    def watch(self, server: RunningServer) -> None:
        def start() -> None:
            watchdog = Watchdog(asyncio.get_running_loop(), INTERVAL_S)
            watchdog.start()
            self._watchdogs.append(watchdog)

        server.call(start)

    def check(self) -> None:
        """:class:`AssertionError` if something kept a loop for too long."""
        for watchdog in self._watchdogs:
            watchdog.stop()
        found = [blocked for watchdog in self._watchdogs for blocked in watchdog.longest.values()]
        too_long = [
            blocked
            for blocked in found
            if blocked.processor_seconds > BLOCKED_S_MAX and blocked.what != NOTHING
        ]
        assert not too_long, f"the loop was blocked: {too_long}"
