"""Topics as streams: the reader by itself, and a few queries on a real Spark."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from headrace import BrokerClient
from headrace.errors import InvalidArgument
from headrace.spark.source import stream
from headrace.spark.source.data_source import SpanPartition
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import DataLoss
from headrace.spark.source.stream import HeadraceStreamReader
from headrace.spark.versions import (
    HAS_ADMISSION_CONTROL,
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)
from headrace.testing import RunningServer, wait_until

pytestmark = pytest.mark.xdist_group("spark")
SCHEMA = StructType([StructField("value", BinaryType()), StructField("offset", LongType())])
ALL = ReadAllAvailable()
needs_admission_control = pytest.mark.skipif(
    not HAS_ADMISSION_CONTROL, reason="it is new in Spark 4.2"
)
Open = Callable[..., HeadraceStreamReader]


@pytest.fixture
def opened(server: RunningServer) -> Iterator[Open]:
    """A reader as Spark makes it, one for each start of a query."""
    readers: list[HeadraceStreamReader] = []

    def open_it(topic: str = "orders", **options: Any) -> HeadraceStreamReader:
        given = {
            "servers": f"{server.host}:{server.port}",
            "topic": topic,
            "timeout": "20",
            **options,
        }
        readers.append(HeadraceStreamReader(SourceOptions.of(given), SCHEMA))
        return readers[-1]

    yield open_it
    for reader in readers:
        reader.stop()


def fill(client: BrokerClient, topic: str, count: int, partition: int = 0) -> None:
    client.publish_many(topic, [b"x" * 100] * count, partition=partition)


def read_range(reader: HeadraceStreamReader, start: Any, end: Any) -> dict[str, int]:
    """How many records the tasks of a batch read, by topic and partition."""
    found: dict[str, int] = {}
    for partition in reader.partitions(travelled(start), travelled(end)):
        assert isinstance(partition, SpanPartition)
        name = f"{partition.span.topic}/{partition.span.partition}"
        for batch in reader.read(partition):
            found[name] = found.get(name, 0) + batch.num_rows
    return found


def travelled(offset: Any) -> Any:
    """As it comes back from a checkpoint."""
    return json.loads(json.dumps(offset))


# --- the reader by itself -----------------------------------------------------------------------------
def test_batches_follow_each_other(opened: Open, client: BrokerClient) -> None:
    """Everything that is there, then nothing, then what is new."""
    client.create_topic("orders", partitions=2)
    fill(client, "orders", 10)
    fill(client, "orders", 5, 1)
    reader = opened(startingOffsets="earliest")
    first = travelled(reader.initialOffset())
    assert first["orders"] == {"0": 0, "1": 0}
    second = travelled(reader.latestOffset(first, ALL))
    assert second["orders"] == {"0": 10, "1": 5}
    assert read_range(reader, first, second) == {"orders/0": 10, "orders/1": 5}
    assert travelled(reader.latestOffset(second, ALL)) == second
    assert reader.partitions(second, second) == []
    fill(client, "orders", 3, 1)
    third = travelled(reader.latestOffset(second, ALL))
    assert third["orders"] == {"0": 10, "1": 8}
    assert read_range(reader, second, third) == {"orders/1": 3}
    assert travelled(reader.reportLatestOffset()) == third


def test_where_it_begins(opened: Open, client: BrokerClient) -> None:
    """Latest by default; the same answer however often it is asked."""
    fill(client, "orders", 10)
    reader = opened()
    assert reader.initialOffset()["orders"] == {"0": 10}
    fill(client, "orders", 5)
    assert reader.initialOffset()["orders"] == {"0": 10}
    assert opened(startingOffsets='{"orders": {"0": 7}}').initialOffset()["orders"] == {"0": 7}
    assert opened(startingTimestamp="0").initialOffset()["orders"] == {"0": 0}
    with pytest.raises(InvalidArgument, match="option endingOffsets"):
        opened(endingOffsets="latest")
    with pytest.raises(InvalidArgument, match="option startingOffsets"):
        opened(startingOffsets="group")


def test_a_first_batch_that_is_repeated_begins_where_it_began(
    opened: Open, client: BrokerClient
) -> None:
    """After a crash in it "latest" is another place, and Spark asks again."""
    fill(client, "orders", 10)
    reader = opened()
    first = travelled(reader.initialOffset())
    fill(client, "orders", 5)
    end = travelled(reader.latestOffset(first, ALL))
    fill(client, "orders", 7)
    again = opened()
    assert read_range(again, again.initialOffset(), end) == {"orders/0": 5}
    after = travelled(again.latestOffset(end, ALL))
    assert read_range(again, end, after) == {"orders/0": 7}
    assert "@begin" not in after


def test_where_a_query_began_is_kept_though_nothing_came(
    opened: Open, client: BrokerClient
) -> None:
    """Its first batch is empty, and is run: what comes while it is down is not skipped."""
    fill(client, "orders", 10)
    reader = opened()
    first = travelled(reader.initialOffset())
    end = travelled(reader.latestOffset(first, ALL))
    assert end != first
    assert reader.partitions(first, end) == []
    assert travelled(reader.latestOffset(end, ALL)) == end
    fill(client, "orders", 4)
    again = opened()
    assert read_range(again, end, again.latestOffset(end, ALL)) == {"orders/0": 4}


@needs_admission_control
def test_limits(opened: Open, client: BrokerClient) -> None:
    """Rows, bytes, or both; not when Spark asks for everything."""
    client.create_topic("orders", partitions=2)
    fill(client, "orders", 300)
    fill(client, "orders", 100, 1)
    rows = opened(startingOffsets="earliest", maxOffsetsPerTrigger=40)
    assert rows.getDefaultReadLimit() == ReadMaxRows(40)
    start = rows.initialOffset()
    end = rows.latestOffset(start, ReadMaxRows(40))
    assert end["orders"] == {"0": 30, "1": 10}
    assert rows.latestOffset(start, ALL)["orders"] == {"0": 300, "1": 100}
    size = opened(startingOffsets="earliest", maxBytesPerTrigger="4k")
    assert size.getDefaultReadLimit() == ReadMaxBytes(4096)
    end = size.latestOffset(start, ReadMaxBytes(4096))
    assert 20 <= sum(end["orders"].values()) <= 40
    both = opened(startingOffsets="earliest", maxOffsetsPerTrigger=40, maxBytesPerTrigger="1k")
    assert sum(both.latestOffset(start, ReadMaxRows(40))["orders"].values()) <= 10
    assert opened().getDefaultReadLimit() == ALL


@needs_admission_control
def test_a_batch_waits_until_it_is_large_enough(
    opened: Open, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one does not; a later one does, until there are enough records or it has waited long."""
    now = 0.0
    monkeypatch.setattr(
        stream, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None)
    )
    fill(client, "orders", 3)
    reader = opened(startingOffsets="earliest", minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    first = reader.latestOffset(travelled(reader.initialOffset()), limit)
    assert first["orders"] == {"0": 3}
    fill(client, "orders", 9)
    assert reader.latestOffset(travelled(first), limit) == first
    assert reader.latestOffset(travelled(first), ALL)["orders"] == {"0": 12}  # Trigger.Once
    now = 59.0
    assert reader.latestOffset(travelled(first), limit) == first
    fill(client, "orders", 1)
    second = reader.latestOffset(travelled(first), limit)
    assert second["orders"] == {"0": 13}
    fill(client, "orders", 2)
    assert reader.latestOffset(travelled(second), limit) == second
    now = 119.0
    third = reader.latestOffset(travelled(second), limit)
    assert third["orders"] == {"0": 15}
    fill(client, "orders", 2)
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(travelled(third), limit)["orders"] == {"0": 17}


def test_topics_that_come_to_match_a_regular_expression(
    opened: Open, client: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A query may begin before there are any; each topic has its own subscription of the group."""
    reader = opened("", subscribePattern="ord.*", startingOffsets="earliest", group="billing")
    start = travelled(reader.initialOffset())
    assert "nothing to read yet: no topic matches the regular expression" in caplog.text
    assert travelled(reader.latestOffset(start, ALL)) == start
    fill(client, "orders", 4)
    fill(client, "others", 4)
    end = travelled(reader.latestOffset(start, ALL))
    assert read_range(reader, start, end) == {"orders/0": 4}
    reader.commit(end)
    assert client.subscription_stats("billing", "orders")["lag"] == 0
    again = opened("", subscribePattern="ord.*", startingOffsets="group", group="billing")
    assert again.initialOffset()["orders"] == {"0": 4}


def test_partitions_that_are_not_assigned_are_no_news(opened: Open, client: BrokerClient) -> None:
    """Neither when they grow nor when they are added."""
    client.create_topic("orders", partitions=2)
    reader = opened("", assign='{"orders": [1]}', startingOffsets="earliest")
    start = travelled(reader.initialOffset())
    assert start["orders"] == {"1": 0}
    fill(client, "orders", 4, 0)
    assert travelled(reader.latestOffset(start, ALL)) == start
    fill(client, "orders", 5, 1)
    client.change_topic("orders", partitions=3)
    fill(client, "orders", 6, 2)
    end = travelled(reader.latestOffset(start, ALL))
    assert read_range(reader, start, end) == {"orders/1": 5}


@needs_admission_control
def test_what_is_available_now(opened: Open, client: BrokerClient) -> None:
    """What was there at the beginning, in batches; then nothing, whatever comes."""
    client.create_topic("orders.eu")
    fill(client, "orders.eu", 25)
    reader = opened("orders.*", startingOffsets="earliest", maxOffsetsPerTrigger=10)
    reader.prepareForTriggerAvailableNow()
    fill(client, "orders.eu", 25)
    fill(client, "orders.us", 5)
    position, sizes = travelled(reader.initialOffset()), []
    while (end := travelled(reader.latestOffset(position, ReadMaxRows(10)))) != position:
        sizes.append(sum(read_range(reader, position, end).values()))
        position = end
    assert sizes == [10, 10, 5]
    # The next run goes on from there, with what was added.
    again = opened("orders.*", startingOffsets="earliest")
    again.prepareForTriggerAvailableNow()
    end = travelled(again.latestOffset(position, ALL))
    assert read_range(again, position, end) == {"orders.eu/0": 25, "orders.us/0": 5}
    assert travelled(again.latestOffset(end, ALL)) == end


def test_partitions_and_topics_that_are_added(opened: Open, client: BrokerClient) -> None:
    """They are read from their beginning."""
    client.create_topic("orders.eu")
    fill(client, "orders.eu", 5)
    reader = opened("orders.*", minPartitions="4")
    start = travelled(reader.initialOffset())
    client.change_topic("orders.eu", partitions=3)
    client.create_topic("orders.us")
    fill(client, "orders.eu", 4, 2)
    fill(client, "orders.us", 6)
    end = travelled(reader.latestOffset(start, ALL))
    assert read_range(reader, start, end) == {"orders.eu/2": 4, "orders.us/0": 6}
    assert len(reader.partitions(start, end)) >= 4


def test_it_waits_for_news(
    opened: Open, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer each time that there are none; a record ends the wait."""
    fill(client, "orders", 5)
    reader = opened(startingOffsets="earliest")
    end = travelled(reader.latestOffset(reader.initialOffset(), ALL))
    waited = []
    real = reader._store.wait

    def wait(known: Any, wanted: Any, seconds: float) -> bool:
        waited.append(seconds)
        return real(known, wanted, min(seconds, 0.01))

    monkeypatch.setattr(reader._store, "wait", wait)
    for _ in range(6):
        assert travelled(reader.latestOffset(end, ALL)) == end
    assert waited == [0.05, 0.1, 0.25, 0.25, 0.25]  # the first time it does not wait at all
    reader.commit(end)  # a batch was built: another source has news, and must not be held up
    assert travelled(reader.latestOffset(end, ALL)) == end
    assert len(waited) == 5
    monkeypatch.setattr(
        reader._store, "wait", lambda known, wanted, seconds: real(known, wanted, 30)
    )
    threading.Timer(0.2, fill, (client, "orders", 2)).start()
    started = time.monotonic()
    assert travelled(reader.latestOffset(end, ALL))["orders"] == {"0": 7}
    assert time.monotonic() - started < 20


# --- a group ------------------------------------------------------------------------------------------
def test_a_group_follows(opened: Open, client: BrokerClient) -> None:
    """Never ahead of what is done, never back, and also when nothing more comes."""
    client.create_topic("orders", partitions=2)
    fill(client, "orders", 10)
    fill(client, "orders", 5, 1)

    def positions() -> list[int]:
        stats = client.subscription_stats("spark", "orders")
        return [each["position"] for each in stats["partitions"]]

    reader = opened(group="spark", startingOffsets='{"orders": {"0": 3}}')
    start = travelled(reader.initialOffset())
    end = travelled(reader.latestOffset(start, ALL))
    assert positions() == [3, 0]  # the first batch has not run yet
    reader.partitions(start, end)
    assert positions() == [3, 0]
    assert travelled(reader.latestOffset(end, ALL)) == end  # now it has
    assert positions() == [10, 5]
    assert client.subscription_stats("spark", "orders")["lag"] == 0
    reader.commit(start)
    assert positions() == [10, 5]
    fill(client, "orders", 2)
    again = opened(group="spark", startingOffsets="group")
    assert again.initialOffset()["orders"] == {"0": 10, "1": 5}
    assert client.subscription_stats("spark", "orders")["lag"] == 2


def test_a_group_over_several_topics(opened: Open, client: BrokerClient) -> None:
    """A subscription for each name and wildcard; one that is deleted is made again."""
    for topic in ("a.x", "b"):
        fill(client, topic, 3)
    reader = opened("a.*,b", group="spark", startingOffsets="earliest")
    end = travelled(reader.latestOffset(reader.initialOffset(), ALL))
    client.delete_subscription("spark", "b")
    fill(client, "a.y", 2)
    end = travelled(reader.latestOffset(end, ALL))
    reader.commit(end)
    lags = {
        each["topic"]: each["lag"] for each in client.subscriptions() if each["name"] == "spark"
    }
    assert lags == {"a.*": 0, "b": 0}


# --- what is gone -------------------------------------------------------------------------------------
@needs_admission_control
def test_retention_overtakes(
    opened: Open, server: RunningServer, client: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that says exactly which offsets; or a warning that does."""
    client.create_topic("orders", segment_bytes=4096)
    for _ in range(50):
        fill(client, "orders", 10)
    start = travelled(opened(startingOffsets='{"orders": {"0": 20}}').initialOffset())
    log = server.engine.topics.find("orders").partitions[0].log
    server.call(log.drop_before, 300)
    first = log.start_offset
    with pytest.raises(DataLoss, match=f"orders/0: offsets 20 to {first - 1} were deleted"):
        opened().latestOffset(start, ALL)
    reader = opened(failOnDataLoss="false", maxOffsetsPerTrigger=30)
    with caplog.at_level(logging.WARNING):
        end = travelled(reader.latestOffset(start, ReadMaxRows(30)))
        assert end["orders"] == {"0": first + 30}
        assert read_range(reader, start, end) == {"orders/0": 30}
    assert f"offsets 20 to {first - 1}" in caplog.text
    # A batch that is repeated is planned without looking; its task finds out.
    task = opened().partitions(start, end)[0]
    with pytest.raises(DataLoss, match=f"offsets 20 to {first - 1}"):
        list(opened().read(task))


def test_a_topic_is_deleted_and_made_again(opened: Open, client: BrokerClient) -> None:
    """The new one is not taken for the old one, even if it is longer."""
    fill(client, "orders", 10)
    reader = opened(startingOffsets="earliest")
    end = travelled(reader.latestOffset(reader.initialOffset(), ALL))
    client.delete_topic("orders")
    with pytest.raises(DataLoss, match="orders/0: the topic was deleted"):
        opened().latestOffset(end, ALL)
    fill(client, "orders", 30)
    with pytest.raises(DataLoss, match="orders/0: the topic was deleted and created again"):
        opened().latestOffset(end, ALL)
    lenient = opened(failOnDataLoss="false")
    after = travelled(lenient.latestOffset(end, ALL))
    assert read_range(lenient, end, after) == {"orders/0": 30}


def test_a_topic_is_deleted_while_it_waits(opened: Open, client: BrokerClient) -> None:
    """That is said as what it is: a loss."""
    fill(client, "orders", 10)
    reader = opened(startingOffsets="earliest", group="spark")
    end = travelled(reader.latestOffset(reader.initialOffset(), ALL))
    real = reader._store.wait

    def wait(known: Any, wanted: Any, seconds: float) -> bool:
        client.delete_topic("orders")
        return real(known, wanted, seconds)

    reader._store.wait = wait  # type: ignore[method-assign]
    reader._idle = 2
    with pytest.raises(DataLoss, match="orders/0: the topic was deleted"):
        reader.latestOffset(end, ALL)
    reader.commit(end)  # which the group cannot follow, and need not


def test_it_reads_a_directory(server: RunningServer, client: BrokerClient) -> None:
    """Also as a stream, for what there is."""
    fill(client, "orders", 10)
    server.stop()
    options = {"path": str(server.data_dir), "topic": "orders", "startingOffsets": "earliest"}
    reader = HeadraceStreamReader(SourceOptions.of(options), SCHEMA)
    reader.prepareForTriggerAvailableNow()
    start = travelled(reader.initialOffset())
    end = travelled(reader.latestOffset(start, ALL))
    assert read_range(reader, start, end) == {"orders/0": 10}
    assert travelled(reader.latestOffset(end, ALL)) == end


# --- queries --------------------------------------------------------------------------------------------
class Run:
    """A query whose batches are kept here."""

    def __init__(self, spark: SparkSession, server: RunningServer, checkpoint: Path):
        self._spark, self._server, self._checkpoint = spark, server, checkpoint
        self.batches: dict[int, list[tuple[str, int, int]]] = {}

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        return sorted(row for rows in self.batches.values() for row in rows)

    def _take(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = [tuple(row) for row in frame.collect()]  # type: ignore[misc]

    def start(self, topic: str, trigger: dict[str, Any], **options: Any) -> StreamingQuery:
        frame = (
            self._spark.readStream.format("headrace")
            .option("servers", f"{self._server.host}:{self._server.port}")
            .option("topic", topic)
            .option("columns", "topic,partition,offset")
            .option("startingOffsets", "earliest")
            .option("timeout", "30")
            .options(**options)
            .load()
        )
        writer = frame.writeStream.foreachBatch(self._take).trigger(**trigger)
        return writer.option("checkpointLocation", str(self._checkpoint)).start()

    def once(self, topic: str, **options: Any) -> StreamingQuery:
        query = self.start(topic, {"availableNow": True}, **options)
        query.awaitTermination(60)
        return query


@pytest.fixture
def run(spark: SparkSession, server: RunningServer, tmp_path: Path) -> Run:
    return Run(spark, server, tmp_path / "checkpoint")


@needs_admission_control
def test_available_now_in_batches_and_again(run: Run, client: BrokerClient) -> None:
    """With limits, over restarts, while partitions and topics are added; every record once."""
    client.create_topic("orders.eu", partitions=2)
    for partition in (0, 1):
        fill(client, "orders.eu", 50, partition)
    query = run.once("orders.*", maxOffsetsPerTrigger=40, group="spark")
    assert [len(rows) for rows in run.batches.values()] == [40, 40, 20]
    [source] = query.recentProgress[0]["sources"]
    assert json.loads(source["endOffset"])["orders.eu"] == {"0": 20, "1": 20}
    assert json.loads(source["latestOffset"])["orders.eu"] == {"0": 50, "1": 50}
    client.change_topic("orders.eu", partitions=3)
    fill(client, "orders.eu", 5, 2)
    fill(client, "orders.us", 5)
    run.once("orders.*", group="spark")
    assert run.rows == sorted(
        [("orders.eu", p, n) for p in (0, 1) for n in range(50)]
        + [("orders.eu", 2, n) for n in range(5)]
        + [("orders.us", 0, n) for n in range(5)]
    )
    assert client.subscription_stats("spark")["lag"] == 0


def test_a_query_over_the_restarts_of_its_broker(
    run: Run, server: RunningServer, client: BrokerClient
) -> None:
    """It goes on where it was; its group shows no lag, also when nothing more comes."""
    client.create_topic("orders", partitions=2)
    fill(client, "orders", 10)
    query = run.start("orders", {"processingTime": "0 seconds"}, group="spark")
    try:
        for round_ in range(2):
            wait_until(lambda n=10 * (round_ + 1): len(run.rows) == n, 60)
            server.kill()
            server.start()
            fill(client, "orders", 10, round_)
        wait_until(lambda: len(run.rows) == 30, 60)
        wait_until(lambda: client.subscription_stats("spark")["lag"] == 0, 20)
        assert query.isActive
    finally:
        started = time.monotonic()
        query.stop()
    assert time.monotonic() - started < 10
    assert run.rows == [("orders", 0, n) for n in range(20)] + [("orders", 1, n) for n in range(10)]


def test_data_loss_reaches_the_user(run: Run, server: RunningServer, client: BrokerClient) -> None:
    """The query fails with the offsets that are missing; told to go on, it does."""
    client.create_topic("orders", segment_bytes=4096)
    fill(client, "orders", 10)
    run.once("orders")
    for _ in range(50):
        fill(client, "orders", 10)
    log = server.engine.topics.find("orders").partitions[0].log
    server.call(log.drop_before, 300)
    first = log.start_offset
    with pytest.raises(StreamingQueryException, match=f"orders/0: offsets 10 to {first - 1}"):
        run.once("orders")
    run.once("orders", failOnDataLoss="false")
    assert [row[2] for row in run.rows] == [*range(10), *range(first, 510)]
