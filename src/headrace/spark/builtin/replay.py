"""A topic or a lake table back into a topic, at a rate, exactly once.

::

    a range of offsets ──▶ numbered steps, fixed at the first run ──▶ one write of Spark each, at the rate

- The first run finds the offsets of the range, and writes them down under the replay's name (:class:`ReplayPlan`).
  A step has the same share of every partition, so partitions advance together, and each keeps its order.
- A step is a batch write with ``appId`` and ``batchId``: the broker commits each number once, however often
  it is tried. So a replay that was interrupted or killed continues under its name, and writes nothing twice.
- A step holds the records of :data:`STEP_S` seconds, and begins when those of the step before are due. So the
  rate counts records that are read; a condition (``where``) leaves fewer that are written.
- Each record gets the headers ``headrace-replayed-from`` (``topic/partition@offset``) and
  ``headrace-replayed-id``, the id that it had.

Rejected: a streaming query (it has no end, and cannot read a table); one large write (it has no rate, and
cannot be interrupted).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson
from pyspark.sql import Observation
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructType

from headrace.clock import Clock
from headrace.errors import (
    Conflict,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    refused_by_disk,
)
from headrace.files import Files
from headrace.model import check_subscription_name, check_topic_name
from headrace.spark import lake
from headrace.spark.builtin.offset_ranges import is_within, topic_rows
from headrace.spark.connection import ConnectionOptions, connect
from headrace.spark.durable import locked
from headrace.spark.error_sentences import in_words
from headrace.spark.lake import Span
from headrace.spark.lake.stores import place_of
from headrace.spark.notation import RecordRange
from headrace.spark.options import Given
from headrace.spark.record_headers import with_headers
from headrace.spark.sessions.arrow_batches import unmeasured
from headrace.spark.sessions.stop_flag import StopFlag
from headrace.spark.source.chosen import topics_of
from headrace.spark.source.data_source import HeadraceReader, SpanPartition
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Known

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FROM_HEADER = "headrace-replayed-from"
ID_HEADER = "headrace-replayed-id"
STEP_S = 5.0
"""Long enough for a job of Spark, which takes about a second however small it is."""
STEP_RECORDS_MAX = 500_000
STEP_BYTES_MAX = 64 << 20
"""A step is one commit; a broker in memory has 256 MiB for records that are staged."""
NEEDED = ("topic", "partition", "offset", "timestamp", "value")


@dataclass(frozen=True)
class ReplayRequest:
    """The range, the target and the options of a replay."""

    source: str
    """A topic, several with commas, a wildcard; or the path of a table, which has a slash."""
    to: str
    range: RecordRange = field(default_factory=RecordRange)
    where: str | None = None
    keep_timestamps: bool = False
    same_partition: bool = False
    """Records keep the partition that they were in; else their key chooses it."""

    def __post_init__(self) -> None:
        check_topic_name(self.to)
        if self.is_table:  # from wherever it is run again, it is the same table
            object.__setattr__(self, "source", str(place_of(self.source)))
        else:
            SourceOptions.of({"topic": self.source})

    @property
    def is_table(self) -> bool:
        return "/" in self.source

    def options(self) -> dict[str, Any]:
        """By their names in the command."""
        found = asdict(self)
        found |= {"from": found.pop("source"), **found.pop("range")}
        return {name.replace("_", "-"): value for name, value in found.items()}


@dataclass
class ReplayPlan:
    """The offsets of a replay, and how many steps are done: the file ``<state>/<name>.json``."""

    request: dict[str, Any]
    app_id: str
    """The name of the commits. It has a random part, so a new plan under an old name is a new replay."""
    offsets: list[Span]
    steps: int
    done: int = 0
    rows: int = 0
    """Records that are written."""

    def part(self, first: int, last: int) -> list[Span]:
        """The offsets of the steps ``first`` to ``last - 1``: the same share of every partition."""
        found = []
        for topic, partition, start, end in self.offsets:
            low = start + (end - start) * first // max(1, self.steps)
            high = start + (end - start) * last // max(1, self.steps)
            if low < high:
                found.append(Span(topic, partition, low, high))
        return found

    @property
    def left(self) -> int:
        """Offsets that are not read yet."""
        return count(self.offsets) - count(self.part(0, self.done))

    @property
    def is_finished(self) -> bool:
        return self.done == self.steps


def count(offsets: list[Span]) -> int:
    return sum(end - start for _, _, start, end in offsets)


class Replay:
    """One replay. Run again under its name, it continues; only the rate may then differ.

    ``connection`` holds options of ``format("headrace")`` (``servers``, ``token``, …); ``rate`` is records a
    second; ``state`` is the directory for plans.
    """

    def __init__(
        self,
        request: ReplayRequest,
        connection: Mapping[str, str],
        *,
        state: Path,
        rate: float | None = None,
        name: str | None = None,
    ):
        self.name = check_subscription_name(name or f"replay-{uuid4().hex[:8]}")
        self._request, self._connection, self._rate = request, dict(connection), rate
        self._path = state / f"{self.name}.json"
        self._load()  # another request under this name is an error now, not when Spark has started
        if request.is_table:  # a source that does not exist is an error before Spark starts, too
            lake.describe(request.source)
        else:
            self._known()

    def run(
        self,
        spark: SparkSession,
        tell: Callable[[ReplayPlan], None] = lambda plan: None,
        stop: StopFlag | None = None,
    ) -> ReplayPlan:
        """Write the rest, step by step. ``tell`` is called after each step; ``stop`` ends it after the current one."""
        busy = Conflict(f"the replay {self.name} is running already", code="replay_running")
        try:
            with locked(self._path.with_suffix(".lock"), busy):  # two plans would be two replays
                return self._run(spark, tell, stop or StopFlag())
        except HeadraceError:  # a RequestTimeout is an OSError, too
            raise
        except OSError as error:
            raise refused_by_disk(error) from error

    def _run(
        self, spark: SparkSession, tell: Callable[[ReplayPlan], None], stop: StopFlag
    ) -> ReplayPlan:
        plan = self._load() or self._begin(spark)
        tell(plan)
        due = time.monotonic()
        while not plan.is_finished and not stop.wait(due - time.monotonic()):
            offsets = plan.part(plan.done, plan.done + 1)
            if self._rate is not None:  # a late step is made up for, a long pause is not
                due = max(due, time.monotonic() - STEP_S) + count(offsets) / self._rate
            plan.rows += self._write(spark, plan, offsets)
            plan.done += 1
            self._save(plan)
            tell(plan)
        return plan

    # --- the plan ---------------------------------------------------------------------------------
    def _load(self) -> ReplayPlan | None:
        try:
            plan = ReplayPlan(**orjson.loads(self._path.read_bytes()))
            plan.offsets = [Span(*each) for each in plan.offsets]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise DataCorrupt(
                f"{self._path} is not the plan of a replay; move it away, or give another --name",
                code="invalid_plan",
            ) from None
        for option, now in self._request.options().items():
            before = plan.request.get(option)
            if before != now:
                raise Conflict(
                    f"the replay {self.name} began with --{option} {before!r}, not {now!r}: repeat it "
                    "as it was, or give another --name",
                    code="replay_differs",
                )
        return plan

    def _save(self, plan: ReplayPlan) -> None:
        text = orjson.dumps(plan, default=list, option=orjson.OPT_INDENT_2)
        Files().replace(self._path, [text])

    def _begin(self, spark: SparkSession) -> ReplayPlan:
        request = self._request
        with in_words():
            look = self._look_at_table if request.is_table else self._look_at_topics
            offsets, record_bytes = look(spark)
            self._rows(spark, offsets)  # Spark reads the condition before anything is created
        size = min(STEP_RECORDS_MAX, STEP_BYTES_MAX / max(1.0, record_bytes))
        if self._rate is not None:
            size = min(size, self._rate * STEP_S)
        steps = -(-count(offsets) // max(1, int(size)))
        if request.same_partition:
            self._create_target(1 + max((partition for _, partition, _, _ in offsets), default=0))
        app_id = f"replay.{self.name}.{uuid4().hex[:8]}"
        plan = ReplayPlan(request.options(), app_id, offsets, steps)
        self._save(plan)
        return plan

    def _known(self) -> Known:
        options = SourceOptions.of({**self._connection, "topic": self._request.source})
        return topics_of(options, some=True)

    def _look_at_topics(self, spark: SparkSession) -> tuple[list[Span], float]:
        """The offsets that a read of Spark over this range would plan; and the size of the largest records."""
        known = self._known()
        given = {**self._connection, "topic": self._request.source}
        given |= self._request.range.options(known, Clock().now_ms())
        reader = HeadraceReader(SourceOptions.of(given), StructType().add("offset", LongType()))
        spans = [each.span for each in reader.partitions() if isinstance(each, SpanPartition)]
        extents = [extent for topic in known.values() for extent in topic.partitions.values()]
        record_bytes = max(extent.bytes_per_record for extent in extents)
        return [Span(*each[:4]) for each in spans], record_bytes

    def _look_at_table(self, spark: SparkSession) -> tuple[list[Span], float]:
        """The first and last offset of each partition. Times of a partition never run backwards."""
        asked = self._request.range
        rows = lake.read(spark, self._request.source)
        missing = [name for name in NEEDED if name not in rows.columns]
        if missing:
            raise InvalidArgument(
                f"{self._request.source} has no column {', '.join(missing)}: a table to replay has the "
                "columns of one that headrace archive wrote",
                code="unknown_column",
            )
        since, until = asked.times_ms(Clock().now_ms())
        for condition, bound in (
            ("timestamp >= timestamp_millis({})", since),
            ("timestamp < timestamp_millis({})", until),
            ("offset >= {}", asked.from_offset),
            ("offset < {}", asked.to_offset),
        ):
            if bound is not None:
                rows = rows.where(condition.format(bound))
        ends = F.min("offset"), F.max("offset") + 1
        found = rows.groupBy("topic", "partition").agg(*ends).collect()
        table = lake.describe(self._request.source)
        return sorted(Span(*row) for row in found), table.bytes / max(1, table.rows)

    def _create_target(self, partitions: int) -> None:
        """A topic that exists and has too few partitions is an error of the first step."""
        with connect(ConnectionOptions.of(Given(self._connection))) as client:
            if self._request.to not in client.topics():
                client.create_topic(self._request.to, partitions)

    # --- a step -----------------------------------------------------------------------------------
    def _write(self, spark: SparkSession, plan: ReplayPlan, offsets: list[Span]) -> int:
        """Read and write one step; how many records were written."""
        written = Observation()
        rows = self._rows(spark, offsets).observe(written, F.count(F.lit(1)).alias("rows"))
        writer = rows.write.format("headrace").mode("append").options(**self._connection)
        # A number that was committed before is not written again.
        step = {"topic": self._request.to, "appId": plan.app_id, "batchId": str(plan.done + 1)}
        with in_words(), unmeasured(spark):
            writer.options(**step).save()
            return int(written.get["rows"])

    def _rows(self, spark: SparkSession, offsets: list[Span]) -> DataFrame:
        """The records of some offsets as they are written, each partition in order."""
        request = self._request
        if request.is_table:
            rows = lake.read(spark, request.source).where(is_within(offsets))
        else:
            rows = topic_rows(spark, self._connection, self._known(), offsets)
        if request.where is not None:
            rows = rows.where(request.where)
        if request.is_table:  # a task that reads a topic has one partition, in order
            rows = rows.repartition("topic", "partition")
            rows = rows.sortWithinPartitions("topic", "partition", "offset")
        added: dict[str, Column] = {
            FROM_HEADER: F.concat("topic", F.lit("/"), "partition", F.lit("@"), "offset")
        }
        if "id" in rows.columns:
            added[ID_HEADER] = F.col("id")
        own = F.col("headers") if "headers" in rows.columns else None
        kept = ["value", *(["key"] if "key" in rows.columns else [])]
        kept += ["timestamp"] if request.keep_timestamps else []
        kept += ["partition"] if request.same_partition else []
        return rows.select(*kept, with_headers(own, added).alias("headers"))
