"""Subscribe and acknowledge: every message taken and acknowledged one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.harness import Benchmark, Case, data_directory, messages, rate, store_singly
from headrace import AsyncBroker, Broker


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    total = 100_000 if quick else 1_000_000
    numbers = count()
    with ExitStack() as stack:
        directory = stack.enter_context(data_directory())
        _fill(directory / "threads", total)
        store_singly(directory / "threads", "singly", messages(1000), total)
        _fill(directory / "asyncio", total)
        store_singly(directory / "asyncio", "singly", messages(1000), total)
        broker = stack.enter_context(Broker.open(directory / "threads", retention_hours=None))

        def one(topic: str = "t") -> float:
            consumer = broker.subscription(f"g{next(numbers)}", topic)

            def work() -> None:
                left = total
                for message in consumer:
                    message.ack()
                    left -= 1
                    if not left:
                        break

            speed = rate(total, work)
            consumer.close()
            return speed

        def two(topic: str = "t") -> float:
            name = f"g{next(numbers)}"
            consumers = [broker.subscription(name, topic) for _ in range(2)]
            left = [total]

            def work(consumer) -> None:  # type: ignore[no-untyped-def]
                for message in consumer:
                    message.ack()
                    left[0] -= 1
                    if left[0] <= 0:
                        break
                for other in consumers:
                    other.close()

            started = time.perf_counter()
            threads = [threading.Thread(target=work, args=(c,)) for c in consumers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return total / (time.perf_counter() - started)

        def in_asyncio(consumers: int, topic: str = "t") -> float:
            group = f"g{next(numbers)}"
            return asyncio.run(_asyncio(directory / "asyncio", topic, total, group, consumers))

        measured: dict[str, Callable[..., float]] = {
            "one consumer, threads": one,
            "two consumers, threads": two,
            "one consumer, asyncio": partial(in_asyncio, 1),
            "two consumers, asyncio": partial(in_asyncio, 2),
        }

        yield Benchmark(
            "consume",
            f"embedded, {total:,} × 100 bytes, subscribe and acknowledge",
            [
                *[Case(name, run, "messages/s", 200_000) for name, run in measured.items()],
                *[
                    Case(f"{name}, published one at a time", partial(run, topic="singly"), "messages/s", 0.7,
                         reference=name, relative=True)
                    for name, run in measured.items()
                ],
            ],
        )  # fmt: skip


def _fill(directory: Path, total: int) -> None:
    part = messages(1000)
    with Broker.open(directory, retention_hours=None) as broker:
        for _ in range(total // 1000):
            broker.publish_many("t", part)


async def _asyncio(directory: Path, topic: str, total: int, group: str, count: int) -> float:
    async with AsyncBroker.open(directory, retention_hours=None) as broker:
        consumers = [await broker.subscription(group, topic) for _ in range(count)]
        left = total

        async def work(consumer) -> None:  # type: ignore[no-untyped-def]
            nonlocal left
            async for message in consumer:
                message.ack()
                left -= 1
                if not left:
                    break
            for other in consumers:
                other.close()

        started = time.perf_counter()
        await asyncio.gather(*[work(consumer) for consumer in consumers])
        taken = time.perf_counter() - started
        assert (await broker.subscription_stats(group))["lag"] == 0
        await broker.delete_subscription(group)
        return total / taken
