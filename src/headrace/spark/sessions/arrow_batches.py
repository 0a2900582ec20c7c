"""How Spark hands rows to Python: in Arrow batches that are bounded by rows, not measured by bytes.

Spark measures a batch after every row, to bound it by ``spark.sql.execution.arrow.maxBytesPerBatch`` (64 MB).
For a column of lists, such as headers, that is a loop over all rows so far: measured, more than ten times
the cost of everything else; without such a column still three times. So a write of ours is bounded by a
few thousand rows alone, unless the session sets the bytes itself. With records of many megabytes set
``spark.sql.execution.arrow.maxRecordsPerBatch`` lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES_DEFAULT = 64 << 20
_UNKNOWN = "1"
UNMEASURED = (1 << 31) - 1
ROWS_MAX = 4_000


@contextmanager
def unmeasured(spark: SparkSession) -> Iterator[None]:
    """For queries that start inside. A query keeps its settings, so the session gets its own back."""
    # Spark 4.0 does not know the bytes; Spark Connect checks the default as if it were set.
    before = {name: str(spark.conf.get(name, _UNKNOWN)) for name in (BYTES, ROWS)}
    if before[BYTES].rstrip("b") == str(_BYTES_DEFAULT):
        spark.conf.set(BYTES, UNMEASURED)
        if not 0 < int(before[ROWS]) <= ROWS_MAX:
            spark.conf.set(ROWS, ROWS_MAX)
    try:
        yield
    finally:
        for name, value in before.items():
            if value != _UNKNOWN:
                spark.conf.set(name, value)
