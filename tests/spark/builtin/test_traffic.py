"""Traffic: the numbers of each minute are right, and each minute is told once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from headrace import BrokerClient
from headrace.spark import lake
from headrace.spark.builtin import traffic
from headrace.spark.builtin.traffic import MINUTE_MS, TableOutput, TopicOutput, Traffic
from headrace.testing import RunningServer, running_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """One that tells of deliveries often."""
    with running_server(events_interval=0.1) as server:
        yield server


def where(server: RunningServer) -> dict[str, str]:
    return {"servers": f"{server.host}:{server.port}"}


def put(
    client: BrokerClient, topic: str, *records: tuple[int, int, str | None], partition: int = 0
) -> None:
    """(milliseconds after noon, bytes of the value, key) each."""
    client.publish_many(
        topic,
        [b"x" * size for _, size, _ in records],
        keys=[key for _, _, key in records],
        timestamps=[NOON + at for at, _, _ in records],
        partition=partition,
    )


def test_minutes_are_told_once(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Into tables and topics; the running minute waits; a crash between two outputs is made good."""
    client.create_topic("shop.orders", 2)
    put(client, "shop.orders", (0, 10, "a"), (1000, 30, "b"), (1000, 20, "a"), (59_999, 100, None))
    put(client, "shop.orders", (500, 40, "c"), (61_000, 7, None), partition=1)
    put(client, "shop.orders", (125_000, 5, None))
    put(client, "elsewhere", (3000, 1, None))
    clock = [NOON + 2 * MINUTE_MS + 4_000]
    path = str(tmp_path / "traffic")

    def told(topics: list[str], *outputs: Any) -> Traffic:
        return Traffic(spark, where(server), topics, outputs, delay_s=5, now_ms=lambda: clock[0])

    table = TableOutput("traffic", path, "parquet", "traffic")
    topic = TopicOutput("traffic", "headrace.traffic", "traffic", client)
    first = told(["shop.*"], table)
    assert first.round() == 1, "the second minute is over for not yet 5 seconds"
    assert first.round() == 0
    assert first.seconds_to_next() == 1.0
    [row] = lake.read(spark, path).collect()
    got = row.asDict()
    assert got.pop("minute").astimezone(UTC) == datetime(2026, 1, 31, 12, tzinfo=UTC)
    gaps = [500, 500, 0, 58_999]
    assert got == {
        "topic": "shop.orders",
        "messages": 5,
        "bytes": 200,
        "value_min": 10,
        "value_avg": 40.0,
        "value_p50": 30,
        "value_p99": 100,
        "value_max": 100,
        "keyed": 4,
        "keys": 3,
        "gap_avg_ms": pytest.approx(sum(gaps) / 4),
        "gap_p99_ms": pytest.approx(500 + 0.97 * (58_999 - 500)),
    }

    clock[0] += 1_000
    both = told(["shop.*"], table, topic)
    assert both.round() == 1 + 2, "the topic had not been told of the first minute yet"
    messages = client.fetch("headrace.traffic", 0)
    documents = [json.loads(message.value) for message in messages]
    assert [(each["minute"], each["messages"]) for each in documents] == [
        ("2026-01-31T12:00:00Z", 5),
        ("2026-01-31T12:01:00Z", 1),
    ]
    assert documents[1]["gap_avg_ms"] is None
    assert messages[0].key == b"shop.orders"

    clock[0] += MINUTE_MS
    rows = traffic.traffic(
        spark, where(server), [">"], NOON, clock[0], leave_out=["headrace.traffic"]
    )
    counted = {(row["topic"], row["minute"].minute): row["messages"] for row in rows.to_pylist()}
    assert counted == {
        ("shop.orders", 0): 5, ("shop.orders", 1): 1, ("shop.orders", 2): 1, ("elsewhere", 0): 1,
    }  # fmt: skip
    again = told([">"], topic, table)
    assert again.round() == 2, "one row for each output: what was told is not told again"
    assert again.round() == 0
    assert lake.describe(path).rows == 3
    assert len(client.fetch("headrace.traffic", 0)) == 3


def test_deliveries(spark: SparkSession, server: RunningServer, client: BrokerClient) -> None:
    """Attempts, latency and dead letters by reason, from the broker's own events."""
    client.publish_many("jobs", [b"good", b"bad", b"good"])
    consumer = client.subscription("worker", "jobs", max_deliveries=2, backoff=0)
    for settled, message in enumerate(consumer, 1):
        if message.value == b"bad":
            message.nack(reason="no stock")
        else:
            message.ack()
        if settled == 4:
            break
    client.flush()
    consumer.close()
    events: list[dict[str, Any]] = []
    while not any(each.get("dead_letters") for each in events):
        try:
            records = client.fetch("__events", 0, wait=5)
        except Exception:
            continue
        events = [json.loads(record.value) for record in records]
    now = records[-1].timestamp
    output = TopicOutput("deliveries", "headrace.deliveries", "traffic", client)
    job = Traffic(spark, where(server), ["jobs"], [output], now_ms=lambda: now + 2 * MINUTE_MS)
    assert job.round() >= 1
    told = [json.loads(each.value) for each in client.fetch("headrace.deliveries", 0)]
    assert {(each["subscription"], each["topic"]) for each in told} == {("worker", "jobs")}
    total = {
        name: sum(each[name] for each in told)
        for name in ("delivered", "acked", "nacked", "redelivered", "dead_lettered")
    }
    assert total == {"delivered": 4, "acked": 2, "nacked": 2, "redelivered": 1, "dead_lettered": 1}
    assert told[-1]["dead_letters"] == {"no stock": 1}
    attempts: dict[str, int] = {}
    for each in told:
        for attempt, count in each["attempts"].items():
            attempts[attempt] = attempts.get(attempt, 0) + count
    assert attempts == {"1": 3, "2": 1}
    assert told[0]["latency_max_ms"] >= told[0]["latency_avg_ms"] >= 0


def test_a_table_without_rows(tmp_path: Path) -> None:
    """Nothing to tell makes no table; who asks for the last minute hears that there is none."""
    output = TableOutput("traffic", str(tmp_path / "t"), "parquet", "traffic")
    assert output.last_minute() is None
    assert output.tell(traffic.TRAFFIC.empty_table(), 7) == 0
    row = dict.fromkeys(traffic.TRAFFIC.names) | {"minute": datetime(2026, 1, 31, tzinfo=UTC)}
    rows = pa.Table.from_pylist([row], schema=traffic.TRAFFIC)
    minute = int(row["minute"].timestamp()) // 60
    assert output.tell(rows, minute) == 1
    assert output.last_minute() == minute
    assert output.tell(rows, minute + 1) == 0
