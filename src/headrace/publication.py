"""Calls that the caller does not wait for: their results, and what becomes of their errors.

``publish_nowait`` returns a :class:`Publication`. If it fails and nobody asks for its result, the error
is kept in :class:`Failures`: it is logged, and raised by the next ``flush()``, ``close()`` or end of ``with``.
Only a failure costs anything; the hot path is untouched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.errors import HeadraceError, RequestTimeout
from headrace.model import Receipt
from headrace.times import Duration, seconds

logger = logging.getLogger("headrace.publication")
Result = TypeVar("Result")
LOG_AFTER_S = 1.0
"""The caller has this long to look at a failure before it is logged."""
KEPT_MAX = 100
"""Failures that are kept until they are raised; further ones are counted."""

_lock = threading.Lock()
"""One lock for all publications: each holds it only for a moment, and callers wait for few of them."""


def _renew_lock() -> None:
    """In a forked child: the thread that held the lock does not exist there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_renew_lock)


class Pending(Generic[Result]):
    """A call that may not be answered yet. ``result()`` waits for its result, or raises its error.

    A ``concurrent.futures.Future`` has a lock and a condition of its own. Callers wait for few
    publications, so a lock to wait on is made only when a caller waits.
    """

    __slots__ = ("_callbacks", "_error", "_failures", "_is_done", "_result", "_waiting", "is_seen")

    def __init__(self, failures: Failures | None = None) -> None:
        self._failures = failures
        """Of the client or broker that answers."""
        self._result: Result | None = None
        self._error: HeadraceError | None = None
        self._is_done = False
        self.is_seen = False
        """Somebody has asked for the result."""
        self._waiting: list[threading.Lock] | None = None
        """One for each thread that waits; it is released when the answer comes."""
        self._callbacks: list[Callable[[Any], object]] | None = None

    def settle(self, result: Result | None, error: HeadraceError | None) -> None:
        """Called by the client; only the first call counts."""
        with _lock:
            if self._is_done:
                return
            self._result, self._error = result, error
            self._is_done = True
            waiting, callbacks = self._waiting, self._callbacks
        for lock in waiting or ():
            lock.release()
        for callback in callbacks or ():
            self._tell(callback)

    def _tell(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:  # others wait for their answers in the same thread
            logger.exception("a callback of a publication failed")

    def result(self, timeout: Duration | None = None) -> Result:
        """Wait for the result, or raise the error. :class:`RequestTimeout` after ``timeout`` seconds.

        Example::

            print(client.publish_nowait("orders", b"x").result(timeout=10).offset)
        """
        self.is_seen = True
        if not self._is_done and not self._wait(timeout):
            raise RequestTimeout(
                f"not known to be stored within {seconds(timeout or 0):g} seconds; it may still be"
            )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _wait(self, timeout: Duration | None) -> bool:
        if self._failures is not None and self._failures.no_answers is not None:
            raise self._failures.no_answers
        lock = threading.Lock()
        lock.acquire()
        with _lock:
            if self._is_done:
                return True
            if self._waiting is None:
                self._waiting = []
            self._waiting.append(lock)
        limit = -1 if timeout is None else min(max(seconds(timeout), 0), threading.TIMEOUT_MAX)
        return lock.acquire(timeout=limit)

    def done(self) -> bool:
        """Whether the answer has come.

        Example::

            waiting = [each for each in publications if not each.done()]
        """
        return self._is_done

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(publication)`` in the client's thread when the answer has come; it must not block.

        An error that it raises is logged.

        Example::

            client.publish_nowait("orders", b"x").add_done_callback(lambda p: print(p.result()))
        """
        with _lock:
            if not self._is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        self._tell(callback)


class Publication(Pending[Receipt]):
    """A publish that may not be answered yet. ``result()`` waits for its receipt, or raises its error."""

    __slots__ = ()

    @property
    def offset(self) -> int | None:
        """Waits for the receipt; None for a delayed message."""
        return self.result().offset

    @property
    def partition(self) -> int | None:
        return self.result().partition

    @property
    def id(self) -> uuid.UUID:
        return self.result().id


# --- what fails while nobody waits --------------------------------------------------------------------
Subject = Pending[Any] | asyncio.Future[Any] | None


@dataclass(slots=True, eq=False)
class _Failure:
    error: HeadraceError
    subject: Subject
    """What a caller may still look at."""
    is_logged: bool = False

    @property
    def is_seen(self) -> bool:
        if isinstance(self.subject, asyncio.Future):
            # True until the exception is asked for; asyncio itself logs by it.
            return not getattr(self.subject, "_log_traceback", True)
        return self.subject is not None and self.subject.is_seen


class Failures:
    """Errors that nobody has seen. Filled on the loop; may be taken in any thread."""

    def __init__(self) -> None:
        self._kept: list[_Failure] = []
        self._more = 0
        self._timer: asyncio.TimerHandle | None = None
        self.no_answers: HeadraceError | None = None
        """In a forked child: why nothing that was not answered before is ever answered here."""

    def add(self, error: HeadraceError, subject: Subject = None) -> None:
        """A call has failed. If nobody looks at the ``subject``, it is logged soon, and raised later."""
        if len(self._kept) >= KEPT_MAX:
            self._kept = [each for each in self._kept if not each.is_seen]
        if len(self._kept) < KEPT_MAX:
            self._kept.append(_Failure(error, subject))
        else:
            self._more += 1
        if self._timer is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # it is being closed, which logs it
            self._timer = loop.call_later(LOG_AFTER_S, self._log)

    def _log(self) -> None:
        self._timer = None
        new = [each for each in self._kept if not each.is_logged and not each.is_seen]
        for each in new:
            each.is_logged = True
        if new:
            logger.error("failed, and nobody waited for it: %s%s", new[0].error, _others(len(new)))

    def take(self) -> HeadraceError | None:
        """The first error, and a note about the others; they are not raised again."""
        if self._timer is not None:
            self._timer.cancel()
        self._log()
        kept, self._kept = self._kept, []
        more, self._more = self._more, 0
        unseen = [each for each in kept if not each.is_seen]
        for each in unseen:
            if isinstance(each.subject, asyncio.Future):
                each.subject.exception()  # asyncio need not log it again
        if not unseen:
            return None
        error = unseen[0].error
        if len(unseen) + more > 1:
            error.add_note(f"nobody waited for it{_others(len(unseen) + more)}")
        return error

    def check(self) -> None:
        """Raise the first error that nobody has seen."""
        error = self.take()
        if error is not None:
            raise error


def _others(count: int) -> str:
    return "" if count == 1 else f" (and {count - 1} more failed)"


def note_failure(error: BaseException | None, failure: HeadraceError) -> None:
    """At the end of ``with``: raise what closing raised, but never in place of an error that is on its way."""
    if error is None:
        raise failure
    error.add_note(f"and when it was closed: {failure}")


def settle(
    future: asyncio.Future[Any] | Future[Any],
    value: Any,
    error: HeadraceError | None,
    failures: Failures | None = None,
) -> None:
    """Set the result of a call that answers through a callback."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        if failures is not None and isinstance(future, asyncio.Future):
            failures.add(error, future)
    else:
        future.set_result(value)
