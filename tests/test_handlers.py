"""Handlers: a coroutine is awaited where there is a loop, and refused where there is none."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient, Message
from headrace.errors import Closed, InvalidArgument
from headrace.testing import RunningServer, running_server, wait_until


async def coroutine(message: Message) -> None:
    """What a user of asyncio writes."""


class Callee:
    async def __call__(self, message: Message) -> None:
        """An object that is called."""

    async def method(self, message: Message) -> None:
        """One of its methods."""


def generator(message: Message) -> Iterator[None]:
    yield


async def async_generator(message: Message) -> Any:
    yield


COROUTINES = [coroutine, Callee(), Callee().method, functools.partial(coroutine)]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """A broker in memory."""
    with running_server(memory=True) as running:
        yield running


@pytest.fixture(params=[Broker, BrokerClient], ids=lambda kind: kind.__name__)
def blocking(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Any]:
    """A class for threads."""
    with Broker() if request.param is Broker else server.client() as api:
        yield api


@pytest.mark.parametrize("handler", COROUTINES, ids=["function", "object", "method", "partial"])
def test_threads_refuse_a_coroutine_function(blocking: Any, handler: Any) -> None:
    """At the call, before the subscription exists."""
    for start in (blocking.consume, blocking.subscribe_to_subscription):
        with pytest.raises(InvalidArgument, match=r"coroutine function.*use AsyncBroker or Async"):
            start("email", handler, "orders")
    assert blocking.subscriptions() == []


@pytest.mark.parametrize("handler", [generator, async_generator, 5, None])
def test_what_would_never_run_is_refused(blocking: Any, handler: Any) -> None:
    """A generator, or no function at all."""
    with pytest.raises(InvalidArgument, match=r"would never run|a handler is a function"):
        blocking.consume("email", handler, "orders")


def test_a_misspelt_option_is_refused(blocking: Any) -> None:
    """With all that the method takes; also without a topic, where settings have no effect."""
    for topic in ("orders", None):
        with pytest.raises(TypeError, match=r"consume got .* 'concurency'; it takes .*concurrency"):
            blocking.consume("email", print, topic, concurency=4)
        with pytest.raises(TypeError, match=r"subscription got .* 'prefech'; it takes .*prefetch"):
            blocking.subscription("email", topic, prefech=4)
    with pytest.raises(TypeError, match=r"create_subscription: missing .* 'topic'"):
        blocking.create_subscription("email")
    with pytest.raises(TypeError, match=r"BrokerClient got .* 'tokne'; it takes .*token"):
        BrokerClient(tokne="x")  # type: ignore[call-arg]


def test_a_setting_without_a_topic_is_refused(blocking: Any) -> None:
    """Only the creation of a subscription, which needs a topic, applies settings."""
    blocking.create_subscription("email", "orders")
    for options in ({"ack_timeout": 60}, {"start": "latest"}):
        with pytest.raises(InvalidArgument, match="has an effect only with a topic"):
            blocking.consume("email", print, **options)
        with pytest.raises(InvalidArgument, match="has an effect only with a topic"):
            blocking.subscription("email", **options)
    blocking.subscription("email", prefetch=5, auto_extend=True).close()


def test_a_fetched_message_says_how_to_answer_it(blocking: Any) -> None:
    """It has no subscription that could carry the reply."""
    blocking.publish("orders", b"x")
    with pytest.raises(Closed, match="use reply of the client"):
        blocking.fetch("orders")[0].reply("y")


def test_threads_do_not_acknowledge_what_they_cannot_await(
    blocking: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The coroutine is closed, and the message goes the way of a failure, with a reason that says why."""
    blocking.publish("orders", b"x")
    started: list[Any] = []

    def handler(message: Message) -> None:
        started.append(coroutine(message))
        return started[-1]  # type: ignore[no-any-return]

    with caplog.at_level(logging.CRITICAL, "headrace.worker"):
        blocking.subscribe_to_subscription("email", handler, "orders", max_deliveries=1)
        wait_until(lambda: blocking.dead_letters("email"))  # an empty list before
    [letter] = blocking.dead_letters("email")
    assert "returned a coroutine, which threads cannot await" in letter.reason
    assert started[0].cr_frame is None  # closed: no warning that it was never awaited


@pytest.mark.parametrize("kind", [AsyncBroker, AsyncClient], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["function", "object", "returned", "plain"])
def test_asyncio_awaits_it(kind: type, how: str, server: RunningServer) -> None:
    """And acknowledges the message only afterwards."""

    async def work() -> None:
        api: Any = kind() if kind is AsyncBroker else kind(server.host, server.port)
        async with api:
            begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                begun.set()
                await go_on.wait()
                done.set()

            class Handler:
                async def __call__(self, message: Message) -> None:
                    await handle(message)

            handlers: dict[str, Callable[[Message], Any]] = {
                "function": handle,
                "object": Handler(),
                "returned": lambda message: asyncio.ensure_future(handle(message)),
                "plain": lambda message: done.set(),
            }
            await api.publish("orders", b"x")
            await api.subscribe_to_subscription("email", handlers[how], "orders")
            if how != "plain":
                await begun.wait()
                assert (await api.subscription_stats("email"))["acked"] == 0
            go_on.set()
            await done.wait()
            await api.unsubscribe_from_subscription("email")
            await api.flush()
            assert (await api.subscription_stats("email"))["acked"] == 1

    asyncio.run(work())
