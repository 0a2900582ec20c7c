"""A loop and a clock that move only when told, so that no test sleeps.

Rules:
- Callbacks run inside ``run_until_idle`` and ``advance``, in the order in which they were due, in
  the thread that calls. What a callback raises comes out there: a failing test fails at its cause.
- Time stands still while callbacks run. A timer whose delay is 0 or less needs ``advance(0)``.
- The wall clock follows the loop, so one ``advance`` moves both. ``FakeClock.set`` and
  ``FakeClock.jump`` move it alone, as an operator or a bad time server would.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from headrace.clock import Clock

CALLBACKS_MAX = 10_000_000
"""More than this without coming to rest is a callback that calls itself for ever."""


class FakeTimer:
    """What ``call_soon`` and ``call_later`` return."""

    __slots__ = ("args", "callback", "cancelled", "when")

    def __init__(self, when: float, callback: Callable[..., Any], args: tuple[Any, ...]):
        self.when = when
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """See :class:`headrace.clock.Loop`."""

    def __init__(self, time: float = 1_000.0):
        self._time = time
        self._ready: deque[FakeTimer] = deque()
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._time

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> FakeTimer:
        timer = FakeTimer(self._time, callback, args)
        self._ready.append(timer)
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> FakeTimer:
        return self.call_soon(callback, *args)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> FakeTimer:
        timer = FakeTimer(self._time + max(delay, 0.0), callback, args)
        heapq.heappush(self._timers, (timer.when, next(self._numbers), timer))
        return timer

    @property
    def timers(self) -> int:
        """How many timers are still to come; a test can see that none was forgotten."""
        return sum(not timer.cancelled for _, _, timer in self._timers)

    def run_until_idle(self) -> None:
        """Run what is ready, and what that makes ready, but no timer."""
        for _ in range(CALLBACKS_MAX):
            if not self._ready:
                return
            timer = self._ready.popleft()
            if not timer.cancelled:
                timer.callback(*timer.args)
        raise AssertionError("the loop does not come to rest")

    def advance(self, seconds: float) -> None:
        """Let time pass: every timer that falls due runs at its own time, in order."""
        assert seconds >= 0, "monotonic time does not run backwards"
        end = self._time + seconds
        self.run_until_idle()
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            self._time = max(self._time, when)
            timer.callback(*timer.args)
            self.run_until_idle()
        self._time = end


class RunningLoop(FakeLoop):
    """It is the running loop of its thread while callbacks run: what they read must be in memory (``log/fetching.py``)."""

    def run_until_idle(self) -> None:
        with running(self):
            super().run_until_idle()

    def advance(self, seconds: float) -> None:
        with running(self):
            super().advance(seconds)


@contextmanager
def running(loop: Any) -> Iterator[None]:
    """asyncio takes the loop for the one that runs in this thread; None: no loop does."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


class FakeClock(Clock):
    """The wall clock of a :class:`FakeLoop`; without one it stands still until it is moved."""

    def __init__(self, loop: FakeLoop | None = None, now_ms: int = 1_700_000_000_000):
        self._loop = loop
        self._started = self._elapsed()
        self._base_ms = now_ms

    def _elapsed(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def now_ms(self) -> int:
        return self._base_ms + round((self._elapsed() - self._started) * 1000)

    def seconds(self) -> float:
        return self._elapsed()

    def set(self, now_ms: int) -> None:
        """From now on it is this late, whatever the loop thinks of it."""
        self._started = self._elapsed()
        self._base_ms = now_ms

    def jump(self, milliseconds: int) -> None:
        """Forwards, or with a negative number backwards; the loop's time does not move."""
        self._base_ms += milliseconds

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks when there is a loop, else on this one."""
        if self._loop is not None:
            self._loop.advance(seconds)
        else:
            self._base_ms += round(seconds * 1000)
