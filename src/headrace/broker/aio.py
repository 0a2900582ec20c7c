"""``AsyncBroker``: the whole broker inside an asyncio program, on the program's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, Unpack

from msgspec import Meta

from headrace import limits
from headrace.broker.administration import Administration
from headrace.broker.awaiting import answer
from headrace.broker.browsing import browse
from headrace.broker.channel import AsyncEmbeddedConsumer, EmbeddedConsumer
from headrace.broker.delivery import Member
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish
from headrace.broker.staged_commit import unstamped
from headrace.broker.subscription import Subscription
from headrace.channels import AsyncChannel, check_count
from headrace.checking import check
from headrace.errors import Closed, DataCorrupt, HeadraceError, InvalidArgument
from headrace.facade import AsyncFacade
from headrace.files import DiskMethod
from headrace.log.admission import check_columns
from headrace.log.batch import Batch
from headrace.log.interface import completed
from headrace.model import (
    PublishManyOptions,
    PublishOptions,
    Receipt,
    TopicOptions,
    TopicSettings,
    split_position,
)
from headrace.notation import SECONDS
from headrace.operations.declaring import Operation
from headrace.paging import Asked, Page, page_of, parse_from, readable
from headrace.publication import Failures, settle
from headrace.times import Duration
from headrace.working import AsyncWorker

ENGINE_OPTIONS = (
    "auto_create_topics",
    "max_message_size",
    "disk_reserve_bytes",
    "events_interval",
    "memory_limit",
    "rewrite_segments",
    "disk",
)
_CHECKED = {
    "max_message_size": Annotated[int, Meta(ge=1, le=limits.MESSAGE_BYTES_CEILING)],
    "events_interval": Annotated[float, Meta(ge=0, le=limits.EVENTS_INTERVAL_S_MAX), SECONDS],
    "memory_limit": Annotated[int, Meta(ge=limits.MEMORY_BYTES_MIN)] | None,
    "rewrite_segments": bool,
    "disk": DiskMethod,
}


class BrokerOptions(TopicOptions, total=False):
    """The options of an embedded broker: a few of its own, and defaults for topics."""

    partitions: int
    auto_create_topics: bool
    max_message_size: int
    disk_reserve_bytes: int
    events_interval: Duration
    memory_limit: int | None
    rewrite_segments: bool
    disk: DiskMethod


def open_engine(data_dir: str | Path | None, loop: Any, options: dict[str, Any]) -> Engine:
    """An engine of keyword options: a few are the engine's, the rest are topic defaults."""
    mine = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
    injected = {n: options.pop(n) for n in ("files", "clock", "random", "workers") if n in options}
    defaults = TopicSettings.of(options)
    for name, kind in _CHECKED.items():
        if name in mine:
            mine[name] = check(name, mine[name], kind, code="invalid_setting")
    path = None if data_dir is None else Path(data_dir)
    return Engine(path, loop, topic_defaults=defaults, **mine, **injected)


class AsyncBroker(AsyncFacade):
    """A broker in this process. ``async with AsyncBroker.open("./data") as broker: ...``

    ``None`` as the directory keeps everything in memory.
    """

    def __init__(self, data_dir: str | Path | None = None, **options: Unpack[BrokerOptions]):
        self._data_dir = data_dir
        self._options: dict[str, Any] = {**options}
        self._engine: Engine | None = None
        self._failures = Failures()
        self._under_way = UnderWay()
        self._background: set[asyncio.Task[None]] = set()
        """Calls of a shell that does not wait for them."""
        self._channels: list[AsyncChannel] = []
        self._members = 0
        self._handlers: dict[AsyncWorker, str] = {}
        self._running: dict[AsyncWorker, asyncio.Task[None]] = {}
        self._closed: asyncio.Event | None = None
        """Set when it is closed; there is one from the first ``close`` on."""

    @classmethod
    def open(
        cls, data_dir: str | Path | None = None, **options: Unpack[BrokerOptions]
    ) -> AsyncBroker:
        """To be awaited, or used with ``async with``.

        Example::

            async with AsyncBroker.open("./data", retention_hours=72) as broker:
                await broker.publish("orders", b"hello")
        """
        return cls(data_dir, **options)

    @classmethod
    def around(cls, engine: Engine) -> AsyncBroker:
        """The same API over an engine that somebody else opened and closes."""
        broker = cls()
        broker._engine = engine
        return broker

    async def start(self) -> Self:
        """Open the directory. ``await broker`` and ``async with broker`` do the same.

        Example::

            broker = AsyncBroker("./data")
            await broker.start()
        """
        if self._engine is None:
            engine = open_engine(self._data_dir, asyncio.get_running_loop(), dict(self._options))
            engine.open()
            self._engine = engine
        return self

    _open = start

    async def _operate(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        return await Administration(self.engine).call(operation, arguments)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Closed("the broker is not open: use 'async with AsyncBroker.open(...)'")
        return self._engine

    async def close(self) -> None:
        """Store what is on its way, wake whoever waits, give the directory back.

        Raises the first error that nobody has seen, of a ``publish_nowait``; the broker is closed all the same.

        Example::

            broker = await AsyncBroker.open("./data")
            await broker.close()
        """
        await self._shut_down()
        self._failures.check()

    async def _shut_down(self) -> None:
        """Close, and keep the failures."""
        engine = self._engine
        if engine is None:
            return
        if self._closed is None:
            if engine.closing:
                return  # by whoever opened it
            await self._stop_handlers()
        if self._closed is None:  # nobody was faster
            for channel in list(self._channels):
                channel.close()
            self._closed = asyncio.Event()
            engine.close(self._closed.set)
        await self._closed.wait()

    # --- publishing -------------------------------------------------------------------------
    def _publish(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> asyncio.Future[Receipt]:
        publish = self.engine.publishing.message(topic, value, headers, options)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()

        generation = self._under_way.current

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            settle(future, receipts[0] if receipts else None, error, self._failures)
            generation.finish()

        generation.count += 1
        try:
            self.engine.publish(publish, done)
        except BaseException:
            generation.finish()
            raise
        return future

    async def flush(self) -> None:
        """Everything published so far is stored, or has failed, and all acknowledgements are on disk.

        Raises the first error that nobody has seen, of a ``publish_nowait`` or an acknowledgement.

        Example::

            for order in orders:
                broker.publish_nowait("orders", order)
            await broker.flush()
        """
        await self._under_way.wait()
        if self._background:
            await asyncio.wait(list(self._background))
        await super().flush()
        self._failures.check()

    async def _publish_many(
        self, topic: str, values: Any, headers: Any, options: PublishManyOptions
    ) -> list[Receipt]:
        publishing = self.engine.publishing
        publish = publishing.messages(topic, values, headers, options)
        future: asyncio.Future[list[Receipt]] = asyncio.get_running_loop().create_future()
        publishing.publish(publish, partial(settle, future))
        return await future

    async def publish_batch(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Receipt:
        check_columns(batch, self.engine.max_message_size)
        publish = Publish(topic, unstamped(batch), partition=partition)
        receipts: list[Receipt] = await answer(self.engine.publish, publish)
        return receipts[0]

    async def _stage(self, topic: str, batch: Batch, partition: int | None, **purpose: Any) -> str:
        check_columns(batch, self.engine.max_message_size)
        stage = self.engine.staging.stage
        piece: str = await answer(stage, topic, partition, unstamped(batch), **purpose)
        return piece

    # --- reading ----------------------------------------------------------------------------
    async def _read(self, asked: Asked, values: bool) -> Page[Any]:
        engine = self.engine
        partitions = engine.topics.find(asked.topic).partitions
        if asked.partition is None and len(partitions) > 1:
            page = await browse(engine, asked)
            return Page([each.value for each in page], page.next) if values else page
        asked = await self._waited(_of_one(asked))
        return await completed(lambda: fetch_page(engine, asked, values=values))

    async def _fetch_batches(self, asked: Asked) -> list[Batch]:
        topic, at, partition, max_bytes, *_ = await self._waited(_of_one(asked))
        return await completed(lambda: fetch_batches(self.engine, topic, at, partition, max_bytes))

    async def _waited(self, asked: Asked) -> Asked:
        """With the position to read from, once there is something to read or the time is up."""
        if not asked.wait:
            return asked
        assert asked.partition is not None
        topic, offset, partition = asked.topic, asked.offset, asked.partition
        at = await self.offset_at(topic, offset, partition=partition)  # type: ignore[arg-type]
        await self.wait_for({topic: {partition: at}}, timeout=asked.wait)
        return asked._replace(offset=at, wait=0.0)

    # --- subscribing ------------------------------------------------------------------------
    async def _open_channel(self, topic: str, capacity: int) -> AsyncChannel:
        channel = AsyncChannel(topic, capacity)
        follower = self.engine.follow(topic, channel)
        channel.refill, channel.topic_created = follower.wake, follower.topic_created
        channel.on_close = lambda channel: self._close_follower(channel, follower)
        self._remember(channel)
        return channel

    def _close_follower(self, channel: AsyncChannel, follower: Any) -> None:
        self.engine.unfollow(follower)
        self._channels.remove(channel)

    async def unsubscribe(self, topic: str) -> None:
        for channel in [c for c in self._channels if c.topic == topic]:
            if not isinstance(channel, AsyncEmbeddedConsumer):
                channel.close()

    async def _join(
        self, name: str, topic: str | None, prefetch: int, auto_extend: bool
    ) -> AsyncEmbeddedConsumer:
        subscription = self.engine.subscription(name, topic)
        consumer = AsyncEmbeddedConsumer(subscription, self._next_member(), prefetch)
        consumer.on_close = self._close_consumer
        self._admit(consumer, auto_extend)
        self._remember(consumer)
        return consumer

    async def _retire(self, consumer: AsyncEmbeddedConsumer) -> None:
        consumer.retire()

    async def _leave(self, consumer: AsyncEmbeddedConsumer) -> None:
        consumer.close()

    def _next_member(self) -> str:
        self._members += 1
        return f"member-{self._members}"

    def _admit(self, consumer: AsyncEmbeddedConsumer | EmbeddedConsumer, auto_extend: bool) -> None:
        consumer.replying = self.engine.requests.reply
        consumer.subscription.join(consumer.member)
        if auto_extend:
            self._extend(consumer.subscription, consumer.member)

    def _extend(self, subscription: Subscription, member: Member) -> None:
        """Extend what is out with the member, again and again until it has left."""
        if member in subscription.members:
            for lease_id in list(member.leases):
                subscription.extend(lease_id)
            pause = subscription.settings.ack_timeout / 3
            self.engine.call_later(pause, self._extend, subscription, member)

    def _remember(self, channel: AsyncChannel) -> None:
        # One that is closed, and not by us, has lost its topic.
        self._channels = [known for known in self._channels if not known.is_closed]
        self._channels.append(channel)

    def _close_consumer(self, channel: AsyncChannel) -> None:
        assert isinstance(channel, AsyncEmbeddedConsumer)
        self._channels.remove(channel)
        channel.leave()


class UnderWay:
    """Counts calls that are not answered yet, so that a flush can wait for those before it."""

    def __init__(self) -> None:
        self.current = Generation()
        """Who begins a call counts it here, and calls ``finish`` of the same one when it is answered."""
        self._earlier: list[Generation] = []

    async def wait(self) -> None:
        self._earlier = [each for each in (*self._earlier, self.current) if each.count]
        self.current = Generation()
        for generation in list(self._earlier):
            await generation.wait()


class Generation:
    """The calls between two flushes."""

    __slots__ = ("_waiting", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiting: list[asyncio.Future[None]] = []

    def finish(self) -> None:
        self.count -= 1
        if not self.count:
            for future in self._waiting:
                settle(future, None, None)

    async def wait(self) -> None:
        if self.count:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]


# --- reading: also from other threads, see ``embedded`` -------------------------------------------
def fetch_batches(
    engine: Engine, topic: str, offset: Any, partition: Any, max_bytes: int
) -> list[Batch]:
    engine.check_open()
    check_count("max_bytes", max_bytes)
    place = engine.partition(topic, partition)
    position, time_ms = split_position(offset)
    if time_ms is None and isinstance(position, int) and not isinstance(position, bool):
        if position < 0:
            raise InvalidArgument(f"{position} is not an offset", code="invalid_offset")
        at = position
    else:
        at = engine.resolve(place, position, time_ms=time_ms)
    if at == place.log.end_offset:
        return []
    return place.log.read(at, max_bytes)


def fetch_page(engine: Engine, asked: Asked, *, values: bool = False) -> Page[Any]:
    """A page of one partition, or of a topic that has only one."""
    asked = _of_one(asked)
    topic, offset, partition, max_bytes, _, limit = asked
    assert partition is not None
    assert not isinstance(offset, Mapping)
    if not values:
        check_count("limit", limit)
    # The size of messages is not known yet, so the first read is small.
    first_bytes = max_bytes if values else min(max_bytes, limits.INDEX_INTERVAL_BYTES)
    batches = fetch_batches(engine, topic, offset, partition, first_bytes)
    place = engine.partition(topic, partition)
    if isinstance(offset, int):
        at = offset
    else:
        position, time_ms = split_position(offset)
        at = engine.resolve(place, position, time_ms=time_ms)
        at = max(at, batches[0].base_offset) if batches else at
    following = _growing(engine, topic, partition, batches, first_bytes, max_bytes)
    return page_of(readable(following, at), at, asked, values=values)


def _of_one(asked: Asked) -> Asked:
    """The same for the one partition that is read, with its own offset."""
    number = 0 if asked.partition is None else asked.partition
    start = parse_from(asked.offset)
    if isinstance(start, Mapping):
        start = start.get(number, "earliest")
    return asked._replace(partition=number, offset=start)


def _growing(
    engine: Engine, topic: str, partition: int, batches: list[Batch], want: int, max_bytes: int
) -> Iterator[list[Batch]]:
    """The batches, and all that follow; the reads grow."""
    while batches:
        yield batches
        want = min(4 * want, max_bytes)
        try:
            batches = fetch_batches(engine, topic, batches[-1].end_offset, partition, want)
        except DataCorrupt:
            return  # what lies before the damage can be read; the next fetch says what is gone
