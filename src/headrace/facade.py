"""Methods that ``Broker``, ``AsyncBroker``, ``BrokerClient`` and ``AsyncClient`` share, besides operations:
publishing texts, and workers.

A worker calls a handler for each message of a subscription. The message is acknowledged when the handler
returns and given back when it raises; its deadline is extended while the handler runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace.channels import AsyncChannel, Channel
from headrace.errors import HeadraceError, NotFound
from headrace.model import Message, Receipt

logger = logging.getLogger("headrace.facade")
Handler = Callable[[Message], object]
AsyncHandler = Callable[[Message], Awaitable[None] | None]
STOP_S = 30.0
"""How long to wait for a handler to finish its message when its worker is stopped."""


class AsyncFacade:
    publish: Any
    subscription: Any
    _handlers: dict[asyncio.Task[None], str]
    """Every worker of ``subscribe_to_subscription``, and the subscription that it joined."""

    async def publish_text(
        self, topic: str, text: str, headers: Mapping[str, str] | None = None, **properties: str
    ) -> Receipt:
        """Store a text. Further keyword arguments become headers."""
        receipt: Receipt = await self.publish(topic, text.encode(), _merged(headers, properties))
        return receipt

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

        ``concurrency`` messages are handled at the same time. Options as for ``subscription``.
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

    async def subscribe_to_subscription(
        self, name: str, handler: AsyncHandler, topic: str | None = None, **options: Any
    ) -> None:
        """Join a subscription and call ``handler`` for each message, in a task."""
        joined = asyncio.get_running_loop().create_future()

        async def work() -> None:
            consumer: AsyncChannel
            try:
                consumer = await self.subscription(name, topic, auto_extend=True, **options)
            except BaseException as error:
                joined.set_exception(error)
                return
            joined.set_result(None)
            try:
                async for message in consumer:
                    await _handle(message, handler)
            finally:
                consumer.close()

        task = asyncio.get_running_loop().create_task(work())
        self._handlers[task] = name
        task.add_done_callback(lambda task: self._handlers.pop(task, None))
        await joined

    async def unsubscribe_from_subscription(self, name: str) -> None:
        """Stop the handlers of a subscription. The subscription itself stays."""
        tasks = [task for task, joined in self._handlers.items() if joined == name]
        if not tasks:
            raise NotFound(f"{name!r} was not joined here", code="not_subscribed")
        await self._stop_handlers(tasks)

    async def _stop_handlers(self, tasks: list[asyncio.Task[None]] | None = None) -> None:
        stopping = list(self._handlers) if tasks is None else tasks
        for task in stopping:
            task.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)


class BlockingFacade:
    publish: Any
    subscription: Any
    _joined: dict[Channel, str]
    """Every consumer, and the subscription that it joined."""
    _workers: dict[Channel, threading.Thread]

    def publish_text(
        self, topic: str, text: str, headers: Mapping[str, str] | None = None, **properties: str
    ) -> Receipt:
        """Store a text. Further keyword arguments become headers."""
        receipt: Receipt = self.publish(topic, text.encode(), _merged(headers, properties))
        return receipt

    def consume(
        self,
        name: str,
        handler: Handler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        **options: Any,
    ) -> None:
        """Call ``handler`` for each message until interrupted or the subscription ends.

        ``concurrency`` messages are handled at the same time, each in a thread of its own. Options as
        for ``subscription``.
        """
        consumer: Channel = self.subscription(name, topic, auto_extend=True, **options)
        threads = [_start(consumer, handler, name) for _ in range(concurrency)]
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)  # Python handles a signal between two waits
        finally:
            consumer.halt()
            for thread in threads:
                thread.join(STOP_S)
            consumer.close()

    def subscribe_to_subscription(
        self, name: str, handler: Handler, topic: str | None = None, **options: Any
    ) -> None:
        """Join a subscription and call ``handler`` for each message, in a thread."""
        consumer: Channel = self.subscription(name, topic, auto_extend=True, **options)
        self._workers[consumer] = _start(consumer, handler, name)

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
        """Let the handler finish its current message; it gets no further one."""
        thread = self._workers.pop(consumer, None)
        if thread is not None:
            consumer.halt()
            if thread is not threading.current_thread():
                thread.join(timeout=STOP_S)


def _merged(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    return {**(headers or {}), **{name: str(value) for name, value in more.items()}}


def _start(consumer: Channel, handler: Handler, name: str) -> threading.Thread:
    thread = threading.Thread(
        target=_handle_all, args=(consumer, handler), name=f"headrace-{name}", daemon=True
    )
    thread.start()
    return thread


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
    with contextlib.suppress(HeadraceError):  # if the delivery has ended, it is delivered again
        message.nack(reason=f"{type(error).__name__}: {error}")
