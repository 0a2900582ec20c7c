"""The active session of a thread.

Spark looks for the name of a Python source in the session that is *active* in the thread, not in the
session of the query. A thread that did not create a session has no active one, and a query that it
starts fails with ``DATA_SOURCE_NOT_FOUND``. PySpark has no call that sets the active session, so the
JVM is asked; Spark Connect has a session on the server for each client, and needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """On entry, make the session the active one of this thread; on exit, the one before it again."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        yield
        return
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()
