"""Starts queries, watches over them, and stops them after a whole batch.

A :class:`Job` is a name and a way to start queries. Pipelines are jobs (:class:`PipelineJob`), and so are
archives: a :class:`Runner` watches all of its jobs, reports them to the broker, and stops them alike.

How a run ends:

- *finished*: with ``once``, all records that existed at the start are processed.
- *stopped*: by a signal or ``headrace pipeline stop``. The current batch is finished first, for up to
  ``GRACE_S``; one that takes longer is cancelled, and repeated at the next start. Nothing is lost or doubled
  either way, it only costs time.
- *failed*: one of its queries ended with an error; its other queries are stopped. Other pipelines continue.

A query that ends with an error is restarted, after a second, two, four, …: the broker may have been away for
longer than the sources wait, a worker may have been killed, the machine may have been too busy. After
``restarts`` (3 by default) restarts in a row without a finished batch, the pipeline has failed. An error of
Headrace that cannot pass (a topic that does not exist, records that are gone) is not retried.

Jobs are started one after the other: each starts a Python process for each of its sources, and Spark gives
such a process ten seconds to start. A dozen at once on a small machine need longer.

One thread does all of this; it looks ten times a second. Another one sends the reports (``reporting``), so
a broker that does not answer cannot delay a stop.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.clock import Clock
from headrace.spark.error_sentences import SPARK_GONE, is_definite, sentence
from headrace.spark.pipelines.planning import PipelinePlan
from headrace.spark.pipelines.reporting import Reporter, Watch
from headrace.spark.sessions.stop_flag import StopFlag

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("headrace.spark")
GRACE_S = 25.0
"""How long a batch may take to its end once a stop was asked for: within the 30 seconds that
Kubernetes and others give a process."""
PAUSE_S_MAX = 60.0
BREAK_OFF_S = 15.0
"""How long Spark may take to cancel a batch."""
START_S = 20.0
"""How long other jobs wait until the sources of one have started."""
LOOK_S = 0.1
LOOK_WHILE_STOPPING_S = 0.02
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


class Job(Protocol):
    """Something that runs as queries."""

    @property
    def name(self) -> str: ...

    @property
    def restarts(self) -> int: ...

    def start(self, once: bool) -> list[Watch]: ...


class PipelineJob:
    """A planned pipeline."""

    def __init__(self, plan: PipelinePlan):
        self._plan = plan
        self.name = plan.pipeline.name
        self.restarts = plan.pipeline.restarts

    def start(self, once: bool) -> list[Watch]:
        pipeline = self._plan.pipeline
        trigger: dict[str, Any] = {"availableNow": True} if once else dict(pipeline.trigger)
        sources = tuple(str(each) for each in pipeline.topics)
        groups = [
            (each.group, topic)
            for each in pipeline.topics
            for topic in each.topics
            if each.group is not None
        ]
        interval = trigger.get("processingTime")
        found: list[Watch] = []
        try:
            for query in self._plan.queries:
                started = query.start(trigger)
                watch = Watch(started, str(query.to), sources, interval=interval, groups=groups)
                found.append(watch)
        except BaseException:
            for watch in found:
                watch.query.stop()
            raise
        return found


class RunningJob:
    """A job from its start to its end."""

    def __init__(self, job: Job, once: bool):
        self._job = job
        self._once = once
        self.name = job.name
        self.state = RUNNING
        self.error: str | None = None
        """The last one, until a batch succeeds."""
        self._last_error: dict[str, Any] = {}
        self.watches: list[Watch] = []
        self.is_stopping = False
        self._run_id, self._started_at = str(uuid.uuid4()), Clock().now_ms()
        self._lock = threading.Lock()
        self._document: dict[str, Any] = {}
        self._deadline: float | None = None
        """Until then the current batch may end by itself."""
        self._batches: dict[Watch, int] = {}
        self._ending: set[Watch] = set()
        self._attempts = 0
        self._last_start = 0.0
        self._again_at: float | None = 0.0
        """When it is to be started; None: it has been."""
        self._write_document()

    @property
    def waits_to_start(self) -> bool:
        return self.state == RUNNING and self._again_at is not None

    @property
    def is_starting(self) -> bool:
        """Whether its sources have not started yet."""
        if self.state != RUNNING or self._again_at is not None or self.error is not None:
            return False
        is_young = time.monotonic() - self._last_start < START_S
        return is_young and any(watch.is_starting for watch in self.watches)

    # --- watching ---------------------------------------------------------------------------
    def look(self) -> None:
        """Look at its queries, and restart or stop them as needed."""
        if self.state != RUNNING:
            return
        try:
            if self._again_at is None:
                self._look()
            elif self.is_stopping:
                self.state = STOPPED
            elif time.monotonic() >= self._again_at and all(w.ended() for w in self.watches):
                self._start()
        except SPARK_GONE as error:
            if self.is_stopping:
                self.state = STOPPED  # the same signal has stopped Spark as well
            else:
                self.state = FAILED
                self.error = f"Spark does not answer any more: {sentence(error)}"
        self._write_document()

    def _start(self) -> None:
        self._again_at, self._last_start = None, time.monotonic()
        before = self.watches
        try:
            self.watches = self._job.start(self._once)
        except Exception as error:
            self._failed(error)
            return
        for watch, last in zip(self.watches, before, strict=False):
            watch.goes_on_from(last)

    def _look(self) -> None:
        ended = []
        for watch in self.watches:
            ended.append(watch.ended())
            watch.look()
        has_lasted = time.monotonic() - self._last_start > PAUSE_S_MAX
        if self.error and (has_lasted or all(watch.has_progress for watch in self.watches)):
            self.error, self._attempts = None, 0
        failure = next((watch.failure for watch in self.watches if watch.failure), None)
        if failure is not None:
            for watch, is_over in zip(self.watches, ended, strict=True):
                if not is_over:
                    self._end(watch)
            self._failed(failure)
        elif all(ended):
            self.state = STOPPED if self.is_stopping else FINISHED
        elif self.is_stopping:
            self._stop_between_batches()

    def _failed(self, error: Exception) -> None:
        """Restart later, or give up."""
        self.error = sentence(error)
        self._last_error = {"last_error": self.error, "last_error_at": Clock().now_ms()}
        if self.is_stopping:  # it was being stopped; its batch is repeated at the next start
            self.state = STOPPED
            return
        self._attempts += 1
        if self._attempts > self._job.restarts or is_definite(error):
            self.state = FAILED
            return
        pause = min(2.0 ** (self._attempts - 1), PAUSE_S_MAX)
        self._again_at = time.monotonic() + pause
        logger.warning("%s is started again in %.0f s: %s", self.name, pause, self.error)

    # --- stopping ---------------------------------------------------------------------------
    def wish_to_stop(self) -> None:
        """From any thread; the current batch is finished first."""
        self.is_stopping = True

    def hurry(self) -> None:
        """Cancel the current batch."""
        self.is_stopping = True
        now = time.monotonic()
        self._deadline = now if self._deadline is None else min(self._deadline, now)

    def _stop_between_batches(self) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + GRACE_S
        if not self._batches:
            self._batches = {watch: watch.batch_id for watch in self.watches}
        is_late = now >= self._deadline
        for watch, begun in self._batches.items():
            if watch.query.isActive and (is_late or watch.batch_id != begun or _is_idle(watch)):
                self._end(watch)
        if now >= self._deadline + BREAK_OFF_S:
            logger.warning("%s does not let go of its batch; it is left to itself", self.name)
            self.state = STOPPED

    def _end(self, watch: Watch) -> None:
        """Do not wait for Spark, which waits for a thread that may itself wait for long."""
        if watch not in self._ending:
            self._ending.add(watch)
            threading.Thread(target=_stop, args=(watch.query,), daemon=True).start()

    # --- telling ----------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        with self._lock:
            return self._document

    def _write_document(self) -> None:
        queries = [watch.document() for watch in self.watches]
        if self.error is not None:
            queries = queries or [{"name": self.name}]
            queries[0]["error"] = self.error
        if queries:
            queries[0] |= self._last_error
        document = {
            "state": self.state,
            "run_id": self._run_id,
            "started_at": self._started_at,
            "queries": queries,
        }
        with self._lock:
            self._document = document


def _is_idle(watch: Watch) -> bool:
    """Whether no batch runs: it waits for its trigger, or for rows."""
    status = watch.query.status
    return not status["isTriggerActive"] or not status["isDataAvailable"]


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except SPARK_GONE:
        logger.debug("the query could not be stopped: Spark is gone", exc_info=True)


class Runner:
    """Runs jobs until all of them have ended."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        once: bool = False,
        reporter: Reporter | None = None,
        on_look: Callable[[list[RunningJob]], None] | None = None,
    ):
        self.jobs = [RunningJob(job, once) for job in jobs]
        self._reporter = reporter
        self._on_look = on_look
        self._is_stopping = StopFlag()
        self._is_hurrying = False

    def stop(self, *, now: bool = False) -> None:
        """From any thread or a signal handler: stop after the current batches, or at once."""
        self._is_hurrying = self._is_hurrying or now
        self._is_stopping.set()

    def run(self) -> list[RunningJob]:
        """Run until all jobs have ended; returns them."""
        if self._reporter is not None:
            self._reporter.start(list(self.jobs))
        try:
            self._watch()
        finally:
            for job in self.jobs:
                if job.state == RUNNING:  # an exception passes through
                    job.hurry()
                    job.look()
            if self._reporter is not None:
                self._reporter.close()
        return self.jobs

    def _has_turn(self, job: RunningJob) -> bool:
        return job.is_stopping or not any(other.is_starting for other in self.jobs)

    def _watch(self) -> None:
        while True:
            if self._is_stopping.is_set():
                for job in self.jobs:
                    job.wish_to_stop()
                    if self._is_hurrying:
                        job.hurry()
            for job in self.jobs:
                if not job.waits_to_start or self._has_turn(job):
                    job.look()
            if self._on_look is not None:
                self._on_look(self.jobs)
            running = [job for job in self.jobs if job.state == RUNNING]
            if not running:
                return
            if any(job.is_stopping for job in running):
                time.sleep(LOOK_WHILE_STOPPING_S)
            else:
                self._is_stopping.wait(LOOK_S)
