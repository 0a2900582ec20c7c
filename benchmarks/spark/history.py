"""Log and archive as one table, beside each of the two alone: the same records, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame

from benchmarks._loopback import Latest
from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.work import new_path
from benchmarks.spark.world import World, length_of_values, rows_per_second
from headrace.spark import lake
from headrace.spark.builtin import archive

TOPIC = "history"


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    records = world.records
    world.fill(TOPIC, records)
    with console.status("archiving"):
        whole, half = _archive(world, records), _archive(world, records // 2)

    def topic(**more: Any) -> DataFrame:
        return world.topic(TOPIC, **more)

    def each(frame: DataFrame) -> Latest:
        return Latest(lambda: rows_per_second(records, lambda: length_of_values(frame)))

    log, table = each(topic()), each(lake.read(world.spark, whole).drop("date"))
    log_value = each(topic(columns="value"))
    table_value = each(lake.read(world.spark, whole).select("value"))

    def slower(*alone: Latest) -> Callable[[], float]:
        return lambda: min(one.again() for one in alone)

    cases = [
        Case("log", log.take, "rows/s"),
        Case("archive, by Spark's Parquet reader", table.take, "rows/s"),
        Case("archive, by history", each(topic(history=whole)).take, "rows/s"),
        Case("the slower of the two", slower(log, table), "rows/s", is_repeated=True),
        Case("half archived, half not", each(topic(history=half)).take, "rows/s", 0.9,
             reference="the slower of the two", relative=True),
        Case("log, columns=value", log_value.take, "rows/s"),
        Case("archive, by Spark's Parquet reader, value", table_value.take, "rows/s"),
        Case("the slower of the two, value", slower(log_value, table_value), "rows/s",
             is_repeated=True),
        Case("half archived, half not, columns=value", each(topic(history=half, columns="value")).take,
             "rows/s", 0.9, reference="the slower of the two, value", relative=True),
    ]  # fmt: skip
    with console.status("warming up"):
        for case in cases:
            case.run()
    yield Benchmark(
        "spark_history",
        f"{records:,} records of 100 bytes in log and archive, local[2], sum(length(value))",
        cases,
        repeat=7,
        is_shuffled=True,
        facts=world.facts,
    )
    world.remove(TOPIC)


def _archive(world: World, records: int) -> str:
    """A table of the first records of the topic."""
    path = str(new_path(world, "history"))
    query = archive.start(
        world.spark,
        [TOPIC],
        path=path,
        group=f"archive-{records}",
        source={
            "servers": world.servers,
            "maxOffsetsPerTrigger": records,
            "maxBytesPerTrigger": "1TB",
        },
        trigger={"processingTime": "1 hour"},
    )
    while lake.describe(path).rows < records:
        query.awaitTermination(1)
    query.stop()
    assert lake.describe(path).rows == records
    return path
