"""Where messages arrive in the caller's process: bounded, iterable, closed when it is over.

A :class:`Channel` is for threads, an :class:`AsyncChannel` for asyncio; both are sinks of the engine.
A plain subscribe fills it up to its capacity and waits in the log for more room. A consumer of a
subscription is a channel whose messages can be settled (:class:`Consumer`, :class:`AsyncConsumer`).

Rules for the threaded kind:
- The loop's thread only ever appends to ``_items``; callers only ever take from it. A deque makes
  both safe without a lock; the condition is touched only when somebody has to wait.
- Settlements are gathered in a deque and carried to the loop together: one wake-up for many acks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from headrace.broker.delivery import Delivery, Member
from headrace.broker.subscription import Subscription
from headrace.errors import Closed, HeadraceError, RequestTimeout, StaleDelivery
from headrace.model import Message, Settling

logger = logging.getLogger("headrace.broker")
_ACK, _NACK, _EXTEND, _UP_TO = range(4)


def _timed_out(timeout: float) -> RequestTimeout:
    return RequestTimeout(f"no message came within {timeout} seconds", code="no_message")


class _Arrivals:
    """The sink's side: what every kind of channel has in common."""

    def __init__(self, topic: str, capacity: int, settling: Settling | None = None):
        self.topic = topic
        self.capacity = capacity
        self.is_closed = False
        self.error: HeadraceError | None = None
        """Why it was closed, when that was not asked for."""
        self._items: deque[Message] = deque()
        self._settling = settling
        self._starved = False
        self._refill: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._items)

    def room(self) -> int:
        free = self.capacity - len(self._items)
        self._starved = free <= 0
        return free

    def deliver(self, delivery: Delivery) -> None:
        self._items.extend(delivery.messages(self._settling))
        self._arrived()

    def closed(self, error: HeadraceError | None) -> None:
        self.is_closed = True
        if not isinstance(error, Closed):
            self.error = error
        self._arrived()

    def _arrived(self) -> None:
        raise NotImplementedError

    def _end(self) -> HeadraceError:
        return self.error or Closed(f"the channel of {self.topic!r} is closed")


class Channel(_Arrivals):
    """Messages for threads: iterate, or ``get(timeout)``. Ends when it is closed."""

    def __init__(
        self,
        topic: str,
        capacity: int,
        call: Callable[..., Any],
        settling: Settling | None = None,
    ):
        super().__init__(topic, capacity, settling)
        self._call = call
        self._condition = threading.Condition()
        self._sleepers = 0
        self._on_close: Callable[[Channel], None] = lambda channel: None

    def _arrived(self) -> None:
        if self._sleepers:
            with self._condition:
                self._condition.notify_all()

    def get(self, timeout: float | None = None) -> Message:
        """The next message. :class:`RequestTimeout` after ``timeout`` seconds without one,
        :class:`Closed` when the channel is closed and empty."""
        try:
            message = self._items.popleft()
        except IndexError:
            message = self._wait(timeout)
        if self._starved and len(self._items) <= self.capacity // 2:
            self._starved = False
            self._call(self._refill)
        return message

    def get_nowait(self) -> Message | None:
        """The next message if one is here."""
        try:
            return self.get(0)
        except RequestTimeout:
            return None

    def _wait(self, timeout: float | None) -> Message:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            self._sleepers += 1
            try:
                while True:
                    try:
                        return self._items.popleft()
                    except IndexError:
                        pass
                    if self.is_closed:
                        raise self._end()
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        assert timeout is not None
                        raise _timed_out(timeout)
                    self._condition.wait(left)
            finally:
                self._sleepers -= 1

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.get()
            except Closed:
                return

    def close(self) -> None:
        """No more messages; who waits is woken. What has arrived can still be taken."""
        if not self.is_closed:
            self._on_close(self)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer(Channel):
    """A member of a subscription, for threads."""

    def __init__(
        self, subscription: Subscription, name: str, prefetch: int, call: Callable[..., Any]
    ):
        super().__init__(subscription.pattern, prefetch, call, settling=self)
        self.subscription = subscription
        self.name = subscription.name
        self.member = Member(name, self, prefetch)
        self._settled: deque[tuple[int, Message, Any, str]] = deque()
        self._flushing = False

    def room(self) -> int:
        return self.capacity  # the prefetch of the member is what bounds it

    def _settle(self, kind: int, message: Message, argument: Any = None, reason: str = "") -> None:
        if not message.lease.is_out(message.offset):
            raise StaleDelivery(
                f"the delivery of offset {message.offset} has ended: it was settled or timed out"
            )
        self._settled.append((kind, message, argument, reason))
        if not self._flushing:
            self._flushing = True
            self._call(self._carry_out)

    def _carry_out(self) -> None:
        """On the loop: do what was asked for since the last time."""
        self._flushing = False
        subscription, settled = self.subscription, self._settled
        while settled:
            _carry_out(subscription, *settled.popleft())

    def ack(self, message: Message) -> None:
        self._settle(_ACK, message)

    def ack_many(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._settle(_ACK, message)

    def ack_up_to(self, message: Message) -> None:
        """The message and all that this consumer holds of its partition before it."""
        self._settle(_UP_TO, message)

    def nack(self, message: Message, delay: float | None = None, reason: str = "nack") -> None:
        self._settle(_NACK, message, delay, reason)

    def extend(self, message: Message, seconds: float | None = None) -> None:
        self._settle(_EXTEND, message, seconds)

    def leave(self) -> None:
        """On the loop: settle what was asked for, give back what was not begun, go."""
        self._carry_out()
        _leave(self.subscription, self.member, self._items)


class AsyncChannel(_Arrivals):
    """Messages for asyncio: ``async for``, or ``await get(timeout)``."""

    def __init__(self, topic: str, capacity: int, settling: Settling | None = None):
        super().__init__(topic, capacity, settling)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._on_close: Callable[[AsyncChannel], None] = lambda channel: None

    def _arrived(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def get(self, timeout: float | None = None) -> Message:
        """The next message. :class:`RequestTimeout` after ``timeout`` seconds without one,
        :class:`Closed` when the channel is closed and empty."""
        if not self._items:
            if timeout is None:
                await self._wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._wait()
                if not self._items:
                    raise _timed_out(timeout)
        message = self._items.popleft()
        if self._starved and len(self._items) <= self.capacity // 2:
            self._starved = False
            self._refill()
        return message

    async def _wait(self) -> None:
        while not self._items:
            if self.is_closed:
                raise self._end()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.get()
            except Closed:
                return

    def close(self) -> None:
        if not self.is_closed:
            self._on_close(self)

    async def __aenter__(self) -> AsyncChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncConsumer(AsyncChannel):
    """A member of a subscription, for asyncio. Settling takes effect at once."""

    def __init__(self, subscription: Subscription, name: str, prefetch: int):
        super().__init__(subscription.pattern, prefetch, settling=self)
        self.subscription = subscription
        self.name = subscription.name
        self.member = Member(name, self, prefetch)

    def room(self) -> int:
        return self.capacity

    def ack(self, message: Message) -> None:
        self.subscription.ack(message.lease.id, message.offset)

    def ack_many(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.subscription.ack(message.lease.id, message.offset)

    def ack_up_to(self, message: Message) -> None:
        self.subscription.ack_up_to(message.lease.id, message.offset)

    def nack(self, message: Message, delay: float | None = None, reason: str = "nack") -> None:
        self.subscription.nack(message.lease.id, message.offset, delay, reason)

    def extend(self, message: Message, seconds: float | None = None) -> None:
        self.subscription.extend(message.lease.id, seconds)

    def leave(self) -> None:
        _leave(self.subscription, self.member, self._items)


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


def _leave(subscription: Subscription, member: Member, unread: deque[Message]) -> None:
    """What was delivered but never taken out of the channel does not count as an attempt."""
    for message in unread:
        with contextlib.suppress(StaleDelivery):
            subscription.release(message.lease.id, message.offset)
    unread.clear()
    subscription.leave(member)
