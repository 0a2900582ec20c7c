"""Pipelines from end to end: Spark, a broker, tables. All of them are run together, twice."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headrace.broker import dead_letters as of_the_broker
from headrace.spark import lake
from headrace.spark.pipelines import dead_letters
from headrace.spark.pipelines.running import RunningJob
from headrace.testing import running_server
from tests.spark.pipelines.rig import Bench

pytestmark = pytest.mark.xdist_group("spark")

FILE = """
    [pipeline.revenue]
    from = "orders"
    format = "json"
    schema = "id STRING, customer STRING, amount DOUBLE, at TIMESTAMP"
    watermark = "at 20 minutes"
    deduplicate = ["id"]
    expect = ["amount > 0"]
    sql = '''
      SELECT customer, window(at, '1 hour').start AS hour, sum(amount) AS revenue
      FROM orders GROUP BY customer, window(at, '1 hour')
    '''
    to = { topic = "revenue", key = "customer" }
    failed = true

    [pipeline.shipped]
    sql = '''
      SELECT o.id, c.country, s.at AS shipped_at
      FROM orders o
      JOIN shipments s ON o.id = s.order_id AND s.at BETWEEN o.at AND o.at + INTERVAL 2 HOURS
      LEFT JOIN customers c ON o.customer = c.id
    '''
    to = "shipped"
    [pipeline.shipped.inputs.orders]
    from = "orders"
    format = "json"
    schema = "id STRING, customer STRING, at TIMESTAMP"
    watermark = "at 1 hour"
    [pipeline.shipped.inputs.shipments]
    from = "shipments.*"
    format = "json"
    schema = "order_id STRING, at TIMESTAMP"
    watermark = "at 1 hour"
    [pipeline.shipped.inputs.customers]
    table = "customers.csv"
    format = "csv"
    options = { header = true }

    [pipeline.lines]
    from = "notes"
    format = "text"
    function = "beside:counted"
    to = { table = "lake/lines", partition_by = ["day"] }
    ensure = ["words < 10"]
    failed = "lines.dlq"

    [pipeline.clean]
    from = "orders"
    format = "json"
    schema = "id STRING, amount DOUBLE"
    expect = ["id IS NOT NULL", "amount < 100"]
    to = "clean"
    failed = "rejected"

    [pipeline.routed]
    from = "notes"
    sql = '''
      SELECT CAST(key AS STRING) AS target, repeat(CAST(value AS STRING), 5000) AS note,
             array(struct('n' AS key, CAST('1' AS BINARY) AS value)) AS tags, partition AS p
      FROM notes
    '''
    to = { topic_from = "target", value = "note", headers = "tags", key = "target" }
    failed = true
"""
MODULE = """
    from datetime import date
    from headrace.spark.pipelines import each_row

    def counted(rows):
        return each_row(rows.select("value", "timestamp"), count, "text STRING, words INT, day DATE")

    def count(row):
        text = row["value"]
        if "?" in text:
            raise ValueError("no questions, please")
        return {"text": text, "words": len(text.split()), "day": date(2026, 1, 1)}
"""
RUBBISH = b'{"id": "x", "amount": '


def order(number: int, customer: str, amount: float, at: str) -> dict[str, Any]:
    return {"id": str(number), "customer": customer, "amount": amount, "at": f"2026-01-01T{at}Z"}


ORDERS = [
    order(1, "ann", 5, "08:00:00"),
    order(2, "bob", 7, "08:30:00"),
    order(1, "ann", 5, "08:00:00"),
    order(3, "ann", -1, "08:40:00"),
    order(4, "ann", 200, "08:50:00"),
]


@pytest.fixture(scope="module")
def bench(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with running_server() as server:
        yield Bench(spark, server, tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def first(bench: Bench) -> dict[str, RunningJob]:
    """All pipelines, over what was there before they were started."""
    bench.write("customers.csv", "id,country\nann,SE\n")
    bench.write("beside.py", MODULE)
    path = bench.write("all.toml", FILE)
    with bench.server.client() as client:
        client.create_topic("orders", partitions=2)
        client.publish("notes", b"one two", key=b"east")
        client.publish("notes", b"really?", key=b"no such topic")
        client.publish("notes", b"w " * 30, key=b"west")
    bench.publish("orders", *ORDERS)
    bench.publish("orders", RUBBISH, partition=1)
    bench.publish("shipments.eu", {"order_id": "1", "at": "2026-01-01T09:00:00Z"})
    bench.publish("shipments.us", {"order_id": "2", "at": "2026-01-01T13:00:00Z"})
    return bench.run_once(path)


@pytest.fixture(scope="module")
def second(bench: Bench, first: dict[str, RunningJob]) -> dict[str, RunningJob]:
    """The same file again: repeated ids, a later hour, more of everything."""
    later = [order(2, "bob", 7, "08:30:00"), order(5, "bob", 3, "08:45:00")]
    bench.publish("orders", *later, order(6, "ann", 1, "12:00:00"))
    bench.publish("notes", b"three")
    return bench.run_once(bench.folder / "all.toml", "revenue", "clean", "lines")


def test_windows_without_duplicates(bench: Bench, second: dict[str, RunningJob]) -> None:
    """Each order counts once, over both runs; an hour is written when the watermark has passed it."""
    assert bench.objects("revenue") == [
        {"customer": "ann", "hour": "2026-01-01T08:00:00.000Z", "revenue": 205.0},
        {"customer": "bob", "hour": "2026-01-01T08:00:00.000Z", "revenue": 10.0},
    ]
    with bench.server.client() as client:
        keys = {message.key for message in client.fetch("revenue", limit=100)}
    assert keys == {b"ann", b"bob"}


def test_dead_letters_are_such_as_the_broker_has(bench: Bench, first: object) -> None:
    """Rows that failed are there with their reason, as they were, and known to the commands."""
    with bench.server.client() as client:
        letters = client.dead_letters("revenue")
    assert {(letter.message.value, letter.reason) for letter in letters} == {
        (json.dumps(ORDERS[3]).encode(), "expected amount > 0"),
        (RUBBISH, "the value is not JSON of the schema"),
    }
    (rubbish,) = [letter for letter in letters if letter.message.value == RUBBISH]
    assert (rubbish.message.topic, rubbish.message.partition, rubbish.message.offset) == (
        "orders",
        1,
        0,
    )
    assert rubbish.subscription == "revenue"


def test_reasons_are_cut_as_the_broker_cuts_them() -> None:
    """Neither room may import the other, so the number exists twice."""
    assert dead_letters.REASON_CHARS_MAX == of_the_broker.REASON_CHARS_MAX


def test_streams_and_a_table_are_joined(bench: Bench, first: object) -> None:
    """Two topics, one of them by wildcard, within a time; and what a file knows of the customer."""
    assert bench.objects("shipped") == [
        {"id": "1", "country": "SE", "shipped_at": "2026-01-01T09:00:00.000Z"},
        {"id": "1", "country": "SE", "shipped_at": "2026-01-01T09:00:00.000Z"},
    ]


def test_a_table_and_its_dead_letters(bench: Bench, second: dict[str, RunningJob]) -> None:
    """A function for each row, a condition for what comes out; each row goes to one of the two."""
    rows = lake.read(bench.spark, str(bench.folder / "lake" / "lines")).collect()
    assert sorted((row.text, row.words, row.day) for row in rows) == [
        ("one two", 2, date(2026, 1, 1)),
        ("three", 1, date(2026, 1, 1)),
    ]
    with bench.server.client() as client:
        letters = {message.value: message.headers for message in client.fetch("lines.dlq")}
    reasons = {json.loads(value).get("value"): h["headrace-reason"] for value, h in letters.items()}
    assert reasons["really?"] == "ValueError: no questions, please"
    assert reasons[None] == "not ensured: words < 10"
    assert len(letters) == 2


def test_messages_go_on_as_they_came(bench: Bench, second: dict[str, RunningJob]) -> None:
    """Without a transformation the bytes are the same; what failed is elsewhere."""
    good = [json.loads(value)["id"] for value in bench.values("clean")]
    assert sorted(good) == ["1", "1", "2", "2", "3", "5", "6"]
    assert json.dumps(ORDERS[0]).encode() in bench.values("clean")
    assert sorted(bench.values("rejected")) == sorted([json.dumps(ORDERS[4]).encode(), RUBBISH])


def test_topics_by_column(bench: Bench, first: object) -> None:
    """The rows say where they go; what the broker would refuse is a dead letter."""
    with bench.server.client() as client:
        (east,) = client.fetch("east")
        letters = client.dead_letters("routed")
        assert "west" not in client.topics()
    assert (east.value, east.key, east.headers) == (b"one two" * 5000, b"east", {"n": "1"})
    reasons = {letter.reason: letter.message for letter in letters}
    large = reasons["the message has 300000 bytes, the broker takes 100000"]
    assert large.value == (b"w " * 150_000)[: len(large.value)]
    assert len(large.value) > 50_000
    assert reasons["no topic can have the name no such topic"].headers == {"n": "1"}
    assert len(letters) == 2


def test_what_is_counted(bench: Bench, first: dict[str, RunningJob]) -> None:
    """Rows by what was read, not by how often Spark looked at it; dead letters; the way."""
    (query,) = first["revenue"].document()["queries"]
    assert (query["input_rows_total"], query["dead_letters"], query["lag"]) == (6, 2, 0)
    assert (query["name"], query["sink"]) == ("revenue", "revenue")
    assert [source["name"] for source in query["sources"]] == ["orders"]
    main, failed = first["lines"].document()["queries"]
    assert (main["name"], failed["name"]) == ("lines", "lines.failed")
    assert (main["dead_letters"], failed["dead_letters"]) == (0, 2)


def test_progress_is_a_subscription(bench: Bench, second: dict[str, RunningJob]) -> None:
    """Every tool of the broker shows how far a pipeline has come."""
    with bench.server.client() as client:
        groups = {each["name"]: each["lag"] for each in client.subscriptions("orders")}
    assert groups["revenue"] == 0
    assert groups["clean"] == 0
    assert groups["shipped.orders"] == 3  # it was not run a second time
    assert "lines.failed" not in groups


def test_a_checkpoint_for_each(bench: Bench, first: object) -> None:
    found = {path.name for path in Path(bench.folder / "checkpoints").iterdir()}
    assert found == {
        *("revenue", "shipped", "lines", "lines.failed", "clean", "routed"),
    }
