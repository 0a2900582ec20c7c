"""Plain Kafka topics for the tests of the bridge: made, filled and read with Kafka's own clients."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from headrace import BrokerClient
from headrace.bridge.inward import InwardBridge
from headrace.bridge.kafka import KafkaPlace, silent
from headrace.bridge.outward import OutwardBridge
from headrace.bridge.routes import parse_routes
from headrace.bridge.running import Bridge

_numbers = itertools.count()
WAIT_S = 60.0


def new_name(what: str) -> str:
    """A name that no other test uses."""
    return f"{what}-{os.getpid()}-{next(_numbers)}"


class Seen(NamedTuple):
    """A Kafka record, as a consumer sees it."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int


class PlainKafka:
    def __init__(self, servers: str):
        self.servers = servers
        self.admin = AdminClient({"bootstrap.servers": servers}, logger=silent)
        self._new_producer()

    def _new_producer(self) -> None:
        self.producer = Producer(
            {"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 5},
            logger=silent,
        )

    def create(self, partitions: int = 1, **config: str) -> str:
        name = new_name("plain")
        new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        self.admin.create_topics([new])[name].result(WAIT_S)
        return name

    def grow(self, topic: str, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(WAIT_S)
        self._new_producer()  # the old one learns of it only after minutes

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(WAIT_S)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        place = TopicPartition(topic, partition, offset)
        self.admin.delete_records([place])[place].result(WAIT_S)

    def put(self, topic: str, value: bytes | None, key: bytes | None = None, **more: Any) -> None:
        while True:
            try:
                self.producer.produce(topic, value, key, **more)
                return
            except BufferError:
                self.producer.poll(0.1)

    def flush(self) -> None:
        assert self.producer.flush(WAIT_S) == 0

    def fill(self, topic: str, count: int, partitions: int, first: int = 0) -> None:
        for number in range(first, first + count):
            key = b"k%d" % (number % 7)
            self.put(topic, b"%d" % number, key, partition=number % partitions)
        self.flush()

    def read(self, topic: str) -> list[Seen]:
        """Everything that is committed, partition by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": new_name("reader"),
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        partitions = self.admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        found: dict[int, list[Seen]] = {number: [] for number in partitions}
        left = set(partitions)
        while left:
            message = consumer.poll(WAIT_S)
            assert message is not None, "Kafka does not answer"
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                left.discard(message.partition())
                continue
            found[message.partition()].append(
                Seen(
                    message.partition(),
                    message.key(),
                    message.value(),
                    message.headers() or [],
                    message.timestamp()[1],
                )
            )
        consumer.close()
        return [seen for number in sorted(found) for seen in found[number]]


def inward(
    client: BrokerClient, kafka: PlainKafka, *topics: str, name: str, **more: Any
) -> InwardBridge:
    routes = parse_routes(topics, inward=True)
    return InwardBridge(client, KafkaPlace(kafka.servers), routes, name, **more)


def outward(
    client: BrokerClient, kafka: PlainKafka, *topics: str, name: str, **more: Any
) -> OutwardBridge:
    routes = parse_routes(topics, inward=False)
    return OutwardBridge(client, KafkaPlace(kafka.servers), routes, name, **more)


@contextmanager
def following(bridge: Bridge) -> Iterator[Bridge]:
    """It runs in a thread until the end of the block; its error is raised there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bridge.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield bridge
    finally:
        bridge.stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
