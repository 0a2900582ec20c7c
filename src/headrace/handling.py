"""Workers: a handler that is called for each message of a subscription.

The message is acknowledged when the handler returns and given back when it raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.channels import AsyncChannel, Channel
from headrace.errors import HeadraceError, NotFound
from headrace.model import Message

logger = logging.getLogger("headrace.handling")
Handler = Callable[[Message], object]
AsyncHandler = Callable[[Message], Awaitable[None] | None]
STOP_S = 30.0
"""How long the end of a worker waits for the handler to finish its message."""


class AsyncHandling:
    """Workers for asyncio; ``subscription`` is what a broker or client brings."""

    subscription: Any

    async def consume(
        self,
        name: str,
        handler: AsyncHandler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        **options: Any,
    ) -> None:
        """Call ``handler`` for each message until cancelled or the subscription ends.

        The message is acknowledged when it returns and given back when it raises. Its deadline is
        extended while the handler runs.
        """
        consumer: AsyncChannel = await self.subscription(name, topic, auto_extend=True, **options)

        async def work() -> None:
            async for message in consumer:
                await _handle(message, handler)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        finally:
            consumer.close()


class Handling:
    """Workers for threads; ``subscription`` is what a broker or client brings."""

    subscription: Any
    _joined: dict[Channel, str]
    """Every consumer, and the subscription that it joined."""
    _workers: dict[Channel, threading.Thread]

    def subscribe_to_subscription(
        self, name: str, handler: Handler, topic: str | None = None, **options: Any
    ) -> None:
        """Join a subscription and call ``handler(message)`` for each message, in a thread.

        The message is acknowledged when the handler returns and given back when it raises.
        """
        consumer: Channel = self.subscription(name, topic, auto_extend=True, **options)
        thread = threading.Thread(
            target=_handle_all, args=(consumer, handler), name=f"headrace-{name}", daemon=True
        )
        self._workers[consumer] = thread
        thread.start()

    def unsubscribe_from_subscription(self, name: str) -> None:
        """Leave a subscription. Its handlers finish their message first; the subscription stays."""
        joined = [consumer for consumer, other in self._joined.items() if other == name]
        if not joined:
            raise NotFound(f"{name!r} was not joined here", code="not_subscribed")
        for consumer in joined:
            self._stop_worker(consumer)
            consumer.close()

    def _stop_workers(self) -> None:
        for consumer in list(self._workers):
            self._stop_worker(consumer)

    def _stop_worker(self, consumer: Channel) -> None:
        """Let the handler finish its message, and begin no other."""
        thread = self._workers.pop(consumer, None)
        if thread is not None:
            consumer.halt()
            if thread is not threading.current_thread():
                thread.join(timeout=STOP_S)


def _handle_all(consumer: Channel, handler: Handler) -> None:
    for message in consumer:
        if consumer.is_halted:
            consumer.give_back(message)
            return
        try:
            handler(message)
        except Exception as error:
            _failed(message, error)
        else:
            with contextlib.suppress(HeadraceError):
                message.ack()


async def _handle(message: Message, handler: AsyncHandler) -> None:
    try:
        result = handler(message)
        if inspect.isawaitable(result):
            await result
    except Exception as error:
        _failed(message, error)
    else:
        with contextlib.suppress(HeadraceError):
            message.ack()


def _failed(message: Message, error: Exception) -> None:
    logger.exception("the handler failed for %r", message, exc_info=error)
    with contextlib.suppress(HeadraceError):  # the delivery has ended: the message comes again
        message.nack(reason=f"{type(error).__name__}: {error}")
