"""``BrokerClient`` against a broker in another process: publish, fetch, subscribe and acknowledge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from benchmarks._loopback import TOPIC, broker
from benchmarks.harness import Benchmark, Case, messages, rate, send_singly

PART = 10_000


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    total = 100_000 if quick else 1_000_000
    values = messages(PART)
    thousand = values[:1000]
    numbers = count()
    with broker() as process, process.client() as client:
        client.create_topic("read")
        for _ in range(total // PART):
            client.publish_many("read", values)
        client.create_topic("singly")
        send_singly(process, "singly", values, total)
        client.create_topic("memory", durable=False)

        def publish_many(part: list[bytes]) -> Callable[[], float]:
            rounds = total // len(part)
            return lambda: rate(
                rounds * len(part),
                lambda: [client.publish_many(TOPIC, part) for _ in range(rounds)],
            )

        def publish_each() -> float:
            """Without waiting for each; ``flush`` waits for all."""
            wanted = total // 5

            def work() -> None:
                publish, value = client.publish_nowait, values[0]
                for _ in range(wanted):
                    publish(TOPIC, value)
                client.flush()

            return rate(wanted, work)

        def publish_and_wait(topic: str) -> float:
            wanted = total // 500

            def work() -> None:
                for _ in range(wanted):
                    client.publish(topic, values[0])

            return rate(wanted, work)

        def subscribe_and_ack(topic: str = "read") -> float:
            name = f"g{next(numbers)}"
            consumer = client.subscription(name, topic, prefetch=5000)

            def work() -> None:
                left = total
                for message in consumer:
                    message.ack()
                    left -= 1
                    if not left:
                        break
                client.flush()

            speed = rate(total, work)
            consumer.close()
            client.delete_subscription(name, topic)
            return speed

        def fetch_messages(topic: str = "read") -> float:
            def work() -> None:
                at = 0
                while at < total:
                    at += len(client.fetch(topic, at, PART))

            return rate(total, work)

        def fetch_values(topic: str = "read") -> float:
            def work() -> None:
                at = 0
                while at < total:
                    at += len(client.fetch_values(topic, at, max_bytes=4 << 20))

            return rate(total, work)

        yield Benchmark(
            "net_client",
            f"BrokerClient over loopback, {total:,} × 100 bytes, fdatasync before each ack",
            [
                Case("publish_many by 10,000", publish_many(values), "messages/s", 1_000_000),
                Case("publish_many by 1,000", publish_many(thousand), "messages/s"),
                Case("publish, not waiting for each", publish_each, "messages/s"),
                Case("publish, waiting for each", lambda: publish_and_wait(TOPIC), "messages/s"),
                Case("publish, waiting for each, in memory", lambda: publish_and_wait("memory"), "messages/s"),
                Case("subscribe and ack each", subscribe_and_ack, "messages/s", 150_000),
                Case("fetch as values", fetch_values, "messages/s", 2_000_000),
                Case("fetch as messages", fetch_messages, "messages/s", 800_000),
                *[
                    Case(f"{name}, published one at a time", partial(run, "singly"), "messages/s", 0.7,
                         reference=name, relative=True)
                    for name, run in (
                        ("subscribe and ack each", subscribe_and_ack),
                        ("fetch as values", fetch_values),
                        ("fetch as messages", fetch_messages),
                    )
                ],
            ],
        )  # fmt: skip
