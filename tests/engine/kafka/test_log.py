"""A broker whose partitions are in a real Kafka: what it promises, over restarts, kills and other nodes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.client import HTTPConnection
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace import BrokerClient
from headrace.engine.kafka import log as kafka_log
from headrace.engine.kafka.link import KafkaLink
from headrace.engine.kafka.log import KafkaLog
from headrace.engine.kafka.records import entry_of, key_of
from headrace.engine.kafka.rule import Checkpoint, Claim, Stretch
from headrace.errors import DataCorrupt, HeadraceError
from headrace.testing import RunningServer, running_server, server_process, wait_until
from tests.fixtures.three_nodes import free_port

pytestmark = pytest.mark.xdist_group("kafka")
Settings = dict[str, Any]


@pytest.fixture
def server(cluster: Settings) -> Iterator[RunningServer]:
    with running_server(**cluster) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client() as connected:
        yield connected


def log_of(server: RunningServer, topic: str) -> KafkaLog:
    log = server.call(lambda: server.engine.topics.find(topic).partitions[0].log)
    assert isinstance(log, KafkaLog)
    return log


def everything(client: BrokerClient, topic: str, start: int = 0) -> list[bytes]:
    [place] = client.positions(topic)[topic]
    found: list[bytes] = []
    while start < place["end"]:
        messages = client.fetch(topic, start, limit=1000)
        assert messages[0].offset == start
        found += [message.value for message in messages]
        start = messages[-1].offset + 1
    return found


def begins_and_ends(servers: str, log: KafkaLog) -> tuple[int, int]:
    """Kafka's first and next offset of the partition."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "look"})
    place = TopicPartition(log.replica.topic, log.replica.number)
    found = consumer.get_watermark_offsets(place, timeout=10)
    consumer.close()
    assert found is not None
    return found


def delete_in_kafka(servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_topics([topic], operation_timeout=10)[topic].result(10)


# --- writing and reading --------------------------------------------------------------------------
def test_a_commit_is_one_record_in_kafka(
    server: RunningServer, client: BrokerClient, kafka: str
) -> None:
    """Ten thousand messages are one packed record, besides the claim."""
    client.create_topic("orders")
    client.publish_many("orders", [b"x" * 100] * 10_000)
    log = log_of(server, "orders")
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "look"})
    consumer.assign([TopicPartition(log.replica.topic, 0, 0)])
    found = consumer.consume(begins_and_ends(kafka, log)[1], 10)
    consumer.close()
    *claims, stretch = (entry_of(message.key()) for message in found)
    # A Kafka that is slow to answer has the same claim twice, and the second one is void.
    assert claims
    assert len({(claim.epoch, claim.node) for claim in claims}) == 1  # type: ignore[union-attr]
    assert claims[0].node.startswith("node1/")  # type: ignore[union-attr]
    assert stretch == Stretch(1, 0, 10_000)


def test_everything_is_there_after_a_restart(server: RunningServer) -> None:
    """Messages, positions, dead letters, delayed messages and definitions survive a clean restart."""
    with server.client() as client:
        client.create_topic("orders", partitions=3, retention_hours=72)
        for number in range(30):
            client.publish("orders", b"%d" % number, partition=number % 3)
        client.publish("later", b"!", delay=3600)
        client.create_subscription("email", "orders", max_deliveries=1)
        with client.subscription("email", "orders") as inbox:
            inbox.get(10).nack()
            for _ in range(9):
                inbox.get(10).ack()
        client.flush()
        wait_until(lambda: client.dead_letters("email"))
    server.restart()
    with server.client() as client:
        assert client.topic_stats("orders")["settings"]["retention_hours"] == 72
        assert sum(place["end"] for place in client.positions("orders")["orders"]) == 30
        [subscription] = client.subscriptions("orders")
        assert subscription["lag"] == 20
        assert len(client.dead_letters("email")) == 1
        assert len(client.scheduled()) == 1


def test_old_messages_are_fetched_from_kafka(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache does not have is read in pieces, in order, with read-ahead."""
    monkeypatch.setattr(kafka_log, "FETCH_BYTES", 100_000)
    expected = [b"%06d" % number * 20 for number in range(20_000)]
    with server.client() as client:
        client.create_topic("orders", compression="zstd")
        for low in range(0, 20_000, 500):
            client.publish_many("orders", expected[low : low + 500])
    server.restart()
    with server.client() as client:
        assert everything(client, "orders") == expected
        [message] = client.fetch("orders", 12_345, limit=1)
        assert message.value == expected[12_345]
        [before] = client.fetch("orders", 5_000, limit=1)
        moment = datetime.fromtimestamp(before.timestamp / 1000, UTC)
        offset = client.offset_at("orders", moment)
        assert offset <= 5_000
        assert client.fetch("orders", offset, limit=1)[0].timestamp == before.timestamp


def test_a_topic_that_is_deleted_in_kafka_is_refused_at_once(
    server: RunningServer, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before ``kafka_timeout``, for readers, members and publishers; others are not held up."""
    monkeypatch.setattr(kafka_log, "GONE_LOOK_S", 0.2)
    with server.client() as client:
        client.publish("orders", b"one")
        client.publish("bills", b"two")
        log, other = log_of(server, "orders"), log_of(server, "bills")
        delete_in_kafka(kafka, log.replica.topic)
        for each in (log, other):
            server.call(lambda each=each: each._cache.forget(each.number))
        began = time.monotonic()
        for call in (
            lambda: client.fetch("orders", 0),
            lambda: client.fetch("orders", 0),
            lambda: client.publish("orders", b"three"),
        ):
            with pytest.raises(DataCorrupt) as caught:
                call()
            assert caught.value.code == "kafka_topic_missing"
            assert log.replica.topic in caught.value.message
        assert client.fetch("bills", 0)[0].value == b"two"
        assert time.monotonic() - began < 5.0  # of a kafka_timeout of ten
        client.create_subscription("email", "orders")
        with client.subscription("email", "orders"):
            wait_until(
                lambda: client.subscription_stats("email")["partitions"][0]["blocked"] is not None
            )
        # Looked for again, and not found; then it is there as if it had never been away.
        wait_until(lambda: server.call(lambda: log._look_timer is not None))
        monkeypatch.setattr(KafkaLink, "_missing_of", lambda link, topics: set())
        wait_until(lambda: server.call(lambda: log._gone is None))
        server.call(lambda: log._looked(None))
        assert log._gone is None
        server.call(lambda: log._looked(True))  # so that the close waits for nothing


def test_a_publish_finds_that_its_topic_is_deleted_in_kafka(
    server: RunningServer, kafka: str
) -> None:
    """Nobody has read it since. What is under way may be stored; all that comes later is refused."""
    with server.client(delivery_timeout=5) as client:
        client.publish("orders", b"one")
        log = log_of(server, "orders")
        delete_in_kafka(kafka, log.replica.topic)
        with pytest.raises(HeadraceError) as caught:
            client.publish("orders", b"two")
        assert caught.value.code in ("outcome_unknown", "kafka_topic_missing")
        wait_until(lambda: server.call(lambda: log._gone is not None))
        with pytest.raises(DataCorrupt) as refused:
            client.publish("orders", b"three")
        assert refused.value.code == "kafka_topic_missing"


def test_a_start_reads_only_behind_the_last_checkpoint(server: RunningServer) -> None:
    """After a clean stop, the next node begins with the checkpoint, and knows where the rest is."""
    with server.client() as client:
        for number in range(50):
            client.publish("orders", b"%d" % number)
    server.restart()
    log = log_of(server, "orders")
    assert server.call(lambda: log._cache.find(log.number, 0)) is None
    assert server.call(lambda: len(log._places.places)) > 0
    with server.client() as client:
        assert everything(client, "orders") == [b"%d" % number for number in range(50)]
    assert server.call(lambda: log._fetching) == {}, "nothing is fetched after the end"


def test_retention_deletes_records_in_kafka(
    server: RunningServer, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What retention drops is deleted from Kafka up to a checkpoint, and a restart begins there."""
    with server.client() as client:
        client.create_topic("orders", segment_bytes=4096, retention_bytes=20_000)
        for number in range(200):
            client.publish("orders", b"%03d" % number * 100)
        server.call(server.engine.retention.run)
        [place] = client.positions("orders")["orders"]
        assert 0 < place["start"] < 200
        assert place["bytes"] < 40_000
        log = log_of(server, "orders")
        wait_until(lambda: begins_and_ends(kafka, log)[0] > 100)
        left = everything(client, "orders", place["start"])
        with pytest.raises(HeadraceError) as caught:
            client.fetch("orders", place["start"] - 1)
        assert caught.value.code == "offset_out_of_range"
    server.restart()
    with server.client() as client:
        [again] = client.positions("orders")["orders"]
        assert (again["start"], again["end"]) == (place["start"], 200)
        assert everything(client, "orders", again["start"]) == left


def test_foreign_records_in_the_topic_are_skipped(
    server: RunningServer, client: BrokerClient, kafka: str
) -> None:
    """What another program writes into the partition has no offset and does no harm."""
    client.publish("orders", b"one")
    log = log_of(server, "orders")
    producer = Producer({"bootstrap.servers": kafka})
    producer.produce(log.replica.topic, b"rubbish", b"key", 0)
    assert producer.flush(10) == 0
    client.publish("orders", b"two")
    assert everything(client, "orders") == [b"one", b"two"]


def test_a_deleted_topic_is_gone_from_kafka(
    server: RunningServer, client: BrokerClient, kafka: str
) -> None:
    """Its records go, and a topic of the same name begins at 0."""
    client.publish("orders", b"one")
    name = log_of(server, "orders").replica.topic
    client.delete_topic("orders")
    admin = Consumer({"bootstrap.servers": kafka, "group.id": "look"})
    wait_until(lambda: name not in admin.list_topics(timeout=10).topics)
    admin.close()
    assert client.publish("orders", b"two").offset == 0
    server.restart()
    with server.client() as again:
        assert everything(again, "orders") == [b"two"]


# --- kills and other nodes ------------------------------------------------------------------------
def test_what_was_answered_survives_a_kill(cluster: Settings) -> None:
    """A node is killed under load, twice: the client tries again, and every message is there once, in order."""
    kills, answered = 2, 0
    with server_process(**cluster) as server, server.client(delivery_timeout=60) as client:

        def kill() -> None:
            for number in range(1, kills + 1):
                wait_until(lambda least=50 * number: answered >= least, 60)  # type: ignore[misc]
                server.kill()
                server.start()

        thread = threading.Thread(target=kill)
        thread.start()
        while thread.is_alive() or answered < 50 * (kills + 1):
            client.publish("orders", b"%d" % answered)
            answered += 1
        thread.join()
        found = [int(value) for value in everything(client, "orders")]
    assert found == list(range(answered))


def test_a_claim_of_another_node_costs_a_moment_and_no_message(cluster: Settings) -> None:
    """What is stored stays, what is published meanwhile waits, and the node that should own the partition claims it again."""
    with running_server(**cluster) as server, server.client() as client:
        client.publish("orders", b"first")
        log = log_of(server, "orders")
        producer = Producer({"bootstrap.servers": cluster["kafka_servers"]})
        producer.produce(log.replica.topic, b"", key_of(Claim(2, "127.0.0.1:1/1")), 0)
        assert producer.flush(10) == 0
        server.wait_until(lambda: log.replica.seat.ownership.epoch >= 2)
        assert client.publish("orders", b"second").offset == 1
        assert server.call(lambda: log.replica.seat.owned) == 3
        assert everything(client, "orders") == [b"first", b"second"]


def test_a_killed_node_does_not_wait_for_its_own_session(cluster: Settings) -> None:
    """It is started again and serves, although Kafka still takes its predecessor for alive."""
    with server_process(**{**cluster, "kafka_session": 300}) as server:
        with server.client() as client:
            client.publish("orders", b"one")
        server.kill()
        server.start()
        with server.client() as client:
            assert everything(client, "orders") == [b"one"]


@pytest.mark.slow
def test_a_node_that_slept_until_its_place_was_deleted_ends(cluster: Settings, kafka: str) -> None:
    """It cannot know what it has missed, so it exits with 70, and is to be started again."""
    ports = free_port(), free_port()
    settings = [
        {**cluster, "port": port, "advertise": f"127.0.0.1:{port}", "slots": 1} for port in ports
    ]
    with server_process(**settings[0]) as first, first.client() as old:
        old.create_topic("orders", segment_bytes=4096, retention_bytes=0)
        old.publish("orders", b"first")
        first.signal(signal.SIGSTOP)
        with running_server(**settings[1]) as second, second.client(delivery_timeout=60) as new:
            for _ in range(20):
                new.publish("orders", b"x" * 1000)
            second.call(second.engine.retention.run)
            log = log_of(second, "orders")
            wait_until(lambda: begins_and_ends(kafka, log)[0] > 5)
            first.signal(signal.SIGCONT)
            assert first.wait() == 70


# --- Kafka away -----------------------------------------------------------------------------------
def test_without_kafka_publishes_wait_and_fail_and_go_on_by_themselves(
    cluster: Settings, kafka_node: Any
) -> None:
    """What is under way is unknown, what comes later is refused at once and may be tried again; then it heals."""
    with running_server(**cluster, kafka_timeout=2.0, events_interval=0) as server:
        assert publish(server, "orders", b"before") == (200, None)
        kafka_node.send(signal.SIGSTOP)
        try:
            assert publish(server, "orders", b"unknown") == (500, "outcome_unknown")
            assert publish(server, "orders", b"refused") == (503, "kafka_unavailable")
            assert publish(server, "unheard-of", b"refused") == (503, "kafka_unavailable")
            assert fetch(server, "orders") == (503, "kafka_unavailable")
        finally:
            kafka_node.send(signal.SIGCONT)
        wait_until(lambda: publish(server, "orders", b"after")[0] == 200, 60)
        wait_until(lambda: publish(server, "unheard-of", b"now")[0] == 200, 60)
        with server.client() as client:
            found = everything(client, "orders")
            assert (found[0], found[-1], found.count(b"unknown") <= 1) == (
                b"before",
                b"after",
                True,
            )
            assert b"refused" not in found
            assert everything(client, "unheard-of") == [b"now"]


def test_a_short_absence_of_kafka_is_only_a_pause(cluster: Settings, kafka_node: Any) -> None:
    """A publish waits until Kafka is back, if that is soon enough, and nobody notices more."""
    with running_server(**cluster) as server, server.client() as client:
        client.publish("orders", b"before")
        log = log_of(server, "orders")
        kafka_node.send(signal.SIGSTOP)
        try:
            waiting = [client.publish_nowait("orders", b"%d" % number) for number in range(3)]
            server.wait_until(lambda: log._group is not None)
            assert not any(each.done() for each in waiting)
        finally:
            kafka_node.send(signal.SIGCONT)
        assert sorted(each.result(30).offset for each in waiting) == [1, 2, 3]
        assert everything(client, "orders") == [b"before", b"0", b"1", b"2"]


def publish(server: RunningServer, topic: str, value: bytes) -> tuple[int, str | None]:
    """The status and the code of the answer; nobody tries again."""
    return answer(server, "POST", f"/publish/{topic}", value)


def fetch(server: RunningServer, topic: str) -> tuple[int, str | None]:
    return answer(server, "GET", f"/topics/{topic}/messages?offset=0", None)


def answer(
    server: RunningServer, method: str, path: str, body: bytes | None
) -> tuple[int, str | None]:
    connection = HTTPConnection(*server.http_address, timeout=30)
    connection.request(method, path, body, {"Content-Type": "text/plain"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found.get("error", {}).get("code") if answer.status != 200 else None


def test_a_checkpoint_is_written_when_enough_was_stored(
    server: RunningServer, client: BrokerClient, kafka: str
) -> None:
    """Checkpoints lie between the stretches, and do not take offsets."""
    client.create_topic("orders", segment_bytes=4096)
    for number in range(40):
        client.publish("orders", b"%d" % number * 500)
    log = log_of(server, "orders")
    _, end = begins_and_ends(kafka, log)
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "look"})
    consumer.assign([TopicPartition(log.replica.topic, 0, 0)])
    found = [entry_of(message.key()) for message in consumer.consume(end, 10)]
    consumer.close()
    checkpoints = [entry for entry in found if isinstance(entry, Checkpoint)]
    assert len(checkpoints) > 3
    assert [entry.number for entry in checkpoints] == list(range(len(checkpoints)))
    assert everything(client, "orders") == [b"%d" % number * 500 for number in range(40)]
