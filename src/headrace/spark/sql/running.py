"""A query that runs can be watched and cancelled.

Ctrl-C must not break into a call to the JVM: its answer would be taken for that of the next call. So the
work is done in a thread of its own, and while it runs Ctrl-C is only noted; the caller's thread looks
every tenth of a second, tells how far it is, and cancels the job group when it was asked to. Asked a
second time it waits no longer: planning, which runs in a process beside Spark, cannot be cancelled, and
ends by itself when the broker does not answer.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from pyspark.sql import SparkSession

from headrace.spark.error_sentences import QueryCancelled, error_of
from headrace.spark.sessions.connect import is_connect

Result = TypeVar("Result")
LOOK_S = 0.1
GRACE_S = 10.0
"""The time that a cancelled query has to end."""


class TaskProgress(NamedTuple):
    """Tasks of the stages that are known by now."""

    done: int = 0
    active: int = 0
    total: int = 0


class _Work(threading.Thread, Generic[Result]):
    """Runs in a JVM thread of its own, so the job group is its alone."""

    def __init__(self, spark: SparkSession, work: Callable[[], Result], group: str):
        super().__init__(name="headrace-sql", daemon=True)
        self._spark, self._work, self._group = spark, work, group
        self.result: Result | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if is_connect(self._spark):
                self._spark.addTag(self._group)
            else:
                self._spark.sparkContext.setJobGroup(self._group, "headrace sql", True)
            self.result = self._work()
        except BaseException as error:
            self.error = error


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """While it lasts, Ctrl-C is only counted. A process that ignores it goes on doing so."""
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield seen
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    spark: SparkSession,
    work: Callable[[], Result],
    tell: Callable[[TaskProgress], None] | None = None,
) -> Result:
    """The result of ``work``. ``tell`` is called with its progress; Ctrl-C raises :class:`QueryCancelled`."""
    group = f"headrace-sql-{uuid.uuid4()}"
    thread = _Work(spark, work, group)
    with interrupts() as seen:
        thread.start()
        while thread.is_alive() and not seen:
            thread.join(LOOK_S)
            if tell is not None and thread.is_alive():
                tell(_progress(spark, group))
        if seen:
            _cancel(spark, thread, group, seen)
    if thread.error is not None:
        raise error_of(thread.error) from None
    result: Any = thread.result
    return result  # type: ignore[no-any-return]


def _cancel(spark: SparkSession, thread: _Work[Any], group: str, seen: list[int]) -> None:
    """Cancel until it has ended, or Ctrl-C comes again. A job may begin after the first time."""
    for _ in range(int(GRACE_S / LOOK_S)):
        if is_connect(spark):
            spark.interruptTag(group)
        else:
            spark.sparkContext.cancelJobGroup(group)
        thread.join(LOOK_S)
        if not thread.is_alive() or len(seen) > 1:
            break
    raise QueryCancelled("the query was cancelled")


def _progress(spark: SparkSession, group: str) -> TaskProgress:
    if is_connect(spark):
        return TaskProgress()  # its tasks are not known here
    tracker = spark.sparkContext.statusTracker()
    done = active = total = 0
    for job_id in tracker.getJobIdsForGroup(group):
        job = tracker.getJobInfo(job_id)
        for stage_id in () if job is None else job.stageIds:
            stage = tracker.getStageInfo(stage_id)
            if stage is not None:
                done += stage.numCompletedTasks
                active += stage.numActiveTasks
                total += stage.numTasks
    return TaskProgress(done, active, total)
