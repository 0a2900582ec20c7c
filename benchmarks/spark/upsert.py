"""Upserts: a topic merged into a table by key, beside what delta-rs itself reaches with rows that are in memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.work import new_path
from benchmarks.spark.world import PARTITIONS, PUBLISHED, VALUE_BYTES, World
from headrace.spark import lake

RECORDS_MAX = 1_000_000
"""Of one batch: the topic is merged at once."""


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    """A table of as many rows as the topic has records; half of the records replace a row, half are new."""
    records = min(world.records, RECORDS_MAX)
    changes = _fill(world, "changes", records)
    known = [b"%016d" % number for number in range(records)]
    values = os.urandom(VALUE_BYTES * records)
    rows = _rows(
        known, [values[at : at + VALUE_BYTES] for at in range(0, len(values), VALUE_BYTES)]
    )
    expected = records + records // 2

    def upsert(kind: str) -> Callable[[], float]:
        def run() -> float:
            path = new_path(world, "merged")
            table = {"path": str(path), "kind": kind, "options": {"merge_on": "key"}}
            lake.write(world.spark.createDataFrame(rows), **table)  # type: ignore[arg-type]
            frame = world.stream("changes", startingOffsets="earliest").select("key", "value")
            started = time.perf_counter()
            checkpoint = str(new_path(world, "checkpoint"))
            query = lake.start(
                frame, checkpoint=checkpoint, trigger={"availableNow": True}, **table
            )  # type: ignore[arg-type]
            query.awaitTermination()
            elapsed = time.perf_counter() - started
            return _speed(path, lake.describe(str(path), kind).rows, elapsed)

        return run

    def bare() -> float:
        """The same rows by delta-rs alone: no topic, no Spark, no number of a batch."""
        path = new_path(world, "bare")
        write_deltalake(str(path), rows)
        table = DeltaTable(str(path))
        started = time.perf_counter()
        merge = table.merge(changes, "t.key = s.key", source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()
        elapsed = time.perf_counter() - started
        return _speed(path, DeltaTable(str(path)).count(), elapsed)

    def _speed(path: Path, found: int, elapsed: float) -> float:
        shutil.rmtree(path)
        if found != expected:
            raise AssertionError(f"{found:,} rows instead of {expected:,}")
        return records / elapsed

    cases = [
        Case("delta-rs alone, merge", bare, "rows/s"),
        Case("upsert, Delta", upsert("delta"), "rows/s", 300_000,
             reference="delta-rs alone, merge"),
        Case("upsert, Iceberg", upsert("iceberg"), "rows/s", reference="delta-rs alone, merge"),
    ]  # fmt: skip
    with console.status("warming up"):
        for case in cases:
            case.run()
    yield Benchmark(
        "spark_upsert",
        f"{records:,} records of 100 bytes into a table of as many rows, local[2]",
        cases,
        facts=world.facts,
    )
    world.remove("changes")


def _fill(world: World, topic: str, records: int) -> pa.Table:
    """Every second row of the table, and as many new keys, in mixed order."""
    keys = [b"%016d" % (2 * number) for number in range(records)]
    stride = 7_919  # prime, so all numbers come
    mixed = [keys[number * stride % records] for number in range(records)]
    raw = os.urandom(VALUE_BYTES * records)
    values = [raw[at : at + VALUE_BYTES] for at in range(0, len(raw), VALUE_BYTES)]
    with world.broker.client(request_timeout=120) as client:
        client.create_topic(topic, partitions=PARTITIONS, durability="never")
        with console.status(f"filling {topic}: {records:,} records"):
            for at in range(0, records, PUBLISHED):
                part = slice(at, at + PUBLISHED)
                partition = at // PUBLISHED % PARTITIONS
                client.publish_many(topic, values[part], keys=mixed[part], partition=partition)
    return _rows(mixed, values)


def _rows(keys: list[bytes], values: list[bytes]) -> pa.Table:
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
