"""What an operator asks for, in Prometheus' format.

The hot paths only add to plain numbers that exist anyway; everything here happens when somebody
scrapes. ``prometheus-client`` writes the format of the families whose size is bounded. Those of topics and
subscriptions, which may be a hundred thousand, are written here as lines of text: the library's samples
would take ten times the memory and the time.

A scrape runs in slices, and others are served in between: where ``collect`` yields None it may pause. So its
numbers are not all of the same moment. Scrapes at the same time share one.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from headrace.broker.subscription import Subscription
from headrace.files import resident_bytes
from headrace.log.rewriting import Rewriter
from headrace.model import INTERNAL_PREFIX

if TYPE_CHECKING:
    from headrace.server.hub import Hub

PREFIX = "message_broker_"
LOOP = "headrace_loop_"
MEMORY = "headrace_memory_"
CLUSTER = "headrace_cluster_"
PIPELINES = "headrace_pipeline_"
"""Not of the broker itself: what pipelines say of themselves."""
BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


CLUSTER_GAUGES = {
    "slots": "Slots that this node serves",
    "slots_waiting": "Slots that this node should serve and does not serve yet",
    "drained": "1 if this node is drained",
    "kafka_away": "1 while Kafka does not answer this node",
    "partitions_stalled": "Partitions of this node that refuse publishes because Kafka does not answer",
}
CLUSTER_COUNTERS = {
    "slots_taken": "Slots that this node has begun to serve",
    "slots_handed_back": "Slots that this node has given to other nodes in good order",
    "slots_lost": "Slots that another node has claimed while this node served them",
    "forwarded_batches": "Batches of publishes that this node has sent to other nodes",
    "forwarded_bytes": "Bytes of these batches",
}
SLICE_S = 0.01
"""A scrape gives way to others after this long."""


class Family:
    """The text of one metric with labels, a line for each sample."""

    def __init__(self, name: str, kind: str, text: str):
        self._name = PREFIX + name + ("_total" if kind == "counter" else "")
        self._parts = [f"# HELP {self._name} {text}\n# TYPE {self._name} {kind}\n"]

    def add(self, labels: str, value: float) -> None:
        """``labels`` is such as ``topic="orders"``."""
        self._parts.append(f"{self._name}{{{labels}}} {value}\n")

    def encode(self) -> bytes:
        return "".join(self._parts).encode()


class _One(Collector):
    """One metric, for the library to write."""

    def __init__(self, metric: Metric):
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


class Histogram:
    """Counts by upper bound; adding costs a bisection."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += weight
        self._sum += seconds * weight

    def buckets(self) -> list[tuple[str, float]]:
        total = 0
        buckets = []
        for bound, count in zip((*BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return buckets

    def total(self) -> tuple[int, float]:
        """How many, and their sum."""
        return sum(self._counts), self._sum

    @property
    def sum(self) -> float:
        return self._sum

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(name, text, buckets=self.buckets(), sum_value=self._sum)


class Metrics:
    """The collector. ``render`` is what ``/metrics`` answers."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self.sync = Histogram()
        self.commit = Histogram()
        self.take = Histogram()
        self.read_back = Histogram()
        self._scrape: asyncio.Task[bytes] | None = None
        storage = hub.engine.topics.storage
        storage.on_sync = self.sync.add
        storage.on_commit = self.commit.add
        if hub.engine.cluster is not None:
            hub.engine.cluster.figures.on_taken = self.take.add
            hub.engine.cluster.figures.on_read_back = self.read_back.add
        hub.engine.history.timings = lambda: (*self.sync.total(), *self.commit.total())

    async def render(self) -> tuple[bytes, str]:
        if self._scrape is None:
            self._scrape = asyncio.create_task(self._render())
            self._scrape.add_done_callback(self._rendered)
        return await asyncio.shield(self._scrape), CONTENT_TYPE_LATEST

    def _rendered(self, scrape: asyncio.Task[bytes]) -> None:
        self._scrape = None
        if not scrape.cancelled():
            scrape.exception()  # whoever asked may be gone

    async def _render(self) -> bytes:
        pieces = []
        begun = monotonic()
        for found in self.collect():
            if isinstance(found, Family):
                pieces.append(found.encode())
            elif found is not None:
                pieces.append(generate_latest(_One(found)))
            if monotonic() - begun > SLICE_S:
                await asyncio.sleep(0)
                begun = monotonic()
        return b"".join(pieces)

    def collect(self) -> Iterator[Metric | Family | None]:
        yield from self._topics()
        yield from self._subscriptions()
        yield from self._pipelines()
        yield from self._connections()
        yield from self._access()
        yield self.sync.family(PREFIX + "fsync_duration_seconds", "Time of one fdatasync")
        yield self.commit.family(
            PREFIX + "processing_duration", "Seconds from a message's arrival to its being stored"
        )
        yield from self._cluster()
        yield from self._loop()
        yield from self._process()

    def _cluster(self) -> Iterator[Metric]:
        """Of this node; without values if there is no cluster."""
        node = self._hub.engine.cluster
        values: dict[str, float | None] = {}
        if node is not None:
            figures = node.figures
            values = {name: getattr(figures, name) for name in CLUSTER_COUNTERS} | {
                "slots": len(node.slots),
                "slots_waiting": len(node.waiting_slots),
                "drained": int(node.drained),
                "kafka_away": int(node.kafka_away),
                "partitions_stalled": node.stalled(),
            }
        for name, text in CLUSTER_GAUGES.items():
            yield GaugeMetricFamily(CLUSTER + name, text, value=values.get(name))
        for name, text in CLUSTER_COUNTERS.items():
            yield CounterMetricFamily(CLUSTER + name, text, value=values.get(name))
        for name, (histogram, text) in {
            "take_seconds": (self.take, "Time from being given a slot to serving it"),
            "read_back_seconds": (
                self.read_back,
                "Time from giving Kafka a commit to reading it back",
            ),
        }.items():
            if node is not None:
                yield histogram.family(CLUSTER + name, text)
            else:
                yield HistogramMetricFamily(CLUSTER + name, text)

    def _loop(self) -> Iterator[Metric]:
        """What kept the loop from everybody else for too long (``watchdog.py``)."""
        blocked = HistogramMetricFamily(
            LOOP + "blocked_seconds", "How long all clients waited for one thing", labels=["what"]
        )
        longest = GaugeMetricFamily(
            LOOP + "blocked_max_seconds", "The longest of these since the start", labels=["what"]
        )
        watchdog = self._hub.watchdog
        if watchdog is not None:
            for what, histogram in tuple(watchdog.blocked.items()):
                blocked.add_metric([what], buckets=histogram.buckets(), sum_value=histogram.sum)
            for what, found in tuple(watchdog.longest.items()):
                longest.add_metric([what], found.seconds)
        yield from (blocked, longest)

    def _topics(self) -> Iterator[Family | None]:
        published = Family("messages_published", "counter", "Messages published since the start")
        consumed = Family("messages_consumed", "counter", "Messages consumed since the start")
        queue = Family("queue_size", "gauge", "Messages that some subscription has not finished")
        taken = Family("published_bytes", "counter", "Bytes taken in since the start")
        refused = Family("messages_refused", "counter", "Messages refused (queue or disk full)")
        stored = Family("topic_bytes", "gauge", "Bytes in the log")
        kept = Family("topic_messages", "gauge", "Messages in the log")
        mode = Family("topic_durability", "gauge", "1 for the mode in force")
        read_only = Family("topic_read_only", "gauge", "Partitions that take no publishes")
        engine = self._hub.engine
        for topic in engine.topics:
            yield None
            if topic.name.startswith(INTERNAL_PREFIX):
                continue
            name = f'topic="{topic.name}"'
            logs = [partition.log for partition in topic.partitions]
            published.add(name, topic.published_total())
            consumed.add(name, topic.consumed_total())
            queue.add(name, engine.publishing.backlog(topic))
            taken.add(name, topic.published_bytes)
            refused.add(name, topic.refused)
            stored.add(name, topic.size_bytes())
            kept.add(name, sum(log.end_offset - log.start_offset for log in logs))
            settings = topic.settings
            mode.add(f'{name},mode="{settings.durability if settings.durable else "memory"}"', 1)
            read_only.add(name, sum(1 for log in logs if log.read_only))
        yield from (published, consumed, queue, taken, refused, stored, kept, mode, read_only)

    def _subscriptions(self) -> Iterator[Metric | Family | None]:
        gauges = {
            "lag": "Messages that are not finished",
            "in_flight": "Messages out with members",
            "members": "Members",
            "blocked": "Partitions that cannot be read on",
            "paused": "1 while it is paused and nothing is delivered",
            "stalled": "1 if messages wait and none was finished for a minute",
            "falling_behind": "1 if the lag has grown for a minute",
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
        found_gauges = {n: Family(f"group_{n}", "gauge", text) for n, text in gauges.items()}
        found_counters = {n: Family(f"group_{n}", "counter", text) for n, text in counters.items()}
        letters = Family("dead_letters", "gauge", "Dead letters that wait to be dealt with")
        engine = self._hub.engine
        for subscription in engine.subscriptions():
            yield None
            # Names and patterns have no characters that would need escapes.
            labels = f'topic="{subscription.pattern}",group="{subscription.name}"'
            for name, value in self._gauges(subscription).items():
                found_gauges[name].add(labels, value)
            for name, counter in found_counters.items():
                counter.add(labels, getattr(subscription.tally, name))
        for topic, count in engine.dead_letters.topics():
            letters.add(f'topic="{topic}"', count)
        yield from found_gauges.values()
        yield from found_counters.values()
        yield letters
        yield GaugeMetricFamily(
            PREFIX + "scheduled_messages", "Messages that wait for their time",
            value=len(engine.schedule),
        )  # fmt: skip

    def _gauges(self, subscription: Subscription) -> dict[str, int]:
        verdict = self._hub.engine.history.verdict(subscription)
        return {
            "lag": subscription.lag(),
            "in_flight": subscription.in_flight(),
            "members": len(subscription.members),
            "blocked": sum(1 for cursor in subscription.cursors.values() if cursor.blocked),
            "paused": int(subscription.paused),
            "stalled": int(verdict == "stalled"),
            "falling_behind": int(verdict == "falling behind"),
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
        verdicts = {
            name: GaugeMetricFamily(PIPELINES + name.replace(" ", "_"), text, labels=["pipeline"])
            for name, text in (
                ("stalled", "1 if it has records to process and finishes no batch"),
                ("falling behind", "1 if its lag has grown for a minute"),
            )
        }
        counters = {
            "batches": "Batches finished",
            "input_rows": "Rows read",
            "dead_letters": "Rows given up",
        }
        gauges = {
            "input_rows_per_second": "Rows read per second, in the last batch",
            "trigger_seconds": "How long the last batch took",
            "last_progress_seconds": "Seconds since a batch was finished",
            "processed_rows_per_second": "Rows processed per second, in the last batch",
            "lag": "Records that are not read",
            "lag_seconds": "Age of the oldest record that is not processed",
            "watermark_seconds": "The watermark, in seconds since 1970",
            "state_rows": "Rows of state",
            "state_bytes": "Bytes of state",
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
                for name, family in verdicts.items():
                    family.add_metric([pipeline["name"]], int(pipeline["verdict"] == name))
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
                for name in (
                    "processed_rows_per_second",
                    "lag",
                    "lag_seconds",
                    "state_rows",
                    "state_bytes",
                ):
                    if (value := query.get(name)) is not None:
                        gauged[name].add_metric(values, value)  # type: ignore[arg-type]
                watermark = query.get("watermark")
                if watermark is not None:
                    gauged["watermark_seconds"].add_metric(values, watermark / 1000)
                progress_at = query.get("last_progress_at")
                if progress_at is not None:
                    gauged["last_progress_seconds"].add_metric(values, (now - progress_at) / 1000)
        yield from (up, *verdicts.values(), *counted.values(), *gauged.values())

    def _connections(self) -> Iterator[Metric]:
        hub = self._hub
        by_protocol = Counter(connection.protocol for connection in hub.connections)
        connections = GaugeMetricFamily(
            PREFIX + "connections", "Open connections", labels=["protocol"]
        )
        for protocol in ("text", "binary", "http", "websocket", "sse", "tcp"):
            connections.add_metric([protocol], by_protocol.get(protocol, 0))
        connections.add_metric(["handshake"], len(hub.opening))
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
        yield CounterMetricFamily(
            PREFIX + "connections_overdue", "Connections closed because they were too slow or idle",
            value=hub.overdue,
        )  # fmt: skip
        yield CounterMetricFamily(
            PREFIX + "handshakes_failed", "Connections whose TLS handshake failed or took too long",
            value=hub.failed_handshakes,
        )  # fmt: skip

    def _access(self) -> Iterator[Metric]:
        logins, access = self._hub.logins, self._hub.engine.access
        outcomes = CounterMetricFamily(
            PREFIX + "logins_failed", "Logins that did not succeed at once", labels=["outcome"]
        )
        outcomes.add_metric(["wrong"], logins.failed)
        outcomes.add_metric(["delayed"], logins.delayed)
        outcomes.add_metric(["refused"], logins.refused)
        yield outcomes
        refused = CounterMetricFamily(
            PREFIX + "clients_refused", "Logins, pages and handshakes refused", labels=["cause"]
        )
        for cause, count in logins.refusals.counts.items():
            refused.add_metric([cause], count)
        yield refused
        audited = CounterMetricFamily(
            PREFIX + "audit", "Changes, and what was refused", labels=["action", "outcome"]
        )
        for labels, count in self._hub.engine.audit.counts.items():
            audited.add_metric(labels, count)
        yield audited
        yield GaugeMetricFamily(
            PREFIX + "access_broken", "1 while the access file cannot be used and older rules stay",
            value=int(access.problem is not None),
        )  # fmt: skip
        yield GaugeMetricFamily(
            PREFIX + "access_version", "Version of the rules in force; 0 without an access file",
            value=0 if access.rules is None else access.rules.version,
        )  # fmt: skip

    def _process(self) -> Iterator[Metric]:
        engine = self._hub.engine
        budget = engine.budget
        yield GaugeMetricFamily(
            MEMORY + "used_bytes", "What counts against memory_limit", value=budget.used
        )
        yield GaugeMetricFamily(MEMORY + "limit_bytes", "memory_limit", value=budget.limit)
        yield CounterMetricFamily(
            MEMORY + "refused", "Requests refused because the memory was full",
            value=budget.refused,
        )  # fmt: skip
        yield GaugeMetricFamily(PREFIX + "open_files", "Open file descriptors", value=_open_files())
        yield GaugeMetricFamily(
            PREFIX + "resident_memory_bytes", "Resident memory", value=resident_bytes()
        )
        yield GaugeMetricFamily(
            PREFIX + "disk_free_bytes", "Free space", value=engine.guard.free_bytes
        )
        yield InfoMetricFamily(
            PREFIX + "disk", "How commits are written", value={"method": engine.workers.method}
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
        if engine.rewriter is not None:
            yield from _rewritten(engine.rewriter)


def _rewritten(rewriter: Rewriter) -> Iterator[Metric]:
    for name, text, value in (
        ("segments", "Closed segments that were rewritten with large batches", rewriter.segments),
        ("batches", "Batches that they had before", rewriter.batches),
        ("bytes", "Bytes that they had before", rewriter.bytes),
        ("saved_bytes", "Bytes that this has freed", rewriter.saved_bytes),
    ):
        yield CounterMetricFamily(f"{PREFIX}rewritten_{name}", text, value=value)
    yield GaugeMetricFamily(
        PREFIX + "rewrite_pending_segments", "Closed segments that were not looked at yet",
        value=rewriter.pending,
    )  # fmt: skip


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return -1
