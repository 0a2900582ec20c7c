"""What an operator asks for, in Prometheus' format.

The hot paths only add to plain numbers that exist anyway; everything here happens when somebody
scrapes. ``prometheus-client`` writes the format, through a collector that reads the engine.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from headrace.broker.subscription import Subscription
from headrace.model import INTERNAL_PREFIX

if TYPE_CHECKING:
    from headrace.server.connection import Hub

PREFIX = "message_broker_"
PIPELINES = "headrace_pipeline_"
"""Not of the broker itself: what pipelines say of themselves."""
BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


class Histogram:
    """Counts by upper bound; adding costs a bisection."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += weight
        self._sum += seconds * weight

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total = 0
        buckets = []
        for bound, count in zip((*BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The collector. ``render`` is what ``/metrics`` answers."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self.sync = Histogram()
        self.commit = Histogram()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        storage = hub.engine.topics.storage
        storage.on_sync = self.sync.add
        storage.on_commit = self.commit.add

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        yield from self._topics()
        yield from self._subscriptions()
        yield from self._pipelines()
        yield from self._connections()
        yield self.sync.family(PREFIX + "fsync_duration_seconds", "Time of one fdatasync")
        yield self.commit.family(
            PREFIX + "processing_duration", "Seconds from a message's arrival to its being stored"
        )
        yield from self._process()

    def _topics(self) -> Iterator[Metric]:
        published = CounterMetricFamily(
            PREFIX + "messages_published", "Messages published since the start", labels=["topic"]
        )
        consumed = CounterMetricFamily(
            PREFIX + "messages_consumed", "Messages consumed since the start", labels=["topic"]
        )
        queue = GaugeMetricFamily(
            PREFIX + "queue_size", "Messages that some subscription has not finished",
            labels=["topic"],
        )  # fmt: skip
        taken = CounterMetricFamily(
            PREFIX + "published_bytes", "Bytes taken in since the start", labels=["topic"]
        )
        refused = CounterMetricFamily(
            PREFIX + "messages_refused", "Messages refused (queue or disk full)", labels=["topic"]
        )
        stored = GaugeMetricFamily(PREFIX + "topic_bytes", "Bytes in the log", labels=["topic"])
        kept = GaugeMetricFamily(PREFIX + "topic_messages", "Messages in the log", labels=["topic"])
        mode = GaugeMetricFamily(
            PREFIX + "topic_durability", "1 for the mode in force", labels=["topic", "mode"]
        )
        read_only = GaugeMetricFamily(
            PREFIX + "topic_read_only", "Partitions that take no publishes", labels=["topic"]
        )
        engine = self._hub.engine
        for topic in engine.topics:
            if topic.name.startswith(INTERNAL_PREFIX):
                continue
            name = [topic.name]
            logs = [partition.log for partition in topic.partitions]
            published.add_metric(name, topic.published_total())
            consumed.add_metric(name, topic.consumed_total())
            queue.add_metric(name, engine.publishing.backlog(topic))
            taken.add_metric(name, topic.published_bytes)
            refused.add_metric(name, topic.refused)
            stored.add_metric(name, topic.size_bytes())
            kept.add_metric(name, sum(log.end_offset - log.start_offset for log in logs))
            settings = topic.settings
            mode.add_metric([topic.name, settings.durability if settings.durable else "memory"], 1)
            read_only.add_metric(name, sum(1 for log in logs if log.read_only))
        yield from (published, consumed, queue, taken, refused, stored, kept, mode, read_only)

    def _subscriptions(self) -> Iterator[Metric]:
        labels = ["topic", "group"]
        gauges = {
            "lag": "Messages that are not finished",
            "in_flight": "Messages out with members",
            "members": "Members",
            "blocked": "Partitions that cannot be read on",
        }
        counters = {
            "delivered": "Deliveries",
            "redelivered": "Deliveries after the first of a message",
            "acked": "Messages acknowledged",
            "nacked": "Messages given back",
            "timeouts": "Deliveries whose time was up",
            "dead_lettered": "Messages given up",
            "expired": "Messages passed over because their time to live had ended",
            "lost": "Messages lost to retention or a repair",
        }
        found_gauges = {
            name: GaugeMetricFamily(f"{PREFIX}group_{name}", text, labels=labels)
            for name, text in gauges.items()
        }
        found_counters = {
            name: CounterMetricFamily(f"{PREFIX}group_{name}", text, labels=labels)
            for name, text in counters.items()
        }
        letters = GaugeMetricFamily(
            PREFIX + "dead_letters", "Dead letters that wait to be dealt with", labels=["topic"]
        )
        engine = self._hub.engine
        for subscription in engine.subscriptions():
            values = [subscription.pattern, subscription.name]
            for name, value in self._gauges(subscription).items():
                found_gauges[name].add_metric(values, value)
            for name, counter in found_counters.items():
                counter.add_metric(values, getattr(subscription.tally, name))
        for topic, count in engine.dead_letters.topics():
            letters.add_metric([topic], count)
        yield from found_gauges.values()
        yield from found_counters.values()
        yield letters
        yield GaugeMetricFamily(
            PREFIX + "scheduled_messages", "Messages that wait for their time",
            value=len(engine.schedule),
        )  # fmt: skip

    @staticmethod
    def _gauges(subscription: Subscription) -> dict[str, int]:
        return {
            "lag": subscription.lag(),
            "in_flight": subscription.in_flight(),
            "members": len(subscription.members),
            "blocked": sum(1 for cursor in subscription.cursors.values() if cursor.blocked),
        }

    def _pipelines(self) -> Iterator[Metric]:
        """Counters of all that are known; gauges only of those that run, which still have a speed.

        ``up`` says nothing of those that were stopped or are finished: they are as they should be.
        """
        labels = ["pipeline", "query"]
        up = GaugeMetricFamily(
            PIPELINES + "up", "1: it runs and reports; 0: it has failed, or fallen silent",
            labels=["pipeline"],
        )  # fmt: skip
        counters = {
            "batches": "Batches finished",
            "input_rows": "Rows read",
            "dead_letters": "Rows given up",
        }
        gauges = {
            "input_rows_per_second": "Rows read per second, in the last batch",
            "trigger_seconds": "How long the last batch took",
            "last_progress_seconds": "Seconds since a batch was finished",
        }
        counted = {
            name: CounterMetricFamily(PIPELINES + name, text, labels=labels)
            for name, text in counters.items()
        }
        gauged = {
            name: GaugeMetricFamily(PIPELINES + name, text, labels=labels)
            for name, text in gauges.items()
        }
        now = self._hub.engine.now_ms()
        for pipeline in self._hub.engine.pipelines:
            state = pipeline["state"]
            if state in ("running", "failed"):
                runs = state == "running" and not pipeline["stale"]
                up.add_metric([pipeline["name"]], int(runs))
            for query in pipeline["queries"]:
                values = [pipeline["name"], query["name"]]
                counted["batches"].add_metric(values, query.get("batches_total") or 0)
                counted["input_rows"].add_metric(values, query.get("input_rows_total") or 0)
                counted["dead_letters"].add_metric(values, query.get("dead_letters") or 0)
                if state != "running":
                    continue
                rate, trigger_ms = query.get("input_rows_per_second"), query.get("trigger_ms")
                gauged["input_rows_per_second"].add_metric(values, rate or 0)
                gauged["trigger_seconds"].add_metric(values, (trigger_ms or 0) / 1000)
                progress_at = query.get("last_progress_at")
                if progress_at is not None:
                    gauged["last_progress_seconds"].add_metric(values, (now - progress_at) / 1000)
        yield from (up, *counted.values(), *gauged.values())

    def _connections(self) -> Iterator[Metric]:
        hub = self._hub
        by_protocol = Counter(connection.protocol for connection in hub.connections)
        connections = GaugeMetricFamily(
            PREFIX + "connections", "Open connections", labels=["protocol"]
        )
        for protocol in ("text", "binary", "http", "websocket", "sse", "tcp"):
            connections.add_metric([protocol], by_protocol.get(protocol, 0))
        yield connections
        yield GaugeMetricFamily(
            PREFIX + "active_connections", "Open WebSocket connections",
            value=by_protocol.get("websocket", 0),
        )  # fmt: skip
        yield CounterMetricFamily(
            PREFIX + "connections_accepted", "Connections accepted", value=hub.accepted
        )
        yield CounterMetricFamily(
            PREFIX + "connections_refused", "Connections refused", value=hub.refused
        )

    def _process(self) -> Iterator[Metric]:
        engine = self._hub.engine
        yield GaugeMetricFamily(PREFIX + "open_files", "Open file descriptors", value=_open_files())
        yield GaugeMetricFamily(
            PREFIX + "resident_memory_bytes", "Resident memory", value=_resident_bytes()
        )
        yield GaugeMetricFamily(
            PREFIX + "disk_free_bytes", "Free space", value=engine.guard.free_bytes
        )
        yield GaugeMetricFamily(
            PREFIX + "disk_full", "1 while publishes are refused for want of room",
            value=int(engine.guard.full),
        )  # fmt: skip
        yield GaugeMetricFamily(
            PREFIX + "acks_unwritten_seconds", "Age of the oldest ack that is not on disk",
            value=engine.state.oldest_unwritten,
        )  # fmt: skip
        yield CounterMetricFamily(
            PREFIX + "retention_deleted_bytes", "Bytes deleted by retention",
            value=engine.retention.deleted_bytes,
        )  # fmt: skip


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return -1


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return -1
