"""A replay among the pipelines that the broker knows: how far it is, and whether somebody wants it to stop.

It is reported as ``replay-NAME`` (as ``NAME`` where that begins so), as one query that has read its offsets in order: ``headrace pipeline
status`` and ``stop``, ``GET /pipelines`` and the metrics work for it as they do for the others.
"""

from __future__ import annotations

import time
from typing import Any

from headrace import limits
from headrace.spark.builtin.replay import Progress
from headrace.spark.pipelines.reporting import new_run
from headrace.spark.sessions.stop_flag import StopFlag

PREFIX = "replay-"
ERROR_CHARS_MAX = 2_000


class ReplayReport:
    """What a :class:`~headrace.spark.pipelines.reporting.Reporter` asks for."""

    def __init__(self, name: str, source: str, to: str, stop: StopFlag):
        self.name = name if name.startswith(PREFIX) else PREFIX + name
        self.name = self.name[: limits.PIPELINE_TEXT_CHARS_MAX]
        self._source, self._to = source, to
        self._stop = stop
        self._state = "running"
        self._error: str | None = None
        self._run_id, self._started_at = new_run()
        self._began: tuple[float, int] | None = None
        self._query: dict[str, Any] = {}

    def tell(self, far: Progress) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, far.offsets_done)
        seconds = max(now - self._began[0], 0.1)
        self._query = {
            "batch_id": far.steps_done - 1,
            "batches_total": far.steps_done,
            "input_rows_total": far.offsets_done,
            "input_rows_per_second": (far.offsets_done - self._began[1]) / seconds,
            "lag": far.offsets - far.offsets_done,
        }

    def ended(self, state: str, error: str | None = None) -> None:
        """``finished``, ``stopped`` or ``failed``."""
        self._state = state
        self._error = None if error is None else error[:ERROR_CHARS_MAX]

    def document(self) -> dict[str, Any]:
        query = {
            "name": self.name[: limits.PIPELINE_TEXT_CHARS_MAX],
            "sources": [{"name": self._source, "lag": self._query.get("lag")}],
            "sink": self._to,
            "error": self._error,
            **self._query,
        }
        return {
            "state": self._state,
            "run_id": self._run_id,
            "started_at": self._started_at,
            "queries": [query],
        }

    def wish_to_stop(self) -> None:
        self._stop.set()
