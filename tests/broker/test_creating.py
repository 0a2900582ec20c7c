"""Topics that somebody needs now: they can be used at once, and a worker makes their files meanwhile.

``rig.workers.hold`` stops the worker before it begins, for as long as the test likes.
"""

import errno
from typing import Any

import pytest

from headrace import limits
from headrace.broker import schedule, staging
from headrace.broker.dead_letters import KEEPER
from headrace.errors import (
    Conflict,
    HeadraceError,
    MemoryFull,
    QueueFull,
    StorageFailed,
    SubscriptionNotFound,
)
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.model import TopicSettings
from tests.broker.rig import DATA, GROUP, TOPIC, Answer, Inbox, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    """Open, and its worker waits."""
    rig = Rig(FaultyFiles(SimulatedFiles()))
    rig.open()
    rig.workers.hold = True
    return rig


def faulty(rig: Rig) -> FaultyFiles:
    assert isinstance(rig.files, FaultyFiles)
    return rig.files


def let_go(rig: Rig) -> None:
    """The worker goes on."""
    rig.workers.hold = False
    rig.run()
    while rig.workers.release():
        rig.run()


def refuse(rig: Rig, topic: str = TOPIC) -> None:
    """The worker goes on, and the disk refuses the topic."""
    files = faulty(rig)
    files.fail("mkdir", name=topic)
    let_go(rig)
    files.heal()
    assert rig.engine.topics.get(topic) is None
    assert not rig.files.exists(DATA / topic)


def batch(*values: bytes, **columns: Any) -> Batch:
    return encode(Columns(list(values), **columns))


def codes(*answers: Answer) -> list[str | None]:
    assert all(answer.calls == 1 for answer in answers)
    return [None if answer.error is None else answer.error.code for answer in answers]


# --- publishing ---------------------------------------------------------------------------------
def test_the_loop_touches_no_disk(rig: Rig) -> None:
    """Neither for what publishing creates nor for the topics of the broker itself."""
    rig.engine.subscribe("wide", "*", settings={"max_deliveries": 1})
    before = len(faulty(rig).changes)
    rig.send(TOPIC, b"x")
    rig.send("delayed", b"x", delay=60)
    rig.engine.subscribe(GROUP, "subscribed")
    rig.engine.follow("followed", Inbox())
    rig.ask(rig.engine.staging.stage, "staged", None, batch(b"x"))
    rig.engine.events._topic.append([("k", b"v")])
    rig.engine.audit._topic.append([("k", b"v")])
    rig.run()
    assert {TOPIC, "subscribed", "followed", "staged", staging.TOPIC, schedule.TOPIC} <= {
        topic.name for topic in rig.engine.topics
    }
    assert faulty(rig).changes[before:] == []
    let_go(rig)
    assert rig.values() == [b"x"]


def test_publishes_wait_in_their_order(rig: Rig) -> None:
    """Of every kind: single, gathered, many, idempotent; they are one creation, and nobody sees them before."""
    inbox = rig.follow()
    answers = [
        rig.send(TOPIC, b"1"),
        rig.send(TOPIC, b"2", b"3"),
        rig.send(TOPIC, b"4", producer=(7, 0, 0)),
    ]
    rig.run()
    answers.append(rig.send(TOPIC, b"5"))
    rig.run()
    assert rig.workers.held == 1
    assert [answer.calls for answer in answers] == [0] * 4
    assert (inbox.values, rig.values()) == ([], [])
    let_go(rig)
    assert codes(*answers) == [None] * 4
    assert rig.values() == inbox.values == [b"1", b"2", b"3", b"4", b"5"]
    rig.crash()
    assert rig.values() == [b"1", b"2", b"3", b"4", b"5"]


def test_what_waits_is_bounded(rig: Rig) -> None:
    """It counts as memory, and in the queue of the topic, as anything that is on its way to the disk."""
    used = rig.engine.budget.used
    first = rig.send(TOPIC, bytes(1_000))
    assert rig.engine.budget.used >= used + 1_000
    rig.engine.budget.limit = rig.engine.budget.used + 10
    over = rig.send(TOPIC, bytes(1_000))
    assert isinstance(over.error, MemoryFull)
    rig.engine.budget.limit = 1 << 30
    count = limits.COMMIT_QUEUE_BYTES_MAX // (1 << 20)
    large = [rig.send(TOPIC, bytes(1 << 20)) for _ in range(count + 1)]
    assert isinstance(large[-1].error, QueueFull)
    let_go(rig)
    assert codes(first) == [None]
    assert rig.engine.budget.used < used + (1 << 20) * (count + 2)


def test_a_queue_limit_counts_what_waits() -> None:
    """Where there is room for two, the third is refused at once."""
    rig = Rig(FaultyFiles(SimulatedFiles()), hold=True, topic={"max_queue_size": 2})
    answers = [rig.send(TOPIC, b"%d" % number) for number in range(3)]
    rig.run()
    assert [answer.calls for answer in answers] == [0, 0, 1]
    assert isinstance(answers[2].error, QueueFull)
    let_go(rig)
    assert codes(*answers[:2]) == [None, None]


def test_a_topic_in_memory_waits_too() -> None:
    """Its settings are on disk. If that refuses them, nothing was accepted."""
    rig = Rig(FaultyFiles(SimulatedFiles()), hold=True, topic={"durable": False})
    first = rig.send(TOPIC, b"1")
    rig.run()
    assert first.calls == 0
    refuse(rig)
    assert codes(first) == ["storage_failed"]
    rig.workers.hold = True
    second = rig.send(TOPIC, b"2")
    rig.run()
    assert second.calls == 0
    let_go(rig)
    assert second.get()[0].offset == 0


# --- the disk refuses it --------------------------------------------------------------------------
def test_everybody_is_told_that_the_disk_refuses_it(rig: Rig) -> None:
    """Publishes, subscriptions, members and followers; nothing is left, and it can be created again."""
    rig.engine.subscribe("wide", "*")
    publishes = [rig.send(TOPIC, b"1"), rig.send(TOPIC, b"2", b"3")]
    subscribed, again = Answer(), Answer()
    subscription = rig.engine.subscribe(GROUP, TOPIC, done=subscribed.done)
    rig.engine.subscribe(GROUP, TOPIC, done=again.done)
    member, inbox = rig.join(subscription), rig.follow()
    used = rig.engine.topics.partition_count
    refuse(rig)
    assert codes(*publishes, subscribed, again) == ["storage_failed"] * 4
    assert [error.code for error in (*member.ends, *inbox.ends) if error] == ["storage_failed"] * 2
    assert [each.name for each in rig.engine.subscriptions()] == ["wide"]
    assert rig.engine.subscription("wide").cursors == {}
    assert rig.engine.topics.partition_count == used - 1
    assert rig.publish(TOPIC, b"4").offset == 0
    assert rig.join(rig.engine.subscription("wide")).values == [b"4"]
    rig.crash()
    assert [each.name for each in rig.engine.subscriptions()] == ["wide"]
    assert rig.values() == [b"4"]


def test_a_publisher_that_tries_again_at_once_creates_it(rig: Rig) -> None:
    """Also from its answer, when the old topic is just gone."""
    again = Answer()

    def told(receipts: Any, error: HeadraceError | None) -> None:
        assert isinstance(error, StorageFailed)
        rig.engine.publish(rig.engine.publishing.message(TOPIC, b"2", None, {}), again.done)

    rig.engine.publish(rig.engine.publishing.message(TOPIC, b"1", None, {}), told)
    refuse_once(rig)
    assert again.get()[0].offset == 0
    assert rig.values() == [b"2"]


def refuse_once(rig: Rig) -> None:
    faulty(rig).fail("mkdir", name=TOPIC)
    let_go(rig)


def test_what_is_gathered_fails_with_the_topic(rig: Rig) -> None:
    """A publish of the very turn in which the disk refuses it hears of that, and not of a closed log."""
    first = rig.send(TOPIC, b"1")
    rig.run()
    faulty(rig).fail("mkdir", name=TOPIC)
    rig.workers.release()  # its answer is on its way to the loop
    gathered = rig.ask(
        rig.engine.publish, rig.engine.publishing.message(TOPIC, b"2", None, {}, gather=True)
    )
    let_go(rig)
    assert codes(first, gathered) == ["storage_failed"] * 2


def test_a_subscription_that_was_there_before_stays(rig: Rig) -> None:
    """A crash may have left one without its topic: it is not the disk's to delete."""
    rig.engine.subscribe(GROUP, TOPIC, settings={"max_deliveries": 7})
    rig.run()
    _creation, journal = rig.workers._held
    rig.workers._work(*journal)
    rig.run()
    rig.crash()  # the subscription is in the journal, its topic was not made
    assert rig.engine.topics.get(TOPIC) is None
    rig.workers.hold = True
    first = rig.send(TOPIC, b"1")
    refuse(rig)
    assert codes(first) == ["storage_failed"]
    assert rig.engine.subscription(GROUP).settings.max_deliveries == 7
    rig.publish(TOPIC, b"2")
    assert rig.join().values == [b"2"]


def test_files_of_somebody_else_are_not_overwritten(rig: Rig) -> None:
    """They are adopted at a start, and until then nobody publishes among them."""
    rig.files.make_directory(DATA / TOPIC / "0")
    rig.disk.put(DATA / TOPIC / "0" / f"{0:020d}.log", bytearray(b"something"))
    answer = rig.send(TOPIC, b"x")
    let_go(rig)
    assert isinstance(answer.error, Conflict)
    assert rig.files.names(DATA / TOPIC) == ["0"]


# --- meanwhile ------------------------------------------------------------------------------------
def test_it_is_not_deleted_or_changed_before_it_is_stored(rig: Rig) -> None:
    """Who asks for that waits (``Administration``), or is told to try again."""
    sent = rig.send(TOPIC, b"x")
    for attempt in (
        lambda: rig.engine.delete_topic(TOPIC, lambda error: None),
        lambda: rig.engine.change_topic(TOPIC, {"partitions": 2}),
    ):
        with pytest.raises(QueueFull) as caught:
            attempt()
        assert caught.value.code == "topic_changing"
    waited: list[bool] = []
    when = rig.engine.topics.when_unchanged(TOPIC)
    assert when is not None
    when(lambda: waited.append(True))
    let_go(rig)
    assert waited == [True]
    assert codes(sent) == [None]
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert rig.engine.topics.get(TOPIC) is None


def test_a_broker_that_stops_stores_what_waits(rig: Rig) -> None:
    """It was accepted before, and the directory is not given back while a worker makes files in it."""
    sent = rig.send(TOPIC, b"x")
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    rig.run()
    assert (closed, sent.calls) == ([], 0)
    let_go(rig)
    assert closed == [True]
    assert codes(sent) == [None]
    rig.abandon()
    assert rig.values() == [b"x"]


def test_a_broker_that_stops_while_the_disk_refuses_it(rig: Rig) -> None:
    """Everybody is told, and it stops."""
    sent, subscribed = rig.send(TOPIC, b"x"), Answer()
    rig.engine.subscribe(GROUP, TOPIC, done=subscribed.done)
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    refuse(rig)
    assert closed == [True]
    assert sent.error is not None
    assert subscribed.error is not None
    rig.abandon()
    assert rig.engine.subscriptions() == []


@pytest.mark.parametrize("end", ["kill", "crash"])
@pytest.mark.parametrize("steps", range(1, 12))
def test_a_process_that_ends_in_between(end: str, steps: int) -> None:
    """Nobody was answered. The next one finds the topic, empty, or none; and either way it works."""
    rig = Rig(FaultyFiles(SimulatedFiles()))
    rig.open()
    rig.workers.hold = True
    sent, subscribed = rig.send(TOPIC, b"x"), Answer()
    rig.engine.subscribe(GROUP, TOPIC, done=subscribed.done)
    rig.run()
    faulty(rig).fail(
        None, steps, errno.EIO, repeat=True
    )  # the process does nothing more from here on
    creation, journal = rig.workers._held
    for work, _ in (journal, creation) if steps % 2 else (creation, journal):
        try:
            work()
        except Exception:
            break
    faulty(rig).heal()
    assert (sent.calls, subscribed.calls) == (0, 0)
    rig.workers.hold = False
    getattr(rig, end)()
    rig.subscribe()
    assert rig.publish(TOPIC, b"y").offset == 0
    assert rig.join().values == [b"y"]
    rig.reopen()
    assert rig.values() == [b"y"]


# --- the broker's own topics ------------------------------------------------------------------------
def test_a_staged_batch_is_answered_when_its_topics_are_stored(rig: Rig) -> None:
    """Its own, and the one that its commit goes to: else a commit after a crash would find no topic."""
    rig.engine.staging._make_home()
    let_go(rig)
    rig.workers.hold = True
    staged = rig.ask(rig.engine.staging.stage, TOPIC, None, batch(b"x"))
    rig.run()
    creation = rig.workers._held.popleft()
    rig.workers.release()
    rig.run()
    rig.workers.release()
    rig.run()
    assert staged.calls == 0
    rig.workers._work(*creation)
    let_go(rig)
    piece = staged.get()
    rig.crash()
    assert rig.wait(rig.engine.staging.commit, "job", 1, [piece]) is True
    assert rig.values() == [b"x"]


def test_a_staged_batch_for_a_topic_that_the_disk_refuses(rig: Rig) -> None:
    """It is refused, too."""
    staged = rig.ask(rig.engine.staging.stage, TOPIC, None, batch(b"x"))
    refuse(rig)
    assert codes(staged) == ["storage_failed"]


def test_a_commit_waits_for_a_topic_that_was_deleted_and_is_created_again(rig: Rig) -> None:
    """It is decided only when the topic is stored: if it cannot be, the commit is refused and can be repeated."""
    let_go(rig)
    piece = rig.wait(rig.engine.staging.stage, TOPIC, 0, batch(b"x"))
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.workers.hold = True
    sent = rig.send(TOPIC, b"new")
    committed = rig.ask(rig.engine.staging.commit, "job", 1, [piece])
    rig.run()
    assert committed.calls == 0
    refuse(rig)
    assert codes(sent, committed) == ["storage_failed"] * 2
    rig.workers.hold = True
    sent = rig.send(TOPIC, b"new")
    committed = rig.ask(rig.engine.staging.commit, "job", 1, [piece])
    let_go(rig)
    assert committed.get() is True
    assert sorted(rig.values()) == [b"new", b"x"]


def test_a_delayed_message_waits_for_its_topics(rig: Rig) -> None:
    """For the one in which it waits, and at its time for its own; if the disk refuses that one, it tries again."""
    sent = rig.send(TOPIC, b"x", delay=1)
    refuse(rig, schedule.TOPIC)
    assert codes(sent) == ["storage_failed"]
    rig.publish(TOPIC, b"x", delay=1)
    rig.workers.hold = True
    rig.advance(1.5)
    assert rig.engine.topics.get(TOPIC) is not None
    refuse(rig)
    assert len(rig.engine.schedule) == 1
    rig.advance(5)
    assert rig.values() == [b"x"]
    assert len(rig.engine.schedule) == 0


def test_a_dead_letter_waits_for_its_topic(rig: Rig) -> None:
    """The message is not done before that; if the disk refuses the topic, it is tried again."""
    let_go(rig)
    rig.subscribe(max_deliveries=1)
    rig.publish(TOPIC, b"x")
    rig.workers.hold = True
    inbox = rig.join()
    let_go(rig)
    rig.workers.hold = True
    inbox.nack(*inbox.take())
    rig.run()
    letters = f"{GROUP}.dlq"
    assert rig.engine.topics.get(letters) is not None
    refuse(rig, letters)
    assert rig.engine.subscription_or_none(KEEPER, letters) is None
    assert rig.engine.subscription(GROUP).lag() == 1
    rig.advance(60)
    inbox.leave()
    assert [letter.message.value for letter in rig.letters()] == [b"x"]
    assert rig.engine.subscription(GROUP).lag() == 0


def test_letters_are_redriven_to_a_topic_that_is_created_for_them(rig: Rig) -> None:
    """The redrive waits for it. If the disk refuses it, they stay what they are."""
    let_go(rig)
    rig.subscribe(max_deliveries=1)
    rig.publish(TOPIC, b"x")
    inbox = rig.join()
    inbox.nack(*inbox.take())
    rig.run()
    rig.workers.hold = True
    redrive = rig.engine.dead_letters.redrive
    answer = Answer()
    redrive(GROUP, answer.done, destination="other")
    rig.run()
    assert answer.calls == 0
    refuse(rig, "other")
    assert isinstance(answer.error, StorageFailed)
    assert len(rig.letters()) == 1
    answer = Answer()
    redrive(GROUP, answer.done, destination="other")
    rig.run()
    assert answer.get()["redriven"] == 1
    assert rig.values("other") == [b"x"]


# --- deleting -------------------------------------------------------------------------------------
def test_a_worker_moves_a_deleted_topic_away(rig: Rig) -> None:
    """Meanwhile nobody finds it, and its name is taken. If the disk refuses, it is back as it was, for everybody."""
    let_go(rig)
    rig.subscribe()
    old = rig.follow()
    rig.publish(TOPIC, b"1")
    rig.workers.hold = True
    before = len(faulty(rig).changes)
    deleted = rig.ask(rig.engine.delete_topic, TOPIC)
    rig.run()
    assert faulty(rig).changes[before:] == []
    assert rig.engine.topics.get(TOPIC) is None
    with pytest.raises(QueueFull):
        rig.offer(TOPIC, rig.columns([b"x"]))
    rig.engine.subscribe("late", "*")
    late = rig.follow("*")
    faulty(rig).fail("rename", name=TOPIC)
    let_go(rig)
    faulty(rig).heal()
    assert codes(deleted) == ["storage_failed"]
    rig.publish(TOPIC, b"2")
    assert (old.values, late.values) == ([b"1", b"2"], [b"2"])
    assert rig.join().values == [b"1", b"2"]
    assert rig.join(rig.engine.subscription("late")).values == [b"1", b"2"]
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.crash()
    assert rig.engine.topics.get(TOPIC) is None
    with pytest.raises(SubscriptionNotFound):
        rig.engine.subscription(GROUP)


def test_a_commit_that_rolls_while_its_topic_is_deleted(rig: Rig) -> None:
    """The directory is gone between the file and its sync: that is an error of this publish, not of the disk."""
    let_go(rig)
    rig.wait(rig.engine.create_topic_later, TOPIC, TopicSettings())
    faulty(rig).fail("sync_directory", code=errno.ENOENT, name="0")
    answer = rig.send(TOPIC, b"x")
    rig.run()
    assert codes(answer) == ["storage_failed"]
    assert rig.engine.failed is None


def test_nothing_waits_in_memory() -> None:
    """A broker in memory has nothing to wait for."""
    rig = Rig(directory=None, hold=True)
    assert rig.publish(TOPIC, b"x").offset == 0
    assert rig.engine.topics.find(TOPIC).making is None
