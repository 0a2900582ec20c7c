"""The operations of ``operations/catalog.py``, carried out on an engine.

Each method has the name of its declaration and takes the arguments by their names on the wire, checked.
:meth:`Administration.call` is the one place through which every operation of every protocol passes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.broker import positions as places
from headrace.broker.engine import Engine
from headrace.broker.topic import Topic
from headrace.errors import MessageNotFound, unreadable
from headrace.facade import settle
from headrace.log.interface import completed
from headrace.model import (
    DeadLetter,
    Message,
    ProducerIdentity,
    Scheduled,
    Start,
    split_position,
)
from headrace.operations.declaring import Operation
from headrace.operations.results import (
    BrokerInfo,
    DeadLetterCount,
    PartitionPosition,
    PartitionStats,
    PipelineReport,
    PipelineStats,
    Redriven,
    StopWanted,
    SubscriptionStats,
    TopicStats,
)

WAIT_S_MAX = 60.0
"""Of one ``wait_for``; a caller that waits longer asks again."""
LETTER_BYTES_MAX = 16 << 20
"""Of the dead letters of one answer."""


class New(dict[str, Any]):
    """A result that did not exist before. HTTP answers 201 for it."""


class Administration:
    def __init__(self, engine: Engine):
        self.engine = engine

    async def call(
        self, operation: Operation, given: dict[str, Any], *, strict: bool = True
    ) -> Any:
        """Check the arguments and carry the operation out."""
        checked = operation.check(given, strict=strict)
        self.engine.check_open()
        try:
            return await getattr(self, operation.method)(**checked)
        except OSError as error:  # of a read: what is written answers with an error of its own
            raise unreadable(error) from error

    # --- topics -----------------------------------------------------------------------------
    async def create_topic(self, topic: str, settings: dict[str, Any]) -> TopicStats:
        existing = self.engine.topics.get(topic)
        if existing is not None and existing.settings.but(settings) == existing.settings:
            return topic_stats(self.engine, existing)
        made = self.engine.create_topic(topic, self.engine.topics.defaults.but(settings))
        return New(topic_stats(self.engine, made))  # type: ignore[return-value]

    async def change_topic(self, topic: str, settings: dict[str, Any]) -> TopicStats:
        return topic_stats(self.engine, self.engine.change_topic(topic, settings))

    async def delete_topic(self, topic: str) -> None:
        await done(self.engine.delete_topic, topic)

    async def list_topics(self) -> list[TopicStats]:
        found = {t.name: t for t in self.engine.topics if not t.name.startswith("__")}
        return [topic_stats(self.engine, found[name]) for name in sorted(found)]

    async def topic_stats(self, topic: str, create: bool) -> TopicStats:
        found = self.engine.topic_for_publish(topic) if create else self.engine.topics.find(topic)
        return topic_stats(self.engine, found)

    async def offset_at(self, topic: str, at: Start, partition: int) -> int:
        position, time_ms = split_position(at)
        place = self.engine.partition(topic, partition)
        return await completed(lambda: self.engine.resolve(place, position, time_ms=time_ms))

    async def find(self, id: uuid.UUID) -> Message:
        return await completed(lambda: self.engine.find_message(id))

    # --- subscriptions ------------------------------------------------------------------------
    async def create_subscription(
        self, subscription: str, topic: str, start: Start, settings: dict[str, Any]
    ) -> SubscriptionStats:
        position, time_ms = split_position(start)
        is_new = self.engine.subscription_or_none(subscription, topic) is None
        await done(
            lambda done: self.engine.subscribe(
                subscription,
                topic,
                start=position,
                start_time_ms=time_ms,
                settings=settings,
                done=done,
            )
        )
        stats = self.engine.subscription(subscription, topic).statistics()
        return New(stats) if is_new else stats  # type: ignore[return-value]

    async def delete_subscription(self, subscription: str, topic: str | None) -> None:
        await done(self.engine.unsubscribe, self.engine.subscription(subscription, topic))

    async def subscriptions(self, topic: str | None) -> list[SubscriptionStats]:
        return [subscription.statistics() for subscription in self.engine.subscriptions(topic)]

    async def subscription_stats(self, subscription: str, topic: str | None) -> SubscriptionStats:
        return self.engine.subscription(subscription, topic).statistics()

    async def seek(
        self, subscription: str, to: Start, topic: str | None, partition: int | None
    ) -> SubscriptionStats:
        position, time_ms = split_position(to)
        engine = self.engine
        found = None if topic is None else engine.subscription_or_none(subscription, topic)
        if found is None:  # the topic is one of those that a pattern matches
            found = engine.subscription(subscription)
        only = None if topic == found.pattern else topic
        await done(
            lambda done: engine.seek(
                found, position, done, time_ms=time_ms, topic=only, partition=partition
            )
        )
        return found.statistics()

    async def advance(
        self, subscription: str, positions: places.Positions, topic: str | None
    ) -> None:
        found = self.engine.subscription(subscription, topic)
        await done(places.advance, self.engine, found, positions)

    # --- jobs of many tasks -------------------------------------------------------------------
    async def positions(
        self, topics: str | list[str], at: int | None
    ) -> dict[str, list[PartitionPosition]]:
        return await completed(lambda: places.describe(self.engine, topics, at))

    async def wait_for(
        self, positions: places.Positions, topics: str | list[str] | None, wait: float
    ) -> bool:
        return await places.wait_for(self.engine, positions, topics, min(wait, WAIT_S_MAX))

    async def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        return bool(await answer(self.engine.staging.commit, name, number, pieces))

    async def abort_staged(self, pieces: list[str]) -> int:
        await done(self.engine.staging.abort, pieces)
        return len(pieces)

    # --- dead letters -----------------------------------------------------------------------
    async def dead_letter_topics(self) -> list[DeadLetterCount]:
        letters = self.engine.dead_letters.topics()
        return [{"topic": topic, "letters": count} for topic, count in letters]

    async def dead_letters(self, subscription: str, after: int, limit: int) -> list[DeadLetter]:
        listing = self.engine.dead_letters.listing(subscription, after=after, limit=limit)
        found = await completed(listing.collect)
        size = 0
        for count, letter in enumerate(found):  # at least one, and no more than an answer may have
            size += len(letter.message.value)
            if size > LETTER_BYTES_MAX and count:
                return found[:count]
        return found

    async def dead_letter(self, subscription: str, offset: int) -> DeadLetter:
        letters = self.engine.dead_letters
        return await completed(lambda: letters.show(subscription, offset))

    async def redrive(
        self,
        subscription: str,
        offsets: list[int] | None,
        reason: str | None,
        topic: str | None,
        limit: int | None,
        rate: float | None,
        to: str,
    ) -> Redriven:
        result: Redriven = await answer(
            self.engine.dead_letters.redrive,
            subscription,
            offsets=offsets,
            where=_letter_filter(reason, topic),
            limit=limit,
            rate=rate,
            to=to,
        )
        return result

    async def edit_dead_letter(
        self,
        subscription: str,
        offset: int,
        value: bytes | None,
        headers: Mapping[str, str] | None,
    ) -> int:
        new: int = await answer(self.engine.dead_letters.edit, subscription, offset, value, headers)
        return new

    async def purge_dead_letters(self, subscription: str, offsets: list[int] | None) -> int:
        count: int = await answer(self.engine.dead_letters.purge, subscription, offsets)
        if offsets and not count:
            raise MessageNotFound(
                f"{subscription!r} has no dead letter {', '.join(map(str, offsets[:5]))}, or it was "
                "dealt with"
            )
        return count

    # --- delayed messages -------------------------------------------------------------------
    async def scheduled(self, topic: str | None, limit: int) -> list[Scheduled]:
        return await completed(lambda: self.engine.schedule.waiting(topic, limit))

    async def cancel(self, id: uuid.UUID) -> None:
        await done(self.engine.schedule.cancel, id)

    # --- pipelines --------------------------------------------------------------------------
    async def report_pipeline(self, pipeline: str, report: PipelineReport) -> StopWanted:
        return self.engine.pipelines.report(pipeline, report)

    async def pipelines(self) -> list[PipelineStats]:
        return list(self.engine.pipelines)

    async def pipeline_stats(self, pipeline: str) -> PipelineStats:
        return self.engine.pipelines.stats(pipeline)

    async def stop_pipeline(self, pipeline: str) -> PipelineStats:
        return self.engine.pipelines.stop(pipeline)

    async def forget_pipeline(self, pipeline: str) -> None:
        self.engine.pipelines.forget(pipeline)

    # --- the broker -------------------------------------------------------------------------
    async def producer(self, name: str | None) -> ProducerIdentity:
        future: asyncio.Future[ProducerIdentity] = asyncio.get_running_loop().create_future()
        self.engine.publishing.producer(
            name, lambda pid, epoch, error: settle(future, ProducerIdentity(pid, epoch), error)
        )
        return await future

    async def flush(self) -> None:
        await done(self.engine.state.flush)

    async def info(self) -> BrokerInfo:
        engine = self.engine
        return {
            "server": "headrace",
            "topics": sum(not topic.name.startswith("__") for topic in engine.topics),
            "subscriptions": len(engine.subscriptions()),
            "max_message_size": engine.max_message_size,
            "durable": engine.directory is not None,
            "time": engine.now_ms(),
        }


# --- calls that answer through a callback -----------------------------------------------------------
async def done(call: Callable[..., Any], *args: Any) -> None:
    """Await a call that answers ``done(error)``, its last argument."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await completed(lambda: call(*args, partial(settle, future, None)))
    await future


async def answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a call that answers ``done(value, error)``."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    await completed(lambda: call(*args, partial(settle, future), **kwargs))
    return await future


def _letter_filter(reason: str | None, topic: str | None) -> Callable[[DeadLetter], bool] | None:
    if reason is None and topic is None:
        return None
    part = None if reason is None else reason.lower()

    def wanted(letter: DeadLetter) -> bool:
        return (part is None or part in letter.reason.lower()) and (
            topic is None or letter.message.topic == topic
        )

    return wanted


def topic_stats(engine: Engine, topic: Topic) -> TopicStats:
    partitions: list[PartitionStats] = [
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
        "messages": sum(p["end_offset"] - p["start_offset"] for p in partitions),
        "bytes": topic.size_bytes(),
        "backlog": engine.publishing.backlog(topic),
        "subscriptions": [s.name for s in engine.subscriptions(topic.name)],
        "durability": topic.settings.durability if topic.settings.durable else "memory",
        "created": topic.created_ms,
        "settings": topic.settings.as_dict(),
    }
