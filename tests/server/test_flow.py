"""Flow control: what a connection may cost, whatever its client does or does not do."""

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from headrace.broker.pace import Pace
from headrace.clock import Clock
from headrace.server import flow
from headrace.server.connection import Connection
from headrace.server.flow import Outbox, RequestQueue
from headrace.testing import RunningServer, running_server, server_process, wait_until
from tests.contract.raw_binary import CREATE_SUBSCRIPTION, SUBSCRIBE, FrameSocket
from tests.contract.raw_text import TextSocket
from tests.fakes import FakeLoop


# --- the outbox alone -----------------------------------------------------------------------------
class FakeTransport(asyncio.Transport):
    """A socket whose other side reads when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.pieces: list[list[bytes]] = []
        self.buffered = 0
        self.reading = True
        self.aborted = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data
        self.writes += 1
        self.buffered += len(data)

    def writelines(self, list_of_data: list[bytes]) -> None:  # type: ignore[override]
        self.pieces.append(list_of_data)
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class WorkClock(Clock):
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def seconds(self) -> float:
        return self.now


class Rig:
    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.transport = FakeTransport()
        self.outbox = Outbox(self.transport, self.loop)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Rig:
    """An outbox over a socket that is none."""
    return Rig()


def test_answers_leave_in_the_order_of_their_commands(rig: Rig) -> None:
    """Whichever is ready first."""
    first, second, third = (rig.outbox.reserve() for _ in range(3))
    third.fill(b"3")
    second.fill(b"2")
    assert rig.transport.written == b""
    first.fill(b"1")
    rig.loop.run_until_idle()
    assert rig.transport.written == b"123"


def test_an_answer_that_is_ready_waits_for_those_before_it(rig: Rig) -> None:
    """Also one that never had to wait for anything else."""
    slot = rig.outbox.reserve()
    rig.outbox.send(b"2")
    assert rig.transport.written == b""
    slot.fill(b"1")
    rig.loop.run_until_idle()
    assert rig.transport.written == b"12"


def test_a_delivery_does_not_wait_for_answers(rig: Rig) -> None:
    """It belongs to no command."""
    rig.outbox.reserve()
    rig.outbox.write(b"delivery")
    assert rig.transport.written == b"delivery"


def test_a_delivery_comes_behind_the_answers_of_its_turn(rig: Rig) -> None:
    """Who follows what it publishes hears first that it is stored, then gets the message."""
    slot = rig.outbox.reserve()
    rig.outbox.deliver(b"message ")
    rig.outbox.deliver(b"another ")
    slot.fill(b"stored ")
    assert rig.transport.written == b"stored "
    rig.loop.run_until_idle()
    assert rig.transport.written == b"stored message another "


def test_a_delivery_waits_for_one_turn_at_most(rig: Rig) -> None:
    """An answer that takes its time holds up no delivery."""
    slot = rig.outbox.reserve()
    rig.outbox.deliver(b"message ")
    rig.loop.run_until_idle()
    slot.fill(b"at last")
    assert rig.transport.written == b"message at last"


def test_an_answer_does_not_overtake_deliveries(rig: Rig) -> None:
    """What is asked behind a delivery, such as to end the subscription, is answered behind it."""
    slot = rig.outbox.reserve()
    rig.outbox.deliver(b"message ")
    slot.fill(b"stored ")
    rig.outbox.send(b"unsubscribed")
    assert rig.transport.written == b"stored message unsubscribed"


def test_nothing_follows_the_last_word(rig: Rig) -> None:
    """Answers and deliveries that are ready come before it. Those that are ready later are not sent."""
    first, second, third, fourth = (rig.outbox.reserve() for _ in range(4))
    rig.outbox.deliver(b"message ")
    first.fill(b"1 ")
    second.fill(b"2 ")
    fourth.fill(b"4 ")
    rig.outbox.end(b"bye")
    rig.outbox.end(b"again")
    rig.outbox.deliver(b"late")
    rig.outbox.write(b"later")
    rig.outbox.write_pieces([b"a" * flow.PIECE_BYTES_MIN] * 2)
    third.fill(b"3 ")
    rig.loop.run_until_idle()
    assert rig.transport.written == b"1 2 message bye"
    assert not rig.outbox.unanswered


def test_an_answer_in_pieces_keeps_its_place(rig: Rig) -> None:
    """Large pieces are not joined, also after another answer; small ones are."""
    large = [b"a" * flow.PIECE_BYTES_MIN, b"b" * flow.PIECE_BYTES_MIN]
    rig.outbox.send_pieces(large)
    assert (rig.transport.written, rig.transport.pieces) == (b"".join(large), [large])
    rig.outbox.send_pieces([b"small", b"er"])
    assert rig.transport.written.endswith(b"smaller")
    slot = rig.outbox.reserve()
    rig.outbox.send_pieces(large)
    slot.fill(b"first")
    rig.loop.run_until_idle()
    assert rig.transport.written.endswith(b"first" + b"".join(large))
    assert rig.transport.pieces == [large, large]
    before, slots = len(rig.transport.written), [rig.outbox.reserve() for _ in range(4)]
    for slot, data in zip(reversed(slots), (b"4", large, b"2", b"1"), strict=True):
        slot.fill(data)
    rig.loop.run_until_idle()
    assert rig.transport.written[before:] == b"12" + b"".join(large) + b"4"
    assert rig.transport.pieces == [large] * 3
    rig.outbox.close()
    rig.outbox.send_pieces(large)
    assert len(rig.transport.pieces) == 3


def test_too_many_unanswered_bytes_stop_the_reading(rig: Rig) -> None:
    """It goes on when most of them are answered, not at once."""
    slots = [rig.outbox.reserve(1 << 20) for _ in range(9)]
    assert not rig.transport.reading
    for slot in slots[:6]:
        slot.fill(b"x")
    rig.loop.run_until_idle()
    assert not rig.transport.reading
    slots[6].fill(b"x")
    slots[7].fill(b"x")
    rig.loop.run_until_idle()
    assert rig.transport.reading


def test_too_many_unanswered_commands_stop_the_reading(rig: Rig) -> None:
    """However small they are."""
    slots = [rig.outbox.reserve(0) for _ in range(flow.UNANSWERED_COUNT_HIGH + 1)]
    assert not rig.transport.reading
    rig.outbox.reserve(0)
    assert not rig.transport.reading
    for slot in slots:
        assert rig.outbox.unanswered < flow.UNANSWERED_COUNT_LOW or not rig.transport.reading
        slot.fill(b"x")
        rig.loop.run_until_idle()
    assert rig.transport.reading


def test_answers_that_are_ready_in_one_turn_of_the_loop_are_one_write(rig: Rig) -> None:
    """A system call for each would cost more than the answers themselves; one alone does not wait."""
    slots = [rig.outbox.reserve() for _ in range(3)]
    for number, slot in enumerate(slots):
        slot.fill(b"%d" % number)
        assert rig.transport.writes == 0
    assert rig.outbox.unanswered == 3
    rig.loop.run_until_idle()
    assert (rig.transport.written, rig.transport.writes) == (b"012", 1)
    rig.outbox.reserve().fill(b"3")
    assert (rig.transport.written, rig.transport.writes) == (b"0123", 2)


def test_what_was_ready_is_not_sent_on_a_closed_connection(rig: Rig) -> None:
    """It closed between the answer and its sending."""
    slots = [rig.outbox.reserve() for _ in range(2)]
    slots[0].fill(b"1")
    rig.outbox.close()
    rig.loop.run_until_idle()
    assert rig.transport.written == b""


def test_who_does_not_read_is_not_read_from(rig: Rig) -> None:
    """A client that floods and never reads fills its own socket, not our memory."""
    rig.outbox.pause_writing()
    assert not rig.transport.reading
    rig.outbox.resume_writing()
    assert rig.transport.reading


def test_who_takes_nothing_for_too_long_is_dropped(rig: Rig) -> None:
    """With what was kept for it."""
    rig.outbox.write(b"x" * 1000)
    rig.outbox.pause_writing()
    rig.loop.advance(flow.STALLED_S - 1)
    assert not rig.transport.aborted
    rig.loop.advance(2)
    assert rig.transport.aborted


def test_who_is_slow_is_not_dropped(rig: Rig) -> None:
    """As long as something arrives; when nothing more does, the time is up."""
    rig.transport.buffered = 32 << 20
    rig.outbox.pause_writing()
    for _ in range(10):
        rig.transport.buffered -= flow.STALLED_BYTES_MIN
        rig.loop.advance(flow.STALLED_S)
        assert not rig.transport.aborted
    rig.loop.advance(flow.STALLED_S)
    assert rig.transport.aborted


def test_more_than_the_hard_bound_is_never_kept(rig: Rig) -> None:
    """Whatever it was that made it."""
    rig.transport.buffered = flow.WRITE_BYTES_HARD
    rig.outbox.write(b"x")
    assert rig.transport.aborted


def test_a_closed_outbox_wants_nothing_more(rig: Rig) -> None:
    """Answers that come late go nowhere, and no timer is left."""
    slot = rig.outbox.reserve()
    rig.outbox.pause_writing()
    rig.outbox.close()
    slot.fill(b"late")
    rig.outbox.write(b"late")
    assert rig.transport.written == b""
    rig.loop.advance(2 * flow.STALLED_S)
    assert not rig.transport.aborted


# --- over real sockets ----------------------------------------------------------------------------
@contextlib.contextmanager
def plain_socket(server: RunningServer) -> Iterator[socket.socket]:
    """With small buffers, so that the system keeps little of what is not read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    plain.settimeout(20)
    plain.connect(server.address)
    try:
        yield plain
    finally:
        plain.close()


def send_until_stuck(plain: socket.socket, data: bytes, most: int, quiet_s: float = 0.3) -> int:
    """Send it again and again until nothing leaves for a while; how many bytes left."""
    plain.setblocking(False)
    sent, view = 0, memoryview(data)
    while sent < most:
        if not select.select([], [plain], [], quiet_s)[1]:
            break
        with contextlib.suppress(BlockingIOError):
            sent += plain.send(view[sent % len(data) :])
    plain.setblocking(True)
    plain.settimeout(20)
    return sent


def connection_of(server: RunningServer) -> Connection:
    (connection,) = server.server.hub.connections
    return connection


def test_a_flood_that_is_not_read_is_slowed_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, server: RunningServer
) -> None:
    """The flooder gets stuck at a bounded cost; when it reads, every command is answered."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    with plain_socket(server) as plain:
        plain.sendall(b"HELP\r\n")
        answer = plain.recv(1 << 16)
        outbox = connection_of(server).outbox
        # Else the system keeps megabytes of commands: a hundred megabytes of answers.
        theirs = outbox._transport.get_extra_info("socket")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        sent = send_until_stuck(plain, b"HELP\r\n" * 1000, most=8 << 20)
        assert sent < 8 << 20, "it was never slowed"
        assert server.call(outbox._transport.get_write_buffer_size) < 1 << 20
        assert not outbox.reading
        expected = sent // len(b"HELP\r\n") * len(answer)
        heard = 0
        while heard < expected:
            heard += len(plain.recv(1 << 16))
        assert heard == expected


def test_many_large_fetches_in_one_write_are_answered_as_they_are_read(
    server: RunningServer,
) -> None:
    """400 MB of answers were asked for in one write; the broker keeps a few of them at a time."""
    size, count = 1 << 20, 400
    with server.client() as client:
        client.publish("orders", bytes(size))
    with plain_socket(server) as plain:
        server.wait_until(lambda: len(server.server.hub.connections) == 1)
        plain.sendall(b"FETCH orders 0\r\n" * count)
        outbox = server.call(lambda: connection_of(server).outbox)
        expected = count * len(b"MSG 0 %d\r\n%b" % (size, bytes(size)))
        heard = 0
        while heard < expected:
            heard += len(plain.recv(1 << 20))
            if heard % 50 == 0:
                assert server.call(outbox._transport.get_write_buffer_size) < 8 << 20
        assert heard == expected


def test_a_flood_of_publishes_is_slowed_by_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is stored, only so much of it is read; then all of it is stored."""
    monkeypatch.setattr(flow, "UNANSWERED_BYTES_HIGH", 256 << 10)
    monkeypatch.setattr(flow, "UNANSWERED_BYTES_LOW", 64 << 10)
    with running_server() as server, plain_socket(server) as plain:
        plain.sendall(b"PUB orders 1\r\nx")
        assert plain.recv(100) == b"OK 0\r\n"
        release = hold_the_disk(server)
        command = b"PUB orders 1000\r\n" + bytes(1000)
        sent = send_until_stuck(plain, command, most=64 << 20)
        assert sent < 32 << 20, "it was never slowed"
        outbox = server.call(lambda: connection_of(server).outbox)
        # What is above the bound is what one read of the socket had brought.
        assert server.call(lambda: outbox.unanswered_bytes) < (256 << 10) + (1 << 20)
        release()
        count = sent // len(command)
        heard = b""
        while heard.count(b"\n") < count:
            heard += plain.recv(1 << 16)
        assert heard.split()[1::2] == [b"%d" % offset for offset in range(1, count + 1)]


def hold_the_disk(server: RunningServer) -> Callable[[], None]:
    """Nothing is written until what is returned is called."""
    workers = server.engine.workers
    held: list[tuple[object, object]] = []
    submit = workers.submit
    workers.submit = lambda work, done: held.append((work, done))  # type: ignore[method-assign]

    def release() -> None:
        def let_go() -> None:
            workers.submit = submit  # type: ignore[method-assign]
            for work, done in held:
                submit(work, done)  # type: ignore[arg-type]

        server.call(let_go)

    return release


def test_a_subscriber_that_does_not_read_costs_a_bounded_buffer_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishing goes on, other subscribers get everything, and this one is gone after a while."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    monkeypatch.setattr(flow, "STALLED_S", 1.0)
    with running_server(durability="never") as server:
        slow = FrameSocket(server.address)
        slow.ask(SUBSCRIBE, {"topic": "orders"})
        outbox, stalled = server.call(lambda: (connection_of(server).outbox, connection_of(server)))  # type: ignore[attr-defined]
        client = server.client().connect()
        reading = client.subscribe("orders")
        for number in range(40):
            client.publish_many("orders", [bytes(1000)] * 1000)
            for _ in range(1000):
                reading.get(10)
            size = server.call(outbox._transport.get_write_buffer_size)
            assert size < 2 << 20, f"after {number} MB it holds {size}"
        server.wait_until(lambda: stalled not in server.server.hub.connections)
        client.close()
        slow.close()


def test_a_member_that_does_not_read_is_dropped_and_its_messages_go_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds no more than its prefetch, and not for ever."""
    monkeypatch.setattr(flow, "WRITE_BYTES_HIGH", 64 << 10)
    monkeypatch.setattr(flow, "WRITE_BYTES_LOW", 16 << 10)
    monkeypatch.setattr(flow, "STALLED_S", 0.5)
    with running_server(durability="never") as server, server.client() as client:
        slow = FrameSocket(server.address)
        slow._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        slow.ask(CREATE_SUBSCRIPTION, {"subscription": "billing", "topic": "orders"})
        join = {"subscription": "billing", "topic": "orders", "prefetch": 100_000, "ack": "manual"}
        slow.ask(SUBSCRIBE, join)
        client.publish_many("orders", [bytes(1000)] * 20_000)
        wait_until(lambda: client.subscription_stats("billing", "orders")["members"] == 0)
        member = client.subscription("billing", "orders", prefetch=1000)
        found = set()
        while len(found) < 20_000:
            message = member.get(10)
            found.add(message.offset)
            message.ack()
        slow.close()


def test_the_memory_of_a_server_stays_bounded_under_floods() -> None:
    """Ten clients that send without reading, and ten that subscribe without reading."""
    with server_process(memory=True) as server:
        sockets = []
        try:
            for _ in range(10):
                text = TextSocket(server.address)
                assert text.ask("SUB orders")[0] == "OK"
                sockets.append(text._socket)
            flooder = TextSocket(server.address)
            assert flooder.ask("PING") == ["PONG"]
            before = server.rss_bytes()
            for _ in range(10):
                plain = socket.create_connection(server.address, 20)
                sockets.append(plain)
                send_until_stuck(plain, b"PUB orders 1000\r\n" + bytes(1000), 20 << 20, 0.1)
            assert flooder.ask("PING") == ["PONG"]
            assert server.rss_bytes() - before < 150 << 20
            flooder.close()
        finally:
            for plain in sockets:
                plain.close()


# --- many at once ---------------------------------------------------------------------------------
def test_requests_that_take_long_take_turns(rig: Rig) -> None:
    """Hundreds of small packed batches fit into one read of a socket: the others come in between."""
    clock = WorkClock()
    done: list[int] = []

    def handle(item: int) -> None:
        clock.now += 0.01
        done.append(item)

    queue = RequestQueue(rig.outbox, handle, Pace(rig.loop, clock))
    queue.begin_turn()
    for item in range(20):
        queue.add(item, depends=False, measured=True)
    assert len(done) < 4
    rig.loop.run_until_idle()
    assert done == list(range(20))
    assert rig.transport.reading


def test_requests_that_are_not_measured_begin_at_once(rig: Rig) -> None:
    """A measurement costs as much as a small publish."""
    clock = WorkClock()
    done: list[int] = []
    queue = RequestQueue(rig.outbox, done.append, Pace(rig.loop, clock))
    queue.begin_turn()
    for item in range(20):
        clock.now += 0.01
        queue.add(item, depends=False, measured=not item)
    assert done == list(range(20))


def test_requests_of_all_connections_share_a_turn() -> None:
    """Fifty connections with one long request each: some begin now, and one in each later turn at least."""
    loop, clock, done = FakeLoop(), WorkClock(), []
    pace = Pace(loop, clock)

    def handle(item: int) -> None:
        clock.now += 0.006
        done.append(item)

    for item in range(50):
        outbox = Outbox(FakeTransport(), loop)  # type: ignore[arg-type]
        queue = RequestQueue(outbox, handle, pace)
        queue.begin_turn()
        queue.add(item, depends=True, may_be_long=True)
    assert done == [0, 1, 2, 3]
    loop.run_until_idle()
    assert done == list(range(50))


def test_a_brief_request_does_not_wait_for_long_ones_of_others(rig: Rig) -> None:
    clock, done = WorkClock(), []
    pace = Pace(rig.loop, clock)
    assert not pace.is_over()
    clock.now += 1.0
    queue = RequestQueue(rig.outbox, done.append, pace)
    queue.begin_turn()
    queue.add("ping", depends=True)
    queue.add("list", depends=True, may_be_long=True)
    assert done == ["ping"]


def test_waiting_text_fetches_share_the_memory() -> None:
    """One large publish wakes all of them, and nobody reads."""
    with (
        running_server(memory_limit="64MB", max_message_size="4MB") as server,
        server.client() as client,
        contextlib.ExitStack() as stack,
    ):
        client.create_topic("news")
        for _ in range(40):
            text = stack.enter_context(contextlib.closing(TextSocket(server.address)))
            text.send(b"FETCH news 0 count=10 wait=60000\r\n")
        server.wait_until(lambda: _waiters(server, "news") == 40)
        client.publish_many("news", [bytes(4 << 20)] * 3)
        server.wait_until(lambda: _waiters(server, "news") == 0)
        server.wait_until(lambda: server.engine.budget.refused > 0)
        assert server.call(lambda: server.engine.budget.used) <= 64 << 20


@pytest.mark.parametrize("kind", ["text", "messages", "consume"])
def test_answers_take_no_more_memory_than_is_counted(kind: str) -> None:
    """Clients that do not read ask for much at once: some are refused, and nothing of that is kept."""
    http = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    requests = {
        "text": lambda number: b"FETCH news 0 count=10\r\n",
        "messages": lambda number: http % b"topics/news/messages?limit=10",
        "consume": lambda number: http % b"consume/news/batch?limit=10&group=g%d" % number,
    }
    with (
        server_process(memory_limit="64MB", max_message_size="4MB") as server,
        server.client() as client,
        contextlib.ExitStack() as stack,
    ):
        client.publish_many("news", [b"x" * (4 << 20)] * 3)
        before, most = server.rss_bytes(), 0
        address = server.address if kind == "text" else server.http_address
        for number in range(40):
            reader = stack.enter_context(socket.create_connection(address, 10))
            reader.sendall(requests[kind](number))
        for _ in range(200):
            client.info()
            most = max(most, server.rss_bytes() - before)
        assert 16 << 20 < most < 192 << 20


def _waiters(server: RunningServer, topic: str) -> int:
    return len(server.engine.topics.find(topic).partitions[0].watchers)
