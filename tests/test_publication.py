"""What fails while nobody waits: it is logged, and raised by ``flush``, ``close`` and the end of ``with``."""

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient
from headrace.errors import HeadraceError, InvalidArgument, StaleDelivery, TooLarge
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.publication import KEPT_MAX, Failures, Publication
from headrace.testing import RunningServer, running_server, wait_until

FOUR = [Broker, AsyncBroker, BrokerClient, AsyncClient]
Api = Any


class Closable:
    """One of the four classes, as an asynchronous context; calls of the blocking ones run in place."""

    def __init__(self, api: Api):
        self.api = api

    async def __aenter__(self) -> Api:
        if hasattr(self.api, "__aenter__"):
            return await self.api.__aenter__()
        return self.api.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        if hasattr(self.api, "__aenter__"):
            await self.api.__aexit__(*error)
        else:
            self.api.__exit__(*error)


async def done(result: Any) -> Any:
    """The result of a call, whether it has to be awaited or not."""
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(params=FOUR, ids=lambda kind: kind.__name__)
def make(request: pytest.FixtureRequest) -> Any:
    """Makes one of the four, with limits that are easy to exceed."""
    with contextlib.ExitStack() as stack:
        if request.param in (Broker, AsyncBroker):
            yield lambda: Closable(request.param(max_message_size=1 << 20))
        else:
            server: RunningServer = stack.enter_context(running_server(memory=True))
            yield lambda: Closable(request.param(server.host, server.port, request_timeout=5))


Make = Callable[[], Closable]


def fail(api: Api, **options: Any) -> Any:
    """A publish that the broker refuses. ``AsyncBroker`` knows at once that there is no such partition."""
    if isinstance(api, AsyncBroker):
        return api.publish_nowait("full", b"x")
    return api.publish_nowait("orders", b"x", partition=7, **options)


REFUSED = "no partition 7|holds 1 unread messages"


async def prepared(api: Api) -> Api:
    await done(api.create_topic("orders"))
    await done(api.create_topic("full", max_queue_size=1))
    await done(api.create_subscription("email", "full"))
    await done(api.publish("full", b"x"))
    return api


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


# --- all four -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("alone", [{}, {"delay": 60}], ids=["gathered", "alone"])
def test_flush_raises_it(make: Make, alone: dict[str, Any], caplog: Any) -> None:
    """Once; and it is in the log."""

    async def work() -> None:
        async with make() as api:
            await prepared(api)
            for _ in range(3):
                fail(api, **alone)
            with pytest.raises(HeadraceError, match=REFUSED) as caught:
                await done(api.flush())
            assert caught.value.__notes__ == ["nobody waited for it (and 2 more failed)"]
            await done(api.flush())
            assert f"nobody waited for it: {caught.value}" in caplog.text

    run(work)


def test_close_and_the_end_of_with_raise_it(make: Make) -> None:
    """After everything is closed; a second close has nothing to say."""

    async def work() -> None:
        closable = make()
        with pytest.raises(HeadraceError, match=REFUSED):
            async with closable as api:
                fail(await prepared(api))
        await done(closable.api.close())

    run(work)


def test_an_error_on_its_way_is_not_hidden(make: Make) -> None:
    """What closing would have raised is a note of it."""

    async def work() -> None:
        async with make() as api:
            fail(await prepared(api))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run(work)
    assert re.search(f"when it was closed.*({REFUSED})", caught.value.__notes__[0])


def test_an_error_that_was_seen_is_not_raised_again(make: Make, caplog: Any) -> None:
    """Whoever looks at the result knows."""

    async def work() -> None:
        async with make() as api:
            await prepared(api)
            with pytest.raises(InvalidArgument):
                await done(api.publish("orders", b"x", partition=7))
            publication = fail(api)
            with pytest.raises(HeadraceError, match=REFUSED):
                await publication if inspect.isawaitable(publication) else publication.result()
            await done(api.flush())

    run(work)
    assert "nobody waited" not in caplog.text


def test_flush_waits_for_what_was_published(make: Make) -> None:
    """Also for what goes alone; afterwards everything has its receipt."""

    async def work() -> None:
        async with make() as api:
            await prepared(api)
            plain = [api.publish_nowait("orders", b"%d" % number) for number in range(200)]
            alone = [
                api.publish_nowait("orders", b"x", idempotency_key=f"{number}")
                for number in range(5)
            ]
            await done(api.flush())
            assert all(each.done() for each in plain + alone)

    run(work)


def test_names_and_sizes_are_checked_at_the_call(make: Make) -> None:
    """Before anything is queued: nothing is left for the flush."""

    async def work() -> None:
        async with make() as api:
            for options in ({}, {"delay": 5}, {"idempotency_key": "k"}):
                with pytest.raises(InvalidArgument, match="bad topic!"):
                    api.publish_nowait("bad topic!", b"x", **options)
                with pytest.raises(TooLarge, match="max_message_size"):
                    api.publish_nowait("orders", bytes(2 << 20), **options)
            with pytest.raises(InvalidArgument, match="str, not int"):
                api.publish_nowait(5, b"x")
            with pytest.raises(TooLarge):
                await done(api.publish_many("orders", [bytes(2 << 20)]))
            await done(api.flush())

    run(work)


# --- acknowledgements ---------------------------------------------------------------------------------
def test_an_ack_that_comes_too_late_is_raised(caplog: Any) -> None:
    """The broker counted it as stale: the message is delivered again."""
    with running_server(memory=True) as server, server.client() as client:
        client.publish("orders", b"x")
        consumer = client.subscription("email", "orders", ack_timeout=0.05)
        message = consumer.get(10)
        consumer.get(10)  # the second delivery: the first one has ended
        message.ack()
        with pytest.raises(StaleDelivery, match="1 acknowledgements came too late"):
            client.flush()
        client.flush()
    assert "came too late" in caplog.text


# --- the list of failures -----------------------------------------------------------------------------
def test_failures_are_bounded() -> None:
    """Only some are kept; all are counted; those that were seen make room."""
    failures = Failures()
    seen = [Publication() for _ in range(KEPT_MAX)]
    for publication in seen:
        publication.settle(None, HeadraceError("seen"))
        failures.add(HeadraceError("seen"), publication)
        publication.is_seen = True
    for number in range(3 * KEPT_MAX):
        failures.add(HeadraceError(f"number {number}"))
    error = failures.take()
    assert error is not None
    assert error.message == "number 0"
    assert error.__notes__ == [f"nobody waited for it (and {3 * KEPT_MAX - 1} more failed)"]
    assert failures.take() is None


def test_a_failure_is_logged_without_a_flush(caplog: Any, monkeypatch: Any) -> None:
    """A program that never flushes finds it in its log."""
    monkeypatch.setattr("headrace.publication.LOG_AFTER_S", 0.01)
    with Broker() as broker:
        broker.create_topic("orders")
        publication = fail(broker)
        wait_until(lambda: "nobody waited for it" in caplog.text)
        with pytest.raises(InvalidArgument):
            publication.result()


def test_asyncio_does_not_log_it_a_second_time(caplog: Any) -> None:
    """A future whose error nobody has asked for is ours to tell."""

    async def clients() -> AsyncIterator[AsyncClient]:
        with running_server(memory=True) as server:
            async with AsyncClient(server.host, server.port) as client:
                yield client

    async def work() -> None:
        async for client in clients():
            await client.create_topic("orders")
            fail(client)
            with pytest.raises(InvalidArgument):
                await client.flush()

    run(work)
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("embedded", [True, False], ids=["Broker", "BrokerClient"])
def test_batches_that_nobody_waits_for_are_stored_and_told(embedded: bool) -> None:
    """``flush`` and ``close`` wait for them, and raise what became of them."""
    with running_server(memory=True) as server:
        api: Any = Broker() if embedded else server.client().connect()
        batch = encode(Columns([b"x"]))
        pending = [api.publish_batch_nowait("orders", batch) for _ in range(20)]
        api.flush()
        assert all(each.done() for each in pending)
        api.publish_batch_nowait("orders", batch, partition=7)
        with pytest.raises(InvalidArgument, match="no partition 7"):
            api.flush()
        last = api.publish_batch_nowait("orders", batch)
        api.stage_nowait("bad topic!", batch)
        with pytest.raises(InvalidArgument, match="bad topic!"):
            api.close()
        assert last.result().offset == 20
