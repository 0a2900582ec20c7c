"""Telling a session of a source that is not found by itself (``lake/``, ``builtin/archive.py``).

Spark looks for the name of a source in the session that is *active* in the thread, which need not be that
of the query: what one session was told, a query of it does not find while another one is active, and what
the active one knows, all others are refused (``DATA_SOURCE_ALREADY_EXISTS``). So a session is made
the active one while it is told, and while a query of it is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


@contextmanager
def active(spark: SparkSession, *sources: type[DataSource]) -> Iterator[None]:
    """The session is the active one meanwhile, and knows these sources from now on."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # Spark Connect: the server has a session for each of us
        for source in sources:
            spark.dataSource.register(source)
        yield
        return
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        for source in sources:
            spark.dataSource.register(source)
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()
