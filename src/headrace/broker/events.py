"""The broker's own events: counts of deliveries and publishes, as records of the topic ``__events``.

In each interval the broker publishes one JSON record for each subscription and each topic that was active,
so that traffic can be read, kept and analysed like any other data, by ``fetch`` or with Spark. The key of
a record is the name of the subscription or topic, the value::

    {"type": "deliveries", "subscription": "billing", "topic": "orders", "from": ms, "to": ms,
     "delivered": 10, "redelivered": 2, "acked": 8, "nacked": 1, "timeouts": 1, "dead_lettered": 0,
     "expired": 0, "skipped": 0, "lost": 0, "attempts": {"1": 8, "2": 1, "3": 1},
     "latency_ms": {"count": 8, "sum": 90, "max": 31, "p50": 9, "p99": 31},
     "dead_letters": {"no stock": 1}, "lag": 12, "members": 2}
    {"type": "topic", "topic": "orders", "from": ms, "to": ms, "messages": 10, "bytes": 1000,
     "consumed": 8}

Rules:
- An event is the difference of counters that exist anyway. Only ``activity`` costs anything while a
  message is delivered.
- Events never delay other work. They are synced from time to time, not at once. While the disk is full,
  none are published, and the next one covers the longer time; events that the disk refuses are dropped.
- The first event creates the topic. A broker in memory has none, and neither has one that ends before its
  first interval.
- A round over many subscriptions is done in steps, each in a turn of the loop of its own.

Rejected: a record for each delivery (it costs more than the delivery); a subscription over the topic
(it would keep records that retention must be free to delete).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from headrace import limits
from headrace.broker.own_topic import OwnTopic
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.model import INTERNAL_PREFIX, TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__events"
STEP = 1_000
"""Subscriptions and topics that one turn of the loop handles."""
_COUNTERS = (
    "delivered", "redelivered", "acked", "nacked", "timeouts", "dead_lettered", "expired", "skipped",
    "lost",
)  # fmt: skip


class Events:
    def __init__(self, engine: Engine, interval_s: float):
        self._engine = engine
        self._topic = OwnTopic(engine, TOPIC, SETTINGS, "events of the broker are", logger)
        self._interval_s = interval_s
        self._timer: Any = None
        self._from_ms = 0
        self._seen: WeakKeyDictionary[Subscription | Topic, dict[str, int]] = WeakKeyDictionary()
        """The counters as the last event saw them."""
        self._new: list[tuple[str, dict[str, Any]]] = []
        """(name, event) of those that are not stored yet."""

    def start(self) -> None:
        if self._interval_s > 0 and self._engine.directory is not None:
            self._from_ms = self._engine.now_ms()
            self._arm()

    def _arm(self) -> None:
        self._timer = self._engine.call_later(self._interval_s, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Store the events since the last round, if the topic exists."""
        if self._timer is None:
            return
        self.cancel()
        if self._engine.topics.get(TOPIC) is not None and self._may_store():
            self._store(self._sources(), self._from_ms, self._engine.now_ms())

    def ended(self, source: Subscription | Topic) -> None:
        """It is about to be deleted: the next round stores its last event."""
        if self._timer is not None and len(self._new) < STEP:
            self._add(source, self._from_ms, self._engine.now_ms())

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
        return [*self._engine.all_subscriptions(), *self._engine.topics]

    def _step(self, sources: list[Subscription | Topic], at: int, from_ms: int, to_ms: int) -> None:
        if self._timer is None:
            return
        self._store(sources[at : at + STEP], from_ms, to_ms)
        if at + STEP < len(sources):
            self._engine.call_soon(self._step, sources, at + STEP, from_ms, to_ms)

    def _store(self, sources: list[Subscription | Topic], from_ms: int, to_ms: int) -> None:
        for source in sources:
            self._add(source, from_ms, to_ms)
        new, self._new = self._new, []
        if new:
            self._topic.append((name, orjson.dumps(event)) for name, event in new)

    def _add(self, source: Subscription | Topic, from_ms: int, to_ms: int) -> None:
        """Add an event about everything since the last one, if anything has happened. The broker's own subscriptions
        and topics have none."""
        if source.name.startswith(INTERNAL_PREFIX):
            return
        if isinstance(source, Topic):
            event: dict[str, Any] = {"type": "topic", "topic": source.name}
            now = {
                "messages": source.published_total(),
                "bytes": source.published_bytes,
                "consumed": source.consumed_total(),
            }
        else:
            event = {"type": "deliveries", "subscription": source.name, "topic": source.pattern}
            now = {name: getattr(source.tally, name) for name in _COUNTERS}
        before = self._seen.get(source) or dict.fromkeys(now, 0)
        if now == before:
            return
        self._seen[source] = now
        event |= {"from": from_ms, "to": to_ms}
        event |= {name: count - before[name] for name, count in now.items()}
        if isinstance(source, Subscription):
            event |= source.activity.take()
            event |= {"lag": source.lag(), "members": len(source.members)}
        self._new.append((source.name, event))


SETTINGS = TopicSettings(
    durability="interval",
    sync_interval_ms=1_000,
    compression="zstd",
    segment_bytes=16 << 20,
    retention_hours=limits.EVENTS_KEPT_HOURS,
    retention_bytes=limits.EVENTS_BYTES_MAX,
    retain_unread=False,
)
