"""Publishes that their callers wait for: order, threads, breaks, interrupts, forks and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import BrokerClient
from headrace.broker.publishing import Publish
from headrace.client import exchange
from headrace.client.exchange import STREAK, Exchange
from headrace.errors import (
    Closed,
    Forbidden,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    TooLarge,
)
from headrace.server.connection import Connection
from headrace.testing import RunningServer, running_server, wait_until


@pytest.fixture(autouse=True)
def a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, publishes follow each other."""
    monkeypatch.setattr(exchange, "PAUSE_S", 600.0)
    monkeypatch.setattr(exchange, "IDLE_S", 600.0)


def exchange_of(client: BrokerClient) -> Exchange:
    assert client._exchange is not None
    return client._exchange


def begin(client: BrokerClient, topic: str = "orders", **options: Any) -> list[bytes]:
    """Publish until the client has an exchange; what was published."""
    values = [b"first %d" % number for number in range(STREAK + 1)]
    for value in values:
        client.publish(topic, value, **options)
    assert exchange_of(client).is_open
    return values


class Spoilt:
    """A socket on which something happens when the answer is read."""

    def __init__(self, client: BrokerClient, happens: Callable[[], bytes]):
        found = exchange_of(client)._socket
        assert found is not None
        self._socket, self._happens = found, happens
        exchange_of(client)._socket = self  # type: ignore[assignment]

    def recv(self, size: int) -> bytes:
        self._socket.recv(size)  # the broker has stored it
        return self._happens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def connections(server: RunningServer) -> int:
    return server.call(lambda: len(server.server.hub.connections))


# --- when ---------------------------------------------------------------------------------------------
def test_publishes_that_follow_each_other_get_a_connection(
    server: RunningServer, client: BrokerClient
) -> None:
    """Not the first ones; the receipts and the order are the same."""
    assert client.publish("orders", b"first 0").offset == 0
    assert connections(server) == 1
    values = [b"first 0", *begin(client)]
    assert connections(server) == 2
    receipt = client.publish("orders", b"last", {"region": "eu"}, key=b"k", id=None)
    assert (receipt.topic, receipt.partition, receipt.offset) == ("orders", 0, len(values))
    messages = client.fetch("orders", limit=100)
    assert [message.value for message in messages] == [*values, b"last"]
    assert (messages[-1].headers, messages[-1].key) == ({"region": "eu"}, b"k")
    assert messages[-1].id == receipt.id
    assert {each["client_id"] for each in client.clients()} == {client.client_id}


def test_publishes_with_pauses_do_not(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that publishes now and then has one connection."""
    monkeypatch.setattr(exchange, "PAUSE_S", 0.0)
    for _ in range(2 * STREAK):
        client.publish("orders", b"x")
    assert not exchange_of(client).is_open
    assert connections(server) == 1


def test_a_connection_that_nobody_uses_is_closed(
    server: RunningServer, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while without a publish; the loop's connection stays, and publishing goes on."""
    monkeypatch.setattr(exchange, "IDLE_S", 0.05)
    values = [b"%d" % number for number in range(STREAK + 1)]
    for value in values:
        client.publish("orders", value)
    wait_until(lambda: connections(server) == 1)
    assert not exchange_of(client).is_open
    assert client.publish("orders", b"later").offset == len(values)


def test_a_silent_connection_that_the_broker_closes_is_noticed() -> None:
    """The next publish is stored once, over the other connection, which heartbeats keep alive."""
    with running_server(heartbeat_interval=0.5) as server, server.client() as client:
        values = begin(client)
        server.wait_until(lambda: len(server.server.hub.connections) == 1)
        receipt = client.publish("orders", b"later")
        assert (receipt.offset, receipt.duplicate) == (len(values), False)
        assert client.fetch_values("orders") == [*values, b"later"]


def test_a_broker_that_takes_no_second_connection_is_no_trouble() -> None:
    """Then everything goes over the first one."""
    with running_server(max_connections=1) as server, server.client() as client:
        offsets = [client.publish("orders", b"x").offset for _ in range(3 * STREAK)]
        assert offsets == list(range(3 * STREAK))
        assert not exchange_of(client).is_open


def test_a_login_is_given_again() -> None:
    """The second connection has the rights of the first."""
    with running_server(token="secret-secret-secret") as server, server.client() as client:
        assert client.publish("orders", begin(client)[0]).offset == STREAK + 1


# --- what ---------------------------------------------------------------------------------------------
def test_keys_and_partitions_are_those_of_the_loop(client: BrokerClient) -> None:
    """A key has one partition, however it is published; messages without a key take turns."""
    client.create_topic("orders", partitions=4)
    keys = [b"%d" % number for number in range(20)]
    over_the_loop = [client.publish_nowait("orders", b"x", key=key) for key in keys]
    expected = [each.partition for each in over_the_loop]
    begin(client)
    assert [client.publish("orders", b"x", key=key).partition for key in keys] == expected
    assert {client.publish("orders", b"x").partition for _ in range(8)} == {0, 1, 2, 3}
    assert client.publish("orders", b"x", partition=2).partition == 2


def test_partitions_that_are_added_meanwhile_are_used(client: BrokerClient) -> None:
    """The broker refuses the old plan, and the loop makes a new one."""
    begin(client)
    client.change_topic("orders", partitions=8)
    keys = [b"%d" % number for number in range(40)]
    found = {client.publish("orders", b"x", key=key).partition for key in keys}
    assert len(found) == 8


def test_a_topic_that_was_created_again_takes_messages(client: BrokerClient) -> None:
    """It does not know the producer any more."""
    begin(client)
    client.delete_topic("orders")
    client.create_topic("orders")
    assert [client.publish("orders", b"x").offset for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "options", "error"),
    [
        (object(), {}, InvalidArgument),
        (b"x" * 2000, {}, TooLarge),
        (b"x", {"key": 5}, InvalidArgument),
        (b"x", {"partition": 7}, HeadraceError),
        (b"x", {"colour": "red"}, TypeError),
    ],
)
def test_invalid_messages_are_refused_alike(
    value: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    """With and without an exchange, and the next one is published."""
    with running_server(max_message_size=1000) as server, server.client() as client:
        client.create_topic("orders")
        with pytest.raises(error) as before:
            client.publish("orders", value, **options)
        values = begin(client)
        with pytest.raises(error) as after:
            client.publish("orders", value, **options)
        assert str(after.value) == str(before.value)
        assert client.publish("orders", b"good").offset == len(values)


def test_a_full_queue_is_waited_for(client: BrokerClient) -> None:
    """A refusal that may pass is tried again by the loop."""
    client.create_topic("orders", max_queue_size=STREAK + 1)
    client.create_subscription("billing", "orders")
    begin(client)
    receipts: list[Any] = []
    waiting = threading.Thread(target=lambda: receipts.append(client.publish("orders", b"more")))
    waiting.start()
    with client.subscription("billing", "orders") as consumer:
        consumer.get(10).ack()
        waiting.join(20)
    assert [receipt.offset for receipt in receipts] == [STREAK + 1]


# --- order --------------------------------------------------------------------------------------------
def test_a_publish_does_not_overtake_those_before_it(client: BrokerClient) -> None:
    """Plain ones, and ones with headers, of which nobody awaits the receipt."""
    values = begin(client)
    ways: list[Callable[[bytes], object]] = [
        lambda value: client.publish_nowait("orders", value),
        lambda value: client.publish_nowait("orders", value, {"a": "b"}),
    ]
    for number in range(90):
        values += [b"%d" % number, b"%d, and wait" % number]
        ways[number % 2](values[-2])
        client.publish("orders", values[-1])
    client.flush()
    assert client.fetch_values("orders") == values
    assert exchange_of(client).is_open
    assert not client._unanswered


def test_failed_calls_do_not_keep_it_from_being_used(client: BrokerClient) -> None:
    """A call that has failed is not on its way any more."""
    begin(client)
    with pytest.raises(HeadraceError):
        client.publish_nowait("orders", b"x", {"a": "b"}, partition=9).result(10)
    with pytest.raises(InvalidArgument):
        client.publish_nowait("orders", b"x", {"a": 5})  # type: ignore[dict-item]
    assert not client._unanswered


def test_many_threads_publish_and_wait(client: BrokerClient) -> None:
    """One of them has the exchange, the others go over the loop: each message is stored once."""
    begin(client, "warm-up")
    client.create_topic("orders")
    offsets: list[int] = []

    def publish(thread: int) -> None:
        for number in range(50):
            offsets.append(client.publish("orders", b"%d:%d" % (thread, number)).offset)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(offsets) == list(range(400))
    values = client.fetch_values("orders", max_bytes=1 << 20)
    for number in range(8):
        mine = [value for value in values if value.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d" % (number, each) for each in range(50)]


def test_handlers_publish_what_they_make(client: BrokerClient) -> None:
    """A subscription with a handler that publishes through the same client."""
    done = threading.Event()

    def handle(message: Any) -> None:
        if client.publish("results", message.value).offset == 3 * STREAK:
            done.set()

    client.subscribe_to_subscription("billing", handle, "orders")
    client.publish_many("orders", [b"%d" % number for number in range(3 * STREAK + 1)])
    assert done.wait(30)
    assert exchange_of(client).is_open


# --- breaks -------------------------------------------------------------------------------------------
def test_a_lost_answer_is_asked_for_over_the_loop(client: BrokerClient) -> None:
    """The message is stored once, and the receipt says that it was sent twice."""
    values = begin(client)
    Spoilt(client, lambda: b"")
    receipt = client.publish("orders", b"once")
    assert (receipt.offset, receipt.duplicate) == (len(values), True)
    assert client.publish("orders", b"next").offset == len(values) + 1
    assert client.fetch_values("orders") == [*values, b"once", b"next"]


def test_an_answer_that_makes_no_sense_is_asked_for_again(client: BrokerClient) -> None:
    """As if the connection had broken."""
    values = begin(client)
    Spoilt(client, lambda: b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert client.publish("orders", b"once").duplicate
    assert client.fetch_values("orders") == [*values, b"once"]


def test_a_broker_that_comes_back_has_each_message_once(server: RunningServer) -> None:
    """A thread publishes while the broker is killed and started again."""
    with server.client() as client:
        values = begin(client)
        stop = threading.Event()

        def publish() -> None:
            while not stop.is_set():
                values.append(b"%d" % len(values))
                client.publish("orders", values[-1])

        thread = threading.Thread(target=publish)
        thread.start()
        for _ in range(2):
            count = len(values)
            wait_until(lambda count=count: len(values) > count + 10)
            server.kill()
            server.start()
        count = len(values)
        wait_until(lambda: len(values) > count + STREAK)
        stop.set()
        thread.join(30)
        assert client.fetch_values("orders", max_bytes=8 << 20) == values


def test_an_outcome_that_nobody_knows_is_told(server: RunningServer) -> None:
    """The broker is away for longer than a publish is tried."""
    with server.client() as client:
        begin(client)
        client._core._producer_options["timeout"] = 0.2  # not earlier: the machine may be slow

        def away() -> bytes:
            server.kill()
            return b""

        Spoilt(client, away)
        with pytest.raises(OutcomeUnknown, match="may or may not be stored"):
            client.publish("orders", b"x")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_client_that_is_closed_does_not_know_the_outcome(
    client: BrokerClient, is_stopped: bool
) -> None:
    """The answer was lost, and nobody can ask for it any more."""
    begin(client)

    def close() -> bytes:
        client._run(client._core._shut_down() if is_stopped else client._core.link.close())
        if is_stopped:
            client._stop()
        return b""

    Spoilt(client, close)
    with pytest.raises(OutcomeUnknown, match="may or may not be stored"):
        client.publish("orders", b"x")


def test_a_right_that_is_taken_away_meanwhile_does_not_tell_the_outcome(
    server: RunningServer, client: BrokerClient
) -> None:
    """The repetition is refused; the message is stored."""
    values = begin(client)

    def refuse() -> bytes:
        def check(self: Connection, publish: Publish, done: Any) -> None:
            done([], Forbidden("no"))

        patch.setattr(Connection, "publish", check)
        return b""

    Spoilt(client, refuse)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OutcomeUnknown, match="refused"):
        client.publish("orders", b"x")
    assert client.fetch_values("orders") == [*values, b"x"]


# --- interrupts, forks and ends -----------------------------------------------------------------------
def test_an_interrupted_publish_leaves_nothing_half_done(client: BrokerClient) -> None:
    """Ctrl-C while the answer is awaited: later publishes get their own answers."""
    values = begin(client)

    def interrupt() -> bytes:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    Spoilt(client, interrupt)
    # Tests that a shell has started in the background ignore Ctrl-C.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.publish("orders", b"interrupted")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not exchange_of(client).is_open
    values.append(b"interrupted")  # it was stored, which the caller cannot know
    for number in range(2 * STREAK):
        values.append(b"%d" % number)
        assert client.publish("orders", values[-1]).offset == len(values) - 1
    assert exchange_of(client).is_open
    assert client.fetch_values("orders") == values


def test_a_handler_of_a_signal_may_publish(client: BrokerClient) -> None:
    """It has interrupted a publish, and does not wait for it."""
    values = begin(client)
    offsets: list[int] = []

    def handle(*_: object) -> None:
        offsets.append(client.publish("orders", b"from the handler").offset)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:

        def interrupt() -> bytes:
            signal.raise_signal(signal.SIGUSR1)
            return b""

        Spoilt(client, interrupt)
        assert client.publish("orders", b"interrupted").offset == len(values)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert offsets == [len(values) + 1]


FORKS = """
import os, sys
from headrace import BrokerClient
from headrace.client import exchange
from headrace.errors import Closed
exchange.PAUSE_S = exchange.IDLE_S = 600.0

def publish(count):
    return [client.publish("orders", b"x").offset for _ in range(count)]

client = BrokerClient(sys.argv[1], int(sys.argv[2])).connect()
assert publish(30) == list(range(30))
assert client._exchange.is_open
pid = os.fork()
if not pid:
    try:
        publish(1)
    except Closed as error:
        assert error.code == "not_connected", error.code
    else:
        os._exit(1)
    client.connect()
    publish(30)
    ok = client._exchange.is_open
    client.disconnect()
    os._exit(0 if ok else 2)
assert os.waitpid(pid, 0)[1] == 0
assert client._exchange.is_open
assert publish(3) == [60, 61, 62]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_has_no_part_in_it(server: RunningServer) -> None:
    """The child opens its own, and the parent's goes on. The program ends without closing anything."""
    ended = run(FORKS, server)
    assert (ended.returncode, ended.stderr) == (0, "")


ENDS = """
import sys, threading
from headrace import BrokerClient
from headrace.client import exchange
exchange.PAUSE_S = exchange.IDLE_S = 600.0
client = BrokerClient(sys.argv[1], int(sys.argv[2])).connect()
begun = threading.Event()

def publish():
    for number in range(10 ** 9):
        client.publish("orders", b"%d" % number)
        if number == 50:
            begun.set()

threading.Thread(target=publish, daemon=True).start()
assert begun.wait(30)
"""


def test_a_program_ends_while_a_thread_publishes(
    server: RunningServer, client: BrokerClient
) -> None:
    """At once, and all that had a receipt is stored."""
    ended = run(ENDS, server)
    assert ended.returncode == 0, ended.stderr
    values = client.fetch_values("orders", max_bytes=8 << 20)
    assert values == [b"%d" % number for number in range(len(values))]
    assert len(values) > 50


def run(script: str, server: RunningServer) -> subprocess.CompletedProcess[str]:
    quiet = ["-W", "ignore::DeprecationWarning"]  # newer Pythons warn of threads and forks
    command = [sys.executable, *quiet, "-c", script, *map(str, server.address)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_closing_lets_a_publish_finish(server: RunningServer) -> None:
    """A thread that publishes meanwhile gets receipts, and then one error: nothing more can be published, or the last one
    was sent too late for its answer."""
    client = server.client().connect()
    values = begin(client)
    errors: list[HeadraceError] = []

    def publish() -> None:
        try:
            while True:
                client.publish("orders", b"%d" % len(values))
                values.append(b"%d" % len(values))
        except HeadraceError as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    count = len(values)
    wait_until(lambda: len(values) > count + 10)
    client.disconnect()
    thread.join(30)
    assert isinstance(errors[0], (Closed, OutcomeUnknown))
    with server.client() as other:
        stored = other.fetch_values("orders", max_bytes=8 << 20)
    if isinstance(errors[0], OutcomeUnknown) and len(stored) > len(values):
        values.append(b"%d" % len(values))
    assert stored == values
    with client:
        assert client.publish("orders", b"again").offset == len(values)
        assert begin(client)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls_is_used_by_both(certificate: tuple[Path, Path]) -> None:
    """And a break is noticed there, too."""
    cert, key = map(str, certificate)
    with (
        running_server(tls_cert=cert, tls_key=key) as server,
        server.client(tls=True, ca=cert) as client,
    ):
        values = begin(client)
        assert client.publish("orders", b"x").offset == len(values)
        Spoilt(client, lambda: b"")
        assert client.publish("orders", b"once").duplicate
