"""Replays through Spark: from topics and tables, with conditions, interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace import BrokerClient
from headrace.errors import Conflict, DataCorrupt, HeadraceError, InvalidArgument
from headrace.model import Message
from headrace.spark.builtin.replay import (
    FROM_HEADER,
    ID_HEADER,
    Replay,
    ReplayPlan,
    ReplayRequest,
    count,
)
from headrace.spark.durable import locked
from headrace.spark.notation import RecordRange
from headrace.spark.sessions.stop_flag import StopFlag
from headrace.testing import RunningServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


# --- what users write -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "to"),
    [("orders", "no topic"), ("orders", "copies.*"), ("two words", "copy"), ("ftp://a/b", "copy")],
)
def test_what_cannot_be_asked_for(source: str, to: str) -> None:
    with pytest.raises(InvalidArgument):
        ReplayRequest(source, to)


def test_a_path_is_a_table() -> None:
    """It has a slash, and is the same table from every working directory."""
    assert ReplayRequest("/lake/orders", "copy").is_table
    assert ReplayRequest("./orders", "copy").source == str(Path.cwd() / "orders")
    assert not ReplayRequest("shop.>", "copy").is_table


# --- steps ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 3, 7, 50, 247])
def test_steps_have_every_offset_once_and_in_order(steps: int) -> None:
    offsets = [("a", 0, 5, 60), ("a", 1, 0, 3), ("b", 0, 9, 198)]
    plan = ReplayPlan({}, "token", offsets, steps)
    seen: dict[tuple[str, int], list[int]] = {}
    for step in range(steps):
        for topic, partition, start, end in plan.part(step, step + 1):
            seen.setdefault((topic, partition), []).extend(range(start, end))
    assert seen == {(topic, n): list(range(start, end)) for topic, n, start, end in offsets}
    assert plan.left == count(offsets) == 247
    plan.done = steps
    assert plan.is_finished
    assert plan.left == 0


def test_partitions_advance_together() -> None:
    """A step has the same share of each."""
    plan = ReplayPlan({}, "token", [("a", 0, 0, 1000), ("a", 1, 0, 100)], 10)
    assert plan.part(4, 5) == [("a", 0, 400, 500), ("a", 1, 40, 50)]


def test_nothing_to_replay() -> None:
    plan = ReplayPlan({}, "token", [], 0)
    assert plan.is_finished
    assert plan.part(0, 1) == []


# --- through Spark --------------------------------------------------------------------------------
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

    def tell(plan: ReplayPlan) -> None:
        if plan.done == 2:
            stop.set()

    where = {"servers": f"{server.host}:{server.port}"}
    request = ReplayRequest("orders", "copy")

    def replay(**given: Any) -> Replay:
        return Replay(
            **{"request": request, "connection": where, "name": "again", "state": tmp_path, **given}
        )

    first = replay(rate=20).run(spark, tell, stop)
    assert (first.done, first.steps, count(first.offsets)) == (2, 3, 300)
    assert len(everything(client, "copy")) == first.rows == 300 - first.left < 300
    client.publish("orders", b"too late")

    # As after a crash between a commit and the note of it: the step is tried again.
    note = tmp_path / "again.json"
    note.write_text(note.read_text().replace('"done": 2', '"done": 1'))
    assert replay(rate=1e6).run(spark).is_finished
    assert replay().run(spark).is_finished
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

    busy = Conflict("it is free")
    with locked(tmp_path / "again.lock", busy), pytest.raises(Conflict, match="is running already"):
        replay().run(spark)
    with pytest.raises(Conflict, match="began with --where None") as caught:
        replay(request=ReplayRequest("orders", "copy", where="offset > 3"))
    assert caught.value.code == "replay_differs"
    note.write_text("{}")
    with pytest.raises(DataCorrupt, match="is not the plan of a replay"):
        replay()


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
    request = ReplayRequest(
        table,
        "orders",
        where="CAST(CAST(value AS STRING) AS INT) >= 20",
        keep_timestamps=True,
        same_partition=True,
    )
    done = Replay(request, connection, state=tmp_path / "state").run(spark)
    assert done.is_finished
    assert (done.rows, count(done.offsets)) == (40, 60)
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
    # From ten seconds after the first.
    asked = RecordRange(since="2023-11-14T22:13:30Z", until=f"@{start + 25_000}")
    done = Replay(ReplayRequest(source, "copy", asked), connection, state=tmp_path / "state").run(
        spark
    )
    assert done.is_finished
    assert done.rows == 15
    assert sorted(int(m.value) for m in everything(client, "copy")) == list(range(10, 25))


def test_into_itself_by_offsets(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """A replay of a replay says where it was last, once."""
    client.publish_many("orders", [b"%d" % number for number in range(20)])
    where = {"servers": f"{server.host}:{server.port}"}
    last_two = ReplayRequest("orders", "orders", RecordRange(from_offset=18))
    assert Replay(last_two, where, state=tmp_path).run(spark).rows == 2
    one = ReplayRequest("*", "orders", RecordRange(from_offset=20, to_offset=21))
    assert Replay(one, where, state=tmp_path).run(spark).rows == 1
    found = everything(client, "orders")
    assert [m.value for m in found[20:]] == [b"18", b"19", b"18"]
    assert found[22].headers[FROM_HEADER] == "orders/0@20"


def test_mistakes(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """No topic is created and no name is taken."""
    client.create_topic("wide", 3)
    client.publish("wide", b"x", partition=2)
    client.create_topic("narrow", 1)
    where = {"servers": f"{server.host}:{server.port}"}

    def replay(*given: Any, **more: Any) -> ReplayPlan:
        return Replay(ReplayRequest(*given, **more), where, name="mine", state=tmp_path).run(spark)

    with pytest.raises(HeadraceError, match="nothing") as caught:
        replay("wide", "copy", where="nothing > 1")
    assert caught.value.code == "invalid_sql"
    with pytest.raises(HeadraceError, match="nowhere"):
        replay("nowhere", "copy")
    with pytest.raises(HeadraceError, match="no topic matches"):
        replay("nowhere.*", "copy")
    with pytest.raises(HeadraceError):
        replay(str(tmp_path / "no table"), "copy")
    assert "copy" not in client.topics()
    done = replay("wide", "copy", RecordRange(since="2999-01-01"))
    assert done.is_finished
    assert count(done.offsets) == 0
    narrow = Replay(ReplayRequest("wide", "narrow", same_partition=True), where, state=tmp_path)
    with pytest.raises(HeadraceError, match="partition"):
        narrow.run(spark)
