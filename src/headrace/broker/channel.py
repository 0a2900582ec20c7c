"""Channels of the embedded broker: sinks of the engine, and members of subscriptions.

A plain subscribe fills a channel up to its capacity and waits in the log for more room. A consumer is
a channel whose messages can be settled. For threads, settlements are gathered in a deque and carried
to the loop together: one wake-up for many acks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from headrace import limits
from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.subscription import Subscription
from headrace.channels import Arrivals, AsyncChannel, Channel
from headrace.errors import StaleDelivery
from headrace.model import Message, Settling, check_reason, check_seconds, not_a_delivery

logger = logging.getLogger("headrace.broker")
_ACK, _NACK, _EXTEND, _UP_TO = range(4)


class _Follows(Arrivals):
    def deliver(self, delivery: Delivery) -> None:
        self.put(delivery.messages())


class PlainChannel(_Follows, Channel):
    """Every message of a topic from now on, for threads."""


class AsyncPlainChannel(_Follows, AsyncChannel):
    """Every message of a topic from now on, for asyncio."""


class _Consumes(Arrivals):
    """The common part of both consumers: a member of a subscription."""

    subscription: Subscription
    name: str
    member: Member

    def _become_member(self, subscription: Subscription, name: str, prefetch: int) -> None:
        self.subscription = subscription
        self.name = subscription.name
        self.member = Member(name, self, prefetch)

    def room(self) -> int:
        return self.capacity  # the member's prefetch is the bound

    def deliver(self, delivery: Delivery) -> None:
        self.put(delivery.messages(cast(Settling, self)))

    def ack(self, message: Message) -> None:
        raise NotImplementedError

    def ack_many(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.ack(message)

    def leave(self) -> None:
        """On the loop: give back the messages that nobody has taken, and go.

        A message that was never taken out of the channel does not count as an attempt.
        """
        for message in self.drain():
            with contextlib.suppress(StaleDelivery):
                self.subscription.release(message.lease.id, message.offset)
        self.subscription.leave(self.member)


class EmbeddedConsumer(_Consumes, Channel):
    """A member of a subscription, for threads."""

    def __init__(
        self, subscription: Subscription, name: str, prefetch: int, call: Callable[..., Any]
    ):
        Channel.__init__(self, subscription.pattern, prefetch, call)
        self._become_member(subscription, name, prefetch)
        self._settled: deque[tuple[int, Message, Any, str]] = deque()
        self._flushing = False

    def get(self, timeout: float | None = None) -> Message:
        """The next message that is still ours; one that timed out in the channel comes again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        message = super().get(timeout)
        while not message.lease.is_out(message.offset):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            message = super().get(left)
        return message

    def _settle(self, kind: int, message: Message, argument: Any = None, reason: str = "") -> None:
        if not _lease_of(message).is_out(message.offset):
            raise StaleDelivery(
                f"the delivery of offset {message.offset} has ended: it was settled or timed out"
            )
        self._settled.append((kind, message, argument, reason))
        if not self._flushing:
            self._flushing = True
            self._call(self._carry_out)

    def _carry_out(self) -> None:
        """On the loop: carry out the settlements since the last time."""
        self._flushing = False
        subscription, settled = self.subscription, self._settled
        while settled:
            kind, message, argument, reason = settled.popleft()
            last = message if kind != _ACK else _end_of_run(message, settled)
            if last is message:
                _carry_out(subscription, kind, message, argument, reason)
            else:
                _ack_run(subscription, message, last)

    def ack(self, message: Message) -> None:
        self._settle(_ACK, message)

    def ack_up_to(self, message: Message) -> None:
        """The message and all that this consumer holds of its partition before it."""
        self._settle(_UP_TO, message)

    def nack(self, message: Message, delay: float | None = None, reason: str = "nack") -> None:
        if delay is not None:
            check_seconds("delay", delay, limits.DELAY_S_MAX)
        self._settle(_NACK, message, delay, check_reason(reason))

    def extend(self, message: Message, seconds: float | None = None) -> None:
        if seconds is not None:
            check_seconds("seconds", seconds, limits.ACK_TIMEOUT_S_MAX)
        self._settle(_EXTEND, message, seconds)

    def leave(self) -> None:
        self._carry_out()
        super().leave()


class AsyncEmbeddedConsumer(_Consumes, AsyncChannel):
    """A member of a subscription, for asyncio. Settling takes effect at once."""

    def __init__(self, subscription: Subscription, name: str, prefetch: int):
        AsyncChannel.__init__(self, subscription.pattern, prefetch)
        self._become_member(subscription, name, prefetch)

    async def get(self, timeout: float | None = None) -> Message:
        """The next message that is still ours; one that timed out in the channel comes again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        message = await super().get(timeout)
        while not message.lease.is_out(message.offset):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            message = await super().get(left)
        return message

    def ack(self, message: Message) -> None:
        self.subscription.ack(_lease_of(message).id, message.offset)

    def ack_up_to(self, message: Message) -> None:
        self.subscription.ack_up_to(_lease_of(message).id, message.offset)

    def nack(self, message: Message, delay: float | None = None, reason: str = "nack") -> None:
        self.subscription.nack(_lease_of(message).id, message.offset, delay, reason)

    def extend(self, message: Message, seconds: float | None = None) -> None:
        self.subscription.extend(_lease_of(message).id, seconds)


def _lease_of(message: Message) -> Lease:
    lease: Lease | None = message.lease
    if lease is None:
        raise not_a_delivery()
    return lease


def _end_of_run(message: Message, settled: deque[tuple[int, Message, Any, str]]) -> Message:
    """Take the acks that follow in the same lease without a gap; returns the last one's message.

    Most consumers acknowledge in order, and a run costs hardly more than one ack.
    """
    lease = message.lease
    if type(lease.offsets) is range:
        step = lease.offsets.step
        while settled:
            kind, following, _, _ = settled[0]
            if (
                kind != _ACK
                or following.lease is not lease
                or following.offset != message.offset + step
            ):
                break
            settled.popleft()
            message = following
    return message


def _ack_run(subscription: Subscription, first: Message, last: Message) -> None:
    place = f"{first.topic}/{first.partition}@{first.offset} to {last.offset}"
    try:
        stale = subscription.ack_run(first.lease.id, first.offset, last.offset)
    except StaleDelivery as error:
        logger.info("%s: %s", place, error)
    else:
        if stale:
            logger.info("%s: %d of these were not out any more", place, stale)


def _carry_out(
    subscription: Subscription, kind: int, message: Message, argument: Any, reason: str
) -> None:
    lease_id, offset = message.lease.id, message.offset
    try:
        if kind == _ACK:
            subscription.ack(lease_id, offset)
        elif kind == _NACK:
            subscription.nack(lease_id, offset, argument, reason)
        elif kind == _EXTEND:
            subscription.extend(lease_id, argument)
        else:
            subscription.ack_up_to(lease_id, offset)
    except StaleDelivery as error:
        # It ended between the caller's look and now; the message comes again, as promised.
        logger.info("%s/%d@%d: %s", message.topic, message.partition, offset, error)
