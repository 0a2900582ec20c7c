"""Topics of a real Kafka are copied into a real broker, exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from headrace import BrokerClient
from headrace.bridge.translating import TOMBSTONE_HEADER
from headrace.errors import Conflict, HeadraceError, InvalidArgument, OffsetOutOfRange, TooLarge
from headrace.partitioning import partition_of_key
from headrace.testing import RunningServer, running_server, wait_until
from tests.bridge.rig import WAIT_S, PlainKafka, following, inward, new_name

pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture(scope="module")
def plain(kafka: str) -> PlainKafka:
    return PlainKafka(kafka)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client() as connected:
        yield connected


def values(client: BrokerClient, topic: str) -> list[list[bytes]]:
    """The values of each partition."""
    found = []
    for place in client.positions(topic)[topic]:
        at, some = place["start"], []
        while at < place["end"]:
            for batch in client.fetch_batches(topic, at, partition=place["partition"]):
                some += batch.values()
                at = batch.end_offset
        found.append(some)
    return found


def test_records_keep_everything(plain: PlainKafka, client: BrokerClient) -> None:
    """Key, value, headers, time, partition and order of records are the same in Headrace."""
    topic = plain.create(3)
    plain.put(topic, b"one", b"k", partition=2, timestamp=1_700_000_000_000, headers=[("a", b"1")])
    plain.put(topic, None, b"k", partition=2, timestamp=1_700_000_000_001)
    plain.put(topic, b"early", None, partition=2, timestamp=1_600_000_000_000)
    plain.flush()
    bridge = inward(client, plain, f"{topic}=into.{topic}", name=new_name("bridge"))
    bridge.run(until_caught_up=True)
    found = client.fetch(f"into.{topic}", partition=2)
    assert [(m.key, m.value, dict(m.headers)) for m in found] == [
        (b"k", b"one", {"a": "1"}),
        (b"k", None, {TOMBSTONE_HEADER: "true"}),
        (None, b"early", {"headrace-time": "1600000000000"}),
    ]
    assert [m.timestamp for m in found] == [1_700_000_000_000, *[1_700_000_000_001] * 2]
    assert bridge.progress.copied == 3
    assert bridge.progress.lag == 0


def test_the_next_run_continues(plain: PlainKafka, client: BrokerClient) -> None:
    """A second run copies what is new, into the same partitions, and nothing twice."""
    topic, name = plain.create(2), new_name("bridge")
    for first in (0, 1000, 2000):
        plain.fill(topic, 1000, 2, first)
        inward(client, plain, topic, name=name).run(until_caught_up=True)
    everything = values(client, topic)
    assert everything == [[b"%d" % n for n in range(side, 3000, 2)] for side in (0, 1)]


def test_it_follows_several_topics(plain: PlainKafka, client: BrokerClient) -> None:
    """Records that are produced while it runs arrive, of both topics, also in partitions that are added."""
    one, two = plain.create(1), plain.create(2)
    with following(inward(client, plain, one, two, name=new_name("bridge"))) as bridge:
        plain.fill(one, 10, 1)
        plain.fill(two, 10, 2)
        wait_until(lambda: bridge.progress.copied == 20, WAIT_S)
    assert values(client, one) == [[b"%d" % n for n in range(10)]]
    plain.grow(two, 3)
    plain.put(two, b"new", partition=2)
    plain.flush()
    bridge.stop = threading.Event()
    bridge.run(until_caught_up=True)
    assert values(client, two)[2] == [b"new"]


def test_latest_means_from_now_on(plain: PlainKafka, client: BrokerClient) -> None:
    """With latest, the position is fixed by the first start, even if it copies nothing."""
    topic, name = plain.create(1), new_name("bridge")
    plain.fill(topic, 10, 1)
    inward(client, plain, topic, name=name, start="latest").run(until_caught_up=True)
    plain.fill(topic, 5, 1, first=10)
    inward(client, plain, topic, name=name, start="latest").run(until_caught_up=True)
    assert values(client, topic) == [[b"%d" % n for n in range(10, 15)]]


def test_the_newer_of_two_takes_over(plain: PlainKafka, client: BrokerClient) -> None:
    """Of two bridges with one name, the older one stops, and nothing is doubled."""
    topic, name = plain.create(1), new_name("bridge")
    plain.fill(topic, 100, 1)
    with (  # noqa: PT012 - the end of the block raises it
        pytest.raises(Conflict) as refused,
        following(inward(client, plain, topic, name=name)) as old,
    ):
        wait_until(lambda: old.progress.copied == 100, WAIT_S)
        with following(inward(client, plain, topic, name=name)) as new:
            wait_until(lambda: new.progress.is_caught_up, WAIT_S)
            plain.fill(topic, 100, 1, first=100)
            wait_until(lambda: new.progress.copied == 100, WAIT_S)
    assert refused.value.code == "bridge_replaced"
    assert values(client, topic) == [[b"%d" % n for n in range(200)]]


def test_keys_decide_where_wanted(plain: PlainKafka, client: BrokerClient) -> None:
    """With repartition, a topic of another size is fine, and the key decides; without, it is refused."""
    topic, name = plain.create(3), new_name("bridge")
    plain.fill(topic, 300, 3)
    client.create_topic(topic, 2)
    with pytest.raises(InvalidArgument, match="--repartition"):
        inward(client, plain, topic, name=name).run(until_caught_up=True)
    inward(client, plain, topic, name=name, repartition=True).run(until_caught_up=True)
    for number in range(2):
        messages = client.fetch(topic, partition=number, limit=1000)
        assert {partition_of_key(m.key or b"", 2) for m in messages} == {number}
        for key in {m.key for m in messages}:
            order = [int(m.value) for m in messages if m.key == key]
            by_source = [[n for n in order if n % 3 == side] for side in range(3)]
            assert by_source == [sorted(some) for some in by_source]


def test_too_large_records_stop_or_are_skipped(plain: PlainKafka) -> None:
    """A record that the broker does not take stops the bridge with its place, or is left out and counted."""
    topic, name = plain.create(1), new_name("bridge")
    for value in (b"a", b"x" * 5000, b"b"):
        plain.put(topic, value)
    plain.flush()
    with running_server(max_message_size=4096) as small, small.client() as client:
        with pytest.raises(TooLarge, match=rf"{topic}/0@1 .*--skip too-large"):
            inward(client, plain, topic, name=name).run(until_caught_up=True)
        bridge = inward(client, plain, topic, name=name, skips=frozenset({"too-large"}))
        bridge.run(until_caught_up=True)
        assert values(client, topic) == [[b"a", b"b"]]
        assert bridge.progress.skipped == 1


def test_deleted_records_are_not_missed_silently(plain: PlainKafka, client: BrokerClient) -> None:
    """Records that Kafka has deleted before they were copied stop the bridge, or are skipped and counted."""
    topic, name = plain.create(1), new_name("bridge")
    plain.fill(topic, 10, 1)
    inward(client, plain, topic, name=name).run(until_caught_up=True)
    plain.fill(topic, 10, 1, first=10)
    plain.delete_before(topic, 0, 15)
    with pytest.raises(OffsetOutOfRange, match="offsets 10 to 14"):
        inward(client, plain, topic, name=name).run(until_caught_up=True)
    bridge = inward(client, plain, topic, name=name, skips=frozenset({"deleted"}))
    bridge.run(until_caught_up=True)
    assert bridge.progress.skipped == 5
    assert values(client, topic) == [[b"%d" % n for n in [*range(10), *range(15, 20)]]]


def test_an_error_says_what_to_do(plain: PlainKafka, client: BrokerClient) -> None:
    """A topic that does not exist, a Kafka that is away, and lost positions are told by code and sentence."""
    with pytest.raises(HeadraceError) as missing:
        inward(client, plain, new_name("missing"), name=new_name("bridge")).run()
    assert missing.value.code == "kafka_topic_not_found"
    topic, name = plain.create(1), new_name("bridge")
    inward(client, plain, topic, name=name).run(until_caught_up=True)
    client.delete_topic(f"bridge.{name}")
    with pytest.raises(HeadraceError) as lost:
        inward(client, plain, topic, name=name).run(until_caught_up=True)
    assert lost.value.code == "bridge_positions_lost"


def test_a_topic_that_was_created_anew_is_refused(plain: PlainKafka, client: BrokerClient) -> None:
    """Positions in a deleted Kafka topic are not taken for positions in a new one of its name."""
    topic, name = plain.create(1), new_name("bridge")
    plain.fill(topic, 10, 1)
    inward(client, plain, topic, name=name).run(until_caught_up=True)
    plain.delete(topic)
    from confluent_kafka.admin import NewTopic

    def made() -> bool:
        asked = plain.admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
        return asked[topic].exception(WAIT_S) is None

    wait_until(made, WAIT_S)
    plain.fill(topic, 20, 1)
    with pytest.raises(Conflict) as refused:
        inward(client, plain, topic, name=name).run(until_caught_up=True)
    assert refused.value.code == "kafka_topic_changed"


def test_the_broker_may_restart(plain: PlainKafka) -> None:
    """A broker that is away for a while only delays the copy."""
    topic = plain.create(1)
    with (
        running_server() as server,
        server.client(delivery_timeout=20, request_timeout=20) as client,
    ):
        with following(inward(client, plain, topic, name=new_name("bridge"))) as bridge:
            plain.fill(topic, 100, 1)
            wait_until(lambda: bridge.progress.copied == 100, WAIT_S)
            server.stop()
            plain.fill(topic, 100, 1, first=100)
            server.start()
            wait_until(lambda: bridge.progress.copied == 200, WAIT_S)
        assert values(client, topic) == [[b"%d" % n for n in range(200)]]


def test_kafka_knows_the_lag(plain: PlainKafka, client: BrokerClient) -> None:
    """The positions are also those of a group in Kafka, for the tools that people have."""
    topic, name = plain.create(1), new_name("bridge")
    plain.fill(topic, 10, 1)
    inward(client, plain, topic, name=name).run(until_caught_up=True)
    group = Consumer({"bootstrap.servers": plain.servers, "group.id": f"headrace-bridge.{name}"})
    try:
        [place] = group.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
        assert place.offset == 10
    finally:
        group.close()
