"""``AsyncBroker``: the same broker on a program's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncBroker, HeadraceError
from headrace.errors import (
    BrokerFailed,
    Closed,
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    RequestTimeout,
    StaleDelivery,
    SubscriptionNotFound,
    TopicNotFound,
)
from headrace.log.batch import encode
from headrace.log.columns import Columns
from tests.fakes import FaultyFiles

WAIT = 20.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on an event loop of its own, bounded in time."""

    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), WAIT))

    return run


@asynccontextmanager
async def opened(path: Path | None = None, **options: Any) -> AsyncIterator[AsyncBroker]:
    async with AsyncBroker.open(path, **options) as broker:
        yield broker


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until it is so; the test's own time limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - nobody here could set an event
        await asyncio.sleep(0)


@on_a_loop
async def test_the_example_from_the_documentation(tmp_path: Path) -> None:
    """Open, subscribe, publish, receive; with ``async with`` or by awaiting it."""
    async with AsyncBroker.open(tmp_path) as broker:
        channel = await broker.subscribe("events")
        receipt = await broker.publish("events", b"Hello", {"a": "b"})
        message = await channel.get(timeout=WAIT)
        assert (message.payload, message.headers, message.id) == (b"Hello", {"a": "b"}, receipt.id)
    broker = await AsyncBroker.open(tmp_path)
    assert await broker.fetch_values("events") == [b"Hello"]
    await broker.close()


@on_a_loop
async def test_a_channel_is_iterable_until_it_is_closed() -> None:
    """``async for`` ends with ``unsubscribe``; what had arrived comes first."""
    async with opened() as broker:
        channel = await broker.subscribe("events", capacity=10)

        found: list[bytes] = []

        async def read() -> None:
            async for message in channel:
                found.append(message.value)

        task = asyncio.create_task(read())
        await broker.publish_many("events", [b"%d" % n for n in range(100)])
        await until(lambda: len(found) == 100)
        await broker.unsubscribe("events")
        await task
        assert found == [b"%d" % n for n in range(100)]
        with pytest.raises(Closed):
            await channel.get()


@on_a_loop
async def test_get_with_a_timeout() -> None:
    """It ends in time, and a message that comes later is not lost to it."""
    async with opened() as broker:
        channel = await broker.subscribe("events")
        for timeout in (0, 0.01):
            with pytest.raises(RequestTimeout):
                await channel.get(timeout)
        await broker.publish("events", b"x")
        assert (await channel.get(WAIT)).value == b"x"


@on_a_loop
async def test_several_wait_for_one_channel() -> None:
    """Each message goes to one of them; a cancelled one takes none with it."""
    async with opened() as broker:
        channel = await broker.subscribe("events")
        waiting = [asyncio.create_task(channel.get()) for _ in range(4)]
        await until(lambda: len(channel._waiters) == 4)
        waiting[0].cancel()
        for number in range(3):
            await broker.publish("events", b"%d" % number)
        found = await asyncio.gather(*waiting[1:])
        assert sorted(message.value for message in found) == [b"0", b"1", b"2"]
        assert waiting[0].cancelled()


@pytest.mark.parametrize("end", ["unsubscribe", "channel", "broker"])
def test_whoever_waits_is_woken(end: str) -> None:
    """By ``unsubscribe``, by closing the channel, and by closing the broker."""

    async def scenario() -> None:
        broker = await AsyncBroker.open()
        channel = await broker.subscribe("events")
        waiting = [asyncio.create_task(channel.get()) for _ in range(3)]
        await until(lambda: len(channel._waiters) == 3)
        match end:
            case "unsubscribe":
                await broker.unsubscribe("events")
            case "channel":
                channel.close()
                channel.close()
            case "broker":
                await broker.close()
        for task in waiting:
            with pytest.raises(Closed):
                await task
        await broker.close()

    asyncio.run(asyncio.wait_for(scenario(), WAIT))


@on_a_loop
async def test_subscriptions(tmp_path: Path) -> None:
    """Settling takes effect at once; what was acknowledged does not come again after ``close``."""
    async with opened(tmp_path) as broker:
        consumer = await broker.subscription("billing", "orders", backoff=0.0)
        await broker.publish_many("orders", [b"%d" % n for n in range(6)])
        messages = [await consumer.get(WAIT) for _ in range(6)]
        messages[0].ack()
        with pytest.raises(StaleDelivery):
            messages[0].ack()
        consumer.ack_many(messages[1:3])
        consumer.ack_up_to(messages[3])
        messages[4].extend(60)
        messages[4].nack(reason="no")
        again = await consumer.get(WAIT)
        assert (again.value, again.attempt) == (b"4", 2)
        stats = await broker.subscription_stats("billing")
        assert (stats["lag"], stats["in_flight"]) == (2, 2)
        for bad in (-1, "x", float("nan")):
            with pytest.raises(InvalidArgument):
                again.nack(delay=bad)  # type: ignore[arg-type]
        await broker.flush()
    async with opened(tmp_path) as broker:
        async with await broker.subscription("billing", "orders") as consumer:
            assert [(await consumer.get(WAIT)).value for _ in range(2)] == [b"4", b"5"]
        assert (await broker.subscriptions())[0]["members"] == 0


@on_a_loop
async def test_a_plain_message_cannot_be_settled() -> None:
    """Not by itself and not by a consumer."""
    async with opened() as broker:
        channel = await broker.subscribe("orders")
        consumer = await broker.subscription("billing", "orders")
        await broker.publish("orders", b"x")
        message = await channel.get(WAIT)
        for settle in (message.ack, lambda: consumer.ack(message), lambda: consumer.nack(message)):
            with pytest.raises(Closed) as caught:
                settle()
            assert caught.value.code == "not_a_delivery"


@on_a_loop
async def test_moving(tmp_path: Path) -> None:
    """By name, by topic, by partition; within a wildcard one topic alone."""
    async with opened(tmp_path, partitions=2) as broker:
        consumer = await broker.subscription("wide", "orders.*")
        for topic in ("orders.eu", "orders.us"):
            for partition in (0, 1):
                await broker.publish(topic, b"x", partition=partition, timestamp=5_000)

        async def take(count: int) -> set[tuple[str, int]]:
            found = [await consumer.get(WAIT) for _ in range(count)]
            consumer.ack_many(found)
            return {(m.topic, m.partition) for m in found}

        assert len(await take(4)) == 4
        await broker.seek("wide", 0, topic="orders.eu", partition=1)
        assert await take(1) == {("orders.eu", 1)}
        await broker.seek("wide", "earliest", topic="orders.us")
        assert await take(2) == {("orders.us", 0), ("orders.us", 1)}
        await broker.seek("wide", datetime.fromtimestamp(5, UTC))
        assert len(await take(4)) == 4
        await broker.seek("wide", datetime.fromtimestamp(6, UTC))
        assert (await broker.subscription_stats("wide"))["lag"] == 0
        with pytest.raises(InvalidArgument):
            await broker.seek("wide", 0, partition=7)
        with pytest.raises(SubscriptionNotFound):
            await broker.seek("narrow", 0)


@on_a_loop
async def test_everything_else(tmp_path: Path) -> None:
    """Topics, reading, dead letters, the schedule and producers: each call once."""
    async with opened(tmp_path) as broker:
        await broker.create_topic("orders", partitions=1)
        await broker.create_topic("orders")  # as it is: no mistake
        with pytest.raises(HeadraceError):
            await broker.create_topic("orders", partitions=2)
        await broker.change_topic("orders", retention_hours=None)
        assert await broker.topics() == ["orders"]
        consumer = await broker.subscription("billing", "orders", max_deliveries=1)
        receipts = await broker.publish_many("orders", [b"a", b"b"], ids=[None, None])
        assert [message.value for message in await broker.fetch("orders", limit=1)] == [b"a"]
        assert len(await broker.fetch_batches("orders")) == 1
        assert (await broker.find(receipts[0].id)).value == b"a"
        with pytest.raises(OffsetOutOfRange):
            await broker.fetch("orders", 9)
        for _ in range(2):
            (await consumer.get(WAIT)).nack()
        await until(lambda: consumer.subscription.tally.dead_lettered == 2)
        letters = await broker.dead_letters("billing")
        assert await broker.edit_dead_letter("billing", letters[0].offset, value=b"c") == 2
        assert (await broker.redrive("billing", limit=1))["redriven"] == 1
        assert await broker.purge_dead_letters("billing") == 1
        later = await broker.publish("orders", b"later", delay=100)
        assert [scheduled.id for scheduled in await broker.scheduled()] == [later.id]
        for bad in (0, "x", True):
            with pytest.raises(InvalidArgument):
                await broker.scheduled(limit=bad)  # type: ignore[arg-type]
        await broker.cancel(later.id)
        with pytest.raises(InvalidArgument):
            await broker.cancel("nonsense")
        producer, epoch = await broker.producer()
        once = await broker.publish("orders", b"p", producer=(producer, epoch, 0))
        twice = await broker.publish("orders", b"p", producer=(producer, epoch, 0))
        assert (twice.offset, twice.duplicate) == (once.offset, True)
        assert (await broker.publish("orders", b"k", idempotency_key="k")).duplicate is False
        assert (await broker.publish("orders", b"k", idempotency_key="k")).duplicate is True
        assert (await broker.topic_stats("orders"))["durability"] == "always"
        await broker.delete_subscription("billing")
        with pytest.raises(SubscriptionNotFound):
            await consumer.get(WAIT)
        await broker.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            await broker.topic_stats("orders")


@on_a_loop
async def test_many_tasks_at_once(tmp_path: Path) -> None:
    """A thousand publishes at the same time are a handful of commits, each answered."""
    async with opened(tmp_path) as broker:
        receipts = await asyncio.gather(
            *(broker.publish("work", b"%d" % number) for number in range(1000))
        )
        assert sorted(receipt.offset for receipt in receipts) == list(range(1000))
        values = await broker.fetch_values("work")
        assert [values[receipt.offset] for receipt in receipts] == [b"%d" % n for n in range(1000)]


@on_a_loop
async def test_a_cancelled_publish_harms_nobody(tmp_path: Path) -> None:
    """Its outcome is unknown to the one who gave up; the broker goes on."""
    async with opened(tmp_path) as broker:
        task = asyncio.create_task(broker.publish("work", b"given up"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await broker.publish("work", b"next")
        assert (await broker.fetch_values("work"))[-1] == b"next"


@on_a_loop
async def test_closing(tmp_path: Path) -> None:
    """What was on its way is answered; twice at once both wait for the end; then it is ``Closed``."""
    broker = await AsyncBroker.open(tmp_path)
    consumer = await broker.subscription("billing", "work")
    publishing = [asyncio.create_task(broker.publish("work", b"x")) for _ in range(10)]
    await asyncio.sleep(0)
    closing = [asyncio.create_task(broker.close()) for _ in range(2)]
    await asyncio.gather(*closing)
    answers = await asyncio.gather(*publishing, return_exceptions=True)
    stored = [answer for answer in answers if not isinstance(answer, Closed)]
    assert all(not isinstance(answer, BaseException) for answer in stored)
    with pytest.raises(Closed):
        await broker.publish("work", b"y")
    with pytest.raises(Closed):
        await broker.subscribe("work")
    with pytest.raises(Closed):
        await broker.subscription("billing", "work")
    with pytest.raises(Closed):
        await consumer.get()
    await broker.close()
    async with opened(tmp_path) as again:
        assert len(await again.fetch_values("work")) == len(stored)


@on_a_loop
async def test_closing_twice_while_a_handler_works() -> None:
    """Both wait for the handler, and both end well."""
    broker = await AsyncBroker.open()
    is_at_work, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: Any) -> None:
        is_at_work.set()
        await go_on.wait()

    await broker.subscribe_to_subscription("billing", handle, "orders")
    await broker.publish("orders", b"x")
    await is_at_work.wait()
    closing = [asyncio.create_task(broker.close()) for _ in range(2)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*closing)


@on_a_loop
async def test_not_opened_yet() -> None:
    """A broker that was not awaited says how it is opened; closing it is no mistake."""
    broker = AsyncBroker.open()
    with pytest.raises(Closed):
        await broker.publish("work", b"x")
    await broker.close()


@on_a_loop
async def test_a_failed_sync(tmp_path: Path) -> None:
    """The publisher gets an unknown outcome, the reader hears that it is over, ``close`` works."""
    files = FaultyFiles()
    broker = await AsyncBroker.open(tmp_path, files=files)
    await broker.publish("work", b"first")
    consumer = await broker.subscription("billing", "work")
    message = await consumer.get(WAIT)
    files.fail("sync", 1, name=".log")
    with pytest.raises(OutcomeUnknown):
        await broker.publish("work", b"second")
    with pytest.raises(BrokerFailed):
        await consumer.get(WAIT)
    with pytest.raises(StaleDelivery):
        message.ack()
    with pytest.raises(HeadraceError):
        await broker.flush()
    await broker.close()
    async with opened(tmp_path) as again:
        assert (await again.fetch_values("work"))[0] == b"first"


@on_a_loop
async def test_a_topic_that_goes_takes_its_channel_along() -> None:
    """A consumer of a deleted topic is forgotten by the broker when the next one comes."""
    async with opened() as broker:
        consumer = await broker.subscription("billing", "orders")
        await broker.delete_topic("orders")
        await broker.subscribe("other")
        assert consumer not in broker._channels
        consumer.close()


def test_the_brokers_own_topics_and_subscriptions_are_not_to_be_moved() -> None:
    """The same refusal as over the network; what is asked of them is answered."""

    async def run() -> None:
        async with AsyncBroker.open() as broker:
            await broker.stage("orders", encode(Columns([b"x"])))
            with pytest.raises(InvalidArgument) as topic:
                await broker.change_topic("__staged", retention_hours=1.0)
            assert topic.value.code == "invalid_topic"
            for move in (
                broker.delete_subscription("__staging", "__staged"),
                broker.seek("__staging", "latest", topic="__staged"),
                broker.advance("__staging", {"__staged": {0: 1}}, topic="__staged"),
            ):
                with pytest.raises(InvalidArgument) as refused:
                    await move
                assert refused.value.code == "invalid_subscription"
            assert (await broker.topic_stats("__staged"))["messages"] == 1

    asyncio.run(run())
