"""Long-running jobs: how their progress is shown, and how signals stop them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from headrace.cli.printing import console, count_of, say, size, table_of, text_of, when

if TYPE_CHECKING:
    from headrace.spark.pipelines.running import RunningJob

TELL_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


# --- signals ----------------------------------------------------------------------------------------
class Signals:
    """SIGINT and SIGTERM: the first stops the jobs after their batches, the second at once."""

    def __init__(self) -> None:
        self._count = 0
        self._stop: Any = None
        self._before: dict[signal.Signals, Any] = {}

    def take_over(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._heard)
            self._before.setdefault(number, before)

    def give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def tell(self, stop: Any) -> None:
        self._stop = stop
        if self._count:
            stop(now=self._count > 1)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._stop is None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt  # nothing has started
            raise SystemExit(0)
        self._stop(now=self._count > 1)


@contextmanager
def signals() -> Iterator[Signals]:
    found = Signals()
    found.take_over()
    try:
        yield found
    finally:
        found.give_back()


# --- the progress ---------------------------------------------------------------------------------
class Lines:
    """Progress where there is no terminal: a line every few seconds, for a log."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, Any]] = {}

    def show(self, jobs: Sequence[RunningJob]) -> None:
        now = time.monotonic()
        for job in jobs:
            for query in job.document()["queries"]:
                last, told = self._told.get(query["name"], (now - TELL_S, None))
                if now - last >= TELL_S and query.get("batch_id", -1) not in (-1, told):
                    self._told[query["name"]] = (now, query["batch_id"])
                    say(line_of(query))

    def end(self, jobs: Sequence[RunningJob]) -> None:
        for job in jobs:
            say(last_line(job))


class ProgressScreen(Lines):
    """Progress on a terminal: a live table with a row for each query."""

    def __init__(self, live: Live):
        super().__init__()
        self._live = live
        self._last = 0.0

    def show(self, jobs: Sequence[RunningJob]) -> None:
        now = time.monotonic()
        if now - self._last > 0.25:
            self._last = now
            self._live.update(progress_table(jobs))


@contextmanager
def display() -> Iterator[Lines]:
    if not console.is_terminal:
        yield Lines()
        return
    with Live(console=console, auto_refresh=True, refresh_per_second=4, transient=True) as live:
        yield ProgressScreen(live)


def progress_table(jobs: Sequence[RunningJob]) -> Table:
    rows: list[Mapping[str, Any]] = []
    for job in jobs:
        rows += query_rows(job.name, {**job.document(), "stopping": job.is_stopping})
    return table_of(rows, QUERY_COLUMNS)


QUERY_COLUMNS = {
    "name": "query",
    "state": "state",
    "since": "since (UTC)",
    "batch": "batch",
    "rows": "rows",
    "rate": "in/s",
    "processed": "done/s",
    "lag": "lag",
    "age": "lag (s)",
    "took_ms": "batch (ms)",
    "dead": "dead letters",
    "sink": "to",
}


def query_rows(name: str, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each query of a pipeline, from its report."""
    state = document["state"]
    if document.get("stale"):
        state = "silent"
    elif document.get("stopping") and state == "running":
        state = "stopping"
    elif document.get("verdict", "ok") != "ok":
        state = document["verdict"]
    return [
        {
            "name": query.get("name", name),
            "state": state,
            "since": when(document["started_at"]),
            "batch": query.get("batch_id"),
            "rows": query.get("input_rows_total"),
            "rate": round(query.get("input_rows_per_second") or 0),
            "processed": round(query.get("processed_rows_per_second") or 0),
            "lag": query.get("lag"),
            "age": None if query.get("lag_seconds") is None else round(query["lag_seconds"]),
            "dead": query.get("dead_letters"),
            "sink": query.get("sink"),
            "took_ms": round(query.get("trigger_ms") or 0),
        }
        for query in document["queries"] or [{}]
    ]


def more_lines(document: Mapping[str, Any]) -> list[str]:
    """What a table has no room for: the watermark, the state and the last error of each query."""
    found = []
    for query in document["queries"]:
        parts = []
        if query.get("watermark") is not None:
            parts.append(f"watermark {when(query['watermark'])} UTC")
        if query.get("state_rows") is not None:
            parts.append(
                f"state {count_of(query['state_rows'], 'row')}, {size(query['state_bytes'] or 0)}"
            )
        if parts:
            found.append(f"{query['name']}: {'; '.join(parts)}")
        error = query.get("error") or query.get("last_error")
        if error:
            at = query.get("last_error_at")
            moment = "" if query.get("error") or at is None else f" ({when(at)} UTC, recovered)"
            found.append(f"{query['name']}{moment}: {text_of(error.encode())}")
    return found


def line_of(query: dict[str, Any]) -> str:
    lag = "" if query.get("lag") is None else f", lag {query['lag']:,}"
    return (
        f"{query['name']}: batch {query.get('batch_id', -1)}, "
        f"{count_of(query.get('input_rows_total', 0), 'row')}, "
        f"{query.get('input_rows_per_second', 0):,.0f} rows/s{lag}{_dead_letters([query])}"
    )


def last_line(job: RunningJob) -> str:
    queries = job.document()["queries"]
    rows = max([query.get("input_rows_total", 0) for query in queries], default=0)
    return f"{job.name} {job.state}: {count_of(rows, 'row')}{_dead_letters(queries)}"


def _dead_letters(queries: Sequence[dict[str, Any]]) -> str:
    dead = sum(query.get("dead_letters", 0) for query in queries)
    return f", {count_of(dead, 'dead letter')}" if dead else ""
