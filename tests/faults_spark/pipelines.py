"""What is run between the kills. One line in ``PIPELINES`` makes another sink take part.

A pipeline starts a query in the driver's process, over the rows of the input topic that
:func:`transformed` gives it, and can say, in the runner's process, what has come out: how often each text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pyarrow import parquet

from headrace import BrokerClient
from headrace.spark import lake
from headrace.spark.builtin import archive
from headrace.spark.lake.tables import find_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

INPUT = "in"
OUTPUT = "out"
PARTITIONS = 2
Orders = dict[str, Any]
"""servers, checkpoint, directory (for what a pipeline wants to keep there), rows_per_batch."""


class Pipeline(NamedTuple):
    start: Callable[[SparkSession, Orders], StreamingQuery]
    """In the driver."""
    result: Callable[[Orders, BrokerClient], Counter[str]]
    """In the runner, when the query has ended."""


def transformed(spark: SparkSession, orders: Orders) -> DataFrame:
    """Every record of the input: its key, and a text that says where it was read and what it was."""
    source = spark.readStream.format("headrace").option("servers", orders["servers"])
    source = source.option("topic", INPUT).option("startingOffsets", "earliest")
    source = source.option("maxOffsetsPerTrigger", orders["rows_per_batch"])
    source = source.option("group", "faults")
    return source.load().selectExpr(
        "key", "concat(partition, '@', offset, ' ', cast(value AS string)) AS value"
    )


def expected(client: BrokerClient) -> Counter[str]:
    """What has to come out, by what lies in the input topic."""
    found: Counter[str] = Counter()
    for partition in range(PARTITIONS):
        for offset, value in enumerate(values(client, INPUT, partition)):
            found[f"{partition}@{offset} {value.decode()}"] += 1
    return found


def values(client: BrokerClient, topic: str, partition: int) -> list[bytes]:
    found: list[bytes] = []
    while more := client.fetch_values(topic, len(found), partition=partition, max_bytes=8 << 20):
        found += more
    return found


# --- into a topic -----------------------------------------------------------------------------------
def _to_topic(spark: SparkSession, orders: Orders) -> StreamingQuery:
    sink = transformed(spark, orders).writeStream.format("headrace")
    sink = sink.option("servers", orders["servers"]).option("topic", OUTPUT)
    return sink.option("checkpointLocation", orders["checkpoint"]).start()


def _in_topic(_orders: Orders, client: BrokerClient) -> Counter[str]:
    texts = (v.decode() for number in range(PARTITIONS) for v in values(client, OUTPUT, number))
    return Counter(texts)


# --- into a lake table --------------------------------------------------------------------------------
def _table(kind: str) -> Pipeline:
    def start(spark: SparkSession, orders: Orders) -> StreamingQuery:
        path = f"{orders['directory']}/table"
        rows = transformed(spark, orders)
        return lake.start(rows, path=path, kind=kind, checkpoint=orders["checkpoint"])

    def result(orders: Orders, _client: BrokerClient) -> Counter[str]:
        table = find_table(f"{orders['directory']}/table", kind)
        parts = [parquet.read_table(path, columns=["value"])["value"] for path in table.paths()]
        return Counter(text for part in parts for text in part.to_pylist())

    return Pipeline(start, result)


# --- the archive --------------------------------------------------------------------------------------
def _to_archive(spark: SparkSession, orders: Orders) -> StreamingQuery:
    return archive.start(
        spark,
        [INPUT],
        path=f"{orders['directory']}/archive",
        checkpoint=orders["checkpoint"],
        source={"servers": orders["servers"]},
        trigger={"processingTime": "0 seconds"},
    )


def _in_archive(orders: Orders, _client: BrokerClient) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in find_table(f"{orders['directory']}/archive").paths():
        rows = parquet.ParquetFile(path).read(columns=["partition", "offset", "value"])
        for row in rows.to_pylist():
            found[f"{row['partition']}@{row['offset']} {row['value'].decode()}"] += 1
    return found


PIPELINES = {
    "topic": Pipeline(_to_topic, _in_topic),
    "delta": _table("delta"),
    "iceberg": _table("iceberg"),
    "archive": Pipeline(_to_archive, _in_archive),
}
