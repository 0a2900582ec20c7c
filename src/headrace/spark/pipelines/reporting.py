"""The progress of queries, from Spark's reports on each batch, for the terminal and for the broker.

A :class:`Watch` looks at one query now and then, and adds up the batches since the last look. Rows of
Headrace's source are counted by offsets: Spark counts a row as often as it scans it, and a pipeline with
dead letters scans twice.

A :class:`Reporter` sends each pipeline's document to the broker every second, from a thread of its own,
and learns from the answer whether the pipeline should stop. It never disturbs the queries: if the broker
does not answer, it logs that once and tries again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace import limits
from headrace.client.threads import BrokerClient
from headrace.errors import Forbidden, HeadraceError, InvalidArgument, NotFound
from headrace.notation import duration_ms, parse_time
from headrace.operations.results import PipelineReport
from headrace.spark.pipelines.planning import OBSERVED
from headrace.spark.source.positions import Positions, texts_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from headrace.spark.pipelines.running import RunningJob

logger = logging.getLogger("headrace.spark")
INTERVAL_S = 1.0
AGES_S = 5.0
"""Between two questions about the oldest unread record."""
LAST_WORDS_S = 5.0
"""How long the end of a run may wait for the broker."""
POSITIONS_MAX = 200
"""The most partitions of a source that a report names; of a larger source it has only the lag."""


# --- one query ------------------------------------------------------------------------------------
class Watch:
    """The progress of one query."""

    def __init__(
        self,
        query: StreamingQuery,
        sink: str,
        sources: tuple[str, ...] = (),
        *,
        interval: str | None = None,
        groups: Sequence[tuple[str, str]] = (),
    ):
        """``interval``: of its trigger. ``groups``: the subscriptions that follow it, with their topics."""
        self.query = query
        self.groups = tuple(groups)
        self.oldest_unread_at: int | None = None
        """Set by the :class:`Reporter`."""
        self._interval_ms = None if interval is None else duration_ms(interval)
        self._is_active: bool | None = None
        self._looked_at = 0.0
        self._id = str(query.id)
        self.name: str = query.name or self._id
        self.failure: Exception | None = None
        """The error that ended it."""
        self.has_progress = False
        """Whether it has finished a batch since it was started."""
        self._is_starting = True
        self._sink = sink
        self._sources = sources
        self.batch_id = -1
        self._seen: str | None = None
        self._batches = self._rows = self._dead_letters = 0
        self._last: dict[str, Any] = {}
        self.lag: int | None = None

    def look(self) -> None:
        """Add the batches since the last look."""
        if time.monotonic() - self._looked_at >= INTERVAL_S:
            self._looked_at = time.monotonic()
            status = self.query.status
            self._is_active = status["isTriggerActive"] and status["isDataAvailable"]
        last = self.query.lastProgress
        if last is None or last["timestamp"] == self._seen:
            return
        self._seen = last["timestamp"]
        new = [last]
        if last["batchId"] > self.batch_id + 1:  # there were others since
            recent = [each for each in self.query.recentProgress if each["batchId"] > self.batch_id]
            new = recent or new
        for progress in new:
            self.took(json.loads(progress.json))

    def took(self, progress: Mapping[str, Any]) -> None:
        """Spark's report on a batch. Of an idle query Spark repeats the last one, without rows."""
        batch_id = int(progress["batchId"])
        lags = [lag_of(source) for source in progress.get("sources", ())]
        self.lag = None if None in lags else sum(lag or 0 for lag in lags)
        is_new = batch_id > self.batch_id
        rows = rows_of(progress) if is_new else 0
        counted = int(progress.get("numInputRows") or 0)
        factor = rows / counted if counted else 1.0
        self._last = {
            "batch_id": batch_id,
            "input_rows": rows,
            "input_rows_per_second": factor * _number(progress.get("inputRowsPerSecond")),
            "processed_rows_per_second": factor * _number(progress.get("processedRowsPerSecond")),
            "trigger_ms": _number(progress.get("durationMs", {}).get("triggerExecution")),
            "watermark": watermark_of(progress),
            **state_of(progress),
            "sources": [
                _source(source, name)
                for source, name in _named(progress.get("sources", ()), self._sources)
            ],
        }
        if is_new:
            self.has_progress = True
            self.batch_id = batch_id
            self._batches += 1
            self._rows += rows
            observed = progress.get("observedMetrics", {}).get(OBSERVED, {})
            self._dead_letters += int(observed.get("dead_letters") or 0)

    def goes_on_from(self, before: Watch) -> None:
        """After a restart: keep the counts so far."""
        self._batches, self._rows = before._batches, before._rows
        self._dead_letters = before._dead_letters
        self.batch_id = before.batch_id

    @property
    def is_starting(self) -> bool:
        """Spark has not got as far as asking its sources."""
        if self._is_starting:
            message = str(self.query.status["message"])
            self._is_starting = self.query.isActive and message.startswith("Initializing")
        return self._is_starting

    def ended(self) -> bool:
        """Whether it has; ``failure`` then says why, if something was wrong."""
        if self.query.isActive:
            return False
        self.failure = self.query.exception()
        return True

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name[: limits.PIPELINE_TEXT_CHARS_MAX],
            "id": self._id,
            **self._last,
            "batches_total": self._batches,
            "input_rows_total": self._rows,
            "dead_letters": self._dead_letters,
            "lag": self.lag,
            "oldest_unread_at": self.oldest_unread_at,
            "interval_ms": self._interval_ms,
            "active": self._is_active,
            "sink": self._sink,
            "error": None,
        }


def _number(value: Any) -> float:
    """Spark leaves out unknown rates, and reports some that are not numbers."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < float("inf") else 0.0


def _named(sources: Any, names: tuple[str, ...]) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (source, names[number] if number < len(names) else str(source.get("description", "")))
        for number, source in enumerate(sources)
    ]


def _source(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "lag": lag_of(source)}
    end = positions_of(source.get("endOffset"))
    if end is not None and sum(map(len, end.offsets.values())) <= POSITIONS_MAX:
        found["end"] = texts_of(end.offsets)
    return found


# --- offsets --------------------------------------------------------------------------------------
def positions_of(offset: Any) -> Positions | None:
    """An offset of our source; None if it is another's."""
    try:
        return Positions.of(json.loads(offset) if isinstance(offset, str) else offset)
    except (ValueError, TypeError, InvalidArgument):
        return None


def lag_of(source: Mapping[str, Any]) -> int | None:
    """How many records are unread after a batch."""
    end, latest = positions_of(source.get("endOffset")), positions_of(source.get("latestOffset"))
    return None if end is None or latest is None else latest.since(end.offsets)


def watermark_of(progress: Mapping[str, Any]) -> int | None:
    """In milliseconds; None without one, or before the first row has set it."""
    text = progress.get("eventTime", {}).get("watermark")
    found = 0 if text is None else parse_time("watermark", text)
    return found or None


def state_of(progress: Mapping[str, Any]) -> dict[str, int | None]:
    """The size of the state of all operators; None for a query without state."""
    operators = progress.get("stateOperators") or ()
    if not operators:
        return {"state_rows": None, "state_bytes": None}
    return {
        "state_rows": sum(int(each.get("numRowsTotal") or 0) for each in operators),
        "state_bytes": sum(int(each.get("memoryUsedBytes") or 0) for each in operators),
    }


def rows_of(progress: Mapping[str, Any]) -> int:
    """How many records a batch has read."""
    total = 0
    for source in progress.get("sources", ()):
        end, start = positions_of(source.get("endOffset")), positions_of(source.get("startOffset"))
        if end is None:
            total += int(source.get("numInputRows") or 0)
        else:  # the first batch says itself where it began
            total += end.since(start.offsets if start is not None else end.begin or {})
    return total


# --- the broker -----------------------------------------------------------------------------------
class Reporter:
    """Reports the progress of pipelines to the broker."""

    def __init__(self, connect: Callable[[], BrokerClient]):
        self._connect = connect
        self._client: BrokerClient | None = None
        self._jobs: list[RunningJob] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._ages_at = 0.0
        """When the ages of unread records are asked for again."""
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the last report failed."""

    def start(self, jobs: list[RunningJob]) -> None:
        self._jobs = jobs
        self._thread = threading.Thread(target=self._run, name="headrace-reports", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.report_all()

    def report_all(self) -> None:
        with self._lock:
            for job in self._jobs:
                self._report(job)

    def _report(self, job: RunningJob) -> None:
        try:
            if self._client is None:
                self._client = self._connect()
            if time.monotonic() >= self._ages_at:
                self._find_ages(self._client)
            answer = self._client.report_pipeline(job.name, cast(PipelineReport, job.document()))
        except HeadraceError as error:
            if self.failure != error.message:
                logger.warning("the progress of %s was not reported: %s", job.name, error.message)
            self.failure = error.message
            return
        self.failure = None
        if answer.get("stop"):
            job.wish_to_stop()

    def _find_ages(self, client: BrokerClient) -> None:
        """Ask when the oldest record was published that each query has not processed."""
        self._ages_at = time.monotonic() + AGES_S
        for watch in [watch for job in self._jobs for watch in job.watches]:
            found: list[int] = []
            for group, topic in watch.groups:
                try:
                    oldest = client.explain_subscription(group, topic)["oldest"]
                except (NotFound, Forbidden):
                    continue  # it has not begun, or may not see its subscription
                found.append(0 if oldest is None else oldest["timestamp"])
            waiting = [each for each in found if each]
            watch.oldest_unread_at = min(waiting, default=0) if found else None

    def close(self) -> None:
        """Report the end of the run; do not wait for a broker that does not answer."""
        self._over.set()
        last = threading.Thread(target=self._last_words, name="headrace-last", daemon=True)
        last.start()
        last.join(LAST_WORDS_S)

    def _last_words(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.report_all()
        if self._client is not None:
            self._client.disconnect()
