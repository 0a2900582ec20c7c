"""Sources of our own in several sessions of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from headrace.spark.sessions.active_session import active

pytestmark = pytest.mark.xdist_group("spark")


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "three_numbers"

    def schema(self) -> str:
        return "number INT"

    def reader(self, schema: Any) -> DataSourceReader:
        return NumbersReader()


class NumbersReader(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield from ((1,), (2,), (3,))


def test_every_session_may_be_told_as_often_as_one_likes(spark: SparkSession) -> None:
    """Spark looks for the name in the active session: meanwhile it is the one that is told."""
    jvm: Any = spark._jvm
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    others = [spark.newSession(), spark.newSession()]
    before = sessions.getActiveSession()
    for other in (spark, *others):
        sessions.setActiveSession(other._jsparkSession)
        for each in (spark, *others, spark):
            with active(each, Numbers):
                assert each.read.format("three_numbers").load().count() == 3
            assert sessions.getActiveSession().get().equals(other._jsparkSession)
    sessions.clearActiveSession()
    with active(spark, Numbers):
        assert sessions.getActiveSession().isDefined()
    assert not sessions.getActiveSession().isDefined()
    if before.isDefined():
        sessions.setActiveSession(before.get())
