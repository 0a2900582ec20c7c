"""The broker's own events: what was delivered and published, as records of the topic ``__events``.

One JSON record for each subscription and each topic in which something happened within the interval, so
that traffic can be read, kept and analysed like any other data, by ``fetch`` or with Spark. The key of a
record is the name of the subscription or topic, the value::

    {"type": "deliveries", "subscription": "billing", "topic": "orders", "from": ms, "to": ms,
     "delivered": 10, "redelivered": 2, "acked": 8, "nacked": 1, "timeouts": 1, "dead_lettered": 0,
     "expired": 0, "skipped": 0, "lost": 0, "attempts": {"1": 8, "2": 1, "3": 1},
     "latency_ms": {"count": 8, "sum": 90, "max": 31, "p50": 9, "p99": 31},
     "dead_letters": {"no stock": 1}, "lag": 12, "members": 2}
    {"type": "topic", "topic": "orders", "from": ms, "to": ms, "messages": 10, "bytes": 1000,
     "consumed": 8}

Rules:
- The counters are those that exist anyway; an event is their difference since the last one. Nothing is
  added on the way of a message but what ``activity`` adds to a lease.
- Events never stand in anybody's way. They are synced now and then, not at once. While there is no room,
  none are made, and the next one tells of the longer time; those that the disk refuses are left out.
- The topic is made when there is first something to tell. A broker in memory has none, and one that ends
  before its first interval does not make it.
- A round over many subscriptions is taken in steps, each a turn of the loop.

Rejected: a record for each delivery (it costs more than the delivery); a subscription over the topic
(it would hold what retention must be free to drop).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from headrace import limits
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.errors import HeadraceError
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import INTERNAL_PREFIX, TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__events"
STEP = 1_000
"""Subscriptions and topics that one turn of the loop looks at."""
_COUNTERS = (
    "delivered", "redelivered", "acked", "nacked", "timeouts", "dead_lettered", "expired", "skipped",
    "lost",
)  # fmt: skip


class Events:
    def __init__(self, engine: Engine, interval_s: float):
        self._engine = engine
        self._interval_s = interval_s
        self._timer: Any = None
        self._from_ms = 0
        self._seen: WeakKeyDictionary[Topic, tuple[int, int, int]] = WeakKeyDictionary()
        self._left: list[tuple[str, dict[str, Any]]] = []
        """(name, event) of what was deleted since the last round."""
        self._refused = False
        """The last ones could not be stored, and that was said."""

    @property
    def are_on(self) -> bool:
        return self._interval_s > 0 and self._engine.directory is not None

    def start(self) -> None:
        if self.are_on:
            self._from_ms = self._engine.now_ms()
            self._arm()

    def _arm(self) -> None:
        self._timer = self._engine.call_later(self._interval_s, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Tell of the last while, if anything was ever told."""
        if self._timer is None:
            return
        self.cancel()
        if self._engine.topics.get(TOPIC) is not None and self._may_store():
            self._store(self._sources(), self._from_ms, self._engine.now_ms())

    def ended(self, source: Subscription | Topic) -> None:
        """It is about to be deleted: what was not told of it is told with the next round."""
        if self._timer is None or len(self._left) >= STEP:
            return
        told = None if source.name.startswith(INTERNAL_PREFIX) else self._of(source)
        if told is not None:
            told |= {"from": self._from_ms, "to": self._engine.now_ms()}
            self._left.append((source.name, told))

    # --- a round ----------------------------------------------------------------------------
    def _tick(self) -> None:
        self._timer = None
        if self._engine.failed is not None or self._engine.closing:
            return
        self._arm()
        if self._may_store():
            before, self._from_ms = self._from_ms, self._engine.now_ms()
            self._step(self._sources(), 0, before, self._from_ms)

    def _may_store(self) -> bool:
        return self._engine.failed is None and self._engine.guard.refusal() is None

    def _sources(self) -> list[Subscription | Topic]:
        """All that may have something to tell; the broker's own are left out."""
        return [
            source
            for source in (*self._engine.all_subscriptions(), *self._engine.topics)
            if not source.name.startswith(INTERNAL_PREFIX)
        ]

    def _step(self, sources: list[Subscription | Topic], at: int, from_ms: int, to_ms: int) -> None:
        if self._timer is None:
            return
        self._store(sources[at : at + STEP], from_ms, to_ms)
        if at + STEP < len(sources):
            self._engine.call_soon(self._step, sources, at + STEP, from_ms, to_ms)

    def _store(self, sources: list[Subscription | Topic], from_ms: int, to_ms: int) -> None:
        found, self._left = self._left, []
        for source in sources:
            told = self._of(source)
            if told is not None:
                found.append((source.name, told | {"from": from_ms, "to": to_ms}))
        if not found:
            return
        keys: list[bytes | None] = [name.encode() for name, _ in found]
        values = [orjson.dumps(told) for _, told in found]
        try:
            topic = self._topic()
        except (HeadraceError, OSError) as error:
            self._say(error)
            return
        self._engine.append(topic, 0, Append(Columns(values, keys), None, self._stored))

    def _topic(self) -> Topic:
        topic = self._engine.topics.get(TOPIC)
        if topic is None:
            topic = self._engine.create_topic(TOPIC, SETTINGS, internal=True)
        return topic

    def _stored(self, entry: Append) -> None:
        if entry.error is None:
            self._refused = False
        else:
            self._say(entry.error)

    def _say(self, error: Exception) -> None:
        if not self._refused:
            logger.warning("events of the broker are not stored: %s", error)
        self._refused = True

    def _of(self, source: Subscription | Topic) -> dict[str, Any] | None:
        """What has happened since it was last asked, or None."""
        return self._of_topic(source) if isinstance(source, Topic) else _of_subscription(source)

    def _of_topic(self, topic: Topic) -> dict[str, Any] | None:
        now = (topic.published_total(), topic.published_bytes, topic.consumed_total())
        before = self._seen.get(topic, (0, 0, 0))
        if now == before:
            return None
        self._seen[topic] = now
        messages, size, consumed = (new - old for new, old in zip(now, before, strict=True))
        return {
            "type": "topic",
            "topic": topic.name,
            "messages": messages,
            "bytes": size,
            "consumed": consumed,
        }


def _of_subscription(subscription: Subscription) -> dict[str, Any] | None:
    tally, activity = subscription.tally, subscription.activity
    now = tuple([getattr(tally, name) for name in _COUNTERS])
    before = activity.seen or (0,) * len(_COUNTERS)
    if now == before:
        return None
    activity.seen = now
    return {
        "type": "deliveries",
        "subscription": subscription.name,
        "topic": subscription.pattern,
        **{n: new - old for n, new, old in zip(_COUNTERS, now, before, strict=True)},
        **activity.take(),
        "lag": subscription.lag(),
        "members": len(subscription.members),
    }


SETTINGS = TopicSettings(
    durability="interval",
    sync_interval_ms=1_000,
    compression="zstd",
    segment_bytes=16 << 20,
    retention_hours=limits.EVENTS_KEPT_HOURS,
    retention_bytes=limits.EVENTS_BYTES_MAX,
    retain_unread=False,
)
