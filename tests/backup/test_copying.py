"""A backup of a running broker: the same everything, only what is new, and nothing lost to a kill."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.backup import copying
from headrace.backup.copying import records, take
from headrace.backup.manifest import BackupDirectory
from headrace.backup.sources import BackupLost, PointInTime
from headrace.client.threads import BrokerClient
from headrace.errors import (
    DataCorrupt,
    DirectoryLocked,
    Forbidden,
    InvalidArgument,
    RequestTimeout,
    Unauthenticated,
)
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.log.segment import log_name
from headrace.model import ProducerIdentity
from headrace.testing import RunningServer, running_server
from tests.backup.rig import (
    QUIET,
    backed_up,
    copied_from,
    everything,
    files_of,
    messages,
    restored,
    restored_to,
    source_of,
    values_of,
)

BINARY = bytes(range(256))


def fill(server: RunningServer) -> dict[str, Any]:
    """Some of everything. What returns is needed to go on with it."""
    with server.client() as client:
        client.create_topic("orders", partitions=3, segment_bytes=1 << 16, compression="zstd")
        client.create_topic("jobs", retention_hours=5.0)
        client.create_topic("volatile", durable=False)
        client.create_subscription("email", "orders", max_deliveries=2, backoff=0)
        client.create_subscription("all", "*", start="latest")
        for round in range(5):
            client.publish_many(
                "orders",
                [b"%d %d " % (round, n) + BINARY for n in range(400)],
                {"round": str(round)},
                keys=[BINARY[n % 256 :] or b"k" for n in range(400)],
            )
        client.publish("jobs", BINARY, {"näme": "wert"}, key=BINARY, ttl=10_000)
        with client.subscription("email", "orders", prefetch=100) as channel:
            some = [channel.get(5) for _ in range(60)]
            for message in some[::2]:
                message.ack()
            for message in some[1:10:2]:
                message.nack(delay=0, reason="no")
            again = {m.offset for m in some[1:10:2]}
            while again:
                message = channel.get(5)
                if message.attempt == 2:
                    message.nack(delay=0, reason="never")
                    again.discard(message.offset)
        later = client.publish("jobs", b"later", delay=3600)
        producer = client.producer("shop")
        client.publish("jobs", b"once", producer=(producer.id, producer.epoch, 0), partition=0)
        piece = client.stage("jobs", encode(Columns([b"staged"])), name="job", number=1)
        client.flush()
    return {"producer": producer, "piece": piece, "later": later.id}


def settled(server: RunningServer) -> dict[str, Any]:
    """Everything, once nothing moves any more."""
    server.wait_until(lambda: server.engine.state.oldest_unwritten == 0)
    return everything(server)


# --- the same -------------------------------------------------------------------------------------
@pytest.mark.parametrize("direct", [False, True], ids=["socket", "files"])
def test_a_restored_broker_has_everything(tmp_path: Path, direct: bool) -> None:
    """Messages byte for byte, positions, attempts, dead letters, schedules, settings, users."""
    with running_server(**QUIET) as server:
        fill(server)
        before = settled(server)
        with source_of(server, direct=direct) as source:
            taken = take(BackupDirectory(tmp_path / "b"), source)
    assert before["letters"]["email.dlq"]
    assert before["scheduled"]
    assert any(runs for s in before["subscriptions"].values() for _, runs, _ in s[3].values())
    assert taken.damaged == []
    with restored(tmp_path / "b", tmp_path / "data") as server:
        assert settled(server) == before


def test_a_restored_broker_goes_on(tmp_path: Path) -> None:
    """A repetition is recognized, a staged batch can be committed, a delayed message cancelled."""
    with running_server(**QUIET) as server:
        known = fill(server)
        backed_up(tmp_path / "b", server)
    producer: ProducerIdentity = known["producer"]
    with restored(tmp_path / "b", tmp_path / "data") as server, server.client() as client:
        end = client.topic_stats("jobs")["partitions"][0]["end_offset"]
        again = client.publish(
            "jobs", b"once", producer=(producer.id, producer.epoch, 0), partition=0
        )
        assert again.duplicate
        assert client.commit_staged("job", 1, [known["piece"]])
        client.cancel(known["later"])
        assert client.fetch("jobs", end)[0].value == b"staged"
        receipt = client.publish("orders", b"new", partition=1)
        assert client.fetch("orders", receipt.offset, partition=1)[0].value == b"new"


def test_a_stopped_broker_is_copied_from_its_directory(tmp_path: Path) -> None:
    """``--data``: the same, without a broker, and nothing in the directory changes."""
    with running_server(tmp_path / "original", **QUIET) as server:
        fill(server)
        before = settled(server)
        with pytest.raises(DirectoryLocked):
            copied_from(tmp_path / "b", tmp_path / "original")
        server.stop()
        files = {p: p.read_bytes() for p in (tmp_path / "original").rglob("*") if p.is_file()}
        copied_from(tmp_path / "b", tmp_path / "original")
        assert copied_from(tmp_path / "b", tmp_path / "original").copied == 0
        now = {p: p.read_bytes() for p in (tmp_path / "original").rglob("*") if p.is_file()}
        lock = tmp_path / "original" / "@lock"
        assert {**now, lock: b""} == {**files, lock: b""}
        with restored(tmp_path / "b", tmp_path / "data") as copy:
            assert settled(copy) == before


def test_a_killed_broker_is_copied_without_its_torn_tail(tmp_path: Path) -> None:
    """What recovery would cut off is not in the backup."""
    with running_server(tmp_path / "original", **QUIET) as server:
        with server.client() as client:
            client.publish_many("orders", [b"%d" % n for n in range(100)])
        server.kill()
        with next((tmp_path / "original/orders/0").glob("*.log")).open("r+b") as file:
            size = len(file.read().rstrip(b"\0"))
            file.seek(size + -size % 8)
            file.write(b"HRB1 torn")
        copied_from(tmp_path / "b", tmp_path / "original")
    with restored(tmp_path / "b", tmp_path / "data") as server, server.client() as client:
        assert [m.value for m in client.fetch("orders", 0, 200)] == [b"%d" % n for n in range(100)]


def test_users_and_tokens_are_in_it_unless_left_out(tmp_path: Path) -> None:
    """The access file is copied as it is; a restored broker knows the same passwords."""
    settings = {**QUIET, "token": "open sesame"}
    with running_server(**settings) as server:
        with server.client() as client:
            client.create_user("root", password="long secret", grants=["admin:>"])
            client.create_user("anna", password="also secret", grants=["admin:orders"])
        backed_up(tmp_path / "with", server)
        with source_of(server, access=False) as source:
            taken = take(BackupDirectory(tmp_path / "without"), source)
            assert taken.manifest.access_left_out
        anna = server.client(token=None, user="anna", password="also secret")
        with anna as client, pytest.raises(Forbidden):
            client.begin_backup()
    restored_to(tmp_path / "without", tmp_path / "open")
    assert not (tmp_path / "open" / "@access.json").exists()
    restored_to(tmp_path / "with", tmp_path / "data")
    with running_server(data_dir=tmp_path / "data", **QUIET) as server:
        with server.client(token=None, user="root", password="long secret") as client:
            assert [user["user"] for user in client.users()] == ["anna", "root"]
        with pytest.raises(Unauthenticated), server.client(token=None) as client:
            client.topics()


# --- increments -----------------------------------------------------------------------------------
def test_only_what_is_new_is_copied(tmp_path: Path) -> None:
    """By the bytes, and by the files that are touched."""
    with running_server(**QUIET) as server, server.client() as client:
        client.create_topic("orders", segment_bytes=1 << 16)
        client.publish_many("orders", [b"x" * 100] * 3_000)
        first = backed_up(tmp_path, server)
        size = client.topic_stats("orders")["bytes"]
        assert first.copied == first.manifest.size == size
        assert backed_up(tmp_path, server).copied == 0
        before = files_of(tmp_path)
        client.publish_many("orders", [b"y" * 100] * 50)
        third = backed_up(tmp_path, server)
        assert third.copied == client.topic_stats("orders")["bytes"] - size
        after = files_of(tmp_path)
        changed = {name for name in before if before[name] != after[name]}
        assert len(changed) <= 1
        assert all(after[name][1] > before[name][1] for name in changed)
        assert third.manifest.generation == 3


def test_every_generation_is_its_own_point_in_time(tmp_path: Path) -> None:
    """They share files, and an older one is restored as it was."""
    with running_server(**QUIET) as server, server.client() as client:
        seen = []
        client.create_subscription("email", "orders")
        for number in range(3):
            client.publish_many("orders", [b"%d" % number] * 10)
            with client.subscription("email", "orders") as channel:
                for _ in range(number):
                    channel.get(5).ack()
            client.flush()
            seen.append(settled(server))
            backed_up(tmp_path / "b", server)
        assert len(files_of(tmp_path / "b")) == 1
    for number in range(3):
        with restored(tmp_path / "b", tmp_path / str(number), generation=number + 1) as copy:
            assert settled(copy) == seen[number]


def test_old_generations_go_with_their_files(tmp_path: Path) -> None:
    """``keep`` generations stay; what only the others needed is removed."""
    with running_server(**QUIET) as server, server.client() as client:
        client.publish("old", b"x")
        backed_up(tmp_path, server)
        client.delete_topic("old")
        client.publish("new", b"x")
        backed_up(tmp_path, server, keep=2)
        assert {name.split("/")[1].split("@")[0] for name in files_of(tmp_path)} == {"old", "new"}
        taken = backed_up(tmp_path, server, keep=2)
        assert taken.forgotten == [1]
        assert BackupDirectory(tmp_path).numbers() == [2, 3]
        assert {name.split("/")[1].split("@")[0] for name in files_of(tmp_path)} == {"new"}


def test_messages_that_retention_has_deleted_are_not_restored(tmp_path: Path) -> None:
    """The backup's file still has them, for older generations; a restore begins where the broker did."""
    with running_server(**QUIET) as server, server.client() as client:
        client.create_topic("orders", segment_bytes=1 << 12, retain_unread=False)
        for number in range(10):
            client.publish_many("orders", [b"%d" % number * 500] * 4)
        client.change_topic("orders", segment_bytes=1 << 20)
        backed_up(tmp_path / "b", server)
        client.change_topic("orders", retention_bytes=8_000)
        server.call(server.engine.retention.run)
        before = settled(server)
        assert before["messages"]["orders"][0][0] > 0
        assert backed_up(tmp_path / "b", server).copied == 0
    with restored(tmp_path / "b", tmp_path / "data") as copy:
        assert settled(copy)["messages"] == before["messages"]


def test_a_broker_with_another_history_is_not_mixed_with_the_backup(tmp_path: Path) -> None:
    """Restored from an older generation, it has other messages at offsets that the backup has."""
    with running_server(**QUIET) as server, server.client() as client:
        client.create_topic("orders", segment_bytes=1 << 12)
        for number in range(8):
            client.publish_many("orders", [b"first %d" % number] * 100)
            backed_up(tmp_path / "b", server)
        first = settled(server)
    restored_to(tmp_path / "b", tmp_path / "data", generation=5)
    with running_server(data_dir=tmp_path / "data", **QUIET) as server, server.client() as client:
        for number in range(12):
            client.publish_many("orders", [b"second %d" % number] * 50)
        second = settled(server)
        taken = backed_up(tmp_path / "b", server)
        assert 0 < taken.copied < taken.manifest.size  # what both have was not copied again
    with restored(tmp_path / "b", tmp_path / "new") as copy:
        assert settled(copy)["messages"] == second["messages"]
    with restored(tmp_path / "b", tmp_path / "old", generation=8) as copy:
        assert settled(copy)["messages"] == first["messages"]


def test_a_file_that_is_missing_is_copied_again(tmp_path: Path) -> None:
    """The next generation is whole, and the command can tell."""
    with running_server(**QUIET) as server, server.client() as client:
        client.publish_many("orders", [b"x"] * 100)
        backed_up(tmp_path / "b", server)
        next((tmp_path / "b").glob("topics/*/0/*.log")).unlink()
        taken = backed_up(tmp_path / "b", server)
        assert len(taken.missing) == 1
        before = settled(server)
    with restored(tmp_path / "b", tmp_path / "data") as copy:
        assert settled(copy)["messages"] == before["messages"]


# --- while it runs --------------------------------------------------------------------------------
def test_a_topic_that_is_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    """With its subscriptions; everything else is there."""
    with running_server(**QUIET) as server, server.client() as client, source_of(server) as source:
        for topic in ("a", "b", "c"):
            client.publish(topic, b"x")
            client.create_subscription("of-" + topic, topic)
        client.create_subscription("wild", "*")
        begin = source.begin

        def begin_and_delete() -> PointInTime:
            point = begin()
            client.delete_topic("b")
            return point

        source.begin = begin_and_delete  # type: ignore[method-assign]
        taken = take(BackupDirectory(tmp_path / "b"), source)
        assert taken.manifest.left_out == ["b"]
    with restored(tmp_path / "b", tmp_path / "data") as copy, copy.client() as client:
        assert client.topics() == ["a", "c"]
        assert sorted(s["name"] for s in client.subscriptions()) == ["of-a", "of-c", "wild"]


def test_retention_waits_for_the_backup(tmp_path: Path) -> None:
    """What was there at the point in time is copied; afterwards it is deleted."""
    with running_server(**QUIET) as server, server.client() as client, source_of(server) as source:
        client.create_topic("orders", segment_bytes=1 << 12, retain_unread=False)
        for _ in range(5):
            client.publish_many("orders", [b"x" * 500] * 10)
        before = settled(server)
        point = source.begin()
        client.change_topic("orders", retention_bytes=1)
        server.call(server.engine.retention.run)
        assert client.positions(["orders"])["orders"][0]["start"] == 0
        [orders] = [t for t in point.topics if t.record.name == "orders"]
        copied = [b for some in source.read(orders.record, 0, *orders.extents[0]) for b in some]
        found = [each for b in copied for each in records(b, b.base_offset, b.end_offset)]
        assert found == before["messages"]["orders"][0][2]
        source.end()
        server.call(server.engine.retention.run)
        assert client.positions(["orders"])["orders"][0]["start"] > 0


def test_a_full_disk_ends_the_backup(tmp_path: Path) -> None:
    """The broker goes first: retention deletes, and the backup fails with a reason."""
    with running_server(**QUIET) as server, server.client() as client, source_of(server) as source:
        client.create_topic("orders", segment_bytes=1 << 12, retain_unread=False)
        for _ in range(5):
            client.publish_many("orders", [b"x" * 500] * 10)
        point = source.begin()
        client.change_topic("orders", retention_bytes=1)

        def fill_up() -> None:
            server.engine.guard.full = True
            server.engine.guard._reserve = 1 << 62
            server.engine.retention.run()
            server.engine.guard._reserve = 0

        server.call(fill_up)
        assert client.positions(["orders"])["orders"][0]["start"] > 0
        source._renewed = 0.0
        with pytest.raises(BackupLost, match="disk became full"):
            source.renew()
        assert point.topics


def test_two_backups_at_the_same_time_are_refused(tmp_path: Path) -> None:
    """Of one broker, and into one directory."""
    with running_server(**QUIET) as server, source_of(server) as one, source_of(server) as two:
        one.begin()
        with pytest.raises(Exception, match="has begun a backup") as caught:
            two.begin()
        assert caught.value.code == "backup_running"  # type: ignore[attr-defined]
        one.end()
        directory = BackupDirectory(tmp_path)
        directory.create()
        with directory.locked(), pytest.raises(DirectoryLocked, match="another headrace backup"):
            take(BackupDirectory(tmp_path), two)


def test_under_load_every_generation_is_consistent(tmp_path: Path) -> None:
    """Positions are within the messages, each log is a prefix, each delayed message is there once."""
    stop = threading.Event()
    sent: list[bytes] = []

    with running_server(**QUIET) as server:

        def publish() -> None:
            with server.client() as client:
                number = 0
                while not stop.is_set():
                    client.publish_many("orders", [b"%d" % (number + n) for n in range(50)])
                    value = b"delayed %d" % number
                    client.publish("later", value, delay=0.02)
                    sent.append(value)
                    number += 50

        def consume() -> None:
            with server.client() as client, client.subscription("email", "orders") as channel:
                while not stop.is_set():
                    with suppress(RequestTimeout):
                        channel.get(0.05).ack()

        with server.client() as client:
            client.create_topic("orders", partitions=2, segment_bytes=1 << 14)
            client.create_topic("later")
            client.create_subscription("email", "orders")
        threads = [threading.Thread(target=work) for work in (publish, consume)]
        for thread in threads:
            thread.start()
        known = []
        try:
            for _ in range(4):
                count = len(sent)
                backed_up(tmp_path / "b", server)
                known.append(count)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        with server.client() as client:
            final = messages(client, "orders")
    for number, count in enumerate(known, 1):
        started = restored(tmp_path / "b", tmp_path / str(number), generation=number)
        with started as copy, copy.client() as client:
            for partition, (_, end, batches) in enumerate(messages(client, "orders")):
                assert batches == final[partition][2][: len(batches)]
                [cursor] = [
                    c
                    for c in client.subscription_stats("email")["partitions"]
                    if c["partition"] == partition
                ]
                assert cursor["position"] <= end == cursor["end_offset"]
            copy.wait_until(lambda copy=copy: len(copy.engine.schedule) == 0)
            values = values_of(client, "later")
            assert len(values) == len(set(values))
            assert set(sent[:count]) <= set(values)


# --- staged commits -------------------------------------------------------------------------------
PLACES = [("a", 0), ("a", 1), ("b", 0)]
"""The partitions that each commit below writes to."""


def staged(client: BrokerClient, number: int) -> list[str]:
    """A batch for each of the places, not committed."""
    return [
        client.stage(
            topic, encode(Columns([b"%d" % number] * 3)), partition=place, name="job", number=number
        )
        for topic, place in PLACES
    ]


def committed(client: BrokerClient) -> list[list[bytes]]:
    """The values in each of the places."""
    found: list[list[bytes]] = []
    for topic, place in PLACES:
        found.append([])
        page = client.fetch(topic, partition=place)
        while page:
            found[-1] += [message.value for message in page]
            page = client.fetch(topic, page.next, partition=place)
    return found


def test_a_commit_during_the_copy_is_not_in_it(tmp_path: Path) -> None:
    """The backup has the batches as they were at its point in time: staged. They can be committed again, once."""
    with running_server(**QUIET) as server, server.client() as client, source_of(server) as source:
        client.create_topic("a", partitions=2)
        client.create_topic("b")
        assert client.commit_staged("job", 1, staged(client, 1))
        pieces = staged(client, 2)
        begin = source.begin

        def begin_and_commit() -> PointInTime:
            point = begin()
            assert client.commit_staged("job", 2, pieces)
            server.call(server.engine.retention.run)  # what is committed could be deleted now
            return point

        source.begin = begin_and_commit  # type: ignore[method-assign]
        take(BackupDirectory(tmp_path / "b"), source)
        assert committed(client) == [[b"1"] * 3 + [b"2"] * 3] * 3
    with restored(tmp_path / "b", tmp_path / "data") as copy, copy.client() as client:
        assert committed(client) == [[b"1"] * 3] * 3
        assert client.commit_staged("job", 2, pieces)
        assert client.commit_staged("job", 2, pieces) is False
        assert committed(client) == [[b"1"] * 3 + [b"2"] * 3] * 3


def test_a_commit_is_whole_in_every_generation(tmp_path: Path) -> None:
    """Backups begin at any moment of staging and committing: all places have a commit, or none has."""
    stop = threading.Event()
    with running_server(**QUIET) as server, server.client() as client:
        client.create_topic("a", partitions=2, segment_bytes=1 << 13)
        client.create_topic("b", segment_bytes=1 << 13)

        def commit() -> None:
            with server.client() as mine:
                number = 0
                while not stop.is_set():
                    number += 1
                    mine.commit_staged("job", number, staged(mine, number))

        thread = threading.Thread(target=commit)
        thread.start()
        try:
            for _ in range(4):
                backed_up(tmp_path / "b", server)
        finally:
            stop.set()
            thread.join()
        final = committed(client)[0]
    for number in range(1, 5):
        started = restored(tmp_path / "b", tmp_path / str(number), generation=number)
        with started as copy, copy.client() as client:
            last = client.last_commit("job")  # it waits for a commit that the start goes on with
            first, *others = committed(client)
            assert others == [first, first]
            assert first == final[: len(first)]
            assert last == (len(first) // 3 or -1)


# --- killed ---------------------------------------------------------------------------------------
def test_a_backup_that_fails_midway_continues_later(tmp_path: Path, monkeypatch: Any) -> None:
    """The earlier generation is whole, and what was copied is not copied again."""
    with running_server(**QUIET) as server, server.client() as client:
        client.create_topic("orders", partitions=4, segment_bytes=1 << 16)
        client.publish("orders", b"before", partition=0)
        backed_up(tmp_path / "b", server)
        for partition in range(4):
            for _ in range(20):
                client.publish_many("orders", [b"x" * 1000] * 20, partition=partition)
        before = settled(server)
        total = client.topic_stats("orders")["bytes"]
        seen = 0

        def fail(done: int, all: int) -> None:
            nonlocal seen
            seen += 1
            if seen == 12:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            backed_up(tmp_path / "b", server, progress=fail)
        assert BackupDirectory(tmp_path / "b").numbers() == [1]
        with restored(tmp_path / "b", tmp_path / "first") as copy, copy.client() as other:
            assert [m.value for m in other.fetch("orders")] == [b"before"]
        taken = backed_up(tmp_path / "b", server)
        assert 0 < taken.copied < total * 0.75
    with restored(tmp_path / "b", tmp_path / "data") as copy:
        assert settled(copy)["messages"] == before["messages"]


def test_a_broker_that_restarts_gets_a_new_point_in_time(tmp_path: Path, monkeypatch: Any) -> None:
    """The backup begins again by itself, and keeps what it has."""
    monkeypatch.setattr(copying, "BEGIN_AGAIN_S", 0.01)
    with running_server(**QUIET) as server, source_of(server) as source:
        with server.client() as client:
            client.create_topic("orders", partitions=2)
            for partition in range(2):
                for _ in range(10):
                    client.publish_many("orders", [b"x" * 1000] * 50, partition=partition)
        killed = False

        def kill(done: int, total: int) -> None:
            nonlocal killed
            if not killed and done > total // 2:
                killed = True
                server.kill()
                server.start()
                source._renewed = 0.0

        taken = take(BackupDirectory(tmp_path / "b"), source, progress=kill)
        assert taken.began == 2
        assert taken.copied < taken.manifest.size * 1.2
        before = settled(server)
    with restored(tmp_path / "b", tmp_path / "data") as copy:
        assert settled(copy)["messages"] == before["messages"]


# --- damage of the broker's own files ---------------------------------------------------------------
def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def damaged_broker(tmp_path: Path, earlier: Path | None = None) -> None:
    """Three segments of 40 messages each; the body of the second is damaged."""
    with running_server(tmp_path / "original", **QUIET) as server:
        with server.client() as client:
            client.create_topic("orders", segment_bytes=1 << 12)
            for number in range(3):
                client.publish_many("orders", [b"%d" % number * 200] * 40)
            if earlier is not None:
                backed_up(earlier, server)
        server.stop()
        flip(tmp_path / "original/orders/0" / log_name(40), 500)


def test_damaged_records_are_marked_as_lost(tmp_path: Path) -> None:
    """By a broker and from a directory; the backup names them, and the rest is there."""
    damaged_broker(tmp_path)
    copied = copied_from(tmp_path / "local", tmp_path / "original")
    with running_server(tmp_path / "original", **QUIET) as server:
        remote = backed_up(tmp_path / "remote", server)
    for taken in (copied, remote):
        assert taken.damaged == [("orders", 0, 40, 80)]
    for name in ("local", "remote"):
        with restored(tmp_path / name, tmp_path / f"{name}-data") as copy, copy.client() as client:
            assert {m.value for m in client.fetch("orders", 80, 100)} == {b"2" * 200}
            assert len(client.fetch("orders", 0, 40)) == 40
            with pytest.raises(DataCorrupt):
                client.fetch("orders", 40)


def test_records_that_the_backup_has_survive_damage_of_the_broker(tmp_path: Path) -> None:
    """An increment does not replace good copies by damaged ones."""
    damaged_broker(tmp_path, earlier=tmp_path / "b")
    with running_server(tmp_path / "original", **QUIET) as server:
        assert backed_up(tmp_path / "b", server).damaged == []
    with restored(tmp_path / "b", tmp_path / "data") as copy, copy.client() as client:
        assert [m.value for m in client.fetch("orders", 40, 40)] == [b"1" * 200] * 40


# --- the directory --------------------------------------------------------------------------------
def test_a_backup_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Directories 0700, files 0600, the restored ones too."""
    with running_server(**QUIET) as server:
        fill(server)
        backed_up(tmp_path / "b", server)
    restored_to(tmp_path / "b", tmp_path / "data")
    for root in (tmp_path / "b", tmp_path / "data"):
        for path in (root, *root.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_other_directories_are_refused(tmp_path: Path) -> None:
    """A directory with other files, and a file."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with running_server(**QUIET) as server:
        for path in (tmp_path / "other", tmp_path / "other" / "file"):
            with pytest.raises(InvalidArgument, match="not a backup"):
                backed_up(path, server)
    assert (tmp_path / "other" / "file").read_text() == "mine"


def test_the_rate_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """By sleeping, in pieces in which the broker hears that the backup goes on."""
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(copying.time, "sleep", sleep)
    monkeypatch.setattr(copying.time, "monotonic", lambda: now)
    renewed: list[float] = []
    pacer = copying.Pacer(1000.0, lambda: renewed.append(now))
    pacer.copied(500)
    pacer.copied(2000)
    assert sum(slept) == pytest.approx(2.5)
    assert max(slept) <= 1.0
    assert len(renewed) > len(slept)
