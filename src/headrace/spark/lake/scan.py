"""Reading a table of an object store, without Spark's own connectors: ``spark.read.format("headrace_lake")``.

Spark reads ``s3://`` only with jars and credentials of its own. The driver and the executors have ours already, so
they read the files as they wrote them: through the table's :class:`~headrace.spark.lake.stores.FileStore`, as
Arrow. The files are those of the moment in which the query is planned, whatever is committed or joined meanwhile.

A task reads whole files, about :data:`TASK_BYTES` of them. Columns that name directories are read off the names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headrace.spark.lake.stores import FileStore, explained
from headrace.spark.lake.table import Options
from headrace.spark.lake.tables import open_table

TASK_BYTES = 64 << 20
BATCH_ROWS = 20_000


@dataclass
class FilesPartition(InputPartition):
    """Names of files, and the columns that name directories."""

    names: tuple[str, ...]
    named_by: tuple[str, ...]


class LakeReader(DataSourceReader):
    """A table as it is now."""

    def __init__(self, options: Options, schema: StructType, without: Collection[str] = ()):
        """``without``: the names of files that are left out."""
        self._options = options
        self._schema = schema
        self._without = set(without)

    def partitions(self) -> Sequence[InputPartition]:
        table = open_table(self._options)
        groups: list[list[str]] = []
        size = TASK_BYTES
        for name, length in table.sizes():
            if name in self._without:
                continue
            if size + length > TASK_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += length
        _, named_by = table.shape()
        return [FilesPartition(tuple(each), named_by) for each in groups or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, FilesPartition)
        wanted = to_arrow_schema(self._schema, timezone="UTC")
        types = pa.schema(wanted.field(each) for each in partition.named_by if each in wanted.names)
        store = open_table(self._options).store()
        for name in partition.names:
            yield from read_file(store, name, wanted, types)


def read_file(
    store: FileStore, name: str, wanted: pa.Schema, directories: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of one file with these columns. ``directories`` are the columns that may name directories."""
    named = ds.get_partition_keys(ds.partitioning(directories, flavor="hive").parse(name))
    with explained(store.place):
        file = pq.ParquetFile(store.filesystem.open_input_file(store.path(name)), pre_buffer=True)
        has = set(file.schema_arrow.names)
        columns = [each for each in wanted.names if each in has]
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            arrays = [
                batch.column(field.name).cast(field.type)
                if field.name in has
                else pa.repeat(pa.scalar(named.get(field.name), field.type), batch.num_rows)
                for field in wanted
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=wanted)
