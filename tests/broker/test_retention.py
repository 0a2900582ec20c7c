"""What is forgotten, when, and what never is; and when a full disk refuses publishes."""

from typing import Any

import pytest

from headrace.broker.retention import INTERVAL_S, DiskGuard, low_water
from headrace.errors import DataCorrupt, QueueFull, StorageFull
from headrace.log.batch import encode
from headrace.log.interface import ReadPending
from tests.broker.rig import DATA, GROUP, TOPIC, Rig
from tests.fakes import FakeLoop, FaultyFiles, InlineWorkers, SimulatedFiles

HOUR = 3600.0
MIB = 1 << 20


def segmented(count: int = 5, **settings: Any) -> Rig:
    """A topic of ``count`` segments, one record each, one hour apart."""
    rig = Rig(topic={"retention_hours": None})
    for number in range(count):
        if number:
            rig.advance(HOUR)
            rig.roll()
        rig.publish(TOPIC, b"%d" % number * 100)
    assert len(rig.segments()) == count
    rig.wait(rig.engine.change_topic, TOPIC, settings)
    return rig


def look(rig: Rig) -> None:
    rig.advance(INTERVAL_S)


# --- on disk ------------------------------------------------------------------------------------
def test_by_age() -> None:
    """Closed segments whose newest record is too old go, oldest first, with their companions."""
    rig = segmented(retention_hours=2.5)
    look(rig)
    assert rig.segments() == [2, 3, 4]
    assert rig.log().start_offset == 2
    left = rig.files.names(DATA / TOPIC / "0")
    assert not [name for name in left if int(name[:20]) < 2]
    rig.kill()
    assert [m.offset for m in rig.read()] == [2, 3, 4]


def test_a_log_that_has_to_read_first_is_looked_at_once() -> None:
    """Whether a segment still grows is asked once in a round; a moment later it never has."""
    rig = segmented(retention_hours=2.5)
    log = rig.log()
    closed_segments, rolled, tell = log.closed_segments, [], []

    def pending() -> Any:
        log.closed_segments = closed_segments
        raise ReadPending(tell.append)

    log.closed_segments = pending
    log.roll_if_old = rolled.append
    look(rig)
    assert len(rig.segments()) == 5
    tell[0]()
    rig.run()
    assert rig.segments() == [2, 3, 4]
    assert len(rolled) == 1


def test_by_bytes() -> None:
    """The oldest closed segments go until the rest is small enough."""
    rig = segmented()
    each = rig.log().size_bytes() // 5
    rig.wait(rig.engine.change_topic, TOPIC, {"retention_bytes": 3 * each})
    look(rig)
    assert rig.segments() == [2, 3, 4]
    assert rig.engine.retention.deleted_bytes == 2 * each


def test_never_the_one_that_is_written() -> None:
    """However old and however large, the active segment stays."""
    rig = segmented(retention_hours=0, retention_bytes=0)
    look(rig)
    assert rig.segments() == [4]
    rig.advance(1000 * HOUR)
    assert rig.log().end_offset == 5
    assert rig.publish(TOPIC, b"x").offset == 5


def test_an_old_segment_is_closed_so_that_it_can_go() -> None:
    """By its age: a quiet topic does not keep its last day for ever."""
    rig = Rig(topic={"retention_hours": 1, "segment_hours": 1})
    rig.numbers(3)
    rig.advance(2 * HOUR + 3 * INTERVAL_S)
    rig.numbers(1)
    rig.advance(2 * INTERVAL_S)
    assert rig.log().start_offset == 3
    assert rig.values() == [b"0"]


def test_nothing_that_is_unread() -> None:
    """What a group has not finished stays, whoever else is done with it; then it goes."""
    rig = segmented(retention_hours=0)
    slow, quick = rig.subscribe("slow"), rig.subscribe("quick")
    first, second = rig.join(slow), rig.join(quick)
    second.ack(*second.take())
    first.ack(*first.messages[:2])
    look(rig)
    assert rig.segments() == [2, 3, 4]
    first.ack(first.messages[3])  # not in order: the third is what counts
    look(rig)
    assert rig.segments() == [2, 3, 4]
    first.ack(first.messages[2])
    look(rig)
    assert rig.segments() == [4]


def test_a_deleted_group_keeps_nothing() -> None:
    """With the last group that had not read it, an old message goes."""
    rig = segmented(retention_hours=0)
    group = rig.subscribe()
    look(rig)
    assert len(rig.segments()) == 5
    rig.wait(rig.engine.unsubscribe, group)
    look(rig)
    assert rig.segments() == [4]


def test_unread_messages_may_go_where_the_topic_says_so() -> None:
    """``retain_unread`` off: retention is retention."""
    rig = segmented(retention_hours=0, retain_unread=False)
    rig.subscribe()
    look(rig)
    assert rig.segments() == [4]
    assert rig.join().offsets == [4]


def test_a_follower_holds_nothing_back() -> None:
    """Only subscriptions count as readers."""
    rig = segmented(retention_hours=0)
    rig.follow(space=0)
    look(rig)
    assert rig.segments() == [4]
    assert low_water(rig.engine.partition(TOPIC, 0)) is None


def test_a_clock_that_jumps_back_deletes_nothing() -> None:
    """And one that jumps ahead spares what is unread and what is being written."""
    rig = segmented(retention_hours=10)
    rig.clock.jump(-1000 * 3_600_000)
    look(rig)
    assert len(rig.segments()) == 5
    rig.subscribe()
    rig.clock.jump(9_000 * 3_600_000)
    look(rig)
    assert len(rig.segments()) >= 5
    assert rig.join().offsets == [0, 1, 2, 3, 4]


def test_a_disk_that_refuses_to_delete_leaves_no_gap() -> None:
    """Its files stay, all of them, and the next round tries again."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files, topic={"retention_hours": 0})
    for number in range(3):
        rig.numbers(1, start=number)
        rig.roll()
    stored = [name for name in files.names(DATA / TOPIC / "0") if name.endswith(".log")]
    files.fail("remove", repeat=True)
    rig.advance(1)
    look(rig)
    assert rig.log().start_offset == 3
    assert [name for name in files.names(DATA / TOPIC / "0") if name.endswith(".log")] == stored
    files.heal()
    look(rig)
    assert [name for name in files.names(DATA / TOPIC / "0") if name.endswith(".log")] == stored[
        -1:
    ]


def test_one_topic_that_cannot_be_looked_at_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are kept in bounds, and so is time: the next round comes."""
    rig = segmented(retention_hours=0)
    rig.publish("broken", b"x")

    def damaged() -> list[Any]:
        raise DataCorrupt("the index is damaged")

    monkeypatch.setattr(rig.log("broken"), "closed_segments", damaged)
    rig.engine.topics._topics = {  # the broken one first
        name: rig.engine.topics.find(name) for name in ("broken", TOPIC)
    }
    look(rig)
    assert rig.segments() == [4]
    rig.roll()
    rig.publish(TOPIC, b"x")
    rig.advance(1)
    look(rig)
    assert rig.segments() == [5]


# --- in memory ----------------------------------------------------------------------------------
def test_staged_batches_that_cannot_be_read_do_not_end_retention() -> None:
    """One failed read among the staged batches must not let the disk fill up for good."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files, topic={"retention_hours": None})
    batch = encode(rig.columns([b"staged"]))
    rig.wait(rig.engine.staging.stage, TOPIC, 0, batch)
    for number in range(3):
        rig.publish(TOPIC, b"%d" % number)
        rig.advance(HOUR)
        rig.roll()
    rig.engine.change_topic(TOPIC, {"retention_hours": 1.5})
    fault = files.fail("read_at", repeat=True, name=".log")
    look(rig)
    assert fault.hits
    files.heal()
    rig.advance(HOUR)
    look(rig)
    assert rig.log().start_offset >= 2


def test_in_memory_what_everybody_has_done_is_dropped() -> None:
    """At once, without waiting for a round; the slowest group decides."""
    rig = Rig(directory=None)
    one, two = rig.join(rig.subscribe("one")), rig.join(rig.subscribe("two"))
    rig.numbers(10)
    one.ack(*one.take())
    two.ack(*two.messages[:4])
    rig.run()
    assert rig.log().start_offset == 4
    size = rig.log().size_bytes()
    two.ack(*two.messages[4:])
    rig.run()
    assert rig.log().start_offset == 10
    assert rig.log().size_bytes() == 0 < size


def test_in_memory_without_a_group_everything_stays() -> None:
    """A group that comes later may want it, up to the bound of the queue."""
    rig = Rig(directory=None, topic={"max_queue_size": 10, "retention_hours": 0})
    rig.numbers(10)
    rig.advance(HOUR)
    with pytest.raises(QueueFull):
        rig.numbers(1)
    assert rig.join(rig.subscribe()).offsets == list(range(10))


def test_in_memory_a_deleted_group_lets_go() -> None:
    """Its messages are dropped when the others are done with them."""
    rig = Rig(directory=None)
    slow, quick = rig.subscribe("slow"), rig.subscribe("quick")
    inbox = rig.join(quick)
    rig.numbers(10)
    inbox.ack(*inbox.take())
    rig.run()
    assert rig.log().start_offset == 0
    rig.wait(rig.engine.unsubscribe, slow)
    assert rig.log().start_offset == 10


def test_in_memory_messages_passed_over_go_too() -> None:
    """Those that were for others, and those whose time is up."""
    rig = Rig(directory=None)
    rig.join(rig.subscribe())
    rig.publish(TOPIC, b"x", to="other")
    rig.publish(TOPIC, b"x", to=GROUP, ttl=0)
    rig.advance(1)
    assert rig.log().start_offset >= 1


# --- a full disk ----------------------------------------------------------------------------------
class Disk(SimulatedFiles):
    """Says how much is free."""

    free = 100 * MIB
    asked = 0

    def free_bytes(self, path: object) -> int:
        self.asked += 1
        if self.free < 0:
            raise OSError(5, "cannot be asked")
        return self.free


class Guarded:
    """A guard, and a disk thread that answers when the loop runs; with ``hold`` when the test says so."""

    def __init__(self, hold: bool = False):
        self.disk, self.loop = Disk(), FakeLoop()
        self.workers = InlineWorkers(self.loop, hold=hold)
        self.guard = DiskGuard(DATA, 40 * MIB, self.disk, self.loop, self.workers)
        self.guard.open()

    def look(self) -> StorageFull | None:
        """What it says a moment later."""
        self.loop.advance(DiskGuard.CHECK_S)
        self.guard.refusal()
        self.loop.run_until_idle()
        return self.guard.refusal()


def test_the_guard_closes_and_opens_with_some_play() -> None:
    """Below the reserve it refuses; it opens again at a quarter more, not at the very edge."""
    rig = Guarded()
    for free, full in [(100, False), (40, False), (39, True), (40, True), (49, True), (50, False),
                       (40, False), (39, True), (100, False)]:  # fmt: skip
        rig.disk.free = free * MIB
        refusal = rig.look()
        assert (refusal is not None) == full, free
        if refusal is not None:
            assert isinstance(refusal, StorageFull)
            assert refusal.retryable
            assert f"{free} MiB" in refusal.message


def test_the_guard_does_not_ask_for_every_publish() -> None:
    """Asking costs a system call; four times a second is enough."""
    rig = Guarded()
    for _ in range(100):
        rig.guard.refusal()
    assert rig.disk.asked == 1
    rig.look()
    assert rig.disk.asked == 2


def test_nobody_waits_for_the_guard() -> None:
    """A file system over a network may not answer: the guard says what it knows, and asks no second time meanwhile."""
    rig = Guarded(hold=True)
    rig.disk.free = 0
    for _ in range(3):
        assert rig.look() is None
    assert rig.workers.held == 1
    rig.workers.release()
    rig.loop.run_until_idle()
    assert rig.guard.refusal() is not None


def test_the_guard_believes_a_write_more_than_a_number() -> None:
    """A write that found no room closes it, whatever the disk says; the next look opens it."""
    rig = Guarded()
    assert rig.guard.refusal() is None
    rig.guard.hit_the_wall()
    assert rig.guard.refusal() is not None
    rig.loop.advance(DiskGuard.CHECK_S)
    assert rig.guard.refusal() is None
    assert rig.loop.timers == 0


def test_the_guard_looks_by_itself_while_the_disk_is_full() -> None:
    """The first publish after there is room again is accepted. When the broker closes, it ends."""
    rig = Guarded()
    rig.disk.free = 0
    assert rig.look() is not None
    rig.loop.advance(60)
    assert rig.disk.asked > 200
    rig.disk.free = 100 * MIB
    rig.loop.advance(DiskGuard.CHECK_S)
    assert not rig.guard.full
    rig.disk.free = 0
    assert rig.look() is not None
    rig.workers.hold = True
    rig.loop.advance(1)
    rig.guard.close()
    rig.workers.release()
    rig.loop.run_until_idle()
    assert rig.loop.timers == 0


def test_a_disk_that_cannot_be_asked_changes_nothing() -> None:
    """The guard stays as it was."""
    rig = Guarded()
    rig.disk.free = -1
    assert rig.look() is None
    rig.guard.open()
    assert rig.look() is None
    assert DiskGuard(None, 40 * MIB, rig.disk, rig.loop, rig.workers).refusal() is None


def test_below_the_reserve_publishes_are_refused_and_the_rest_goes_on() -> None:
    """Nothing is appended; consuming, acks, dead letters' marks and deleting use the reserve."""
    disk = Disk()
    rig = Rig(disk, disk_reserve_bytes=40 * MIB)
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(5)
    rig.engine.create_topic("memory", rig.engine.topics.defaults.but({"durable": False}))
    disk.free = 10 * MIB
    rig.engine.guard.open()
    for topic in (TOPIC, "new"):
        with pytest.raises(StorageFull):
            rig.publish(topic, b"x")
    with pytest.raises(StorageFull):
        rig.publish(TOPIC, b"later", delay=10)
    assert rig.log().end_offset == 5
    inbox.ack(*inbox.take())
    rig.flush()
    rig.publish("memory", b"fits")
    disk.free = 100 * MIB
    rig.engine.guard.open()
    assert rig.publish(TOPIC, b"x").offset == 5
    rig.crash()
    assert rig.join().offsets == [5]
