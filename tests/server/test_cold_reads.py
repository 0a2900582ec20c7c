"""Fetches of records that are not in memory, or that the disk cannot read."""

import errno
from collections.abc import Iterator

import pytest

from headrace.errors import HeadraceError
from headrace.files import Files, Handle, NotAtHand
from headrace.log.cache import BatchCache
from headrace.testing import RunningServer, running_server
from tests.contract.raw_binary import FETCH, PUBLISH, FrameSocket, frame
from tests.contract.raw_text import TextSocket
from tests.server.http_rig import Http

SIZE = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """On disk, with nothing in memory."""

    def not_at_hand(files: Files, handle: Handle, position: int, length: int) -> bytes:
        raise NotAtHand

    monkeypatch.setattr(Files, "read_at_once", not_at_hand)
    monkeypatch.setattr(BatchCache, "find", lambda *_: None)
    monkeypatch.setattr(BatchCache, "get", lambda *_: None)
    with running_server() as running:
        yield running


def test_a_client_that_reads_nothing_holds_little(
    server: RunningServer, frames: FrameSocket
) -> None:
    """60 MB were asked for. An answer that waited for the disk also waits for the client."""
    count = 60
    frames.ask(PUBLISH, {"topic": "orders"}, bytes(SIZE))
    frames.ask(FETCH, {"topic": "orders", "offset": 0})
    [connection] = server.server.hub.connections
    outbox, sizes = connection.outbox, [0]
    frames.send(
        b"".join(
            frame(FETCH, 100 + number, {"topic": "orders", "offset": 0, "max_bytes": SIZE + number})
            for number in range(count)
        )
    )
    answers = set()
    for _ in range(count):
        answers.add(frames.read().sequence)
        sizes.append(server.call(outbox._transport.get_write_buffer_size))
    assert answers == {100 + number for number in range(count)}
    assert max(sizes) < 16 * SIZE


@pytest.mark.parametrize("properties", [{"offset": 0}, {"offset": 0, "merge": "true"}])
def test_an_error_of_the_disk_is_no_bug(
    frames: FrameSocket, monkeypatch: pytest.MonkeyPatch, properties: dict[str, object]
) -> None:
    """The client is told that it may try again."""
    frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    break_disk(monkeypatch)
    with pytest.raises(HeadraceError) as caught:
        frames.ask(FETCH, {"topic": "orders", **properties})
    assert (caught.value.code, caught.value.retryable) == ("storage_failed", True)


@pytest.mark.parametrize("command", ["FETCH orders 0", "FETCH orders 0 count=5"])
def test_an_error_of_the_disk_is_no_bug_in_text(
    text: TextSocket, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The same, in text."""
    assert text.ask("PUB orders 2", b"hi") == ["OK", "0"]
    break_disk(monkeypatch)
    with pytest.raises(HeadraceError) as caught:
        text.ask(command)
    assert caught.value.code == "storage_failed"


def test_an_error_of_the_disk_is_no_bug_over_http(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, over HTTP."""
    assert http.publish("orders", "hi")
    break_disk(monkeypatch)
    answer = http.ask("GET", "/topics/orders/messages")
    assert (answer.status, answer.code) == (503, "storage_failed")


def break_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(files: Files, handle: Handle, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Files, "read_at", broken)
