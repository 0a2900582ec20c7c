"""Requests and their replies: in process and over the network, with threads and with asyncio."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient, limits
from headrace.errors import Closed, Conflict, InvalidArgument, QueueFull, RequestTimeout
from headrace.model import REPLY_TO, Message
from headrace.testing import RunningServer, running_server, wait_until

WAIT_S = 20
Api = Broker | BrokerClient


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(params=["embedded", "network"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    if request.param == "embedded":
        with Broker.open() as broker:
            yield broker
    else:
        server = request.getfixturevalue("server")
        with server.client(request_timeout=10) as client:
            yield client


def upper(message: Message) -> None:
    message.reply(message.text().upper(), {"by": "worker"})


def test_a_request_gets_its_reply(api: Api) -> None:
    """The value, headers, and the place of the request; the request is acknowledged after it."""
    api.create_subscription("later", "words")
    api.subscribe_to_subscription("shout", upper, "words")
    reply = api.request("words", "hello", {"lang": "en"}, key="k", timeout=WAIT_S)
    assert (reply.value, reply.headers) == (b"HELLO", {"by": "worker"})
    [request] = api.fetch("words")
    assert (reply.topic, reply.partition, reply.offset) == ("words", 0, request.offset)
    assert reply.id == request.id
    assert (request.key, request.headers["lang"]) == (b"k", "en")
    wait_until(lambda: api.subscription_stats("shout")["acked"] == 1)


def test_many_requests_at_once_and_several_workers(server: RunningServer) -> None:
    """Each reply goes to the request that it answers, whichever worker handles it."""
    with server.client() as one, server.client() as two, server.client() as asking:
        for worker in (one, two):
            worker.subscribe_to_subscription("shout", upper, "words", concurrency=4, prefetch=4)
        found: dict[str, str] = {}

        def ask(number: int) -> None:
            for turn in range(10):
                word = f"word {number} {turn}"
                found[word] = asking.request("words", word, timeout=WAIT_S).text()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert len(found) == 80
    assert all(reply == word.upper() for word, reply in found.items())


@pytest.mark.parametrize("where", ["embedded", "network"])
def test_with_asyncio(where: str, server: RunningServer) -> None:
    """A coroutine asks, another one replies."""

    async def check() -> None:
        api: Any = AsyncBroker() if where == "embedded" else AsyncClient(server.host, server.port)
        async with api:

            async def handle(message: Message) -> None:
                message.reply(b"re: " + message.value)

            await api.subscribe_to_subscription("shout", handle, "words", concurrency=3)
            replies = await asyncio.gather(
                *[api.request("words", f"{number}", timeout=WAIT_S) for number in range(20)]
            )
            assert [reply.value for reply in replies] == [b"re: %d" % n for n in range(20)]

    asyncio.run(check())


def test_nobody_replies(api: Api) -> None:
    """It is an error that says so, a TimeoutError for those who wait, and it leaves nothing behind."""
    with pytest.raises(RequestTimeout, match=r"nobody replied.* Is the topic right") as told:
        api.request("words", "hello", timeout=0.05)
    assert (told.value.code, told.value.retryable) == ("no_reply", False)
    assert api.topics() == ["words"]
    assert api.subscriptions() == []


def test_a_late_reply_is_dropped(api: Api) -> None:
    """``reply`` says that nobody waits; ``message.reply`` says nothing."""
    consumer = api.subscription("shout", "words")
    with pytest.raises(RequestTimeout):
        api.request("words", "hello", timeout=0.05)
    message = consumer.get(WAIT_S)
    assert api.reply(message, "too late") is False
    message.reply("too late")
    message.ack()
    consumer.close()


def test_the_first_reply_counts(api: Api) -> None:
    """Plain subscribers can reply, too; a second reply is dropped."""
    replies: list[bool] = []
    channel = api.subscribe("words")

    def answer() -> None:
        message = channel.get(WAIT_S)
        replies.extend(api.reply(message, text) for text in ("first", "second"))

    thread = threading.Thread(target=answer)
    thread.start()
    assert api.request("words", "hello", timeout=WAIT_S).text() == "first"
    thread.join(WAIT_S)
    assert replies == [True, False]


def test_a_message_that_is_no_request(api: Api) -> None:
    """It cannot be replied to, and the sentence says why."""
    consumer = api.subscription("shout", "words")
    api.publish("words", "hello")
    message = consumer.get(WAIT_S)
    with pytest.raises(InvalidArgument, match="is not a request") as told:
        message.reply("x")
    assert told.value.code == "not_a_request"
    with pytest.raises(InvalidArgument):
        api.request("words", 5)  # type: ignore[arg-type]
    for wrong in (-1, limits.REQUEST_S_MAX + 1, "soon"):
        with pytest.raises(InvalidArgument):
            api.request("words", "x", timeout=wrong)  # type: ignore[arg-type]


def test_a_requester_that_reconnects(server: RunningServer) -> None:
    """The broker knows the request again: it is published once, and its reply is not lost."""
    with server.client() as asking, server.client() as working:
        consumer = working.subscription("shout", "words")
        replies: list[str] = []
        thread = threading.Thread(
            target=lambda: replies.append(asking.request("words", "hi", timeout=WAIT_S).text())
        )
        thread.start()
        message = consumer.get(WAIT_S)
        link = asking._core.link
        wire = link.wire
        assert wire is not None
        asking._call(wire._transport.abort)
        wait_until(lambda: link.wire not in (None, wire))
        message.reply("still there")
        message.ack()
        thread.join(WAIT_S)
        assert replies == ["still there"]
        assert len(working.fetch("words")) == 1


def ask(broker: Broker, address: uuid.UUID, seconds: float, owner: str) -> Awaitable[Message]:
    """Request something of "words", as the operation does."""
    publish = broker.engine.publishing.message("words", b"x", {REPLY_TO: str(address)}, {})
    return broker.engine.requests.ask(publish, address, seconds, owner)


def test_the_same_id_of_somebody_else() -> None:
    """An id belongs to one request: nobody gets the reply to another one by naming its id."""
    with Broker.open() as broker:
        address = uuid.uuid4()
        requests = broker.engine.requests

        async def steal() -> None:
            asking = asyncio.ensure_future(ask(broker, address, WAIT_S, "user:alice"))
            await asyncio.sleep(0)
            with pytest.raises(Conflict) as told:
                await ask(broker, address, WAIT_S, "user:mallory")
            assert told.value.code == "request_exists"
            assert requests.reply(address, b"for alice", None)
            again = await ask(broker, address, WAIT_S, "user:alice")
            assert again.value == (await asking).value == b"for alice"

        broker._run(steal())


def test_slots_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many requests are refused; after their time nothing is left, of answered ones neither."""
    monkeypatch.setattr(limits, "REQUESTS_PER_CALLER_MAX", 3)
    with Broker.open() as broker:
        requests, budget = broker.engine.requests, broker.engine.budget
        broker.publish("words", b"warm")
        used = budget.used

        async def fill() -> None:
            waiting = [
                asyncio.ensure_future(ask(broker, uuid.uuid4(), 0.05, "a")) for _ in range(3)
            ]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull) as told:
                await ask(broker, uuid.uuid4(), 0.05, "a")
            assert told.value.code == "too_many_requests"
            await asyncio.gather(*waiting, return_exceptions=True)

        broker._run(fill())
        wait_until(lambda: len(requests) == 0)
        monkeypatch.setattr(limits, "REQUESTS_PER_CALLER_MAX", 10**6)

        async def answered() -> None:
            for _ in range(limits.REQUESTS_KEPT_MAX + 10):
                address = uuid.uuid4()
                asking = asyncio.ensure_future(ask(broker, address, WAIT_S, "a"))
                await asyncio.sleep(0)
                assert requests.reply(address, bytes(1000), None)
                await asking

        broker._run(answered())
        assert len(requests) == limits.REQUESTS_KEPT_MAX
        requests.close(Closed("test"))
        assert len(requests) == 0
        assert budget.used < used + (4 << 20)


def test_large_replies_are_not_kept_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept after a reply has a bound in bytes, and goes after a moment, not at the requester's deadline."""
    monkeypatch.setattr(limits, "REQUESTS_KEPT_BYTES_MAX", 3_000_000)
    monkeypatch.setattr(limits, "REQUESTS_KEPT_S", 0.01)
    with Broker.open() as broker:
        requests, budget = broker.engine.requests, broker.engine.budget
        broker.publish("words", b"warm")
        kept: list[int] = []

        async def answered() -> None:
            for _ in range(10):
                address = uuid.uuid4()
                asking = asyncio.ensure_future(ask(broker, address, 3600.0, "a"))
                await asyncio.sleep(0)
                assert requests.reply(address, bytes(1_000_000), None)
                kept.append(len(requests))
                assert len((await asking).value) == 1_000_000

        broker._run(answered())
        assert max(kept) <= 2
        wait_until(lambda: len(requests) == 0)
        assert requests._answered_bytes == 0
        wait_until(lambda: budget.used < 1_000_000)


def test_closing_the_broker_ends_the_waiting() -> None:
    """A request that waits raises ``Closed``."""
    broker = Broker.open()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            broker.request("words", "hi", timeout=WAIT_S)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(broker.engine.requests) == 1)
    broker.close()
    thread.join(WAIT_S)
    assert isinstance(errors[0], Closed)


def test_a_refused_request_is_an_error_at_once(api: Api) -> None:
    """A publish that the topic refuses is not waited for."""
    api.create_topic("words", durable=False, max_queue_size=1)
    api.create_subscription("shout", "words")
    api.publish("words", "full")
    with pytest.raises(QueueFull):
        api.request("words", "x", timeout=WAIT_S)


def test_the_header_names_the_address(api: Api) -> None:
    """It is a random UUID: other clients use the header as it is documented."""
    consumer = api.subscription("shout", "words")
    thread = threading.Thread(target=lambda: api.request("words", "x", timeout=WAIT_S))
    thread.start()
    message = consumer.get(WAIT_S)
    address = uuid.UUID(message.headers[REPLY_TO])
    assert api.send_reply(address, b"done") is True
    message.ack()
    thread.join(WAIT_S)
