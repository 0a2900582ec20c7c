"""Writing to a topic: once exactly and once at least, from a table and from another topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame

from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.bare import BareSource
from benchmarks.spark.work import copy_stream, new_topic, write_batch
from benchmarks.spark.world import World, rows_per_second

GUARANTEES = ("exactly-once", "at-least-once")


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    spark = world.spark
    records = max(world.records // 2, 100_000)
    spark.dataSource.register(BareSource)
    world.fill("values", records)
    path = str(world.directory / "values")
    with console.status("writing the rows as Parquet"):
        world.topic("values", columns="value").write.parquet(path)
    rows = spark.read.parquet(path)

    def bare(frame: DataFrame) -> Callable[[], float]:
        def work() -> int:
            frame.write.format("bare").mode("append").save()
            return records

        return lambda: rows_per_second(records, work)

    def batch(guarantee: str) -> Callable[[], float]:
        def work() -> float:
            with new_topic(world, "written") as topic:
                return rows_per_second(
                    records, lambda: write_batch(world, rows, topic, deliveryGuarantee=guarantee)
                )

        return work

    def stream(guarantee: str) -> Callable[[], float]:
        def work() -> float:
            with new_topic(world, "copied") as topic:
                return rows_per_second(
                    records,
                    lambda: copy_stream(world, "values", topic, deliveryGuarantee=guarantee),
                )

        return work

    cases = [
        Case("a bare Arrow writer", bare(rows), "rows/s"),
        *(
            Case(f"batch, {guarantee}", batch(guarantee), "rows/s",
                 800_000 if guarantee == "exactly-once" else None, reference="a bare Arrow writer")
            for guarantee in GUARANTEES
        ),
        *(Case(f"topic to topic, {guarantee}", stream(guarantee), "rows/s")
          for guarantee in GUARANTEES),
    ]  # fmt: skip
    with console.status("warming up"):
        for case in cases:
            case.run()
    yield Benchmark(
        "spark_sink",
        f"{records:,} rows of 100 bytes into a topic, local[2], synced before they count",
        cases,
        facts=world.facts,
    )
    world.remove("values")
