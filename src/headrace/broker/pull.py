"""A request for messages: up to so many, now or within some time, and then it is over.

For callers that have no connection to push into (HTTP). While it waits, a pull is a member like any
other and takes its turn; once it has something it withdraws, and what it got stays out under its
lease until it is settled or the deadline passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.broker.delivery import Delivery, Member
from headrace.broker.subscription import Subscription
from headrace.clock import Loop
from headrace.errors import HeadraceError

Done = Callable[[list[Delivery], HeadraceError | None], None]


class Pull:
    def __init__(
        self, subscription: Subscription, loop: Loop, limit: int, *, auto_ack: bool, done: Done
    ):
        self._subscription = subscription
        self._loop = loop
        self._limit = limit
        self._member = Member("pull", self, limit, auto_ack)
        self._done: Done | None = done
        self._got: list[Delivery] = []
        self._count = 0
        self._timer: Any = None
        self._ending = False

    def start(self, wait_s: float) -> None:
        self._subscription.join(self._member)
        self._subscription.pump()
        if self._got or wait_s <= 0:
            self._finish()
        else:
            self._timer = self._loop.call_later(wait_s, self._finish)

    def cancel(self) -> None:
        """Nobody waits any more: what it may have got goes back."""
        if self._done is None:
            return
        self._done = None
        self._stop()
        self._subscription.leave(self._member, count_attempt=False)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self, error: HeadraceError | None = None) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self._stop()
        self._subscription.withdraw(self._member)
        done(self._got, error)

    # --- Sink -------------------------------------------------------------------------------
    def room(self) -> int:
        return self._limit - self._count if self._done is not None else 0

    def deliver(self, delivery: Delivery) -> None:
        self._got.append(delivery)
        self._count += len(delivery)
        if self._timer is not None and not self._ending:
            # Not at once: the same round may have more for it.
            self._ending = True
            self._loop.call_soon(self._finish)

    def closed(self, error: HeadraceError | None) -> None:
        self._finish(error)
