"""Whether a record costs the same in a small topic and in a large one: scan, sink and archive."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.work import archive_topic, copy_stream, new_topic
from benchmarks.spark.world import (
    PARTITIONS,
    PUBLISHED,
    World,
    length_of_values,
    rows_per_second,
)

TIMES = (0.1, 1, 5)
BYTES_EACH = 700
"""On the disk at once: the topic, its copy, what is staged of it, and the table, with room to spare."""


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    step = PUBLISHED * PARTITIONS
    sizes = [max(int(world.records * times) // step, 1) * step for times in TIMES]
    free = shutil.disk_usage(world.directory).free
    fitting = [size for size in sizes if size * BYTES_EACH < free]
    for size in sorted(set(sizes) - set(fitting)):
        console.print(f"[yellow]{size:,} records are not measured: the disk is too small[/yellow]")
    for size in fitting:
        world.fill(f"size-{size}", size)

    def scan(size: int) -> int:
        return length_of_values(world.topic(f"size-{size}"))

    def sink(size: int) -> int:
        with new_topic(world, "grown") as topic:
            return copy_stream(world, f"size-{size}", topic)

    def archive(size: int) -> int:
        return archive_topic(world, f"size-{size}")

    def measured(work: Callable[[int], int], size: int) -> Callable[[], float]:
        return lambda: rows_per_second(size, partial(work, size))

    # A record of a larger topic may cost a quarter more than one of the next smaller one.
    cases = []
    for name, work in (("scan", scan), ("topic to topic", sink), ("archive", archive)):
        smaller = ""
        for size in fitting:
            label = f"{name}, {size:,}"
            target = 0.8 if smaller else None
            cases.append(
                Case(
                    label, measured(work, size), "rows/s", target, reference=smaller, relative=True
                )
            )
            smaller = label
    with console.status("warming up"):
        for case in cases[:: len(fitting)]:
            case.run()
    yield Benchmark(
        "spark_growth",
        "rows a second as the topic grows, local[2]",
        cases,
        repeat=3,
        facts=world.facts,
    )
    for size in fitting:
        world.remove(f"size-{size}")
