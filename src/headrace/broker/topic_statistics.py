"""What is said of a topic when an operator asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.broker.attaching import attaches
from headrace.broker.subscription import Subscription
from headrace.model import INTERNAL_PREFIX
from headrace.operations.results import PartitionStats, TopicStats

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.topic import Topic


def topic_subscriptions(topic: Topic, engine: Engine | None = None) -> list[Subscription]:
    """Those that users made, also by a wildcard. The broker may have a hundred thousand on other topics."""
    if engine is not None and engine.cluster is not None:  # another node may own the partition
        known = engine.subscriptions(topic.name)
        return [each for each in known if attaches(engine, each, topic.name)]
    return [
        watcher
        for watcher in topic.partitions[0].watchers
        if isinstance(watcher, Subscription) and not watcher.name.startswith(INTERNAL_PREFIX)
    ]


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
        "subscriptions": [subscription.name for subscription in topic_subscriptions(topic, engine)],
        "durability": topic.settings.durability if topic.settings.durable else "memory",
        "created": topic.created_ms,
        "settings": topic.settings.as_dict(),
    }
