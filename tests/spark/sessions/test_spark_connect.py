"""Spark Connect: a client without a JVM of its own needs nothing but the format's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.spark.sessions.java import find_java
from headrace.testing import RunningServer

SCRIPT = """
import sys
from pyspark.sql import SparkSession, functions as F

folder = sys.argv[1]
spark = (
    SparkSession.builder.remote("local[2]")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
assert "connect" in type(spark).__module__, type(spark)

orders = spark.read.format("headrace").option("topic", "orders").load()
assert orders.columns[:3] == ["key", "value", "topic"], orders.columns
assert orders.count() == 100
assert orders.where("offset >= 90").count() == 10
paid = orders.select(F.upper(F.col("value").cast("string")).alias("value"))
paid.write.format("headrace").option("topic", "batch").mode("append").save()

stream = (
    spark.readStream.format("headrace").option("topic", "orders")
    .option("startingOffsets", "earliest").load()
)
query = (
    stream.select("value").writeStream.format("headrace").option("topic", "streamed")
    .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination()
assert query.exception() is None, query.exception()
spark.stop()
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("spark")
def test_topics_are_read_and_written(
    server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """In batch and in streams, in both directions."""
    values = [f"order {number}".encode() for number in range(100)]
    client.publish_many("orders", values)
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={
            **os.environ,
            "HEADRACE_SERVERS": f"{server.host}:{server.port}",
            "JAVA_HOME": str(find_java(os.environ).home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert sorted(client.fetch_values("batch")) == sorted(value.upper() for value in values)
    assert client.fetch_values("streamed") == values
