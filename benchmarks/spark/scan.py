"""Reading a topic: beside a bare source, Parquet and Kafka, in one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pyspark.sql import DataFrame

from benchmarks._loopback import Latest
from benchmarks.harness import Benchmark, Case, console, send_singly
from benchmarks.spark.bare import BareSource
from benchmarks.spark.kafka import Packages, kafka
from benchmarks.spark.world import (
    PARTITIONS,
    VALUE_BYTES,
    World,
    counted,
    length_of_values,
    rows_per_second,
)

TUNED = {
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(64 << 20),
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": str(1 << 20),
}
"""What is commonly turned when Kafka is to be read faster."""


@contextmanager
def prepared(world: World, packages: Packages | None) -> Iterator[Benchmark]:
    spark, records = world.spark, world.records
    spark.dataSource.register(BareSource)
    world.fill("scan", records)
    small = max(records // 10, 20_000)
    world.fill("small", small, each=100)
    with world.broker.client() as client, console.status("publishing one at a time"):
        client.create_topic("singly", partitions=PARTITIONS, durability="never")
        send_singly(world.broker, "singly", [os.urandom(VALUE_BYTES)], small, PARTITIONS)
    world.fill("few", small)
    headrace = world.topic("scan")

    def bare_of(**more: str) -> DataFrame:
        options = world.options("scan", rows=records, tasks=PARTITIONS, **more)
        return spark.read.format("bare").options(**options).load()

    bare, bare_value = bare_of(), bare_of(columns="value")
    with console.status("writing Parquet"):
        headrace.write.parquet(str(world.directory / "parquet"))
    parquet = spark.read.parquet(str(world.directory / "parquet"))

    def each(
        query: Callable[[DataFrame], int], frame: DataFrame, rows: int = records
    ) -> Callable[[], float]:
        return lambda: rows_per_second(rows, lambda: query(frame))

    socket = world.topic("scan", directReads="false")
    count = Latest(each(counted, headrace))
    length = Latest(each(length_of_values, headrace))
    value = Latest(each(length_of_values, world.topic("scan", columns="value")))
    cases = [
        Case("count, bare", each(counted, bare), "rows/s"),
        Case("count", count.take, "rows/s", 0.8, reference="count, bare", relative=True),
        Case("count, Parquet (of its footers)", each(counted, parquet), "rows/s"),
        Case("sum, bare", each(length_of_values, bare), "rows/s"),
        Case("sum, Parquet", each(length_of_values, parquet), "rows/s"),
        Case("sum", length.take, "rows/s", 0.8, reference="sum, bare", relative=True),
        Case("sum (same run)", length.again, "rows/s", 0.4, is_repeated=True, reference="sum, Parquet",
             relative=True),
        Case("count, through the socket", each(counted, socket), "rows/s",
             reference="count, bare"),
        Case("sum, through the socket", each(length_of_values, socket), "rows/s",
             reference="sum, bare"),
        Case("sum, columns=value, bare", each(length_of_values, bare_value), "rows/s"),
        Case("sum, columns=value", value.take, "rows/s", reference="sum, columns=value, bare"),
        Case("sum, columns=value (same run)", value.again, "rows/s", is_repeated=True, reference="sum, Parquet"),
        Case("sum, path (no broker)",
             each(length_of_values, spark.read.format("headrace").option("topic", "scan")
                  .option("path", str(world.broker.data_dir)).load()),
             "rows/s", reference="sum"),
        Case("sum, published by 100", each(length_of_values, world.topic("small"), small),
             "rows/s", reference="sum"),
        Case("count, few rows", each(counted, world.topic("few"), small), "rows/s"),
        Case("count, few rows, published one at a time", each(counted, world.topic("singly"), small),
             "rows/s", 0.7, reference="count, few rows", relative=True),
        Case("sum, few rows", each(length_of_values, world.topic("few"), small), "rows/s"),
        Case("sum, few rows, published one at a time",
             each(length_of_values, world.topic("singly"), small),
             "rows/s", 0.7, reference="sum, few rows", relative=True),
    ]  # fmt: skip
    facts = dict(world.facts)
    with ExitStack() as stack:
        if packages is None:
            facts["kafka"] = "not measured: it could not be fetched"
        else:
            broker = stack.enter_context(kafka(packages, world.directory, PARTITIONS))
            facts["kafka"] = broker.text
            facts["kafka, tuned"] = TUNED
            with console.status("filling Kafka"):
                broker.fill(headrace, "scan")
            plain, tuned = broker.frame(spark, "scan"), broker.frame(spark, "scan", **TUNED)
            cases += [
                Case("count, Kafka", each(counted, plain), "rows/s"),
                Case("count, Kafka tuned", each(counted, tuned), "rows/s"),
                Case("count (same run)", count.again, "rows/s", 1.5, is_repeated=True,
                     reference="count, Kafka", relative=True),
                Case("count (same run), tuned", count.again, "rows/s", 1.5, is_repeated=True,
                     reference="count, Kafka tuned", relative=True),
                Case("sum, Kafka", each(length_of_values, plain), "rows/s"),
                Case("sum, Kafka tuned", each(length_of_values, tuned), "rows/s"),
                Case("sum (same run), Kafka", length.again, "rows/s", 1.5, is_repeated=True,
                     reference="sum, Kafka", relative=True),
                Case("sum (same run), Kafka tuned", length.again, "rows/s", 1.5, is_repeated=True,
                     reference="sum, Kafka tuned", relative=True),
            ]  # fmt: skip
        with console.status("warming up"):
            for case in cases:
                case.run()
        yield Benchmark(
            "spark_scan",
            f"{records:,} records of 100 bytes, local[2], count and sum(length(value))",
            cases,
            repeat=7,
            is_shuffled=True,
            facts=facts,
        )
    world.remove("scan")
    world.remove("small")
