"""What goes through topics and subscriptions, minute by minute: as tables, and as topics to follow.

Two kinds of rows::

    traffic      per topic and minute: messages, bytes, sizes of values, distinct keys, time between messages
    deliveries   per subscription and minute: delivered, acknowledged, attempts, latency, dead letters by reason

The first is read off the records themselves, the second off the broker's own events (``__events``).

Only whole minutes
==================
The times of a partition never run backwards, and the broker finds the first record at or after a time. So
a minute is over once the clock says so (and ``DELAY_S`` later, for what was still being synced), its
records are exactly those between two offsets, and there is no late data. Each round is a *batch* query over
all minutes that are over and not yet told, in a stream as well as with ``once``: the minute that runs is
left to the next round. That is why there is no watermark, no state and no checkpoint here.

Exactly once
============
What was told is known by where it was told: a table by the number of its last commit (the minute), a topic by
the last record in it (its header ``headrace-minute``). A round begins behind that, for each output by itself,
so a round that is repeated after a crash tells each minute once, and a lost disk of Spark's loses nothing.

What the columns mean
=====================
- ``gap_avg_ms``, ``gap_p99_ms``: between one message of the minute and the next one of the topic, whatever
  their partitions, to the millisecond.
- ``keys``: distinct keys, approximately (5%). ``value_p50``, ``value_p99`` are approximate to 0.1%.
- Events are counted in the minute in which the broker told of them, up to ``events_interval`` (10 s) after
  they happened. ``latency_p99_ms`` is the worst of the minute's intervals, ``latency_p50_ms`` their average.

Rejected: a streaming aggregation. It needs a watermark, tells a minute only when a later one has begun *in
the data* (an idle topic never tells its last), and cannot look at the order of messages at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from headrace.client.threads import BrokerClient
from headrace.errors import NotFound, TopicNotFound
from headrace.log.batch import encode
from headrace.log.columns import many
from headrace.spark import lake
from headrace.spark.options import SourceOptions
from headrace.spark.source.stores import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MINUTE_MS = 60_000
DELAY_S = 5.0
"""How long after its end a minute is told."""
KEPT_HOURS = 30 * 24.0
"""Of topics that are told to: longer than of those they are about, so that the last minute is known."""
EVENTS = "__events"
HEADER = "headrace-minute"
_TIME = pa.timestamp("us", tz="UTC")
_COUNTS = pa.map_(pa.string(), pa.int64())

TRAFFIC = pa.schema(
    [
        ("minute", _TIME),
        ("topic", pa.string()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("value_min", pa.int64()),
        ("value_avg", pa.float64()),
        ("value_p50", pa.int64()),
        ("value_p99", pa.int64()),
        ("value_max", pa.int64()),
        ("keyed", pa.int64()),
        ("keys", pa.int64()),
        ("gap_avg_ms", pa.float64()),
        ("gap_p99_ms", pa.float64()),
    ]
)
DELIVERIES = pa.schema(
    [
        ("minute", _TIME),
        ("subscription", pa.string()),
        ("topic", pa.string()),
        ("delivered", pa.int64()),
        ("redelivered", pa.int64()),
        ("acked", pa.int64()),
        ("nacked", pa.int64()),
        ("timeouts", pa.int64()),
        ("expired", pa.int64()),
        ("dead_lettered", pa.int64()),
        ("attempts", _COUNTS),
        ("latency_avg_ms", pa.float64()),
        ("latency_p50_ms", pa.float64()),
        ("latency_p99_ms", pa.int64()),
        ("latency_max_ms", pa.int64()),
        ("dead_letters", _COUNTS),
        ("lag", pa.int64()),
        ("members", pa.int64()),
    ]
)
SCHEMAS = {"traffic": TRAFFIC, "deliveries": DELIVERIES}
_EVENT = (
    "type STRING, subscription STRING, topic STRING, delivered BIGINT, redelivered BIGINT, "
    "acked BIGINT, nacked BIGINT, timeouts BIGINT, expired BIGINT, dead_lettered BIGINT, "
    "attempts MAP<STRING, BIGINT>, dead_letters MAP<STRING, BIGINT>, lag BIGINT, members BIGINT, "
    "latency_ms STRUCT<count: BIGINT, sum: BIGINT, max: BIGINT, p50: BIGINT, p99: BIGINT>"
)


# --- the queries ----------------------------------------------------------------------------------
def traffic(
    spark: SparkSession,
    source: Mapping[str, Any],
    topics: Sequence[str],
    start_ms: int,
    end_ms: int,
    *,
    leave_out: Sequence[str] = (),
) -> pa.Table:
    """What went through topics between two times, by topic and minute."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    def records(columns: str) -> DataFrame:
        found = _between(spark, source, topics, start_ms, end_ms, columns)
        return found.where(~F.col("topic").isin(list(leave_out))) if leave_out else found

    place = ["topic", "minute"]
    sized = records("topic,timestamp,key,value").select(
        "topic",
        F.date_trunc("minute", "timestamp").alias("minute"),
        F.octet_length("value").cast("bigint").alias("size"),
        "key",
    )
    sizes = sized.groupBy(*place).agg(
        F.count("*").alias("messages"),
        F.sum("size").alias("bytes"),
        F.min("size").alias("value_min"),
        F.avg("size").alias("value_avg"),
        F.percentile_approx("size", [0.5, 0.99], 1000).alias("parts"),
        F.max("size").alias("value_max"),
        F.count("key").alias("keyed"),
        F.approx_count_distinct("key").alias("keys"),
    )
    # At most 60,000 rows a minute: messages of one millisecond are n - 1 gaps of nothing, and one.
    counted = (
        records("topic,timestamp")
        .select(
            "topic",
            F.date_trunc("minute", "timestamp").alias("minute"),
            F.unix_millis("timestamp").alias("ms"),
        )
        .groupBy("topic", "minute", "ms")
        .agg(F.count("*").alias("n"))
    )
    before = F.lag("ms").over(Window.partitionBy(*place).orderBy("ms"))
    gaps = (
        counted.withColumn("before", before)
        .select(
            *place,
            F.explode(
                F.array(
                    F.struct(
                        (F.col("ms") - F.col("before")).alias("gap"),
                        F.lit(1).cast("bigint").alias("n"),
                    ),
                    F.struct(F.lit(0).cast("bigint").alias("gap"), (F.col("n") - 1).alias("n")),
                )
            ).alias("g"),
        )
        .where("g.gap IS NOT NULL AND g.n > 0")
    )
    spread = gaps.groupBy(*place).agg(
        (F.sum(F.expr("g.gap * g.n")) / F.sum("g.n")).alias("gap_avg_ms"),
        F.expr("percentile(g.gap, 0.99, g.n)").alias("gap_p99_ms"),
    )
    found = sizes.join(spread, place, "left").select(
        *place,
        "messages",
        "bytes",
        "value_min",
        "value_avg",
        F.col("parts")[0].alias("value_p50"),
        F.col("parts")[1].alias("value_p99"),
        "value_max",
        "keyed",
        "keys",
        "gap_avg_ms",
        "gap_p99_ms",
    )
    return _table(found.orderBy("minute", "topic"), TRAFFIC)


def deliveries(
    spark: SparkSession, source: Mapping[str, Any], start_ms: int, end_ms: int
) -> pa.Table:
    """What subscriptions did between two times, by subscription and minute."""
    from pyspark.sql import functions as F

    place = ["minute", "subscription", "topic"]
    records = _between(spark, source, [EVENTS], start_ms, end_ms, "timestamp,offset,value")
    events = records.select(
        F.date_trunc("minute", "timestamp").alias("minute"),
        "offset",
        F.from_json(F.col("value").cast("string"), _EVENT).alias("e"),
    ).where("e.type = 'deliveries'")
    flat = events.select("minute", "offset", "e.*")
    counters = (
        "delivered",
        "redelivered",
        "acked",
        "nacked",
        "timeouts",
        "expired",
        "dead_lettered",
    )
    latencies = F.sum("latency_ms.count")
    summed = flat.groupBy(*place).agg(
        *[F.sum(name).alias(name) for name in counters],
        (F.sum("latency_ms.sum") / F.nullif(latencies, F.lit(0))).alias("latency_avg_ms"),
        (F.sum(F.expr("latency_ms.p50 * latency_ms.count")) / F.nullif(latencies, F.lit(0))).alias(
            "latency_p50_ms"
        ),
        F.max("latency_ms.p99").alias("latency_p99_ms"),
        F.max("latency_ms.max").alias("latency_max_ms"),
        F.max_by("lag", "offset").alias("lag"),
        F.max_by("members", "offset").alias("members"),
    )

    def added_up(name: str) -> DataFrame:
        pairs = flat.select(*place, F.explode(name).alias("k", "v"))
        pairs = pairs.groupBy(*place, "k").agg(F.sum("v").alias("v"))
        entries = F.map_from_entries(F.sort_array(F.collect_list(F.struct("k", "v"))))
        return pairs.groupBy(*place).agg(entries.alias(name))

    found = summed.join(added_up("attempts"), place, "left")
    found = found.join(added_up("dead_letters"), place, "left")
    found = found.select(*DELIVERIES.names)
    return _table(found.orderBy(*place), DELIVERIES)


def _between(
    spark: SparkSession,
    source: Mapping[str, Any],
    topics: Sequence[str],
    start_ms: int,
    end_ms: int,
    columns: str,
) -> DataFrame:
    return (
        spark.read.format("headrace")
        .options(**source)
        .option("topic", ",".join(topics))
        .option("startingTimestamp", str(start_ms))
        .option("endingTimestamp", str(end_ms))
        .option("columns", columns)
        .option("minPartitions", str(spark.sparkContext.defaultParallelism))
        .load()
    )


def _table(found: DataFrame, schema: pa.Schema) -> pa.Table:
    rows = [row.asDict() for row in found.collect()]
    for row in rows:
        # Spark gives times of the session's zone without saying so; they are moments.
        row["minute"] = row["minute"].astimezone()
        for name in ("attempts", "dead_letters"):
            if name in row:
                row[name] = list((row[name] or {}).items())
    return pa.Table.from_pylist(rows, schema=schema)


# --- where rows go --------------------------------------------------------------------------------
class Output(Protocol):
    """A place that takes the rows of a kind, and knows the last minute it was told."""

    kind: str

    def last_minute(self) -> int | None: ...

    def tell(self, rows: pa.Table, minute: int) -> int:
        """Add rows up to a minute; how many were new."""


class TableOutput:
    """A lake table."""

    def __init__(self, kind: str, path: str, format_: str, name: str):
        self.kind = kind
        self._path, self._format, self._name = path, format_, name

    def last_minute(self) -> int | None:
        from headrace.spark.lake.tables import find_table

        try:
            return find_table(self._path, self._format).last_number(self._name)
        except NotFound:
            return None

    def tell(self, rows: pa.Table, minute: int) -> int:
        rows = _after(rows, self.last_minute())
        if rows.num_rows:
            lake.append(rows, path=self._path, kind=self._format, app_id=self._name, number=minute)
        return int(rows.num_rows)

    def __str__(self) -> str:
        return f"table {self._path}"


class TopicOutput:
    """A topic of JSON messages, one for each row, with the topic or subscription as key."""

    def __init__(self, kind: str, topic: str, name: str, client: BrokerClient):
        self.kind = kind
        self.topic = topic
        self._name = name
        self._client = client

    def last_minute(self) -> int | None:
        try:
            place = self._client.positions(self.topic)[self.topic][0]
        except TopicNotFound:
            return None
        if place["end"] == place["start"]:
            return None
        [last] = self._client.fetch(self.topic, place["end"] - 1, 1)
        try:
            return int(last.headers[HEADER])
        except (KeyError, ValueError):
            return None

    def tell(self, rows: pa.Table, minute: int) -> int:
        rows = _after(rows, self.last_minute())
        if not rows.num_rows:
            return 0
        if self.topic not in self._client.topics():
            self._client.create_topic(self.topic, 1, retention_hours=KEPT_HOURS)
        key = "topic" if self.kind == "traffic" else "subscription"
        documents = rows.to_pylist()
        batch = encode(
            many(
                [orjson.dumps(_document(each)) for each in documents],
                bytes_max=1 << 20,
                keys=[each[key].encode() for each in documents],
                headers={HEADER: str(minute)},
            )
        )
        name = f"{self._name}.{self.kind}"
        piece = self._client.stage(self.topic, batch, partition=0, name=name, number=minute)
        return len(documents) if self._client.commit_staged(name, minute, [piece]) else 0

    def __str__(self) -> str:
        return f"topic {self.topic}"


def _document(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON has it."""
    found = {
        name: dict(value) if name in ("attempts", "dead_letters") else value
        for name, value in row.items()
    }
    found["minute"] = row["minute"].strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def rows_of_table(path: str) -> list[dict[str, Any]]:
    """A table of traffic as messages have it; it is small, and read without Spark."""
    import pyarrow.parquet as pq

    from headrace.spark.lake.tables import find_table

    found: list[dict[str, Any]] = []
    for name in find_table(path).paths():
        for row in pq.read_table(name, partitioning=None).to_pylist():
            found.append(_document(row))
    return found


def _after(rows: pa.Table, minute: int | None) -> pa.Table:
    if minute is None:
        return rows
    behind = pa.scalar((minute + 1) * MINUTE_MS * 1000, pa.int64()).cast(_TIME)
    return rows.filter(pc.greater_equal(rows["minute"], behind))


# --- rounds ---------------------------------------------------------------------------------------
class Traffic:
    """Tells every minute to its outputs, once."""

    def __init__(
        self,
        spark: SparkSession,
        source: Mapping[str, Any],
        topics: Sequence[str],
        outputs: Sequence[Output],
        *,
        since_ms: int = 0,
        delay_s: float = DELAY_S,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ):
        self._spark = spark
        self._source = dict(source)
        self._topics = list(topics)
        self._outputs = list(outputs)
        self._first = since_ms // MINUTE_MS
        self._delay_ms = int(delay_s * 1000)
        self._now_ms = now_ms
        self._told: dict[str, int] = {}
        """The last minute of each kind that was looked at in this run."""
        self.rounds = 0
        self.rows = 0

    def round(self) -> int:
        """All minutes that are over and not told; returns how many rows were new."""
        last = (self._now_ms() - self._delay_ms) // MINUTE_MS - 1
        told = 0
        for kind in SCHEMAS:
            outputs = [output for output in self._outputs if output.kind == kind]
            first = self._first_minute(kind, outputs)
            if not outputs or first > last:
                continue
            rows = self._rows(kind, first * MINUTE_MS, (last + 1) * MINUTE_MS)
            for output in outputs:
                told += output.tell(rows, last)
            self._told[kind] = last
        self.rounds += 1
        self.rows += told
        return told

    def _first_minute(self, kind: str, outputs: Sequence[Output]) -> int:
        if kind in self._told:
            return self._told[kind] + 1
        lasts = [output.last_minute() for output in outputs]
        begun = [last + 1 for last in lasts if last is not None]
        return max(min(begun), self._first) if len(begun) == len(lasts) and begun else self._first

    def _rows(self, kind: str, start_ms: int, end_ms: int) -> pa.Table:
        if kind == "deliveries":
            if not self._there([EVENTS]):
                return DELIVERIES.empty_table()
            return deliveries(self._spark, self._source, start_ms, end_ms)
        own = [each.topic for each in self._outputs if isinstance(each, TopicOutput)]
        if not self._there(self._topics):
            return TRAFFIC.empty_table()
        return traffic(self._spark, self._source, self._topics, start_ms, end_ms, leave_out=own)

    def _there(self, topics: Sequence[str]) -> bool:
        """Whether there is anything to read; a topic that is not there yet may come."""
        options = SourceOptions.of({**self._source, "topic": ",".join(topics)})
        store = open_store(options)
        try:
            return bool(store.topics(options.topics))
        except NotFound:
            if topics == [EVENTS]:
                return False
            raise
        finally:
            store.close()

    def seconds_to_next(self) -> float:
        """Until the next minute can be told."""
        now = self._now_ms()
        behind = (now - self._delay_ms) % MINUTE_MS
        return (MINUTE_MS - behind) / 1000
