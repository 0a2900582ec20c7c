"""The few threads that wait for the disk, so that the event loop does not.

``submit(work, done)`` runs ``work`` in some thread and then ``done(result, error)`` on the loop.
Jobs of different partitions run in parallel, so their ``fdatasync`` calls overlap and the file
system's journal commits once for many. Jobs of one partition never run in parallel, because each
:class:`Lane` runs at most one job at a time.

A :class:`Lane` is the group commit: items that are put while a job runs wait, and the next job takes all of
them together. Rejected: ``ThreadPoolExecutor`` (a Future and three lock hops per job, which are half
the latency of a commit on a fast disk).
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from headrace.clock import Loop
from headrace.files import Handle

logger = logging.getLogger("headrace.log")
Item = TypeVar("Item")
Done = Callable[[Any, BaseException | None], None]
IDLE_JOBS_MAX = 2


class SyncFailed(Exception):
    """Raised in a worker when bytes may or may not have reached the disk. Never tried again."""


class Write(NamedTuple):
    """Bytes for a place in an open file that has room for them."""

    handle: Handle
    position: int
    buffers: list[bytes]
    sync: bool


class CommitJob(Protocol):
    """A commit. Either ``run`` carries it out, in a thread, or a ring writes its ``request`` (``uring.py``)."""

    def run(self) -> None: ...

    def request(self) -> Write | None:
        """On the loop: all that there is to do, if that is one plain write; else None."""

    def stored(self, seconds: float) -> None:
        """On the loop: the request was carried out."""


class Workers:
    """A small pool of daemon threads, started when first needed."""

    method = "threads"
    """How commits reach the disk."""

    def __init__(self, loop: Loop, count: int = 8):
        self._loop = loop
        self._count = count
        self._queue: SimpleQueue[tuple[Callable[[], Any], Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._idle: deque[tuple[Callable[[], Any], Done]] = deque()
        self._idle_under_way = 0
        self._is_ended = False

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        self._under_way += 1
        try:
            if self._is_ended:
                self._start()
            elif self._under_way > len(self._threads) and len(self._threads) < self._count:
                self._threads.append(self._start())
        except RuntimeError as error:  # the system has no thread for us
            if self._is_ended or not self._threads:
                refusal = OSError(errno.EAGAIN, str(error))
                self._loop.call_soon(self._finish, done, None, refusal)
                return
            logger.warning("there are only %d disk threads: %s", len(self._threads), error)
        self._queue.put((work, done))
        if self._is_ended:  # the thread ends with it
            self._queue.put(None)

    def _start(self) -> threading.Thread:
        name = f"headrace-disk-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    def submit_idle(self, work: Callable[[], Any], done: Done) -> None:
        """Work that nobody waits for, such as removing large files of a thousand partitions: ``IDLE_JOBS_MAX`` at a time,
        so that commits find a thread."""
        self._idle.append((work, done))
        self._begin_idle()

    def _begin_idle(self) -> None:
        while self._idle and self._idle_under_way < IDLE_JOBS_MAX:
            self._idle_under_way += 1
            work, done = self._idle.popleft()

            def ended(result: Any, error: BaseException | None, done: Done = done) -> None:
                self._idle_under_way -= 1
                self._begin_idle()
                done(result, error)

            self.submit(work, ended)

    def commit(self, job: CommitJob, done: Done) -> None:
        self.submit(job.run, done)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            work, done = job
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            try:
                self._loop.call_soon_threadsafe(self._finish, done, result, error)
            except RuntimeError:
                return  # the loop is closed: no caller waits for the result
            del job, work, done, result, error

    def _finish(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._under_way -= 1
        done(result, error)

    def close(self) -> None:
        """End the threads when the queue is empty. Running jobs finish. What follows from them, such as a read for somebody
        who has waited for his turn, has a thread of its own."""
        self._is_ended = True
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []


@dataclass(slots=True, eq=False)
class Lane(Generic[Item]):
    """One writer at a time; the next job takes all items that waited."""

    _loop: Loop
    _submit: Callable[[Any, Done], None]
    """``submit`` or ``commit`` of the workers, for what ``take`` returns."""
    _take: Callable[[list[Item]], Any]
    _finish: Done
    waiting: list[Item] = field(default_factory=list)
    _busy: bool = False

    @property
    def idle(self) -> bool:
        return not self._busy and not self.waiting

    def put(self, item: Item, at_once: bool = False) -> None:
        """As a rule not ``at_once``: everything that arrives in this turn of the loop joins the commit."""
        self.waiting.append(item)
        if not self._busy:
            self._busy = True
            if at_once:
                self._start()
            else:
                self._loop.call_soon(self._start)

    def _start(self) -> None:
        while self.waiting:
            items, self.waiting = self.waiting, []
            # May put items that do not fit back to the front of ``waiting``.
            work = self._take(items)
            if work is not None:
                self._submit(work, self._done)
                return
        self._busy = False

    def _done(self, result: Any, error: BaseException | None) -> None:
        try:
            self._finish(result, error)
        finally:
            self._start()
