"""``headrace archive``: a topic into a lake table, with its manifest of offsets, exactly once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.work import archive_topic, new_path
from benchmarks.spark.world import World, rows_per_second


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    records = world.records
    world.fill("archived", records)

    def archive(kind: str) -> Callable[[], float]:
        return lambda: rows_per_second(records, lambda: archive_topic(world, "archived", kind))

    def plain() -> float:
        """What Spark's own writer makes of the same topic, with no promise about doing it twice."""
        path = str(new_path(world, "plain"))

        def work() -> int:
            world.topic("archived").write.parquet(path)
            return records

        speed = rows_per_second(records, work)
        shutil.rmtree(path)
        return speed

    cases = [
        Case("read and write.parquet", plain, "rows/s"),
        Case("archive, Delta", archive("delta"), "rows/s", 500_000,
             reference="read and write.parquet"),
        Case("archive, Iceberg", archive("iceberg"), "rows/s", reference="read and write.parquet"),
    ]  # fmt: skip
    with console.status("warming up"):
        for case in cases:
            case.run()
    yield Benchmark(
        "spark_archive",
        f"{records:,} records of 100 bytes into a lake table, local[2]",
        cases,
        facts=world.facts,
    )
    world.remove("archived")
