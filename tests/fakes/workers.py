"""Disk jobs without threads: the same jobs, in the same order, on every run.

``submit`` runs the work at once, in the caller's thread, and has ``done`` called on the loop's next
turn, as the real pool would. With ``hold`` set, jobs wait until ``release``: so a test stands
between the moment a commit is handed to the disk and the moment it is done, for as long as it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from headrace.clock import Loop
from headrace.log.workers import Done, Workers
from tests.fakes.time import running


class InlineWorkers(Workers):
    """See :class:`headrace.log.workers.Workers`."""

    def __init__(self, loop: Loop, *, hold: bool = False):
        super().__init__(loop, count=0)
        self.hold = hold
        self.jobs = 0
        """Jobs that have been run."""
        self.closed = False
        self._held: deque[tuple[Callable[[], Any], Done]] = deque()

    @property
    def held(self) -> int:
        return len(self._held)

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        if self.hold:
            self._held.append((work, done))
        else:
            self._work(work, done)

    def release(self, count: int | None = None, random: Random | None = None) -> int:
        """Run held jobs; all that are held now, or ``count``. Says how many.

        The oldest first, or with ``random`` any: threads that wait for a disk overtake each other.
        """
        count = len(self._held) if count is None else min(count, len(self._held))
        for _ in range(count):
            if random is not None:
                self._held.rotate(-random.randrange(len(self._held)))
            self._work(*self._held.popleft())
        return count

    def _work(self, work: Callable[[], Any], done: Done) -> None:
        self.jobs += 1
        result, error = None, None
        try:
            with running(None):
                result = work()
        except BaseException as caught:
            error = caught
        self._loop.call_soon(done, result, error)

    def close(self) -> None:
        self.closed = True
