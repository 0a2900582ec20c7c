"""``AsyncBroker``: the whole broker inside an asyncio program, on the program's own loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from headrace import limits
from headrace.broker.channel import AsyncConsumer, AsyncPlainChannel
from headrace.broker.engine import Engine
from headrace.broker.jobs import Jobs
from headrace.broker.publishing import PublishManyOptions, PublishOptions
from headrace.broker.topic import Topic
from headrace.channels import AsyncChannel
from headrace.errors import Closed, DataCorrupt, HeadraceError, InvalidArgument
from headrace.log.batch import LOST, Batch, no_collection
from headrace.model import (
    DeadLetter,
    Message,
    Receipt,
    Scheduled,
    TopicSettings,
    check_subscription_name,
    check_topic_name,
    parse_id,
)

Start = str | int | datetime
Result = TypeVar("Result")
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


def split_start(start: Start) -> tuple[str | int, int | None]:
    """(position, time in ms): a datetime is a time, anything else a position."""
    if isinstance(start, datetime):
        try:
            return "earliest", round(start.timestamp() * 1000)
        except (OverflowError, OSError, ValueError):  # the first and the last days of the calendar
            raise InvalidArgument(
                f"{start} is not a time that a message can have", code="invalid_offset"
            ) from None
    return start, None


class AsyncBroker(Jobs):
    """A broker in this process. ``async with AsyncBroker.open("./data") as broker: ...``

    ``None`` as the directory keeps everything in memory.
    """

    def __init__(self, data_dir: str | Path | None = None, **options: Any):
        self._data_dir = data_dir
        self._options = options
        self._engine: Engine | None = None
        self._channels: list[AsyncChannel] = []
        self._members = 0
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
            for channel in list(self._channels):
                channel.close()
            self._closed = asyncio.Event()
            engine.close(self._closed.set)
        await self._closed.wait()

    async def _done(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Await an engine call that answers ``done(error)`` as its last argument."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call(*args, lambda error: _settle(future, None, error), **kwargs)
        await future

    async def _value(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await an engine call that answers ``done(value, error)``."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call(*args, lambda value, error: _settle(future, value, error), **kwargs)
        return await future

    # --- topics -----------------------------------------------------------------------------
    async def create_topic(self, name: str, **settings: Any) -> None:
        """Make a topic; settings as in ``TopicSettings``, the rest from the broker's defaults.

        A topic that exists with these settings is fine; with others it is a ``Conflict``.
        """
        existing = self.engine.topics.get(name)
        if existing is not None and existing.settings.but(settings) == existing.settings:
            return
        self.engine.create_topic(name, self.engine.topics.defaults.but(settings))

    async def change_topic(self, name: str, **changes: Any) -> None:
        self.engine.change_topic(check_topic_name(name), changes)

    async def delete_topic(self, name: str) -> None:
        await self._done(self.engine.delete_topic, name)

    async def topics(self) -> list[str]:
        return sorted(topic.name for topic in self.engine.topics if not topic.name.startswith("__"))

    async def topic_stats(self, name: str) -> dict[str, Any]:
        return topic_stats(self.engine, self.engine.topics.find(name))

    # --- publishing -------------------------------------------------------------------------
    async def publish(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        *,
        key: bytes | str | None = None,
        id: uuid.UUID | str | None = None,
        partition: int | None = None,
        to: str | None = None,
        delay: float | None = None,
        deliver_at: int | None = None,
        ttl: float | None = None,
        timestamp: int | None = None,
        producer: tuple[int, int, int] | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Store one message; when this returns it is as durable as the topic promises.

        ``to`` names the one subscription it is meant for; ``delay`` (seconds) or ``deliver_at``
        (ms) publish it later; ``ttl`` (seconds) limits how long it is delivered. A repeated
        ``idempotency_key`` or ``producer`` (id, epoch, sequence) is answered with the first receipt.
        """
        options: PublishOptions = {
            "key": key,
            "id": id,
            "partition": partition,
            "to": to,
            "delay": delay,
            "deliver_at": deliver_at,
            "ttl": ttl,
            "timestamp": timestamp,
            "producer": producer,
            "idempotency_key": idempotency_key,
        }
        publish = self.engine.publishing.message(topic, value, headers, options)
        receipts: list[Receipt] = await self._value(self.engine.publish, publish)
        return receipts[0]

    async def publish_many(
        self,
        topic: str,
        values: Sequence[bytes | str],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        *,
        keys: Sequence[bytes | str | None] | None = None,
        ids: Sequence[uuid.UUID | str | None] | None = None,
        partition: int | None = None,
        to: str | None = None,
        ttl: float | None = None,
        timestamps: Sequence[int] | None = None,
        producer: tuple[int, int, int] | None = None,
    ) -> list[Receipt]:
        """Store many messages together; one receipt for each partition they went to."""
        options: PublishManyOptions = {
            "keys": keys,
            "ids": ids,
            "partition": partition,
            "to": to,
            "ttl": ttl,
            "timestamps": timestamps,
            "producer": producer,
        }
        publish = self.engine.publishing.messages(topic, values, headers, options)
        receipts: list[Receipt] = await self._value(self.engine.publish, publish)
        return receipts

    async def producer(self, name: str | None = None) -> tuple[int, int]:
        """(id, epoch) of an idempotent producer; a name fences off its earlier holder."""
        future: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self.engine.publishing.producer(
            name, lambda pid, epoch, error: _settle(future, (pid, epoch), error)
        )
        return await future

    # --- reading ----------------------------------------------------------------------------
    async def fetch(
        self,
        topic: str,
        offset: Start = "earliest",
        limit: int = 1000,
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[Message]:
        """Messages from an offset (or a time) on. Nothing is moved or acknowledged."""
        return fetch_messages(self.engine, topic, offset, limit, partition, max_bytes)

    async def fetch_values(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[bytes]:
        """Like ``fetch``, but the plain values of about ``max_bytes``."""
        return fetch_values(self.engine, topic, offset, partition, max_bytes)

    async def fetch_batches(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
    ) -> list[Batch]:
        """Whole batches as they lie in the log; the first holds the offset."""
        return fetch_batches(self.engine, topic, offset, partition, max_bytes)

    async def find(self, message_id: uuid.UUID | str) -> Message:
        """The message that an id from a receipt leads to."""
        return self.engine.find_message(message_id)

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
            if not isinstance(channel, AsyncConsumer):
                channel.close()

    async def subscription(
        self,
        name: str,
        topic: str,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        member: str | None = None,
        **settings: Any,
    ) -> AsyncConsumer:
        """Join a durable subscription, made if it is not there yet."""
        await self.create_subscription(name, topic, start=start, **settings)
        self._members += 1
        subscription = self.engine.subscription(name, topic)
        consumer = AsyncConsumer(
            subscription, member or f"member-{self._members}", check_prefetch(prefetch)
        )
        consumer.on_close = self._close_consumer
        subscription.join(consumer.member)
        self._remember(consumer)
        return consumer

    def _remember(self, channel: AsyncChannel) -> None:
        # One that is closed, and not by us, has lost its topic.
        self._channels = [known for known in self._channels if not known.is_closed]
        self._channels.append(channel)

    def _close_consumer(self, channel: AsyncChannel) -> None:
        assert isinstance(channel, AsyncConsumer)
        self._channels.remove(channel)
        channel.leave()
        channel.closed(None)

    async def create_subscription(
        self, name: str, topic: str, *, start: Start = "earliest", **settings: Any
    ) -> None:
        """Make a subscription, or change the settings given of one that is there."""
        position, time_ms = split_start(start)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine.subscribe(
            name,
            topic,
            start=position,
            start_time_ms=time_ms,
            settings=settings,
            done=lambda error: _settle(future, None, error),
        )
        await future

    async def delete_subscription(self, name: str, topic: str | None = None) -> None:
        check_subscription_name(name)
        await self._done(self.engine.unsubscribe, self.engine.subscription(name, topic))

    async def subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        return [subscription.statistics() for subscription in self.engine.subscriptions(topic)]

    async def subscription_stats(self, name: str, topic: str | None = None) -> dict[str, Any]:
        return self.engine.subscription(name, topic).statistics()

    async def seek(
        self,
        name: str,
        to: Start,
        *,
        topic: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Replay a subscription from ``earliest``, ``latest``, an offset or a time on."""
        position, time_ms = split_start(to)
        check_subscription_name(name)
        engine = self.engine
        subscription = None if topic is None else engine.subscription_or_none(name, topic)
        if subscription is None:  # the topic is one of those that a wildcard stands for
            subscription = engine.subscription(name)
        only = None if topic == subscription.pattern else topic
        await self._done(
            lambda done: engine.seek(
                subscription, position, done, time_ms=time_ms, topic=only, partition=partition
            )
        )

    # --- dead letters -----------------------------------------------------------------------
    async def dead_letters(
        self, subscription: str, *, after: int = -1, limit: int = 100
    ) -> list[DeadLetter]:
        """Messages that the subscription gave up, oldest first."""
        return self.engine.dead_letters.letters(subscription, after=after, limit=limit)

    async def redrive(
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
        count: int = await self._value(
            self.engine.dead_letters.redrive,
            subscription,
            offsets=offsets,
            where=where,
            limit=limit,
            rate=rate,
            to=to,
        )
        return count

    async def edit_dead_letter(
        self,
        subscription: str,
        offset: int,
        *,
        value: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Correct a dead letter before it is redriven; returns its new offset."""
        new: int = await self._value(
            self.engine.dead_letters.edit, subscription, offset, value, headers
        )
        return new

    async def purge_dead_letters(self, subscription: str, offsets: list[int] | None = None) -> int:
        """Give dead letters up for good; returns how many."""
        count: int = await self._value(self.engine.dead_letters.purge, subscription, offsets)
        return count

    # --- delayed messages -------------------------------------------------------------------
    async def scheduled(self, topic: str | None = None, *, limit: int = 1000) -> list[Scheduled]:
        """Messages that wait for their time, soonest first."""
        return self.engine.schedule.waiting(topic, check_capacity(limit, "limit"))

    async def cancel(self, message_id: uuid.UUID | str) -> None:
        """A delayed message will not be published."""
        await self._done(self.engine.schedule.cancel, parse_id(message_id))

    # --- pipelines --------------------------------------------------------------------------
    async def report_pipeline(self, name: str, report: dict[str, Any]) -> dict[str, Any]:
        """How a running pipeline gets on; the answer says whether it is to ``stop``."""
        self.engine.check_open()
        return self.engine.pipelines.report(name, report)

    async def pipelines(self) -> list[dict[str, Any]]:
        """The last report of each, and whether it is ``stale``."""
        return self.engine.pipelines.documents()

    async def stop_pipeline(self, name: str) -> None:
        """Ask a pipeline to stop; it hears of it with its next report."""
        self.engine.pipelines.stop(name)

    async def forget_pipeline(self, name: str) -> None:
        """Drop one that has ended from the list."""
        self.engine.pipelines.forget(name)

    async def flush(self) -> None:
        """Everything acknowledged so far is on disk when this returns."""
        self.engine.check_open()
        await self._done(self.engine.state.flush)


def _settle(future: asyncio.Future[Any], value: Any, error: HeadraceError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


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
    position, time_ms = split_start(offset)
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
        position, time_ms = split_start(offset)
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


def topic_stats(engine: Engine, topic: Topic) -> dict[str, Any]:
    partitions = [
        {
            "partition": partition.number,
            "start_offset": partition.log.start_offset,
            "end_offset": partition.log.end_offset,
            "bytes": partition.log.size_bytes(),
            "read_only": partition.log.read_only,
        }
        for partition in topic.partitions
    ]
    return {
        "topic": topic.name,
        "partitions": partitions,
        "messages": sum(p["end_offset"] - p["start_offset"] for p in partitions),  # type: ignore[operator,misc]
        "bytes": topic.size_bytes(),
        "backlog": engine.publishing.backlog(topic),
        "subscriptions": [s.name for s in engine.subscriptions(topic.name)],
        "durability": topic.settings.durability if topic.settings.durable else "memory",
        "created": topic.created_ms,
        "settings": topic.settings.as_dict(),
    }
