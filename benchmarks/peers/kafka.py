"""Apache Kafka 4 in KRaft mode, through confluent-kafka, a client in C."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.driver import Driver, Seen
from benchmarks.peers.fetching import Missing
from benchmarks.peers.server import Server, free_port

COMMIT_EVERY = 1000


class Broker(Server):
    name = "Kafka"
    modes: ClassVar = {
        "default": "acks=all on one node, no sync (the default)",
        "fsync": "acks=all, flush.messages=1: each batch is synced before its answer",
    }

    def __init__(self, mode: str, directory: Path):
        super().__init__(mode, directory)
        self._controller = free_port()

    @classmethod
    def fetch(cls) -> None:
        jars()

    def command(self) -> list[str]:
        settings = self.directory / "server.properties"
        settings.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.voters=1@127.0.0.1:{self._controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller}\n"
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{self.port}\n"
            "controller.listener.names=CONTROLLER\n"
            f"log.dirs={self.directory / 'data'}\n"
            "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=4\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
            "share.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
            "group.initial.rebalance.delay.ms=0\nauto.create.topics.enable=false\n"
        )
        program = [str(java()), "-Xmx1g", "-cp", os.pathsep.join(jars())]
        if not (self.directory / "data").exists():
            subprocess.run(
                [*program, "kafka.tools.StorageTool", "format", "-t", "SGVhZHJhY2UtYmVuY2hfMQ", "-c", str(settings)],
                check=True, capture_output=True,
            )  # fmt: skip
        return [*program, "kafka.Kafka", str(settings)]

    def serves(self) -> bool:
        if not super().serves():
            return False
        try:
            AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=2)
        except Exception:
            return False
        return True


def jars() -> list[str]:
    from benchmarks.spark.kafka import packages

    found = packages()
    if found is None:
        raise Missing("its packages cannot be fetched from Maven Central")
    import pyspark

    scala = next((Path(pyspark.__file__).parent / "jars").glob("scala-library-*.jar"))
    return [str(jar) for jar in (*found.broker, scala)]


def java() -> Path:
    return Path(os.environ["JAVA_HOME"]) / "bin" / "java"


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str):
        super().__init__(address, mode, topic)
        config = {"flush.messages": "1"} if mode == "fsync" else {}
        admin = AdminClient({"bootstrap.servers": address})
        new = NewTopic(topic, num_partitions=1, replication_factor=1, config=config)
        try:
            admin.create_topics([new])[topic].result(30)
        except Exception as error:  # the publisher of the latency finds the consumer's topic
            if "TOPIC_ALREADY_EXISTS" not in str(error):
                raise
        self._producer = Producer(
            {"bootstrap.servers": address, "queue.buffering.max.messages": 1_000_000}
        )
        self._swift: Producer | None = None

    def close(self) -> None:
        self._producer.flush(30)

    def _at_once(self) -> Producer:
        """Without lingering, for those who wait for each."""
        if self._swift is None:
            self._swift = Producer({"bootstrap.servers": self.address, "linger.ms": 0})
        return self._swift

    def put(self, value: bytes) -> None:
        producer = self._at_once()
        producer.produce(self.topic, value)
        if producer.flush(30):
            raise TimeoutError("Kafka has not answered")

    def send_all(self, values: Iterable[bytes]) -> None:
        produce, poll = self._producer.produce, self._producer.poll
        for number, value in enumerate(values):
            produce(self.topic, value)
            if not number & 1023:
                poll(0)
        if self._producer.flush(120):
            raise TimeoutError("Kafka has not answered")

    def send_batch(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def send_paced(self, values: Iterable[bytes]) -> None:
        producer = self._at_once()
        for value in values:
            producer.produce(self.topic, value)
            producer.poll(0)
        producer.flush(30)

    def _consumer(self, group: str) -> Consumer:
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
            }
        )
        consumer.subscribe([self.topic])
        return consumer

    def read(self, count: int) -> int:
        consumer = self._consumer("reader")
        found = 0
        while found < count:
            found += len(consumer.consume(10_000, timeout=10))
        consumer.close()
        return found

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        """Kafka's groups have no ack for a message; a commit for each thousand is as near as it comes."""
        consumer = self._consumer("q")
        if ready:
            while not consumer.assignment():
                consumer.poll(0.1)
            ready()
        left = count
        while left:
            if seen:
                one = consumer.poll(10)
                messages: list[Message] = [one] if one is not None else []
            else:
                messages = consumer.consume(min(COMMIT_EVERY, left), timeout=10)
            for message in messages:
                value = message.value()
                assert value is not None
                if seen:
                    seen(value)
            if messages:
                consumer.commit(asynchronous=True)
            left -= len(messages)
        consumer.close()

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        consumers = [self._consumer(f"follower-{number}") for number in range(subscribers)]
        for consumer in consumers:
            while not consumer.assignment():
                consumer.poll(0.05)

        def follow(consumer: Consumer) -> None:
            left = len(values)
            while left:
                left -= len(consumer.consume(500, timeout=1))

        threads = [threading.Thread(target=follow, args=(consumer,)) for consumer in consumers]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        self.send_all(values)
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        for consumer in consumers:
            consumer.close()
        return took
