"""A request for messages: up to a number, now or within some time, and then it is over.

For callers that have no connection to push into (HTTP). While it waits, a pull is a member like any
other and takes its turn; once it has messages it withdraws, and they stay out under their
lease until it is settled, given back, or the deadline passes.

Nothing is acknowledged before the answer goes out: a caller that asked for "acknowledged on delivery"
calls ``ack`` then, and ``cancel`` when the client is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from headrace import limits
from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.subscription import Subscription
from headrace.clock import Loop
from headrace.errors import HeadraceError, StaleDelivery

Done = Callable[[list[Delivery], HeadraceError | None], None]
FETCH_WAIT_S = 1.0
"""How long a pull that would not wait does so, while a log fetches messages for it."""


class Pull:
    def __init__(
        self,
        subscription: Subscription,
        loop: Loop,
        limit: int,
        done: Done,
        by_id: dict[int, Lease] | None = None,
        name: str = "pull",
    ):
        """``by_id`` is the register in which its leases can be found until they end; ``name`` is for people."""
        self._subscription = subscription
        self._loop = loop
        self._limit = limit
        self._member = Member(name, self, limit, by_id=by_id)
        self._done: Done | None = done
        self._got: list[Delivery] = []
        self._count = 0
        self._bytes = 0
        self._timer: Any = None
        self._ending = self._waits = False

    def start(self, wait_s: float) -> None:
        self._waits = wait_s > 0
        self._subscription.join(self._member)
        self._subscription.pump()
        if not self._got and self._subscription.is_fetching:
            wait_s = max(wait_s, FETCH_WAIT_S)
        if self._got or wait_s <= 0:
            self.finish()
        elif self._done is not None:
            self._timer = self._loop.call_later(wait_s, self.finish)

    def nothing_comes(self) -> None:
        """All nodes have said what they have."""
        if not self._got and not self._waits:
            self.finish()

    def finish(self, error: HeadraceError | None = None) -> None:
        """End with the messages so far, perhaps none."""
        done, self._done = self._done, None
        if done is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._subscription.closed:  # which counts its members while it closes
            self._subscription.withdraw(self._member)
        done(self._got, error)

    def ack(self) -> None:
        """Everything it got is done."""
        for lease in list(self._member.leases.values()):
            with contextlib.suppress(StaleDelivery):  # it was moved meanwhile: it comes again
                lease.subscription.ack_lease(lease.id)

    def cancel(self) -> None:
        """The client is gone: the messages go back, and this was not a delivery."""
        self._got = []
        self.finish()
        for lease in list(self._member.leases.values()):
            for index in lease.out():
                with contextlib.suppress(StaleDelivery):
                    lease.subscription.release(lease.id, lease.offsets[index])

    # --- Sink -------------------------------------------------------------------------------
    def room(self) -> int:
        """It takes one more delivery (``LEASE_BYTES_MAX``) until it has that many bytes: the answer is one piece."""
        if self._done is None or self._bytes >= limits.LEASE_BYTES_MAX:
            return 0
        return self._limit - self._count

    def deliver(self, delivery: Delivery) -> None:
        self._got.append(delivery)
        self._count += len(delivery)
        self._bytes += 0 if delivery.lease is None else delivery.lease.bytes
        if self._timer is not None and not self._ending:
            # Not at once: the same round may have more for it.
            self._ending = True
            self._loop.call_soon(self.finish)

    def closed(self, error: HeadraceError | None) -> None:
        self.finish(error)
