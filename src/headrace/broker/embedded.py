"""``Broker``: the whole broker inside a program that uses threads.

A shell (``shell.py``) around ``AsyncBroker``. Reading (``fetch*``) does not cross over to its thread: the
log may be read from any thread, so a reader never waits for the loop.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from headrace import limits
from headrace.broker import aio
from headrace.broker.aio import AsyncBroker
from headrace.broker.channel import EmbeddedConsumer, PlainChannel
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish, PublishDone
from headrace.channels import Channel
from headrace.errors import Closed, HeadraceError, InvalidArgument
from headrace.facade import BlockingFacade
from headrace.model import (
    PublishManyOptions,
    PublishOptions,
    Receipt,
    Start,
    SubscriptionOptions,
)
from headrace.operations.blocking import BlockingOperations
from headrace.publication import Publication
from headrace.shell import blocking, nowait

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _reading(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """A method of ``AsyncBroker`` that reads, in the caller's thread where the log allows it."""
    crossing = blocking(method)

    @functools.wraps(method)
    def forward(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        topic = args[0] if args else kwargs.get("topic")
        log = self.engine.topics.find(topic).partitions[0].log
        if kwargs.get("wait") or not log.thread_safe_reads:
            return crossing(self, *args, **kwargs)
        try:
            method(self._core, *args, **kwargs).send(None)
        except StopIteration as end:
            result: Result = end.value
            return result
        raise AssertionError("a read of a log with thread-safe reads never waits")

    return forward


class Broker(BlockingOperations, BlockingFacade):
    """A broker in this process. ``with Broker.open("./data") as broker: ...``

    Without a directory everything is kept in memory. Keyword options are ``auto_create_topics``,
    ``max_message_size``, ``disk_reserve_bytes``, ``events_interval`` and defaults for topics
    (``TopicSettings``).
    """

    _core: AsyncBroker

    def __init__(self, data_dir: str | Path | None = None, **options: Any):
        super().__init__()
        self._core = AsyncBroker(data_dir, **options)
        self._channels: list[Channel] = []
        self._joined: dict[Channel, str] = {}
        self._workers: dict[Channel, threading.Thread] = {}
        self._closing = threading.Lock()
        self._start(self._core.start)

    @classmethod
    def open(cls, data_dir: str | Path | None = None, **options: Any) -> Broker:
        return cls(data_dir, **options)

    def close(self) -> None:
        """Store what is on its way, wake every waiter, release the directory."""
        with self._closing:
            if self._loop is None:
                return
            self._stop_workers()
            for channel in [*self._channels, *self._joined]:
                channel.close()
            try:
                self._run(self._core.close())
            finally:
                self._stop()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        super().forked()
        self._closing = threading.Lock()
        for channel in [*self._channels, *self._joined]:
            channel.on_close = lambda channel: None
            channel.forked(self._not_open())
        self._channels, self._joined, self._workers = [], {}, {}

    @property
    def engine(self) -> Engine:
        if self._loop is None:
            raise self._not_open()
        return self._core.engine

    def _not_open(self) -> Closed:
        if self._is_forked:
            return Closed(
                "the broker belongs to the process that this one was forked from; for several "
                "processes run 'headrace serve' and use a BrokerClient in each"
            )
        return Closed("the broker is closed")

    # --- publishing -------------------------------------------------------------------------
    def publish(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Receipt:
        """Store one message; see ``AsyncBroker.publish``."""
        return self.publish_nowait(topic, value, headers, **options).result()

    def publish_nowait(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Publication:
        """Publish without waiting; ``result()`` of what is returned waits for the receipt."""
        publish = self.engine.publishing.message(topic, value, headers, options)
        publication = Publication()

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            publication.settle(receipts[0] if receipts else None, error)

        self._begin_publish(publish, done)
        return publication

    def publish_many(
        self,
        topic: str,
        values: Sequence[bytes | str],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Unpack[PublishManyOptions],
    ) -> list[Receipt]:
        """Store many messages together; one receipt for each partition they went to."""
        publish = self.engine.publishing.messages(topic, values, headers, options)
        future: Future[list[Receipt]] = Future()

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(receipts)

        self._begin_publish(publish, done)
        return future.result()

    def _begin_publish(self, publish: Publish, done: PublishDone) -> None:
        def start() -> None:
            try:
                self._core.engine.publish(publish, done)
            except HeadraceError as error:
                done([], error)

        if threading.current_thread() is self._thread:
            raise InvalidArgument("do not publish from a callback of the broker's own loop")
        with self._gate:
            if self._loop is None:
                raise self._not_open()
            self._loop.call_soon_threadsafe(start)

    publish_batch = blocking(AsyncBroker.publish_batch)
    publish_batch_nowait = nowait(AsyncBroker.publish_batch)

    # --- reading: in the caller's thread ------------------------------------------------------
    fetch = _reading(AsyncBroker.fetch)
    fetch_values = _reading(AsyncBroker.fetch_values)
    fetch_batches = _reading(AsyncBroker.fetch_batches)

    # --- subscribing ------------------------------------------------------------------------
    def subscribe(self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT) -> Channel:
        """Every message of the topic (or wildcard) from now on, in a bounded channel."""
        channel = PlainChannel(topic, aio.check_capacity(capacity), self._call)

        async def follow() -> None:
            follower = self.engine.follow(topic, channel)
            channel.refill = follower.wake
            channel.on_close = lambda channel: self._forget(
                channel, lambda: self._core.engine.unfollow(follower)
            )

        self._run(follow())
        self._remember(channel)
        return channel

    def _remember(self, channel: Channel) -> None:
        for known in list(self._channels):
            if known.is_closed:  # not by us: its topic is gone
                with contextlib.suppress(ValueError):
                    self._channels.remove(known)
        self._channels.append(channel)

    def unsubscribe(self, topic: str) -> None:
        """Close the plain channels of the topic."""
        for channel in list(self._channels):
            if channel.topic == topic:
                channel.close()

    def subscription(
        self,
        name: str,
        topic: str | None = None,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        auto_extend: bool = False,
        **settings: Unpack[SubscriptionOptions],
    ) -> EmbeddedConsumer:
        """Join a durable subscription. With a topic, it is created if it does not exist."""
        aio.check_prefetch(prefetch)
        core = self._core

        async def join() -> EmbeddedConsumer:
            subscription = await core._find_or_create(name, topic, start, settings)
            consumer = EmbeddedConsumer(subscription, core._next_member(), prefetch, self._call)
            consumer.on_close = self._close_consumer
            subscription.join(consumer.member)
            if auto_extend:
                core._extend(subscription, consumer.member)
            return consumer

        consumer = self._run(join())
        for known in list(self._joined):
            if known.is_closed:
                self._joined.pop(known, None)
        self._joined[consumer] = name
        return consumer

    def _close_consumer(self, channel: Channel) -> None:
        assert isinstance(channel, EmbeddedConsumer)

        def leave() -> None:
            channel.leave()
            channel.closed(None)

        if self._joined.pop(channel, None) is not None:  # two threads may close it at once
            self._leave(leave)

    def _forget(self, channel: Channel, leave: Callable[[], None]) -> None:
        with contextlib.suppress(ValueError):  # two threads may close it at once
            self._channels.remove(channel)
            self._leave(leave)

    def _leave(self, leave: Callable[[], None]) -> None:
        async def on_loop() -> None:
            leave()

        with contextlib.suppress(Closed):
            self._run(on_loop())

    stage = blocking(AsyncBroker.stage)
    stage_nowait = nowait(AsyncBroker.stage)
