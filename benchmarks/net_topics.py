"""Text ``PUB`` that goes round many topics, pipelined: each topic has a log, and so a sync, of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks._loopback import TOPIC, VALUE, broker, loading
from benchmarks.harness import Benchmark, Case


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    topics, rounds = (500, 10) if quick else (5000, 5)
    with loading() as load, broker() as process:
        if load is None:
            yield None
            return
        kinds: dict[str, dict[str, Any]] = {
            TOPIC: {},
            "never": {"durability": "never"},
            "memory": {"durable": False},
        }
        with process.client() as client, ThreadPoolExecutor(16) as pool:
            for kind, options in kinds.items():
                names = [f"{kind}{number}" for number in range(topics)]
                list(pool.map(partial(client.create_topic, **options), names))

        def publish(kind: str, connections: int) -> float:
            """Each connection sends one message to every topic, and again when all are answered."""
            commands = [
                b"PUB %b%d %d\r\n%b" % (kind.encode(), n, len(VALUE), VALUE) for n in range(topics)
            ]
            return load.publish(
                process.address,
                "lines",
                b"".join(commands),
                each=topics,
                rounds=rounds,
                connections=connections,
            )

        publish(TOPIC, 1)  # the first publish makes the file
        publish("never", 1)
        yield Benchmark(
            "net_topics",
            f"PUB round {topics:,} topics over loopback, 100-byte messages",
            [
                Case("1 connection, fdatasync", lambda: publish(TOPIC, 1), "messages/s"),
                Case("4 connections, fdatasync", lambda: publish(TOPIC, 4), "messages/s", 100_000),
                Case("4 connections, no fdatasync", lambda: publish("never", 4), "messages/s"),
                Case("4 connections, in memory", lambda: publish("memory", 4), "messages/s"),
            ],
        )
