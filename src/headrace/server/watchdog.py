"""The watchdog: was the loop blocked, for how long, and by what?

A broker has one loop, and nothing may keep it for more than ``BLOCKED_S``. The watchdog is a thread that asks
the loop for a sign of life a few times a second. If the sign does not come in time, it looks at the stack of
the loop's thread, which tells what runs there, and goes on looking until the sign comes::

    thread:   beat? ───────── no answer ── look at the stack ── look ── look ──┐
    loop:        ├──────────── something that takes too long ─────────────────┤ beat
                 └───────────────── blocked for this long ────────────────────┘

It costs the loop one small callback per interval, whatever the load is. It does not see each turn: what
blocks the loop for a moment, and seldom, may come between two beats. What does it often is seen.

The time is measured by the wall, for operators: to whoever waits it does not matter why. For tests it is
also measured in processor time of the loop's thread, which a busy machine does not change.

Rejected: a measurement around each callback (uvloop runs them in C), the debug mode of asyncio (it makes
every callback several times slower).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import NamedTuple

from headrace.server.metrics import Histogram

logger = logging.getLogger("headrace.server")
BLOCKED_S = 0.05
"""How long one request, delivery or operation may keep the loop."""
INTERVAL_S = 0.1
LOOK_S = 0.02
"""How often the watchdog looks at the stack while the loop is blocked."""
LOG_EVERY_S = 1.0
NAMES_MAX = 100
NOTHING = "nothing"
"""No code of ours ran: the loop's thread waited for the processor, or for the interpreter."""
_PLUMBING = frozenset(
    {"server.connection", "server.flow", "server.operations", "broker.pace", "server.watchdog"}
)
"""They run what others asked for, so their names would say nothing."""


_STARTERS = ("headrace.shell", "threading")


class Blocked(NamedTuple):
    what: str
    seconds: float
    processor_seconds: float
    where: str
    """The functions of ours that ran, the outermost first."""


class Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = INTERVAL_S):
        self._loop = loop
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._beaten = threading.Event()
        self._beat_at = 0.0
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._logged_at = 0.0
        self.blocked: dict[str, Histogram] = {}
        """By what ran."""
        self.longest: dict[str, Blocked] = {}

    def start(self) -> None:
        """Call it on the loop."""
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="headrace-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        self._beat_at = time.perf_counter()
        self._beaten.set()

    # --- in the thread ------------------------------------------------------------------------
    def _watch(self) -> None:
        clock = time.pthread_getcpuclockid(self._loop_thread)
        while not self._stopped.wait(self._interval_s):
            self._beaten.clear()
            try:
                asked, used = time.perf_counter(), time.clock_gettime(clock)
                self._loop.call_soon_threadsafe(self._beat)
            except (OSError, RuntimeError):
                return  # the loop's thread is gone, or the loop is closed
            if self._beaten.wait(BLOCKED_S):
                continue
            seen: Counter[tuple[str, str]] = Counter()
            while not self._stopped.is_set():
                found = _running(sys._current_frames().get(self._loop_thread))
                if found is not None:
                    seen[found] += 1
                if self._beaten.wait(LOOK_S):
                    break
                if self._loop.is_closed():
                    return
            what, where = seen.most_common(1)[0][0] if seen else (NOTHING, "")
            try:
                spent = time.clock_gettime(clock) - used
            except OSError:
                return  # the thread is gone
            self._note(Blocked(what, self._beat_at - asked, spent, where))

    def _note(self, blocked: Blocked) -> None:
        what = blocked.what
        if what not in self.blocked and len(self.blocked) >= NAMES_MAX:
            what = "other"
        self.blocked.setdefault(what, Histogram()).add(blocked.seconds)
        longest = self.longest.get(what)
        if longest is None or blocked.seconds > longest.seconds:
            self.longest[what] = blocked
        now = time.perf_counter()
        if what != NOTHING and now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "%s kept all clients waiting for %.0f ms (%s)",
                blocked.what,
                blocked.seconds * 1000,
                blocked.where,
            )


def _running(frame: FrameType | None) -> tuple[str, str] | None:
    """(what runs, all functions of ours) in the callback that the loop runs now; None: it runs none."""
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("asyncio.") or module in _STARTERS:
            break  # below it is only what started the loop
        if module.startswith("headrace."):
            names.append(f"{module.removeprefix('headrace.')}.{frame.f_code.co_name}")
        frame = frame.f_back
    else:
        return None  # the loop waits, or is between two callbacks
    if not names:
        return None
    names.reverse()
    what = next((name for name in names if name.rpartition(".")[0] not in _PLUMBING), names[-1])
    return what, " > ".join(names)
