"""``format("headrace")``: what Spark asks of a source, and the batch reader.

``spark.read.format("headrace").option("topic", "orders").load()`` plans here, in a Python process beside
the driver: it asks for the positions once and cuts the range into tasks, and each task reads its range
from the store by itself, wherever it runs. Streams are in ``stream.py``, the writers in ``sink/``.

The columns depend on ``valueFormat``:

- ``binary``, ``text``: the columns of ``arrow.py``, all of them, or those that ``columns`` or
  ``.schema(…)`` name. Fewer columns are faster: Spark asks a Python source for all columns of its schema.
- ``json``: the fields of the value as typed columns (``json_values.py``), as ``.schema(…)`` or the option
  ``schema`` name them. A record's own columns can be named, too, with an underscore in front
  (``_key _topic _partition _offset _timestamp _headers _id``, and ``_value``), so that no field can be
  mistaken for them. ``_corrupt`` is the text of a record that does not match the schema, and null for
  all others; the option ``schema`` always adds it.

Filters on topic, partition, offset and timestamp narrow the range, if Spark pushes filters to Python
sources at all (``spark.sql.python.filterPushdown.enabled``). While that is off, Spark refuses a reader
that *could* take filters, so only a reader that is created by the process which pushes them can.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from headrace import limits
from headrace.spark.options import wrong
from headrace.spark.source.filters import Narrowing
from headrace.spark.source.options import Place, SourceOptions
from headrace.spark.source.positions import Known, Positions, TaskSpan, ends, resolve, spans, split
from headrace.spark.source.rows import BatchMaker, default_schema
from headrace.spark.source.stores import Store, open_store, records

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


class HeadraceDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str:
        return default_schema(SourceOptions.of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.of(self.options)
        kind = FilteringReader if _filters_are_pushed() else HeadraceReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> Any:
        from headrace.spark.source.stream import HeadraceStreamReader

        return HeadraceStreamReader(SourceOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from headrace.spark.sink import writers

        return writers.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from headrace.spark.sink import writers

        return writers.stream_writer(self.options, schema, overwrite)


def _filters_are_pushed() -> bool:
    """Whether this process is the one that Spark starts to push filters, and only if it may."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN in sys.modules or getattr(main, "name", None) == _PUSHDOWN


class SpanPartition(InputPartition):
    """The span that one task reads."""

    def __init__(self, span: TaskSpan):
        self.span = span


def read_span(
    store: Store, options: SourceOptions, rows: BatchMaker, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """A task: the span's records as Arrow."""
    if not isinstance(partition, SpanPartition):  # Spark makes one when there is nothing to read
        return
    limits.keep_freed_memory()
    try:
        found = records(store, partition.span, fail_on_data_loss=options.fail_on_data_loss)
        yield from rows.batches(found, partition.span.topic, partition.span.partition)
    finally:
        store.close()


class HeadraceReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        self._rows = BatchMaker(schema, options.value_format)
        self._store = open_store(options)
        self._narrowing = Narrowing("_" if options.value_format == "json" else "")
        starting, ending = options.starting, options.ending
        if starting is not None and starting.kind in ("latest", "group"):
            raise wrong(starting.option, f"a batch cannot begin at {starting.kind}; use a stream")
        if ending is not None and ending.kind == "earliest":
            raise wrong(ending.option, "a batch cannot end at earliest")
        for name, value in (
            ("maxOffsetsPerTrigger", options.max_offsets_per_trigger),
            ("maxBytesPerTrigger", options.max_bytes_per_trigger),
            ("group", options.group),
        ):
            if value is not None:
                raise wrong(name, "it is for streams (readStream)")

    def partitions(self) -> list[InputPartition]:
        try:
            found = self._plan()
        finally:
            self._store.close()
        return [SpanPartition(span) for span in found]

    def _plan(self) -> list[TaskSpan]:
        options, store = self._options, self._store
        starting = options.starting or Place("earliest", "startingOffsets")
        ending = options.ending or Place("latest", "endingOffsets")
        known = store.topics(options.topics)
        begin = self._resolve(starting, known)
        # Both ends come from one look at the log: a record is in the range or it is not.
        end = self._resolve(ending, known)
        found = self._narrowing.narrow(spans(begin, end), self._at)
        return split(found, options.min_partitions)

    def _resolve(self, place: Place, known: Known) -> Positions:
        if place.time_ms is None:
            return resolve(place, known, {})
        at = self._at(place.time_ms)
        found = ends(known)
        for topic, some in found.offsets.items():
            for number, end in some.items():
                found.put(topic, number, min(at.get((topic, number), 0), end))
        return found

    def _at(self, time_ms: int) -> dict[tuple[str, int], int]:
        """The first offset at or after a time, of every partition."""
        found = self._store.topics(self._options.topics, time_ms)
        return {
            (topic, number): extent.at or 0
            for topic, state in found.items()
            for number, extent in state.partitions.items()
        }

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(self._store, self._options, self._rows, partition)


class FilteringReader(HeadraceReader):
    """The same, when Spark hands filters over."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Yields the filters that Spark must apply itself."""
        for each in filters:
            if not self._narrowing.take(each):
                yield each
