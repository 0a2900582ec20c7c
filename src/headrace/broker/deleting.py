"""Deleting a topic, and what goes with it: its followers, its subscriptions, its delayed messages.

There may be a hundred thousand subscriptions on it and millions of delayed messages for it, so they go in
turns of the loop. The topic itself is gone at once: nobody finds it, and nobody can publish to it. Its name is
free again when its last subscription is gone (``Topics.when_unchanged``), and the answer comes when the
journal has all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.broker.subscription import Subscription
from headrace.errors import HeadraceError, OutcomeUnknown, TopicNotFound
from headrace.model import check_topic_name

if TYPE_CHECKING:
    from headrace.broker.engine import Engine


def delete_topic(engine: Engine, name: str, done: Callable[[HeadraceError | None], None]) -> None:
    check_topic_name(name)
    topic = engine.topics.find(name)
    deletion = engine.topics.storage.delete(topic.record)
    engine.events.ended(topic)
    for follower in engine.open_followers():
        follower.detach(name)
    subscriptions = dict.fromkeys(s for s in engine.all_subscriptions() if s.pattern == name)
    for partition in topic.partitions[:1] if engine.cluster is None else topic.partitions:
        for watcher in partition.watchers:
            if isinstance(watcher, Subscription):
                subscriptions[watcher] = None
    engine.topics.begin_deletion(topic)
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
