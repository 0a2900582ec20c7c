"""Spark Connect: a client without a JVM of its own needs nothing but the format's name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.spark.sessions.java import find_java
from headrace.testing import RunningServer, wait_until

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


PIPELINE = """
[pipeline.double]
from = "orders"
format = "json"
schema = "id STRING, amount BIGINT"
expect = ["amount >= 10"]
sql = "SELECT id, amount * 2 AS amount FROM orders"
to = { topic = "doubled", key = "id" }
failed = "double.dlq"
"""


@contextmanager
def connect_server(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A server of Spark Connect in a process of its own; its address."""
    import pyspark

    port = free_port()
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "900m",
        "spark.ui.enabled": "false",
    }
    home = Path(pyspark.__file__).parent
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [
                str(home / "bin" / "spark-submit"),
                *("--master", "local[2,4]"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *(
                    part
                    for name, value in settings.items()
                    for part in ("--conf", f"{name}={value}")
                ),
                "spark-internal",
            ],
            env={**environment, "SPARK_HOME": str(home)},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: _listens(port) or server.poll() is not None, timeout=200)
        assert server.poll() is None, (folder / "server.log").read_text()[-4000:]
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("spark")
def test_sql_archives_and_pipelines_run_on_a_server(
    server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """The commands have no Java of their own, and do what they do elsewhere."""
    values = [b'{"id": "%d", "amount": %d}' % (number, number) for number in range(1000)]
    client.publish_many("orders", values, keys=[str(number) for number in range(1000)])
    (tmp_path / "double.toml").write_text(PIPELINE)
    environment = {
        **os.environ,
        "HEADRACE_SERVER": f"{server.host}:{server.port}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    java = {"JAVA_HOME": str(find_java(os.environ).home)}
    with connect_server(tmp_path, environment | java) as address:

        def headrace(*arguments: str) -> str:
            ended = subprocess.run(
                [sys.executable, "-m", "headrace", *arguments, "--master", address],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
            return ended.stdout + ended.stderr

        assert "499500" in headrace("sql", "SELECT sum(amount) FROM orders")
        headrace("archive", "run", "orders", "--to", "lake", "--once")
        assert "1,000 records compared" in headrace("archive", "verify", "lake")
        headrace("pipeline", "run", "double.toml", "--once", "--checkpoint-dir", "checkpoints")
    assert len(client.fetch_values("doubled")) == 990
    assert len(client.fetch_values("double.dlq")) == 10
