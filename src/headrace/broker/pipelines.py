"""How running pipelines get on: what Spark jobs report, kept for whoever watches over them.

A pipeline says every few seconds where it stands (:meth:`Pipelines.report`) and is told in the answer
whether somebody wants it to stop: the broker cannot call a job, so the wish waits for the next report.
One that is running and has not reported for a while is *stale*: it died without a word, or cannot reach
the broker.

Rules:
- In memory, and gone with the process: a pipeline that lives reports again within seconds. Its data is
  in its checkpoint, not here.
- A report is hostile until it is checked. It is kept as bytes, not as objects, so what it costs is what
  it weighs; the number of pipelines and the bytes of all of them have a bound. Those that ended longest
  ago make room, those that run never do.
- Staleness goes by the monotonic clock; the times that people read go by the wall clock.
- A name is one pipeline. A second run takes the name over once the first has ended or is stale, or if it
  began later; a run that was replaced is told so (``pipeline_replaced``) and does not flap.

Rejected: a topic for the reports. Nobody needs the old ones, a metric's history belongs to Prometheus,
and a broker that is full could not be watched any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from headrace import limits
from headrace.errors import Conflict, InvalidArgument, NotFound, TooLarge
from headrace.model import check_subscription_name

STATES = ("running", "stopped", "failed", "finished")
_WHOLE = (0, (1 << 63) - 1)
NUMBERS: dict[str, tuple[int, int]] = {
    "batch_id": (-1, _WHOLE[1]),
    "input_rows": _WHOLE,
    "batches_total": _WHOLE,
    "input_rows_total": _WHOLE,
    "dead_letters": _WHOLE,
}
"""Whole numbers that a query may report, from which to which."""
MEASURES = ("input_rows_per_second", "processed_rows_per_second", "trigger_ms")
"""Numbers, not below 0."""
TEXTS = ("id", "sink", "error")


class Query:
    """What is counted of one query of a pipeline."""

    __slots__ = ("batch_id", "batches", "dead_letters", "progress_at", "progress_ms", "rate", "rows",
                 "trigger_s")  # fmt: skip

    def __init__(self) -> None:
        self.batch_id: int | None = None
        """The last batch of the run under way that was heard of."""
        self.batches = 0
        self.rows = 0
        self.dead_letters = 0
        self.rate = 0.0
        self.trigger_s = 0.0
        self.progress_at: float | None = None
        self.progress_ms: int | None = None

    def took(self, said: dict[str, Any], time: float, now_ms: int) -> None:
        batch_id = said.get("batch_id")
        if batch_id is not None and batch_id >= 0 and batch_id != self.batch_id:
            step = 1 if self.batch_id is None else max(batch_id - self.batch_id, 1)
            self.batches += step
            self.rows += said.get("input_rows") or 0
            self.batch_id = batch_id
            self.progress_at, self.progress_ms = time, now_ms
        # Who counts by itself knows better: some batches may never have been reported.
        self.batches = _or(said.get("batches_total"), self.batches)
        self.rows = _or(said.get("input_rows_total"), self.rows)
        self.dead_letters = _or(said.get("dead_letters"), self.dead_letters)
        self.rate = float(said.get("input_rows_per_second") or 0)
        self.trigger_s = (said.get("trigger_ms") or 0) / 1000


class Pipeline:
    """One pipeline: its last report, and what was counted over all of them."""

    __slots__ = ("content", "name", "queries", "reported_at", "reported_ms", "run_id", "started_at",
                 "state", "stop")  # fmt: skip

    def __init__(self, name: str):
        self.name = name
        self.content = b""
        self.state = "running"
        self.run_id = ""
        self.started_at = 0
        self.reported_at = 0.0
        self.reported_ms = 0
        self.stop = False
        self.queries: dict[str, Query] = {}

    def is_stale(self, time: float) -> bool:
        return self.state == "running" and time - self.reported_at > limits.PIPELINE_STALE_S

    def is_up(self, time: float) -> bool:
        return self.state == "running" and not self.is_stale(time)

    def took(self, report: dict[str, Any], content: bytes, time: float, now_ms: int) -> None:
        if report["run_id"] != self.run_id:
            self.stop = False  # the wish was for the run before
            for query in self.queries.values():
                query.batch_id = None
        self.content = content
        self.run_id, self.started_at = report["run_id"], report["started_at"]
        self.state = report["state"]
        self.reported_at, self.reported_ms = time, now_ms
        known, self.queries = self.queries, {}
        for said in report["queries"]:
            query = self.queries[said["name"]] = known.get(said["name"]) or Query()
            query.took(said, time, now_ms)
        if self.state != "running":
            self.stop = False

    def as_dict(self, time: float) -> dict[str, Any]:
        """The report as it came, with what the broker knows about it."""
        report: dict[str, Any] = orjson.loads(self.content)
        for said in report["queries"]:
            query = self.queries[said["name"]]
            said["batches_total"] = query.batches
            said["input_rows_total"] = query.rows
            said["last_progress_at"] = query.progress_ms
        return {
            **report,
            "name": self.name,
            "stale": self.is_stale(time),
            "stopping": self.stop,
            "reported_at": self.reported_ms,
        }


class Pipelines:
    def __init__(self, time: Callable[[], float], now_ms: Callable[[], int]):
        self.time, self._now_ms = time, now_ms
        self._pipelines: dict[str, Pipeline] = {}
        """Whoever reported last stands last."""
        self._bytes = 0

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self._pipelines.values())

    # --- what pipelines say -----------------------------------------------------------------
    def report(self, name: str, report: dict[str, Any]) -> dict[str, Any]:
        """Keep what a pipeline says; the answer says whether it is to stop."""
        check_pipeline_name(name)
        content, checked = _check_report(report)
        known = self._pipelines.get(name)
        if known is not None:
            self._check_run(known, checked)
        self._make_room(name, len(content) - (0 if known is None else len(known.content)))
        pipeline = self._pipelines.pop(name, None) or Pipeline(name)
        self._bytes += len(content) - len(pipeline.content)
        pipeline.took(checked, content, self.time(), self._now_ms())
        self._pipelines[name] = pipeline
        return {"stop": pipeline.stop}

    def _check_run(self, known: Pipeline, report: dict[str, Any]) -> None:
        if (
            known.run_id != report["run_id"]
            and known.started_at > report["started_at"]
            and known.is_up(self.time())
        ):
            raise Conflict(
                f"a later run of pipeline {known.name!r} has taken its name over; stop this one, or "
                "give it a name of its own",
                code="pipeline_replaced",
            )

    def _make_room(self, name: str, more: int) -> None:
        """Forget those that ended, or fell silent, longest ago, if a bound asks for it."""
        count = len(self._pipelines) + (name not in self._pipelines)
        size = self._bytes + more
        if count <= limits.PIPELINES_MAX and size <= limits.PIPELINES_BYTES_MAX:
            return
        time = self.time()
        gone = []
        for other in self._pipelines.values():
            if count <= limits.PIPELINES_MAX and size <= limits.PIPELINES_BYTES_MAX:
                break
            if other.name != name and not other.is_up(time):
                gone.append(other.name)
                count -= 1
                size -= len(other.content)
        if count > limits.PIPELINES_MAX or size > limits.PIPELINES_BYTES_MAX:
            raise InvalidArgument(
                f"{len(self._pipelines)} pipelines run here, and the broker keeps track of at most "
                f"{limits.PIPELINES_MAX} with {limits.PIPELINES_BYTES_MAX} bytes of reports together",
                code="too_many_pipelines",
            )
        for other_name in gone:
            self.forget(other_name)

    # --- what others ask --------------------------------------------------------------------
    def documents(self) -> list[dict[str, Any]]:
        """All that are known, by name."""
        time = self.time()
        return [self._pipelines[name].as_dict(time) for name in sorted(self._pipelines)]

    def show(self, name: str) -> dict[str, Any]:
        return self._find(name).as_dict(self.time())

    def stop(self, name: str) -> None:
        """Have it told with the answer to its next report. Asking twice is asking once."""
        pipeline = self._find(name)
        if pipeline.state != "running":
            raise Conflict(
                f"pipeline {name!r} does not run: it is {pipeline.state}",
                code="pipeline_not_running",
            )
        pipeline.stop = True

    def forget(self, name: str) -> None:
        """Drop one that has ended or gone silent; should it report again, it is known again."""
        pipeline = self._find(name)
        if pipeline.is_up(self.time()):
            raise Conflict(
                f"pipeline {name!r} runs; stop it first, then it can be forgotten",
                code="pipeline_running",
            )
        del self._pipelines[name]
        self._bytes -= len(pipeline.content)

    def _find(self, name: object) -> Pipeline:
        pipeline = self._pipelines.get(check_pipeline_name(name))
        if pipeline is None:
            raise NotFound(
                f"no pipeline {name!r} has reported to this broker since it was started",
                code="pipeline_not_found",
            )
        return pipeline


def check_pipeline_name(name: object) -> str:
    """The same names as subscriptions have: they stand in addresses and metrics."""
    try:
        return check_subscription_name(name)
    except InvalidArgument:
        raise InvalidArgument(
            f"pipeline {str(name)[:60]!r} is not a valid name: use at most "
            f"{limits.SUBSCRIPTION_NAME_CHARS_MAX} letters, digits, '.', '_' and '-', and no '__' in "
            "front",
            code="invalid_pipeline",
        ) from None


# --- what a report may be -------------------------------------------------------------------------
def _check_report(report: object) -> tuple[bytes, dict[str, Any]]:
    """The report as JSON, and what that says: NaN has become null, and nothing is shared."""
    if not isinstance(report, dict):
        raise _refused("it is a JSON object")
    try:
        content = orjson.dumps(report)
    except TypeError as error:  # orjson.JSONEncodeError is one
        raise _refused(f"it cannot be written as JSON: {error}") from None
    if len(content) > limits.PIPELINE_REPORT_BYTES_MAX:
        raise TooLarge(
            f"the report has {len(content)} bytes, the limit is {limits.PIPELINE_REPORT_BYTES_MAX}; "
            "leave details out",
            code="report_too_large",
        )
    checked: dict[str, Any] = orjson.loads(content)
    if checked.get("state") not in STATES:
        raise _refused(f"state is one of {', '.join(STATES)}")
    run_id = checked.get("run_id")
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= limits.PIPELINE_TEXT_CHARS_MAX:
        raise _refused(f"run_id is a text of 1 to {limits.PIPELINE_TEXT_CHARS_MAX} characters")
    started_at = checked.get("started_at")
    if type(started_at) is not int or not 0 <= started_at <= limits.TIMESTAMP_MS_MAX:
        raise _refused("started_at is a time in milliseconds since 1970")
    queries = checked.get("queries")
    if not isinstance(queries, list) or len(queries) > limits.PIPELINE_QUERIES_MAX:
        raise _refused(f"queries is a list of at most {limits.PIPELINE_QUERIES_MAX}")
    names: set[str] = set()
    for query in queries:
        names.add(_check_query(query))
    if len(names) != len(queries):
        raise _refused("two queries have the same name")
    return content, checked


def _check_query(query: object) -> str:
    """The name of a query whose fields are what they are meant to be; each but the name may lack."""
    if not isinstance(query, dict):
        raise _refused("a query is a JSON object")
    name = query.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= limits.PIPELINE_TEXT_CHARS_MAX:
        raise _refused(
            f"a query has a name of 1 to {limits.PIPELINE_TEXT_CHARS_MAX} characters, not {name!r}"
        )
    for field, (low, high) in NUMBERS.items():
        value = query.get(field)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise _refused(f"{field} of query {name!r} is a whole number from {low} on")
    for field in MEASURES:
        value = query.get(field)
        if value is not None and (type(value) not in (int, float) or value < 0):
            raise _refused(f"{field} of query {name!r} is a number, not below 0")
    for field in TEXTS:
        if not isinstance(query.get(field), (str, type(None))):
            raise _refused(f"{field} of query {name!r} is a text")
    if not isinstance(query.get("sources"), (list, type(None))):
        raise _refused(f"sources of query {name!r} is a list")
    return name


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(f"the report of a pipeline: {why}", code="invalid_report")


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
