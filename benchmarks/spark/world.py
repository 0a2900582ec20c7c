"""What the benchmarks share: a broker with topics full of records, and a session."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import ROOT, console, data_directory
from headrace.spark import session
from headrace.testing import ServerProcess, server_process

VALUE_BYTES = 100
PARTITIONS = 2
"""As many as ``local[2]`` reads at once; the same for Kafka and for Parquet."""
PUBLISHED = 10_000
"""Records of a batch in the broker, unless a benchmark says otherwise."""


@dataclass
class World:
    spark: SparkSession
    broker: ServerProcess
    directory: Path
    records: int
    quick: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def servers(self) -> str:
        return f"{self.broker.host}:{self.broker.port}"

    def options(self, topic: str, **more: Any) -> dict[str, Any]:
        return {"servers": self.servers, "topic": topic, **more}

    def topic(self, topic: str, **more: Any) -> DataFrame:
        return self.spark.read.format("headrace").options(**self.options(topic, **more)).load()

    def stream(self, topic: str, **more: Any) -> DataFrame:
        return (
            self.spark.readStream.format("headrace").options(**self.options(topic, **more)).load()
        )

    def fill(self, topic: str, records: int, each: int = PUBLISHED) -> None:
        """A topic of records of random bytes, in batches of ``each``, evenly over the partitions."""
        if records % (each * PARTITIONS):
            raise SystemExit(f"--records has to be a multiple of {each * PARTITIONS}")
        with self.broker.client(request_timeout=120) as client:
            client.create_topic(topic, partitions=PARTITIONS, durability="never")
            with console.status(f"filling {topic}: {records:,} records"):
                for number in range(records // each):
                    raw = os.urandom(VALUE_BYTES * each)
                    values = [raw[at : at + VALUE_BYTES] for at in range(0, len(raw), VALUE_BYTES)]
                    client.publish_many(topic, values, partition=number % PARTITIONS)

    def count(self, topic: str) -> int:
        """Records of a topic, as the broker says."""
        with self.broker.client() as client:
            found = client.positions(topic)[topic]
        return sum(each["end"] - each["start"] for each in found)

    def remove(self, topic: str) -> None:
        with self.broker.client() as client:
            client.delete_topic(topic)


@contextmanager
def world(records: int, *, quick: bool, jars: list[Path] | None = None) -> Iterator[World]:
    """A broker and a session; both end with it."""
    # Workers import the bare source from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    with (
        data_directory() as directory,
        server_process(directory / "data", retention_hours="none") as broker,
    ):
        conf = {"spark.jars": ",".join(map(str, jars))} if jars else {}
        spark = session("headrace-bench", "local[2]", log_level="ERROR", **conf)
        facts = {
            "command": "python -m benchmarks.spark " + " ".join(sys.argv[1:]),
            "records": records,
            "java": spark.sparkContext._jvm.System.getProperty("java.version"),  # type: ignore[union-attr]
            "spark": {name: version(name) for name in ("pyspark", "pyarrow")},
        }
        try:
            yield World(spark, broker, directory, records, quick, facts)
        finally:
            spark.stop()


def rows_per_second(count: int, work: Callable[[], int]) -> float:
    """How many a second; the work says how many it saw, which has to be that many."""
    started = time.perf_counter()
    seen = work()
    elapsed = time.perf_counter() - started
    if seen != count:
        raise AssertionError(f"{seen:,} rows instead of {count:,}")
    return count / elapsed


def counted(frame: DataFrame) -> int:
    return int(frame.groupBy().count().collect()[0][0])


def length_of_values(frame: DataFrame) -> int:
    """Rows, as the sum of the lengths of their values tells."""
    return int(frame.selectExpr("sum(length(value))").collect()[0][0]) // VALUE_BYTES
