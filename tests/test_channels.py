"""Channels, apart from the brokers and clients that fill them."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, channels
from headrace.channels import AsyncChannel, Channel
from headrace.client.consumer import ClientLease, RemoteConsumer
from headrace.errors import Closed, InvalidArgument, RequestTimeout
from headrace.model import Message
from headrace.testing import running_server, wait_until


def test_a_signal_is_heard_that_does_not_wake_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs handlers in the main thread, which the system may not have woken for it.

    It is so when the signal came just before the thread went to sleep. Here another thread gets it.
    """
    monkeypatch.setattr(channels, "LOOK_S", 0.01)
    channel = Channel("events", 10, lambda callback, *args: None)
    heard = threading.Event()
    while_asleep: list[bool] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.set()

    def send() -> None:
        wait_until(lambda: channel._sleepers)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        while_asleep.append(heard.wait(10))
        channel.closed(None)

    before = signal.signal(signal.SIGUSR1, hear)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(Closed):
            channel.get()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert while_asleep == [True]


@pytest.mark.parametrize("settle", [RemoteConsumer.ack, RemoteConsumer.nack])
def test_an_interrupt_before_the_loop_is_woken_is_made_up_for(settle: Callable[..., None]) -> None:
    """The next settlement wakes the loop; else none would ever leave again."""
    interrupts, called = [KeyboardInterrupt()], []

    def call(callback: Callable[..., Any]) -> None:
        if interrupts:
            raise interrupts.pop()
        called.append(callback)

    consumer, lease = RemoteConsumer("events", 10, call), ClientLease(1, 3, 1)
    first, second, third = (
        Message("events", 0, n, 0, None, b"", None, lease=lease) for n in range(3)
    )
    with pytest.raises(KeyboardInterrupt):
        settle(consumer, first)
    settle(consumer, second)
    settle(consumer, third)
    assert (called, len(consumer._settled)) == ([consumer.carry_out], 3)


def test_a_closed_channel_takes_no_more_messages() -> None:
    """The broker may send some before it knows; those that have arrived before can still be taken."""
    channel = Channel("events", 10, lambda callback, *args: None)
    channel.put([Message("events", 0, 0, 0, None, b"before", {})])
    channel.closed(None)
    channel.put([Message("events", 0, 1, 0, None, b"after", {})])
    assert channel.get().value == b"before"
    with pytest.raises(Closed):
        channel.get()


def test_waiting_in_vain_leaves_nothing_behind() -> None:
    """A program may ask an idle channel again and again."""

    async def main() -> None:
        channel = AsyncChannel("events", 10)
        for _ in range(10):
            with pytest.raises(RequestTimeout):
                await channel.get(0.0001)
        assert not channel._waiters

    asyncio.run(main())


# --- without a second await ---------------------------------------------------------------------------
@pytest.fixture(params=["AsyncBroker", "AsyncClient"])
def run_async(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Runs a coroutine function with an open broker or client."""
    with running_server(memory=True) as server:

        async def run(work: Callable[[Any], Any]) -> None:
            embedded = request.param == "AsyncBroker"
            async with AsyncBroker() if embedded else AsyncClient(*server.address) as api:
                await work(api)

        yield lambda work: asyncio.run(run(work))


def test_a_channel_says_that_its_topic_did_not_exist(run_async: Callable[..., Any]) -> None:
    """Subscribing created it; a wildcard creates nothing."""

    async def work(api: Any) -> None:
        opened = [await api.subscribe(topic) for topic in ("mispelt", "mispelt", "other.*")]
        assert [channel.topic_created for channel in opened] == [True, False, False]

    run_async(work)


def test_a_subscription_opens_by_itself(run_async: Callable[..., Any]) -> None:
    """With ``async with``, with ``async for``, with ``await``, and as a task."""

    async def work(api: Any) -> None:
        await api.publish_many("orders", [b"1", b"2", b"3", b"4"])
        async with api.subscription("email", "orders", prefetch=1) as consumer:
            (await consumer.get(10)).ack()
            await api.flush()
        assert consumer.is_closed
        async for message in api.subscription("email", prefetch=1):
            message.ack()
            await api.flush()
            break
        third = await api.subscription("email", prefetch=1)
        (await third.get(10)).ack()
        await api.flush()
        third.close()
        fourth = await asyncio.create_task(api.subscription("email"))
        assert (await fourth.get(10)).value == b"4"

    run_async(work)


def test_a_plain_channel_opens_by_itself(run_async: Callable[..., Any]) -> None:
    """``async for`` is enough; an error arrives where it is opened."""

    async def work(api: Any) -> None:
        async def publish() -> None:
            while True:
                await api.publish("orders", b"x")
                await asyncio.sleep(0.001)

        task = asyncio.create_task(publish())
        async for message in api.subscribe("orders"):
            assert message.value == b"x"
            break
        async with api.subscribe("orders") as channel:
            await channel.get(10)
        channel = await api.subscribe("orders")
        await channel.get(timedelta(seconds=10))
        task.cancel()
        with pytest.raises(InvalidArgument):
            async with api.subscription("bad name!", "orders"):
                pass
        with pytest.raises(InvalidArgument):
            await api.subscribe("orders", capacity=0)

    run_async(work)


@pytest.mark.filterwarnings("error")
def test_a_forgotten_async_is_named() -> None:
    """``with`` and ``for`` say what to write instead, and leave no coroutine that nobody awaits."""
    client: Any = AsyncClient()
    with pytest.raises(TypeError, match="use async with: AsyncClient is for asyncio"), client:
        pass
    with pytest.raises(TypeError, match="use async with"), client.subscription("email", "orders"):
        pass
    with pytest.raises(TypeError, match="use async for"):
        list(client.subscribe("orders"))
    with pytest.raises(AttributeError, match="not open yet, so it has no 'get': await it first"):
        client.subscription("email", "orders").get()
    opening = client.subscribe("orders")
    assert not hasattr(opening, "cr_code")  # debuggers ask; it is still good
    opening.close()


def test_the_end_of_a_channel_shows_no_other_error_before_it() -> None:
    """A traceback begins with the reason, not with the IndexError of an empty queue."""
    channel = Channel("events", 10, lambda callback, *args: None)
    with pytest.raises(RequestTimeout) as late:
        channel.get(0)
    channel.closed(None)
    with pytest.raises(Closed) as closed:
        channel.get()
    assert late.value.__context__ is None
    assert closed.value.__context__ is None
