"""Reading from the embedded broker, out of the page cache: values, messages, raw batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.harness import (
    Benchmark,
    Case,
    bytes_each,
    data_directory,
    messages,
    rate,
    store_singly,
)
from headrace import Broker


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark]:
    total = 200_000 if quick else 2_000_000
    with ExitStack() as stack:
        directory = stack.enter_context(data_directory())
        store_singly(directory, "t1", messages(1000), total)
        broker = stack.enter_context(Broker.open(directory, retention_hours=None))
        for topic, size in (("t1000", 1000), ("t10000", 10_000)):
            part = messages(size)
            for _ in range(total // size):
                broker.publish_many(topic, part)

        def values(topic: str) -> float:
            def work() -> None:
                at = 0
                while found := broker.fetch_values(topic, at):
                    at += len(found)
                assert at == total

            return rate(total, work)

        def objects(topic: str) -> float:
            def work() -> None:
                at = 0
                while found := broker.fetch(topic, at, 10_000):
                    at += len(found)
                assert at == total

            return rate(total, work)

        def raw(topic: str) -> float:
            started = time.perf_counter()
            at = size = 0
            while found := broker.fetch_batches(topic, at, max_bytes=4 << 20):
                size += sum(batch.stored_bytes for batch in found)
                at = found[-1].end_offset
            assert at == total
            return size / (time.perf_counter() - started) / 1e9

        def plainly(topic: str) -> float:
            """The same bytes with nothing but reads: no header looked at, no checksum."""
            started = time.perf_counter()
            size = 0
            for path in sorted((directory / topic / "0").glob("*.log")):
                with path.open("rb", buffering=0) as file:
                    while data := file.read(4 << 20):
                        size += len(data)
            return size / (time.perf_counter() - started) / 1e9

        def case(name: str, run: Callable[[str], float], unit: str, target: float) -> list[Case]:
            return [
                Case(
                    f"{name}, batches of {size}",
                    lambda size=size: run(f"t{size}"),
                    unit,
                    target,
                    reference="plain reads of the files" if unit == "GB/s" else "",
                )
                for size in (1000, 10000)
            ] + [
                Case(
                    f"{name}, published one at a time",
                    lambda: run("t1"),
                    unit,
                    0.7 if unit == "messages/s" else None,
                    reference=f"{name}, batches of 10000",
                    relative=True,
                )
            ]

        yield Benchmark(
            "fetch",
            f"embedded Broker, {total:,} × 100 bytes",
            [
                Case("plain reads of the files", lambda: plainly("t1000"), "GB/s"),
                *case("plain values", values, "messages/s", 3_000_000),
                *case("Message objects", objects, "messages/s", 1_000_000),
                *case("raw batches", raw, "GB/s", 1.0),
                Case("disk, batches of 10000", lambda: bytes_each(directory, "t10000", total),
                     "bytes/message", smaller=True),
                Case("disk, published one at a time", lambda: bytes_each(directory, "t1", total),
                     "bytes/message", smaller=True, reference="disk, batches of 10000"),
            ],
        )  # fmt: skip
