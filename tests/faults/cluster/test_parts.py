"""The parts of the cluster scenario: what is planned, the proxy, and how pauses are measured."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.cluster.pauses import Pauses
from tests.faults.cluster.plan import KINDS, plan
from tests.faults.cluster.proxy import Proxy
from tests.faults.cluster.run import SCENARIO
from tests.faults.cluster.stage import Stage


# --- the plan -------------------------------------------------------------------------------------
def test_a_seed_is_a_plan() -> None:
    """The same seed breaks the same; another seed breaks something else."""
    assert plan(7, 30) == plan(7, 30) != plan(8, 30)


def test_a_plan_has_everything() -> None:
    """As many faults as were asked for, of each kind, some of them together; the end is quiet."""
    steps = plan(7, SCENARIO.amount)
    faults = [fault for step in steps for fault in step.faults]
    assert len(faults) == SCENARIO.amount >= 100
    assert {fault.what for fault in faults} == set(KINDS)
    assert {len(step.faults) for step in steps} == {1, 2, 3}
    assert {fault.how for fault in faults} >= {"cut", "silent", "slow", "SIGKILL", "SIGSTOP"}
    assert steps[-1].rests


def test_nothing_is_broken_twice_at_once() -> None:
    for step in plan(11, 500):
        nodes = [f.who for f in step.faults if f.what.startswith("node ") and "and" not in f.what]
        assert len(set(nodes)) == len(nodes)
        assert sum("kafka node" in f.what and "and" not in f.what for f in step.faults) <= 1


def test_the_stage_can_break_what_is_planned() -> None:
    assert all(hasattr(Stage, "_" + what.replace(" ", "_")) for what in KINDS)


# --- the proxy ------------------------------------------------------------------------------------
@pytest.fixture
def echo() -> Iterator[int]:
    """A port where everything comes back."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def test_the_proxy(echo: int) -> None:
    """A link passes everything on; silent, it passes it on later; cut, it resets the connection. Others go on."""
    proxy = Proxy({"a": echo, "b": echo})
    try:
        a, b = (
            socket.create_connection(("127.0.0.1", proxy.ports[name]), timeout=10) for name in "ab"
        )
        with a, b:
            for link in (a, b):
                link.sendall(b"one")
                assert link.recv(10) == b"one"
            proxy.set(["a"], "silent")
            a.sendall(b"two")
            b.sendall(b"two")
            assert b.recv(10) == b"two"
            a.settimeout(0.05)
            with pytest.raises(TimeoutError):
                a.recv(10)
            a.settimeout(10)
            proxy.set(["a"], "slow", 0.01)
            assert a.recv(10) == b"two"
            proxy.set(["a"], "cut")
            assert is_over(a)
            b.sendall(b"three")
            assert b.recv(10) == b"three"
        with socket.create_connection(("127.0.0.1", proxy.ports["a"]), timeout=10) as again:
            proxy.set(["a"], "open")
            again.close()
        with socket.create_connection(("127.0.0.1", proxy.ports["a"]), timeout=10) as again:
            again.sendall(b"four")
            assert again.recv(10) == b"four"
    finally:
        proxy.close()


# --- pauses ---------------------------------------------------------------------------------------
S = 1_000_000_000


def story(*answers: tuple[str, float, float], faults: tuple[dict[str, Any], ...] = ()) -> Pauses:
    events: list[dict[str, Any]] = [*faults]
    for number, (probe, began, answered) in enumerate(answers):
        op = f"{probe}-1-{number}"
        events.append({"event": "invoke", "op": op, "at": int(began * S)})
        events.append({"event": "ok", "op": op, "at": int(answered * S)})
    return Pauses(events)


def fault(what: str, at: float, until: float, **more: Any) -> dict[str, Any]:
    return {"event": "fault", "what": what, "at": int(at * S), "until": int(until * S), **more}


def test_failover_is_the_slowest_partition() -> None:
    """Calls that began before the kill do not count."""
    told = story(
        ("p0", 1.0, 1.1), ("p0", 9.9, 12.0), ("p0", 12.0, 12.1), ("p1", 10.5, 17.5),
        faults=(fault("node killed", 10, 20),),
    )  # fmt: skip
    assert told.failovers() == [7.5]


def test_a_kill_among_other_faults_is_not_measured() -> None:
    told = story(
        ("p0", 10.5, 17.5),
        faults=(fault("node killed", 10, 20), fault("clients", 5, 8)),
    )
    assert told.failovers() == []


def test_the_pause_of_a_drain_is_the_longest_between_two_answers() -> None:
    """From the beginning of the drain to its end."""
    told = story(
        ("p0", 8.0, 9.0), ("p0", 9.0, 10.5), ("p0", 10.5, 11.25), ("p0", 11.3, 14.0),
        faults=(fault("node drained", 10, 20, drained=11 * S),),
    )  # fmt: skip
    assert told.drains() == [0.75]
