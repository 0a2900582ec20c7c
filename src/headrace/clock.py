"""Time, passed in.

Two clocks that must not be confused: the *wall* clock gives records their timestamps and decides
retention and schedules; the *monotonic* clock decides leases, timeouts and backoff, so that a
jumping wall clock never expires a delivery. Timers belong to the event loop, of which the engine
uses only what :class:`Loop` names; asyncio's loops and ``tests.fakes.FakeLoop`` both fit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock:
    """The machine's wall clock, in milliseconds since 1970 (UTC)."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def seconds(self) -> float:
        """For measuring, from any thread. A loop's own time stands still between its turns."""
        return time.perf_counter()


class Timer(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """What the engine needs of an event loop. ``time`` is monotonic, in seconds."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: a commit takes two thirds of the time."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
