"""One Headrace node over one Kafka, and ``confluent-kafka``'s producer and consumer on that Kafka, on one machine.

Everything runs in one run, interleaved, and the medians are compared; raw numbers go to ``benchmarks/results/cluster_*.json``.

- *publish*: messages a second, all stored with ``acks=all``. ``produce`` and ``publish_nowait`` are one call for each message,
  ``publish_many`` is one for ten thousand, which waits for its answer; ``publish_batch`` does not wait, as ``produce`` does not.
- *consume*: messages a second, of values in the hands of Python. ``fetch`` reads by offset, as Kafka's consumer does; a subscription
  delivers and acknowledges each message, which Kafka's consumer does not do.
- *latency*: one message at a time, until it is stored.
- *partitions*: the same batches of a thousand messages, spread over 10 and over 1,000 partitions.
- *forwarding*: two nodes; a client of the owner, a client of the other node, which forwards, and one that goes from there to the owner.
- *failover*: two nodes; the owner of a partition is killed; until a publish to it is answered again.
- *drain*: two nodes; the longest time between two answers of a publisher while the owner of its partition is drained.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.harness import (
    RESULTS,
    Benchmark,
    Case,
    data_directory,
    messages,
    rate,
    write,
)
from benchmarks.spark.kafka import KAFKA, Node
from headrace import BrokerClient
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import ServerProcess, server_process

SESSION_S = 6.0
"""Of nodes, for the failover; the shortest that Kafka allows."""
WAIT_S = 120.0
UNDER_WAY = 64
NAMES = ("publish", "consume", "latency", "partitions", "forwarding", "failover", "drain")
_numbers = itertools.count()
silent = logging.getLogger("benchmarks.kafka")
"""For librdkafka, which says that Kafka is gone when it is stopped at the end."""
silent.addHandler(logging.NullHandler())
silent.propagate = False


def new_name(what: str) -> str:
    return f"{what}-{next(_numbers)}"


class Rig:
    """Kafka, a node over it, and a client of each."""

    def __init__(
        self,
        kafka: Node,
        node: ServerProcess,
        client: BrokerClient,
        stack: ExitStack,
        *,
        quick: bool,
    ):
        self.kafka, self.node, self.client, self.quick = kafka, node, client, quick
        self.stack = stack
        self.admin = AdminClient({"bootstrap.servers": kafka.servers}, logger=silent)
        self.values = messages(10_000)

    @property
    def count(self) -> int:
        return 50_000 if self.quick else 300_000

    def plain_topic(self, partitions: int = 1) -> str:
        name = new_name("plain")
        new = NewTopic(name, num_partitions=partitions, replication_factor=1)
        self.admin.create_topics([new])[name].result(WAIT_S)
        return name

    def topic(self, partitions: int = 1) -> str:
        name = new_name("topic")
        self.client.create_topic(name, partitions)
        return name

    def producer(self, **more: Any) -> Producer:
        settings = {
            "bootstrap.servers": self.kafka.servers,
            "acks": "all",
            "queue.buffering.max.messages": 1_000_000,
            "socket.nagle.disable": True,
        }
        return Producer({**settings, **more}, logger=silent)

    def pipelined(
        self,
        topic: str,
        batches: list[tuple[int, list[bytes]]],
        client: BrokerClient | None = None,
    ) -> None:
        """Publish (partition, values) as whole batches, without waiting for each."""
        client = client or self.client
        under_way: deque[Any] = deque()
        for partition, values in batches:
            if len(under_way) >= UNDER_WAY:
                under_way.popleft().result()
            batch = encode(Columns(values))
            under_way.append(client.publish_batch_nowait(topic, batch, partition=partition))
        for each in under_way:
            each.result()

    def all_values(self) -> Iterator[bytes]:
        for _ in range(self.count // len(self.values)):
            yield from self.values


# --- publish --------------------------------------------------------------------------------------
def produce(rig: Rig, topic: str, producer: Producer) -> None:
    for number, value in enumerate(rig.all_values()):
        producer.produce(topic, value)
        if not number & 1023:
            producer.poll(0)
    if producer.flush(WAIT_S):
        raise TimeoutError("Kafka has not answered")


def publish(rig: Rig) -> Benchmark:
    producer = rig.producer(**{"linger.ms": 5})
    plain, single, many, whole = rig.plain_topic(), rig.topic(), rig.topic(), rig.topic()
    client, count = rig.client, rig.count

    def nowait() -> None:
        for value in rig.all_values():
            client.publish_nowait(single, value)
        client.flush()

    def bundles() -> None:
        for _ in range(count // len(rig.values)):
            client.publish_many(many, rig.values)

    def batches() -> None:
        rig.pipelined(whole, [(0, rig.values)] * (count // len(rig.values)))

    reference = "confluent-kafka: produce"
    return Benchmark(
        "cluster_publish",
        "100-byte messages a second, one publisher, stored with acks=all",
        [
            Case(reference, lambda: rate(count, lambda: produce(rig, plain, producer)), "/s"),
            Case("publish_nowait", lambda: rate(count, nowait), "/s", reference=reference),
            Case("publish_many, one after the other", lambda: rate(count, bundles), "/s", reference=reference),
            Case("publish_batch, several under way", lambda: rate(count, batches), "/s", 3.0, reference=reference, relative=True),
        ],
    )  # fmt: skip


# --- consume --------------------------------------------------------------------------------------
def consume(rig: Rig) -> Benchmark:
    plain, topic = rig.plain_topic(), rig.topic()
    produce(rig, plain, rig.producer(**{"linger.ms": 5}))
    for _ in range(rig.count // len(rig.values)):
        rig.client.publish_many(topic, rig.values)
    client, count = rig.client, rig.count

    def kafka() -> None:
        settings = {
            "bootstrap.servers": rig.kafka.servers,
            "group.id": new_name("group"),
            "enable.auto.commit": False,
            "queued.min.messages": 1_000_000,
        }
        consumer = Consumer(settings, logger=silent)
        consumer.assign([TopicPartition(plain, 0, 0)])
        left = count
        while left:
            found = consumer.consume(10_000, WAIT_S)
            left -= len([message.value() for message in found if message.error() is None])
        consumer.close()

    def fetch() -> None:
        at = 0
        while at < count:
            for batch in client.fetch_batches(topic, at):
                at += len(batch.values())

    def subscription() -> None:
        left = count
        with client.subscription(new_name("group"), topic, prefetch=20_000) as consumer:
            for message in consumer:
                message.ack()
                left -= 1
                if not left:
                    break
        client.flush()

    reference = "confluent-kafka: consume"
    return Benchmark(
        "cluster_consume",
        "100-byte messages a second, one consumer",
        [
            Case(reference, lambda: rate(count, kafka), "/s"),
            Case("fetch", lambda: rate(count, fetch), "/s", 3.0, reference=reference, relative=True),
            Case("subscription, each acked", lambda: rate(count, subscription), "/s", reference=reference),
        ],
    )  # fmt: skip


# --- latency --------------------------------------------------------------------------------------
def latency(rig: Rig) -> Benchmark:
    plain, topic = rig.plain_topic(), rig.topic()
    producer = rig.producer(**{"linger.ms": 0})
    count = 200 if rig.quick else 1_000
    value = rig.values[0]

    def one() -> None:
        producer.produce(plain, value)
        if producer.flush(WAIT_S):
            raise TimeoutError("Kafka has not answered")

    def median(work: Callable[[], object]) -> float:
        work()
        found = []
        for _ in range(count):
            started = time.perf_counter()
            work()
            found.append((time.perf_counter() - started) * 1000)
        return statistics.median(found)

    reference = "confluent-kafka: produce and flush"
    bare = Case(reference, lambda: median(one), "ms p50", smaller=True)
    ours = Case(
        "publish",
        lambda: median(lambda: rig.client.publish(topic, value)),
        "ms p50",
        smaller=True,
        reference=reference,
    )
    more = Case(
        "publish, more than produce",
        lambda: ours.samples[-1] - bare.samples[-1],
        "ms",
        3.0,
        smaller=True,
        is_repeated=True,
    )
    return Benchmark(
        "cluster_latency", "one 100-byte message at a time, until it is stored", [bare, ours, more]
    )


# --- partitions -----------------------------------------------------------------------------------
def partitions(rig: Rig) -> Benchmark:
    few, many = rig.topic(10), rig.topic(1_000)
    batches = 200 if rig.quick else 2_000
    batch = rig.values[:1_000]

    def spread(topic: str, count: int) -> None:
        rig.pipelined(topic, [(number % count, batch) for number in range(batches)])

    spread(many, 1_000)  # each partition has been used once
    total = batches * len(batch)
    reference = "10 partitions"
    return Benchmark(
        "cluster_partitions",
        "batches of 1,000 messages in turn to each partition; messages a second",
        [
            Case(reference, lambda: rate(total, lambda: spread(few, 10)), "/s"),
            Case("1,000 partitions", lambda: rate(total, lambda: spread(many, 1_000)), "/s", 0.8, reference=reference, relative=True),
        ],
    )  # fmt: skip


# --- two nodes ------------------------------------------------------------------------------------
class Pair:
    """Two nodes of a cluster of their own, and a topic with one partition that the first of them owns."""

    def __init__(self, rig: Rig, stack: ExitStack):
        settings = _settings(rig.kafka, new_name("pair"))
        self.nodes = []
        for _ in range(2):
            port = _free_port()
            place = {"port": port, "advertise": f"127.0.0.1:{port}"}
            self.nodes.append(stack.enter_context(server_process(**settings, **place)))
        self.owner, self.other = self.nodes
        self._stack = stack
        client = self.client(self.other)
        _wait(lambda: len([each for each in _nodes(client) if each["slots"]]) == 2)
        self.address = f"{self.owner.host}:{self.owner.port}"
        while True:
            self.topic = new_name("topic")
            client.create_topic(self.topic)
            _wait(lambda: client.topic_map(self.topic)["owners"] != [None])
            if client.topic_map(self.topic)["owners"] == [self.address]:
                break

    def client(self, *nodes: ServerProcess) -> BrokerClient:
        servers = [f"{node.host}:{node.port}" for node in nodes]
        client = BrokerClient(servers=servers, delivery_timeout=WAIT_S, request_timeout=WAIT_S)
        return self._stack.enter_context(client)


def _nodes(client: BrokerClient) -> list[Any]:
    return client.cluster_status()["nodes"]


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes have not divided the slots")
        time.sleep(0.1)


def forwarding(rig: Rig) -> Benchmark:
    pair = Pair(rig, rig.stack)
    count = rig.count
    there, forwarded = pair.client(pair.owner), pair.client(pair.other)
    direct = pair.client(pair.other)
    assert forwarded._core.owners.is_active
    forwarded._core.owners._closed = True  # it connects to no other node

    def batches(client: BrokerClient) -> Callable[[], float]:
        each = [(0, rig.values)] * (count // len(rig.values))
        return lambda: rate(count, lambda: rig.pipelined(pair.topic, each, client))

    def singly(client: BrokerClient) -> Callable[[], float]:
        def publish() -> None:
            for value in rig.all_values():
                client.publish_nowait(pair.topic, value)
            client.flush()

        return lambda: rate(count, publish)

    cases = []
    for what, publish in (("publish_batch", batches), ("publish_nowait", singly)):
        reference = f"{what}, a client of the owner"
        cases += [
            Case(reference, publish(there), "/s"),
            Case(f"{what}, the other node forwards", publish(forwarded), "/s", 0.6, reference=reference, relative=True),
            Case(f"{what}, from the other node by the map", publish(direct), "/s", 0.9, reference=reference, relative=True),
        ]  # fmt: skip
    for case in cases:
        case.run()  # connections are opened, and the map is learned
    return Benchmark("cluster_forwarding", "two nodes; 100-byte messages a second", cases)


def failover(rig: Rig) -> Benchmark:
    """The owner of a partition is killed."""

    def once() -> float:
        with ExitStack() as stack:
            pair = Pair(rig, stack)
            client = pair.client(pair.owner, pair.other)
            client.publish(pair.topic, b"before")
            pair.owner.kill()
            started = time.perf_counter()
            client.publish(pair.topic, b"after")
            return time.perf_counter() - started

    target = SESSION_S + 3
    case = Case("from a kill to the next answer", once, "s", target, smaller=True)
    return Benchmark("cluster_failover", f"two nodes, session of {SESSION_S:g} seconds", [case], 3)


def drain(rig: Rig) -> Benchmark:
    """The owner of a partition is drained while somebody publishes to it, one message after the other."""

    def once() -> float:
        with ExitStack() as stack:
            pair = Pair(rig, stack)
            client, operator = pair.client(pair.owner, pair.other), pair.client(pair.other)
            client.publish(pair.topic, b"before")
            drained = threading.Thread(target=operator.drain_node, args=(pair.address,))
            drained.start()
            longest, last, until = 0.0, time.perf_counter(), float("inf")
            while last < until:
                client.publish(pair.topic, b"meanwhile")
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                if until == float("inf") and not drained.is_alive():
                    until = now + 2.0  # what follows the drain belongs to it
            drained.join()
            owners = operator.topic_map(pair.topic)["owners"]
            if owners in ([None], [pair.address]):
                raise RuntimeError(f"the partition has not moved: {owners}")
            return longest

    case = Case("longest time without an answer", once, "s", 1.0, smaller=True)
    return Benchmark("cluster_drain", "two nodes, one is drained", [case], 3)


def _settings(kafka: Node, cluster: str) -> dict[str, Any]:
    return {
        "engine": "kafka",
        "kafka_servers": kafka.servers,
        "cluster": cluster,
        "kafka_session": SESSION_S,
        "retention_hours": None,
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


BENCHMARKS: dict[str, Callable[[Rig], Benchmark]] = {
    "publish": publish,
    "consume": consume,
    "latency": latency,
    "partitions": partitions,
    "forwarding": forwarding,
    "failover": failover,
    "drain": drain,
}


@contextmanager
def rigged(quick: bool) -> Iterator[Rig]:
    with data_directory() as directory, ExitStack() as stack:
        kafka = Node(
            directory / "kafka",
            more="auto.create.topics.enable=false\ngroup.initial.rebalance.delay.ms=0\n",
        )
        stack.callback(kafka.stop)
        kafka.start()
        node = stack.enter_context(server_process(**_settings(kafka, "bench"), advertise="node"))
        client = stack.enter_context(node.client(delivery_timeout=WAIT_S, request_timeout=WAIT_S))
        yield Rig(kafka, node, client, stack, quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer messages, three rounds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the raw numbers go")
    given = parser.parse_args()
    unknown = set(given.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    with rigged(given.quick) as rig:
        for name in given.names or NAMES:
            benchmark = BENCHMARKS[name](rig)
            command = "python -m benchmarks.cluster " + " ".join(sys.argv[1:])
            benchmark.facts |= {"command": command, "kafka": KAFKA}
            benchmark.run(quick=given.quick)
            benchmark.print()
            write(benchmark, given.out)


if __name__ == "__main__":
    main()
