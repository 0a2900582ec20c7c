"""The sink as Spark runs it: batch writes, streams, retried tasks, errors that people see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from headrace import BrokerClient
from headrace.spark.versions import HAS_ADMISSION_CONTROL
from headrace.testing import RunningServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.xdist_group("spark")


def write(frame: DataFrame, server: RunningServer, topic: str | None = "out", **more: Any) -> None:
    writer = frame.write.format("headrace").mode("append")
    writer = writer.option("servers", f"127.0.0.1:{server.port}")
    for name, value in {"topic": topic, **more}.items():
        writer = writer if value is None else writer.option(name, value)
    writer.save()


def values(client: BrokerClient, topic: str = "out", partition: int = 0) -> list[bytes]:
    return client.fetch_values(topic, partition=partition, max_bytes=1 << 24)


def test_every_column_arrives(
    spark: SparkSession, server: RunningServer, client: BrokerClient
) -> None:
    """Value, key, headers, topic, partition and time, each as Spark has them."""
    client.create_topic("left", partitions=2)
    client.create_topic("right", partitions=3)
    frame = spark.sql(
        """
        SELECT 'a' AS value, cast('k' AS binary) AS key, 'left' AS topic, 1 AS partition,
               timestamp'2024-01-31 12:00:00' AS timestamp, map('h', 'one') AS headers
        UNION ALL
        SELECT 'b', null, 'right', 2, timestamp'2024-01-31 13:00:00', null
        """
    )
    write(frame, server, topic=None)
    (a,) = client.fetch("left", partition=1)
    assert (a.value, a.key, a.headers, a.timestamp) == (b"a", b"k", {"h": "one"}, 1706702400000)
    (b,) = client.fetch("right", partition=2)
    assert (b.value, b.key, b.headers, b.timestamp) == (b"b", None, {}, 1706706000000)


def test_rows_as_json_are_what_spark_would_write(
    spark: SparkSession, server: RunningServer, client: BrokerClient
) -> None:
    """The same documents as to_json of all columns, type by type."""
    frame = spark.sql(
        """
        SELECT id, cast(id AS double) / 3 AS d, cast(0.1 AS float) AS f, cast(id AS decimal(10, 2)) AS n,
               concat('say "', cast(id AS string), '"') AS s, id % 2 = 0 AS ok,
               date'2024-01-31' AS day, timestamp'2024-01-31 12:00:00.123456' AS t,
               timestamp_ntz'2024-01-31 12:00:00' AS tn, cast('x' AS binary) AS b,
               array(id, null) AS a, map('k', id, 'z', null) AS m, named_struct('x', id, 'y', null) AS st,
               if(id % 3 = 0, null, 'there') AS sometimes, double('NaN') AS nan,
               array(named_struct('q', null, 'r', 1)) AS aa
        FROM range(0, 20, 1, 1)
        """
    )
    expected = [row[0] for row in frame.selectExpr("to_json(struct(*))").collect()]
    write(frame, server)
    assert [orjson.loads(value) for value in values(client)] == list(map(orjson.loads, expected))


def test_a_task_that_is_repeated_writes_once(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """The first attempt fails after it has staged a part of its rows."""
    from pyspark.sql.functions import udf

    flag = tmp_path / "failed"

    @udf(returnType="string", useArrow=False)
    def stumble(number: int) -> str:
        if number == 35_000 and not flag.exists():
            flag.touch()
            raise ValueError("the first attempt stumbles")
        return f"{number:0100d}"

    write(spark.range(0, 40_000, 1, 1).select(stumble("id").alias("value")), server)
    assert flag.exists()
    assert [int(value) for value in values(client)] == list(range(40_000))


def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Each record once, though the last batch is run again as if its commit had not been heard of."""
    client.create_topic("in", partitions=2)
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        source = spark.readStream.format("headrace").option("servers", f"127.0.0.1:{server.port}")
        frame = source.option("topic", "in").option("startingOffsets", "earliest").load()
        sink = frame.selectExpr("key", "upper(cast(value AS string)) AS value").writeStream
        sink = sink.format("headrace").option("servers", f"127.0.0.1:{server.port}")
        sink = sink.option("topic", "out").option("checkpointLocation", str(checkpoint))
        query = sink.trigger(availableNow=True).start()
        assert query.awaitTermination(60)

    client.publish_many("in", [f"a{n}" for n in range(50)], keys=[f"k{n}" for n in range(50)])
    run()
    assert sorted(values(client)) == sorted(b"A%d" % n for n in range(50))
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    client.publish_many("in", ["b1", "b2"])
    run()
    if not HAS_ADMISSION_CONTROL:
        run()  # there, one run is one batch, and this was the one that is repeated
    assert sorted(values(client)) == sorted([*(b"A%d" % n for n in range(50)), b"B1", b"B2"])


def test_what_is_wrong_is_said_in_our_words(spark: SparkSession, server: RunningServer) -> None:
    """Spark's error carries the sentence that says what to do."""
    frame = spark.range(3)
    with pytest.raises(Exception, match="a topic cannot be overwritten"):
        frame.write.format("headrace").mode("overwrite").option("topic", "out").save()
    with pytest.raises(Exception, match="no option says where to"):
        write(frame, server, topic=None)
    with pytest.raises(
        Exception, match="'value' is bigint, and as the value of a message it must be"
    ):
        write(frame.selectExpr("id AS value"), server)
    with pytest.raises(Exception, match="rows have no value"):
        write(frame.selectExpr("cast(nullif(id, 1) AS string) AS value"), server)
