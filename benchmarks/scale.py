"""Whether size matters: the cost of an append and of a fetch in a small topic and in a large one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.harness import Benchmark, Case, data_directory, messages, rate, store_singly
from headrace import Broker

SMALL = 10_000


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    large = 500_000 if quick else 10_000_000
    singly = large // 10
    rounds = 300 if quick else 2000
    choose = random.Random(7)
    values = messages(1000)
    with ExitStack() as stack:
        directory = stack.enter_context(data_directory())
        store_singly(directory, "singly", values, singly)
        broker = stack.enter_context(Broker.open(directory, retention_hours=None))
        for topic, size in (("small", SMALL), ("large", large)):
            broker.create_topic(topic, durability="never")
            for _ in range(size // 1000):
                broker.publish_many(topic, values)
        broker.fetch("large", large // 2, 1)

        def append(topic: str) -> Callable[[], float]:
            return lambda: rate(
                rounds, lambda: [broker.publish_many(topic, values[:10]) for _ in range(rounds)]
            )

        def fetch(topic: str, size: int) -> Callable[[], float]:
            """Ten messages at a random place: lookup, read, decode."""
            return lambda: rate(
                rounds,
                lambda: [
                    broker.fetch(topic, choose.randrange(size - 10), 10, max_bytes=4096)
                    for _ in range(rounds)
                ],
            )

        # Within 20% in either direction is "the same"; being faster is no fault.
        yield Benchmark(
            "scale",
            f"a topic of {SMALL:,} records and one of {large:,}",
            [
                Case("append, small", append("small"), "calls/s"),
                Case("append, large", append("large"), "calls/s", 0.8, reference="append, small",
                     relative=True),
                Case("fetch, small", fetch("small", SMALL), "calls/s"),
                Case("fetch, large", fetch("large", large), "calls/s", 0.8,
                     reference="fetch, small", relative=True),
                Case("fetch, published one at a time", fetch("singly", singly), "calls/s", 0.7,
                     reference="fetch, small", relative=True),
            ],
            repeat=7,
        )  # fmt: skip
