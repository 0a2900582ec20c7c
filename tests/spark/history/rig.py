"""A log with an archive, made and read without Spark's own engine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from headrace import BrokerClient
from headrace.spark.builtin.archive_source import ARCHIVE, RECORDS, with_date
from headrace.spark.history.reader import FilteringHistoryReader, PiecesPartition
from headrace.spark.lake import Span, schemas
from headrace.spark.source.data_source import SpanPartition, read_span
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import TaskSpan
from headrace.spark.source.rows import BatchMaker
from headrace.spark.source.stores import open_store
from headrace.testing import RunningServer
from tests.spark.lake.rig import append

NARROW = StructType()
for _name in ("topic", "partition", "offset"):
    NARROW.add(RECORDS[_name])


def where(server: RunningServer, **more: Any) -> dict[str, Any]:
    return {"servers": f"{server.host}:{server.port}", "timeout": "10", **more}


def fill(
    client: BrokerClient, topic: str = "orders", count: int = 200, partitions: int = 2
) -> None:
    """Records of one second each, in segments that can be dropped one by one."""
    if topic not in client.topics():
        client.create_topic(topic, partitions, segment_bytes=4096, retention_hours=None)
    for partition in range(partitions):
        begin = client.positions([topic])[topic][partition]["end"]
        numbers = range(begin, begin + count)
        for start in range(0, count, 10):
            some = numbers[start : start + 10]
            client.publish_many(
                topic,
                [b'{"n": %d, "text": "%s"}' % (number, b"." * 60) for number in some],
                keys=[b"k%d" % number if number % 2 else None for number in some],
                headers={"h": "é"} if start % 20 else None,
                timestamps=[1_000_000_000_000 + 1000 * number for number in some],
                partition=partition,
            )


def rows_of(server: RunningServer, spans: Iterable[Span]) -> pa.Table:
    """The records of the log as an archive holds them."""
    options = SourceOptions.of(where(server, topic=">"))
    found = []
    for span in spans:
        with server.client() as client:
            number = client.positions([span.topic])[span.topic][0]["incarnation"]
        task = SpanPartition(TaskSpan(*span, number))
        rows = BatchMaker(RECORDS, "binary")
        found += map(with_date, read_span(open_store(options), options, rows, task))
    schema = schemas.to_arrow(ARCHIVE)
    return pa.Table.from_batches([each.cast(schema) for each in found], schema)


def archive(
    server: RunningServer,
    path: Path,
    *spans: Span,
    kind: str = "delta",
    number: int = 0,
    **more: Any,
) -> None:
    """One commit of an archive."""
    options = {"offsets": True, "partition_by": "topic,date", "compact_every": 0, **more}
    append(rows_of(server, spans), path=str(path), kind=kind, app_id="q", number=number, **options)


def drop_before(server: RunningServer, topic: str, partition: int, offset: int) -> int:
    """As retention does it; returns where the partition begins now."""
    log = server.engine.topics.find(topic).partitions[partition].log
    server.call(log.drop_before, offset)
    return log.start_offset


class Query:
    """A batch over log and archive, planned and read as Spark does it."""

    def __init__(
        self, options: dict[str, Any], schema: StructType = NARROW, filters: Iterable[Any] = ()
    ):
        self.reader = FilteringHistoryReader(SourceOptions.of(options), schema)
        self.left = list(self.reader.pushFilters(list(filters)))
        self.tasks = self.reader.partitions()

    @property
    def files(self) -> list[Any]:
        """The pieces of files that are read."""
        return [
            piece
            for task in self.tasks
            if isinstance(task, PiecesPartition)
            for piece in task.pieces
        ]

    def spans(self) -> set[tuple[str, int, int, int]]:
        """What is read from the log."""
        return {task.span[:4] for task in self.tasks if isinstance(task, SpanPartition)}

    def rows(self) -> list[dict[str, Any]]:
        return [
            row
            for task in self.tasks
            for each in self.reader.read(task)
            for row in each.to_pylist()
        ]

    def places(self) -> list[tuple[str, int, int]]:
        return sorted((row["topic"], row["partition"], row["offset"]) for row in self.rows())


def places(topic: str, *ranges: tuple[int, int, int]) -> list[tuple[str, int, int]]:
    return [(topic, partition, n) for partition, start, end in ranges for n in range(start, end)]
