"""Replays through Spark: from topics and tables, with conditions, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace import BrokerClient
from headrace.errors import Conflict, HeadraceError, InvalidArgument
from headrace.model import Message
from headrace.spark.builtin.replay import FROM_HEADER, ID_HEADER, Progress, replay
from headrace.spark.sessions.stop_flag import StopFlag
from headrace.testing import RunningServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


def everything(client: BrokerClient, topic: str) -> list[Message]:
    """All messages, partition by partition."""
    found: list[Message] = []
    for part in client.positions(topic)[topic]:
        at = part["start"]
        while at < part["end"]:
            found += client.fetch(topic, at, 1000, partition=part["partition"])
            at = found[-1].offset + 1
    return found


def test_a_topic_interrupted_and_resumed(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Every record once, in the order of its key, whatever was published meanwhile."""
    client.create_topic("orders", 2)
    client.create_topic("copy", 3)
    for number in range(300):
        client.publish(
            "orders", b"order %d" % number, {"kind": "test"}, key=b"key %d" % (number % 7)
        )
    client.flush()
    stop = StopFlag()

    def tell(progress: Progress) -> None:
        if progress.steps_done == 2:
            stop.set()

    given: dict[str, Any] = {
        "name": "again", "connection": {"servers": f"{server.host}:{server.port}"},
        "state": str(tmp_path),
    }  # fmt: skip
    first = replay(spark, "orders", "copy", rate="100/s", tell=tell, stop=stop, **given)
    assert (first.steps_done, first.steps, first.offsets) == (2, 3, 300)
    assert len(everything(client, "copy")) == first.rows == first.offsets_done < 300
    client.publish("orders", b"too late").result()

    # As after a crash between a commit and the note of it: the step is tried again.
    note = tmp_path / "again.json"
    note.write_text(note.read_text().replace('"done": 2', '"done": 1'))
    assert replay(spark, "orders", "copy", rate="1M/s", **given).is_finished
    assert replay(spark, "orders", "copy", **given).is_finished
    found = everything(client, "copy")
    assert sorted(int(m.value.split()[1]) for m in found) == list(range(300))
    for key in {m.key for m in found}:
        numbers = [int(m.value.split()[1]) for m in found if m.key == key]
        assert numbers == sorted(numbers)
    originals = {f"orders/{m.partition}@{m.offset}": m for m in everything(client, "orders")}
    for message in found:
        headers = message.headers
        origin = originals[headers[FROM_HEADER]]
        assert (headers[ID_HEADER], headers["kind"]) == (str(origin.id), "test")
        assert (message.key, message.value) == (origin.key, origin.value)

    with pytest.raises(Conflict, match="--where"):
        replay(spark, "orders", "copy", where="offset > 3", **given)
    with pytest.raises(Conflict, match="its plan is not in") as caught:
        replay(spark, "orders", "copy", **{**given, "state": str(tmp_path / "elsewhere")})
    assert caught.value.code == "replay_unknown"
    client.delete_topic("copy")
    with pytest.raises(Conflict, match="was deleted"):
        replay(spark, "orders", "copy", **given)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path, kind: str
) -> None:
    """What was archived comes back where it was, with its times, though the topic is gone."""
    from headrace.spark.builtin import archive

    client.create_topic("orders", 2)
    for number in range(60):
        client.publish("orders", b"%d" % number, partition=number % 2)
    client.flush()
    connection = {"servers": f"{server.host}:{server.port}"}
    table = str(tmp_path / "table")
    query = archive.start(
        spark, ["orders"], path=table, kind=kind, source=connection, trigger={"availableNow": True}
    )
    query.awaitTermination(120)
    before = everything(client, "orders")
    client.delete_topic("orders")
    done = replay(
        spark,
        table,
        "orders",
        where="CAST(CAST(value AS STRING) AS INT) >= 20",
        keep_timestamps=True,
        partition="same",
        connection=connection,
        state=str(tmp_path / "state"),
    )
    assert done.is_finished
    assert (done.rows, done.offsets) == (40, 60)
    after = everything(client, "orders")
    assert [(m.partition, m.value, m.timestamp) for m in after] == [
        (m.partition, m.value, m.timestamp) for m in before if int(m.value) >= 20
    ]
    assert after[0].headers[FROM_HEADER] == "orders/0@10"


@pytest.mark.parametrize("of_table", [False, True], ids=["topic", "table"])
def test_a_range_of_time(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path, of_table: bool
) -> None:
    """From the first record that is not older than the one time, to before the other."""
    from headrace.spark.builtin import archive

    client.create_topic("orders", 2)
    start = 1_700_000_000_000
    for number in range(40):
        client.publish_many(
            "orders", [b"%d" % number], partition=number % 2, timestamps=[start + 1000 * number]
        )
    connection = {"servers": f"{server.host}:{server.port}"}
    source = "orders"
    if of_table:
        source = str(tmp_path / "table")
        archive.start(
            spark, ["orders"], path=source, source=connection, trigger={"availableNow": True}
        ).awaitTermination(120)
    done = replay(
        spark,
        source,
        "copy",
        since="2023-11-14T22:13:30Z",  # ten seconds behind the first
        until=f"@{start + 25_000}",
        connection=connection,
        state=str(tmp_path / "state"),
    )
    assert done.is_finished
    assert done.rows == 15
    assert sorted(int(m.value) for m in everything(client, "copy")) == list(range(10, 25))


def test_into_itself_by_offsets(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """A replay of a replay says where it was last, once."""
    client.publish_many("orders", [b"%d" % number for number in range(20)])
    given: dict[str, Any] = {
        "connection": {"servers": f"{server.host}:{server.port}"}, "state": str(tmp_path)
    }  # fmt: skip
    assert replay(spark, "orders", "orders", offsets="0:18-", **given).rows == 2
    assert replay(spark, "*", "orders", offsets="orders/0:20", **given).rows == 1
    found = everything(client, "orders")
    assert [m.value for m in found[20:]] == [b"18", b"19", b"18"]
    assert found[22].headers[FROM_HEADER] == "orders/0@20"


def test_mistakes(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Nothing is made and no name is taken."""
    client.create_topic("wide", 3)
    client.publish("wide", b"x", partition=2).result()
    client.create_topic("narrow", 1)
    given: dict[str, Any] = {
        "connection": {"servers": f"{server.host}:{server.port}"}, "state": str(tmp_path),
        "name": "mine",
    }  # fmt: skip
    with pytest.raises(HeadraceError, match="nothing") as caught:
        replay(spark, "wide", "copy", where="nothing > 1", **given)
    assert caught.value.code == "invalid_sql"
    with pytest.raises(HeadraceError, match="nowhere"):
        replay(spark, "nowhere", "copy", **given)
    with pytest.raises(HeadraceError, match="no topic that matches"):
        replay(spark, "nowhere.*", "copy", **given)
    with pytest.raises(InvalidArgument, match="--partition same needs 3"):
        replay(spark, "wide", "narrow", partition="same", **given)
    with pytest.raises(HeadraceError):
        replay(spark, str(tmp_path / "no table"), "copy", **given)
    assert "copy" not in client.topics()
    done = replay(spark, "wide", "copy", since="2999-01-01", **given)
    assert done.is_finished
    assert done.offsets == 0
