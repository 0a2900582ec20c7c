"""``Broker``: the whole broker inside a program that uses threads.

A shell (``shell.py``) around ``AsyncBroker``. Reading (``fetch*``) does not cross over to its thread: the
log may be read from any thread, so a reader never waits for the loop.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from headrace.broker.aio import AsyncBroker, BrokerOptions, Generation
from headrace.broker.channel import EmbeddedConsumer
from headrace.broker.engine import Engine
from headrace.broker.follower import Follower
from headrace.channels import Channel
from headrace.contents import Value
from headrace.errors import Closed, HeadraceError, InvalidArgument
from headrace.facade import AsyncFacade, BlockingFacade
from headrace.model import PublishManyOptions, PublishOptions, Receipt, checked_topic
from headrace.publication import Publication, settle
from headrace.shell import blocking, documented_as
from headrace.tracing import sending

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _reading(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """A method of ``AsyncBroker`` that reads, in the caller's thread where the log allows it."""
    crossing = blocking(method)

    @documented_as(method)
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


class Broker(BlockingFacade):
    """A broker in this process. ``with Broker.open("./data") as broker: ...``

    Without a directory everything is kept in memory. Keyword options are ``auto_create_topics``,
    ``max_message_size``, ``disk_reserve_bytes``, ``events_interval``, ``memory_limit``, ``rewrite_segments``,
    ``disk`` and defaults for topics (``TopicSettings``).
    """

    _core: AsyncBroker

    def __init__(self, data_dir: str | Path | None = None, **options: Unpack[BrokerOptions]):
        super().__init__()
        self._core = AsyncBroker(data_dir, **options)
        self._closing = threading.Lock()
        self._start(self._core.start)

    @classmethod
    def open(cls, data_dir: str | Path | None = None, **options: Unpack[BrokerOptions]) -> Broker:
        """Open a broker in a directory; without one it keeps everything in memory.

        Example::

            with Broker.open("./data", retention_hours=72) as broker:
                broker.publish("orders", b"hello")
        """
        return cls(data_dir, **options)

    def close(self) -> None:
        """Store what is on its way, wake every waiter, release the directory.

        Raises the first error that nobody has seen, of a ``publish_nowait`` or an acknowledgement; the broker
        is closed all the same.

        Example::

            broker = Broker.open("./data")
            broker.close()
        """
        with self._closing:
            if self._loop is None:
                return
            self._stop_workers()
            for channel in [*self._channels, *self._joined]:
                channel.close()
            try:
                self._run(self._core._shut_down())
            finally:
                self._stop()
            self._core._failures.check()

    def __enter__(self) -> Broker:
        return self

    def forked(self) -> None:
        is_open = self._loop is not None
        super().forked()
        self._closing = threading.Lock()
        if is_open:
            self._core._failures.no_answers = self._not_open()

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
    def _publish(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> Publication:
        publish = self.engine.publishing.message(checked_topic(topic), value, headers, options)
        publication = Publication(self._core._failures)
        generation: Generation

        core = self._core

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            publication.settle(receipts[0] if receipts else None, error)
            if error is not None:
                core._failures.add(error, publication)
            generation.finish()

        def start() -> None:
            nonlocal generation
            generation = core._under_way.current
            generation.count += 1
            try:
                core.engine.publish(publish, done)
            except HeadraceError as error:
                done([], error)

        self._begin_publish(start)
        return publication

    @documented_as(AsyncFacade.publish_many)
    def publish_many(
        self,
        topic: str,
        values: Sequence[Value | None],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Unpack[PublishManyOptions],
    ) -> list[Receipt]:
        future: Future[list[Receipt]] = Future()

        def start() -> None:
            try:
                self._core.engine.publish(publish, functools.partial(settle, future))
            except HeadraceError as error:
                settle(future, [], error)

        with sending("publish", topic, headers, len(values)) as headers:
            publish = self.engine.publishing.messages(topic, values, headers, options)
            self._begin_publish(start)
            return future.result()

    def _begin_publish(self, start: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            raise InvalidArgument("do not publish from a callback of the broker's own loop")
        with self._gate:
            if self._loop is None:
                raise self._not_open()
            self._loop.call_soon_threadsafe(start)

    flush = blocking(AsyncBroker.flush)

    # --- reading: in the caller's thread ------------------------------------------------------
    fetch = _reading(AsyncFacade.fetch)
    fetch_values = _reading(AsyncFacade.fetch_values)
    fetch_batches = _reading(AsyncFacade.fetch_batches)

    # --- subscribing ------------------------------------------------------------------------
    async def _follow(self, channel: Channel) -> Follower:
        follower = self.engine.follow(channel.topic, channel)
        channel.refill, channel.topic_created = follower.wake, follower.topic_created
        return follower

    async def _unfollow(self, follower: Follower) -> None:
        self._core.engine.unfollow(follower)

    async def _join(
        self, name: str, topic: str | None, prefetch: int, auto_extend: bool
    ) -> EmbeddedConsumer:
        core = self._core
        subscription = core.engine.subscription(name, topic)
        consumer = EmbeddedConsumer(subscription, core._next_member(), prefetch, self._call)
        consumer.on_failure = core._failures.add
        core._admit(consumer, auto_extend)
        return consumer

    async def _retire(self, consumer: EmbeddedConsumer) -> None:
        consumer.carry_out()
        consumer.retire()

    async def _leave(self, consumer: EmbeddedConsumer) -> None:
        consumer.leave()
