"""One BrokerClient and many threads; connecting and closing."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from typing import Any

import pytest

from headrace import BrokerClient
from headrace.errors import (
    Closed,
    ConnectFailed,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    RequestTimeout,
)
from headrace.testing import RunningServer, wait_until


def in_threads(count: int, work: Any) -> list[Any]:
    """Run it in so many threads at once; what each returned, or the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


# --- many threads ---------------------------------------------------------------------------------
def test_many_threads_publish_through_one_client(client: BrokerClient) -> None:
    """Every message is stored once, and those of one thread keep their order."""

    def publish(thread: int) -> list[int]:
        publications = [client.publish_nowait("orders", b"%d:%d" % (thread, n)) for n in range(200)]
        return [publication.result(20).offset for publication in publications]

    offsets = in_threads(16, publish)
    assert sorted(offset for mine in offsets for offset in mine) == list(range(3200))
    assert all(mine == sorted(mine) for mine in offsets)
    values = Counter(client.fetch_values("orders", max_bytes=64 << 20))
    assert len(values) == 3200


def test_many_threads_do_everything_at_once(client: BrokerClient) -> None:
    """Publish, fetch, subscribe, consume, describe, flush and leave, side by side."""
    client.create_topic("orders")
    client.create_subscription("billing", "orders")

    def busy(thread: int) -> int:
        done = 0
        for number in range(15):
            client.publish("orders", b"%d:%d" % (thread, number))
            client.fetch("orders", limit=5)
            with client.subscribe("orders") as inbox:
                client.publish("orders", b"marker")
                inbox.get(20)
            client.topic_stats("orders")
            if number % 5 == 0:
                client.flush()
            done += 1
        return done

    assert in_threads(8, busy) == [15] * 8
    assert client.topic_stats("orders")["messages"] == 8 * 15 * 2


def test_many_threads_take_from_one_consumer(client: BrokerClient) -> None:
    """Each message goes to one of them, and all of them are acknowledged."""
    client.publish_many("orders", [b"%d" % number for number in range(3000)])
    member = client.subscription("billing", "orders", prefetch=200)
    taken: list[bytes] = []
    lock = threading.Lock()

    def take(thread: int) -> None:
        while True:
            with lock:
                if len(taken) == 3000:
                    return
            try:
                message = member.get(0.5)
            except RequestTimeout:
                continue  # the others were faster
            with lock:
                taken.append(message.value)
            message.ack()

    in_threads(6, take)
    assert sorted(map(int, taken)) == list(range(3000))
    client.flush()
    assert client.subscription_stats("billing", "orders")["lag"] == 0


def test_many_threads_take_from_a_small_channel(client: BrokerClient) -> None:
    """The channel is emptied and filled all the time, and never comes to a halt."""
    inbox = client.subscribe("orders", capacity=4)
    client.publish_many("orders", [b"%d" % number for number in range(4000)])
    taken: list[int] = []

    def take(thread: int) -> None:
        while len(taken) < 4000:
            try:
                taken.append(int(inbox.get(0.5).value))
            except RequestTimeout:
                continue  # the others were faster

    in_threads(4, take)
    assert sorted(taken) == list(range(4000))


# --- connecting -----------------------------------------------------------------------------------
def test_a_broker_that_is_not_there_is_named() -> None:
    """At once, with host and port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}") as caught:
            BrokerClient("127.0.0.1", port).connect()
        assert caught.value.retryable


def test_somebody_else_who_listens_there_is_not_waited_for_too_long() -> None:
    """A server that accepts and says nothing is no broker."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(ConnectFailed):
            BrokerClient(*mute.getsockname(), request_timeout=0.3).connect()


def test_a_client_that_reached_itself_has_not_reached_a_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TCP can connect a port to itself when nobody listens; our own heartbeat would answer us."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
    itself = socket.socket()
    itself.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    itself.bind(address)
    itself.connect(address)
    assert itself.getsockname() == itself.getpeername()
    itself.setblocking(False)
    client = BrokerClient(*address)
    from headrace.client import link as link_module

    class Loop:
        """Hands out the socket that is connected to itself."""

        def __init__(self, loop: Any):
            self._loop = loop

        def __getattr__(self, name: str) -> Any:
            return getattr(self._loop, name)

        async def create_connection(self, factory: Any, host: str, port: int, **_: Any) -> Any:
            return await self._loop.create_connection(factory, sock=itself)

    running = link_module.asyncio.get_running_loop
    monkeypatch.setattr(link_module.asyncio, "get_running_loop", lambda: Loop(running()))
    with pytest.raises(ConnectFailed):
        client.connect()


def test_without_a_connection_every_call_says_what_to_do(server: RunningServer) -> None:
    """Before connect and after close."""
    client = server.client()
    for _ in range(2):
        for call in (
            client.topics,
            client.flush,
            lambda: client.publish("orders", b"x"),
            lambda: client.publish("orders", b"x", delay=1),
            lambda: client.subscribe("orders"),
            lambda: client.fetch("orders"),
        ):
            with pytest.raises(Closed) as caught:
                call()
            assert caught.value.code == "not_connected"
        client.connect()
        client.close()
        client.close()
        assert not client.is_connected


def test_a_client_can_be_connected_again(server: RunningServer) -> None:
    """As often as one likes; connecting twice is connecting once."""
    client = server.client()
    for number in range(3):
        assert client.connect() is client
        assert client.connect() is client
        assert client.publish("orders", b"x").offset == number
        client.disconnect()


# --- closing --------------------------------------------------------------------------------------
def test_what_was_published_just_before_the_close_is_stored(server: RunningServer) -> None:
    """Nobody has to flush before leaving."""
    with server.client(linger=60) as client:
        publications = [client.publish_nowait("orders", b"%d" % number) for number in range(500)]
    assert all(publication.done() for publication in publications)
    with server.client() as client:
        assert len(client.fetch_values("orders", max_bytes=16 << 20)) == 500


def test_who_waits_in_a_client_that_is_closed_hears_of_it(server: RunningServer) -> None:
    """Threads in get, in a fetch that waits, in a for loop."""
    client = server.client().connect()
    client.create_topic("orders")
    inbox, member = client.subscribe("orders"), client.subscription("billing", "orders")
    ended: dict[str, object] = {}

    def note(name: str, call: Any) -> threading.Thread:
        def run() -> None:
            try:
                ended[name] = call()
            except HeadraceError as error:
                ended[name] = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = [
        note("get", inbox.get),
        note("for", lambda: list(member)),
        note("fetch", lambda: client.fetch("orders", 0, wait=30)),
    ]
    partition = server.call(lambda: server.engine.partition("orders"))
    server.wait_until(lambda: len(partition.watchers) == 3)
    wait_until(lambda: inbox._sleepers and member._sleepers)
    client.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert isinstance(ended["get"], Closed)
    assert ended["for"] == []
    assert isinstance(ended["fetch"], Closed)


def publish_until_closed(client: BrokerClient, found: list[Any], going: threading.Event) -> None:
    number = 0
    while True:
        number += 1
        try:
            if number % 3:
                found.append(client.publish_nowait("orders", b"x"))
            else:
                found.append(client.publish_nowait("orders", b"x", idempotency_key=str(number)))
            if number % 20 == 0:
                found[-1].result(10)
        except HeadraceError:
            return
        going.set()


def test_publishing_while_the_client_is_closed_is_answered_one_way_or_the_other(
    server: RunningServer,
) -> None:
    """No publication is left without an answer, and the client works when it is connected again."""
    client = server.client()
    for _ in range(10):
        client.connect()
        found: list[Any] = []
        going = threading.Event()
        threads = [
            threading.Thread(target=publish_until_closed, args=(client, found, going))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert going.wait(10)
        with contextlib.suppress(Closed, OutcomeUnknown):
            client.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        for publication in found:
            with contextlib.suppress(Closed, OutcomeUnknown):
                publication.result(5)
    with client.connect():
        client.publish("orders", b"x")


def test_a_callback_that_calls_the_client_is_refused_instead_of_waiting_for_itself(
    client: BrokerClient,
) -> None:
    """It runs in the thread that would have to answer it."""
    caught: list[BaseException] = []

    def callback(publication: Any) -> None:
        try:
            client.topics()
        except InvalidArgument as error:
            caught.append(error)

    client.publish_nowait("orders", b"x").add_done_callback(callback)
    wait_until(lambda: caught)
    assert "own thread" in str(caught[0])


def test_a_call_that_is_interrupted_ends(
    client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it waits for the broker. A subscription that it would join has nobody to read it."""
    is_asked, is_over = threading.Event(), threading.Event()

    async def slow(*_: object) -> None:
        is_asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_over.set()

    begin = client._begin

    def interrupt(timeout: float | None = None) -> Any:
        assert is_asked.wait(10)
        raise KeyboardInterrupt

    def interrupted(call: Any) -> Any:
        future = begin(call)
        future.result = interrupt  # type: ignore[method-assign]
        return future

    monkeypatch.setattr(client, "_begin", interrupted)
    monkeypatch.setattr(client._core, "_start", slow)
    with pytest.raises(KeyboardInterrupt):
        client.subscribe("orders")
    assert is_over.wait(10)


def test_a_handler_may_use_its_client(client: BrokerClient) -> None:
    """It runs in a thread of its own: answering one message by another is what handlers do."""
    client.create_subscription("billing", "orders")
    client.subscribe_to_subscription(
        "billing", lambda m: client.publish("invoices", b"for " + m.value)
    )
    inbox = client.subscribe("invoices")
    client.publish("orders", b"one")
    assert inbox.get(10).value == b"for one"


def test_no_threads_are_left_behind(server: RunningServer) -> None:
    """Neither the client's own nor those of its handlers."""

    def ours() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        return {
            n
            for n in names
            if n.startswith("headrace-") and n not in ("headrace-server", "headrace-watchdog")
        }

    before = {name for name in ours() if name.startswith("headrace-disk")}
    with server.client() as client:
        client.subscribe_to_subscription("billing", lambda m: None, "orders")
        client.publish("orders", b"x")
    wait_until(lambda: {n for n in ours() if not n.startswith("headrace-disk")} == set())
    assert before <= ours()
