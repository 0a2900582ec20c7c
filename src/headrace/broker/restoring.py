"""What the journal has to know, and the subscriptions that it holds, as they stood when the broker ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headrace.broker import state as entries
from headrace.broker.attempts import recall
from headrace.broker.cursor import Cursor
from headrace.broker.state import Loaded
from headrace.broker.subscription import Subscription
from headrace.model import SubscriptionSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")


def definition(subscription: Subscription) -> bytes:
    return entries.define(
        subscription.number,
        subscription.name,
        subscription.pattern,
        subscription.settings.as_dict(),
        subscription.created_ms,
        subscription.owner,
        subscription.paused,
    )


def snapshot(engine: Engine) -> Iterator[bytes]:
    """Everything the journal has to know, for its rewriting. Things may change between two items."""
    for name, known in tuple(engine.publishing.producers.items()):
        yield entries.name_producer(name, *known)
    yield from decisions(engine)
    for subscription in engine.all_subscriptions():
        yield definition(subscription)
        yield from positions(engine, subscription)


def decisions(engine: Engine) -> Iterator[bytes]:
    for decision in tuple(engine.staging.decisions.values()):
        yield entries.decide(decision.as_dict())


def positions(
    engine: Engine, subscription: Subscription, wanted: Callable[[Cursor], bool] = lambda _: True
) -> Iterator[bytes]:
    for cursor in tuple(subscription.cursors.values()):
        topic = engine.topics.get(cursor.partition.topic)
        if topic is None or not wanted(cursor):
            continue  # it is being deleted
        yield entries.number_cursor(cursor, subscription.number, topic.incarnation)
        yield cursor.snapshot()
        if cursor.reserved or cursor.doubts:
            yield entries.reserve(cursor)


def restored(engine: Engine, loaded: Loaded, *, clean: bool) -> list[Subscription]:
    """With the cursors that the journal knows. ``clean``: the broker ended in good order."""
    by_number = {
        number: Subscription(
            engine,
            number,
            item["name"],
            item["topic"],
            SubscriptionSettings.of(_known(item["settings"])),
            item["created_ms"],
            item.get("owner"),
            bool(item.get("paused")),
        )
        for number, item in loaded.subscriptions.items()
    }
    restore_cursors(engine, loaded, by_number, clean=clean)
    return list(by_number.values())


def restore_cursors(
    engine: Engine,
    loaded: Loaded,
    by_number: dict[int, Subscription],
    *,
    clean: bool,
    renumber: Callable[[int], int] = lambda number: number,
) -> None:
    for number, item in loaded.cursors.items():
        owner = by_number.get(item["subscription"])
        topic = engine.topics.get(item["topic"])
        if owner is None or topic is None or item["partition"] >= len(topic.partitions):
            continue
        if topic.incarnation != item["incarnation"]:
            continue
        partition = topic.partitions[item["partition"]]
        if not partition.log.owned or (topic.name, partition.number) in owner.cursors:
            continue
        cursor = Cursor(renumber(number), partition, partition.log.start_offset)
        for payload in loaded.deltas.get(number, ()):
            cursor.apply(payload)
        recall(cursor, loaded.reserves.get(number), owner.settings.max_deliveries, clean=clean)
        end = partition.log.end_offset
        if cursor.position > end or cursor.high > end:
            # Memory topics start empty; a durable one can only be short after a loss.
            if not partition.log.durable:
                cursor.seek(0)
            else:
                logger.error(
                    "subscription %s was beyond the end of %s/%d; it goes on at the end",
                    owner.name,
                    topic.name,
                    partition.number,
                )
                cursor.seek(min(cursor.position, end))
        # Records that are gone take their failed attempts along: others will have these offsets.
        cursor.forget_attempts(end)
        owner.attach(cursor)


def _known(settings: dict[str, object]) -> dict[str, object]:
    """Without settings that only another version has."""
    known = SubscriptionSettings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name in known}
