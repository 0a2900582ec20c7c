"""Positions of many partitions, waiting for news in any, and moving a subscription along."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace import AsyncBroker, limits
from headrace.broker import positions
from headrace.broker.administration import Administration
from headrace.errors import (
    Closed,
    InvalidArgument,
    OffsetOutOfRange,
    StaleDelivery,
    TopicNotFound,
)
from headrace.operations.catalog import OPERATIONS
from tests.broker.rig import TOPIC, Rig


def advance(rig: Rig, places: dict[str, dict[int, int]], name: str = "billing") -> None:
    rig.wait(positions.advance, rig.engine, rig.engine.subscription(name), places)


# --- asking ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("topics", [None, [], 7, [7], "", "a b", ["orders.>.x"], {"orders": 1}])
def test_what_is_no_topic_is_refused(topics: object) -> None:
    """Names and wildcards are checked like everywhere."""
    rig = Rig()
    with pytest.raises(InvalidArgument):
        positions.describe(rig.engine, topics)


@pytest.mark.parametrize(
    "places",
    [
        None, [], {"orders": 3}, {"orders": {"x": 1}}, {"orders": {0: "1"}}, {"orders": {0: True}},
        {"orders": {0: -1}}, {"orders": {0: limits.OFFSET_MAX + 1}}, {7: {0: 0}},
        {"orders": dict.fromkeys(range(limits.PARTITIONS_TOTAL_MAX + 1), 0)},
    ],
)  # fmt: skip
def test_what_are_no_positions_is_refused(places: object) -> None:
    """The shape is checked as a whole, before anything is done."""
    given = {"positions": places, "wait": 0}
    call = Administration(Rig().engine).call(OPERATIONS["wait_for"], given)
    with pytest.raises(InvalidArgument):
        call.send(None)


def test_a_topic_is_known_again_by_its_incarnation() -> None:
    """One that was deleted and made anew is another one."""
    rig = Rig()
    rig.numbers(3)
    before = positions.describe(rig.engine, TOPIC)[TOPIC][0]
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.numbers(1)
    after = positions.describe(rig.engine, TOPIC)[TOPIC][0]
    assert (before["end"], after["end"]) == (3, 1)
    assert before["incarnation"] != after["incarnation"]


# --- waiting --------------------------------------------------------------------------------------
def waits_until(
    act: Callable[[AsyncBroker], Any], topics: str | None = None, timeout: float = 10.0
) -> bool:
    """Wait at the end of a topic of two partitions, do something meanwhile, and say what came."""

    async def run() -> bool:
        async with AsyncBroker.open() as broker:
            await broker.create_topic("orders", partitions=2)
            waiting = asyncio.ensure_future(
                broker.wait_for({"orders": {0: 0, 1: 0}}, topics=topics, timeout=timeout)
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
            await act(broker)
            try:
                return await waiting
            finally:
                if not broker.engine.closing:
                    assert broker.engine.topics.watchers == []
                    for topic in broker.engine.topics:
                        assert all(not partition.watchers for partition in topic.partitions)

    return asyncio.run(run())


async def _nothing(broker: AsyncBroker) -> None:
    await broker.create_topic("unrelated")


def test_waiting_ends_as_soon_as_there_is_news() -> None:
    """A record, a partition, a topic that is meant; not something else; and nothing is left behind."""
    assert waits_until(lambda broker: broker.publish("orders", b"x", partition=1))
    assert waits_until(lambda broker: broker.change_topic("orders", partitions=3), "orders")
    assert waits_until(lambda broker: broker.create_topic("other.eu"), "other.*", 5)
    assert not waits_until(_nothing, "orders", 0.05)
    assert not waits_until(_nothing, None, 0.05)


def test_waiting_ends_when_the_topic_or_the_broker_does() -> None:
    """Whoever waits hears why there will be no news."""
    with pytest.raises(TopicNotFound):
        waits_until(lambda broker: broker.delete_topic("orders"))
    with pytest.raises(Closed):
        waits_until(lambda broker: broker.close())


@pytest.mark.parametrize("timeout", [-1, None, "1", float("nan"), True])
def test_a_time_that_is_none_is_refused(timeout: Any) -> None:
    """Before anybody waits for it."""

    async def run() -> None:
        async with AsyncBroker.open() as broker:
            await broker.wait_for({}, timeout=timeout)

    with pytest.raises(InvalidArgument):
        asyncio.run(run())


# --- advancing ------------------------------------------------------------------------------------
def test_advancing_settles_what_is_out() -> None:
    """Deliveries before the position are done, a late ack of one is stale, the others go on."""
    rig = Rig()
    rig.numbers(10)
    subscription = rig.subscribe()
    inbox = rig.join(subscription, prefetch=6)
    assert inbox.offsets == list(range(6))
    inbox.ack(inbox.messages[1])
    advance(rig, {TOPIC: {0: 4}})
    with pytest.raises(StaleDelivery):
        inbox.ack(inbox.messages[2])
    inbox.ack(inbox.messages[4], inbox.messages[5])
    assert inbox.offsets == list(range(10)), "who had them has room for others"
    assert subscription.lag() == 4
    assert subscription.in_flight() == 4
    assert subscription.tally.acked == 6
    assert rig.engine.partition(TOPIC).consumed == 6


def test_advancing_skips_what_was_not_read() -> None:
    """Members get what lies behind it, and nothing before it."""
    rig = Rig()
    rig.numbers(10)
    rig.subscribe()
    advance(rig, {TOPIC: {0: 7}})
    assert rig.join().offsets == [7, 8, 9]


def test_advancing_ends_retries_and_forgets_attempts() -> None:
    """What waits to be delivered again is done like the rest."""
    rig = Rig()
    rig.numbers(4)
    subscription = rig.subscribe()
    inbox = rig.join(subscription)
    for message in inbox.take():
        inbox.nack(message, delay=5)
    advance(rig, {TOPIC: {0: 3}})
    assert subscription.statistics()["waiting_for_retry"] == 1
    rig.advance(10)
    assert inbox.offsets == [3]
    assert inbox.attempts == [2]
    assert subscription.cursors[(TOPIC, 0)].attempts.keys() == {3}


def test_advancing_frees_keys() -> None:
    """The next message of a key that was out or parked before the position may go."""
    rig = Rig()
    rig.publish(TOPIC, b"0", b"1", b"2", b"3", keys=[b"a", b"a", b"b", b"a"])
    subscription = rig.subscribe(ordering="key")
    inbox = rig.join(subscription)
    assert inbox.offsets == [0, 2]
    advance(rig, {TOPIC: {0: 2}})
    rig.run()
    assert inbox.offsets == [0, 2, 3]
    inbox.ack(*inbox.messages[1:])
    assert subscription.lag() == 0


def test_advancing_never_moves_back_and_is_durable() -> None:
    """An older position changes nothing; a crash right after the answer does not either."""
    rig = Rig()
    rig.numbers(10)
    rig.subscribe()
    advance(rig, {TOPIC: {0: 7}})
    advance(rig, {TOPIC: {0: 3}})
    rig.crash()
    assert rig.engine.subscription("billing").cursors[(TOPIC, 0)].position == 7


def test_advancing_is_all_or_nothing() -> None:
    """One position that cannot be, and none is taken."""
    rig = Rig(topic={"partitions": 2})
    for partition in range(2):
        rig.numbers(4, partition=partition)
    rig.subscribe()
    with pytest.raises(OffsetOutOfRange):
        advance(rig, {TOPIC: {0: 4, 1: 5}})
    with pytest.raises(InvalidArgument):
        advance(rig, {TOPIC: {0: 4, 2: 0}})
    assert rig.engine.subscription("billing").lag() == 8
    advance(rig, {TOPIC: {0: 4, 1: 4}})
    assert rig.engine.subscription("billing").lag() == 0


def test_a_wildcard_is_advanced_by_topic_also_in_a_partition_just_added() -> None:
    """A subscription knows every partition of its topics as soon as it is there."""
    rig = Rig()
    rig.numbers(2, "orders.eu")
    rig.subscribe("spark", "orders.*")
    rig.numbers(3, "orders.us")
    rig.wait(rig.engine.change_topic, "orders.eu", {"partitions": 2})
    rig.numbers(4, "orders.eu", partition=1)
    advance(rig, {"orders.eu": {0: 2, 1: 3}, "orders.us": {0: 3}}, "spark")
    assert rig.engine.subscription("spark").lag() == 1


def test_advancing_gets_past_damage() -> None:
    """A partition that is blocked at records that cannot be read goes on behind them."""
    rig = Rig()
    rig.numbers(3)
    subscription = rig.subscribe()
    cursor = subscription.cursors[(TOPIC, 0)]
    cursor.blocked = "offsets 0 to 1 are damaged"
    assert rig.join(subscription).offsets == []
    advance(rig, {TOPIC: {0: 2}})
    rig.run()
    assert cursor.blocked is None
    assert subscription.in_flight() == 1


def test_what_is_advanced_past_can_be_forgotten() -> None:
    """Retention keeps what a subscription has not finished, and no more than that."""
    rig = Rig(topic={"retention_hours": 1.0})
    rig.subscribe()
    rig.numbers(3)
    rig.roll()
    rig.numbers(3, start=3)
    rig.clock.jump(2 * 3_600_000)
    rig.advance(20)
    assert rig.segments() == [0, 3]
    advance(rig, {TOPIC: {0: 3}})
    rig.advance(20)
    assert rig.segments() == [3]
