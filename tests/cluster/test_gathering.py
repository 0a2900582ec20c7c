"""A backup of several nodes is one point in time of all of them."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.cursor import Cursor
from headrace.cluster.gathering import JoinedJournal
from headrace.errors import StorageFailed
from headrace.testing import wait_until
from tests.backup.rig import backed_up, messages, restored
from tests.fixtures.three_nodes import ThreeNodes

pytestmark = pytest.mark.xdist_group("kafka")


class Numbered:
    def __init__(self, number: int):
        self.number = number


def entry(kind: bytes, **item: Any) -> bytes:
    return kind + orjson.dumps(item)


def position(number: int, at: int) -> bytes:
    return Cursor.renumbered(
        b"C" + bytes(4) + bytes([1]) + at.to_bytes(8, "little") + bytes(8), number
    )


def test_two_journals_with_the_same_numbers_become_one() -> None:
    """Each cursor stays with its subscription and its position; what nobody knows any more is left out."""
    known: Any = {("orders", "email"): Numbered(4), (">", "audit"): Numbered(9)}
    joined = JoinedJournal(known)
    places = {"topic": "orders", "incarnation": 1}
    first = [
        entry(b"S", id=1, name="email", topic="orders"),
        entry(b"S", id=2, name="gone", topic="orders"),
        entry(b"K", cursor=1, subscription=1, partition=0, **places),
        entry(b"K", cursor=2, subscription=2, partition=0, **places),
        position(1, 10),
        position(2, 20),
        entry(b"T", name="job", number=3),
    ]
    second = [
        entry(b"S", id=7, name="audit", topic=">"),
        entry(b"S", id=1, name="email", topic="orders"),
        entry(b"K", cursor=1, subscription=7, partition=1, **places),
        entry(b"K", cursor=2, subscription=1, partition=1, **places),
        entry(b"M", cursor=2, reserved=5, doubts=[]),
        position(2, 31),
        position(1, 30),
    ]
    found = [*joined.add(first), *joined.add(second)]
    cursors = {
        item["cursor"]: (item["subscription"], item["partition"])
        for item in (orjson.loads(each[1:]) for each in found if each[:1] == b"K")
    }
    assert cursors == {10: (4, 0), 11: (9, 1), 12: (4, 1)}
    positions = {
        Cursor.number_of(each): int.from_bytes(each[6:14], "little")
        for each in found
        if each[:1] == b"C"
    }
    assert positions == {10: 10, 11: 30, 12: 31}
    assert [orjson.loads(e[1:])["cursor"] for e in found if e[:1] == b"M"] == [12]
    assert sum(each[:1] == b"T" for each in found) == 1


def lags(client: Any, name: str) -> dict[int, int]:
    return {
        each["partition"]: each["lag"] for each in client.subscription_stats(name)["partitions"]
    }


def test_a_backup_holds_the_positions_of_all_owners(
    three_nodes: ThreeNodes, tmp_path: Path
) -> None:
    """With messages, dead letters, delayed messages and named producers; a single broker goes on with it."""
    with three_nodes.nodes[1].client() as client:
        client.create_topic("orders", partitions=6)
        client.create_subscription("email", "orders")
        client.create_subscription("idle", "idle.>")
        for partition in range(6):
            for number in range(partition + 3):
                client.publish("orders", b"%d/%d" % (partition, number), partition=partition)
        with client.subscription("email", "orders", prefetch=100) as got:
            for _ in range(33):
                message = got.get(20)
                if message.offset < 2:
                    message.ack()
            client.flush()
            before = lags(client, "email")
        with client.subscription("picky", "parcels", max_deliveries=1) as got:
            client.publish("parcels", b"poison")
            got.get(20).nack(reason="no")
            wait_until(lambda: client.dead_letters("picky"))
        assert before == {partition: partition + 1 for partition in range(6)}
        client.publish("orders", b"later", delay=3600)
        kept = messages(client, "orders")
        backed_up(tmp_path / "backup", three_nodes.nodes[2])
    with restored(tmp_path / "backup", tmp_path / "alone") as server, server.client() as client:
        assert messages(client, "orders") == kept
        assert lags(client, "email") == before
        assert [letter.message.value for letter in client.dead_letters("picky")] == [b"poison"]
        assert [each.topic for each in client.scheduled()] == ["orders"]
        assert {each["name"] for each in client.subscriptions()} == {"email", "idle", "picky"}
        left = set()
        with client.subscription("email", "orders", prefetch=100) as got:
            for _ in range(21):
                message = got.get(10)
                message.ack()
                left.add(message.value)
        assert left == {b"%d/%d" % (p, n) for p in range(6) for n in range(2, p + 3)}


def test_nothing_is_lost_between_two_owners(three_nodes: ThreeNodes, tmp_path: Path) -> None:
    """A worker moves messages between topics of different owners: each is in one of them, whenever a backup is taken."""
    stop = threading.Event()
    with three_nodes.nodes[0].client() as client, three_nodes.nodes[1].client() as worker:
        client.create_topic("from", partitions=6)
        client.create_topic("to", partitions=6)
        client.create_subscription("mover", "from")

        def publish() -> None:
            number = 0
            while not stop.is_set():
                client.publish("from", b"%d" % number, partition=number % 6)
                number += 1

        def move() -> None:
            with worker.subscription("mover", "from", prefetch=10) as got:
                while not stop.is_set():
                    message = got.get(1)
                    if message is not None:
                        number = int(message.value)
                        worker.publish("to", message.value, partition=number * 5 % 6)
                        message.ack()

        def has_moved(count: int) -> bool:
            return sum(p["end_offset"] for p in client.topic_stats("to")["partitions"]) > count

        threads = [threading.Thread(target=each) for each in (publish, move)]
        for thread in threads:
            thread.start()
        try:
            for number in range(3):
                wait_until(partial(has_moved, 20 * (number + 1)), 30.0)
                backed_up(tmp_path / f"backup{number}", three_nodes.nodes[2])
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    for number in range(3):
        path = tmp_path / f"alone{number}"
        with restored(tmp_path / f"backup{number}", path) as server, server.client() as alone:
            values = {topic: _values(alone, topic) for topic in ("from", "to")}
            left = sum(lags(alone, "mover").values())
            moved = set(values["from"]) & set(values["to"])
            assert set(values["to"]) <= set(values["from"])
            assert left >= len(values["from"]) - len(moved)
            open_ones = set()
            with alone.subscription("mover", "from", prefetch=1000) as got:
                for _ in range(left):
                    open_ones.add(got.get(10).value)
            assert set(values["from"]) == moved | open_ones


def _values(client: Any, topic: str) -> list[bytes]:
    found = []
    for place in client.positions([topic])[topic]:
        at = place["start"]
        while at < place["end"]:
            for message in client.fetch(topic, at, 1000, partition=place["partition"]):
                found.append(message.value)
                at = message.offset + 1
    return found


def test_retention_waits_at_every_node(three_nodes: ThreeNodes) -> None:
    """As long as the backup is asked for, and not longer."""
    with three_nodes.nodes[0].client() as client:
        backup = client.begin_backup()["backup"]
        for node in three_nodes.nodes:
            assert node.call(node.engine.backups.holds)
        client.end_backup(backup)
        for node in three_nodes.nodes:
            node.wait_until(lambda node=node: not node.engine.backups.holds())


def test_a_backup_needs_an_owner_of_every_slot(
    three_nodes: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would lack positions; the error says where to look."""
    monkeypatch.setattr("headrace.cluster.gathering.PATIENCE", 0.0)
    leader = next(node for node in three_nodes.nodes if 0 in set(node.engine.state))
    monkeypatch.setattr(leader.engine.cluster.storage, "slots", 7)
    with leader.client() as client, pytest.raises(StorageFailed, match="headrace cluster") as error:
        client.begin_backup()
    assert error.value.code == "no_owner"
