"""Reads that would make the loop wait for the disk."""

import asyncio
import errno
import gc
import weakref
from functools import partial

import pytest

from headrace.files import NotAtHand
from headrace.limits import READ_KEPT_S
from headrace.log.fetching import ENDED_MAX, Fetching
from headrace.log.interface import ReadPending, completed
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

    def read(self, place: Place, key: str = "place") -> str:
        """On the loop. If it is pending, ``told`` hears when to read again."""
        with running(self.loop):
            try:
                return self.fetching.read((key,), place.read)
            except ReadPending as pending:
                pending.then(lambda: self.told.append(key))
                raise

    def pends(self, place: Place, key: str = "place") -> None:
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
        desk.fetching.read(("place",), read)
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
            desk.fetching.read(("place",), place.read)
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


def test_pages_may_be_gone_again_however_long_it_takes() -> None:
    """A disk that is so busy that every fetch waits longer than answers are kept: the reader comes to an end."""
    desk, place = Desk(), Place()
    for _ in range(2):
        desk.pends(place)
        desk.loop.advance(READ_KEPT_S + 1)
        desk.work()
        place.at_hand = False
    assert desk.read(place) == "found"
    assert place.waits == 2


class Order:
    """Which fetches were made, one after the other."""

    def __init__(self, desk: Desk):
        self.desk = desk
        self.made: list[str] = []
        self.pending: dict[str, ReadPending] = {}

    def ask(self, *names: str) -> None:
        """The first letter of a name is that of its partition."""
        for name in names:
            with running(self.desk.loop), pytest.raises(ReadPending) as caught:
                self.desk.fetching.read((name[0], name), partial(self._read, name))
            caught.value.then(self._told)
            self.pending[name] = caught.value

    def leave(self, name: str) -> None:
        self.pending[name].leave(self._told)

    def _told(self) -> None:
        pass

    def _read(self, name: str, at_once: bool) -> None:
        if at_once:
            raise NotAtHand
        self.made.append(name)

    def all(self) -> list[str]:
        while self.desk.work():
            assert self.desk.workers.held <= 2
        return self.made


def test_few_at_a_time_in_their_order() -> None:
    """The other threads are for commits."""
    desk = Desk(most=2)
    order = Order(desk)
    order.ask("a0", "a1", "a2", "a3", "a4")
    assert desk.workers.held == 2
    assert order.all() == ["a0", "a1", "a2", "a3", "a4"]


def test_partitions_take_turns() -> None:
    """Who reads one place of a partition does not wait for a hundred places of another one."""
    order = Order(Desk(most=1))
    order.ask("a0", "a1", "a2", "a3", "b0", "c0", "b1")
    assert order.all() == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_what_nobody_waits_for_any_more_is_not_fetched() -> None:
    """Clients that ask and leave do not fill the queue; those that wait for the same get it."""
    desk = Desk(most=1)
    order = Order(desk)
    order.ask("a0", "a1", "a2", "b0", "a2", "b1")
    for name in ("a0", "a1", "a1", "a2", "b0", "b1"):
        order.leave(name)
    assert len(desk.fetching._fetches) == 2
    assert order.all() == ["a0", "a2"]
    assert not desk.fetching._fetches
    order.leave("a2")


def test_a_coroutine_that_is_cancelled_leaves() -> None:
    """As when its connection is lost."""
    left: list[object] = []

    async def scenario() -> None:
        def read() -> None:
            raise ReadPending(lambda callback: None, left.append)

        task = asyncio.ensure_future(completed(read))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())
    assert len(left) == 1


def test_many_reads_are_waited_for_together() -> None:
    """The caller is told once, when the last is there; if it leaves, it leaves all."""
    desk = Desk(most=1)
    order = Order(desk)
    told: list[bool] = []
    callback = partial(told.append, True)
    order.ask("a0", "b0", "c0")
    both = ReadPending.for_all([order.pending["a0"], order.pending["b0"]])
    third = ReadPending.for_all([order.pending["c0"]])
    both.then(callback)
    third.then(callback)
    third.leave(callback)
    order.leave("c0")
    desk.work()
    assert told == []
    order.all()
    assert told == [True]
    assert order.made == ["a0", "b0"]


def test_other_threads_read_by_themselves() -> None:
    """They may wait."""
    desk, place = Desk(), Place()
    assert desk.fetching.read(("place",), place.read) == "found"
    assert (place.waits, desk.workers.held) == (1, 0)


def test_readers_that_never_come_back_are_forgotten() -> None:
    """What is kept for them is bounded."""
    desk = Desk()
    for number in range(ENDED_MAX + 10):
        desk.pends(Place(), str(number))
    while desk.work():
        pass
    assert len(desk.fetching._ended) == ENDED_MAX
    assert not desk.fetching._fetches
