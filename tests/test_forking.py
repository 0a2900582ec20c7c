"""Programs that fork: what the child has of a client or a broker, and what the parent keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Broker, BrokerClient
from headrace.testing import RunningServer, running_server

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")

BEGINNING = """
import os, signal, sys
from headrace import Broker, BrokerClient
from headrace.errors import Closed, StaleDelivery

def in_child(work):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0, "the child has failed"
        return
    signal.alarm(20)
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def refuses(work, code, sentence):
    try:
        work()
    except Closed as error:
        assert error.code == code, error.code
        assert sentence in str(error), error
    else:
        raise AssertionError("it was not refused")
"""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as found:
        yield found


@pytest.fixture
def client(server: RunningServer) -> Iterator[BrokerClient]:
    with server.client() as found:
        yield found


def command(script: str, *arguments: object) -> list[str]:
    quiet = ["-W", "ignore::DeprecationWarning"]  # newer Pythons warn of threads and forks
    words = [str(argument) for argument in arguments]
    return [sys.executable, *quiet, "-c", BEGINNING + script, *words]


def run(script: str, *arguments: object) -> str:
    ended = subprocess.run(
        command(script, *arguments),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def test_a_client_is_the_parents_and_can_connect_again(
    server: RunningServer, client: BrokerClient
) -> None:
    """Nothing waits for ever, and nothing in the child disturbs the parent's connection."""
    run(
        """
client = BrokerClient(sys.argv[1], int(sys.argv[2])).connect()
inbox = client.subscribe("orders")
client.publish("orders", b"before")
assert inbox.get(10).value == b"before"

def child():
    for work in (client.topics, lambda: client.publish("orders", b"x"), client.flush):
        refuses(work, "not_connected", "forked from: call connect() here")
    refuses(lambda: inbox.get(10), "not_connected", "forked from")
    assert list(inbox) == []
    inbox.close()
    assert not client.is_connected
    client.disconnect()
    name = client.client_id
    with client:
        assert client.client_id == name
        mine = client.subscribe("orders")
        client.publish("orders", b"child")
        assert mine.get(10).value == b"child"

name = client.client_id
in_child(child)
assert client.client_id == name
assert inbox.get(10).value == b"child"
client.publish("orders", b"after")
assert inbox.get(10).value == b"after"
in_child(lambda: None)
client.disconnect()
""",
        *server.address,
    )
    assert client.fetch_values("orders") == [b"before", b"child", b"after"]


def test_a_client_that_was_never_connected_connects_in_each(server: RunningServer) -> None:
    """As a program does that forks before it begins to work."""
    run(
        """
client = BrokerClient(sys.argv[1], int(sys.argv[2]), client_id="worker")

def child():
    refuses(client.topics, "not_connected", "call connect() first")
    with client:
        assert client.topics() == []
        assert client.client_id == "worker"

in_child(child)
with client:
    in_child(lambda: client.connect().topics())
    assert client.topics() == []
""",
        *server.address,
    )


def test_what_the_parent_has_taken_the_child_cannot_settle(
    server: RunningServer, client: BrokerClient
) -> None:
    """An ack that nobody would carry out is refused; the parent's is taken."""
    client.publish_many("orders", [b"one", b"two", b"three"])
    run(
        """
client = BrokerClient(sys.argv[1], int(sys.argv[2])).connect()
member = client.subscription("billing", "orders")
first = member.get(10)

def child():
    try:
        first.ack()
    except StaleDelivery:
        pass
    else:
        raise AssertionError("it was not refused")
    refuses(lambda: member.get(10), "not_connected", "forked from")

in_child(child)
first.ack()
assert [member.get(10).value for _ in range(2)] == [b"two", b"three"]
client.disconnect()
""",
        *server.address,
    )
    assert client.subscription_stats("billing", "orders")["lag"] == 2


@pytest.mark.parametrize("kind", ["client", "broker"])
def test_what_is_under_way_is_answered_to_the_parent_alone(
    server: RunningServer, tmp_path: Path, kind: str
) -> None:
    """A child that asks for a result gets the error of every other call. What was known before, it knows."""
    run(
        """
import threading
shell = BrokerClient(sys.argv[2], int(sys.argv[3])).connect() if sys.argv[1] == "client" else Broker(sys.argv[4])
refusal = ("not_connected", "call connect() here") if sys.argv[1] == "client" else ("closed", "run 'headrace serve'")
known = shell.publish_nowait("orders", b"known")
known.result(10)
stopped, go_on = threading.Event(), threading.Event()

def stop():
    stopped.set()
    go_on.wait()

shell._call(stop)  # its thread answers nothing for a while
stopped.wait()
waiting = [
    shell.publish_nowait("orders", b"plain"),
    shell.publish_nowait("orders", b"more", {"a": "b"}),
    shell.publish_nowait("orders", b"late", delay=60),
]

def child():
    assert known.result().offset == 0
    for each in waiting:
        refuses(each.result, *refusal)
        refuses(lambda: each.result(timeout=5), *refusal)
        assert not each.done()

in_child(child)
go_on.set()
assert [each.result(10).offset for each in waiting] == [1, 2, None]
shell.close()
""",
        kind,
        *server.address,
        tmp_path / "data",
    )


def test_a_broker_is_the_parents(tmp_path: Path) -> None:
    """The child is told what to do instead; closing it there closes nothing."""
    run(
        """
broker = Broker(sys.argv[1])
member = broker.subscription("billing", "orders")
inbox = broker.subscribe("orders")
broker.publish("orders", b"before")
first = member.get(10)

def child():
    for work in (
        broker.topics,
        lambda: broker.publish("orders", b"x"),
        lambda: broker.fetch("orders"),
        lambda: member.get(10),
        lambda: inbox.get(10),
        first.ack,
    ):
        refuses(work, "closed", "run 'headrace serve'")
    broker.close()

in_child(child)
broker.publish("orders", b"after")
first.ack()
assert member.get(10).value == b"after"
assert [inbox.get(10).value for _ in range(2)] == [b"before", b"after"]
broker.close()
""",
        tmp_path / "data",
    )
    with Broker(tmp_path / "data") as broker:
        assert broker.fetch_values("orders") == [b"before", b"after"]
        assert broker.subscription_stats("billing", "orders")["lag"] == 1


def test_the_lock_ends_with_the_parent(tmp_path: Path) -> None:
    """A child that lives on does not keep the directory of a broker that was killed."""
    script = """
broker = Broker(sys.argv[1])
broker.publish("orders", b"one")
pid = os.fork()
if not pid:
    print(os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
    with subprocess.Popen(
        command(script, tmp_path / "data"),
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            with Broker(tmp_path / "data") as broker:
                assert broker.fetch_values("orders") == [b"one"]
        finally:
            os.kill(child, signal.SIGKILL)
