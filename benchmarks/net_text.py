"""Text ``PUB`` over TCP, pipelined, from a native load generator; each is synced before its ``OK``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._loopback import VALUE, bare, broker, loading
from benchmarks.harness import Benchmark, Case
from headrace.testing import Address

COMMAND = b"PUB t %d\r\n%b" % (len(VALUE), VALUE)


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    total = 200_000 if quick else 2_000_000
    with loading() as load, bare("text") as nothing, broker() as process:
        if load is None:
            yield None
            return

        def publish(address: Address, pipeline: int, connections: int) -> float:
            return load.publish(
                address,
                "lines",
                COMMAND * pipeline,
                each=pipeline,
                rounds=max(total // pipeline // connections // (1 if pipeline > 1 else 50), 1),
                connections=connections,
            )

        yield Benchmark(
            "net_text",
            "PUB over loopback, 100-byte messages, fdatasync before each OK",
            [
                Case("a loop that keeps nothing (reference)",
                     lambda: publish(nothing, 1000, 4), "messages/s"),
                Case("pipelined by 1,000, 4 connections",
                     lambda: publish(process.address, 1000, 4), "messages/s", 400_000,
                     reference="a loop that keeps nothing (reference)"),
                Case("pipelined by 1,000, 1 connection",
                     lambda: publish(process.address, 1000, 1), "messages/s"),
                Case("pipelined by 64, 8 connections",
                     lambda: publish(process.address, 64, 8), "messages/s"),
                Case("one at a time, 100 connections",
                     lambda: publish(process.address, 1, 100), "messages/s"),
            ],
        )  # fmt: skip
