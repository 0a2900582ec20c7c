"""The active session of a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.spark.sessions.active_session import active
from headrace.testing import RunningServer

pytestmark = pytest.mark.xdist_group("spark")


def test_a_thread_that_has_no_session(
    spark: SparkSession, server: RunningServer, client: Any
) -> None:
    """A source is found there all the same, and afterwards the thread has none again."""
    client.publish("orders", b"x")
    sessions: Any = spark._jvm.org.apache.spark.sql.classic.SparkSession  # type: ignore[union-attr]

    def read() -> tuple[int, bool]:
        sessions.clearActiveSession()
        with active(spark):
            rows = spark.read.format("headrace").option("topic", "orders")
            found = rows.option("servers", f"{server.host}:{server.port}").load().count()
        return found, sessions.getActiveSession().isDefined()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == (1, False)


def test_another_session_is_active(spark: SparkSession) -> None:
    """It is the active one again afterwards."""
    sessions: Any = spark._jvm.org.apache.spark.sql.classic.SparkSession  # type: ignore[union-attr]
    other = spark.newSession()
    with active(other):
        with active(spark):
            assert sessions.getActiveSession().get().equals(spark._jsparkSession)
        assert sessions.getActiveSession().get().equals(other._jsparkSession)
