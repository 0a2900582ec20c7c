"""Topics of a real broker are copied into a real Kafka, exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import orjson
import pytest

from headrace import BrokerClient
from headrace.bridge.outward import OutwardBridge
from headrace.errors import Conflict, HeadraceError, TooLarge
from headrace.testing import RunningServer, running_server, wait_until
from tests.bridge.rig import WAIT_S, PlainKafka, following, inward, new_name, outward

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


def numbers(plain: PlainKafka, topic: str) -> list[int]:
    return sorted(int(seen.value or b"-1") for seen in plain.read(topic))


def test_messages_keep_everything(plain: PlainKafka, client: BrokerClient) -> None:
    """Key, value, headers, time, partition and order of messages are the same in Kafka."""
    topic, target = new_name("out"), plain.create(2)
    client.create_topic(topic, 2)
    client.publish(topic, b"one", {"a": "1"}, key=b"k", partition=1)
    [stored] = client.fetch(topic, partition=1)
    client.publish(topic, b"two", partition=1)
    bridge = outward(client, plain, f"{topic}={target}", name=new_name("bridge"))
    bridge.run(until_caught_up=True)
    first, second = plain.read(target)
    assert first == (1, b"k", b"one", [("a", b"1")], stored.timestamp)
    assert (second.partition, second.key, second.value) == (1, None, b"two")
    assert bridge.progress.copied == 2


def test_there_and_back(plain: PlainKafka, client: BrokerClient) -> None:
    """What went from Kafka to Headrace and back is what it was: tombstones, headers, times."""
    topic, target = plain.create(1), plain.create(1)
    plain.put(topic, None, b"k", timestamp=1_700_000_000_000, headers=[("a", b"\xff"), ("a", None)])
    plain.put(topic, b"", b"k", timestamp=1_600_000_000_000, headers=[("b", b"2")])
    plain.flush()
    inward(client, plain, topic, name=new_name("bridge")).run(until_caught_up=True)
    outward(client, plain, f"{topic}={target}", name=new_name("bridge")).run(until_caught_up=True)
    assert plain.read(target) == plain.read(topic)


def test_the_next_run_continues(plain: PlainKafka, client: BrokerClient) -> None:
    """A second run copies what is new; the subscription shows how far it is."""
    topic, target, name = new_name("out"), plain.create(1), new_name("bridge")
    for first in (0, 1000):
        client.publish_many(topic, [b"%d" % n for n in range(first, first + 1000)])
        outward(client, plain, f"{topic}={target}", name=name).run(until_caught_up=True)
    assert [int(seen.value or b"") for seen in plain.read(target)] == list(range(2000))
    assert client.subscription_stats(f"bridge.{name}", topic)["lag"] == 0


def test_it_follows_several_topics(plain: PlainKafka, client: BrokerClient) -> None:
    """Messages that are published while it runs arrive, and keys find a partition where Kafka has fewer."""
    one, two = new_name("out"), new_name("out")
    into = plain.create(1), plain.create(2)
    client.create_topic(one)
    client.create_topic(two, 3)
    pairs = f"{one}={into[0]}", f"{two}={into[1]}"
    with following(outward(client, plain, *pairs, name=new_name("bridge"))) as bridge:
        client.publish_many(one, [b"%d" % n for n in range(100)])
        keys = [b"k%d" % (n % 5) for n in range(100)]
        client.publish_many(two, [b"%d" % n for n in range(100)], keys=keys)
        wait_until(lambda: bridge.progress.copied == 200, WAIT_S)
    assert numbers(plain, into[0]) == list(range(100))
    assert numbers(plain, into[1]) == list(range(100))


def test_direct_and_expired_messages_stay(plain: PlainKafka, client: BrokerClient) -> None:
    """What the bridge's subscription would not get is not copied."""
    topic, target = new_name("out"), plain.create(1)
    client.publish(topic, b"1", to="somebody")
    client.publish(topic, b"2")
    client.publish(topic, b"3", ttl=0.001)
    wait_until(lambda: not _is_alive(client, topic), WAIT_S)
    outward(client, plain, f"{topic}={target}", name=new_name("bridge")).run(until_caught_up=True)
    assert numbers(plain, target) == [2]


def _is_alive(client: BrokerClient, topic: str) -> bool:
    [*_, batch] = client.fetch_batches(topic, 2)
    expiry = (batch.expiry() or [0])[-1]
    return expiry > datetime.now(UTC).timestamp() * 1000


def test_the_newer_of_two_takes_over(plain: PlainKafka, client: BrokerClient) -> None:
    """Kafka fences off the older one of two bridges with one name, and nothing is doubled."""
    topic, target, name = new_name("out"), plain.create(1), new_name("bridge")
    pair = f"{topic}={target}"
    client.publish_many(topic, [b"%d" % n for n in range(100)])
    with (  # noqa: PT012 - the end of the block raises it
        pytest.raises(Conflict) as refused,
        following(outward(client, plain, pair, name=name)) as old,
    ):
        wait_until(lambda: old.progress.copied == 100, WAIT_S)
        with following(outward(client, plain, pair, name=name)) as new:
            wait_until(lambda: new.progress.is_caught_up, WAIT_S)
            client.publish_many(topic, [b"%d" % n for n in range(100, 200)])
            wait_until(lambda: new.progress.copied + old.progress.copied == 200, WAIT_S)
    assert refused.value.code == "bridge_replaced"
    assert numbers(plain, target) == list(range(200))


def test_too_large_messages_stop_or_are_skipped(plain: PlainKafka, client: BrokerClient) -> None:
    """A message that Kafka's topic does not take stops the bridge with its place, or is left out."""
    topic, target = new_name("out"), plain.create(1, **{"max.message.bytes": "4096"})
    name, pair = new_name("bridge"), f"{topic}={target}"
    client.publish_many(topic, [b"1", b"2" * 5000, b"3"])
    with pytest.raises(TooLarge, match=rf"{topic}/0@1 .*--skip too-large"):
        outward(client, plain, pair, name=name).run(until_caught_up=True)
    assert plain.read(target) == []
    bridge = outward(client, plain, pair, name=name, skips=frozenset({"too-large"}))
    bridge.run(until_caught_up=True)
    assert numbers(plain, target) == [1, 3]
    assert bridge.progress.skipped == 1


def test_a_missing_topic_is_told(plain: PlainKafka, client: BrokerClient) -> None:
    """The topic must exist in Kafka."""
    topic = new_name("out")
    client.publish(topic, b"1")
    with pytest.raises(HeadraceError) as missing:
        outward(client, plain, topic, name=new_name("bridge")).run(until_caught_up=True)
    assert missing.value.code == "kafka_topic_not_found"


def test_a_topic_that_was_created_anew_is_refused(plain: PlainKafka, client: BrokerClient) -> None:
    """Positions in a deleted topic are not taken for positions in a new one of its name."""
    topic, target, name = new_name("out"), plain.create(1), new_name("bridge")
    client.publish(topic, b"1")
    outward(client, plain, f"{topic}={target}", name=name).run(until_caught_up=True)
    client.delete_topic(topic)
    client.publish(topic, b"2")
    with pytest.raises(Conflict) as refused:
        outward(client, plain, f"{topic}={target}", name=name).run(until_caught_up=True)
    assert refused.value.code == "topic_changed"


def test_half_a_transaction_does_not_count(plain: PlainKafka, client: BrokerClient) -> None:
    """Positions whose begin or end is missing are not believed: the copy begins before them."""
    topic, target, name = new_name("out"), plain.create(1), new_name("bridge")
    pair = f"{topic}={target}"
    client.publish_many(topic, [b"%d" % n for n in range(10)])
    outward(client, plain, pair, name=name).run(until_caught_up=True)
    client.publish_many(topic, [b"%d" % n for n in range(10, 20)])
    ledger = f"headrace-bridge.{name}"
    last = orjson.loads(plain.read(ledger)[-1].value or b"")
    last["positions"][topic]["offsets"]["0"] = 20
    half = orjson.dumps({**last, "number": last["number"] + 1, "run": "another"})
    plain.put(ledger, half, b"end")  # as if its begin was given up
    plain.flush()
    outward(client, plain, pair, name=name).run(until_caught_up=True)
    assert numbers(plain, target) == list(range(20))


def test_kafka_may_be_away(kafka_node: object, client: BrokerClient) -> None:
    """A Kafka that hangs only delays the copy, and the bridge says why."""
    import signal

    plain = PlainKafka(kafka_node.servers)  # type: ignore[attr-defined]
    topic, target = new_name("out"), plain.create(1)
    client.publish(topic, b"0")
    bridge: OutwardBridge = outward(client, plain, f"{topic}={target}", name=new_name("bridge"))
    with following(bridge):
        wait_until(lambda: bridge.progress.copied == 1, WAIT_S)
        kafka_node.send(signal.SIGSTOP)  # type: ignore[attr-defined]
        try:
            client.publish_many(topic, [b"%d" % n for n in range(1, 100)])
        finally:
            kafka_node.send(signal.SIGCONT)  # type: ignore[attr-defined]
        wait_until(lambda: bridge.progress.copied == 100, WAIT_S)
    assert numbers(plain, target) == list(range(100))
