"""A topic or a lake table back into a topic, at a rate, exactly once.

::

    offsets ──▶ steps (numbered, fixed at the first run) ──▶ rounds of steps: one Spark job each
                                                              │ reads, filters, stages per step
                target topic ◀── commit (name, step) at the rate ◀──┘

- What is replayed is a set of offsets, cut into numbered steps when the replay is first run; the plan is
  kept in a file under the replay's name (``replay_plan``). A step takes the same share of every partition,
  so partitions move on together, about as they did at first, and each keeps its order.
- A step is a commit ``(name, number)`` in the broker, which does it once, however often it is tried. So
  whatever is killed whenever: repeated under its name, a replay goes on, and nothing is there twice.
- A Spark job stages a round of steps (``replay_staging``); nobody sees that. The rate is kept by when
  steps are committed, which is cheap; so it is smooth, and Spark's own second for a job does not matter.
  The next round is staged while this one is committed.
- Each record gets the header ``headrace-replayed-from``: ``topic/partition@offset``, and
  ``headrace-replayed-id``, the id that it had. Key and other headers are kept, the timestamp if asked for.

The condition (``where``) may even be ``rand() < 0.1``: which offsets a step has does not depend on it, and
a step whose commit was in doubt is what was committed first.

Rejected: a write of Spark's own for each step (a job a second, each as slow as its slowest part); one
large write (no rate, and not interruptible); all rows sorted by time in one task (a resumed replay would
read and sort everything again, and a table larger than a machine could not be replayed).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow as pa

from headrace.client.threads import BrokerClient
from headrace.clock import Clock
from headrace.errors import Conflict, HeadraceError, InvalidArgument, TopicNotFound
from headrace.spark import lake
from headrace.spark.builtin.replay_plan import (
    Plan,
    Request,
    State,
    new_name,
    offsets_of,
    parse_rate,
    step_offsets,
)
from headrace.spark.builtin.replay_staging import ANSWER, PLACE, Stage, Staged, staged_rows
from headrace.spark.connecting import connect
from headrace.spark.lake import Offsets
from headrace.spark.options import Connection, Given
from headrace.spark.sessions.arrow_batches import unmeasured
from headrace.spark.sessions.stop_flag import StopFlag
from headrace.spark.sink.outgoing import layout_of
from headrace.spark.source.positions import DataLoss
from headrace.spark.sql.errors import Cancelled, sentence

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

logger = logging.getLogger("headrace.spark")
FROM_HEADER = "headrace-replayed-from"
ID_HEADER = "headrace-replayed-id"
NEEDED = ("topic", "partition", "offset", "value")
ROUND_S = 30
ROUND_OFFSETS_MAX = 500_000
ROUND_STEPS_MAX = 20_000
ROUND_BYTES_MAX = 64 << 20
"""Two rounds are staged at a time, and a broker in memory has 256 MiB for that."""
CATCH_UP_S = 1.0
"""So much of the time that was lost is made up for; a pause is not followed by a flood."""
COMMIT_EXTRA_S = 30.0
LOOK_S = 0.1
CLAIM = 0
FIRST_STEP = 1
"""The number of the commit of step 0; ``CLAIM`` is that of taking the name."""
Rounds = dict[int, list[Staged]]


class Progress(NamedTuple):
    """How far a replay is."""

    name: str
    offsets_done: int
    offsets: int
    rows: int
    """Written, by this run and those before it."""
    steps_done: int
    steps: int

    @property
    def is_finished(self) -> bool:
        return self.steps_done >= self.steps


def replay(
    spark: SparkSession,
    source: str,
    to: str,
    *,
    since: str | None = None,
    until: str | None = None,
    offsets: str | None = None,
    where: str | None = None,
    rate: str | float | None = None,
    name: str | None = None,
    keep_timestamps: bool = False,
    partition: str = "key",
    connection: Mapping[str, str] | None = None,
    state: str | None = None,
    tell: Callable[[Progress], None] | None = None,
    stop: StopFlag | None = None,
) -> Progress:
    """Write the records of a topic, or of a table that ``archive`` made, into a topic.

    ``source`` is a table when there is a slash in it, else a topic, several with commas, or a wildcard.
    ``connection`` are options of ``format("headrace")`` (``servers``, ``token``, …). With a ``name`` that
    was begun before, it goes on where that one ended; ``rate`` may be another then, all else not.
    ``stop`` ends it behind the step that is being committed; what is returned says how far it came.
    """
    request = Request.of(
        source,
        to,
        since=since,
        until=until,
        offsets=offsets,
        where=where,
        keep_timestamps=keep_timestamps,
        partition=partition,
    )
    pace = parse_rate(str(rate)) if rate is not None else None
    given = dict(connection or {})
    found = Connection.of(Given(given))
    with State(state, name or new_name()) as kept:
        client = connect(found, patience=found.timeout + COMMIT_EXTRA_S)
        try:
            return _Replay(spark, request, kept, given, client, pace, tell, stop).run()
        finally:
            client.close()


class _Replay:
    def __init__(
        self,
        spark: SparkSession,
        request: Request,
        state: State,
        given: dict[str, str],
        client: BrokerClient,
        rate: float | None,
        tell: Callable[[Progress], None] | None,
        stop: StopFlag | None,
    ):
        self._spark, self._request, self._state = spark, request, state
        self._given, self._client = given, client
        self._connection = Connection.of(Given(given))
        self._rate = rate
        self._tell = tell or (lambda progress: None)
        self._stop = stop or StopFlag()
        self._commit_name = f"replay.{state.name}"
        self._ready = 0.0
        self._group = f"headrace-replay-{uuid.uuid4()}"

    def run(self) -> Progress:
        plan = self._state.load(self._request)
        if plan is None:
            plan = self._begin()
        elif self._target(plan) != plan.target:
            raise Conflict(
                f"topic {self._request.to} was deleted since the replay {self._state.name} was begun, "
                "and what it had written with it; begin anew with another --name",
                code="replay_differs",
            )
        self._tell(self._progress(plan))
        if not plan.is_finished:
            self._work(plan)
        return self._progress(plan)

    def _progress(self, plan: Plan) -> Progress:
        return Progress(
            self._state.name, plan.done_offsets(), plan.count, plan.rows, plan.done, plan.steps
        )

    # --- planning -------------------------------------------------------------------------------
    def _begin(self) -> Plan:
        request = self._request
        times = request.times(Clock().now_ms())
        incarnations: dict[str, int] = {}
        if request.is_table:
            there, weight = self._look_into_table(times)
        else:
            there, weight, incarnations = self._look_into_topics(times)
        offsets = request.chosen(there)
        plan = Plan.of(request, offsets, step_offsets(self._rate, weight), times)
        plan.incarnations, plan.weight = incarnations, weight
        if request.where is not None:
            with _in_words():
                self._rows(plan, 0, 0)  # Spark reads the condition now, before anything is done
        plan.target = self._target(plan, create=True)
        temporary = self._state.begin(plan)
        if not self._client.commit_staged(self._commit_name, CLAIM, []):
            self._state.drop(temporary)
            raise Conflict(
                f"a replay named {self._state.name} was begun before, and its plan is not in "
                f"{self._state.directory}; give --state as it was then, or another --name",
                code="replay_unknown",
            )
        self._state.begun(temporary)
        return plan

    def _look_into_topics(
        self, times: tuple[int | None, int | None]
    ) -> tuple[Offsets, float, dict[str, int]]:
        since, until = times
        topics = self._request.topics
        known = self._client.positions(topics)
        if not known:
            raise TopicNotFound(f"there is no topic that matches {self._request.source}")
        begin = known if since is None else self._client.positions(topics, at=since)
        end = known if until is None else self._client.positions(topics, at=until)
        found = Offsets()
        size = records = 0
        for topic, partitions in known.items():
            for part in partitions:
                number = part["partition"]
                size += part["bytes"]
                records += part["end"] - part["start"]
                start = _at(begin, topic, number, "start" if since is None else "offset")
                stop = _at(end, topic, number, "end" if until is None else "offset")
                found.add(topic, number, start, min(stop, part["end"]))
        incarnations = {topic: parts[0]["incarnation"] for topic, parts in known.items()}
        return found, size / records if records else 0.0, incarnations

    def _look_into_table(self, times: tuple[int | None, int | None]) -> tuple[Offsets, float]:
        from pyspark.sql import functions as F

        table = lake.describe(self._request.source)
        rows = lake.read(self._spark, self._request.source)
        missing = [name for name in NEEDED if name not in rows.columns]
        if times != (None, None) and "timestamp" not in rows.columns:
            missing.append("timestamp")
        if missing:
            raise InvalidArgument(
                f"{self._request.source} has no column {', '.join(missing)}: a table to replay is one "
                "that headrace archive has made, or has its columns",
                code="unknown_column",
            )
        with _in_words():
            found = (
                _within(rows, times)
                .groupBy("topic", "partition")
                .agg(F.min("offset").alias("lowest"), F.max("offset").alias("highest"))
                .collect()
            )
        return offsets_of(row.asDict() for row in found), table.bytes / max(1, table.rows)

    def _target(self, plan: Plan, *, create: bool = False) -> int:
        """The target's incarnation; -1: it is not there. Whether it has the partitions that it needs."""
        to = self._request.to
        needed = 1 + max((number for _, number in plan.offsets.partitions()), default=0)
        same = self._request.partition == "same"
        try:
            found = self._client.positions(to)
        except TopicNotFound:
            if not create:
                return -1
            if same:
                self._client.create_topic(to, needed)
            else:
                self._client.admin("topic", topic=to, create=True)
            found = self._client.positions(to)
        if same and len(found[to]) < needed:
            raise InvalidArgument(
                f"topic {to} has {len(found[to])} partitions, and --partition same needs {needed}; "
                "give it more with headrace alter-topic, or use --partition key",
                code="invalid_partition",
            )
        return found[to][0]["incarnation"]

    # --- reading ----------------------------------------------------------------------------------
    def _rows(self, plan: Plan, first: int, last: int) -> DataFrame:
        """The rows of some steps, as they are written, each partition in order."""
        spans = plan.spans(first, last)
        windows = {key: (some[0].start, some[-1].end) for key, some in spans.items()}
        request = self._request
        if request.is_table:
            rows = lake.read(self._spark, request.source)
            rows = _within(rows, (plan.since_ms, plan.until_ms)).where(_inside(windows))
        else:
            rows = self._topic_rows(plan, windows)
        if request.where is not None:
            rows = rows.where(request.where)
        if request.is_table:  # a task of the source has one partition, in order
            rows = rows.repartition("topic", "partition")
            rows = rows.sortWithinPartitions("topic", "partition", "offset")
        return rows.selectExpr(*self._columns(rows.columns))

    def _topic_rows(
        self, plan: Plan, windows: Mapping[tuple[str, int], tuple[int, int]]
    ) -> DataFrame:
        topics = sorted({topic for topic, _ in windows} or plan.incarnations)
        starting: dict[str, dict[str, int]] = {}
        ending: dict[str, dict[str, int]] = {}
        for topic, partitions in self._client.positions(topics).items():
            if partitions[0]["incarnation"] != plan.incarnations[topic]:
                raise DataLoss(
                    f"topic {topic} was deleted and made again since the replay was begun: what it "
                    "had is gone"
                )
            for part in partitions:
                number = part["partition"]
                window = windows.get((topic, number), (part["start"], part["start"]))
                starting.setdefault(topic, {})[str(number)] = window[0]
                ending.setdefault(topic, {})[str(number)] = window[1]
        return (
            self._spark.read.format("headrace")
            .options(**self._given)
            .option("topic", ",".join(topics))
            .option("startingOffsets", orjson.dumps(starting).decode())
            .option("endingOffsets", orjson.dumps(ending).decode())
            .load()
        )

    def _columns(self, there: list[str]) -> list[str]:
        ours = f"'{FROM_HEADER}', '{ID_HEADER}'"
        before = (
            f"coalesce(filter(headers, h -> h.key NOT IN ({ours})), array())"
            if "headers" in there
            else "array()"
        )
        header = "named_struct('key', '{}', 'value', cast({} AS BINARY))"
        place = header.format(FROM_HEADER, "concat(topic, '/', partition, '@', offset)")
        was = header.format(ID_HEADER, "id")
        ids = f"if(id IS NULL, array(), array({was}))" if "id" in there else "array()"
        columns = ["topic AS _topic", "partition AS _partition", "offset AS _offset", "value"]
        if "key" in there:
            columns.append("key")
        columns.append(f"concat({before}, array({place}), {ids}) AS headers")
        if self._request.keep_timestamps and "timestamp" in there:
            columns.append("timestamp")
        if self._request.partition == "same":
            columns.append("partition")
        return columns

    # --- writing ----------------------------------------------------------------------------------
    def _work(self, plan: Plan) -> None:
        """Commit round after round; the next one is staged meanwhile."""
        size = steps_of_round(plan, self._rate)
        first, last = plan.done, min(plan.done + size, plan.steps)
        pool = ThreadPoolExecutor(1, "headrace-replay")
        waiting: Future[Rounds] | None = pool.submit(self._stage, plan, first, last)
        held: Rounds = {}
        try:
            while waiting is not None:
                found = self._wait(waiting)
                waiting = None
                if found is None:
                    return
                held = found
                rows = sum(each.rows for some in found.values() for each in some)
                size = steps_of_round(plan, self._rate, size, rows)
                first, behind = last, min(last + size, plan.steps)
                if first < behind:
                    waiting = pool.submit(self._stage, plan, first, behind)
                for step in range(plan.done, last):
                    if not self._commit(plan, step, held.get(step, [])):
                        return
                    held.pop(step, None)
                self._state.save(plan)
                last = behind
        finally:
            self._give_up(waiting, held)
            pool.shutdown()

    def _stage(self, plan: Plan, first: int, last: int) -> Rounds:
        """In a thread of its own, which has a job group of its own."""
        from pyspark.sql import functions as F
        from pyspark.sql.pandas.functions import arrow_udf
        from pyspark.sql.types import StructType

        spark = self._spark
        if self._stop.is_set():
            raise Cancelled("the replay was stopped")
        with _in_words(), unmeasured(spark):
            spark.sparkContext.setJobGroup(self._group, f"headrace replay {self._state.name}", True)
            rows = self._rows(plan, first, last)
            written = StructType([field for field in rows.schema.fields if field.name not in PLACE])
            layout = layout_of(
                written, topic=self._request.to, value_format="binary", key_column=None
            )
            stage = Stage(
                self._connection, layout, self._commit_name, plan.spans(first, last), FIRST_STEP
            )

            def run(given: Iterator[pa.Array]) -> Iterator[pa.Array]:
                return stage(given)

            run.__annotations__ = {"given": Iterator[pa.Array], "return": Iterator[pa.Array]}
            staged: Any = arrow_udf(run, ANSWER)  # type: ignore[call-overload]
            found = rows.select(F.inline(staged(F.struct("*")))).collect()
        return staged_rows(found)

    def _wait(self, waiting: Future[Rounds]) -> Rounds | None:
        """What was staged; None when it was stopped before."""
        while True:
            try:
                return waiting.result(LOOK_S)
            except FutureTimeout:
                if self._stop.is_set():
                    self._spark.sparkContext.cancelJobGroup(self._group)
            except HeadraceError:
                if self._stop.is_set():
                    return None
                raise

    def _commit(self, plan: Plan, step: int, pieces: list[Staged]) -> bool:
        """One step, when its time has come; False when it is not to be done any more."""
        rows = sum(each.rows for each in pieces)
        if rows and self._rate is not None:
            if self._stop.wait(max(0.0, self._ready - time.monotonic())):
                return False
            self._ready = max(self._ready, time.monotonic() - CATCH_UP_S) + rows / self._rate
        elif self._stop.is_set():
            return False
        if pieces:
            ids = [each.piece for each in pieces]
            if not self._client.commit_staged(self._commit_name, FIRST_STEP + step, ids):
                logger.info("step %d of %s was committed before", step, self._state.name)
        plan.done, plan.rows = step + 1, plan.rows + rows
        if pieces:
            self._state.save(plan)
        self._tell(self._progress(plan))
        return True

    def _give_up(self, waiting: Future[Rounds] | None, held: Rounds) -> None:
        """What is staged and will not be committed is dropped, so that it takes no room."""
        if waiting is not None and not waiting.cancel():
            while not waiting.done():
                self._spark.sparkContext.cancelJobGroup(self._group)
                with suppress(FutureTimeout, HeadraceError):
                    waiting.result(LOOK_S)
            if waiting.exception() is None:
                held = held | waiting.result()
        ids = [each.piece for some in held.values() for each in some]
        if ids:
            with suppress(HeadraceError):  # then the next run drops them, or they expire
                self._client.abort_staged(ids)


# --- parts --------------------------------------------------------------------------------------------
def steps_of_round(plan: Plan, rate: float | None, before: int | None = None, rows: int = 0) -> int:
    """How many steps one Spark job stages: at first, or after a round that came to so many rows.

    Where a condition leaves few rows, more steps are taken at a time: a job has its price.
    """
    most: float = ROUND_OFFSETS_MAX
    if plan.weight > 0:
        most = min(most, ROUND_BYTES_MAX / plan.weight)
    wanted = most if rate is None else min(most, ROUND_S * rate)
    per_offset = plan.steps / plan.count
    if before is None:
        return min(ROUND_STEPS_MAX, max(1, int(wanted * per_offset)))
    if 2 * rows > wanted:
        return before
    return max(before, min(2 * before, ROUND_STEPS_MAX, int(most * per_offset)))


def _at(known: Mapping[str, list[dict[str, int]]], topic: str, number: int, name: str) -> int:
    """0 for what has come only now, and so is not in the range."""
    found: int = next((p[name] for p in known.get(topic, []) if p["partition"] == number), 0)
    return found


def _within(rows: DataFrame, times: tuple[int | None, int | None]) -> DataFrame:
    since, until = times
    if since is not None:
        rows = rows.where(f"timestamp >= timestamp_millis({since})")
    if until is not None:
        rows = rows.where(f"timestamp < timestamp_millis({until})")
    return rows


def _inside(windows: Mapping[tuple[str, int], tuple[int, int]]) -> Column:
    """In terms that Spark takes down to the files' own statistics."""
    from pyspark.sql import functions as F

    found = F.lit(False)
    for (topic, number), (start, end) in windows.items():
        offset = F.col("offset")
        place = (F.col("topic") == topic) & (F.col("partition") == number)
        found = found | (place & (offset >= start) & (offset < end))
    return found


@contextmanager
def _in_words() -> Iterator[None]:
    """What Spark raises, as a sentence."""
    try:
        yield
    except Exception as error:
        raise sentence(error) from None
