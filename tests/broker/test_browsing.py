"""Reading all partitions of a topic, in the order of time: embedded and over the network."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace import Broker, BrokerClient
from headrace.broker.browsing import browse
from headrace.errors import DataCorrupt, InvalidArgument, OffsetOutOfRange
from headrace.model import Message
from headrace.paging import Asked, Page
from headrace.testing import running_server

PARTITIONS = 4
Api = Broker | BrokerClient


@pytest.fixture(params=["disk", "memory", "network"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    """A broker on disk, one in memory, and a client of a server."""
    if request.param == "network":
        with running_server(tmp_path) as server, server.client(request_timeout=10) as client:
            yield client
    else:
        with Broker.open(tmp_path if request.param == "disk" else None) as broker:
            yield broker


def spread(api: Api, count: int, topic: str = "orders") -> list[bytes]:
    """Publish values with growing times over all partitions; returns them in the order of time."""
    api.create_topic(topic, partitions=PARTITIONS)
    chance = random.Random(7)
    values = [b"%d" % number for number in range(count)]
    for number, value in enumerate(values):
        place = chance.randrange(PARTITIONS)
        api.publish(topic, value, {"n": str(number)}, timestamp=1000 + number, partition=place)
    return values


def pages(api: Api, limit: int, start: Any = "earliest") -> list[Message]:
    found: list[Message] = []
    page: Page[Message] = api.fetch("orders", start, limit)
    while page:
        assert len(page) <= limit
        found += page
        page = api.fetch("orders", page.next, limit)
    return found


def test_all_partitions_are_read_in_the_order_of_time(api: Api) -> None:
    """Messages, their headers and places, and plain values."""
    values = spread(api, 60)
    found = api.fetch("orders")
    assert [message.value for message in found] == values
    assert [message.timestamp for message in found] == [1000 + number for number in range(60)]
    assert [message.headers["n"] for message in found] == [str(number) for number in range(60)]
    for message in found:
        single = api.fetch("orders", message.offset, 1, partition=message.partition)
        assert (single[0], single[0].id) == (message, message.id)
    assert api.fetch_values("orders") == values
    assert {message.partition for message in found} == set(range(PARTITIONS))


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_page_says_where_the_next_one_begins(api: Api, limit: int) -> None:
    """Page by page, every message once and in order; the last page is empty, and new messages follow."""
    values = spread(api, 40)
    assert [message.value for message in pages(api, limit)] == values
    end = api.fetch("orders").next
    assert sum(end.values()) == 40
    assert api.fetch("orders", end) == []
    api.publish("orders", b"later", partition=2)
    assert [message.value for message in api.fetch("orders", end)] == [b"later"]


def test_it_begins_at_a_time_and_at_the_end(api: Api) -> None:
    """A time is one place in all partitions; the end is before what is published next."""
    values = spread(api, 40)
    at = datetime.fromtimestamp(1.025, UTC)
    assert [message.value for message in api.fetch("orders", at)] == values[25:]
    latest = api.fetch("orders", "latest")
    assert latest == []
    api.publish("orders", b"new", partition=1)
    assert api.fetch_values("orders", latest.next) == [b"new"]


def test_an_offset_needs_its_partition(api: Api) -> None:
    """With several partitions an offset is ambiguous; with one it is not."""
    spread(api, 10)
    with pytest.raises(
        InvalidArgument, match=r"has 4 partitions.* name one with partition"
    ) as told:
        api.fetch("orders", 3)
    assert told.value.code == "partition_needed"
    api.publish_many("single", [b"a", b"b", b"c"])
    page = api.fetch("single", 1)
    assert [message.value for message in page] == [b"b", b"c"]
    assert page.next == {0: 3}
    assert api.fetch_values("single", {0: 2}) == [b"c"]
    assert api.fetch("orders", {1: 1}, partition=1)[0].offset == 1


def test_positions_that_do_not_exist(api: Api) -> None:
    """Each is refused with a sentence that names the partition."""
    spread(api, 10)
    with pytest.raises(OffsetOutOfRange, match=r"orders/1.*leave this partition out"):
        api.fetch("orders", {1: 99})
    with pytest.raises(InvalidArgument, match="no partition 9"):
        api.fetch("orders", {9: 0})
    wrong: list[Any] = [{"0": 1}, {0: -1}, {0: "1"}, {True: 1}, [1]]
    for positions in wrong:
        with pytest.raises(InvalidArgument):
            api.fetch("orders", positions)


def test_equal_times_and_wrong_clocks_keep_the_order_of_a_partition(api: Api) -> None:
    """A message with an earlier time than the one before it stays after it."""
    api.create_topic("orders", partitions=2)
    for partition, times in enumerate([[50, 10, 60], [20, 20, 55]]):
        for moment in times:
            api.publish("orders", b"%d" % moment, timestamp=moment, partition=partition)
    found = api.fetch("orders")
    for partition in (0, 1):
        offsets = [message.offset for message in found if message.partition == partition]
        assert offsets == sorted(offsets)
    assert len(found) == 6
    assert found == pages(api, 1)


def test_large_messages_are_read_one_by_one(api: Api) -> None:
    """A head holds only the time of a message that is larger than its share; all arrive, in order."""
    api.create_topic("orders", partitions=8)
    values = [b"%d " % number + bytes(200_000) for number in range(16)]
    for number, value in enumerate(values):
        api.publish("orders", value, timestamp=1000 + number, partition=number % 8)
    page = api.fetch("orders", max_bytes=1 << 20)
    assert 4 <= len(page) <= 11
    found = []
    while page:
        found += [message.value for message in page]
        page = api.fetch("orders", page.next, max_bytes=1 << 20)
    assert found == values


def test_it_waits_for_a_message_of_any_partition(api: Api) -> None:
    """A wait ends with the first message, whichever partition it goes to."""
    api.create_topic("orders", partitions=3)
    api.publish("orders", b"now", partition=1, delay=0.05)
    began = time.monotonic()
    page = api.fetch("orders", "earliest", wait=30.0)
    assert [message.value for message in page] == [b"now"]
    assert time.monotonic() - began < 20


def test_partitions_that_are_added_begin_at_their_first_message(api: Api) -> None:
    """Positions of an earlier page stay good."""
    spread(api, 10)
    after = api.fetch("orders").next
    api.change_topic("orders", partitions=PARTITIONS + 2)
    api.publish("orders", b"there", partition=PARTITIONS + 1)
    assert api.fetch_values("orders", after) == [b"there"]


def test_a_page_ends_before_damage(tmp_path: Path) -> None:
    """What lies before the damage in time is read; the next page says what is damaged and where."""
    with Broker.open(tmp_path) as broker:
        broker.create_topic("orders", partitions=2)
        for number in range(10):
            value = b"the victim" if number == 6 else b"%d" % number
            broker.publish("orders", value, timestamp=1000 + number, partition=number % 2)
    [log] = (tmp_path / "orders" / "0").glob("*.log")
    log.write_bytes(log.read_bytes().replace(b"the victim", b"the v1ctim"))
    with Broker.open(tmp_path) as broker:
        page = broker.fetch("orders")
        assert [message.value for message in page] == [b"%d" % number for number in range(5)]
        with pytest.raises(DataCorrupt, match="orders/0"):
            broker.fetch("orders", page.next)
        beyond = {**page.next, 0: 4}
        assert broker.fetch_values("orders", beyond) == [b"5", b"7", b"8", b"9"]


def test_a_thousand_partitions_do_not_hold_up_the_loop() -> None:
    """The heads of a thousand partitions are read in pieces: others have their turn in between."""
    with Broker.open() as broker:
        broker.create_topic("wide", partitions=1000)
        for partition in range(0, 1000, 100):
            broker.publish("wide", b"x" * 10_000, partition=partition)
        values = [b"y" * 20_000] * 3
        for partition in range(1000):
            broker.publish_nowait("wide", values[0], partition=partition)
        broker.flush()

        async def measured() -> tuple[int, int]:
            turns = 0
            turn = broker.engine.pace.turn

            async def counted() -> None:
                nonlocal turns
                turns += 1
                await turn()

            broker.engine.pace.turn = counted  # type: ignore[method-assign]
            now = 0.0

            def clock() -> float:  # each look at the clock is a millisecond later
                nonlocal now
                now += 0.001
                return now

            broker.engine.pace.seconds = clock
            used = broker.engine.budget.used
            page = await browse(broker.engine, Asked("wide", "earliest", None, 1 << 20, 0.0, 10))
            assert broker.engine.budget.used <= used + (64 << 20)
            return turns, len(page)

        turns, count = broker._run(measured())
    assert count == 10
    assert turns > 100
