"""The consumers of the embedded broker: channels that are members of subscriptions."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from headrace.broker.delivery import Delivery, Lease, Member
from headrace.broker.subscription import Subscription
from headrace.channels import ACK, EXTEND, NACK, REPLY, Arrivals, AsyncConsumer, Consumer
from headrace.errors import HeadraceError, StaleDelivery
from headrace.model import Message, Settling, not_a_delivery, parse_id
from headrace.times import Duration, seconds


class _Embedded(Arrivals):
    """The common part of both consumers: a member of a subscription."""

    subscription: Subscription
    name: str
    member: Member
    replying: Callable[..., object]
    """Hands a reply to its requester."""

    def _become_member(self, subscription: Subscription, name: str, prefetch: int) -> None:
        self.subscription = subscription
        self.name = self.subscription_name = subscription.name
        self.member = Member(name, self, prefetch)

    def room(self) -> int:
        return self.capacity  # the member's prefetch is the bound

    def deliver(self, delivery: Delivery) -> None:
        self.put(delivery.messages(cast(Settling, self)))

    def _lease_for(self, kind: int, message: Message) -> Lease:
        lease: Lease | None = message.lease
        if lease is None:
            raise not_a_delivery("join a subscription to acknowledge messages")
        return lease

    def _carry_out(
        self, kind: int, lease: Lease, message: Message, argument: Any, reason: str
    ) -> None:
        if kind == REPLY:
            self.replying(parse_id(argument["to"]), argument["value"], argument["headers"])
            return
        subscription, offset = self.subscription, message.offset
        if kind == ACK:
            subscription.ack(lease.id, offset)
        elif kind == NACK:
            subscription.nack(lease.id, offset, argument, reason)
        elif kind == EXTEND:
            subscription.extend(lease.id, argument)
        else:
            subscription.ack_up_to(lease.id, offset)

    def leave(self) -> None:
        """On the loop: give back the messages that nobody has taken, and go."""
        self.retire()
        self.subscription.leave(self.member)
        self.closed(None)

    def retire(self) -> None:
        """On the loop: take nothing more, and give back the messages that nobody has taken.

        A message that was never taken out of the channel does not count as an attempt.
        """
        self.member.prefetch = 0
        for message in self.drain():
            with contextlib.suppress(StaleDelivery):
                self.subscription.release(message.lease.id, message.offset)


class EmbeddedConsumer(_Embedded, Consumer):
    on_failure: Callable[[HeadraceError], None] = staticmethod(lambda error: None)
    """Called on the loop, with the error of a settlement for which nobody waits."""

    def __init__(
        self, subscription: Subscription, name: str, prefetch: int, call: Callable[..., Any]
    ):
        Consumer.__init__(self, subscription.pattern, prefetch, call)
        self._become_member(subscription, name, prefetch)

    def get(self, timeout: Duration | None = None) -> Message:
        # The next message that is still ours; one that timed out in the channel comes again.
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        message = super().get(timeout)
        while not message.lease.is_out(message.offset):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            message = super().get(left)
        return message

    def _lease_for(self, kind: int, message: Message) -> Lease:
        lease: Lease | None = message.lease
        if lease is None:
            raise not_a_delivery("join a subscription to acknowledge messages")
        if not lease.is_out(message.offset):
            raise StaleDelivery(
                f"the delivery of offset {message.offset} has ended: it was settled or timed out"
            )
        return lease

    def ack(
        self, message: Message
    ) -> None:  # as _settle does, with fewer calls: it is the hot path
        lease = message.lease
        if lease is None or not lease.is_out(message.offset):
            lease = self._lease_for(ACK, message)
        self._settled.append((ACK, lease, message, None, ""))
        if not self._carrying:
            self._carrying = True
            self._call(self.carry_out)

    def carry_out(self) -> None:
        self._carrying = False
        settled = self._settled
        while settled:
            kind, lease, message, argument, reason = settled.popleft()
            last = message if kind != ACK else _end_of_run(message, settled)
            if last is not message:
                self._ack_run(message, last)
                continue
            try:
                self._carry_out(kind, lease, message, argument, reason)
            except HeadraceError as error:
                # It ended between the caller's look and now; the message comes again, as promised.
                self.on_failure(error)

    def _ack_run(self, first: Message, last: Message) -> None:
        try:
            stale = self.subscription.ack_run(first.lease.id, first.offset, last.offset)
        except StaleDelivery as error:
            self.on_failure(error)
        else:
            if stale:
                place = f"{first.topic}/{first.partition}@{first.offset} to {last.offset}"
                self.on_failure(
                    StaleDelivery(
                        f"{place}: {stale} of these were not out any more; they come again"
                    )
                )

    def leave(self) -> None:
        self.carry_out()
        super().leave()


class AsyncEmbeddedConsumer(_Embedded, AsyncConsumer):
    def __init__(self, subscription: Subscription, name: str, prefetch: int):
        AsyncConsumer.__init__(self, subscription.pattern, prefetch)
        self._become_member(subscription, name, prefetch)

    def ack(
        self, message: Message
    ) -> None:  # as _settle does, with fewer calls: it is the hot path
        lease = message.lease or self._lease_for(ACK, message)
        self.subscription.ack(lease.id, message.offset)

    async def get(self, timeout: Duration | None = None) -> Message:
        # The next message that is still ours; one that timed out in the channel comes again.
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        message = await super().get(timeout)
        while not message.lease.is_out(message.offset):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            message = await super().get(left)
        return message


def _end_of_run(message: Message, settled: deque[Any]) -> Message:
    """Take the acks that follow in the same lease without a gap; returns the last one's message.

    Most consumers acknowledge in order, and a run costs hardly more than one ack.
    """
    lease = message.lease
    if type(lease.offsets) is range:
        step = lease.offsets.step
        while settled:
            kind, other, following, _, _ = settled[0]
            if kind != ACK or other is not lease or following.offset != message.offset + step:
                break
            settled.popleft()
            message = following
    return message
