"""The least that a Python data source and a Python sink can cost: what Headrace is compared with.

The source yields Arrow batches that lie in the worker's memory: a ring of the first batches of the
topic, made by Headrace's own reader, so that columns, types and sizes are those of the real scan. They
are made once in a worker and kept, so no timed run makes any. The sink counts rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from headrace.spark.source.data_source import HeadraceDataSource

RING = 16
"""Batches: some 30 MB, more than a processor's cache."""


@lru_cache(maxsize=4)
def _ring(options: tuple[tuple[str, str], ...], schema: str) -> list[pa.RecordBatch]:
    reader = HeadraceDataSource(dict(options)).reader(StructType.fromJson(json.loads(schema)))
    first = reader.partitions()[0]
    return list(islice(reader.read(first), RING))  # type: ignore[arg-type]


class Share(InputPartition):
    def __init__(self, rows: int):
        self.rows = rows


class BareSource(DataSource):
    """``format("bare")``: options ``rows`` and ``tasks``; the others are those of the topic."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def _of_topic(self) -> dict[str, str]:
        return {name: each for name, each in self.options.items() if name not in ("rows", "tasks")}

    def schema(self) -> Any:
        return HeadraceDataSource(self._of_topic()).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        rows, tasks = int(self.options["rows"]), int(self.options["tasks"])
        return BareReader(rows, tasks, self._of_topic(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return BareWriter()


class BareReader(DataSourceReader):
    def __init__(self, rows: int, tasks: int, options: dict[str, str], schema: StructType):
        self._rows, self._tasks = rows, tasks
        self._options, self._schema = tuple(sorted(options.items())), schema.json()

    def partitions(self) -> list[InputPartition]:
        return [Share(self._rows // self._tasks) for _ in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Share)
        left = partition.rows
        for batch in cycle(_ring(self._options, self._schema)):
            if batch.num_rows >= left:
                yield batch.slice(0, left)
                return
            left -= batch.num_rows
            yield batch


class BareWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()
