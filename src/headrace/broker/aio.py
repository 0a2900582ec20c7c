"""``AsyncBroker``: the whole broker inside an asyncio program, on the program's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from headrace import limits
from headrace.broker.administration import Administration, answer, settle
from headrace.broker.channel import AsyncEmbeddedConsumer, AsyncPlainChannel
from headrace.broker.delivery import Member
from headrace.broker.engine import Engine
from headrace.broker.publishing import Publish
from headrace.broker.staged_commit import unstamped
from headrace.broker.subscription import Subscription
from headrace.channels import AsyncChannel
from headrace.errors import Closed, DataCorrupt, HeadraceError, InvalidArgument
from headrace.facade import AsyncFacade
from headrace.log.batch import LOST, Batch, check_columns, no_collection
from headrace.log.interface import completed
from headrace.model import (
    Message,
    PublishManyOptions,
    PublishOptions,
    Receipt,
    Start,
    SubscriptionOptions,
    TopicSettings,
    split_position,
)
from headrace.operations.catalog import Operations
from headrace.operations.declaring import Operation

_ENGINE_OPTIONS = (
    "auto_create_topics",
    "max_message_size",
    "disk_reserve_bytes",
    "events_interval",
)


def open_engine(data_dir: str | Path | None, loop: Any, options: dict[str, Any]) -> Engine:
    """An engine of keyword options: a few are the engine's, the rest are topic defaults."""
    mine = {name: options.pop(name) for name in _ENGINE_OPTIONS if name in options}
    injected = {n: options.pop(n) for n in ("files", "clock", "random", "workers") if n in options}
    defaults = TopicSettings.of(options)
    size = mine.get("max_message_size", limits.MESSAGE_BYTES_DEFAULT)
    if not isinstance(size, int) or not 1 <= size <= limits.MESSAGE_BYTES_CEILING:
        raise InvalidArgument(
            f"max_message_size is between 1 and {limits.MESSAGE_BYTES_CEILING} bytes, not {size!r}",
            code="invalid_setting",
        )
    interval = mine.get("events_interval", limits.EVENTS_INTERVAL_S_DEFAULT)
    if (
        isinstance(interval, bool)
        or not isinstance(interval, (int, float))
        or not (0 <= interval <= limits.EVENTS_INTERVAL_S_MAX)
    ):
        raise InvalidArgument(
            f"events_interval is a number of seconds from 0 (none) to "
            f"{limits.EVENTS_INTERVAL_S_MAX:.0f}, not {interval!r}",
            code="invalid_setting",
        )
    path = None if data_dir is None else Path(data_dir)
    return Engine(path, loop, topic_defaults=defaults, **mine, **injected)


class AsyncBroker(Operations, AsyncFacade):
    """A broker in this process. ``async with AsyncBroker.open("./data") as broker: ...``

    ``None`` as the directory keeps everything in memory.
    """

    def __init__(self, data_dir: str | Path | None = None, **options: Any):
        self._data_dir = data_dir
        self._options = options
        self._engine: Engine | None = None
        self._channels: list[AsyncChannel] = []
        self._members = 0
        self._handlers: dict[asyncio.Task[None], str] = {}
        self._closed: asyncio.Event | None = None
        """Set when it is closed; there is one from the first ``close`` on."""

    @classmethod
    def open(cls, data_dir: str | Path | None = None, **options: Any) -> AsyncBroker:
        """To be awaited, or used with ``async with``."""
        return cls(data_dir, **options)

    @classmethod
    def around(cls, engine: Engine) -> AsyncBroker:
        """The same API over an engine that somebody else opened and closes."""
        broker = cls()
        broker._engine = engine
        return broker

    async def start(self) -> AsyncBroker:
        if self._engine is None:
            engine = open_engine(self._data_dir, asyncio.get_running_loop(), dict(self._options))
            engine.open()
            self._engine = engine
        return self

    def __await__(self) -> Generator[Any, None, AsyncBroker]:
        return self.start().__await__()

    async def __aenter__(self) -> AsyncBroker:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _operate(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        return await Administration(self.engine).call(operation, arguments)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Closed("the broker is not open: use 'async with AsyncBroker.open(...)'")
        return self._engine

    async def close(self) -> None:
        """Store what is on its way, wake whoever waits, give the directory back."""
        engine = self._engine
        if engine is None:
            return
        if self._closed is None:
            if engine.closing:
                return  # by whoever opened it
            await self._stop_handlers()
            for channel in list(self._channels):
                channel.close()
            self._closed = asyncio.Event()
            engine.close(self._closed.set)
        await self._closed.wait()

    # --- publishing -------------------------------------------------------------------------
    async def publish(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Receipt:
        """Store one message; when this returns it is as durable as the topic promises.

        ``to`` names the one subscription it is meant for; ``delay`` (seconds) or ``deliver_at``
        (ms) publish it later; ``ttl`` (seconds) limits how long it is delivered. A repeated
        ``idempotency_key`` or ``producer`` (id, epoch, sequence) is answered with the first receipt.
        """
        publish = self.engine.publishing.message(topic, value, headers, options)
        receipts: list[Receipt] = await answer(self.engine.publish, publish)
        return receipts[0]

    def publish_nowait(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> asyncio.Future[Receipt]:
        """Publish without waiting; the future gets the receipt, or the error."""
        publish = self.engine.publishing.message(topic, value, headers, options)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            settle(future, receipts[0] if receipts else None, error)

        self.engine.publish(publish, done)
        return future

    async def publish_batch(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Receipt:
        """Store a whole batch.

        Without a partition, records that have a key go where it belongs; the receipt is the first
        one's.
        """
        check_columns(batch, self.engine.max_message_size)
        publish = Publish(topic, unstamped(batch), partition=partition)
        receipts: list[Receipt] = await answer(self.engine.publish, publish)
        return receipts[0]

    async def publish_many(
        self,
        topic: str,
        values: Sequence[bytes | str],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Unpack[PublishManyOptions],
    ) -> list[Receipt]:
        """Store many messages together; one receipt for each partition they went to."""
        publish = self.engine.publishing.messages(topic, values, headers, options)
        receipts: list[Receipt] = await answer(self.engine.publish, publish)
        return receipts

    # --- reading ----------------------------------------------------------------------------
    async def fetch(
        self,
        topic: str,
        offset: Start = "earliest",
        limit: int = 1000,
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: float = 0.0,
    ) -> list[Message]:
        """Messages from an offset (or a time) on. Nothing is moved or acknowledged.

        ``wait``: seconds to wait for the first one if there is none yet. Fewer than ``limit`` may come
        although there are more; the last one's offset plus one goes on.
        """
        at = await self._wait_at(topic, offset, partition, wait)
        return await completed(
            lambda: fetch_messages(self.engine, topic, at, limit, partition, max_bytes)
        )

    async def _wait_at(self, topic: str, offset: Start, partition: int, wait: float) -> Start:
        """The position to read from, once there is something to read or the time is up."""
        if not wait:
            return offset
        at = await self.offset_at(topic, offset, partition=partition)
        await self.wait_for({topic: {partition: at}}, timeout=wait)
        return at

    async def fetch_values(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: float = 0.0,
    ) -> list[bytes]:
        """Like ``fetch``, but the plain values of about ``max_bytes``."""
        at = await self._wait_at(topic, offset, partition, wait)
        return await completed(lambda: fetch_values(self.engine, topic, at, partition, max_bytes))

    async def fetch_batches(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: float = 0.0,
    ) -> list[Batch]:
        """Whole batches as they lie in the log; the first holds the offset."""
        at = await self._wait_at(topic, offset, partition, wait)
        return await completed(lambda: fetch_batches(self.engine, topic, at, partition, max_bytes))

    # --- subscribing ------------------------------------------------------------------------
    async def subscribe(
        self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT
    ) -> AsyncChannel:
        """Every message of the topic (or wildcard) from now on."""
        channel = AsyncPlainChannel(topic, check_capacity(capacity))
        follower = self.engine.follow(topic, channel)
        channel.refill = follower.wake
        channel.on_close = lambda channel: self._close_follower(channel, follower)
        self._remember(channel)
        return channel

    def _close_follower(self, channel: AsyncChannel, follower: Any) -> None:
        self.engine.unfollow(follower)
        self._channels.remove(channel)

    async def unsubscribe(self, topic: str) -> None:
        """Close the plain channels of the topic."""
        for channel in [c for c in self._channels if c.topic == topic]:
            if not isinstance(channel, AsyncEmbeddedConsumer):
                channel.close()

    async def subscription(
        self,
        name: str,
        topic: str | None = None,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        auto_extend: bool = False,
        **settings: Unpack[SubscriptionOptions],
    ) -> AsyncEmbeddedConsumer:
        """Join a durable subscription. With a topic, it is created if it does not exist.

        ``prefetch``: how many messages may be out with this member at a time. ``auto_extend``: their
        deadlines are extended until they are settled.
        """
        subscription = await self._find_or_create(name, topic, start, settings)
        consumer = AsyncEmbeddedConsumer(
            subscription, self._next_member(), check_prefetch(prefetch)
        )
        consumer.on_close = self._close_consumer
        subscription.join(consumer.member)
        if auto_extend:
            self._extend(subscription, consumer.member)
        self._remember(consumer)
        return consumer

    async def _find_or_create(
        self, name: str, topic: str | None, start: Start, settings: SubscriptionOptions
    ) -> Subscription:
        if topic is not None:
            await self.create_subscription(name, topic, start, **settings)
        return self.engine.subscription(name, topic)

    def _next_member(self) -> str:
        self._members += 1
        return f"member-{self._members}"

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
        channel.closed(None)

    # --- jobs of many tasks -------------------------------------------------------------------
    async def stage(
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

        The whole batch goes to one partition: the one named, or else the topic's next in turn,
        whatever keys its records have. To keep the records of a key together, sort them into batches
        by partition first.

        With the ``name`` and ``number`` of the commit that it is meant for, it is dropped once that
        or a later one is done without it; else it stays for a day, and all that is staged after it.
        ``delayed``: the times of the batch say when each record is published, after its commit.
        """
        check_columns(batch, self.engine.max_message_size)
        piece: str = await answer(
            self.engine.staging.stage,
            topic,
            partition,
            unstamped(batch),
            name=name,
            number=number,
            delayed=delayed,
        )
        return piece


def check_capacity(capacity: object, name: str = "capacity") -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise InvalidArgument(f"{name} is a whole number above 0, not {capacity!r}")
    return capacity


def check_prefetch(prefetch: object) -> int:
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise InvalidArgument(f"prefetch is a whole number, not {prefetch!r}")
    if not 1 <= prefetch <= limits.PREFETCH_MAX:
        raise InvalidArgument(f"prefetch is between 1 and {limits.PREFETCH_MAX}, not {prefetch}")
    return prefetch


# --- reading: also from other threads, see ``embedded`` -------------------------------------------
def fetch_batches(
    engine: Engine, topic: str, offset: Start, partition: int, max_bytes: int
) -> list[Batch]:
    engine.check_open()
    check_capacity(max_bytes, "max_bytes")
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


def fetch_messages(
    engine: Engine, topic: str, offset: Start, limit: int, partition: int, max_bytes: int
) -> list[Message]:
    check_capacity(limit, "limit")
    found: list[Message] = []
    size = 0
    # How many bytes the messages have is not known yet, so the first read is a small one.
    first = min(max_bytes, limits.INDEX_INTERVAL_BYTES)
    with no_collection(limit):
        for batch, start in _pages(engine, topic, offset, partition, max_bytes, first):
            stop = min(batch.count, start + limit - len(found))
            found += batch.messages(topic, partition, start, stop)
            size += batch.stored_bytes
            if len(found) >= limit or size >= max_bytes:
                break
    return found


def fetch_values(
    engine: Engine, topic: str, offset: Start, partition: int, max_bytes: int
) -> list[bytes]:
    found: list[bytes] = []
    size = 0
    for batch, start in _pages(engine, topic, offset, partition, max_bytes):
        found += batch.values()[start:] if start else batch.values()
        size += batch.stored_bytes
        if size >= max_bytes:
            break
    return found


def _pages(
    engine: Engine,
    topic: str,
    offset: Start,
    partition: int,
    max_bytes: int,
    first_bytes: int | None = None,
) -> Generator[tuple[Batch, int], None, None]:
    """Batches from the offset on, each with the index to begin at; the reads grow."""
    want = first_bytes or max_bytes
    batches = fetch_batches(engine, topic, offset, partition, want)
    at = None
    if isinstance(offset, int):
        at = offset
    elif batches:
        place = engine.partition(topic, partition)
        position, time_ms = split_position(offset)
        at = max(engine.resolve(place, position, time_ms=time_ms), batches[0].base_offset)
    first = True
    while batches:
        for batch in batches:
            assert at is not None
            if batch.flags & LOST:
                if not first:
                    return  # what lies before it can be read; the next fetch says what is gone
                batch.values()  # raises, and says which offsets are gone
            first = False
            yield batch, at - batch.base_offset
            at = batch.end_offset
        assert at is not None
        want = min(4 * want, max_bytes)
        try:
            batches = fetch_batches(engine, topic, at, partition, want)
        except DataCorrupt:
            return  # the same: what lies before the damage can be read
