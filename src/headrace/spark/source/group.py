"""A stream's progress as a subscription of the broker: the option ``group``.

The subscription has no members and delivers nothing. It exists so that every tool shows the query's lag,
and so that retention keeps the query's unread records (``retain_unread``). Spark's checkpoint stays the
truth; the subscription follows it, never ahead, never back.

There is one subscription of the group's name for each topic or wildcard that the query reads, as the
broker identifies them; with a regular expression, one for each topic that matches it. It is created at the earliest record, before the query's first batch: the records
before the query's start are unread, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.errors import SubscriptionNotFound
from headrace.model import pattern_matches
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known, Offsets, Positions
from headrace.spark.source.stores import BrokerStore, Store


class ProgressGroup:
    def __init__(self, name: str, patterns: tuple[str, ...], store: BrokerStore):
        self._name = name
        self._patterns = patterns
        self._store = store
        self._made: set[str] = set()
        """The patterns whose subscription is known to exist."""
        self._told: dict[str, Offsets] = {}
        """The offset to which each partition was last moved."""

    @classmethod
    def of(cls, options: SourceOptions, store: Store) -> ProgressGroup | None:
        if options.group is None:
            return None
        assert isinstance(store, BrokerStore), "options: a group is for a broker"
        return cls(options.group, options.topics, store)

    def _make(self, pattern: str) -> None:
        if pattern not in self._made:
            self._store.client.create_subscription(self._name, pattern, start="earliest")
            self._made.add(pattern)

    def positions(self, known: Known) -> Mapping[str, Mapping[int, int]]:
        """The group's offsets, of the partitions that it knows."""
        found: Offsets = {}
        for pattern in self._patterns or known:
            try:
                stats = self._store.client.subscription_stats(self._name, pattern)
            except SubscriptionNotFound:
                continue
            for cursor in stats["partitions"]:
                found.setdefault(cursor["topic"], {})[cursor["partition"]] = cursor["position"]
        return found

    def advance(self, done: Positions, known: Known) -> None:
        """Everything before these positions is done."""
        for pattern in self._patterns or known:
            self._make(pattern)
            positions = {
                topic: {
                    number: min(offset, known[topic].partitions[number].end)
                    for number, offset in some.items()
                    if number in known[topic].partitions
                }
                for topic, some in done.offsets.items()
                if pattern_matches(pattern, topic)
                and topic in known
                and known[topic].incarnation == done.incarnations[topic]
            }
            if positions == self._told.get(pattern, {}):
                continue
            try:
                self._store.client.advance(self._name, positions, topic=pattern)
            except SubscriptionNotFound:  # it was deleted, and the query still needs it
                self._made.discard(pattern)
                self._make(pattern)
                self._store.client.advance(self._name, positions, topic=pattern)
            self._told[pattern] = positions
