"""One table over all history, as users meet it: on a real Spark, by an archive's name, from the command line."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import BrokerClient
from headrace.errors import InvalidArgument
from headrace.spark import lake
from headrace.spark.builtin.archive import starting_offsets
from headrace.spark.builtin.archive_source import RECORDS
from headrace.spark.lake import Span
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.stream import HeadraceStreamReader
from headrace.spark.sql import TopicSql
from headrace.testing import RunningServer
from tests.cli.rig import Command
from tests.spark.history.rig import Query, archive, fill, where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


def test_a_day_on_the_broker_and_the_rest_in_the_lake(
    spark: SparkSession,
    server: RunningServer,
    client: BrokerClient,
    headrace: Command,
    tmp_path: Path,
) -> None:
    """Retention deletes only what is archived, and a query finds every record once, wherever it is."""
    client.create_topic("orders", 2, segment_bytes=4096, retention_hours=24)
    fill(client)  # records of the year 2001: older than a day
    archiving = ("archive", "run", "orders", "--to", tmp_path / "lake", "--once")
    assert headrace(*archiving).code == 0
    fill(client, count=100)  # not archived yet
    server.call(server.engine.retention.run)
    [first, _] = client.positions(["orders"])["orders"]
    assert (
        100 < first["start"] <= 200 < first["end"]
    )  # the unread records stay, though they are old

    everything = spark.read.format("headrace").options(
        **where(server, topic="orders", history="archive")
    )
    frame = everything.load()
    assert frame.count() == frame.distinct().count() == 600
    assert frame.where("partition = 1 AND offset BETWEEN 190 AND 209").count() == 20
    with closing(TopicSql(spark, where(server, history="archive"))) as topics:
        found = topics.query("SELECT max(n), count(*) FROM orders WHERE _partition = 0").collect()
    assert [tuple(row) for row in found] == [(299, 300)]
    ran = headrace(
        "sql", "--history", tmp_path / "lake", "--from-offset", 10, "--json",
        "SELECT count(*) AS n, min(_offset) AS first FROM orders",
    )  # fmt: skip
    assert ran.json == {"n": 580, "first": 10}

    assert headrace(*archiving).code == 0
    server.call(server.engine.retention.run)
    client.delete_topic("orders")
    ran = headrace(
        "sql", "--history", tmp_path / "lake", "--json", "SELECT max(n) AS n FROM orders"
    )
    assert ran.json == {"n": 299}


def test_mistakes(spark: SparkSession, server: RunningServer, headrace: Command) -> None:
    """A name that no archive has, and a stream, are errors that say what to do."""
    ran = headrace("sql", "--history", "nightly", "SELECT 1")
    assert ran.code == 2
    assert "no archive 'nightly' has reported to this broker" in ran.err
    ran = headrace("sql", "--history", "./nowhere", "SELECT 1")
    assert (ran.code, "there is no table at" in ran.err) == (2, True)
    options = where(server, topic="orders", history="./lake")
    with pytest.raises(InvalidArgument, match="a stream reads the log"):
        HeadraceStreamReader(SourceOptions.of(options), RECORDS)


def test_a_copy_of_a_table_is_an_archive(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """It holds the same offsets, in the other format, and an archive that is started on it continues."""
    fill(client, count=50)
    archive(server, tmp_path / "old", Span("orders", 0, 0, 50), Span("orders", 1, 0, 30))
    new = str(tmp_path / "new")
    lake.write(
        lake.read(spark, str(tmp_path / "old")),
        path=new,
        kind="iceberg",
        partition_by=["topic", "date"],
        options={"offsets": True},
    )
    assert lake.describe(new).offsets == lake.describe(str(tmp_path / "old")).offsets
    source = where(server, topic="orders")
    table = lake.Options.of({"path": new, "kind": "iceberg"})
    begin = starting_offsets(source, table, str(tmp_path / "checkpoint"))
    assert json.loads(begin) == {"orders": {"0": 50, "1": 30}}
    assert len(Query({**source, "history": new}).places()) == 100
