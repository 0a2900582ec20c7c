"""Reading what comes after the end of many partitions, as one consumer in a thread of its own.

A tail gives the loop a few chunks and then waits until the loop has read them: memory is bounded. Checkpoints are committed as
offsets of the consumer's group; they are hints, and nothing depends on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from headrace.engine.kafka.replica import Replica

logger = logging.getLogger("headrace.kafka")
CHUNK_RECORDS = 500
CHUNKS_IN_FLIGHT = 4
POLL_S = 0.05
METADATA_S = 2.0
COMMIT_EVERY_S = 1.0
LAST_COMMIT_S = 2.0
TOPICS_ASKED_SINGLY = 10
RETRY_S = 0.2


class Tail:
    """Reads every new record of the partitions that it follows, in a thread of its own.

    ``run_there`` runs the reading where the replicas belong: on the loop, or at once.
    """

    def __init__(
        self,
        make_consumer: Callable[..., Consumer],
        closing: threading.Event,
        run_there: Callable[[Callable[[], None]], None],
    ):
        self.consumer = make_consumer(on_commit=self.committed)
        self._closing = closing
        self._run_there = run_there
        self._replicas: dict[tuple[str, int], Replica] = {}
        self._room = threading.Semaphore(CHUNKS_IN_FLIGHT)
        self._orders: SimpleQueue[Callable[[], object]] = SimpleQueue()
        """For the consumer: only its own thread may call it, else it may block for ever."""
        self._hints: dict[tuple[str, int], int] = {}
        self._committing = False
        self._committed = time.monotonic()
        self.on_read: Callable[[], None] = lambda: None
        """Called after some records were read, where they are read."""

    def follow(self, replicas: Iterable[Replica]) -> None:
        replicas = [each for each in replicas if (each.topic, each.number) not in self._replicas]
        for each in replicas:
            self._replicas[each.topic, each.number] = each
        places = [TopicPartition(each.topic, each.number, each.position) for each in replicas]

        def assign() -> None:
            learn(self.consumer, {place.topic for place in places}, METADATA_S)
            self.consumer.incremental_assign(places)

        self._orders.put(assign)

    def leave(self, replica: Replica) -> None:
        if self._replicas.pop((replica.topic, replica.number), None) is not None:
            place = TopicPartition(replica.topic, replica.number)
            self._orders.put(lambda: self.consumer.incremental_unassign([place]))

    def remember(self, replica: Replica, position: int) -> None:
        self._hints[replica.topic, replica.number] = position

    def _commit(self) -> None:
        """Commit the hints, if there are new ones: all together, once in a while, because nothing waits for them."""
        if self._hints and time.monotonic() - self._committed >= COMMIT_EVERY_S:
            hints, self._hints = self._hints, {}
            places = [TopicPartition(*place, position) for place, position in hints.items()]
            self._committing = True
            self._committed = time.monotonic()
            self.consumer.commit(offsets=places, asynchronous=True)

    def _finish(self) -> None:
        """The last hints; Kafka has a moment to answer."""
        self._committed = -COMMIT_EVERY_S
        deadline = time.monotonic() + LAST_COMMIT_S
        try:
            self._commit()
            while self._committing and time.monotonic() < deadline:
                self.consumer.poll(POLL_S)
        except KafkaException as error:
            logger.info("the last checkpoints are not remembered: %s", error)

    def committed(self, error: KafkaError | None, _places: object) -> None:
        """Called by the consumer."""
        self._committing = False
        if error is not None:
            logger.info("checkpoints are not remembered: %s", error)

    def wake(self) -> None:
        self._room.release()

    def run(self) -> None:
        while not self._closing.is_set():
            try:
                while not self._orders.empty():
                    self._orders.get()()
                self._commit()
                found = some(self.consumer, self._failed)
            except KafkaException as error:
                logger.warning("Kafka: %s", error)
                self._closing.wait(RETRY_S)
                continue
            if not found:
                continue
            self._room.acquire()
            try:
                self._run_there(partial(self._read, found))
            except RuntimeError:
                break  # the loop is closed
        self._finish()

    def _read(self, found: list[Any]) -> None:
        self._room.release()
        for message in found:
            replica = self._replicas.get((message.topic(), message.partition()))
            if replica is not None:
                try:
                    replica.read(message.offset(), message.key(), message.value())
                except Exception:  # the other records must be read all the same
                    logger.exception("%s/%d", replica.topic, replica.number)
        self.on_read()

    def _failed(self, message: Any) -> None:
        """Records that were not read yet are deleted: only a later owner can have done that."""
        replica = self._replicas.get((message.topic(), message.partition()))
        if message.error().code() == KafkaError._AUTO_OFFSET_RESET and replica is not None:
            self._run_there(replica.overtaken)


def learn(client: Consumer | Producer, topics: set[str], timeout: float) -> None:
    """Ask for the topics' leaders: librdkafka itself looks only once a second for topics that are new to it."""
    try:
        if len(topics) > TOPICS_ASKED_SINGLY:
            client.list_topics(timeout=timeout)
            return
        for topic in topics:
            client.list_topics(topic, timeout=timeout)
    except KafkaException as error:
        logger.info("Kafka does not tell the leaders of %d topics yet: %s", len(topics), error)


def some(consumer: Consumer, failed: Callable[[Any], None] = lambda message: None) -> list[Any]:
    """What has arrived; waits a moment for the first record. ``KafkaException`` for what cannot be read on."""
    first = consumer.poll(POLL_S)
    if first is None:
        return []
    found = [first, *consumer.consume(CHUNK_RECORDS, 0)]
    good = [message for message in found if message.error() is None]
    for message in found:
        error = message.error()
        if error is not None:
            logger.info("Kafka: %s/%s: %s", message.topic(), message.partition(), error)
            failed(message)
            if not good and not error.retriable():
                raise KafkaException(error)
    return good
