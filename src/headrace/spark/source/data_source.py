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
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace import limits
from headrace.spark.options import wrong
from headrace.spark.source.chosen import ChosenTopics
from headrace.spark.source.filters import Narrowing
from headrace.spark.source.options import Place, SourceOptions
from headrace.spark.source.positions import TaskSpan, spans, split
from headrace.spark.source.rows import BatchMaker, default_schema
from headrace.spark.source.stores import Store, open_store, records
from headrace.spark.versions import Filter

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


class HeadraceDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace"

    def schema(self) -> str | StructType:
        if "deadLetters" in self.options:
            from headrace.spark.letters import LetterOptions

            return LetterOptions.of(self.options).schema()
        return default_schema(SourceOptions.of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        if "deadLetters" in self.options:
            from headrace.spark.letters import LetterOptions, LetterReader

            return LetterReader(LetterOptions.of(self.options), schema)
        options = SourceOptions.of(self.options)
        if options.history is not None:
            from headrace.spark.history import reader

            return reader.of(options, schema, filtering=_filters_are_pushed())
        kind = FilteringReader if _filters_are_pushed() else HeadraceReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> Any:
        from headrace.spark.source.stream import HeadraceStreamReader

        return HeadraceStreamReader(SourceOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        if "redrive" in self.options:
            from headrace.spark.letters import redrive_writer

            return redrive_writer(self.options, schema, overwrite)
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
        self._chosen = ChosenTopics(options, self._store)
        self._narrowing = Narrowing("_" if options.value_format == "json" else "")
        starting, ending = options.starting, options.ending
        if starting is not None and starting.kind in ("latest", "group"):
            raise wrong(starting.option, f"a batch cannot begin at {starting.kind}; use a stream")
        if ending is not None and ending.kind == "earliest":
            raise wrong(ending.option, "a batch cannot end at earliest")
        for name, value in (
            ("minOffsetsPerTrigger", options.min_offsets_per_trigger),
            ("maxOffsetsPerTrigger", options.max_offsets_per_trigger),
            ("maxBytesPerTrigger", options.max_bytes_per_trigger),
            ("group", options.group),
        ):
            if value is not None:
                raise wrong(name, "it is for streams (readStream)")

    def partitions(self) -> list[InputPartition]:
        try:
            return self._tasks(self._plan())
        finally:
            self._store.close()

    def _tasks(self, found: list[TaskSpan]) -> list[InputPartition]:
        return [SpanPartition(span) for span in split(found, self._options.min_partitions)]

    def _plan(self) -> list[TaskSpan]:
        options, chosen = self._options, self._chosen
        starting = options.starting or Place("earliest", "startingOffsets")
        ending = options.ending or Place("latest", "endingOffsets")
        known = chosen.some()
        begin = chosen.resolve(starting, known)
        # Both ends come from one look at the log: a record is in the range or it is not.
        end = chosen.resolve(ending, known)
        topics = set(known)
        return self._narrowing.narrow(spans(begin, end), lambda at: chosen.at(at, topics))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_span(self._store, self._options, self._rows, partition)


class FilteringReader(HeadraceReader):
    """The same, when Spark hands filters over."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Yields the filters that Spark must apply itself."""
        for each in filters:
            if not self._narrowing.take(each):
                yield each
