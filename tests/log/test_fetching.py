"""Reads that would make the loop wait for the disk."""

import errno
import gc
import weakref
from collections.abc import Callable

import pytest

from headrace.files import NotAtHand
from headrace.limits import READ_KEPT_S
from headrace.log.fetching import ENDED_MAX, Fetching
from headrace.log.interface import ReadPending
from tests.fakes import InlineWorkers, RunningLoop
from tests.fakes.time import running


class Place:
    """Something on a disk, which is in memory once it was read there."""

    def __init__(self, *, unknown: bool = False):
        self.at_hand = False
        self.unknown = unknown
        self.error: OSError | None = None
        self.waits = 0

    def read(self, at_once: bool) -> str:
        if at_once:
            if not self.at_hand:
                raise NotAtHand(unknown=self.unknown)
            return "found"
        self.waits += 1
        if self.error is not None:
            raise self.error
        self.at_hand = not self.unknown
        return "found"


class Desk:
    def __init__(self, most: int = 4):
        self.loop = RunningLoop()
        self.workers = InlineWorkers(self.loop, hold=True)
        self.fetching = Fetching(self.loop, self.workers, most)
        self.told: list[object] = []

    def read(self, place: Place, key: object = "place") -> str:
        """On the loop. If it is pending, ``told`` hears when to read again."""
        with running(self.loop):
            try:
                return self.fetching.read(key, place.read)
            except ReadPending as pending:
                pending.then(lambda: self.told.append(key))
                raise

    def pends(self, place: Place, key: object = "place") -> None:
        with pytest.raises(ReadPending):
            self.read(place, key)

    def work(self) -> int:
        count = self.workers.release()
        self.loop.run_until_idle()
        return count


def test_what_is_at_hand_is_read_at_once() -> None:
    """No thread is asked."""
    desk, place = Desk(), Place()
    place.at_hand = True
    assert desk.read(place) == "found"
    assert desk.workers.held == 0


def test_a_disk_thread_reads_first() -> None:
    """The loop does not wait, and is told when to read again."""
    desk, place = Desk(), Place()
    desk.pends(place)
    assert (place.waits, desk.told) == (0, [])
    assert desk.work() == 1
    assert desk.told == ["place"]
    assert desk.read(place) == "found"
    assert place.waits == 1


def test_one_fetch_serves_all_that_wait() -> None:
    """A hundred readers of a place are one read of the disk."""
    desk, place = Desk(), Place()
    for _ in range(100):
        desk.pends(place)
    assert desk.work() == 1
    assert len(desk.told) == 100


def test_an_error_of_the_disk_is_that_of_the_reader() -> None:
    """It is raised once; whoever asks after that reads the disk again."""
    desk, place = Desk(), Place()
    place.error = OSError(errno.EIO, "broken")
    desk.pends(place)
    desk.work()
    with pytest.raises(OSError, match="broken"):
        desk.read(place)
    place.error = None
    desk.pends(place)
    desk.work()
    assert desk.read(place) == "found"


def test_all_that_waited_hear_of_an_error() -> None:
    """A damaged place is not searched once for each of them. It is nobody's error any more after a while."""
    desk, place = Desk(), Place()
    place.error = OSError(errno.EIO, "broken")
    for _ in range(3):
        desk.pends(place)
    assert desk.work() == 1
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            desk.read(place)
    place.error = None
    desk.loop.advance(READ_KEPT_S + 1)
    desk.pends(place)


def test_an_error_holds_nothing_that_was_read() -> None:
    """Its traceback would: megabytes for each reader that never comes back."""
    desk = Desk()

    class Much:
        pass

    held: list[weakref.ref[Much]] = []

    def read(at_once: bool) -> None:
        if at_once:
            raise NotAtHand
        much = Much()
        held.append(weakref.ref(much))
        raise OSError(errno.EIO, "broken")

    with running(desk.loop), pytest.raises(ReadPending):
        desk.fetching.read("place", read)
    desk.work()
    gc.collect()
    assert held[0]() is None


def test_a_reader_that_fails_does_not_keep_the_others_waiting() -> None:
    """Each is told by itself."""
    desk, place = Desk(), Place()

    def fail() -> None:
        raise ZeroDivisionError

    with running(desk.loop):
        try:
            desk.fetching.read("place", place.read)
        except ReadPending as pending:
            pending.then(fail)
    desk.pends(place)
    with pytest.raises(ZeroDivisionError):
        desk.work()
    desk.loop.run_until_idle()
    assert desk.told == ["place"]


def test_pages_may_be_gone_again() -> None:
    """Then the disk is read once more, and if they are gone again, the reader gets what was read."""
    desk, place = Desk(), Place()
    desk.pends(place)
    desk.work()
    place.at_hand = False
    desk.pends(place)
    desk.work()
    place.at_hand = False
    assert desk.read(place) == "found"
    assert place.waits == 2
    desk.loop.advance(READ_KEPT_S)
    desk.pends(Place(), "another")
    assert not desk.fetching._results


def test_where_the_system_does_not_tell() -> None:
    """A read is fetched, and for a while may wait, because there is hardly anything to wait for."""
    desk, place = Desk(), Place(unknown=True)
    desk.pends(place)
    desk.work()
    assert desk.read(place) == "found"
    assert desk.read(place) == "found"
    desk.loop.advance(READ_KEPT_S + 1)
    desk.pends(place)


def test_few_at_a_time_in_their_order() -> None:
    """The other threads are for commits."""
    desk = Desk(most=2)
    order: list[int] = []

    def reads(number: int) -> Callable[[bool], None]:
        def read(at_once: bool) -> None:
            if at_once:
                raise NotAtHand
            order.append(number)

        return read

    for number in range(5):
        with running(desk.loop), pytest.raises(ReadPending):
            desk.fetching.read(number, reads(number))
    assert desk.workers.held == 2
    while desk.work():
        assert desk.workers.held <= 2
    assert order == [0, 1, 2, 3, 4]


def test_other_threads_read_by_themselves() -> None:
    """They may wait."""
    desk, place = Desk(), Place()
    assert desk.fetching.read("place", place.read) == "found"
    assert (place.waits, desk.workers.held) == (1, 0)


def test_readers_that_never_come_back_are_forgotten() -> None:
    """What is kept for them is bounded."""
    desk = Desk()
    for number in range(ENDED_MAX + 10):
        desk.pends(Place(), number)
    while desk.work():
        pass
    assert len(desk.fetching._ended) == ENDED_MAX
    assert not desk.fetching._readers
