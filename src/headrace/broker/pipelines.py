"""How Spark pipelines are doing: their reports, as records of the topic ``__pipelines``.

A pipeline reports every second (:meth:`Pipelines.report`) and learns from the answer whether somebody
asked it to stop: the broker cannot call a job, so the request waits for the next report. A pipeline that runs
and has not reported for a while is *stale*: it died, or cannot reach the broker.

A record's key is the pipeline's name, its value the state of the pipeline from then on (the report and the
request to stop), or that it was forgotten. So the last record of each name is all there is to know; a broker that starts reads them
back, and SQL over the topic shows the history.

Rules:
- A report that repeats the last one is stored only every ``REPEATED_S`` seconds.
- A full disk does not stop reports: the broker keeps a report that it cannot store in memory.
- A name is one pipeline. A second run takes the name over once the first has ended or is stale, or if it
  began later; a run that was replaced is told so (``pipeline_replaced``).
- The number of pipelines and the bytes of their reports are bounded. The ones that ended longest ago make
  room; running ones never do.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from headrace import limits
from headrace.broker import events
from headrace.broker.history import GROWN_MIN
from headrace.broker.own_topic import OwnTopic
from headrace.errors import Conflict, HeadraceError, InvalidArgument, NotFound, TooLarge
from headrace.log.batch import LOST
from headrace.log.interface import Log, ReadPending
from headrace.operations.results import PipelineReport, PipelineStats, StopWanted, Verdict

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__pipelines"
SETTINGS = replace(
    events.SETTINGS, segment_bytes=4 << 20, retention_bytes=limits.PIPELINES_BYTES_MAX
)
REPEATED_S = 10.0
STALLED_S = 60.0
"""A pipeline that has records to process and finishes no batch for so long is stalled, unless its batches, or the
pauses between them, take long."""
SAMPLE_S, LAGS = 10.0, 7
"""A lag is compared with that of a minute before."""
_KNOWN_TO_BROKER = ("name", "reported_at", "stopping")


@dataclass(slots=True, eq=False)
class ReportedPipeline:
    """The last report of one pipeline. It is kept as JSON, so that it costs what it weighs."""

    name: str
    content: bytes = b"{}"
    state: str = "running"
    run_id: str = ""
    started_at: int = 0
    reported_at: int = 0
    stored_at: int = 0
    heard_at: float = 0.0
    """By the monotonic clock, for liveness: a wall clock may jump."""
    stopping: bool = False
    lags: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LAGS))
    """(time, lag), in memory only."""

    def took(self, report: PipelineReport, content: bytes, now_ms: int, time: float) -> None:
        if report["run_id"] != self.run_id or report["state"] != "running":
            self.stopping = False  # the request was for the run before
        self.note_lag(report, time)
        self.content = content
        self.state, self.run_id = report["state"], report["run_id"]
        self.started_at, self.reported_at, self.heard_at = report["started_at"], now_ms, time

    def is_stale(self, time: float) -> bool:
        return self.state == "running" and time - self.heard_at > limits.PIPELINE_STALE_S

    def is_up(self, time: float) -> bool:
        return self.state == "running" and not self.is_stale(time)

    def note_lag(self, report: PipelineReport, time: float) -> None:
        """Remember the lag of the last minute, in steps of ten seconds."""
        if self.lags and (time - self.lags[-1][0] < SAMPLE_S and self.run_id == report["run_id"]):
            return
        if self.run_id != report["run_id"]:
            self.lags.clear()
        self.lags.append((time, sum(query.get("lag") or 0 for query in report["queries"])))

    def verdict(self, queries: Sequence[Mapping[str, Any]], now_ms: int, time: float) -> Verdict:
        """Whether it keeps up. One that has ended, or is silent, is not judged."""
        if not self.is_up(time):
            return "ok"
        for query in queries:
            patience_ms = max(
                STALLED_S * 1000,
                3 * ((query.get("interval_ms") or 0) + (query.get("trigger_ms") or 0)),
            )
            since = query.get("last_progress_at") or self.started_at
            if (query.get("lag") or query.get("active")) and now_ms - since > patience_ms:
                return "stalled"
        lag = sum(query.get("lag") or 0 for query in queries)
        is_known = len(self.lags) == LAGS and time - self.lags[0][0] >= SAMPLE_S * (LAGS - 1)
        return "falling behind" if is_known and lag - self.lags[0][1] >= GROWN_MIN else "ok"

    def record(self) -> dict[str, Any]:
        return {
            **orjson.loads(self.content),
            "name": self.name,
            "reported_at": self.reported_at,
            "stopping": self.stopping,
        }

    def stats(self, now_ms: int, time: float) -> PipelineStats:
        record = self.record()
        for query in record["queries"]:
            oldest = query.get("oldest_unread_at")
            if oldest is not None:
                query["lag_seconds"] = max(now_ms - oldest, 0) / 1000 if oldest else 0.0
        verdict = self.verdict(record["queries"], now_ms, time)
        stats: PipelineStats = {**record, "stale": self.is_stale(time), "verdict": verdict}  # type: ignore[typeddict-item]
        return stats


class Pipelines:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._topic = OwnTopic(engine, TOPIC, SETTINGS, "reports of pipelines are", logger)
        self._pipelines: dict[str, ReportedPipeline] = {}
        """The one that reported last stands last."""
        self._bytes = 0

    def __iter__(self) -> Iterator[PipelineStats]:
        now, time = self._engine.now_ms(), self._engine.time()
        return (self._pipelines[name].stats(now, time) for name in sorted(self._pipelines))

    def load(self) -> None:
        """Read back what pipelines reported before this start."""
        topic = self._engine.topics.get(TOPIC)
        if topic is not None:
            log = topic.partitions[0].log
            self._load(log, log.start_offset, log.end_offset)

    def _load(self, log: Log, at: int, end: int) -> None:
        try:
            while at < end:
                for batch in log.read(at, limits.READ_BYTES_DEFAULT):
                    if not batch.flags & LOST:
                        for value in batch.values()[max(at - batch.base_offset, 0) :]:
                            self._restore(value)
                    at = batch.end_offset
        except ReadPending as pending:
            pending.then(lambda: self._load(log, at, end))
        except (HeadraceError, OSError) as error:
            logger.warning("reports of pipelines cannot be read back: %s", error)

    def _restore(self, value: bytes) -> None:
        record = orjson.loads(value)
        if "forgotten" in record:
            self._drop(record["name"])
            return
        name, reported_at, stopping = (record.pop(field) for field in _KNOWN_TO_BROKER)
        if name in self._pipelines and self._pipelines[name].reported_at > reported_at:
            return  # it reported while this was read
        pipeline = self._pipelines.pop(name, None) or ReportedPipeline(name)
        self._pipelines[name] = pipeline
        content = orjson.dumps(record)
        self._bytes += len(content) - len(pipeline.content)
        silent_s = max(self._engine.now_ms() - reported_at, 0) / 1000
        pipeline.took(record, content, reported_at, self._engine.time() - silent_s)
        pipeline.stopping = stopping

    # --- reports ----------------------------------------------------------------------------
    def report(self, name: str, report: PipelineReport) -> StopWanted:
        """Keep what a pipeline reports; the answer says whether it should stop."""
        names = {query["name"] for query in report["queries"]}
        if len(names) != len(report["queries"]):
            raise InvalidArgument("two queries have the same name", code="invalid_report")
        now, time = self._engine.now_ms(), self._engine.time()
        known = self._pipelines.get(name)
        if known is not None:
            self._check_run(known, report, time)
        self._note_progress(known, report, now)
        try:
            content = orjson.dumps(report)
        except TypeError as error:  # a source may hold anything that Python has
            raise InvalidArgument(
                f"the report is not JSON: {error}", code="invalid_report"
            ) from None
        if len(content) > limits.PIPELINE_REPORT_BYTES_MAX:
            raise TooLarge(
                f"the report has {len(content)} bytes, the limit is "
                f"{limits.PIPELINE_REPORT_BYTES_MAX}; leave details out",
                code="report_too_large",
            )
        self._make_room(name, len(content) - (len(known.content) if known else 0), time)
        pipeline = self._pipelines.pop(name, None) or ReportedPipeline(name)
        self._pipelines[name] = pipeline
        is_new = content != pipeline.content or now - pipeline.stored_at > REPEATED_S * 1000
        self._bytes += len(content) - len(pipeline.content)
        pipeline.took(report, content, now, time)
        if is_new:
            self._store(pipeline)
        return {"stop": pipeline.stopping}

    def _check_run(self, known: ReportedPipeline, report: PipelineReport, time: float) -> None:
        if (
            known.run_id != report["run_id"]
            and known.started_at > report["started_at"]
            and known.is_up(time)
        ):
            raise Conflict(
                f"a later run of pipeline {known.name!r} took its name over; stop this one, or give "
                "it a name of its own",
                code="pipeline_replaced",
            )

    @staticmethod
    def _note_progress(known: ReportedPipeline | None, report: PipelineReport, now: int) -> None:
        """Note when each query finished its last batch, by the broker's clock."""
        last = (
            {} if known is None else {q["name"]: q for q in orjson.loads(known.content)["queries"]}
        )
        same_run = known is not None and known.run_id == report["run_id"]
        for query in report["queries"]:
            before = last.get(query["name"], {}) if same_run else {}
            batch, seen = query.get("batch_id"), before.get("batch_id")
            if batch in (None, -1, seen):
                query["last_progress_at"] = before.get("last_progress_at")
            else:
                query["last_progress_at"] = now

    def _make_room(self, name: str, more: int, time: float) -> None:
        """Forget those that ended, or fell silent, longest ago, if a bound asks for it."""
        count = len(self._pipelines) + (name not in self._pipelines)
        size = self._bytes + more
        for other in list(self._pipelines.values()):
            if count <= limits.PIPELINES_MAX and size <= limits.PIPELINES_BYTES_MAX:
                return
            if other.name != name and not other.is_up(time):
                self._drop(other.name)
                count -= 1
                size -= len(other.content)
        if count > limits.PIPELINES_MAX or size > limits.PIPELINES_BYTES_MAX:
            raise InvalidArgument(
                f"{len(self._pipelines)} pipelines run; a broker keeps track of at most "
                f"{limits.PIPELINES_MAX} with {limits.PIPELINES_BYTES_MAX} bytes of reports together",
                code="too_many_pipelines",
            )

    def _store(self, pipeline: ReportedPipeline) -> None:
        pipeline.stored_at = pipeline.reported_at
        self._append(pipeline.name, pipeline.record())

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self._topic.append([(name, orjson.dumps(record))])

    # --- questions --------------------------------------------------------------------------
    def stats(self, name: str) -> PipelineStats:
        return self._find(name).stats(self._engine.now_ms(), self._engine.time())

    def stop(self, name: str) -> PipelineStats:
        """Tell it with the answer to its next report. Asking twice is asking once."""
        pipeline = self._find(name)
        if pipeline.state != "running":
            raise Conflict(
                f"pipeline {name!r} does not run: it is {pipeline.state}",
                code="pipeline_not_running",
            )
        pipeline.stopping = True
        self._store(pipeline)
        return self.stats(name)

    def forget(self, name: str) -> None:
        """Drop one that has ended or fell silent. If it reports again, it is known again."""
        if self._find(name).is_up(self._engine.time()):
            raise Conflict(
                f"pipeline {name!r} runs; stop it first, then it can be forgotten",
                code="pipeline_running",
            )
        self._drop(name)
        self._append(name, {"name": name, "forgotten": True})

    def _drop(self, name: str) -> None:
        pipeline = self._pipelines.pop(name, None)
        if pipeline is not None:
            self._bytes -= len(pipeline.content)

    def _find(self, name: str) -> ReportedPipeline:
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            raise NotFound(
                f"no pipeline {name!r} has reported to this broker", code="pipeline_not_found"
            )
        return pipeline
