"""Topics as tables: a real broker, a real Spark."""

import threading
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F

from headrace import BrokerClient
from headrace.spark.versions import HAS_FILTERS
from headrace.testing import RunningServer

pytestmark = pytest.mark.xdist_group("spark")


def reading(
    spark: SparkSession, server: RunningServer, topic: str, **options: Any
) -> DataFrameReader:
    reader = spark.read.format("headrace").option("servers", f"{server.host}:{server.port}")
    return reader.option("topic", topic).option("timeout", "20").options(**options)


def offsets(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted(
        (row.partition, row.offset) for row in frame.select("partition", "offset").collect()
    )


def test_all_columns(spark: SparkSession, server: RunningServer, client: BrokerClient) -> None:
    """Found with no registration; what Spark shows is what a client gets."""
    client.create_topic("orders", partitions=2, compression="zstd")
    for number in range(5):
        client.publish("orders", f"one {number}", {"n": str(number)}, key=f"k{number}")
    many = [b"many %d" % number + b"." * 50 for number in range(100)]
    keys = [None if number % 3 else b"key" for number in range(100)]
    client.publish_many("orders", many, keys=keys, headers={"a": "b", "c": "dé"}, partition=1)
    client.publish_many("orders", many, timestamps=[1000 * n for n in range(100)], partition=0)
    frame = reading(spark, server, "orders").load()
    rows = {(row.partition, row.offset): row for row in frame.collect()}
    messages = [m for p in (0, 1) for m in client.fetch("orders", partition=p)]
    assert len(rows) == len(messages) == 205
    for message in messages:
        row = rows[message.partition, message.offset]
        assert (row.key, row.value, row.topic, row.id) == (
            message.key,
            message.value,
            "orders",
            str(message.id),
        )
        moment = (
            row.timestamp.replace(tzinfo=UTC) if row.timestamp.tzinfo is None else row.timestamp
        )
        assert round(moment.timestamp() * 1000) == message.timestamp
        assert dict(row.headers or []) == {k: v.encode() for k, v in message.headers.items()}
    # As Kafka's jobs write it.
    texts = frame.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)").where("key = 'k3'")
    assert [tuple(row) for row in texts.collect()] == [("k3", "one 3")]
    text = reading(spark, server, "orders", valueFormat="text", columns="value,offset").load()
    assert text.columns == ["value", "offset"]
    assert text.where("value LIKE 'one%'").count() == 5
    chosen = reading(spark, server, "orders").schema("offset BIGINT, headers MAP<STRING, STRING>")
    assert chosen.load().where("headers['c'] = 'dé'").count() == 100


def test_ranges_and_tasks(spark: SparkSession, server: RunningServer, client: BrokerClient) -> None:
    """Wildcards, offsets, times, and a partition that is read by several tasks."""
    client.create_topic("orders.eu", partitions=2)
    client.create_topic("orders.us")
    times = [1_700_000_000_000 + n for n in range(1000)]
    for topic, partition in (("orders.eu", 0), ("orders.eu", 1), ("orders.us", 0)):
        client.publish_many(topic, [b"x"] * 1000, partition=partition, timestamps=times)
    wild = reading(
        spark, server, "orders.*", minPartitions=7, columns="topic,partition,offset"
    ).load()
    assert wild.rdd.getNumPartitions() >= 7
    assert wild.groupBy("topic").count().sort("topic").collect() == [
        ("orders.eu", 2000),
        ("orders.us", 1000),
    ]
    assert wild.distinct().count() == 3000
    some = reading(
        spark, server, "orders.eu",
        startingOffsets='{"orders.eu": {"0": 990, "1": -1}}',
        endingOffsets='{"orders.eu": {"0": 995}}',
    )  # fmt: skip
    assert offsets(some.load()) == [(0, n) for n in range(990, 995)]
    timed = reading(
        spark,
        server,
        "orders.us",
        startingTimestamp=1_700_000_000_997,
        endingOffsets="@1700000000999",
    )
    assert offsets(timed.load()) == [(0, 997), (0, 998)]
    with pytest.raises(Exception, match="no topic matches"):
        reading(spark, server, "nothing.*").load().count()


def test_json(spark: SparkSession, server: RunningServer, client: BrokerClient) -> None:
    """Typed columns; what is bad is set apart and fails nothing."""
    records = [
        b'{"id": 1, "name": "a", "amount": 12.50, "at": "2026-01-31T12:00:00Z", "tags": ["x", "y"]}',
        b'{"id": "one"}',
        b'{"id": 2, "more": {"k": {"z": 5}}, "ignored": 1}',
        b"not json",
    ]
    client.publish_many("orders", records)
    ddl = "id INT, name STRING, amount DECIMAL(10, 2), at TIMESTAMP, tags ARRAY<STRING>, more MAP<STRING, STRUCT<z: INT>>"
    frame = reading(spark, server, "orders", valueFormat="json", schema=ddl).load()
    assert frame.columns == ["id", "name", "amount", "at", "tags", "more", "_corrupt"]
    good = {row.id: row for row in frame.where("_corrupt IS NULL").collect()}
    assert good[1].amount == Decimal("12.50")
    assert good[1].tags == ["x", "y"]
    assert good[2].more["k"].z == 5
    assert [row[0] for row in frame.where("_corrupt IS NOT NULL").select("_corrupt").collect()] == [
        '{"id": "one"}',
        "not json",
    ]
    assert frame.agg(F.sum("amount")).collect()[0][0] == Decimal("12.50")
    at = frame.select(F.unix_timestamp("at")).where("at IS NOT NULL").collect()
    assert at[0][0] == int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp())
    own = reading(spark, server, "orders", valueFormat="json").schema("id INT, _offset BIGINT")
    rows = sorted(tuple(row) for row in own.load().where("_offset < 3").fillna(-1).collect())
    assert rows == [(-1, 1), (1, 0), (2, 2)]


def test_a_directory_needs_no_broker(
    spark: SparkSession, server: RunningServer, client: BrokerClient
) -> None:
    """The same records, from the files of a broker that is stopped; also through SQL."""
    client.create_topic("orders", partitions=2)
    for partition in (0, 1):
        client.publish_many("orders", [b"x" * 10] * 500, partition=partition)
    server.stop()
    frame = spark.read.format("headrace").option("topic", "orders").load(str(server.data_dir))
    assert offsets(frame) == [(p, n) for p in (0, 1) for n in range(500)]
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW orders USING headrace "
        f"OPTIONS (path '{server.data_dir}', topic 'orders', minPartitions '3')"
    )
    assert spark.sql("SELECT sum(length(value)) FROM orders").collect()[0][0] == 10_000
    spark.catalog.dropTempView("orders")  # the session is everybody's


@pytest.mark.skipif(not HAS_FILTERS, reason="it is new in Spark 4.1")
def test_filters_are_pushed_when_spark_does_so(
    spark: SparkSession, server: RunningServer, client: BrokerClient
) -> None:
    """What they exclude is not read; without the setting nothing is refused."""
    times = [1_700_000_000_000 + n for n in range(1000)]
    client.create_topic("orders", partitions=2)
    for partition in (0, 1):
        client.publish_many("orders", [b"x"] * 1000, partition=partition, timestamps=times)
    text = "partition = 1 AND offset >= 990 AND timestamp < timestamp_millis(1700000000995)"

    found = reading(spark, server, "orders").load().where(text)
    assert found.rdd.getNumPartitions() == 2
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        found = reading(spark, server, "orders").load().where(text)
        assert found.rdd.getNumPartitions() == 1
        assert offsets(found) == [(1, n) for n in range(990, 995)]
        # Offsets need not be looked at again; times are.
        plan = found._jdf.queryExecution().executedPlan().toString()
        assert ">= 990" not in plan
        assert "Filter" in plan
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_broker_that_restarts_in_the_middle(
    spark: SparkSession, server: RunningServer, client: BrokerClient
) -> None:
    """Planned before, read behind it: tasks wait for the broker, and all records are there once."""
    client.create_topic("orders", partitions=2)
    for partition in (0, 1):
        client.publish_many("orders", [b"x" * 100] * 20_000, partition=partition)
    frame = reading(spark, server, "orders", columns="partition,offset").load()
    planned = frame.rdd.getNumPartitions()  # the positions are asked for here
    server.kill()
    threading.Timer(1.0, server.start).start()
    assert planned == 2
    assert frame.distinct().count() == 40_000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"topic": "nothing"}, "there is no topic 'nothing'"),
        ({"topic": "orders", "minPartition": "3"}, "there is no option minpartition; is it minPartitions"),
        ({"topic": "orders", "startingOffsets": "latest"}, "option startingOffsets: a batch cannot begin"),
        ({"topic": "orders", "startingOffsets": '{"orders": {"0": 99}}'}, "there is no offset 99 yet"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(
    spark: SparkSession,
    server: RunningServer,
    client: BrokerClient,
    options: dict[str, str],
    complaint: str,
) -> None:
    """They reach the user through Spark."""
    client.publish("orders", b"x")
    with pytest.raises(PySparkException) as failed:
        reading(spark, server, **options).load().count()
    assert complaint in str(failed.value)
