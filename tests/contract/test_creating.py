"""The contract: a topic that a publish or a subscribe creates, on a disk that takes its time or refuses it.

The disk is real, and stands still where a topic's directory is made: exactly there the broker once kept its loop.
"""

import errno
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.topic import Topic
from headrace.broker.topics import Topics
from headrace.errors import HeadraceError
from headrace.files import Files
from headrace.testing import wait_until
from tests.contract.clients import AsyncioClient, ThreadClient
from tests.contract.front_end import WAIT_S, FrontEnd, Inbox, Session

SLOW = "slow"


class SlowDisk:
    """Makes no directories of the topic ``slow`` until it is told to."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.goes_on = threading.Event()
        self.is_broken = False
        """It refuses the next topic."""
        self.topics: list[Topic] = []
        """That were created while it stood still."""

    def stand_still(self) -> None:
        self.reached.set()
        assert self.goes_on.wait(WAIT_S)
        if self.is_broken:
            self.is_broken = False
            raise OSError(errno.EIO, "Input/output error")

    def waiting(self) -> int:
        """Publishes in its log, and all else that waits for the topic: the audit, two for each subscription, and
        clients that ask for its partitions before they publish."""
        (topic,) = self.topics
        log: Any = topic.partitions[0].log
        return len(log._parked) + len(topic.making or ())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    make_directories, create = Files.make_directories, Topics.create

    def slow(files: Files, parent: Path, names: Iterable[str]) -> Any:
        if parent.name == SLOW:
            disk.stand_still()
        return make_directories(files, parent, names)

    def remembered(topics: Topics, name: str, *arguments: Any, **more: Any) -> Topic:
        topic = create(topics, name, *arguments, **more)
        if name == SLOW:
            disk.topics.append(topic)
        return topic

    monkeypatch.setattr(Files, "make_directories", slow)
    monkeypatch.setattr(Topics, "create", remembered)
    yield disk
    disk.goes_on.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def begun(disk: SlowDisk, *calls: Future[Any]) -> None:
    """The creation is under way, and nobody was answered."""
    assert disk.reached.wait(WAIT_S)
    assert not any(call.done() for call in calls)


def test_others_are_answered_while_a_publish_creates_a_topic(
    front: FrontEnd, disk: SlowDisk, threads: ThreadPoolExecutor
) -> None:
    """What is published to it meanwhile waits and is stored in its order; what concerns other topics does not wait."""
    first, second, other = front.open(), front.open(), front.open()
    other.publish("orders", b"before")

    def publish(session: Session, *values: bytes) -> list[int | None]:
        return [session.publish(SLOW, value).offset for value in values]

    one = threads.submit(publish, first, b"1a", b"1b")
    begun(disk, one)
    two = threads.submit(publish, second, b"2a", b"2b")
    for number in range(1, 4):
        assert other.publish("orders", b"meanwhile").offset == number
    assert [got.offset for got in other.fetch("orders", 0)] == [0, 1, 2, 3]
    assert not one.done()
    assert not two.done()
    disk.goes_on.set()
    assert sorted([*one.result(WAIT_S), *two.result(WAIT_S)]) == [0, 1, 2, 3]
    values = [got.value for got in other.fetch(SLOW)]
    assert [value for value in values if value.startswith(b"1")] == [b"1a", b"1b"]
    assert [value for value in values if value.startswith(b"2")] == [b"2a", b"2b"]


def test_others_are_answered_while_a_subscription_creates_a_topic(
    front: FrontEnd, disk: SlowDisk, threads: ThreadPoolExecutor
) -> None:
    """The subscription is answered when its topic is stored, and gets what was published meanwhile."""
    first, second, other = front.open(), front.open(), front.open()
    other.publish("orders", b"before")
    made = threads.submit(first.create_subscription, "billing", SLOW)
    begun(disk, made)
    sent = threads.submit(second.publish, SLOW, b"x")
    assert other.publish("orders", b"meanwhile").offset == 1
    assert not made.done()
    assert not sent.done()
    disk.goes_on.set()
    made.result(WAIT_S)
    assert sent.result(WAIT_S).offset == 0
    assert first.join("billing", SLOW).get().value == b"x"


def test_others_are_answered_while_a_plain_subscription_creates_a_topic(
    front: FrontEnd, disk: SlowDisk, threads: ThreadPoolExecutor
) -> None:
    """It needs nothing of the disk, so it does not wait for it; nor do others."""
    first, second, other = front.open(), front.open(), front.open()
    other.publish("orders", b"before")
    followed: Future[Inbox] = threads.submit(first.subscribe, SLOW)
    assert disk.reached.wait(WAIT_S)
    inbox = followed.result(WAIT_S)
    sent = threads.submit(second.publish, SLOW, b"x")
    assert other.publish("orders", b"meanwhile").offset == 1
    assert not sent.done()
    disk.goes_on.set()
    assert sent.result(WAIT_S).offset == 0
    assert inbox.get().value == b"x"


def test_everybody_who_waits_is_told_that_the_disk_refuses_the_topic(
    front: FrontEnd, disk: SlowDisk, threads: ThreadPoolExecutor
) -> None:
    """Nothing of it is left, and it can be created again. The clients try again by themselves."""
    tries_again = isinstance(front, (ThreadClient, AsyncioClient))
    first, second, third = front.open(), front.open(), front.open()
    publishes = [threads.submit(first.publish, SLOW, b"1")]
    begun(disk, *publishes)
    publishes.append(threads.submit(second.publish, SLOW, b"2"))
    subscription = threads.submit(third.create_subscription, "billing", SLOW)
    wait_until(lambda: disk.waiting() == 5)
    disk.is_broken = True
    disk.goes_on.set()
    assert code(subscription) == "storage_failed"
    assert [code(each) for each in publishes] == [None if tries_again else "storage_failed"] * 2
    before = 2 if tries_again else 0
    assert (front.directory / SLOW).exists() == tries_again
    assert first.publish(SLOW, b"3").offset == before
    third.create_subscription("billing", SLOW)
    assert third.join("billing", SLOW).values(before + 1)[-1] == b"3"


def test_a_broker_that_stops_meanwhile_stores_what_waits(
    front: FrontEnd, disk: SlowDisk, threads: ThreadPoolExecutor
) -> None:
    """It was accepted before. The publisher is answered, or is told that the connection is gone."""
    publish = threads.submit(front.open().publish, SLOW, b"x")
    begun(disk, publish)
    wait_until(lambda: disk.waiting() == 2)
    stopping = threads.submit(front.restart)
    disk.goes_on.set()
    stopping.result(WAIT_S)
    stored = publish.exception(WAIT_S) is None
    values = [got.value for got in front.open().fetch(SLOW)]
    assert values == [b"x"] or not stored
    assert stored or isinstance(front, (ThreadClient, AsyncioClient))


def code(call: Future[Any]) -> str | None:
    """Of the error with which the call ends."""
    error = call.exception(WAIT_S)
    assert error is None or isinstance(error, HeadraceError)
    return None if error is None else error.code
