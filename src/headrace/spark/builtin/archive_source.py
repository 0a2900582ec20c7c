"""Records from the log straight into files: ``format("headrace_archive")``.

An archive does not change a record, so its bytes need not pass through Spark's own engine, which takes
each row apart and puts it together again, twice. Here Spark moves *spans*: a row says "offsets 0 to
500,000 of orders/0", and the task that gets it reads those records from the broker as Arrow and writes
them as Parquet, in one Python process. Everything else is as in any other query: Spark plans, keeps
the checkpoint, repeats what failed, spreads tasks over a cluster; the source is the streaming reader of
``format("headrace")`` with its limits and groups; the sink is the lake's.

Measured on two busy cores: 3 to 5 times the rows per second of the way through Spark's rows, and memory
that does not depend on the size of records.

The cost: in Spark's own progress, rows are spans. Tools that show progress count offsets
(``pipelines.reporting``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from headrace.spark.lake.sink import LakeStreamWriter
from headrace.spark.lake.table import Options
from headrace.spark.source.data_source import SpanPartition, read_span
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import TaskSpan, split
from headrace.spark.source.rows import RECORD, BatchMaker
from headrace.spark.source.stores import open_store
from headrace.spark.source.stream import HeadraceStreamReader

FORMAT = "headrace_archive"
SPLIT_BYTES = 64 << 20
"""The most that one task reads: many cores share a long backlog, and a failure repeats little."""

RECORDS = StructType()
for _name in ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "id"):
    RECORDS.add(_name, RECORD[_name])
ARCHIVE = StructType([*RECORDS.fields, StructField("date", DateType())])
"""The columns of an archive: a record's own, and the day (UTC) of its timestamp."""
_SPANS = StructType().add("topic", "string").add("partition", "integer")
for _name in ("start", "end", "incarnation"):
    _SPANS.add(_name, "long")


class ArchiveSource(DataSource):
    """Options: ``source``, those of ``format("headrace")`` as JSON; when writing, the lake's too."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return _SPANS

    def streamReader(self, schema: StructType) -> SpanReader:
        return SpanReader(SourceOptions.of(orjson.loads(self.options["source"])))

    def streamWriter(self, schema: StructType, overwrite: bool) -> SpanWriter:
        given = dict(self.options)
        source = SourceOptions.of(orjson.loads(given.pop("source")))
        return SpanWriter(Options.of(given), source)


class SpanReader(HeadraceStreamReader):
    """The streaming reader, but what it reads are the spans themselves."""

    def __init__(self, options: SourceOptions):
        super().__init__(options, RECORDS)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        found = self._planned(start, end)
        size = sum(self._weight(span) * span.rows for span in found)
        at_least = max(self._options.min_partitions or 1, round(size / SPLIT_BYTES))
        return [SpanPartition(span) for span in split(found, at_least)]

    def _weight(self, span: TaskSpan) -> float:
        topic = self._known.get(span.topic)
        extent = topic.partitions.get(span.partition) if topic is not None else None
        return extent.bytes_per_record if extent is not None else 0.0

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SpanPartition):
            yield pa.RecordBatch.from_pylist(
                [partition.span._asdict()], schema=to_arrow_schema(_SPANS)
            )


class SpanWriter(LakeStreamWriter):
    """The lake's writer, which reads the records of the spans that it is handed."""

    def __init__(self, options: Options, source: SourceOptions):
        super().__init__(options, ARCHIVE)
        self.incoming = _SPANS
        self._source = source

    def rows(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = BatchMaker(RECORDS, self._source.value_format)
        store = open_store(self._source)
        for batch in iterator:
            for each in batch.to_pylist():
                partition = SpanPartition(TaskSpan(**each))
                for records in read_span(store, self._source, rows, partition):
                    yield with_date(records)


def with_date(records: pa.RecordBatch) -> pa.RecordBatch:
    days = records.column("timestamp").cast(pa.date32(), safe=False)
    return records.append_column("date", days)
