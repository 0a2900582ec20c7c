"""PySpark 4.0 to 4.3: what an older one lacks has a stand-in here, and everything else imports from here.

=========================================  ======  ==========================================================
PySpark has                                since   in an older one
=========================================  ======  ==========================================================
filters that are pushed to Python sources  4.1     Spark filters itself; the classes here are never used
writers of streams that take Arrow         4.1     rows come one by one; they are gathered into Arrow batches
admission control of streams               4.2     a batch takes everything; limits per trigger are refused
a target for ``Trigger.AvailableNow``      4.2     Spark runs one batch
=========================================  ======  ==========================================================

Older readers are asked ``latestOffset()`` without the position: ``source/stream.py`` remembers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

VERSION = ".".join(pyspark.__version__.split(".")[:2])
ROWS_GATHERED = 4_000

# --- schemas ------------------------------------------------------------------------------------------
_UTC = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}


def to_utc_schema(schema: StructType) -> pa.Schema:
    """As Arrow has it, with timestamps in UTC. Older ones have no other zone."""
    return to_arrow_schema(schema, **_UTC)  # type: ignore[arg-type]


# --- filters: 4.1 -------------------------------------------------------------------------------------
_FILTERS = (
    "EqualNullSafe", "EqualTo", "Filter", "GreaterThan", "GreaterThanOrEqual", "In", "IsNotNull",
    "LessThan", "LessThanOrEqual",
)  # fmt: skip


HAS_FILTERS = hasattr(datasource, "Filter")


def _found(name: str) -> Any:
    return getattr(datasource, name, None) or type(name, (), {})


(
    EqualNullSafe, EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, IsNotNull, LessThan,
    LessThanOrEqual,
) = map(_found, _FILTERS)  # fmt: skip

# --- admission control: 4.2 -----------------------------------------------------------------------------
try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )

    HAS_ADMISSION_CONTROL = True
except ImportError:  # pragma: no cover - the tests of make test-spark-versions
    HAS_ADMISSION_CONTROL = False

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may take."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """Everything."""

    @dataclass
    class ReadMinRows(ReadLimit):  # type: ignore[no-redef]
        min_rows: int

    @dataclass
    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        max_bytes: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Spark does not ask for it."""


# --- Arrow in the writers of streams: 4.1 -----------------------------------------------------------------
def arrow_batches(rows: Iterator[Any], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Rows as Spark 4.0 hands them to the writer of a stream."""
    from pyspark.sql import conversion

    types = to_utc_schema(schema)
    while some := list(islice(rows, ROWS_GATHERED)):
        table = conversion.LocalDataToArrowConversion.convert(some, schema, False)
        yield from table.cast(types).combine_chunks().to_batches()


try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
except ImportError:  # pragma: no cover

    class StreamArrowWriter(datasource.DataSourceStreamWriter):  # type: ignore[no-redef]
        """Its ``write`` gets Arrow batches of the columns ``incoming``, as in newer ones."""

        incoming: StructType

        def __init_subclass__(cls) -> None:
            write: Any = cls.write
            if hasattr(write, "takes_rows"):  # of a class above
                return

            def write_rows(self: Any, iterator: Iterator[Any]) -> Any:
                return write(self, arrow_batches(iterator, self.incoming))

            write_rows.takes_rows = True  # type: ignore[attr-defined]
            cls.write = write_rows  # type: ignore[method-assign]


__all__ = [
    "HAS_ADMISSION_CONTROL", "HAS_FILTERS", "VERSION", "ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows",
    "ReadMinRows", "StreamArrowWriter", "SupportsTriggerAvailableNow", "to_utc_schema", *_FILTERS,
]  # fmt: skip
