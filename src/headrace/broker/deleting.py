"""Deleting a topic, and what goes with it: its followers, its subscriptions, its delayed messages.

There may be a hundred thousand subscriptions on it and millions of delayed messages for it, so they go in
turns of the loop. The topic itself is gone at once: nobody finds it, and nobody can publish to it. A worker moves its
directory away; if the disk refuses that, the topic is back, with all that it had. Its name is
free again when its last subscription is gone and its logs are closed (``Topics.when_unchanged``), and the answer comes when the
journal has all of it.

A topic that could not be created goes in a similar way (``abandon``), but only the subscriptions that were created with it go, too
(``Engine.subscribe``). Others have been there before, and wait for the topic to be created again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.broker import attaching
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.errors import HeadraceError, OutcomeUnknown, TopicNotFound
from headrace.log.interface import Deletion
from headrace.model import check_topic_name

if TYPE_CHECKING:
    from headrace.broker.engine import Engine


def delete_topic(engine: Engine, name: str, done: Callable[[HeadraceError | None], None]) -> None:
    check_topic_name(name)
    topic = engine.topics.find(name)
    storage = engine.topics.storage
    if engine.cluster is not None or not storage.durable:
        deletion = storage.delete(topic.record)
        engine.topics.begin_deletion(topic)
        _forget(engine, topic, deletion, done)
        return

    def moved(deletion: Deletion | None, error: BaseException | None) -> None:
        if deletion is None:
            engine.topics.undo_deletion(topic)
            _attach_again(engine, topic)
            done(engine.topics.not_stored(topic, error or RuntimeError("no deletion")))
        else:
            _forget(engine, topic, deletion, done)

    engine.topics.check_unchanged(name)
    engine.topics.begin_deletion(topic)
    engine.workers.submit(partial(storage.delete, topic.record), moved)


def _attach_again(engine: Engine, topic: Topic) -> None:
    """Wildcards that came while it was gone get it, too."""
    for follower in engine.open_followers():
        for partition in topic.partitions if follower.matches(topic.name) else ():
            if follower not in partition.watchers:
                follower.attach(partition, partition.log.end_offset)
    attaching.attach_all(engine, topic, 0)


def _forget(
    engine: Engine,
    topic: Topic,
    deletion: Deletion,
    done: Callable[[HeadraceError | None], None],
) -> None:
    """No later start finds it: tell everybody who has it."""
    name = topic.name
    engine.events.ended(topic)
    subscriptions = dict.fromkeys(s for s in engine.all_subscriptions() if s.pattern == name)
    subscriptions |= _detach_followers(engine, topic)
    under_way = 2

    def forget(subscription: Subscription) -> None:
        for cursor in subscription.detach(name):
            engine.state.forget(cursor)
        known = engine.subscription_or_none(subscription.name, subscription.pattern)
        if subscription.pattern == name and known is subscription:
            engine.remove(subscription, TopicNotFound(f"topic {name!r} was deleted"))

    def done_one() -> None:
        nonlocal under_way
        under_way -= 1
        if under_way == 0:
            engine.state.flush(flushed)

    def flushed(error: HeadraceError | None) -> None:
        # A journal that finds no room is written later; the topic is gone all the same.
        done(error if isinstance(error, OutcomeUnknown) else deletion.unsure)

    engine.schedule.forget_topic(name, done_one)
    engine.pace.go_through(
        subscriptions, forget, lambda: engine.topics.end_deletion(topic, deletion, done_one)
    )


def _detach_followers(engine: Engine, topic: Topic) -> dict[Subscription, None]:
    """Returns the subscriptions that have a position in the topic."""
    for follower in engine.open_followers():
        follower.detach(topic.name)
    partitions = topic.partitions[:1] if engine.cluster is None else topic.partitions
    watchers = [watcher for partition in partitions for watcher in partition.watchers]
    return {watcher: None for watcher in watchers if isinstance(watcher, Subscription)}


def abandon(engine: Engine, topic: Topic, done: Callable[[], None]) -> None:
    """The topic could not be stored: nobody has it any more when ``done`` is called."""

    def forget(subscription: Subscription) -> None:
        for cursor in subscription.detach(topic.name):
            engine.state.forget(cursor)

    engine.publishing.flush()  # what is gathered for it fails as the rest does
    engine.topics.remove(topic)
    engine.access.forget_topic(topic.name)
    engine.pace.go_through(_detach_followers(engine, topic), forget, done)
