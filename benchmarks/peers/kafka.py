"""Apache Kafka 4 in KRaft mode, through confluent-kafka, a client in C."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.driver import Driver, Ready, Seen

COMMIT_EVERY = 1000
FETCH = 10_000
ANSWER_S = 120.0


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        config = {"flush.messages": "1"} if mode == "fsync" else {}
        self._admin = AdminClient({"bootstrap.servers": address})
        new = NewTopic(topic, num_partitions=1, replication_factor=1, config=config)
        try:
            self._admin.create_topics([new])[topic].result(60)
        except KafkaException as error:  # the publisher of the latency finds the consumer's topic
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
        self._producer = self._new_producer()
        self._swift: Producer | None = None
        self._alone: Producer | None = None
        self._consumers: list[Consumer] = []

    def _new_producer(self, **more: Any) -> Producer:
        return Producer(
            {
                "bootstrap.servers": self.address,
                "acks": "all",
                "queue.buffering.max.messages": 1_000_000,
                # Kafka's own client has the same default. Without it nothing is batched that does not linger.
                "max.in.flight.requests.per.connection": 5,
                "socket.nagle.disable": True,
                **more,
            }
        )

    def close(self) -> None:
        for consumer in self._consumers:
            consumer.close()

    def drop(self) -> None:
        self._admin.delete_topics([self.topic])[self.topic].result(60)

    # --- publishing -------------------------------------------------------------------------
    def _at_once(self) -> Producer:
        """Without lingering, for those who wait for each."""
        if self._swift is None:
            self._swift = self._new_producer(**{"linger.ms": 0})
            self._swift.list_topics(self.topic, timeout=60)  # now it is connected
        return self._swift

    def _flush(self, producer: Producer) -> None:
        if producer.flush(ANSWER_S):
            raise TimeoutError("Kafka has not answered")

    def put(self, value: bytes) -> None:
        producer = self._at_once()
        producer.produce(self.topic, value)
        self._flush(producer)

    def send_all(self, values: Iterable[bytes]) -> None:
        produce, poll = self._producer.produce, self._producer.poll
        for number, value in enumerate(values):
            produce(self.topic, value)
            if not number & 1023:
                poll(0)
        self._flush(self._producer)

    def send_batch(self, values: Sequence[bytes]) -> None:
        queued = self._producer.produce_batch(self.topic, [{"value": value} for value in values])
        assert queued == len(values), "the queue of the client is full"
        self._flush(self._producer)

    def send_singly(self, values: Sequence[bytes]) -> None:
        if self._alone is None:
            self._alone = self._new_producer(**{"linger.ms": 0, "batch.num.messages": 1})
        for value in values:
            self._alone.produce(self.topic, value)
        self._flush(self._alone)

    def send_paced(self, due: Iterable[list[bytes]]) -> None:
        producer = self._at_once()
        for value in chain.from_iterable(due):
            producer.produce(self.topic, value)
            producer.poll(0)
        self._flush(producer)

    # --- reading ----------------------------------------------------------------------------
    def _consumer(self, group: str, **more: Any) -> Consumer:
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": f"{self.topic}-{group}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
                "socket.nagle.disable": True,
                **more,
            }
        )
        self._consumers.append(consumer)
        return consumer

    def _reader(self, group: str) -> Consumer:
        """One that reads a log: no group decides what it gets."""
        consumer = self._consumer(group)
        consumer.assign([TopicPartition(self.topic, 0, 0)])
        return consumer

    def read(self, count: int, ready: Ready) -> int:
        consumer = self._reader("reader")
        while not _good(consumer.consume(1, timeout=10)):  # it is connected when it has the first
            pass
        consumer.seek(TopicPartition(self.topic, 0, 0))
        ready()
        found = 0
        while found < count:
            found += len(_good(consumer.consume(min(FETCH, count - found), timeout=10)))
        return found

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        """Kafka's groups have no ack for a message; a commit for each thousand is as near as it comes. The latency
        is measured with commits in the background, every five seconds, which is the default."""
        consumer = self._consumer("q", **({"enable.auto.commit": True} if seen else {}))
        consumer.subscribe([self.topic])
        early: list[Message] = []
        while not consumer.assignment():
            early += _good(consumer.consume(1, timeout=0.01))
        ready()
        left = count - len(early)
        while left:
            if seen:
                one = consumer.poll(10)
                messages = _good([one] if one is not None else [])
                for message in messages:
                    seen(message.value() or b"")
            else:
                messages = _good(consumer.consume(min(COMMIT_EVERY, left), timeout=10))
                if messages:
                    consumer.commit(asynchronous=True)
            left -= len(messages)
        if not seen:
            consumer.commit(asynchronous=False)

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        consumers = [self._reader(f"follower-{number}") for number in range(subscribers)]
        self.send_all(values[:1])
        for consumer in consumers:  # each is connected when it has the first
            while not _good(consumer.consume(1, timeout=10)):
                pass

        def follow(consumer: Consumer) -> None:
            left = len(values)
            while left:
                left -= len(_good(consumer.consume(min(FETCH, left), timeout=1)))

        threads = [threading.Thread(target=follow, args=(consumer,)) for consumer in consumers]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        self.send_all(values)
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def _good(messages: list[Message]) -> list[Message]:
    """An error comes as a message. The last one is enough: asking each would cost as much as reading it."""
    if messages and (error := messages[-1].error()):
        raise KafkaException(error)
    return messages
