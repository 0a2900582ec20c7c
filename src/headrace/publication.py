"""The result of ``publish_nowait``: a publish whose receipt may not have arrived yet."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from headrace.errors import HeadraceError, RequestTimeout
from headrace.model import Receipt
from headrace.times import Duration, seconds

_lock = threading.Lock()
"""One lock for all publications: each holds it only for a moment, and callers wait for few of them."""


def renew_lock() -> None:
    """In a forked child: the thread that held the lock does not exist there."""
    global _lock
    _lock = threading.Lock()


class Publication:
    """A publish that may not be answered yet. ``result()`` waits for its receipt, or raises its error.

    A ``concurrent.futures.Future`` has a lock and a condition of its own. Callers wait for few
    publications, so a lock to wait on is made only when a caller waits.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_receipt", "_waited", "_waiting")

    def __init__(self) -> None:
        self._receipt: Receipt | None = None
        self._error: HeadraceError | None = None
        self._is_done = False
        self._waited = False
        self._waiting: list[threading.Lock] | None = None
        """One for each thread that waits; it is released when the answer comes."""
        self._callbacks: list[Callable[[Publication], object]] | None = None

    def settle(self, receipt: Receipt | None, error: HeadraceError | None) -> None:
        """Called by the client, once."""
        self._receipt, self._error = receipt, error
        with _lock:
            self._is_done = True
            waiting, callbacks = self._waiting, self._callbacks
        for lock in waiting or ():
            lock.release()
        for callback in callbacks or ():
            callback(self)

    def result(self, timeout: Duration | None = None) -> Receipt:
        self._waited = True
        if not self._is_done and not self._wait(timeout):
            raise RequestTimeout(
                f"not known to be stored within {seconds(timeout or 0):g} seconds; it may still be"
            )
        if self._error is not None:
            raise self._error
        assert self._receipt is not None
        return self._receipt

    def _wait(self, timeout: Duration | None) -> bool:
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
        return self._is_done

    def add_done_callback(self, callback: Callable[[Publication], object]) -> None:
        """Called in the client's thread; it must not block."""
        with _lock:
            if not self._is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

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
