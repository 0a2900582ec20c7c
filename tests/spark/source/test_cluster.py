"""Spark against a cluster over a real Kafka: any of several addresses, a dead one first."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace import BrokerClient
from headrace.testing import running_server, server_process, wait_until

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = 20_000


@pytest.fixture
def free() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_dead_first_address_does_not_matter(
    spark: SparkSession,
    cluster: dict[str, Any],
    free: int,
) -> None:
    """Executors read and write through the network, at the address that answers."""
    with running_server(**cluster) as server, server.client() as client:
        client.create_topic("orders", 3)
        for number in range(3):
            client.publish_many("orders", [b"%d" % n for n in range(1000)], partition=number)
        options = {"servers": f"127.0.0.1:{free},{server.host}:{server.port}", "timeout": "60"}
        frame = spark.read.format("headrace").options(**options, topic="orders").load()
        assert frame.count() == 3000
        writer = frame.select("value").write.format("headrace").options(**options, topic="copies")
        writer.mode("append").save()
        assert _copied(client) == 3000


def test_a_node_dies_in_the_middle_of_a_stream(
    spark: SparkSession,
    cluster: dict[str, Any],
    free: int,
    tmp_path: Path,
) -> None:
    """A query goes on with the node that takes over, and every message is written exactly once."""
    with server_process(**cluster) as first:
        with first.client() as client:
            client.create_topic("orders", 2)
            for low in range(0, ROWS, 1000):
                values = [b"%d" % n for n in range(low, low + 1000)]
                client.publish_many("orders", values, partition=low // 1000 % 2)
        options = {"servers": f"{first.host}:{first.port},127.0.0.1:{free}", "timeout": "90"}
        reading = spark.readStream.format("headrace").options(**options, topic="orders")
        frame = reading.options(startingOffsets="earliest", maxOffsetsPerTrigger="1000").load()
        writing = frame.select("value").writeStream.format("headrace")
        writing = writing.options(**options, topic="copies")
        query = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            with first.client() as client:
                wait_until(lambda: _copied(client) > 0 or not query.isActive, 120)
            first.kill()
            with (
                server_process(**{**cluster, "advertise": "node2"}, port=free) as second,
                second.client() as client,
            ):
                assert _copied(client) < ROWS, "the node died too late to show anything"
                wait_until(lambda: _copied(client) >= ROWS or not query.isActive, 180)
                assert query.isActive, query.exception()
                query.processAllAvailable()
                found: list[int] = []
                at = 0
                while at < _copied(client):
                    for batch in client.fetch_batches("copies", at):
                        found += map(int, batch.values())
                        at = batch.end_offset
                assert sorted(found) == list(range(ROWS))
                query.stop()
        finally:
            query.stop()


def _copied(client: BrokerClient) -> int:
    if "copies" not in client.topics():
        return 0
    return sum(place["end"] for place in client.positions("copies")["copies"])
