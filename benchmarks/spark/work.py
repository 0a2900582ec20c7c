"""The pieces of work that several benchmarks measure: what is written, and how it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from benchmarks.spark.world import PARTITIONS, World
from headrace.spark import lake
from headrace.spark.builtin import archive

_numbers = count(1)


@contextmanager
def new_topic(world: World, name: str) -> Iterator[str]:
    """A topic as a broker makes it by default: synced before it is acknowledged."""
    topic = f"{name}-{next(_numbers)}"
    with world.broker.client() as client:
        client.create_topic(topic, partitions=PARTITIONS)
    try:
        yield topic
    finally:
        world.remove(topic)


def new_path(world: World, name: str) -> Path:
    return world.directory / f"{name}-{next(_numbers)}"


def write_batch(world: World, frame: DataFrame, topic: str, **more: Any) -> int:
    """``df.write``; the rows that are in the topic behind it."""
    options = world.options(topic, **more)
    frame.write.format("headrace").options(**options).mode("append").save()
    return world.count(topic)


def copy_stream(world: World, source: str, topic: str, **more: Any) -> int:
    """A stream from one topic to another, until everything is there; the rows that are in it."""
    frame = world.stream(source, startingOffsets="earliest", maxBytesPerTrigger="256MB").select(
        "value"
    )
    query = (
        frame.writeStream.format("headrace")
        .options(**world.options(topic, **more))
        .option("checkpointLocation", str(new_path(world, "checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return world.count(topic)


def archive_topic(world: World, topic: str, kind: str = "delta") -> int:
    """``headrace archive`` of a topic; the rows that the table says it has."""
    path = new_path(world, "table")
    source = {"servers": world.servers}
    query = archive.start(
        world.spark, [topic], path=str(path), kind=kind, group=f"archive-{next(_numbers)}",
        source=source, trigger={"availableNow": True},
    )  # fmt: skip
    query.awaitTermination()
    ranges = lake.describe(str(path), kind).offsets
    assert ranges is not None
    return sum(end for ends in ranges.ends().values() for end in ends.values())
