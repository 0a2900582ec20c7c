"""Which topics a subscription or a follower gets: those that its pattern matches and its owner may read.

An owner is a principal (``user:alice``). A subscription without one, made by an administrator or while
access control was off, gets all that its pattern matches. So does a subscription on one topic: its owner
had the right when it was created, and each member needs the right (``permissions.py``).

When rights change, wildcards leave topics that their owners may no longer read, and forget their position
in them; they get topics that are new to them from the first message that is kept.

A subscription has a position (a cursor) in each partition. A wildcard may need ten thousand of them, and so may a topic
with many partitions or many wildcards over it. The first ``NOW_MAX`` are made at once, the others in pieces
(``pace.py``). A cursor's number is written to the journal when the cursor is made, and the definition of a new
subscription after all of its cursors: a crash before that leaves no subscription, instead of one that begins elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.follower import Follower
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition, Topic
from headrace.errors import Closed, Done, HeadraceError, InvalidArgument, SubscriptionNotFound
from headrace.model import check_pattern, check_subscription_name, is_pattern, pattern_matches

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

NOW_MAX = 500
"""So many steps are taken in the turn of the loop in which somebody asks."""


def attaches(engine: Engine, subscription: Subscription, topic: str) -> bool:
    """Whether a subscription gets the messages of a topic."""
    pattern, owner = subscription.pattern, subscription.owner
    if not pattern_matches(pattern, topic):
        return False
    if owner is None or not is_pattern(pattern):
        return True
    return engine.access.owner_may_consume(owner, topic, subscription.name)


def attach(
    engine: Engine, subscription: Subscription, topic: Topic, *, write: bool = True
) -> Iterator[None]:
    """Give the subscription a cursor in every partition where it has none: at the start, or where it was to begin."""
    beginning = engine.beginnings.get(subscription)
    for partition in tuple(topic.partitions):
        if not _is_current(engine, subscription) or engine.topics.get(topic.name) is not topic:
            return
        place = (topic.name, partition.number)
        if engine.serves(partition) and place not in subscription.cursors:
            offset = None if beginning is None else beginning.offsets.get(partition)
            offset = subscription.starts.get(place) if offset is None else offset
            start = partition.log.start_offset if offset is None else offset
            engine.make_cursor(subscription, partition, start, write=write)
            yield
    if subscription.members and engine.access.is_on:
        engine.on_attached(subscription)


def attach_all(engine: Engine, topic: Topic, before: int) -> None:
    """Give the partitions from ``before`` on to everybody who gets the topic."""
    if len(topic.partitions) == before:
        return
    for follower in engine.open_followers():
        if follower.matches(topic.name):
            for partition in topic.partitions[before:]:
                if follower not in partition.watchers:
                    follower.attach(partition, 0)

    def steps() -> Iterator[None]:
        for subscription in engine.all_subscriptions():
            if attaches(engine, subscription, topic.name):
                yield from attach(engine, subscription, topic)
            yield  # to look takes time, too

    _take_steps(engine, steps())


def _take_steps(
    engine: Engine, steps: Iterator[None], done: Callable[[], None] | None = None
) -> None:
    """The first of them now, the others in pieces."""
    for number, _ in enumerate(steps, 1):
        if number == NOW_MAX:
            engine.pace.go_through(steps, lambda _: None, done or (lambda: None))
            return
    if done is not None:
        done()


def _is_current(engine: Engine, subscription: Subscription) -> bool:
    found = engine.subscription_or_none(subscription.name, subscription.pattern)
    return found is subscription and not engine.closing and engine.failed is None


@dataclass(slots=True, eq=False)
class Beginning:
    """A new subscription that does not have all of its cursors yet."""

    offsets: dict[Partition, int]
    """Where it is to begin."""
    waiting: list[Done]


def begin(
    engine: Engine, subscription: Subscription, offsets: dict[Partition, int], done: Done
) -> None:
    """Make its cursors, and store it. If its topic is being created and cannot be stored, it goes, too."""

    def refused(error: HeadraceError) -> None:
        known = engine.subscription_or_none(subscription.name, subscription.pattern)
        if known is subscription:
            engine.remove(subscription, error)

    engine.topics.if_refused(subscription.pattern, refused)
    beginning = Beginning(offsets, [engine.topics.once_made(subscription.pattern, done)])
    engine.beginnings[subscription] = beginning

    def steps() -> Iterator[None]:
        for topic in dict.fromkeys(partition.topic for partition in beginning.offsets):
            found = engine.topics.get(topic)
            if found is not None and attaches(engine, subscription, topic):
                yield from attach(engine, subscription, found)
            yield

    def answer(error: HeadraceError | None) -> None:
        for done in beginning.waiting:
            done(error)

    def attached() -> None:
        del engine.beginnings[subscription]
        if _is_current(engine, subscription):
            engine.keep(subscription)
            engine.state.flush(answer)
        elif engine.failed is not None or engine.closing:
            answer(engine.failed or Closed("the broker is closed"))
        else:
            answer(SubscriptionNotFound(f"subscription {subscription.name!r} was deleted"))

    _take_steps(engine, steps(), attached)


def check_names(name: str, pattern: str, *, internal: bool = False) -> None:
    """A subscription's name, and the topic or pattern that it is to read."""
    check_subscription_name(name, internal=internal)
    if not internal:
        check_pattern(pattern)


def check_positions(engine: Engine, topic: str, partitions: int) -> None:
    """Refuse partitions that would give the wildcards over the topic too many positions."""
    more = partitions * sum(
        is_pattern(s.pattern) and pattern_matches(s.pattern, topic)
        for s in engine.all_subscriptions()
    )
    if more:
        _check_positions(engine.all_subscriptions(), more)


def check_room(subscriptions: Collection[Subscription], partitions: int) -> None:
    """Refuse a new subscription to so many partitions if the broker has too many already."""
    if len(subscriptions) >= limits.SUBSCRIPTIONS_MAX:
        raise InvalidArgument(
            f"the broker has {limits.SUBSCRIPTIONS_MAX} subscriptions, the limit",
            code="too_many_subscriptions",
        )
    if partitions > 1:
        _check_positions(subscriptions, partitions)


def _check_positions(subscriptions: Collection[Subscription], more: int) -> None:
    positions = sum([len(subscription.cursors) for subscription in subscriptions])
    if positions + more > limits.POSITIONS_MAX:
        raise InvalidArgument(
            f"the subscriptions have {positions} positions, one in each partition, and may have "
            f"{limits.POSITIONS_MAX}; this needs {more} more. Delete subscriptions, or use "
            "narrower wildcards",
            code="too_many_subscriptions",
        )


def reattach(engine: Engine) -> None:
    """The rights have changed."""

    def steps() -> Iterator[None]:
        for subscription in engine.all_subscriptions():
            if subscription.owner is not None and is_pattern(subscription.pattern):
                yield from _reattach(engine, subscription)
            yield

    _take_steps(engine, steps())


def _reattach(engine: Engine, subscription: Subscription) -> Iterator[None]:
    for name in {topic for topic, _ in subscription.cursors}:
        if not _is_current(engine, subscription):
            return
        if not attaches(engine, subscription, name):
            for cursor in subscription.detach(name):
                engine.state.forget(cursor)
        yield
    for topic in tuple(engine.topics):
        if attaches(engine, subscription, topic.name):
            yield from attach(engine, subscription, topic)
        yield


def refollow(engine: Engine, follower: Follower) -> None:
    """The rights of its owner have changed: leave topics, and follow others from now on."""
    for name in follower.topics():
        if not follower.matches(name):
            follower.detach(name)
    for topic in engine.topics:
        if topic.name not in follower.topics() and follower.matches(topic.name):
            for partition in topic.partitions:
                follower.attach(partition, partition.log.end_offset)
