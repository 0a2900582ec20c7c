"""Delayed messages: published when their time comes, once, whatever happens in between."""

import uuid
from collections import Counter
from random import Random
from typing import Any

import pytest

from headrace import limits
from headrace.broker import pace, schedule
from headrace.broker.schedule import LOOK_AGAIN_S, ROUND_MAX
from headrace.broker.schedule import TOPIC as HOME
from headrace.errors import InvalidArgument, MessageNotFound, OutcomeUnknown, QueueFull
from headrace.log.batch import Batch
from headrace.log.columns import Columns
from headrace.log.interface import Append, ReadPending
from headrace.log.partition import PartitionLog
from headrace.model import TopicSettings
from tests.broker.rig import DATA, TOPIC, Answer, Inbox, Rig, damage, flip
from tests.fakes import FaultyFiles, SimulatedFiles

OWN = "12345678-1234-4234-8234-123456789abc"


@pytest.fixture
def rig() -> Rig:
    return Rig()


def waiting(rig: Rig, topic: str | None = None) -> list[tuple[str, int]]:
    return [(s.topic, s.deliver_at) for s in rig.engine.schedule.listing(topic).collect()]


# --- when ---------------------------------------------------------------------------------------
def test_it_comes_when_its_time_comes(rig: Rig) -> None:
    """Not before; as a message of that moment, with everything it was given."""
    inbox = rig.join(rig.subscribe())
    receipt = rig.publish(TOPIC, b"later", delay=10, keys=["k"], headers=[{"a": "b"}])
    assert (receipt.topic, receipt.partition, receipt.offset) == (TOPIC, None, None)
    rig.advance(9.999)
    assert inbox.messages == []
    rig.advance(0.001)
    (message,) = inbox.messages
    assert (message.value, message.key, message.headers) == (b"later", b"k", {"a": "b"})
    assert message.timestamp == rig.clock.now_ms()
    assert message.id == receipt.id
    assert (message.topic, message.offset) == (TOPIC, 0)
    assert len(rig.engine.schedule) == 0


def test_many_are_listed_and_forgotten_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the deleted topic, and not those of a later one of the same name; none is published."""
    for number in range(6):
        rig.publish(TOPIC if number % 2 else "other", b"%d" % number, delay=20 - number)
    monkeypatch.setattr(pace, "PIECE_S", -1.0)
    monkeypatch.setattr(schedule, "LOOKED_AT_ONCE", 1)
    listing = rig.engine.schedule.listing(limit=3)
    with pytest.raises(ReadPending):
        listing.collect()
    now = rig.clock.now_ms()
    assert [s.deliver_at - now for s in rig.complete(listing.collect)] == [15_000, 16_000, 17_000]
    rig.engine.create_topic(TOPIC)
    rig.run()
    left: list[Any] = []
    monkeypatch.setattr(rig.engine.pace, "soon", left.append)
    deleted = rig.ask(rig.engine.delete_topic, TOPIC)
    rig.run()
    monkeypatch.undo()
    rig.advance(30)  # all are due
    assert (deleted.calls, rig.engine.topics.get(TOPIC)) == (0, None)
    (go_on,) = left
    go_on()
    rig.run()
    assert (deleted.calls, rig.engine.topics.get(TOPIC)) == (1, None)
    assert len(rig.engine.schedule) == 0
    assert sorted(rig.values("other")) == [b"0", b"2", b"4"]


def test_a_time_that_is_past_is_now(rig: Rig) -> None:
    """Without a delay, or with one of 0, it is an ordinary publish."""
    assert rig.publish(TOPIC, b"x", delay=0).offset == 0
    assert rig.publish(TOPIC, b"x", deliver_at=rig.clock.now_ms() - 1).offset == 1
    assert HOME not in [topic.name for topic in rig.engine.topics]


def test_the_earlier_before_the_later(rig: Rig) -> None:
    """By time, then by the order in which they were asked for; also when many are due at once."""
    delays = [5, 3, 9, 3, 7, 1, 9, 2]
    for number, delay in enumerate(delays):
        rig.publish(TOPIC, b"%d" % number, delay=delay)
    order = sorted(range(len(delays)), key=lambda n: (delays[n], n))
    assert [at for _, at in waiting(rig)] == sorted(at for _, at in waiting(rig))
    rig.close()
    rig.advance(100)  # the broker is down while all of them fall due
    rig.open()
    rig.advance(1)
    assert rig.values() == [b"%d" % number for number in order]


def test_each_at_its_own_time(rig: Rig) -> None:
    """One that is asked for later and due earlier does not wait for the others."""
    rig.publish(TOPIC, b"slow", delay=1000)
    rig.publish(TOPIC, b"quick", delay=1)
    rig.advance(1)
    assert rig.values() == [b"quick"]
    rig.advance(999)
    assert rig.values() == [b"quick", b"slow"]


def test_many_at_once(rig: Rig) -> None:
    """More than one round's worth at the same moment: all of them, in order."""
    count = 2 * ROUND_MAX + 10
    at = rig.clock.now_ms() + 5000
    for number in range(count):
        rig.send(TOPIC, b"%d" % number, deliver_at=at)
    rig.run()
    assert len(rig.engine.schedule) == count
    rig.advance(6)
    assert [int(value) for value in rig.values()] == list(range(count))


def test_the_clock_jumps_ahead(rig: Rig) -> None:
    """What is due by the wall clock comes within a minute, though no timer could know."""
    inbox = rig.join(rig.subscribe())
    rig.publish(TOPIC, b"x", delay=3600)
    rig.clock.jump(2 * 3_600_000)
    rig.advance(LOOK_AGAIN_S)
    assert inbox.values == [b"x"]


def test_the_clock_jumps_back(rig: Rig) -> None:
    """It waits for its time by the wall clock, and for nothing else."""
    rig.numbers(1)
    rig.publish(TOPIC, b"x", delay=60)
    rig.clock.jump(-3_600_000)
    rig.advance(120)
    assert rig.values() == [b"0"]
    rig.advance(3600)
    assert rig.values() == [b"0", b"x"]


def test_where_it_goes(rig: Rig) -> None:
    """By its key, or to the partition that was asked for; to a target; with its time to live."""
    rig.engine.create_topic(TOPIC, TopicSettings(partitions=5))
    keyed = rig.publish(TOPIC, b"now", keys=["k"]).partition
    rig.publish(TOPIC, b"keyed", keys=["k"], delay=1)
    rig.publish(TOPIC, b"placed", partition=3, delay=1)
    rig.publish(TOPIC, b"direct", to="mail", delay=1)
    rig.publish(TOPIC, b"short", ttl=5, delay=1)
    rig.advance(1)
    assert b"keyed" in rig.values(TOPIC, keyed)
    assert b"placed" in rig.values(TOPIC, 3)
    rig.advance(10)
    assert b"direct" not in (found := rig.join(rig.subscribe()).values)
    assert b"short" not in found
    assert b"direct" in rig.join(rig.subscribe("mail")).values


# --- cancelling ---------------------------------------------------------------------------------
def test_cancelled_by_its_id(rig: Rig) -> None:
    """The receipt's id, derived or given by the client; once; durably."""
    derived = rig.publish(TOPIC, b"a", delay=10).id
    own = rig.publish(TOPIC, b"b", delay=10, ids=[OWN]).id
    rig.publish(TOPIC, b"c", delay=10)
    assert str(own) == OWN
    assert own in [scheduled.id for scheduled in rig.engine.schedule.listing().collect()]
    for message_id in (derived, own):
        rig.wait(rig.engine.schedule.cancel, message_id)
        with pytest.raises(MessageNotFound) as caught:
            rig.engine.schedule.cancel(message_id, lambda error: None)
        assert caught.value.code == "not_scheduled"
    rig.crash()
    rig.advance(20)
    assert rig.values() == [b"c"]


def test_what_cannot_be_cancelled(rig: Rig) -> None:
    """What was published, what never waited, and what is just being published."""
    early = rig.publish(TOPIC, b"x", delay=1).id
    rig.advance(1)
    now = rig.publish(TOPIC, b"y").id
    late = rig.publish(TOPIC, b"z", delay=1).id
    rig.workers.hold = True
    rig.advance(1)
    for message_id in (early, now, late, uuid.uuid4()):
        with pytest.raises(MessageNotFound):
            rig.engine.schedule.cancel(message_id, lambda error: None)
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    assert rig.values() == [b"x", b"y", b"z"]


def test_an_id_that_waits_already_is_not_scheduled_again(rig: Rig) -> None:
    """A client that did not hear the answer sends it again: it is published once."""
    first = rig.publish(TOPIC, b"first", delay=5, ids=[OWN])
    again = rig.publish(TOPIC, b"first", delay=5, ids=[OWN])
    assert (first.duplicate, again.duplicate) == (False, True)
    assert first.id == again.id == uuid.UUID(OWN)
    assert len(rig.engine.schedule.listing().collect()) == 1
    rig.advance(20)
    assert rig.values() == [b"first"]


def test_an_id_may_be_used_again_when_it_waits_no_more(rig: Rig) -> None:
    """What has been published is no reason to refuse the next one, and that one can be cancelled."""
    rig.publish(TOPIC, b"first", delay=1, ids=[OWN])
    rig.advance(1)
    rig.publish(TOPIC, b"second", delay=10, ids=[OWN])
    rig.wait(rig.engine.schedule.cancel, uuid.UUID(OWN))
    rig.advance(20)
    assert rig.values() == [b"first"]


def test_listed_soonest_first(rig: Rig) -> None:
    """All, those of one topic, and so many."""
    for topic, delay in (("a", 30), ("b", 10), ("a", 20)):
        rig.publish(topic, b"x", delay=delay)
    now = rig.clock.now_ms()
    assert waiting(rig) == [("b", now + 10_000), ("a", now + 20_000), ("a", now + 30_000)]
    assert waiting(rig, "a") == [("a", now + 20_000), ("a", now + 30_000)]
    assert len(rig.engine.schedule.listing(limit=1).collect()) == 1


def test_the_topic_is_deleted(rig: Rig) -> None:
    """What waits for it goes with it and does not bring it back, after a crash either."""
    rig.numbers(1)
    rig.publish(TOPIC, b"x", delay=10)
    rig.publish("other", b"y", delay=10)
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert [topic for topic, _ in waiting(rig)] == ["other"]
    rig.crash()
    rig.advance(20)
    assert TOPIC not in [topic.name for topic in rig.engine.topics]
    assert rig.values("other") == [b"y"]


def test_the_topic_is_deleted_in_the_middle_of_a_round(rig: Rig) -> None:
    """A message that is just being published to it is not published to a new one instead."""
    rig.numbers(1)
    rig.publish(TOPIC, b"x", delay=1)
    rig.publish("other", b"y", delay=1)
    rig.workers.hold = True
    rig.advance(1)
    rig.ask(rig.engine.delete_topic, TOPIC)
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    rig.advance(10)
    assert TOPIC not in [topic.name for topic in rig.engine.topics]
    assert rig.values("other") == [b"y"]
    assert len(rig.engine.schedule) == 0
    rig.publish("other", b"z", delay=1)
    rig.advance(1)
    assert rig.values("other") == [b"y", b"z"]


# --- over restarts ------------------------------------------------------------------------------
def test_it_waits_through_a_restart(rig: Rig) -> None:
    """And can be cancelled in the next process, by either kind of id."""
    derived = rig.publish(TOPIC, b"a", delay=10).id
    own = rig.publish(TOPIC, b"b", delay=10, ids=[OWN]).id
    rig.publish(TOPIC, b"c", delay=10)
    rig.crash()
    assert len(rig.engine.schedule) == 3
    for message_id in (derived, own):
        rig.wait(rig.engine.schedule.cancel, message_id)
    rig.advance(5)
    rig.reopen()
    rig.advance(5)
    assert rig.values() == [b"c"]


def test_once_wherever_the_power_fails() -> None:
    """At every call to the disk, from the first to the last: each message is published once."""
    steps = 0
    for number in range(1, 200):
        files = FaultyFiles(SimulatedFiles())
        rig = Rig(files, topic={"partitions": 2}, seed=number)
        rig.numbers(1, partition=0)
        for message in range(6):
            rig.publish(TOPIC, b"d%d" % message, delay=1 + message // 2, partition=message % 2)
        rig.flush()
        fault = files.fail(None, number, repeat=True)
        rig.advance(10)
        hits = fault.hits
        files.heal()
        rig.crash(Random(number), ordered=bool(number % 2))
        rig.advance(10)
        found = Counter(rig.values(TOPIC, 0) + rig.values(TOPIC, 1))
        assert found == Counter([b"0", *(b"d%d" % n for n in range(6))]), number
        assert len(rig.engine.schedule) == 0
        if not hits:
            break
        steps += 1
    assert steps > 10


def test_once_though_the_marks_find_no_room() -> None:
    """While the journal cannot be written no second round hides the first: still once each."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    for number in range(5):
        rig.publish(TOPIC, b"%d" % number, delay=1 + number)
    rig.flush()
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name="@subscriptions", code=28)
    rig.advance(10)
    files.heal()
    rig.crash()
    rig.advance(10)
    assert sorted(rig.values()) == [b"%d" % number for number in range(5)]


def test_a_close_does_not_wait_for_room() -> None:
    """A write that is tried again every second ends with the broker."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.publish(TOPIC, b"x", delay=1)
    rig.flush()
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name="@subscriptions", code=28)
    rig.advance(1.5)
    files.heal()
    rig.close()
    assert not rig.loop.timers


def test_once_after_random_crashes() -> None:
    """Many rounds, many crashes at any moment, nothing twice and nothing lost."""
    for seed in range(15):
        random = Random(seed)
        rig = Rig(seed=seed)
        expected = []
        for number in range(40):
            if random.random() < 0.6:
                expected.append(b"%d" % number)
                rig.publish(TOPIC, expected[-1], delay=random.choice([0.5, 1, 1, 5]))
            rig.advance(random.choice([0.01, 0.3, 1.0]))
            if random.random() < 0.2:
                rig.crash(random, ordered=random.random() < 0.5)
        rig.advance(20)
        assert sorted(rig.values()) == sorted(expected)


# --- when it cannot ---------------------------------------------------------------------------------
def test_a_topic_that_takes_no_more(rig: Rig) -> None:
    """One full topic does not hold up the others; its messages come when there is room."""
    rig.engine.create_topic(TOPIC, TopicSettings(max_queue_size=1))
    inbox = rig.join(rig.subscribe())
    rig.numbers(1)
    rig.publish(TOPIC, b"stuck", delay=1)
    rig.publish("other", b"free", delay=1)
    rig.publish("other", b"later", delay=3)
    rig.advance(5)
    assert rig.values("other") == [b"free", b"later"]
    assert len(rig.engine.schedule) == 1
    inbox.ack(*inbox.take())
    rig.advance(1)
    assert inbox.values == [b"stuck"]


def test_a_topic_that_is_not_made_by_publishing() -> None:
    """A message whose topic was deleted cannot make it where topics are not made that way."""
    rig = Rig(auto_create_topics=False)
    rig.engine.create_topic(TOPIC)
    rig.publish(TOPIC, b"x", delay=1)
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.advance(5)
    assert len(rig.engine.schedule) == 0


def test_damage_among_the_waiting(rig: Rig) -> None:
    """The broker starts; what can be read is published; the rest is not forgotten silently."""
    for number in range(5):
        rig.publish(TOPIC, b"%d" % number, delay=10)
    rig.close()
    path = DATA / HOME / "0" / f"{0:020d}.log"
    damage(rig, path, flip(2 * (rig.files.file_size(path) // 5) + 80))
    rig.open()
    rig.advance(20)
    assert rig.values() == [b"0", b"1", b"3", b"4"]
    keeper = rig.engine.all_subscriptions()[0]
    assert keeper.lag() == 1


def test_how_many_may_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound, and a retryable refusal beyond it."""
    monkeypatch.setattr(limits, "SCHEDULED_MAX", 3)
    for _ in range(3):
        rig.publish(TOPIC, b"x", delay=5)
    with pytest.raises(QueueFull):
        rig.publish(TOPIC, b"x", delay=5)
    rig.advance(5)
    rig.publish(TOPIC, b"x", delay=5)


@pytest.mark.parametrize(
    "more", [{"delay": limits.DELAY_S_MAX + 1}, {"delay": "5"}, {"delay": True}]
)
def test_delays_that_are_none(rig: Rig, more: dict[str, Any]) -> None:
    """Too long, a text, a bool: refused, and nothing waits."""
    with pytest.raises(InvalidArgument) as caught:
        rig.publish(TOPIC, b"x", **more)
    assert caught.value.code == "invalid_delay"
    assert len(rig.engine.schedule) == 0


def test_in_memory_it_waits_too() -> None:
    """A broker without a disk has a schedule; nothing of it is kept."""
    rig = Rig(directory=None)
    inbox: Inbox = rig.join(rig.subscribe())
    cancelled = rig.publish(TOPIC, b"x", delay=5).id
    rig.publish(TOPIC, b"y", delay=5)
    rig.wait(rig.engine.schedule.cancel, cancelled)
    rig.advance(5)
    assert inbox.values == [b"y"]
    assert rig.log(HOME).size_bytes() == 0  # and what is done is let go of


def test_what_is_done_is_forgotten_on_disk_too(rig: Rig) -> None:
    """The internal topic keeps what waits, not what has ever waited."""
    for number in range(3):
        rig.publish(TOPIC, b"%d" % number, delay=1)
        rig.advance(1)
        rig.roll(HOME)
    rig.publish(TOPIC, b"last", delay=100)
    rig.advance(20)
    assert rig.segments(HOME) == [3]


def test_a_stopped_broker_publishes_nothing() -> None:
    """After a failed sync the schedule rests; the next start publishes what is due, once."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.numbers(1)
    rig.publish(TOPIC, b"x", delay=5)
    rig.flush()
    files.fail("sync", 1, name=".log")
    rig.send(TOPIC, b"unlucky")
    rig.run()
    assert rig.engine.failed is not None
    rig.advance(100)
    assert rig.loop.timers == 0
    rig.close()
    rig.open()
    rig.advance(1)
    assert rig.values().count(b"x") == 1


@pytest.mark.parametrize("closes", [False, True])
def test_a_read_that_the_disk_refuses_at_the_start_is_tried_again(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message comes in this run, not after the next start; and a close meanwhile leaves no timer."""
    rig = Rig()
    rig.engine.create_topic(TOPIC)
    rig.publish(TOPIC, b"later", delay=5.0)
    rig.close()
    read, refusals = PartitionLog.read_cached, [OSError(5, "Input/output error")] * 2

    def refused(self: PartitionLog, offset: int) -> Batch:
        if refusals:
            raise refusals.pop()
        return read(self, offset)

    monkeypatch.setattr(PartitionLog, "read_cached", refused)
    rig.open()
    assert (len(rig.engine.schedule), len(refusals)) == (0, 1)
    if closes:
        rig.close()
        assert rig.loop.timers == 0
        rig.open()
    rig.advance(10.0)
    assert rig.values(TOPIC) == [b"later"]


# --- with several nodes ---------------------------------------------------------------------------
def test_what_was_published_is_known_when_it_is_sent_again(rig: Rig) -> None:
    """The client did not hear the answer, and its message has gone meanwhile."""
    at = rig.clock.now_ms() + 1000
    rig.publish(TOPIC, b"once", deliver_at=at, ids=[OWN])
    rig.advance(2)
    answer = Answer()
    again = Columns([b"once"], ids=[uuid.UUID(OWN).bytes])
    rig.engine.schedule.add(TOPIC, again, at, None, answer.done)  # as another node asks for it
    rig.run()
    assert answer.get()[0].duplicate
    rig.advance(10)
    assert rig.values() == [b"once"]


class Doubtful:
    """The owner of a partition: it stores, and says that it does not know."""

    def __init__(self, log: Any, monkeypatch: pytest.MonkeyPatch):
        self.times = 1
        append = log.append

        def doubtful(entry: Append) -> None:
            done = entry.done

            def said(entry: Append) -> None:
                if self.times:
                    self.times -= 1
                    entry.error = OutcomeUnknown("the owner does not answer")
                done(entry)

            entry.done = said
            append(entry)

        monkeypatch.setattr(log, "append", doubtful)


def test_a_batch_that_was_stored_with_an_error_is_not_published_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node owns the partition; and others that are due meanwhile are not taken for repetitions."""
    rig.publish(TOPIC, b"first")
    owner = Doubtful(rig.engine.partition(TOPIC).log, monkeypatch)
    for number in range(3):
        rig.publish(TOPIC, b"%d" % number, delay=1 + 0.3 * number)
    monkeypatch.setattr(rig.engine, "cluster", object())
    rig.advance(10)
    assert owner.times == 0
    assert sorted(rig.values()) == [b"0", b"1", b"2", b"first"]
    monkeypatch.setattr(rig.engine, "cluster", None)


def test_a_batch_of_the_leader_before_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives after the new leader has read what there is; its numbers are those that the new one would use."""
    rig.publish(TOPIC, b"first")
    receipt = rig.publish(TOPIC, b"later", delay=1)
    rig.publish(TOPIC, b"too", delay=1)
    assert isinstance(receipt.id, uuid.UUID)
    rig.engine.schedule.close()  # the new leader is not there yet
    rig.advance(2)
    late = Columns([b"later"], ids=[receipt.id.bytes])
    log = rig.engine.partition(TOPIC).log
    log.append(Append(late, None, lambda entry: None, producer_id=schedule.PRODUCER_ID))
    rig.run()
    rig.engine.schedule._arm()
    monkeypatch.setattr(rig.engine, "cluster", object())
    rig.advance(10)
    assert rig.values() == [b"first", b"later", b"too"]
    monkeypatch.setattr(rig.engine, "cluster", None)
