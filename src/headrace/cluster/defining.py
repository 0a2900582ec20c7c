"""What all nodes agree on, as this node knows and changes it: topics, subscriptions, named producers. Access rules are in ``access.py``.

What another node has defined is applied here as it is read; what this node defines is applied in the same way, when it is read back
(``engine/kafka/definitions.py``). So there is one way in which a topic comes to be.

To create a topic, its topic in Kafka is created first and its definition is stored last, so a definition always leads to a topic
in Kafka. If two nodes create one at the same time, the second finds it defined, and deletes its own again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker import attaching, deleting
from headrace.broker.clustering import WantedSubscription, settings_of
from headrace.broker.engine import Engine
from headrace.broker.positions import resolve_all
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.broker.topics import TopicDone
from headrace.cluster.agreed import Agreed, deleted, entry, subscribed
from headrace.engine.kafka.definitions import Definitions
from headrace.engine.kafka.log import KafkaLog
from headrace.engine.kafka.shared import SharedStorage
from headrace.errors import (
    Conflict,
    Done,
    HeadraceError,
    SubscriptionNotFound,
    TopicNotFound,
    refused_by_disk,
)
from headrace.log.interface import TopicRecord, completed
from headrace.log.storage import settings_content
from headrace.model import SubscriptionSettings, TopicSettings, check_topic_name, is_pattern

if TYPE_CHECKING:
    from headrace.cluster.forwarding import ForwardQueue

logger = logging.getLogger("headrace.cluster")
LOOK_AGAIN_S = 1.0


class Defining:
    """The part of a node that knows and changes the definitions."""

    engine: Engine
    storage: SharedStorage
    loop: asyncio.AbstractEventLoop
    agreed: Agreed
    definitions: Definitions
    _queues: dict[KafkaLog, ForwardQueue]
    _creating: dict[str, list[Done]]

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        raise NotImplementedError

    def fresh(self, topics: tuple[str, ...] = ()) -> Awaitable[None]:
        raise NotImplementedError

    def _take_new(self, logs: list[KafkaLog]) -> None:
        """Claim those that belong to slots of this node."""
        raise NotImplementedError

    def _end_shares(self, subscription: Subscription) -> None:
        raise NotImplementedError

    # --- the definitions ----------------------------------------------------------------------
    def _apply(self, payload: bytes) -> None:
        before = set(self.agreed.topics)
        item = self.agreed.fold(payload)
        kind = item.get("kind")
        if kind == "subscription":
            self._subscription(item)
        elif kind == "unsubscribed":
            self._unsubscribed(item["topic"], item["name"])
        elif kind == "access":
            self.engine.access.look()
        elif "deleted" in item:
            if before != set(self.agreed.topics):
                self._topic_deleted(item["deleted"])
        elif kind is None:
            self._topic(self.agreed.topics[item["name"]])

    def _topic(self, record: TopicRecord) -> None:
        topic = self.engine.topics.get(record.name)
        before = 0 if topic is None else len(topic.partitions)
        logs = [
            self.storage.make_log(record, number)
            for number in range(before, record.settings.partitions)
        ]
        if topic is None:
            topic = self.engine.topics.adopt(record, logs)
        else:
            self.engine.topics.grow(topic, record.settings, logs)
        attaching.attach_all(self.engine, topic, before)
        if logs:
            self.run(self._follow(logs))

    async def _follow(self, logs: list[KafkaLog]) -> None:
        await asyncio.to_thread(self.storage.link.learn, {log.replica.topic for log in logs})
        self.storage.follow(logs)
        self._take_new(logs)

    def _topic_deleted(self, name: str) -> None:
        topic = self.engine.topics.get(name)
        if topic is None:
            return
        for partition in topic.partitions:
            queue = self._queues.pop(partition.log, None)  # type: ignore[call-overload]
            if queue is not None:
                queue.fail(TopicNotFound(f"topic {name!r} was deleted"))
        for subscription in self.engine.all_subscriptions():
            if subscription.pattern == name:
                self._end_shares(subscription)
        deleting.delete_topic(self.engine, name, lambda error: None)

    def _subscription(self, item: dict[str, Any]) -> None:
        found = self.engine.subscription_or_none(item["name"], item["topic"])
        settings = settings_of(item)
        if found is None:
            found = self.engine.add_subscription(
                item["name"], item["topic"], settings, item["created_ms"]
            )
            found.owner = item.get("owner")
            found.starts = {(topic, n): offset for topic, n, offset in item.get("starts", ())}
            found.paused = bool(item.get("paused"))
            for topic in self.engine.topics.matching(found.pattern):
                if attaching.attaches(self.engine, found, topic.name):
                    for _ in attaching.attach(self.engine, found, topic):
                        pass
            return
        if settings.ordering != found.settings.ordering and found.leases:
            for cursor in list(found.cursors.values()):
                found.seek(cursor, cursor.position)
        if settings != found.settings:
            found.change(settings)
        found.paused = bool(item.get("paused"))
        found.wake()

    def _unsubscribed(self, pattern: str, name: str) -> None:
        found = self.engine.subscription_or_none(name, pattern)
        if found is not None:
            self._end_shares(found)
            self.engine.remove(found, SubscriptionNotFound(f"subscription {name!r} was deleted"))

    async def tell_all(self, *, patiently: bool = False) -> None:
        raise NotImplementedError

    async def _define(self, decide: Callable[[], list[bytes]]) -> None:
        """Change the definitions; the other nodes know it before a client is answered."""
        await self.definitions.change(decide)
        await self.tell_all()

    # --- changing them --------------------------------------------------------------------------
    def _answer(
        self, work: Coroutine[Any, Any, Any], done: Callable[[Any, HeadraceError | None], None]
    ) -> None:
        async def answer() -> None:
            result, refusal = None, None
            try:
                result = await work
            except HeadraceError as error:
                refusal = error
            except OSError as error:
                refusal = refused_by_disk(error)
            except Exception:
                logger.exception("a change of the cluster failed")
                refusal = HeadraceError("the broker has a bug here; its log says more", code="bug")
            done(result, refusal)

        self.run(answer())

    def create_then(self, name: str, go_on: Done) -> None:
        owner = self.engine.topics.owner
        self._create_once(name, go_on, lambda: self._create_if_missing(name, owner))

    def _create_once(
        self, name: str, go_on: Done, create: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        """All who need the topic wait for one creation, and go on in the order in which they came."""
        waiting = self._creating.setdefault(name, [])
        waiting.append(go_on)
        if len(waiting) > 1:
            return

        def created(error: HeadraceError | None) -> None:
            del self._creating[name]
            for each in waiting:
                each(error)

        self._answer(create(), lambda _, error: created(error))

    async def _create_if_missing(self, name: str, owner: str | None) -> None:
        await self.fresh()
        engine = self.engine
        if not engine.topics.lacks(name):
            return
        engine.check_automatic(name)
        await self._create(name, engine.topics.defaults, owner, may_exist=True)

    def create_letters(self, name: str, owner: str | None, then: Callable[[], None]) -> None:
        def told(error: HeadraceError | None) -> None:
            if error is None:
                then()
            else:
                logger.warning("topic %s for dead letters is not created yet: %s", name, error)
                self.loop.call_later(LOOK_AGAIN_S, then)

        settings = TopicSettings(retention_hours=None)
        self._create_once(name, told, lambda: self._create(name, settings, owner, may_exist=True))

    async def ensure(self, name: str) -> None:
        """The topic is there."""
        if self.engine.topics.lacks(name):
            done: asyncio.Future[None] = self.loop.create_future()

            def created(error: HeadraceError | None) -> None:
                if not done.done():
                    done.set_result(None) if error is None else done.set_exception(error)

            self.create_then(name, created)
            await done

    def create_topic(self, name: str, settings: TopicSettings, done: TopicDone) -> None:
        self._answer(self._create(name, settings, self.engine.topics.owner, may_exist=False), done)

    async def _create(
        self, name: str, settings: TopicSettings, owner: str | None, *, may_exist: bool
    ) -> Topic:
        self.engine.topics.check_new(name, settings)
        record = self._record(name, settings)._replace(owner=owner)
        kafka = self.storage.kafka
        await asyncio.to_thread(kafka.create, {kafka.name_of(record): record.settings.partitions})
        used = False

        def decide() -> list[bytes]:
            nonlocal used
            used = name not in self.agreed.topics
            if not used and not may_exist:
                raise Conflict(
                    f"topic {name!r} exists already, with other settings", code="topic_exists"
                )
            return [settings_content(record)] if used else []

        try:
            await self._define(decide)
        except Conflict:
            self.run(self._remove([record]))
            raise
        if not used:
            self.run(self._remove([record]))
        return self.engine.topics.find(name)

    def change_topic(self, topic: Topic, settings: TopicSettings, done: TopicDone) -> None:
        self.engine.topics.check_change(topic, settings)

        async def change() -> Topic:
            kafka, record = self.storage.kafka, topic.record
            if settings.partitions > len(topic.partitions):
                await asyncio.to_thread(
                    kafka.add_partitions, kafka.name_of(record), settings.partitions
                )

            def decide() -> list[bytes]:
                known = self.agreed.topics.get(topic.name)
                if known is None or known.incarnation != record.incarnation:
                    raise TopicNotFound(f"topic {topic.name!r} was deleted")
                return [settings_content(known._replace(settings=settings, adopted=False))]

            await self._define(decide)
            return topic

        self._answer(change(), done)

    def delete_topic(self, name: str, done: Done) -> None:
        check_topic_name(name)

        async def delete() -> None:
            gone: list[TopicRecord] = []

            def decide() -> list[bytes]:
                known = self.agreed.topics.get(name)
                if known is None:
                    raise TopicNotFound(f"there is no topic {name!r}; create it, or publish to it")
                gone[:] = [known]
                return [deleted(known)]

            await self._define(decide)
            self.run(self._remove(gone))

        self._answer(delete(), lambda _, error: done(error))

    async def subscribe(self, wanted: WantedSubscription) -> None:
        engine = self.engine
        name, pattern, start, start_time_ms, settings, owner = wanted
        attaching.check_names(name, pattern)
        existing = engine.subscription_or_none(name, pattern)
        starts: list[list[Any]] = []
        if existing is None:
            if not is_pattern(pattern):
                if start_time_ms is None and isinstance(start, int) and start:
                    engine.topics.find(pattern)  # one that is made now does not have that offset
                await self.ensure(pattern)
            topics = engine.topics.matching(pattern)
            partitions = [each for topic in topics for each in topic.partitions]
            attaching.check_room(engine.all_subscriptions(), len(partitions))
            if start_time_ms is not None or start != "earliest":
                await self.fresh(tuple(topic.name for topic in topics))
                resolve = partial(resolve_all, engine, time_ms=start_time_ms, known={})
                found = await completed(partial(resolve, partitions, start))
                starts = [[p.topic, p.number, offset] for p, offset in found.items()]
        else:
            changed = existing.settings.but(settings)
            if changed.ordering != existing.settings.ordering and (
                existing.members or existing.leases
            ):
                raise Conflict(
                    f"the ordering of {name!r} cannot change while messages are out with members",
                    code="subscription_busy",
                )
        made = entry(
            kind="subscription",
            name=name,
            topic=pattern,
            settings=SubscriptionSettings.of(settings).as_dict(),
            created_ms=engine.now_ms(),
            owner=owner,
            paused=False,
            starts=starts,
        )

        def decide() -> list[bytes]:
            item = self.agreed.subscriptions.get((pattern, name))
            if item is None:
                return [made]
            merged = settings_of(item).but(settings).as_dict()
            return [] if merged == item["settings"] else [entry(**{**item, "settings": merged})]

        await self._define(decide)

    def define(self, subscription: Subscription, done: Done) -> None:
        self._answer(
            self._define(lambda: [subscribed(subscription)]),
            lambda _, error: done(error),
        )

    def undefine(self, subscription: Subscription, done: Done) -> None:
        pattern, name = subscription.key

        def decide() -> list[bytes]:
            if (pattern, name) not in self.agreed.subscriptions:
                raise SubscriptionNotFound(f"there is no subscription {name!r} over {pattern!r}")
            return [entry(kind="unsubscribed", name=name, topic=pattern)]

        self._answer(self._define(decide), lambda _, error: done(error))

    def name_producer(self, name: str, new_id: int, done: Callable[[int, int, Any], None]) -> None:
        given = (new_id, 0)

        def decide() -> list[bytes]:
            nonlocal given
            known = self.agreed.producers.get(name)
            given = (new_id, 0) if known is None else (known[0], known[1] + 1)
            return [entry(kind="producer", name=name, id=given[0], epoch=given[1])]

        self._answer(self._define(decide), lambda _, error: done(*given, error))

    def _record(self, name: str, settings: TopicSettings) -> TopicRecord:
        if not settings.durable:
            settings = settings.but({"durable": True})
        number = self.engine.random.getrandbits(53)
        now, owner = self.engine.now_ms(), self.engine.topics.owner
        return TopicRecord(name, settings, number, now, owner)

    async def _remove(self, records: list[TopicRecord]) -> None:
        for record in records:
            try:
                await asyncio.to_thread(
                    self.storage.kafka.delete, self.storage.kafka.name_of(record)
                )
            except OSError as error:
                logger.warning("topic %s stays in Kafka: %s", record.name, error)
