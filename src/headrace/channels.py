"""Bounded, iterable queues in which messages arrive in the caller's process.

A :class:`Channel` is for threads, an :class:`AsyncChannel` for asyncio. The embedded broker and the
clients fill them; users see the same thing in both places.

Rules for :class:`Channel`: the loop's thread only appends to ``_items``, and callers only take from it.
A deque makes both safe without a lock; the condition is used only when a caller waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace import limits, tracing
from headrace.contents import check_headers, check_value
from headrace.errors import Closed, HeadraceError, InvalidArgument, RequestTimeout
from headrace.model import REPLY_TO, Message, check_reason, parse_id
from headrace.times import Duration, check_seconds, seconds

Opened_co = TypeVar("Opened_co", bound="AsyncChannel", covariant=True)
LOOK_S = 1.0
"""A signal that arrives just before a thread waits for a lock does not wake the thread: Ctrl-C would have
no effect until the next message. So no thread waits for longer than this without a check."""


def _timed_out(timeout: Duration) -> RequestTimeout:
    return RequestTimeout(f"no message came within {seconds(timeout):g} seconds", code="no_message")


def check_count(name: str, value: object) -> None:
    """Refuse a count that is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} is a whole number above 0, not {value!r}")


def check_prefetch(prefetch: object) -> None:
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise InvalidArgument(f"prefetch is a whole number, not {prefetch!r}")
    if not 1 <= prefetch <= limits.PREFETCH_MAX:
        raise InvalidArgument(f"prefetch is between 1 and {limits.PREFETCH_MAX}, not {prefetch}")


class Arrivals:
    """The common part of all channels: the side that fills it."""

    def __init__(self, topic: str, capacity: int):
        check_count("capacity", capacity)
        self.topic = topic
        self.capacity = capacity
        self.subscription_name: str | None = None
        """None: it is a plain channel."""
        self.topic_created = False
        """The topic of a plain channel did not exist: it was created now, and is empty."""
        self.is_closed = False
        self.is_halted = False
        self.error: HeadraceError | None = None
        """Why it was closed, if the caller did not close it."""
        self._items: deque[Message] = deque()
        self._starved = False
        self.refill: Callable[[], None] = lambda: None
        self.on_close: Callable[[Any], None] = lambda channel: None

    def __len__(self) -> int:
        return len(self._items)

    def room(self) -> int:
        if len(self._items) >= self.capacity:
            self._starved = True
        # Check again after setting the flag: a thread that took a message in between may have missed it.
        free = self.capacity - len(self._items)
        if free > 0:
            self._starved = False
        return free

    def want_refill(self) -> None:
        """Called on the loop: call ``refill`` when half of the channel is free."""
        self._starved = True
        if len(self._items) <= self.capacity // 2:
            self._starved = False
            self.refill()

    def put(self, messages: Iterable[Message]) -> None:
        if self.is_closed:
            return  # the broker did not know yet; what was for a member goes to another one
        if tracing.active is not None:
            messages = tracing.delivered(messages, self.subscription_name)
        self._items.extend(messages)
        self._arrived()

    def deliver(self, delivery: Any) -> None:
        """Take a delivery of the embedded broker (``broker.delivery.Delivery``)."""
        self.put(delivery.messages())

    def drain(self) -> list[Message]:
        """Remove and return all messages that no caller has taken."""
        taken: list[Message] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._items.popleft())
        return taken

    def clear(self) -> None:
        self._items.clear()

    def give_back(self, message: Message) -> None:
        """Put back a message that was taken by mistake."""
        self._items.appendleft(message)

    def halt(self) -> None:
        """Stop every reader. Messages that no reader has taken stay, so that they can be given back."""
        self.is_halted = True
        self._arrived()

    def close(self) -> None:
        """Accept no more messages and wake waiting callers. Messages that have arrived can still be taken.

        Example::

            channel.close()
        """
        if not self.is_closed:
            self.on_close(self)

    def closed(self, error: HeadraceError | None) -> None:
        self.is_closed = True
        if not isinstance(error, Closed):
            self.error = error
        self._arrived()

    def _arrived(self) -> None:
        raise NotImplementedError

    def _end(self) -> HeadraceError:
        return self.error or Closed(f"the channel of {self.topic!r} is closed")


class Channel(Arrivals):
    """Messages for threads: iterate, or ``get(timeout)``. Ends when it is closed."""

    def __init__(
        self,
        topic: str,
        capacity: int,
        call: Callable[..., Any],
    ):
        super().__init__(topic, capacity)
        self._call = call
        self._condition = threading.Condition()
        self._sleepers = 0

    def _arrived(self) -> None:
        if self._sleepers:
            with self._condition:
                self._condition.notify_all()

    def forked(self, error: Closed) -> None:
        """Called in a child process: the messages, and the thread that brings them, belong to the parent."""
        self._condition = threading.Condition()
        self._sleepers = 0
        self._items = deque()
        self.is_closed = True
        self.error = error

    def get(self, timeout: Duration | None = None) -> Message:
        """The next message. :class:`RequestTimeout` after ``timeout`` seconds without one,
        :class:`Closed` when the channel is closed and empty.

        Example::

            message = channel.get(timeout=5)
        """
        message: Message | None
        try:
            message = self._items.popleft()
        except IndexError:
            message = None  # wait outside of this block: an error would show the IndexError first
        if message is None:
            message = self._wait(timeout)
        if self._starved and len(self._items) <= self.capacity // 2:
            self._starved = False
            self._call(self.refill)
        return message

    def get_nowait(self) -> Message | None:
        """The next message, if one has arrived.

        Example::

            while (message := channel.get_nowait()) is not None:
                print(message.text())
        """
        try:
            return self.get(0)
        except RequestTimeout:
            return None

    def _wait(self, timeout: Duration | None) -> Message:
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        with self._condition:
            self._sleepers += 1
            try:
                while True:
                    try:
                        return self._items.popleft()
                    except IndexError:
                        pass
                    if self.is_closed or self.is_halted:
                        raise self._end()
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        assert timeout is not None
                        raise _timed_out(timeout)
                    self._condition.wait(LOOK_S if left is None else min(left, LOOK_S))
            finally:
                self._sleepers -= 1

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                yield self.get()
            except Closed:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChannel(Arrivals):
    """Messages for asyncio: ``async for``, or ``await get(timeout)``."""

    def __init__(self, topic: str, capacity: int):
        super().__init__(topic, capacity)
        self._waiters: deque[asyncio.Future[None]] = deque()

    def _arrived(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def get(self, timeout: Duration | None = None) -> Message:
        """The next message. :class:`RequestTimeout` after ``timeout`` seconds without one,
        :class:`Closed` when the channel is closed and empty.

        Example::

            message = await channel.get(timeout=5)
        """
        if not self._items:
            if timeout is None:
                await self._wait()
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds(timeout)):
                        await self._wait()
                if not self._items:
                    raise _timed_out(timeout)
        message = self._items.popleft()
        if self._starved and len(self._items) <= self.capacity // 2:
            self._starved = False
            self.refill()
        return message

    async def _wait(self) -> None:
        while not self._items:
            if self.is_closed or self.is_halted:
                raise self._end()
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:  # out of time: a program may ask so for days
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
                raise

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                yield await self.get()
            except Closed:
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Opening(Coroutine[Any, Any, Opened_co]):
    """A channel that is not open yet: ``await`` it, enter it with ``async with``, or iterate with ``async for``.

    It is also a coroutine, so ``asyncio.create_task`` and ``asyncio.wait_for`` take it.
    """

    def __init__(self, opening: Coroutine[Any, Any, Opened_co]):
        self._opening = opening
        self._channel: Opened_co | None = None

    def send(self, value: Any) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    def __await__(self) -> Generator[Any, Any, Opened_co]:
        return self._opening.__await__()

    async def __aenter__(self) -> Opened_co:
        self._channel = await self._opening
        return self._channel

    async def __aexit__(self, *error: object) -> None:
        if self._channel is not None:
            await self._channel.__aexit__(*error)

    def __aiter__(self) -> AsyncIterator[Message]:
        return _Iteration(self._opening)

    if not TYPE_CHECKING:  # mypy finds these mistakes by itself

        def __getattr__(self, name):
            if name.startswith("_") or not hasattr(AsyncConsumer, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.close()
            raise AttributeError(
                f"the channel is not open yet, so it has no {name!r}: await it first, or use async with"
            )

        def __enter__(self):
            self.close()
            raise TypeError(
                "use async with: the channels of AsyncClient and AsyncBroker are awaited"
            )

        def __exit__(self, *error):
            """Python looks for it before it calls ``__enter__``."""

        def __iter__(self):
            self.close()
            raise TypeError(
                "use async for: the channels of AsyncClient and AsyncBroker are awaited"
            )


class _Iteration(AsyncIterator[Message]):
    """The messages of a channel that nobody else has: when a loop is left, the channel is closed at once.

    A generator would be closed some turns of the event loop later.
    """

    def __init__(self, opening: Coroutine[Any, Any, AsyncChannel]):
        self._opening = opening
        self._channel: AsyncChannel | None = None

    async def __anext__(self) -> Message:
        if self._channel is None:
            self._channel = await self._opening
        try:
            return await self._channel.get()
        except Closed:
            raise StopAsyncIteration from None

    def __del__(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(
                Exception
            ):  # the event loop may be gone, and the channel with it
                self._channel.close()


# --- members of subscriptions -----------------------------------------------------------------------
ACK, NACK, EXTEND, UP_TO, REPLY = range(5)


class Consuming:
    """The common part of both kinds of consumers: they settle messages."""

    _settle: Callable[..., None]
    _lease_for: Callable[[int, Message], Any]
    """The delivery that the message belongs to; raises when it has ended."""
    _carry_out: Callable[[int, Any, Message, Any, str], None]
    """Called on the loop: run the settlement."""

    def ack(self, message: Message) -> None:
        """The same as ``message.ack()``.

        Example::

            consumer.ack(message)
        """
        self._settle(ACK, message)

    def ack_many(self, messages: Iterable[Message]) -> None:
        """Acknowledge each of the messages.

        Example::

            consumer.ack_many([consumer.get(), consumer.get()])
        """
        for message in messages:
            self.ack(message)

    def ack_up_to(self, message: Message) -> None:
        """Acknowledge the message and all earlier messages of its partition that this consumer has.

        Example::

            consumer.ack_up_to(message)
        """
        self._settle(UP_TO, message)

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "nack") -> None:
        """The same as ``message.nack(delay, reason)``.

        Example::

            consumer.nack(message, delay=timedelta(minutes=1))
        """
        after = None if delay is None else check_seconds("delay", delay, limits.DELAY_S_MAX)
        self._settle(NACK, message, after, check_reason(reason))

    def extend(self, message: Message, seconds: Duration | None = None) -> None:
        """The same as ``message.extend(seconds)``.

        Example::

            consumer.extend(message, 60)
        """
        most = limits.ACK_TIMEOUT_S_MAX
        granted = None if seconds is None else check_seconds("seconds", seconds, most)
        self._settle(EXTEND, message, granted)

    def reply(self, message: Message, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """The same as ``message.reply(value, headers)``.

        Example::

            consumer.reply(message, "0.50")
        """
        self._settle(REPLY, message, reply_of(message, value, headers))

    def _lease(self, kind: int, message: Message) -> Any:
        return None if kind == REPLY else self._lease_for(kind, message)


def reply_of(message: Message, value: Any, headers: Mapping[str, str] | None) -> dict[str, Any]:
    """The arguments of the operation ``reply``."""
    address = message.headers.get(REPLY_TO)
    if address is None:
        raise InvalidArgument(
            f"{message!r} is not a request: it has no header {REPLY_TO}", code="not_a_request"
        )
    parse_id(address)
    checked = check_value(value, limits.MESSAGE_BYTES_CEILING)
    return {"to": address, "value": checked, "headers": check_headers(headers or {})}


class AsyncConsumer(Consuming, AsyncChannel):
    """A member of a subscription, for asyncio. Settling takes effect at once."""

    def _settle(self, kind: int, message: Message, argument: Any = None, reason: str = "") -> None:
        self._carry_out(kind, self._lease(kind, message), message, argument, reason)


class Consumer(Consuming, Channel):
    """A member of a subscription, for threads.

    Settlements are gathered in a deque and passed to the loop together: one wake-up for many acks.
    """

    def __init__(self, topic: str, capacity: int, call: Callable[..., Any]):
        super().__init__(topic, capacity, call)
        self._settled: deque[tuple[int, Any, Message, Any, str]] = deque()
        self._carrying = False

    def _settle(self, kind: int, message: Message, argument: Any = None, reason: str = "") -> None:
        self._settled.append((kind, self._lease(kind, message), message, argument, reason))
        if not self._carrying:
            self._carry_soon()

    def _carry_soon(self) -> None:
        self._carrying = True
        try:
            self._call(self.carry_out)
        except BaseException:  # Ctrl-C: the next settlement wakes the loop
            self._carrying = False
            raise

    def carry_out(self) -> None:
        """Called on the loop: run the settlements since the last call."""
        self._carrying = False
        settled, carry_out = self._settled, self._carry_out
        while settled:
            carry_out(*settled.popleft())
