"""Time, as an argument of constructors.

There are two clocks, and they must not be confused. The *wall* clock gives records their timestamps and
decides retention and schedules. The *monotonic* clock decides leases, timeouts and backoff, so a jump of
the wall clock never expires a delivery. Timers belong to the event loop. The engine uses only the methods
of :class:`Loop`; asyncio's loops and ``tests.fakes.FakeLoop`` both have them.
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
        """For measurements, from any thread. A loop's own time does not move within one turn."""
        return time.perf_counter()


class Timer(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """The part of an event loop that the engine uses. ``time`` is monotonic, in seconds."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...


def runs_here(loop: Loop) -> bool:
    """Whether this thread runs the loop: then everybody waits for what it waits for."""
    return asyncio._get_running_loop() is loop


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop if it is installed: a commit then takes two thirds of the time."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
