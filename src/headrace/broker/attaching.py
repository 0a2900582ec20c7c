"""Which topics a subscription or a follower gets: those that its pattern matches and its owner may read.

An owner is a principal (``user:alice``). A subscription without one, made by an administrator or while
access control was off, gets all that its pattern matches. So does a subscription on one topic: its owner
had the right when it was created, and each member needs the right (``permissions.py``).

When rights change, wildcards leave topics that their owners may no longer read, and forget their position
in them; they get topics that are new to them from the first message that is kept.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.follower import Follower
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.errors import InvalidArgument
from headrace.model import is_pattern, pattern_matches

if TYPE_CHECKING:
    from headrace.broker.engine import Engine


def attaches(engine: Engine, subscription: Subscription, topic: str) -> bool:
    """Whether a subscription gets the messages of a topic."""
    pattern, owner = subscription.pattern, subscription.owner
    if not pattern_matches(pattern, topic):
        return False
    if owner is None or not is_pattern(pattern):
        return True
    return engine.access.owner_may_consume(owner, topic, subscription.name)


def attach_all(engine: Engine, topic: Topic, before: int) -> None:
    """Give the partitions from ``before`` on to everybody who gets the topic."""
    if len(topic.partitions) == before:
        return
    for subscription in engine.all_subscriptions():
        if attaches(engine, subscription, topic.name):
            engine.attach(subscription, topic)
    for follower in engine.open_followers():
        if follower.matches(topic.name):
            for partition in topic.partitions[before:]:
                follower.attach(partition, 0)


def check_room(subscriptions: Collection[Subscription], partitions: int) -> None:
    """Refuse a new subscription to so many partitions if the broker has too many already."""
    if len(subscriptions) >= limits.SUBSCRIPTIONS_MAX:
        raise InvalidArgument(
            f"the broker has {limits.SUBSCRIPTIONS_MAX} subscriptions, the limit",
            code="too_many_subscriptions",
        )
    if partitions > 1:
        positions = sum([len(subscription.cursors) for subscription in subscriptions])
        if positions + partitions > limits.POSITIONS_MAX:
            raise InvalidArgument(
                f"the subscriptions have {positions} positions, one in each partition, and may have "
                f"{limits.POSITIONS_MAX}; this one needs {partitions} more. Delete subscriptions, or use a "
                "narrower wildcard",
                code="too_many_subscriptions",
            )


def reattach(engine: Engine) -> None:
    """The rights have changed. One wildcard in each turn of the loop: there may be many."""
    owned = [s for s in engine.all_subscriptions() if s.owner is not None and is_pattern(s.pattern)]

    def step() -> None:
        if not owned or engine.closing or engine.failed is not None:
            return
        subscription = owned.pop()
        if engine.subscription_or_none(subscription.name, subscription.pattern) is subscription:
            _reattach(engine, subscription)
        engine.call_soon(step)

    step()


def _reattach(engine: Engine, subscription: Subscription) -> None:
    for name in {topic for topic, _ in subscription.cursors}:
        if not attaches(engine, subscription, name):
            for cursor in subscription.detach(name):
                engine.state.forget(cursor)
    for topic in engine.topics:
        if attaches(engine, subscription, topic.name):
            engine.attach(subscription, topic)


def refollow(engine: Engine, follower: Follower) -> None:
    """The rights of its owner have changed: leave topics, and follow others from now on."""
    for name in follower.topics():
        if not follower.matches(name):
            follower.detach(name)
    for topic in engine.topics:
        if topic.name not in follower.topics() and follower.matches(topic.name):
            for partition in topic.partitions:
                follower.attach(partition, partition.log.end_offset)
