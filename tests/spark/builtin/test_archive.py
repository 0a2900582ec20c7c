"""An archive holds what the log holds, over restarts, a lost checkpoint, and growing topics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace import BrokerClient
from headrace.errors import Conflict
from headrace.spark import lake
from headrace.spark.builtin import archive
from headrace.testing import RunningServer
from tests.spark.lake.rig import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


def run(spark: SparkSession, server: RunningServer, path: Path, *topics: str, **more: Any) -> None:
    """All that is there now."""
    query = archive.start(
        spark,
        topics,
        path=str(path),
        source={"servers": f"{server.host}:{server.port}", **more.pop("source", {})},
        trigger={"availableNow": True},
        **more,
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


def test_topics_into_a_table(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Every record once, as it was; again after a restart, and with the checkpoint gone."""
    client.create_topic("shop.orders", 2)
    for number in range(40):
        client.publish(
            "shop.orders", b"order %d" % number, {"n": str(number)}, key=f"k{number % 5}"
        )
    client.publish("shop.payments", b"paid")
    client.publish("elsewhere", b"not this")
    client.flush()
    table = tmp_path / "lake"
    run(spark, server, table, "shop.*", source={"maxOffsetsPerTrigger": 15})
    first = lake.describe(str(table))
    assert first.rows == 41
    assert {(span.topic, span.start) for span in first.offsets} == {
        ("shop.orders", 0),
        ("shop.payments", 0),
    }
    rows = {
        (row.topic, row.partition, row.offset): row
        for row in lake.read(spark, str(table)).collect()
    }
    assert len(rows) == 41
    for message in [
        *client.fetch("shop.orders", 0, partition=0),
        *client.fetch("shop.orders", 0, partition=1),
        *client.fetch("shop.payments", 0),
    ]:
        row = rows[message.topic, message.partition, message.offset]
        assert bytes(row.value) == message.value
        assert (None if row.key is None else bytes(row.key)) == message.key
        headers = {each.key: bytes(each.value).decode() for each in row.headers or ()}
        assert headers == dict(message.headers)
        assert int(row.timestamp.timestamp() * 1000 + 0.5) == message.timestamp
        assert row.id == str(message.id)
        assert row.date == row.timestamp.date()
    assert {path.name for path in table.iterdir()} >= {"topic=shop.orders", "_headrace"}

    client.change_topic("shop.orders", partitions=3)
    client.publish_many("shop.orders", [b"more"] * 7, partition=2)
    client.publish("shop.refunds", b"a new topic")
    run(spark, server, table, "shop.*")
    second = lake.describe(str(table))
    assert second.rows == 49
    assert second.offsets.of("shop.orders", 2) == [(0, 7)]

    shutil.rmtree(table / "_headrace" / "checkpoints")
    client.publish_many("shop.orders", [b"even more"] * 3, partition=0)
    run(spark, server, table, "shop.*")
    third = lake.describe(str(table))
    assert third.rows == third.offsets.count == 52
    assert not third.offsets.gaps()
    [group] = [each for each in client.subscriptions() if each["name"] == "archive"]
    assert group["lag"] == 0


def test_a_table_that_was_deleted(tmp_path: Path) -> None:
    """Its checkpoint would go on where it was, and leave out everything before: that is refused."""
    checkpoint = tmp_path / "checkpoint"
    for name, text in (
        (
            "offsets/0",
            'v1\n{}\n{"@topics":{"orders":1},"@begin":{"orders":{"0":5}},"orders":{"0":5}}',
        ),
        ("commits/0", "v1\n{}"),
    ):
        (checkpoint / name).parent.mkdir(parents=True)
        (checkpoint / name).write_text(text)
    arguments = ({"topic": "orders"}, lake.Options(str(tmp_path / "t")), str(checkpoint))
    assert archive.starting_offsets(*arguments) == "earliest"
    (checkpoint / "offsets" / "1").write_text('v1\n{}\n{"@topics":{"orders":1},"orders":{"0":9}}')
    (checkpoint / "commits" / "1").write_text("v1\n{}")
    with pytest.raises(Conflict, match="Restore the table") as caught:
        archive.starting_offsets(*arguments)
    assert caught.value.code == "checkpoint_ahead"


def test_the_wrong_log(server: RunningServer, client: BrokerClient, tmp_path: Path) -> None:
    """A table that holds more than the log has is of another log."""
    import pyarrow as pa

    client.publish("orders", b"x")
    rows = pa.table({
        "topic": ["orders"] * 3,
        "partition": pa.array([0] * 3, pa.int32()),
        "offset": [0, 1, 2],
    })  # fmt: skip
    append(rows, path=str(tmp_path), app_id="a", number=0, offsets=True)
    source = {"servers": f"{server.host}:{server.port}", "topic": "orders"}
    with pytest.raises(Conflict, match="holds orders/0 up to offset 2, and the log ends at 1"):
        archive.starting_offsets(source, lake.Options(str(tmp_path)), str(tmp_path / "checkpoint"))
