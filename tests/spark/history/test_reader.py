"""Log and archive as one table: every record once, whatever the two do meanwhile."""

import pickle
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import MapType, StringType, StructType

from headrace import BrokerClient
from headrace.errors import Conflict, DataCorrupt, InvalidArgument, NotFound
from headrace.spark.builtin.archive_source import RECORDS
from headrace.spark.history import reader as history_reader
from headrace.spark.lake import Span, compact, vacuum
from headrace.spark.source.positions import DataLoss
from headrace.spark.versions import HAS_FILTERS, EqualTo, GreaterThanOrEqual, LessThan
from headrace.testing import RunningServer
from tests.spark.history.rig import Query, archive, drop_before, fill, places, rows_of, where

ALL = ("orders", (0, 0, 200), (1, 0, 200))
SINCE_4_1 = pytest.mark.skipif(
    not HAS_FILTERS, reason="filters are pushed to Python sources since Spark 4.1"
)
KINDS = pytest.mark.parametrize("kind", ["delta", "iceberg"])


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def at(number: int) -> datetime:
    """The time of the record with this offset."""
    return datetime.fromtimestamp(1_000_000_000 + number, UTC)


@KINDS
def test_every_record_once(
    server: RunningServer, client: BrokerClient, lake: Path, kind: str
) -> None:
    """Archived offsets come from the table, the others from the log; after retention and compaction, too."""
    fill(client)
    everything = {(r["partition"], r["offset"]): r for r in rows_of(
        server, [Span("orders", 0, 0, 200), Span("orders", 1, 0, 200)]).to_pylist()}  # fmt: skip
    archive(server, lake, Span("orders", 0, 0, 100), Span("orders", 1, 0, 60), kind=kind)
    archive(server, lake, Span("orders", 0, 100, 150), kind=kind, number=1)
    options = where(server, topic="orders", history=lake)
    query = Query(options)
    assert query.spans() == {("orders", 0, 150, 200), ("orders", 1, 60, 200)}
    assert query.places() == places(*ALL)

    assert drop_before(server, "orders", 0, 140) > 100
    compact(str(lake))
    query = Query(options, RECORDS)
    assert len(query.files) == 1
    rows = query.rows()
    assert len(rows) == 400
    for row in rows:
        assert {**row, "date": None} == {
            **everything[row["partition"], row["offset"]],
            "date": None,
        }


def test_columns_of_every_type(server: RunningServer, client: BrokerClient, lake: Path) -> None:
    """What the table gives is what the log gives, in every type that a column can have, and as JSON."""
    fill(client)
    archive(server, lake, Span("orders", 0, 0, 150))
    text = StructType().add("value", "string").add("key", "string").add("timestamp", "long")
    text.add("partition", "long").add("headers", MapType(StringType(), StringType()))
    text.add("offset", "long")
    json = StructType().add("n", "integer").add("_offset", "long").add("_corrupt", "string")
    for asked, value_format in ((text, "text"), (json, "json")):
        options = where(server, topic="orders", valueFormat=value_format)
        archived = Query({**options, "history": lake}, asked)
        assert archived.files
        log = history_reader.HeadraceReader(history_reader.SourceOptions.of(options), asked)
        plain = [
            row for task in log.partitions() for each in log.read(task) for row in each.to_pylist()
        ]
        assert sorted(map(repr, archived.rows())) == sorted(map(repr, plain))


@SINCE_4_1
def test_filters_reach_both(server: RunningServer, client: BrokerClient, lake: Path) -> None:
    """A filter on time, partition or offset leaves out files and spans, and no record that passes it."""
    fill(client)
    archive(server, lake, Span("orders", 0, 0, 100))
    archive(server, lake, Span("orders", 1, 0, 100), number=1)
    archive(server, lake, Span("orders", 0, 100, 150), number=2)
    drop_before(server, "orders", 0, 120)
    options = where(server, topic="orders", history=lake)

    def query(*filters: Any, **more: Any) -> Query:
        return Query({**options, **more}, filters=filters)

    found = query(EqualTo(("partition",), 1))
    assert found.left == []
    assert found.places() == places("orders", (1, 0, 200))
    assert (len(found.files), found.spans()) == (1, {("orders", 1, 100, 200)})

    found = query(GreaterThanOrEqual(("timestamp",), at(170)))
    assert (found.files, found.places()) == ([], places("orders", (0, 170, 200), (1, 170, 200)))
    found = query(GreaterThanOrEqual(("timestamp",), at(90)), LessThan(("timestamp",), at(110)))
    assert found.places() == places("orders", (0, 90, 110), (1, 90, 110))
    assert found.spans() == {("orders", 1, 100, 110)}
    found = query(GreaterThanOrEqual(("offset",), 30), LessThan(("offset",), 40))
    assert found.places() == places("orders", (0, 30, 40), (1, 30, 40))
    assert len(found.files) == 2

    found = query(startingTimestamp=at(95).isoformat(), endingTimestamp=at(105).isoformat())
    assert found.places() == places("orders", (0, 95, 105), (1, 95, 105))
    found = query(
        startingOffsets='{"orders": {"0": 10, "1": -2}}',
        endingOffsets='{"orders": {"0": 20, "1": 5}}',
    )
    assert found.places() == places("orders", (0, 10, 20), (1, 0, 5))


@SINCE_4_1
@KINDS
def test_a_time_in_joined_files(
    server: RunningServer, client: BrokerClient, lake: Path, kind: str
) -> None:
    """A file of several partitions is looked into: its statistics do not say where each of them begins."""
    fill(client)
    for number in range(4):
        low, high = 40 * number, 40 * (number + 1)
        spans = (Span("orders", 0, low, high), Span("orders", 1, low // 2, high // 2))
        archive(server, lake, *spans, kind=kind, number=number)
    compact(str(lake))
    drop_before(server, "orders", 0, 150)
    drop_before(server, "orders", 1, 70)
    options = where(server, topic="orders", history=lake)
    for number in (0, 33, 79, 80, 120, 159, 160, 199, 300):
        found = Query(options, filters=[GreaterThanOrEqual(("timestamp",), at(number))])
        assert found.places() == places("orders", (0, number, 200), (1, number, 200))


def test_retention_and_archive_go_on(
    server: RunningServer, client: BrokerClient, lake: Path
) -> None:
    """Offsets that are archived and deleted after a query was planned are read from the table after all."""
    fill(client)
    archive(server, lake, Span("orders", 0, 0, 100))
    options = where(server, topic="orders", history=lake)
    query = Query(options, RECORDS)
    before = {row["offset"]: row for row in Query(options, RECORDS).rows() if row["partition"] == 0}
    assert ("orders", 0, 100, 200) in query.spans()
    archive(server, lake, Span("orders", 0, 100, 190), number=1)
    assert drop_before(server, "orders", 0, 180) > 150
    query.reader = pickle.loads(pickle.dumps(query.reader))
    rows = query.rows()
    assert len(rows) == 400
    assert {row["offset"]: row for row in rows if row["partition"] == 0} == before


def test_the_archive_moves_on_while_it_is_planned(
    server: RunningServer, client: BrokerClient, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is the log's at the first look; a table that holds more by then adds nothing."""
    fill(client, partitions=1)
    archive(server, lake, Span("orders", 0, 0, 100))
    store = history_reader.HistoryStore
    look = store.look
    calls = []

    def late(self: Any) -> Any:
        if not calls:
            calls.append(1)
            fill(client, partitions=1)
            archive(server, lake, Span("orders", 0, 100, 300), number=1)
            drop_before(server, "orders", 0, 250)
        return look(self)

    monkeypatch.setattr(store, "look", late)
    query = Query(where(server, topic="orders", history=lake))
    assert query.places() == places("orders", (0, 0, 200))


def test_what_neither_has(
    server: RunningServer, client: BrokerClient, lake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets that were deleted and never archived are an error that names them, or a warning."""
    fill(client, partitions=1)
    archive(server, lake, Span("orders", 0, 0, 50))
    start = drop_before(server, "orders", 0, 100)
    options = where(server, topic="orders", history=lake)
    with pytest.raises(DataLoss, match=f"orders/0: offsets 50 to {start - 1} were deleted"):
        Query(options).rows()
    rest = Query({**options, "failOnDataLoss": "false"}).places()
    assert rest == places("orders", (0, 0, 50), (0, start, 200))
    assert f"offsets 50 to {start - 1}" in caplog.text


def test_topics_that_the_log_does_not_have(
    server: RunningServer, client: BrokerClient, lake: Path
) -> None:
    """A deleted topic is read from the table; one that was created again is refused."""
    fill(client)
    fill(client, "payments", 20, 1)
    spans = (Span("orders", 0, 0, 200), Span("payments", 0, 0, 20))
    archive(server, lake, *spans)
    client.delete_topic("payments")
    options = where(server, history=lake)
    assert Query({**options, "topic": "payments"}).places() == places("payments", (0, 0, 20))
    assert len(Query({**options, "topic": ">"}).places()) == 420
    with pytest.raises(NotFound, match="no topic 'refunds' in the log, nor in"):
        Query({**options, "topic": "refunds"})
    fill(client, "payments", 10, 1)
    with pytest.raises(Conflict, match="payments/0 that the log does not have") as caught:
        Query({**options, "topic": "payments"})
    assert caught.value.code == "other_log"


def test_a_directory_and_its_archive(
    server: RunningServer, client: BrokerClient, lake: Path
) -> None:
    """A stopped broker's log, or an older copy of it, has a history, too."""
    fill(client, partitions=1)
    archive(server, lake, Span("orders", 0, 0, 150))
    drop_before(server, "orders", 0, 120)
    server.stop()
    options = {"path": server.data_dir, "topic": "orders", "history": lake}
    assert Query(options).places() == places("orders", (0, 0, 200))
    with pytest.raises(InvalidArgument, match="give its table's path"):
        Query({**options, "history": "archive"})


def test_files_that_are_gone_or_damaged(
    server: RunningServer, client: BrokerClient, lake: Path
) -> None:
    """Reading them is an error that names the file and says what to do."""
    fill(client, partitions=1)
    archive(server, lake, Span("orders", 0, 0, 150))
    query = Query(where(server, topic="orders", history=lake))
    [path] = lake.rglob("topic=orders/**/*.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataCorrupt, match="archive verify"):
        query.rows()
    path.unlink()
    with pytest.raises(Conflict, match="is gone: it was removed, or vacuumed") as caught:
        query.rows()
    assert caught.value.code == "file_missing"


def test_many_tasks(
    server: RunningServer, client: BrokerClient, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files share a task, large ones are cut, and minPartitions is kept; every record still once."""
    fill(client, count=400, partitions=1)
    for number in range(5):
        archive(server, lake, Span("orders", 0, 60 * number, 60 * number + 60), number=number)
    options = where(server, topic="orders", history=lake)
    assert len(Query(options).tasks) == 2
    query = Query({**options, "minPartitions": "8"})
    assert len(query.tasks) >= 8
    assert query.places() == places("orders", (0, 0, 400))
    monkeypatch.setattr(history_reader, "TASK_BYTES", 500)
    query = Query(options)
    assert max(piece.parts for piece in query.files) > 1
    assert query.places() == places("orders", (0, 0, 400))


def test_a_vacuum_beside_a_reader(
    server: RunningServer, client: BrokerClient, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a compaction has just replaced stay for a day, however old they are."""
    fill(client, partitions=1)
    for number in range(3):
        archive(
            server,
            lake,
            Span("orders", 0, 50 * number, 50 * number + 50),
            kind="iceberg",
            number=number,
        )
    query = Query(where(server, topic="orders", history=lake))
    later = time.time() + 2 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    compact(str(lake))
    assert vacuum(str(lake)) == 0
    assert query.places() == places("orders", (0, 0, 200))
    monkeypatch.setattr(time, "time", lambda: later + 2 * 24 * 3600)
    assert vacuum(str(lake)) == 3
