"""The numbers of a report: queries over the broker's own topics and over the log, in intervals of one length.

Spark does the counting, so what comes back is small: a number for each interval and each topic, subscription or
pipeline. Topics that the broker does not have (a young broker has no events) have no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from headrace.errors import InvalidArgument
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.stores import existing_topics, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS, PIPELINES = "__events", "__pipelines"
INTERVALS_WANTED = 120
_S = 1000
STEPS_MS = [
    *(n * _S for n in (1, 2, 5, 10, 30)),
    *(n * 60 * _S for n in (1, 2, 5, 10, 15, 30)),
    *(n * 3600 * _S for n in (1, 2, 6, 12, 24, 168)),
]
"""The lengths that an interval can have."""
SIZES = (0.5, 0.9, 0.99)
_EVENT = (
    "type STRING, subscription STRING, topic STRING, `from` BIGINT, `to` BIGINT, messages BIGINT, bytes BIGINT, "
    "delivered BIGINT, redelivered BIGINT, dead_lettered BIGINT, lag BIGINT, dead_letters MAP<STRING, BIGINT>, "
    "latency_ms STRUCT<count: BIGINT, p50: DOUBLE, p99: DOUBLE>"
)
_PIPELINE = (
    "name STRING, run_id STRING, started_at BIGINT, reported_at BIGINT, queries ARRAY<STRUCT<name: STRING, "
    "batches_total: BIGINT, input_rows_total: BIGINT, trigger_ms: DOUBLE, lag: BIGINT, dead_letters: BIGINT>>"
)
Values = list[float | None]


class Period(NamedTuple):
    """The time of a report, cut into intervals."""

    start_ms: int
    end_ms: int
    step_ms: int

    @classmethod
    def of(cls, start_ms: int, end_ms: int) -> Period:
        if end_ms <= start_ms:
            raise InvalidArgument(
                "the report ends before it begins: --since must be before --until"
            )
        wanted = (end_ms - start_ms) / INTERVALS_WANTED
        step = next((each for each in STEPS_MS if each >= wanted), None)
        if step is None:
            step = -(-int(wanted) // STEPS_MS[-1]) * STEPS_MS[-1]
        return cls(start_ms - start_ms % step, end_ms, step)

    @property
    def intervals(self) -> int:
        return -(-(self.end_ms - self.start_ms) // self.step_ms)

    def values(self, found: Mapping[int, float | None], missing: float | None = None) -> Values:
        """One for each interval."""
        return [found.get(number, missing) for number in range(self.intervals)]


class TopicTraffic(NamedTuple):
    topic: str
    messages: Values
    bytes: Values


class MessageSizes(NamedTuple):
    """The sizes of a topic's values, in bytes."""

    topic: str
    messages: int
    bytes: int
    percentiles: tuple[int, ...]
    largest: int


class SubscriptionActivity(NamedTuple):
    name: str
    topic: str
    delivered: Values
    redelivered: Values
    lag: Values
    p50_ms: Values
    p99_ms: Values


class DeathReason(NamedTuple):
    subscription: str
    reason: str
    letters: int


class PipelineBatches(NamedTuple):
    pipeline: str
    query: str
    batches: Values
    rows: Values
    batch_ms: Values
    lag: Values


@dataclass
class BrokerReport:
    period: Period
    place: str
    """Where the broker is."""
    topics: list[TopicTraffic] = field(default_factory=list)
    sizes: list[MessageSizes] | None = None
    """None: they were not looked at."""
    subscriptions: list[SubscriptionActivity] = field(default_factory=list)
    reasons: list[DeathReason] = field(default_factory=list)
    pipelines: list[PipelineBatches] = field(default_factory=list)


def collect(
    spark: SparkSession,
    source: Mapping[str, Any],
    period: Period,
    *,
    topics: Sequence[str] = (">",),
    sizes: bool = True,
) -> BrokerReport:
    """The numbers of a period. ``source`` says where the topics are, as ``format("headrace")`` takes it."""
    with closing(open_store(SourceOptions.of({**source, "topic": ">"}))) as store:
        known = set(existing_topics(store, [EVENTS, PIPELINES]))
        has_topics = any(state.records for state in existing_topics(store, topics).values())
    report = BrokerReport(period, str(source.get("servers") or source.get("path") or ""))
    bounds = {"startingTimestamp": period.start_ms, "endingTimestamp": period.end_ms}
    reader = spark.read.format("headrace").options(**source, **bounds, failOnDataLoss="false")
    if EVENTS in known:
        events = reader.options(topic=EVENTS, valueFormat="json", schema=_EVENT).load()
        events = _numbered(events.where("_corrupt IS NULL"), "to", period)
        _traffic(events, report)
        _deliveries(events, report)
    if PIPELINES in known:
        found = reader.options(topic=PIPELINES, valueFormat="json", schema=_PIPELINE).load()
        _pipelines(_numbered(found.where("queries IS NOT NULL"), "reported_at", period), report)
    if sizes:
        report.sizes = []
        if has_topics:
            chosen = spark.read.format("headrace").options(
                **source, **bounds, failOnDataLoss="false"
            )
            names = {"topic": ",".join(topics), "columns": "topic,value"}
            _sizes(chosen.options(**names).load(), report)
    return report


def _numbered(rows: DataFrame, column: str, period: Period) -> DataFrame:
    """Rows of the period, with the number of their interval."""
    at = F.col(f"`{column}`")
    inside = (at >= period.start_ms) & (at < period.end_ms)
    number = F.floor((at - period.start_ms) / period.step_ms).cast("int")
    return rows.where(inside).withColumn("interval", number)


def _series(rows: Iterable[Any], keys: Sequence[str]) -> dict[tuple[str, ...], dict[int, Any]]:
    """Rows by these columns and by interval."""
    found: dict[tuple[str, ...], dict[int, Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["interval"]] = row
    return found


def _column(rows: Mapping[int, Any], name: str) -> dict[int, float | None]:
    return {number: row[name] for number, row in rows.items()}


def _traffic(events: DataFrame, report: BrokerReport) -> None:
    counted = events.where("type = 'topic'").groupBy("topic", "interval")
    rows = counted.agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes")).collect()
    period = report.period
    for (topic,), found in _series(rows, ["topic"]).items():
        messages, size = (period.values(_column(found, name), 0) for name in ("messages", "bytes"))
        report.topics.append(TopicTraffic(topic, messages, size))
    report.topics.sort(key=lambda each: (-_total(each.messages), each.topic))


def _deliveries(events: DataFrame, report: BrokerReport) -> None:
    deliveries = events.where("type = 'deliveries'")
    counted = deliveries.groupBy("subscription", "topic", "interval").agg(
        F.sum("delivered").alias("delivered"),
        F.sum("redelivered").alias("redelivered"),
        F.max_by("lag", "to").alias("lag"),
        F.max("latency_ms.p50").alias("p50"),
        F.max("latency_ms.p99").alias("p99"),
    )
    period = report.period
    for (name, topic), found in _series(counted.collect(), ["subscription", "topic"]).items():
        delivered, redelivered = (
            period.values(_column(found, each), 0) for each in ("delivered", "redelivered")
        )
        # A subscription without an event did nothing: its lag is what it was.
        lag = _carried(period.values(_column(found, "lag")))
        p50, p99 = (period.values(_column(found, each)) for each in ("p50", "p99"))
        report.subscriptions.append(
            SubscriptionActivity(name, topic, delivered, redelivered, lag, p50, p99)
        )
    report.subscriptions.sort(key=lambda each: (-_total(each.delivered), each.name, each.topic))
    reasons = deliveries.select("subscription", F.explode("dead_letters").alias("reason", "count"))
    dead = reasons.groupBy("subscription", "reason").agg(F.sum("count").alias("count")).collect()
    report.reasons = sorted(
        (DeathReason(row["subscription"], row["reason"], row["count"]) for row in dead),
        key=lambda each: (-each.letters, each.subscription, each.reason),
    )


def _carried(values: Values) -> Values:
    """Each missing number is the one before it."""
    last: float | None = None
    found: Values = []
    for value in values:
        last = last if value is None else value
        found.append(last)
    return found


def _pipelines(reports: DataFrame, report: BrokerReport) -> None:
    """A pipeline reports totals, so what it did in an interval is the difference to the one before."""
    period = report.period
    queries = reports.select(
        "name",
        "run_id",
        "started_at",
        "interval",
        "reported_at",
        F.explode("queries").alias("query"),
    )
    rows = (
        queries.groupBy("name", "query.name", "run_id", "started_at", "interval")
        .agg(
            F.max("query.batches_total").alias("batches"),
            F.min("query.batches_total").alias("batches_first"),
            F.max("query.input_rows_total").alias("rows"),
            F.min("query.input_rows_total").alias("rows_first"),
            F.max("query.trigger_ms").alias("batch_ms"),
            F.max_by("query.lag", "reported_at").alias("lag"),
        )
        .toDF(
            "pipeline", "query", "run_id", "started_at", "interval", "batches", "batches_first",
            "rows", "rows_first", "batch_ms", "lag",
        )
        .orderBy("started_at", "interval")
        .collect()
    )  # fmt: skip
    found: dict[tuple[str, str], dict[str, dict[int, float | None]]] = {}
    before: dict[tuple[str, str, str], Any] = {}
    for row in rows:
        key = (row["pipeline"], row["query"])
        series = found.setdefault(key, {"batches": {}, "rows": {}, "batch_ms": {}, "lag": {}})
        number, last = row["interval"], before.get((*key, row["run_id"]))
        is_new = row["started_at"] >= period.start_ms
        for name in ("batches", "rows"):
            first = last[name] if last is not None else 0 if is_new else row[f"{name}_first"]
            more = (row[name] or 0) - (first or 0)
            series[name][number] = (series[name].get(number) or 0) + max(more, 0)
        series["batch_ms"][number], series["lag"][number] = row["batch_ms"], row["lag"]
        before[(*key, row["run_id"])] = row
    for (pipeline, query), series in sorted(found.items()):
        batches, read = (period.values(series[name], 0) for name in ("batches", "rows"))
        times = period.values(series["batch_ms"])
        lag = _carried(period.values(series["lag"]))
        report.pipelines.append(PipelineBatches(pipeline, query, batches, read, times, lag))


def _sizes(records: DataFrame, report: BrokerReport) -> None:
    size = F.length("value")
    rows = records.groupBy("topic").agg(
        F.count("*").alias("messages"),
        F.sum(size).alias("bytes"),
        F.percentile_approx(size, list(SIZES)).alias("percentiles"),
        F.max(size).alias("largest"),
    )
    report.sizes = sorted(
        (
            MessageSizes(
                row["topic"], row["messages"], row["bytes"] or 0, tuple(row["percentiles"] or (0,) * len(SIZES)),
                row["largest"] or 0,
            )
            for row in rows.collect()
        ),
        key=lambda each: (-each.bytes, each.topic),
    )  # fmt: skip


def _total(values: Values) -> float:
    return sum(value or 0 for value in values)
