"""A request to stop: set by a signal handler or any thread, read by the thread that works.

Not a ``threading.Event``: its lock cannot be taken twice, so a handler that sets it while the same
thread is about to wait for it would wait for itself forever. And a signal does not wake a thread that
just went to sleep on a lock; here the thread looks again soon.
"""

from __future__ import annotations

import time

LOOK_S = 0.1


class StopFlag:
    """Once set it stays set."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Sleep until the time is up or the flag is set; returns whether it is set."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
        return self._is_set
