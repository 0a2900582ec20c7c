"""How a server ends, and what keeps it from starting: seen from outside, as real processes."""

import signal
import threading
import time

import pytest

from headrace.cli import EXIT_UNAVAILABLE
from headrace.errors import Closed
from headrace.testing import DidNotStart, running_server, server_process, wait_until
from tests.contract.raw_binary import (
    CREATE_SUBSCRIPTION,
    FETCH,
    PUBLISH,
    SUBSCRIBE,
    FrameSocket,
    frame,
)
from tests.contract.raw_text import TextSocket

PATIENCE_S = 8.0
"""A drain may take five seconds, and a busy machine a little more."""


def read_to_the_end(text: TextSocket) -> list[list[str]]:
    lines = []
    try:
        while True:
            lines.append(text.line())
    except (Closed, OSError):
        return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    """What was taken in is answered and stored, nothing is answered that is not; exit code 0."""
    with server_process() as server:
        text = TextSocket(server.address)
        assert text.ask("PUB orders 1", b"x") == ["OK", "0"]
        flood = threading.Thread(target=_flood, args=(text, 3000), daemon=True)
        flood.start()
        assert text.line() == ["OK", "1"]
        began = time.monotonic()
        server.signal(number)
        answers = read_to_the_end(text)
        assert server.wait() == 0
        assert time.monotonic() - began < PATIENCE_S
        flood.join(10)
        text.close()
        offsets = [int(offset) for _, offset in answers]
        assert offsets == list(range(2, len(offsets) + 2))
        server.start()
        with server.client() as client:
            stored = client.fetch_values("orders", max_bytes=64 << 20)
        assert len(stored) >= len(offsets) + 2


def _flood(text: TextSocket, count: int) -> None:
    try:
        for _ in range(count // 100):
            text.send(b"PUB orders 1000\r\n%b" % bytes(1000) * 100)
    except OSError:
        pass  # the server is gone, as it should be


def test_deliveries_go_back_when_the_server_stops() -> None:
    """Whoever comes after the restart gets them, and a position is where it was."""
    with server_process() as server:
        member = FrameSocket(server.address)
        member.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
        member.ask(SUBSCRIBE, {"subscription": "billing", "ack": "manual"})
        for number in range(3):
            member.ask(PUBLISH, {"topic": "orders"}, b"%d" % number)
        got = [member.next_arrival() for _ in range(3)]
        member.ask(8, {"lease": got[1].properties["lease"], "offset": 1})
        assert server.terminate() == 0
        member.close()
        server.start()
        with server.client() as client:
            consumer = client.subscription("billing", "orders")
            found = [consumer.get(10) for _ in range(2)]
            assert [message.value for message in found] == [b"0", b"2"]
            assert [message.attempt for message in found] == [1, 1]  # a stop uses up no delivery


def test_clients_that_say_nothing_and_read_nothing_do_not_hold_it_up() -> None:
    """Idle ones, ones that wait for something new, and ones that never read."""
    with server_process() as server:
        idle = [TextSocket(server.address) for _ in range(20)]
        idle[0].ask("CREATE orders")
        waiting = FrameSocket(server.address)
        waiting.send(frame(FETCH, 1, {"topic": "orders", "offset": 0, "wait": 60_000}))
        stuck = TextSocket(server.address)
        stuck.send(b"HELP\r\n" * 5000)
        assert idle[1].ask("PING") == ["PONG"]
        began = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - began < PATIENCE_S
        for socket_ in [*idle, stuck]:
            socket_.close()
        waiting.close()


def test_a_second_server_on_the_same_directory_names_the_first() -> None:
    """Exit code 2, the holder's process id, no traceback; the first one is not disturbed."""
    with server_process() as first:
        with pytest.raises(DidNotStart) as caught, server_process(first.data_dir):
            pass
        assert caught.value.code == 2
        assert f"process {first.pid}" in caught.value.errors
        assert "Traceback" not in caught.value.errors
        with first.client() as client:
            assert client.publish("orders", b"x").offset == 0


def test_a_port_that_is_taken_is_named() -> None:
    """An exit code of its own, host and port, what to do; and the directory is free again."""
    with running_server(memory=True) as other:
        with pytest.raises(DidNotStart) as caught, server_process(port=other.port) as server:
            pass
        assert caught.value.code == EXIT_UNAVAILABLE
        assert f"cannot listen on 127.0.0.1:{other.port}" in caught.value.errors
        assert "Traceback" not in caught.value.errors
    with server_process() as server:
        assert server.terminate() == 0


def test_the_ready_line_names_every_address() -> None:
    """So that a script that chose port 0 knows where to go."""
    with server_process(memory=True) as server:
        assert "ready" in server.ready_line
        assert f"tcp://127.0.0.1:{server.port}" in server.ready_line
        assert "in memory" in server.ready_line
        assert "http" in server.addresses


def test_nothing_new_is_accepted_while_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener is closed first."""
    with running_server(memory=True) as server:
        text = TextSocket(server.address)
        text.ask("CREATE orders")
        text.send(b"FETCH orders 0 wait=2000\r\n")
        partition = server.call(lambda: server.engine.partition("orders"))
        server.wait_until(lambda: bool(partition.watchers))
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        wait_until(lambda: _is_refused(server.address))
        assert text.line()[:2] == ["ERR", "offset_out_of_range"], "what was under way is answered"
        with pytest.raises(Closed):
            text.line()
        stopping.join(20)
        text.close()


def _is_refused(address: tuple[str, int]) -> bool:
    try:
        TextSocket(address).close()
    except OSError:
        return True
    return False
