"""Jobs over the network: what is staged, committed and waited for survives what happens to the broker."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import BrokerClient
from headrace.errors import InvalidArgument, QueueFull, TopicNotFound
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, running_server, server_process


def batch(*values: bytes) -> Batch:
    return encode(Columns(list(values)))


def numbers(client: BrokerClient, topic: str, partition: int) -> list[bytes]:
    """All values of a partition."""
    found: list[bytes] = []
    while True:
        more = client.fetch_values(topic, len(found), partition=partition, max_bytes=4 << 20)
        if not more:
            return found
        found += more


def test_a_killed_broker_shows_a_commit_whole_and_once() -> None:
    """kill -9 at any moment of a commit; the driver asks again, and everything is there once."""
    value = bytes(1000)
    with server_process() as server, server.client(delivery_timeout=60) as client:
        client.create_topic("lake", partitions=3)
        for number, delay in enumerate((0.0, 0.004, 0.012, 0.03)):
            pieces = [
                client.stage("lake", batch(b"%d-%d" % (number, n), *[value] * 500), partition=n % 3)
                for n in range(30)
            ]
            with ThreadPoolExecutor(1) as pool:
                committing = pool.submit(client.commit_staged, "job", number, pieces)
                time.sleep(delay)  # not a wait: where in the commit it hits
                server.kill()
                server.start()
                committing.result(60)
            assert client.commit_staged("job", number, pieces) is False
            for partition in range(3):
                found = [v for v in numbers(client, "lake", partition) if v != value]
                wanted = [
                    b"%d-%d" % (m, n) for m in range(number + 1) for n in range(partition, 30, 3)
                ]
                assert found == wanted


def test_what_was_staged_before_a_kill_is_committed_after_it() -> None:
    """An answered stage is durable; one that nobody commits is never seen."""
    with server_process() as server, server.client(delivery_timeout=30) as client:
        pieces = [client.stage("lake", batch(b"%d" % n)) for n in range(3)]
        client.stage("lake", batch(b"orphan"))
        server.kill()
        server.start()
        assert numbers(client, "lake", 0) == []
        assert client.commit_staged("job", 1, pieces) is True
        server.kill()
        server.start()
        assert client.commit_staged("job", 1, pieces) is False
        assert numbers(client, "lake", 0) == [b"0", b"1", b"2"]


def test_positions_and_waiting_survive_a_restart(
    server: RunningServer, client: BrokerClient
) -> None:
    """Whoever waits goes on waiting at the broker that comes back."""
    client.create_topic("orders")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_for, {"orders": {0: 0}}, timeout=30.0)
        server.restart()
        assert client.positions("orders")["orders"][0]["end"] == 0
        client.publish("orders", b"x")
        assert waiting.result(30) is True


def test_what_can_pass_later_is_tried_again(server: RunningServer) -> None:
    """A topic that is full when the commit comes, and has room a moment later."""
    with server.client(delivery_timeout=30) as client, server.client() as other:
        client.create_topic("small", durable=False, max_queue_size=1)
        client.create_subscription("group", "small")
        client.publish("small", b"first")
        piece = client.stage("small", batch(b"second"))
        timer = threading.Timer(0.1, other.advance, ("group", {"small": {0: 1}}))
        timer.start()
        assert client.commit_staged("job", 0, [piece]) is True
        timer.join()


def test_what_cannot_pass_is_an_error_after_the_time(server: RunningServer) -> None:
    """With the broker's own words; what makes no sense is one at once."""
    with server.client(delivery_timeout=0.3) as client:
        client.create_topic("small", max_queue_size=1)
        piece = client.stage("small", batch(b"a", b"b"))
        with pytest.raises(QueueFull):
            client.commit_staged("job", 0, [piece])
        with pytest.raises(InvalidArgument):
            client.commit_staged("job", 0, ["nonsense"])
        with pytest.raises(InvalidArgument):
            client.wait_for({}, timeout=-1)
        with pytest.raises(TopicNotFound):
            client.positions("nowhere")


def test_waiting_can_be_longer_than_one_request(
    client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again until its own time is up."""
    monkeypatch.setattr("headrace.client.remote.WAIT_S_MAX", 0.02)
    client.create_topic("orders")
    started = time.monotonic()
    assert client.wait_for({"orders": {0: 0}}, timeout=0.15) is False
    assert time.monotonic() - started >= 0.15
    timer = threading.Timer(0.1, client.publish, ("orders", b"x"))
    timer.start()
    assert client.wait_for({"orders": {0: 0}}, timeout=30) is True
    timer.join()


def test_a_large_commit_holds_up_nobody() -> None:
    """While 60 MB are committed, others get their answers."""
    with running_server() as server, server.client() as client, server.client() as other:
        client.create_topic("lake", partitions=2)
        large = batch(*[bytes(1000)] * 2000)
        pieces = [
            future.result(60)
            for future in [client.stage_nowait("lake", large, partition=n % 2) for n in range(30)]
        ]
        answers = 0
        with ThreadPoolExecutor(1) as pool:
            committing = pool.submit(client.commit_staged, "job", 0, pieces)
            while not committing.done():
                other.publish("other", b"x")
                places = client.positions("lake")["lake"]  # behind it on the same connection
                assert {place["end"] for place in places} in ({0}, {30_000})
                answers += 1
        assert committing.result() is True
        assert answers
        client.abort_staged(pieces)
        assert [place["end"] for place in client.positions("lake")["lake"]] == [30_000, 30_000]
