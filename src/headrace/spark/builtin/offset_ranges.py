"""Reading the records at some offsets, of topics and of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from pyspark.sql import functions as F

from headrace.spark.lake import Span
from headrace.spark.source.positions import Known

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def topic_rows(
    spark: SparkSession, source: Mapping[str, Any], known: Known, wanted: Iterable[Span]
) -> DataFrame:
    """The records in these ranges, one for each partition at most.

    Nothing is read of a partition without a range: it may have been added meanwhile.
    """
    starting = {topic: {str(n): 0 for n in each.partitions} for topic, each in known.items()}
    ending = {topic: dict(partitions) for topic, partitions in starting.items()}
    for topic, partition, start, end in wanted:
        starting[topic][str(partition)], ending[topic][str(partition)] = start, end
    reader = spark.read.format("headrace").options(**source).option("topic", ",".join(known))
    reader = reader.option("startingOffsets", orjson.dumps(starting).decode())
    return reader.option("endingOffsets", orjson.dumps(ending).decode()).load()


def is_within(ranges: Iterable[Span]) -> Column:
    """Whether a row of an archive is in one of these ranges."""
    inside = F.lit(False)
    for topic, partition, start, end in ranges:
        place = (F.col("topic") == topic) & (F.col("partition") == partition)
        inside = inside | (place & (F.col("offset") >= start) & (F.col("offset") < end))
    return inside
