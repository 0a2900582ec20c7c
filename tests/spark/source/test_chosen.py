"""Topics by regular expression, single partitions, times of partitions: what the options choose."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, LongType, StructType

from headrace import BrokerClient
from headrace.errors import InvalidArgument, TopicNotFound
from headrace.spark.source.chosen import ChosenTopics
from headrace.spark.source.data_source import HeadraceReader, SpanPartition
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.positions import Positions
from headrace.spark.source.rows import default_schema
from headrace.spark.source.stores import open_store
from headrace.testing import RunningServer, running_server

NAMES = ("events", "evils", "ev.eu", "other", "events.dlq")


@pytest.fixture(params=["broker", "directory"])
def place(
    request: pytest.FixtureRequest, server: RunningServer, client: BrokerClient
) -> Iterator[dict[str, str]]:
    """The same topics in a broker, and in the directory of a broker that is stopped."""
    for name in NAMES:
        client.create_topic(name, partitions=2)
        for partition in (0, 1):
            client.publish_many(name, [b"a", b"b", b"c"], partition=partition)
    if request.param == "broker":
        yield {"servers": f"{server.host}:{server.port}", "timeout": "20"}
        return
    client.close()
    server.stop()
    yield {"path": str(server.data_dir)}


def ranges(**options: Any) -> dict[str, tuple[int, int]]:
    """What the tasks of a batch would read."""
    reader = HeadraceReader(SourceOptions.of(options), StructType().add("offset", LongType()))
    return {
        f"{part.span.topic}/{part.span.partition}": (part.span.start, part.span.end)
        for part in reader.partitions()
        if isinstance(part, SpanPartition)
    }


def test_a_regular_expression_matches_whole_names(place: dict[str, str]) -> None:
    """Not a part of a name, and never dead letters or the broker's own topics."""
    found = ranges(**place, subscribePattern="ev.*")
    assert {each.split("/")[0] for each in found} == {"events", "evils", "ev.eu"}
    found = ranges(**place, subscribePattern="e(vents|vils)")
    assert {each.split("/")[0] for each in found} == {"events", "evils"}
    with pytest.raises(TopicNotFound, match="regular expression 'vent', which has to match whole"):
        ranges(**place, subscribePattern="vent")


def test_a_wildcard_that_matches_nothing_says_what_one_is(place: dict[str, str]) -> None:
    """Who comes from Kafka writes a regular expression."""
    with pytest.raises(TopicNotFound) as failed:
        ranges(**place, topic="event.*")
    sentence = str(failed.value)
    assert "* stands for exactly one word between dots" in sentence
    assert "subscribePattern" in sentence
    assert "there are ev.eu, events, events.dlq, evils, other" in sentence


def test_assigned_partitions_are_read_alone(place: dict[str, str]) -> None:
    """As Kafka writes them; one that does not exist is an error."""
    assert ranges(**place, assign='{"events": [1], "other": [0]}') == {
        "events/1": (0, 3),
        "other/0": (0, 3),
    }
    ended = ranges(**place, assign='{"events": [1]}', endingOffsets='{"events": {"1": 2}}')
    assert ended == {"events/1": (0, 2)}
    with pytest.raises(InvalidArgument, match="option assign: 'events' has no partition 7"):
        ranges(**place, assign='{"events": [1, 7]}')
    with pytest.raises(TopicNotFound):
        ranges(**place, assign='{"nowhere": [0]}')


def test_times_of_partitions(server: RunningServer, client: BrokerClient) -> None:
    """A partition that is not named is read from its beginning, or to its end."""
    client.create_topic("orders", partitions=3)
    for partition in range(3):
        for at in (1000, 2000, 3000):
            client.publish("orders", b"x", partition=partition, timestamp=at)
    place = {"servers": f"{server.host}:{server.port}", "topic": "orders"}
    times = json.dumps({"orders": {"0": 2000, "1": 5000}})
    assert ranges(**place, startingOffsetsByTimestamp=times) == {
        "orders/0": (1, 3),
        "orders/2": (0, 3),
    }
    assert ranges(**place, endingOffsetsByTimestamp=times) == {
        "orders/0": (0, 1),
        "orders/1": (0, 3),
        "orders/2": (0, 3),
    }
    given = {**place, "startingOffsetsByTimestamp": times}
    with pytest.raises(InvalidArgument, match="orders/1 has no record at or after 5000"):
        ranges(**given, startingOffsetsByTimestampStrategy="error")
    with pytest.raises(InvalidArgument, match="'orders' has no partition 5"):
        ranges(**place, startingOffsetsByTimestamp='{"orders": {"5": 1}}')


@pytest.mark.parametrize(
    ("same", "other", "said"),
    [
        ({"topic": "a,*"}, {"topic": "a,c"}, "read b, and this one reads a, c:"),
        (
            {"subscribePattern": "[ab]"},
            {"subscribePattern": "a."},
            "read a, and this one reads a\\.:",
        ),
    ],
)
def test_a_changed_topic_is_not_a_deleted_one(
    server: RunningServer, same: dict[str, str], other: dict[str, str], said: str
) -> None:
    """A checkpoint of topics that are not read any more is of another query."""
    read = Positions({"a": {0: 5}, "b": {0: 1}}, {"a": 1, "b": 2})

    def check(**chosen: str) -> None:
        options = SourceOptions.of({"servers": f"{server.host}:{server.port}", **chosen})
        with closing(open_store(options)) as store:
            ChosenTopics(options, store).check_same(read)

    check(**same)
    with pytest.raises(InvalidArgument, match=said) as it:
        check(**other)
    assert it.value.code == "query_changed"


def test_a_topic_that_the_caller_may_not_read_does_not_match() -> None:
    """As with a wildcard."""
    with running_server(token="root-secret") as server, server.client() as admin:
        for name in ("events", "evils"):
            admin.publish(name, b"x")
        made = admin.create_token("reader", grants=["browse:events", "publish:evils"])
        options = SourceOptions.of(
            {
                "servers": f"{server.host}:{server.port}",
                "token": made["secret"],
                "subscribePattern": "ev.*",
            }
        )
        store = open_store(options)
        try:
            assert list(ChosenTopics(options, store).some()) == ["events"]
        finally:
            store.close()


def test_the_columns_of_kafka(server: RunningServer, client: BrokerClient) -> None:
    """``timestampType`` is there for a job that says what it reads as Kafka's do, or that names it."""
    client.publish("events", b"x")
    place = {"servers": f"{server.host}:{server.port}"}
    for option, value in (
        ("subscribe", "events"),
        ("subscribePattern", "events"),
        ("assign", '{"events": [0]}'),
    ):
        assert default_schema(SourceOptions.of({**place, option: value})).endswith(
            "timestampType int"
        )
    options = SourceOptions.of({**place, "topic": "events", "columns": "offset,timestampType"})
    assert default_schema(options) == "offset bigint, timestampType int"
    assert "timestampType" not in default_schema(SourceOptions.of({**place, "topic": "events"}))
    schema = StructType().add("timestampType", IntegerType())
    reader = HeadraceReader(options, schema)
    [partition] = reader.partitions()
    [batch] = reader.read(partition)
    assert batch.to_pylist() == [{"timestampType": 1}]
