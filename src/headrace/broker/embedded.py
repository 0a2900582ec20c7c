"""``Broker``: the whole broker inside a program that uses threads.

The engine runs on an event loop in a thread of its own; this class carries calls over. All methods
may be called from any thread. Reading (``fetch*``) does not cross over at all: the log may be read
from any thread, so a reader never waits for the loop.

Closing: first nothing more may cross over (``_gate``), then everything that did is answered. So a call
that races with ``close`` is done or gets ``Closed``, and never waits for a loop that has ended. A broker
that is open when the program ends is closed then: acknowledgements of the last moment are kept.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, Unpack

from headrace import limits
from headrace.broker import aio
from headrace.broker.aio import AsyncBroker, Start
from headrace.broker.channel import Consumer, PlainChannel
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish, PublishManyOptions, PublishOptions
from headrace.channels import Channel
from headrace.clock import new_loop
from headrace.errors import Closed, HeadraceError, InvalidArgument
from headrace.forking import put_aside, watch
from headrace.log.batch import Batch
from headrace.log.memory import MemoryLog
from headrace.model import DeadLetter, Message, Receipt, Scheduled

Result = TypeVar("Result")


async def _cancel_all() -> None:
    """Whoever still waits on this loop is told that it is over."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Broker:
    """A broker in this process. ``with Broker.open("./data") as broker: ...``

    Without a directory everything is kept in memory. Keyword options are ``auto_create_topics``,
    ``max_message_size``, ``disk_reserve_bytes``, ``events_interval`` and defaults for topics
    (``TopicSettings``).
    """

    def __init__(self, data_dir: str | Path | None = None, **options: Any):
        self._loop = new_loop()
        self._async = AsyncBroker(data_dir, **options)
        self._channels: list[Channel] = []
        self._members = 0
        self._closed = False
        self._is_forked = False
        self._closing = threading.Lock()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="headrace-broker", daemon=True)
        self._thread.start()
        try:
            self._run(self._async.start())
        except BaseException:
            self._stop()
            raise
        watch(self)
        _open.add(self)

    @classmethod
    def open(cls, data_dir: str | Path | None = None, **options: Any) -> Broker:
        return cls(data_dir, **options)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop(self) -> None:
        _open.discard(self)
        with self._gate:
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close(self) -> None:
        """Store what is on its way, wake whoever waits, give the directory back."""
        with self._closing:
            if self._closed:
                return
            for channel in list(self._channels):
                channel.close()
            try:
                self._run(self._async.close())
            finally:
                self._stop()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """In a child process: the broker stays with the parent."""
        put_aside(self._loop, self._thread, self._async)
        _open.discard(self)
        self._closing, self._gate = threading.Lock(), threading.Lock()
        self._closed = self._is_forked = True
        for channel in self._channels:
            channel.on_close = lambda channel: None
            channel.forked(self._over())
        self._channels = []

    # --- crossing over ----------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        if self._closed:
            raise self._over()
        return self._async.engine

    def _over(self) -> Closed:
        if self._is_forked:
            return Closed(
                "the broker belongs to the process that this one was forked from; for several "
                "processes run 'headrace serve' and use a BrokerClient in each"
            )
        return Closed("the broker is closed")

    def _call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have it run on the loop, soon."""
        if self._is_forked:
            raise self._over()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgument(
                "this would wait for the thread that it runs in; do not call the broker from a "
                "callback of its own loop"
            )
        with self._gate:
            if self._closed:
                coroutine.close()
                raise self._over()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Closed("the broker was closed while this was under way") from None

    # --- topics -----------------------------------------------------------------------------
    def create_topic(self, name: str, **settings: Any) -> None:
        """Make a topic; settings as in ``TopicSettings``, the rest from the broker's defaults."""
        self._run(self._async.create_topic(name, **settings))

    def change_topic(self, name: str, **changes: Any) -> None:
        self._run(self._async.change_topic(name, **changes))

    def delete_topic(self, name: str) -> None:
        self._run(self._async.delete_topic(name))

    def topics(self) -> list[str]:
        return self._run(self._async.topics())

    def topic_stats(self, name: str) -> dict[str, Any]:
        return self._run(self._async.topic_stats(name))

    # --- publishing -------------------------------------------------------------------------
    def publish(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Receipt:
        """Store one message; see ``AsyncBroker.publish``."""
        return self._publish(self.engine.publishing.message(topic, value, headers, options))[0]

    def publish_many(
        self,
        topic: str,
        values: Sequence[bytes | str],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Unpack[PublishManyOptions],
    ) -> list[Receipt]:
        """Store many messages together; one receipt for each partition they went to."""
        return self._publish(self.engine.publishing.messages(topic, values, headers, options))

    def _publish(self, publish: Publish) -> list[Receipt]:
        future: Future[list[Receipt]] = Future()

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(receipts)

        def start() -> None:
            try:
                self._async.engine.publish(publish, done)
            except BaseException as error:
                future.set_exception(error)

        if threading.current_thread() is self._thread:
            raise InvalidArgument("do not publish from a callback of the broker's own loop")
        with self._gate:
            if self._closed:
                raise self._over()
            self._loop.call_soon_threadsafe(start)
        return future.result()

    def producer(self, name: str | None = None) -> tuple[int, int]:
        """(id, epoch) of an idempotent producer; a name fences off its earlier holder."""
        return self._run(self._async.producer(name))

    # --- reading: in the caller's thread ------------------------------------------------------
    def _in_memory(self, topic: str) -> bool:
        """A memory log changes under a reader, so it is read on the loop."""
        found = self.engine.topics.find(topic)
        return isinstance(found.partitions[0].log, MemoryLog)

    def fetch(
        self,
        topic: str,
        offset: Start = "earliest",
        limit: int = 1000,
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[Message]:
        """Messages from an offset (or a time) on. Nothing is moved or acknowledged."""
        if self._in_memory(topic):
            return self._run(
                self._async.fetch(topic, offset, limit, partition=partition, max_bytes=max_bytes)
            )
        return aio.fetch_messages(self.engine, topic, offset, limit, partition, max_bytes)

    def fetch_values(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[bytes]:
        """Like ``fetch``, but the plain values of about ``max_bytes``."""
        if self._in_memory(topic):
            return self._run(
                self._async.fetch_values(topic, offset, partition=partition, max_bytes=max_bytes)
            )
        return aio.fetch_values(self.engine, topic, offset, partition, max_bytes)

    def fetch_batches(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[Batch]:
        """Whole batches as they lie in the log; the first holds the offset."""
        if self._in_memory(topic):
            return self._run(
                self._async.fetch_batches(topic, offset, partition=partition, max_bytes=max_bytes)
            )
        return aio.fetch_batches(self.engine, topic, offset, partition, max_bytes)

    def find(self, message_id: uuid.UUID | str) -> Message:
        """The message that an id from a receipt leads to."""
        return self._run(self._async.find(message_id))

    # --- subscribing ------------------------------------------------------------------------
    def subscribe(self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT) -> Channel:
        """Every message of the topic (or wildcard) from now on, in a bounded channel."""
        channel = PlainChannel(topic, aio.check_capacity(capacity), self._call)

        async def follow() -> None:
            follower = self.engine.follow(topic, channel)
            channel.refill = follower.wake
            channel.on_close = lambda channel: self._forget(
                channel, lambda: self._async.engine.unfollow(follower)
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
            if channel.topic == topic and not isinstance(channel, Consumer):
                channel.close()

    def subscription(
        self,
        name: str,
        topic: str,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        member: str | None = None,
        **settings: Any,
    ) -> Consumer:
        """Join a durable subscription, made if it is not there yet."""
        aio.check_prefetch(prefetch)

        async def join() -> Consumer:
            await self._async.create_subscription(name, topic, start=start, **settings)
            subscription = self.engine.subscription(name, topic)
            self._members += 1
            label = member or f"member-{self._members}"
            consumer = Consumer(subscription, label, prefetch, self._call)
            consumer.on_close = self._close_consumer
            subscription.join(consumer.member)
            return consumer

        consumer = self._run(join())
        self._remember(consumer)
        return consumer

    def _close_consumer(self, channel: Channel) -> None:
        assert isinstance(channel, Consumer)

        def leave() -> None:
            channel.leave()
            channel.closed(None)

        self._forget(channel, leave)

    def _forget(self, channel: Channel, leave: Callable[[], None]) -> None:
        async def on_loop() -> None:
            leave()

        with contextlib.suppress(ValueError, Closed):  # two threads may close it at once
            self._channels.remove(channel)
            self._run(on_loop())

    def create_subscription(
        self, name: str, topic: str, *, start: Start = "earliest", **settings: Any
    ) -> None:
        """Make a subscription, or change the settings given of one that is there."""
        self._run(self._async.create_subscription(name, topic, start=start, **settings))

    def delete_subscription(self, name: str, topic: str | None = None) -> None:
        self._run(self._async.delete_subscription(name, topic))

    def subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        return self._run(self._async.subscriptions(topic))

    def subscription_stats(self, name: str, topic: str | None = None) -> dict[str, Any]:
        return self._run(self._async.subscription_stats(name, topic))

    def seek(
        self, name: str, to: Start, *, topic: str | None = None, partition: int | None = None
    ) -> None:
        """Replay a subscription from ``earliest``, ``latest``, an offset or a time on."""
        self._run(self._async.seek(name, to, topic=topic, partition=partition))

    # --- dead letters -----------------------------------------------------------------------
    def dead_letters(
        self, subscription: str, *, after: int = -1, limit: int = 100
    ) -> list[DeadLetter]:
        """Messages that the subscription gave up, oldest first."""
        return self._run(self._async.dead_letters(subscription, after=after, limit=limit))

    def redrive(
        self,
        subscription: str,
        *,
        offsets: list[int] | None = None,
        where: Callable[[DeadLetter], bool] | None = None,
        limit: int | None = None,
        rate: float | None = None,
        to: str = "subscription",
    ) -> int:
        """Publish dead letters back to their origin; returns how many."""
        return self._run(
            self._async.redrive(
                subscription, offsets=offsets, where=where, limit=limit, rate=rate, to=to
            )
        )

    def edit_dead_letter(
        self,
        subscription: str,
        offset: int,
        *,
        value: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Correct a dead letter before it is redriven; returns its new offset."""
        return self._run(
            self._async.edit_dead_letter(subscription, offset, value=value, headers=headers)
        )

    def purge_dead_letters(self, subscription: str, offsets: list[int] | None = None) -> int:
        """Give dead letters up for good; returns how many."""
        return self._run(self._async.purge_dead_letters(subscription, offsets))

    # --- delayed messages -------------------------------------------------------------------
    def scheduled(self, topic: str | None = None, *, limit: int = 1000) -> list[Scheduled]:
        """Messages that wait for their time, soonest first."""
        return self._run(self._async.scheduled(topic, limit=limit))

    def cancel(self, message_id: uuid.UUID | str) -> None:
        """A delayed message will not be published."""
        self._run(self._async.cancel(message_id))

    # --- pipelines --------------------------------------------------------------------------
    def report_pipeline(self, name: str, report: dict[str, Any]) -> dict[str, Any]:
        """How a running pipeline gets on; the answer says whether it is to ``stop``."""
        return self._run(self._async.report_pipeline(name, report))

    def pipelines(self) -> list[dict[str, Any]]:
        """The last report of each, and whether it is ``stale``."""
        return self._run(self._async.pipelines())

    def stop_pipeline(self, name: str) -> None:
        """Ask a pipeline to stop; it hears of it with its next report."""
        self._run(self._async.stop_pipeline(name))

    def forget_pipeline(self, name: str) -> None:
        """Drop one that has ended from the list."""
        self._run(self._async.forget_pipeline(name))

    # --- jobs of many tasks -------------------------------------------------------------------
    def stage(
        self,
        topic: str,
        batch: Batch,
        *,
        partition: int | None = None,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> str:
        """Store a batch durably but out of sight; returns the piece's id, for ``commit_staged``.

        The whole batch goes to one partition: the one named, or else the topic's next in turn.
        With ``name`` and ``number``, it is dropped once that commit is done without it.
        ``delayed``: its times say when each record is to be published, from its commit on.
        """
        return self._run(
            self._async.stage(
                topic, batch, partition=partition, name=name, number=number, delayed=delayed
            )
        )

    def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        """Show all pieces at once; False when this number of the name was committed before."""
        return self._run(self._async.commit_staged(name, number, pieces))

    def abort_staged(self, pieces: list[str]) -> None:
        """Give pieces up that will not be committed."""
        self._run(self._async.abort_staged(pieces))

    def positions(
        self, topics: str | list[str], *, at: int | datetime | None = None
    ) -> dict[str, list[dict[str, int]]]:
        """Start, end and bytes of every partition of the topics; with ``at`` an ``offset``, too."""
        return self._run(self._async.positions(topics, at=at))

    def wait_for(
        self,
        positions: Mapping[str, Mapping[int, int]],
        *,
        topics: str | list[str] | None = None,
        timeout: float,
    ) -> bool:
        """Wait until one of the partitions has more than that; False: the time was up."""
        return self._run(self._async.wait_for(positions, topics=topics, timeout=timeout))

    def advance(
        self, name: str, positions: Mapping[str, Mapping[int, int]], *, topic: str | None = None
    ) -> None:
        """Everything before these offsets is done for the subscription; it never moves back."""
        self._run(self._async.advance(name, positions, topic=topic))

    def flush(self) -> None:
        """Everything acknowledged so far is on disk when this returns."""
        self._run(self._async.flush())


_open: set[Broker] = set()


@atexit.register
def _close_all() -> None:
    for broker in list(_open):
        with contextlib.suppress(HeadraceError):
            broker.close()
