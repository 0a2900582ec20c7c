"""An archive that is not what the log is, is found out, to the offset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import BrokerClient
from headrace.errors import InvalidArgument
from headrace.model import Message
from headrace.spark import lake
from headrace.spark.builtin import archive, archive_verify
from headrace.spark.builtin.archive_source import ARCHIVE, with_date
from headrace.spark.builtin.archive_verify import Difference, verify
from headrace.spark.lake import Offsets, Span, schemas
from headrace.spark.lake.tables import find_table
from headrace.testing import RunningServer, running_server
from tests.spark.lake.rig import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
RECORDS = 250


@pytest.fixture(scope="module")
def log() -> Iterator[RunningServer]:
    """A topic of 250 records in two partitions, for all tests here."""
    with running_server() as server:
        with server.client() as client:
            client.create_topic("orders", 2)
            for number in range(RECORDS):
                client.publish(
                    "orders", b"order %d" % number, {"n": str(number)}, partition=number % 2
                )
            client.flush()
        yield server


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_verify, "BUCKET", 20)


def where(server: RunningServer) -> dict[str, Any]:
    return {"servers": f"{server.host}:{server.port}"}


def messages_of(client: BrokerClient, partition: int) -> Iterator[Message]:
    """All of them: one fetch ends where a segment does."""
    offset = 0
    while found := client.fetch("orders", offset, partition=partition):
        yield from found
        offset = found[-1].offset + 1


def rows_of(server: RunningServer) -> pa.Table:
    """What an archive of it holds, made without Spark."""
    columns: dict[str, list[Any]] = {name: [] for name in ARCHIVE.fieldNames()[:-1]}
    with server.client() as client:
        for partition in (0, 1):
            for message in messages_of(client, partition):
                headers = [{"key": k, "value": v.encode()} for k, v in message.headers.items()]
                for name, value in (
                    ("topic", message.topic),
                    ("partition", partition),
                    ("offset", message.offset),
                    ("timestamp", message.timestamp * 1000),
                    ("key", message.key),
                    ("value", message.value),
                    ("headers", headers),
                    ("id", str(message.id)),
                ):
                    columns[name].append(value)
    schema = schemas.to_arrow(ARCHIVE)
    arrays = [pa.array(values, schema.field(name).type) for name, values in columns.items()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    return pa.Table.from_batches([with_date(batch)])


def put(rows: pa.Table, path: Path, number: int = 0) -> None:
    append(
        rows,
        path=str(path),
        partition_by=",".join(archive.PARTITION_BY),
        app_id="test",
        number=number,
        offsets=True,
    )


def tamper(path: Path, change: Any) -> None:
    """Rewrite the files of a table behind its back."""
    for name in lake.tables.find_table(str(path)).paths():  # type: ignore[attr-defined]
        table = pq.read_table(name, partitioning=None)
        pq.write_table(change(table), name)


def test_a_good_archive(spark: SparkSession, log: RunningServer, tmp_path: Path) -> None:
    """Record by record the same, by the broker and by its directory."""
    put(rows_of(log), tmp_path)
    verdict = verify(spark, str(tmp_path), where(log))
    assert verdict.is_good
    assert verdict.records == RECORDS
    assert verdict.compared == Offsets([Span("orders", 0, 0, 125), Span("orders", 1, 0, 125)])
    assert not verdict.waiting
    assert not verdict.only_in_table
    again = verify(spark, str(tmp_path), {"path": str(log.data_dir)}, topics=["orders"])
    assert again.as_document() == verdict.as_document()


def test_a_bad_archive(spark: SparkSession, log: RunningServer, tmp_path: Path) -> None:
    """A changed value, a missing row, a doubled one, and a header: each by its offset."""
    put(rows_of(log), tmp_path)

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        by_place = {(row["partition"], row["offset"]): row for row in rows}
        by_place[0, 7]["value"] = b"forged"
        by_place[1, 30]["headers"] = []
        rows.remove(by_place[0, 50])
        rows.append(by_place[1, 77])
        for offset in range(100, 125):
            rows.remove(by_place[1, offset])
        return pa.Table.from_pylist(rows, schema=table.schema)

    tamper(tmp_path, change)
    verdict = verify(spark, str(tmp_path), where(log))
    assert not verdict.is_good
    assert set(verdict.differences) == {
        Difference("changed", Span("orders", 0, 7, 8)),
        Difference("changed", Span("orders", 1, 30, 31)),
        Difference("missing", Span("orders", 0, 50, 51)),
        Difference("doubled", Span("orders", 1, 77, 78)),
        Difference("missing", Span("orders", 1, 100, 125)),
    }
    assert str(Difference("missing", Span("orders", 1, 100, 125))) == (
        "orders/1@100-124 is in the log and not in the table"
    )


def test_what_only_one_of_them_has(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """Retention and lag are no differences; rows that the log never had are."""
    client.create_topic("orders", 2, retention_hours=None, segment_bytes=4096)
    for number in range(200):
        client.publish("orders", b"x" * 100, partition=number % 2)
    client.flush()
    rows = rows_of(server)
    put(rows.filter(pa.compute.less(rows["offset"], 90)), tmp_path)
    verdict = verify(spark, str(tmp_path), where(server))
    assert verdict.is_good
    assert verdict.waiting == Offsets([Span("orders", 0, 90, 100), Span("orders", 1, 90, 100)])

    late = rows.filter(pa.compute.greater_equal(rows["offset"], 90)).to_pylist()
    late += [{**row, "offset": row["offset"] + 10} for row in late]
    put(pa.Table.from_pylist(late, schema=rows.schema), tmp_path, 1)
    verdict = verify(spark, str(tmp_path), where(server))
    assert set(verdict.differences) == {
        Difference("extra", Span("orders", 0, 100, 110)),
        Difference("extra", Span("orders", 1, 100, 110)),
    }


def test_topics_that_are_gone(
    spark: SparkSession, server: RunningServer, client: BrokerClient, tmp_path: Path
) -> None:
    """They are named, and what the table alone has is checked against its manifest."""
    client.create_topic("orders", 2)
    client.publish_many("orders", [b"a"] * 50, partition=0)
    put(rows_of(server), tmp_path)
    client.delete_topic("orders")
    verdict = verify(spark, str(tmp_path), where(server))
    assert (verdict.gone, verdict.is_good, verdict.records) == (["orders"], True, 0)
    tamper(tmp_path, lambda table: table.slice(10))
    verdict = verify(spark, str(tmp_path), where(server))
    assert verdict.differences == [Difference("lost", Span("orders", 0, 0, 10))]


def test_not_an_archive(spark: SparkSession, tmp_path: Path) -> None:
    append(pa.table({"n": [1]}), path=str(tmp_path), app_id="x", number=0)
    with pytest.raises(InvalidArgument, match="keeps no offset ranges"):
        verify(spark, str(tmp_path), {"servers": "127.0.0.1:1"})


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_files_that_cannot_be_read(
    spark: SparkSession, log: RunningServer, tmp_path: Path, kind: str
) -> None:
    """Each is named with the offsets that it held; the rest is compared, and good."""
    rows = rows_of(log)
    for number in range(4):
        inside = pa.compute.equal(pa.compute.divide(rows["offset"], 40), number)
        options = {"offsets": True, "partition_by": "topic,date", "compact_every": 0}
        append(
            rows.filter(inside), path=str(tmp_path), kind=kind, app_id="q", number=number, **options
        )
    missing, footer, inner = (Path(each) for each in sorted(find_table(str(tmp_path)).paths())[:3])
    held = {
        each: pq.read_table(each, partitioning=None).to_pylist()
        for each in (missing, footer, inner)
    }
    missing.unlink()
    footer.write_bytes(footer.read_bytes()[:-20])
    raw = inner.read_bytes()
    inner.write_bytes(raw[:20] + bytes(1000) + raw[1020:])
    verdict = verify(spark, str(tmp_path), where(log))
    assert {file.path: file.why for file in verdict.files} == {
        str(missing): "is missing", str(footer): "is damaged", str(inner): "is damaged",
    }  # fmt: skip
    for file in verdict.files:
        found = {(span.partition, n) for span in file.offsets for n in range(span.start, span.end)}
        assert found == {(row["partition"], row["offset"]) for row in held[Path(file.path)]}
    assert (verdict.differences, verdict.is_good) == ([], False)
    assert verdict.records == RECORDS - sum(map(len, held.values()))
    [first] = [file for file in verdict.files if file.path == str(missing)]
    assert str(first).startswith(f"{missing} is missing; it held orders/0@")
    assert {each["why"] for each in verdict.as_document()["files"]} == {"is missing", "is damaged"}
