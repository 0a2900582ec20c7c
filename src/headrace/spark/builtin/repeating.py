"""Work that is done in rounds, not as a streaming query: watched, reported and stopped like one.

A round that fails is tried again, after a second, two, four, …; so many times in a row
(``RESTARTS``) and the work has failed, or at once where trying again cannot help. A stop is obeyed after
the round under way; asked for a second time, its jobs are cancelled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.spark.pipelines.errors import is_definite, sentence
from headrace.spark.pipelines.reporting import Reporter, new_run
from headrace.spark.sessions.stop_flag import StopFlag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("headrace.spark")
RESTARTS = 3


class Rounds:
    """Does ``work`` again and again; ``pause`` says after how many seconds."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        work: Callable[[], int],
        pause: Callable[[], float],
        *,
        sink: str,
        once: bool = False,
        on_round: Callable[[Rounds], None] | None = None,
    ):
        self._spark = spark
        self.name = name
        self._work, self._pause = work, pause
        self._sink, self._once = sink, once
        self._on_round = on_round
        self._stopping = StopFlag()
        self._run_id, self._started_at = new_run()
        self.state = "running"
        self.error: str | None = None
        self.rounds = self.rows = self.last_rows = 0
        self.seconds = 0.0
        """Of the last round."""

    def run(self, reporter: Reporter | None = None) -> None:
        """Until it is stopped, has failed, or (``once``) is done."""
        if reporter is not None:
            reporter.start([self])
        try:
            self._run()
        except BaseException:
            self.state = "failed"
            raise
        finally:
            if reporter is not None:
                reporter.close()

    def _run(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                self.last_rows = self._work()
            except Exception as error:
                if self._stopping.is_set():
                    break
                failures += 1
                self.error = sentence(error)
                if self._once or failures > RESTARTS or is_definite(error):
                    self.state = "failed"
                    return
                pause = 2.0 ** (failures - 1)
                logger.warning("%s is tried again in %.0f s: %s", self.name, pause, self.error)
            else:
                failures, self.error = 0, None
                self.rounds += 1
                self.rows += self.last_rows
                self.seconds = time.monotonic() - began
                if self._on_round is not None:
                    self._on_round(self)
                if self._once:
                    self.state = "finished"
                    return
                pause = self._pause()
            if self._stopping.wait(pause):
                break
        self.state = "stopped"

    # --- stopping, from any thread or a signal handler ----------------------------------------
    def stop(self, *, now: bool = False) -> None:
        self._stopping.set()
        if now:
            # Not here: a signal may have come in the middle of a call to the JVM.
            cancel = self._spark.sparkContext.cancelAllJobs
            threading.Thread(target=cancel, daemon=True).start()

    def wish_to_stop(self) -> None:
        self.stop()

    # --- telling ----------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        query = {
            "name": self.name,
            "id": self._run_id,
            "batch_id": self.rounds - 1,
            "input_rows": self.last_rows,
            "input_rows_per_second": 0.0,
            "processed_rows_per_second": 0.0,
            "trigger_ms": self.seconds * 1000,
            "batches_total": self.rounds,
            "input_rows_total": self.rows,
            "sink": self._sink,
            "error": self.error,
        }
        return {
            "state": self.state,
            "run_id": self._run_id,
            "started_at": self._started_at,
            "queries": [query],
        }
