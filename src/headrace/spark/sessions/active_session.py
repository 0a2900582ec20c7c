"""The active session of a thread, and streaming queries that are started in it.

Spark looks for the name of a Python source in the session that is *active* in the thread, not in the
session of the query. A thread that did not create a session has no active one, and a query that it
starts fails with ``DATA_SOURCE_NOT_FOUND``. PySpark has no call that sets the active session, so the
JVM is asked; Spark Connect has a session on the server for each client, and needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.spark.sessions.arrow_batches import unmeasured
from headrace.spark.sessions.connect import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """On entry, make the session the active one of this thread; on exit, the one before it again."""
    if is_connect(spark):
        yield
        return
    assert spark._jvm is not None
    sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def start_query(
    rows: DataFrame,
    format_: str,
    options: Mapping[str, str],
    checkpoint: str,
    *,
    name: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    mode: str = "append",
) -> StreamingQuery:
    """Start a query into a format of ours.

    ``trigger`` is what ``DataStreamWriter.trigger`` takes: ``{"processingTime": "10 seconds"}``,
    ``{"availableNow": True}``.
    """
    writer = rows.writeStream.format(format_).options(**options).outputMode(mode)
    writer = writer.option("checkpointLocation", checkpoint)
    if name is not None:
        writer = writer.queryName(name)
    if trigger:
        writer = writer.trigger(**trigger)
    with active(rows.sparkSession), unmeasured(rows.sparkSession):
        return writer.start()
