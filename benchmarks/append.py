"""Publishing into the embedded broker: every fsync mode, batch sizes, threads, many partitions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import Benchmark, Case, data_directory, messages, rate
from headrace import Broker


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    total = 100_000 if quick else 1_000_000
    singles = 200 if quick else 1000
    values = messages(10_000)
    thousand = values[:1000]
    with ExitStack() as stack:
        directory = stack.enter_context(data_directory())
        broker = stack.enter_context(Broker.open(directory, retention_hours=None))
        for mode in ("always", "interval", "never"):
            broker.create_topic(mode, durability=mode)
        broker.create_topic("memory", durable=False, max_queue_size=10**9)
        for count in (1, 8, 32):
            broker.create_topic(f"p{count}", partitions=count)

        def bulk(topic: str, part: list[bytes]) -> Callable[[], float]:
            rounds = total // len(part)
            return lambda: rate(
                rounds * len(part),
                lambda: [broker.publish_many(topic, part) for _ in range(rounds)],
            )

        def alone(topic: str, threads: int) -> Callable[[], float]:
            def one() -> None:
                for _ in range(singles):
                    broker.publish(topic, values[0])

            def run() -> float:
                workers = [threading.Thread(target=one) for _ in range(threads)]
                return rate(
                    singles * threads,
                    lambda: ([w.start() for w in workers], [w.join() for w in workers]),
                )

            return run

        def spread(partitions: int) -> Callable[[], float]:
            """One publish of 100 messages to each partition, from 32 threads, until all are done."""
            topic, part, each = f"p{partitions}", values[:100], total // 3200

            def work(number: int) -> None:
                for turn in range(each):
                    broker.publish_many(topic, part, partition=(number + turn) % partitions)

            def run() -> float:
                workers = [threading.Thread(target=work, args=(n,)) for n in range(32)]
                return rate(
                    32 * each * 100,
                    lambda: ([w.start() for w in workers], [w.join() for w in workers]),
                )

            return run

        yield Benchmark(
            "append",
            "embedded Broker, 100-byte messages",
            [
                Case("fdatasync of 100 KB (reference)", lambda: _syncs(directory, singles),
                     "syncs/s"),
                Case("publish_many by 1,000, always", bulk("always", thousand), "messages/s",
                     1_000_000),
                Case("publish_many by 10,000, always", bulk("always", values), "messages/s",
                     1_000_000),
                Case("publish_many by 1,000, interval", bulk("interval", thousand), "messages/s"),
                Case("publish_many by 1,000, never", bulk("never", thousand), "messages/s"),
                Case("publish_many by 1,000, memory", bulk("memory", thousand), "messages/s"),
                Case("publish_many by 10,000, interval", bulk("interval", values), "messages/s"),
                Case("publish_many by 10,000, never", bulk("never", values), "messages/s"),
                Case("publish_many by 10,000, memory", bulk("memory", values), "messages/s"),
                Case("publish, one thread, always", alone("always", 1), "messages/s"),
                Case("publish, 16 threads, always", alone("always", 16), "messages/s"),
                Case("publish, 16 threads, interval", alone("interval", 16), "messages/s"),
                Case("publish, 16 threads, never", alone("never", 16), "messages/s"),
                Case("publish, one thread, memory", alone("memory", 1), "messages/s"),
                Case("1 partition, 32 threads", spread(1), "messages/s"),
                Case("8 partitions, 32 threads", spread(8), "messages/s",
                     reference="1 partition, 32 threads"),
                Case("32 partitions, 32 threads", spread(32), "messages/s",
                     reference="1 partition, 32 threads"),
            ],
        )  # fmt: skip


def _syncs(directory: Path, count: int) -> float:
    """What the disk does by itself: append 100 KB in reserved space and sync, one after the other."""
    block = os.urandom(100_000)
    path = directory / "reference"
    handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(handle, 0, len(block) * count)

        def work() -> None:
            for number in range(count):
                os.pwrite(handle, block, number * len(block))
                os.fdatasync(handle)

        return rate(count, work)
    finally:
        os.close(handle)
        path.unlink()
