"""Searching a topic: what is found, how a search goes on, and that it keeps nobody waiting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker import searching
from headrace.broker.pace import Pace
from headrace.errors import Forbidden, InvalidArgument
from headrace.log.batch import LOST, Batch, encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, running_server


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with server.client() as found:
        yield found


def everything(client: Any, topic: str, wanted: str, **options: Any) -> list[int]:
    """The offsets that all stretches of a search find."""
    page = client.search_messages(topic, wanted, **options)
    found = page["found"]
    while page["left"]:
        page = client.search_messages(topic, wanted, **{**options, "cursor": page["next"]})
        found += page["found"]
    return [each["offset"] for each in found]


VALUES = [
    b'{"order": 1, "customer": {"id": "c5"}, "items": [{"price": 12}, {"price": 7.5}]}',
    b'{\n  "order":2,\n  "customer":{"id":"C5"},\n  "big": 90071992547409931234, "a\\/b": 3\n}',
    "Grüße an Ärzte".encode(),
    bytes(range(256)),
    b'{"na\\u006de": "escaped", "empty": null}',
]


@pytest.mark.parametrize(
    ("kind", "wanted", "offsets"),
    [
        ("text", '"order":1', [0]),
        ("text", '"ORDER": 2', [1]),
        ("text", "c5", [0, 1]),
        ("text", "Grüße", [2]),
        ("text", "key-3", [3]),
        ("text", "nowhere", []),
        ("key", "key-1", [1]),
        ("key", "key", []),
        ("key", "base64:a2V5LTQ=", [4]),
        ("header", "source", [0, 1, 2, 3, 4]),
        ("header", "source=we", [0, 2, 4]),
        ("header", "other", []),
        ("json", "customer.id=c5", [0]),
        ("json", "customer.id", [0, 1]),
        ("json", "$.items[0].price=12", [0]),
        ("json", "items.1.price=7.5", [0]),
        ("json", "items.2", []),
        ("json", "items.²", []),
        ("json", "items.99999999999", []),
        ("json", "a/b=3", [1]),
        ("json", "big=90071992547409931234", [1]),
        ("json", "name=escaped", [4]),
        ("json", "empty=null", [4]),
        ("json", "order=2", [1]),
        ("json", "order=02", []),
        ("json", 'customer.id="C5"', [1]),
    ],
)
def test_a_search_finds(client: Any, kind: str, wanted: str, offsets: list[int]) -> None:
    """In batches of several messages and of one, wherever it begins."""
    headers = [{"source": "web" if number % 2 == 0 else "app"} for number in range(len(VALUES))]
    keys = [f"key-{number}" for number in range(len(VALUES))]
    client.publish_many("many", VALUES, headers, keys=keys)
    for value, header, key in zip(VALUES, headers, keys, strict=True):
        client.publish("one", value, header, key=key)
    for topic in ("many", "one"):
        assert everything(client, topic, wanted, kind=kind) == offsets
        later = everything(client, topic, wanted, kind=kind, start=2)
        assert later == [each for each in offsets if each >= 2]
        range_ = everything(client, topic, wanted, kind=kind, start=1, until=4)
        assert range_ == [each for each in offsets if 1 <= each < 4]


def test_a_search_goes_through_all_partitions_in_stretches(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer says how much was looked through and how much is left; one partition is enough if it is named."""
    monkeypatch.setattr(searching, "STRETCH_BYTES", 1)
    monkeypatch.setattr(searching, "READ_BYTES", 1)
    client.create_topic("orders", partitions=3)
    for number in range(60):
        client.publish("orders", json.dumps({"n": number}), partition=number % 3)
    page = client.search_messages("orders", '"n":5')
    assert 0 < page["scanned"] < 60
    assert page["scanned"] + page["left"] == 60
    assert len(everything(client, "orders", '"n":5')) == 11
    assert len(everything(client, "orders", '"n":5', partition=2)) == 5
    with pytest.raises(InvalidArgument, match="name one with partition"):
        client.search_messages("orders", "x", start=5)


def test_a_search_ends_at_its_limit_and_goes_on_behind_it(client: Any) -> None:
    """No message is found twice or left out."""
    client.publish_many("orders", [b"x"] * 25)
    page = client.search_messages("orders", "x", limit=10)
    assert [each["offset"] for each in page["found"]] == list(range(10))
    assert (page["scanned"], page["left"], page["next"]) == (10, 15, "0:10")
    assert everything(client, "orders", "x", limit=10) == list(range(25))


@pytest.mark.parametrize(
    ("wanted", "options"),
    [("  ", {}), ("a..b", {"kind": "json"}), ("base64:?", {"kind": "key"}), ("x", {"cursor": "no"}), ("x", {"cursor": "7:0"})],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_refused(
    client: Any, wanted: str, options: dict[str, Any]
) -> None:
    """With a sentence that says what to write."""
    client.create_topic("orders")
    with pytest.raises(InvalidArgument):
        client.search_messages("orders", wanted, **options)


def test_a_search_needs_the_right_to_browse() -> None:
    """The right to consume is not enough: places tell what is in payloads."""
    token = "correct-horse-battery-staple"
    with running_server(token=token) as server, server.client() as root:
        root.publish("orders", b"x")
        secret = root.create_token("worker", grants=["consume:orders"])["secret"]
        with server.client(token=secret) as worker, pytest.raises(Forbidden):
            worker.search_messages("orders", "x")


@pytest.mark.parametrize("batches", [1, 50])
def test_others_have_their_turn_during_a_search(
    client: Any, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """Between two batches, and inside of one that holds thousands of documents, all of which have to be decoded."""
    turns = 0
    turn = Pace.turn

    async def counted(self: Pace) -> None:
        nonlocal turns
        turns += 1
        await turn(self)

    batch = encode(Columns([b'{"a": {"b": 1}}'] * (10_000 // batches)))
    for _ in range(batches):
        client.publish_batch("docs", batch)
    monkeypatch.setattr(Pace, "turn", counted)
    monkeypatch.setattr(Pace, "is_past", lambda self, deadline: deadline < self.seconds() + 0.005)
    found = client.search_messages("docs", "a.b=2", kind="json" if batches == 1 else "text")
    assert (found["found"], found["scanned"], found["left"]) == ([], 10_000, 0)
    assert turns >= 10_000 // searching.PIECE


def test_records_that_are_lost_are_passed_over(server: RunningServer, client: Any) -> None:
    """A search goes on behind them: there is nothing to find in them."""
    client.publish("torn", b"wanted")
    log = server.engine.topics.find("torn").partitions[0].log
    read = log.read

    def torn(offset: int, *arguments: Any) -> list[Batch]:
        return [Batch(b"", 0, 1, LOST)] if offset == 0 else read(offset, *arguments)

    client.publish("torn", b"wanted, too")
    server.call(lambda: setattr(log, "read", torn))
    assert everything(client, "torn", "wanted") == [1]
