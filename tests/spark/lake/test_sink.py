"""The lake sink in Spark: streams and batches into every kind of table, stopped and repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from headrace.errors import InvalidArgument
from headrace.spark import lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
LINE = "topic string, partition int, offset bigint, value string, day string"


def feed(directory: Path, number: int, start: int, end: int) -> None:
    """A file that the streams below take as their next rows."""
    directory.mkdir(exist_ok=True)
    lines = [
        {
            "topic": "orders",
            "partition": 0,
            "offset": each,
            "value": f"v{each}",
            "day": f"d{each % 2}",
        }
        for each in range(start, end)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / f"{number:03d}.json").write_text(text)


def stream(spark: SparkSession, directory: Path) -> DataFrame:
    return spark.readStream.schema(LINE).option("maxFilesPerTrigger", 1).json(str(directory))


def run(df: DataFrame, tmp_path: Path, kind: str, **options: Any) -> None:
    """All that is there, to the end."""
    query = lake.start(
        df,
        path=str(tmp_path / "table"),
        kind=kind,
        partition_by=["topic", "day"],
        checkpoint=str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
        options={"offsets": True, **options},
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


@pytest.mark.parametrize("kind", lake.KINDS)
def test_a_stream_into_a_table(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Batch by batch, over a restart, with a batch repeated whose commit Spark did not note."""
    feed(tmp_path / "in", 0, 0, 10)
    feed(tmp_path / "in", 1, 10, 25)
    run(stream(spark, tmp_path / "in"), tmp_path, kind)
    path = str(tmp_path / "table")
    assert lake.describe(path).offsets == lake.Offsets([lake.Span("orders", 0, 0, 25)])
    # The driver dies after the sink's commit and before Spark's own: the batch is done again.
    commits = tmp_path / "checkpoint" / "commits"
    (commits / "1").unlink()
    (commits / ".1.crc").unlink(missing_ok=True)
    feed(tmp_path / "in", 2, 25, 30)
    run(stream(spark, tmp_path / "in"), tmp_path, kind)
    table = lake.read(spark, path)
    assert table.columns == ["topic", "partition", "offset", "value", "day"]
    got = {row.offset: (row.topic, row.partition, row.value, row.day) for row in table.collect()}
    assert table.count() == 30
    assert got == {each: ("orders", 0, f"v{each}", f"d{each % 2}") for each in range(30)}
    found = lake.describe(path)
    assert (found.rows, found.offsets.count) == (30, 30)


def test_files_are_joined_while_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    """Every so many commits, without a row lost."""
    for number in range(6):
        feed(tmp_path / "in", number, number * 4, number * 4 + 4)
    run(stream(spark, tmp_path / "in"), tmp_path, "delta", compact_every=5)
    found = lake.describe(str(tmp_path / "table"))
    assert found.rows == 24
    assert found.files == 2 + 2, "two joined ones, and two of the last batch"


def test_a_lost_checkpoint_doubles_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """The query fails with what to do, and the table is as it was."""
    feed(tmp_path / "in", 0, 0, 10)
    run(stream(spark, tmp_path / "in"), tmp_path, "delta")
    (tmp_path / "checkpoint").rename(tmp_path / "lost")
    with pytest.raises(StreamingQueryException, match="holds orders/0@0-9 already"):
        run(stream(spark, tmp_path / "in"), tmp_path, "delta")
    assert lake.describe(str(tmp_path / "table")).rows == 10
    assert lake.vacuum(str(tmp_path / "table"), keep_s=0) == 0, (
        "the failed batch took its files back"
    )


def test_a_failing_task_is_repeated(spark: SparkSession, tmp_path: Path) -> None:
    """Its first attempt leaves nothing in the table."""
    feed(tmp_path / "in", 0, 0, 10)
    mark = tmp_path / "failed-once"

    def fail_once(value: str) -> str:
        if value == "v9" and not mark.exists():
            mark.touch()
            raise RuntimeError("a worker died")
        return value

    df = stream(spark, tmp_path / "in").withColumn(
        "value", F.udf(fail_once, useArrow=False)("value")
    )
    run(df, tmp_path, "delta")
    assert mark.exists()
    assert lake.describe(str(tmp_path / "table")).rows == 10


@pytest.mark.parametrize("kind", ["delta"])
def test_a_batch_into_a_table(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """One commit; with a name of its own it can be repeated."""
    df = spark.range(100).select("id", (F.col("id") % 3).cast("int").alias("third"))
    for _ in range(2):
        lake.write(
            df,
            path=str(tmp_path),
            kind=kind,
            partition_by=["third"],
            options={"app_id": "nightly-2026-01-31"},
        )
    back = lake.read(spark, str(tmp_path))
    assert back.dtypes == [("id", "bigint"), ("third", "int")]
    assert sorted(row.id for row in back.where("third = 1").collect()) == list(range(1, 100, 3))
    assert back.count() == 100


def test_every_session_writes_to_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Whichever session of the process is the active one."""
    for number, session in enumerate((spark.newSession(), spark, spark.newSession())):
        path = str(tmp_path / str(number))
        lake.write(session.range(3), path=path)
        assert lake.read(spark, path).count() == 3


def test_an_empty_table(spark: SparkSession, tmp_path: Path) -> None:
    """It can be read before anything was written."""
    lake.prepare(spark.range(1), path=str(tmp_path))
    assert lake.read(spark, str(tmp_path)).count() == 0


def test_mistakes_are_said_before_anything_starts(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no option colour"):
        lake.write(spark.range(1), path=str(tmp_path), options={"colour": "red"})
    with pytest.raises(InvalidArgument, match="one of delta, iceberg"):
        lake.write(spark.range(1), path=str(tmp_path), kind="orc")
    lake.prepare(spark.range(1), path=str(tmp_path / "t"))
    with pytest.raises(InvalidArgument, match="has no column x int"):
        lake.prepare(spark.range(1).withColumn("x", F.lit(1)), path=str(tmp_path / "t"))
