"""The blocking reader of whole batches: exact over restarts, broken connections and damaged answers."""

import contextlib
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace import BrokerClient, errors
from headrace.client import reader as reader_module
from headrace.client.reader import BatchReader
from headrace.log.batch import Batch
from headrace.testing import RunningServer, running_server


def values(found: Iterator[list[Batch]]) -> list[bytes]:
    return [value for batches in found for batch in batches for value in batch.values()]


def fill(client: BrokerClient, topic: str, count: int, each: int = 50) -> list[bytes]:
    """Records in batches of ``each``."""
    stored = [b"%06d" % number + b"." * 500 for number in range(count)]
    for start in range(0, count, each):
        client.publish_many(topic, stored[start : start + each], partition=0)
    return stored


@pytest.fixture(params=[True, False], ids=["direct", "socket"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Whether the broker's files may be read."""
    return bool(request.param)


def incarnation(client: BrokerClient, topic: str) -> int:
    return int(client.positions(topic)[topic][0]["incarnation"])


def test_it_reads_what_is_there_in_many_answers(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """Every batch once and in order, however many fetches it takes."""
    stored = fill(client, "orders", 600)
    with BatchReader([server.address], fetch_bytes=64 << 10, direct=direct) as reader:
        assert values(reader.read("orders", 0, 0, 600)) == stored
        assert reader.bounds("orders", 0) == (0, 600)
        assert values(reader.read("orders", 0, 600, 600)) == []
        # Whole batches: the one that holds the first offset, and the one that holds the last.
        assert values(reader.read("orders", 0, 120, 130)) == stored[100:150]


def test_a_batch_larger_than_a_fetch_arrives_whole(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """A fetch answers with one batch at least."""
    stored = fill(client, "orders", 400, each=400)
    with BatchReader([server.address], fetch_bytes=1, direct=direct) as reader:
        assert values(reader.read("orders", 0, 7, 9)) == stored


def test_large_and_small_batches_come_in_one_answer(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """Whatever their sizes, and wherever the range begins and ends."""
    stored = []
    for number, size in enumerate([10, 100_000, 70_000, 10, 20, 200_000, 30, 66_000]):
        stored.append(b"%d" % number * size)
        client.publish_many("orders", stored[-1:], partition=0)
    for fetch_bytes in (1, 100_000, 1 << 20):
        with BatchReader([server.address], fetch_bytes=fetch_bytes, direct=direct) as reader:
            for start in range(8):
                for end in range(start, 9):
                    found = [*chain.from_iterable(reader.read("orders", 0, start, end))]
                    first = found[0].base_offset if found else start
                    got = values(iter([found]))[start - first :]
                    assert got[: end - start] == stored[start:end]
                    assert len(got) - (end - start) <= 1, (
                        "a small neighbour may come with the last one"
                    )


def test_who_stops_in_the_middle_can_go_on(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """What was asked for and not read does not come in between."""
    stored = fill(client, "orders", 600, each=200)
    with BatchReader([server.address], fetch_bytes=64 << 10, direct=direct) as reader:
        assert values(iter([next(reader.read("orders", 0, 0, 600))])) == stored[:200]
        assert values(reader.read("orders", 0, 400, 600)) == stored[400:]


def test_a_broker_that_restarts_is_waited_for(server: RunningServer, client: BrokerClient) -> None:
    """In the middle of a range, and nothing comes twice."""
    stored = fill(client, "orders", 600)
    with BatchReader([server.address], fetch_bytes=32 << 10, timeout=20, direct=False) as reader:
        found = reader.read("orders", 0, 0, 600)
        some = values(iter([next(found)]))
        server.kill()
        threading.Thread(target=server.start).start()
        assert some + values(found) == stored
        assert reader.reconnects > 0


def test_nobody_there_is_an_error_in_time() -> None:
    """It says who did not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reader = BatchReader([("127.0.0.1", port)], timeout=0.3)
    with pytest.raises(errors.RequestTimeout, match=f"127.0.0.1:{port}"):
        reader.bounds("orders", 0)


def test_the_next_address_is_tried(server: RunningServer, client: BrokerClient) -> None:
    """Where one of several does not answer."""
    fill(client, "orders", 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = listener.getsockname()
    with BatchReader([dead, server.address], timeout=5) as reader:
        assert reader.bounds("orders", 0) == (0, 10)


def test_a_silent_address_does_not_matter(server: RunningServer, client: BrokerClient) -> None:
    """One that accepts connections and never answers costs its share of the time, at first and later."""
    fill(client, "orders", 10)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        BatchReader([silent.getsockname(), server.address], timeout=2) as reader,
    ):
        assert reader.bounds("orders", 0) == (0, 10)
        assert reader.reconnects == 1
        assert len(values(reader.read("orders", 0, 0, 10))) == 10
        assert reader.reconnects == 1


def test_errors_of_the_broker_are_raised_as_they_are(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """Asking again would not help."""
    client.publish("orders", b"one")
    with BatchReader([server.address], timeout=5, direct=direct) as reader:
        with pytest.raises(errors.TopicNotFound):
            list(reader.read("nothing", 0, 0, 1))
        with pytest.raises(errors.OffsetOutOfRange):
            list(reader.read("orders", 0, 5, 6))
        with pytest.raises(errors.OffsetOutOfRange, match="ends at 1"):
            list(reader.read("orders", 0, 0, 3))
        assert values(reader.read("orders", 0, 0, 1)) == [b"one"]


def test_a_topic_that_was_made_again_is_another(
    server: RunningServer, client: BrokerClient, direct: bool
) -> None:
    """Its records are not taken for the old one's."""
    client.publish("orders", b"old")
    old = incarnation(client, "orders")
    client.delete_topic("orders")
    client.publish("orders", b"new")
    with BatchReader([server.address], timeout=5, direct=direct) as reader:
        with pytest.raises(errors.TopicNotFound) as failed:
            list(reader.read("orders", 0, 0, 1, incarnation=old))
        assert failed.value.code == "topic_replaced"
        now = incarnation(client, "orders")
        assert values(reader.read("orders", 0, 0, 1, incarnation=now)) == [b"new"]


def test_a_token_is_sent() -> None:
    """And a wrong one is refused at once."""
    with running_server(token="open sesame") as server, server.client() as client:
        fill(client, "orders", 10)
        with BatchReader([server.address], token="open sesame") as reader:
            assert len(values(reader.read("orders", 0, 0, 10))) == 10
        with (
            pytest.raises(errors.Unauthenticated),
            BatchReader([server.address], token="please") as reader,
        ):
            reader.bounds("orders", 0)


# --- a broker that misbehaves ---------------------------------------------------------------------
Change = Callable[[bytes], bytes]


class Proxy:
    """Between a reader and the broker: answers go through ``change``; a shorter one is the last."""

    def __init__(self, server: RunningServer, change: Change):
        self._server, self._change = server, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server.address)
                for work in (self._questions, self._answers):
                    self._threads.append(threading.Thread(target=work, args=(near, far)))
                    self._threads[-1].start()

    def _questions(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                far.sendall(data)
        with far, contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)  # closing alone would not wake who reads from it

    def _answers(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while head := far.recv(4, socket.MSG_WAITALL):
                body = far.recv(struct.unpack(">I", head)[0] - 4, socket.MSG_WAITALL)
                answer = self._change(head + body)
                near.sendall(answer)
                if len(answer) < len(head + body):
                    break
        with near, contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def proxy(server: RunningServer, change: Change) -> Iterator[tuple[str, int]]:
    between = Proxy(server, change)
    try:
        yield between.address
    finally:
        between.close()


@pytest.mark.parametrize("each", [50, 200], ids=["small", "large"])
def test_a_damaged_answer_is_asked_for_again(
    server: RunningServer, client: BrokerClient, each: int
) -> None:
    """One flipped bit on the way is found by the checksum."""
    stored = fill(client, "orders", 600, each=each)
    flipped = 0

    def flip(answer: bytes) -> bytes:
        nonlocal flipped
        if len(answer) < 10_000 or flipped == 3:
            return answer
        flipped += 1
        at = len(answer) // 2
        return answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]

    with proxy(server, flip) as address, reading(address) as reader:
        assert values(reader.read("orders", 0, 0, 600)) == stored
    assert flipped == 3


@pytest.mark.parametrize("each", [50, 200], ids=["small", "large"])
def test_an_answer_that_breaks_off_is_asked_for_again(
    server: RunningServer, client: BrokerClient, each: int
) -> None:
    """Whether nothing of it has come, or a part."""
    stored = fill(client, "orders", 600, each=each)
    cut = 0

    def break_off(answer: bytes) -> bytes:
        nonlocal cut
        if len(answer) < 10_000 or cut == 4:
            return answer
        cut += 1
        return answer[: 5_000 * (cut % 2)]

    with proxy(server, break_off) as address, reading(address) as reader:
        found = values(reader.read("orders", 0, 0, 600))
    assert found == stored
    assert cut == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer[:8] + struct.pack(">Q", 99) + answer[16:],
        lambda answer: struct.pack(">I", 0xFFFF_FFF0) + answer[4:],
        lambda answer: answer[:24] + struct.pack(">I", 0xFFFF_FFF0) + answer[28:],
        lambda answer: answer.replace(b"=", b" "),
    ],
    ids=["the number of no question", "a length beyond all", "long properties", "no properties"],
)
def test_what_makes_no_sense_is_not_asked_again(
    server: RunningServer, client: BrokerClient, spoil: Change
) -> None:
    """It is an error at once, before anything is allocated for it."""
    with (
        proxy(server, spoil) as address,
        reading(address) as reader,
        pytest.raises(errors.InvalidArgument),
    ):
        reader.bounds("orders", 0)
    assert reader.reconnects == 0


def reading(address: tuple[str, int]) -> BatchReader:
    return BatchReader([address], fetch_bytes=64 << 10, timeout=10, direct=False)


def test_a_try_that_the_deadline_cuts_off_does_not_hide_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says what was wrong with the try before it."""
    now = [0.0]

    def dial(*_: object) -> None:
        if now[0] == 0.0:
            raise errors.ConnectFailed("the certificate is not trusted")
        now[0] = 10.0
        raise errors.ConnectFailed("the handshake timed out")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(reader_module, "dial", dial)
    monkeypatch.setattr(
        reader_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    )
    with pytest.raises(errors.RequestTimeout, match="certificate"):
        BatchReader([("localhost", 1)], timeout=1.0).bounds("orders", 0)


def test_tls(tmp_path: Path) -> None:
    """The same over an encrypted connection."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificate))
    with running_server(tls_cert=str(certificate), tls_key=str(key)) as server:
        with BrokerClient(*server.address, tls=context) as client:
            stored = fill(client, "orders", 300)
        with BatchReader([server.address], tls=context, direct=False) as reader:
            assert values(reader.read("orders", 0, 0, 300)) == stored
        with pytest.raises(errors.RequestTimeout, match="certificate"):
            BatchReader([server.address], tls=ssl.create_default_context(), timeout=1.0).bounds(
                "x", 0
            )
