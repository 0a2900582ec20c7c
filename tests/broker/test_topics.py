"""Topics: making, changing, finding, adopting and deleting them."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace import limits
from headrace.broker import pace
from headrace.broker.restoring import snapshot
from headrace.errors import (
    Conflict,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    StorageFailed,
    StorageFull,
    TopicNotFound,
)
from headrace.files import Files
from headrace.log.sealed import seal
from headrace.log.storage import DiskStorage
from headrace.model import TopicSettings
from tests.broker.rig import DATA, GROUP, TOPIC, Answer, Rig
from tests.fakes import FaultyFiles, Mains, PowerFailed, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


def names(rig: Rig) -> list[str]:
    return sorted(topic.name for topic in rig.engine.topics)


# --- making -------------------------------------------------------------------------------------
def test_a_topic_is_there_after_a_crash(rig: Rig) -> None:
    """With its settings, its partitions and its identity."""
    topic = rig.engine.create_topic(TOPIC, TopicSettings(partitions=3, retention_hours=1.5))
    rig.crash()
    found = rig.engine.topics.find(TOPIC)
    assert found.settings == TopicSettings(partitions=3, retention_hours=1.5)
    assert (found.incarnation, found.created_ms) == (topic.incarnation, topic.created_ms)
    assert len(found.partitions) == 3


@pytest.mark.parametrize("name", ["a", "x" * 249, "a.b-c_D9", "-", "...", "0"])
def test_names_that_are_fine(rig: Rig, name: str) -> None:
    """Every legal name is a directory that can be made, found again and deleted."""
    rig.publish(name, b"x")
    rig.reopen()
    assert rig.values(name) == [b"x"]
    rig.wait(rig.engine.delete_topic, name)
    rig.reopen()
    assert names(rig) == []


def test_long_names_on_a_real_disk(tmp_path: Path) -> None:
    """The longest name can be made and deleted on a file system that stops at 255 bytes."""
    rig = Rig(Files(), tmp_path / "data")
    rig.publish("x" * 249, b"x")
    rig.wait(rig.engine.delete_topic, "x" * 249)
    assert os.listdir(tmp_path / "data" / "@deleted") == []
    rig.close()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"partitions": 0}, "invalid_setting"),
        ({"partitions": 4097}, "invalid_setting"),
        ({"partitions": True}, "invalid_setting"),
        ({"partitions": "3"}, "invalid_setting"),
        ({"durability": "sometimes"}, "invalid_setting"),
        ({"durable": 1}, "invalid_setting"),
        ({"compression": "lzma"}, "invalid_setting"),
        ({"segment_bytes": 1}, "invalid_setting"),
        ({"retention_hours": -1}, "invalid_setting"),
        ({"retention_hours": float("nan")}, "invalid_setting"),
        ({"retention_bytes": 1.5}, "invalid_setting"),
        ({"max_queue_size": 0}, "invalid_setting"),
        ({"message_ttl_ms": 0}, "invalid_setting"),
        ({"colour": "red"}, "unknown_setting"),
    ],
)
def test_bad_settings(rig: Rig, settings: dict[str, Any], code: str) -> None:
    """A setting that makes no sense is refused by name, when a topic is made and when changed."""
    with pytest.raises(InvalidArgument) as caught:
        TopicSettings.of(settings)
    assert caught.value.code == code
    assert next(iter(settings)) in caught.value.message
    topic = rig.engine.create_topic(TOPIC)
    with pytest.raises(InvalidArgument):
        rig.wait(rig.engine.change_topic, TOPIC, settings)
    assert topic.settings == TopicSettings()


def test_a_name_is_taken_once(rig: Rig) -> None:
    """The second one is told so; the first one is not touched."""
    rig.numbers(1)
    with pytest.raises(Conflict) as caught:
        rig.engine.create_topic(TOPIC)
    assert caught.value.code == "topic_exists"
    assert rig.values() == [b"0"]


def test_partitions_have_a_bound(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All topics together may have so many; a topic that would go beyond is not made."""
    monkeypatch.setattr(limits, "PARTITIONS_TOTAL_MAX", 10)
    rig.engine.create_topic("a", TopicSettings(partitions=8))
    rig.run()
    for attempt in (
        lambda: rig.engine.create_topic("b", TopicSettings(partitions=3)),
        lambda: rig.engine.change_topic("a", {"partitions": 11}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            attempt()
        assert caught.value.code == "too_many_partitions"
    rig.engine.create_topic("b", TopicSettings(partitions=2))
    rig.wait(rig.engine.delete_topic, "a")
    rig.engine.create_topic("c", TopicSettings(partitions=8))


def test_making_fails_at_every_step_and_leaves_nothing(rig: Rig) -> None:
    """Whichever call the disk refuses: an error in plain words, no topic, and it works later."""
    for number in range(1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = Rig(files)
        rig.open()
        fault = files.fail(None, number, errno.ENOSPC, repeat=True)
        topic = rig.engine.create_topic(TOPIC, TopicSettings(partitions=2))
        rig.run()
        if topic.refusal is None:
            assert fault.hits == 0
            break
        assert isinstance(topic.refusal, StorageFull)
        assert (names(rig), rig.engine.topics.partition_count) == ([], 0)
        files.heal()
        rig.engine.create_topic(TOPIC, TopicSettings(partitions=2))
        rig.publish(TOPIC, b"x", partition=1)
        rig.crash()
        assert rig.values(TOPIC, 1) == [b"x"]
    assert number > 5


# --- by a worker --------------------------------------------------------------------------------
def test_a_worker_touches_the_disk(rig: Rig) -> None:
    """Until it has, nobody finds the topic; its name and its partitions are taken all the same."""
    rig.open()
    rig.workers.hold = True
    before = rig.files.names(DATA)
    made = rig.ask(rig.engine.create_topic_later, TOPIC, TopicSettings(partitions=3))
    rig.run()
    assert rig.files.names(DATA) == before
    assert (made.calls, names(rig), rig.engine.topics.partition_count) == (0, [], 3)
    with pytest.raises(QueueFull) as caught:
        rig.offer(TOPIC, rig.columns([b"x"]))
    assert (caught.value.code, caught.value.retryable) == ("topic_changing", True)
    assert rig.workers.release() == 1
    rig.run()
    assert made.get() is rig.engine.topics.find(TOPIC)
    grown = rig.ask(rig.engine.change_topic, TOPIC, {"partitions": 5})
    rig.run()
    assert rig.files.names(DATA / TOPIC) == ["0", "1", "2", "topic.json"]
    rig.workers.hold = False
    assert rig.workers.release() == 1
    rig.run()
    assert len(grown.get().partitions) == rig.engine.topics.partition_count == 5
    rig.reopen()
    assert len(rig.engine.topics.find(TOPIC).partitions) == 5


def test_many_partitions_cost_no_more_syncs_than_one() -> None:
    """A sync takes a millisecond, and a topic has up to thousands of partitions."""
    counts = []
    for partitions in (1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = Rig(files)
        rig.open()
        before = files.counts["sync"] + files.counts["sync_directory"]
        rig.wait(rig.engine.create_topic_later, TOPIC, TopicSettings(partitions=partitions))
        counts.append(files.counts["sync"] + files.counts["sync_directory"] - before)
    assert counts[0] == counts[1]


def test_a_worker_that_fails_leaves_nothing(rig: Rig) -> None:
    """Neither a topic nor taken partitions; and it works later."""
    for number in range(1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = Rig(files)
        rig.open()
        fault = files.fail(None, number, errno.ENOSPC, repeat=True)
        try:
            rig.wait(rig.engine.create_topic_later, TOPIC, TopicSettings(partitions=2))
        except StorageFull:
            pass
        else:
            assert fault.hits == 0
            break
        assert (names(rig), rig.engine.topics.partition_count) == ([], 0)
        files.heal()
        rig.publish(TOPIC, b"x")
    assert number > 5


def test_closing_waits_for_a_worker(rig: Rig) -> None:
    """Nobody else may open the directory while a topic is being made in it."""
    rig.open()
    rig.workers.hold = True
    made = rig.ask(rig.engine.create_topic_later, TOPIC, TopicSettings(partitions=2))
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    rig.workers.hold = False
    rig.run()
    assert (closed, made.calls) == ([], 0)
    rig.workers.release()
    rig.run()
    assert (closed, made.calls) == ([True], 1)
    rig.abandon()
    assert names(rig) == [TOPIC]


# --- changing -----------------------------------------------------------------------------------
def test_partitions_grow_and_never_shrink(rig: Rig) -> None:
    """New ones are empty and durable; fewer, or another kind of storage, is refused."""
    rig.numbers(1)
    rig.wait(rig.engine.change_topic, TOPIC, {"partitions": 3, "retention_hours": None})
    assert rig.publish(TOPIC, b"x", partition=2).offset == 0
    rig.crash()
    topic = rig.engine.topics.find(TOPIC)
    assert topic.settings.retention_hours is None
    assert topic.end_offsets() == [1, 0, 1]
    for change in ({"partitions": 2}, {"durable": False}):
        with pytest.raises(Conflict) as caught:
            rig.wait(rig.engine.change_topic, TOPIC, change)
        assert caught.value.code == "topic_settings_fixed"
    with pytest.raises(TopicNotFound):
        rig.wait(rig.engine.change_topic, "nothing", {})


def test_a_change_that_fails_changes_nothing() -> None:
    """The disk refuses any step of it: the settings are the old ones, now and after a restart."""
    for number in range(1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = Rig(files)
        rig.numbers(1)
        files.fail(None, number, repeat=True)
        try:
            rig.wait(rig.engine.change_topic, TOPIC, {"partitions": 2, "message_ttl_ms": 5})
        except StorageFailed:
            pass
        else:
            break
        topic = rig.engine.topics.find(TOPIC)
        assert (topic.settings.partitions, len(topic.partitions)) == (1, 1)
        assert topic.partitions[0].message_ttl_ms is None
        files.heal()
        rig.numbers(1)
        rig.kill()
        assert len(rig.values()) == 2
    assert number > 3


# --- deleting -----------------------------------------------------------------------------------
def test_a_deleted_topic_is_gone(rig: Rig) -> None:
    """Its records, its files and its groups; a new one of the same name begins at 0."""
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(3)
    inbox.ack(*inbox.take())
    rig.wait(rig.engine.delete_topic, TOPIC)
    with pytest.raises(TopicNotFound):
        rig.engine.topics.find(TOPIC)
    assert rig.engine.subscriptions() == []
    rig.numbers(1)
    assert rig.values() == [b"0"]
    rig.crash()
    assert rig.values() == [b"0"]
    assert rig.join(rig.subscribe()).values == [b"0"]


def test_what_cannot_be_deleted(rig: Rig) -> None:
    """A topic that is not there, and the broker's own."""
    rig.publish(TOPIC, b"x", delay=5)
    for name, code in [("nothing", "topic_not_found"), ("__scheduled", "invalid_topic")]:
        with pytest.raises(HeadraceError) as caught:
            rig.engine.delete_topic(name, lambda error: None)
        assert caught.value.code == code
    assert len(rig.engine.schedule) == 1


def filled(files: FaultyFiles) -> Rig:
    rig = Rig(files, topic={"partitions": 2})
    rig.subscribe()
    rig.subscribe("wide", "*")
    rig.numbers(3, partition=0)
    rig.numbers(3, partition=1)
    rig.numbers(1, topic="other", partition=0)
    return rig


def test_a_disk_that_refuses_to_delete() -> None:
    """Whichever call fails, the topic is whole or gone, for us and for the next process."""
    refused = unsure = 0
    for number in range(1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = filled(files)
        fault = files.fail(None, number)
        answer = Answer()
        try:
            rig.engine.delete_topic(TOPIC, answer.done)
            rig.run()
            files.heal()
            answer.get()
        except StorageFailed:
            files.heal()
            refused += 1
            assert rig.values(TOPIC, 1) == [b"0", b"1", b"2"]
            assert len(rig.join().messages) == 6
            rig.numbers(1, partition=0)
            rig.kill()
            assert rig.values(TOPIC, 0) == [b"0", b"1", b"2", b"0"]
        except OutcomeUnknown:
            unsure += 1
            assert names(rig) == ["other"]
        else:
            rig.kill()
            assert names(rig) == ["other"]
        assert rig.values("other") == [b"0"]
        if not fault.hits:
            break
    assert refused >= 2
    assert unsure >= 2


@pytest.mark.parametrize("ordered", [False, True])
def test_deleting_survives_a_crash_at_every_step(ordered: bool) -> None:
    """The power fails at the Nth call: afterwards the topic is whole or gone, never half."""
    whole = gone = 0
    for number in range(1, 100):
        files = FaultyFiles(SimulatedFiles())
        rig = filled(files)
        fault = files.fail(None, number, repeat=True)
        try:
            rig.ask(rig.engine.delete_topic, TOPIC)
            rig.run()
        except HeadraceError:
            pass
        hit = fault.hits
        files.heal()
        rig.crash(Random(number), ordered=ordered)
        assert rig.values("other") == [b"0"]
        if TOPIC in names(rig):
            whole += 1
            for partition in (0, 1):
                assert rig.values(TOPIC, partition) == [b"0", b"1", b"2"]
            assert rig.engine.subscription("wide", "*").lag() == 7
        else:
            gone += 1
            assert rig.engine.subscription("wide", "*").lag() == 1
            rig.numbers(1)  # and the name is free
        assert not rig.files.exists(DATA / "@deleted") or not rig.files.names(DATA / "@deleted")
        if not hit:
            break
    assert whole
    assert gone


def test_graves_that_cannot_be_emptied_do_not_bar_the_start() -> None:
    """They are tried again at the next one."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.numbers(1)
    files.fail("remove_tree", repeat=True)
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.reopen()
    assert len(rig.files.names(DATA / "@deleted")) == 1
    files.heal()
    rig.reopen()
    assert not rig.files.exists(DATA / "@deleted")


def test_publishes_on_their_way_into_a_deleted_topic(rig: Rig) -> None:
    """Whoever waits is answered: with an offset or with an error."""
    rig.numbers(1)
    rig.workers.hold = True
    answers = [rig.send(TOPIC, b"x") for _ in range(3)]
    rig.run()
    late = rig.ask(rig.engine.delete_topic, TOPIC)
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    assert [answer.calls for answer in answers] == [1, 1, 1]
    assert late.get() == ()


# --- adopting -----------------------------------------------------------------------------------
def test_a_topic_without_its_settings_is_adopted(rig: Rig) -> None:
    """The records count, not the file about them; groups begin again at the earliest."""
    rig.engine.create_topic(TOPIC, TopicSettings(partitions=3, retention_hours=None))
    rig.subscribe(start="latest")
    inbox = rig.join()
    for partition in range(3):
        rig.publish(TOPIC, b"%d" % partition, partition=partition)
    inbox.ack(*inbox.take())
    rig.close()
    rig.files.remove(DATA / TOPIC / "topic.json")
    rig.open()
    topic = rig.engine.topics.find(TOPIC)
    assert topic.settings == TopicSettings(partitions=3, retention_hours=None)
    assert sorted(rig.join().values) == [b"0", b"1", b"2"]
    rig.reopen()
    assert rig.engine.topics.find(TOPIC).incarnation == topic.incarnation


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"settings": []}',
        b'{"settings": {}, "incarnation": "x", "created_ms": 0}',
        b'{"settings": {"partitions": -1}, "incarnation": 1, "created_ms": 0}',
        bytes(100),
        b"\xff\xfe",
    ],
)
def test_damaged_settings_are_no_reason_to_lose_data(rig: Rig, content: bytes) -> None:
    """Whatever is in ``topic.json``, the records are served."""
    rig.numbers(3)
    rig.close()
    rig.disk.put(DATA / TOPIC / "topic.json", content)
    assert rig.values() == [b"0", b"1", b"2"]


def test_a_flipped_bit_in_the_settings_is_found(rig: Rig) -> None:
    """No flipped bit gives a topic other settings: they are as they were, or the defaults without retention."""
    settings = TopicSettings(retention_hours=72.5, segment_bytes=1 << 20, durability="interval")
    rig.engine.create_topic(TOPIC, settings)
    rig.numbers(1)
    rig.close()
    path = DATA / TOPIC / "topic.json"
    raw = rig.files.read_file(path)
    adopted = TopicSettings(retention_hours=None)
    for at in range(len(raw)):
        for bit in (0, 1, 4):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            rig.disk.put(path, changed)
            [found] = DiskStorage.topics(rig.make().topics.storage, TopicSettings())  # type: ignore[arg-type]
            assert found.settings in (settings, adopted), (at, bit)
            if found.settings == settings:
                assert found.incarnation == json.loads(raw)["incarnation"]


def test_settings_of_an_earlier_version_are_read(rig: Rig) -> None:
    """They had no checksum."""
    rig.engine.create_topic(TOPIC, TopicSettings(retention_hours=72.5))
    rig.close()
    path = DATA / TOPIC / "topic.json"
    meta = json.loads(rig.files.read_file(path))
    del meta["checksum"]
    rig.disk.put(path, json.dumps(meta, indent=2).encode())
    assert rig.engine.topics.find(TOPIC).settings.retention_hours == 72.5


def test_settings_of_a_newer_version_are_ignored(rig: Rig) -> None:
    """What is not known is passed over, what is missing has its default."""
    rig.numbers(1)
    rig.close()
    path = DATA / TOPIC / "topic.json"
    meta = json.loads(rig.files.read_file(path))
    del meta["checksum"]
    meta["settings"] = {"colour": "red", "retention_hours": 7}
    rig.disk.put(path, seal(meta))
    assert rig.engine.topics.find(TOPIC).settings == TopicSettings(retention_hours=7)


def test_what_is_no_topic_is_left_alone(rig: Rig) -> None:
    """A stray file or directory stays as it is and bars nothing."""
    rig.numbers(1)
    rig.close()
    rig.disk.put(DATA / "notes.txt", b"hello")
    rig.disk.put(DATA / "lost+found" / "x", b"y")
    rig.disk.put(DATA / "empty" / "readme", b"z")
    rig.disk.put(DATA / "odd" / "²" / "x", b"z")
    rig.open()
    assert names(rig) == [TOPIC]
    assert rig.files.read_file(DATA / "empty" / "readme") == b"z"


def test_memory_topics_come_back_empty(rig: Rig) -> None:
    """The topic and its groups are there after a restart, the records are not."""
    rig.engine.create_topic(TOPIC, TopicSettings(durable=False))
    rig.subscribe()
    inbox = rig.join()
    rig.numbers(5)
    inbox.ack(*inbox.take())
    rig.reopen()
    assert rig.engine.topics.find(TOPIC).settings.durable is False
    inbox = rig.join()
    assert inbox.messages == []
    rig.numbers(2)
    assert inbox.offsets == [0, 1]


def test_groups_of_a_deleted_topic_do_not_meet_its_namesake(rig: Rig) -> None:
    """A position in the old topic says nothing about the new one, even if the journal is behind."""
    rig.subscribe("wide", "*")
    inbox = rig.join(rig.engine.subscription("wide"))
    rig.numbers(5)
    inbox.ack(*inbox.take())
    rig.flush()
    journal = rig.files.read_file(DATA / "@subscriptions.journal")
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.numbers(3)
    rig.close()
    rig.disk.put(DATA / "@subscriptions.journal", journal)
    rig.open()
    assert rig.join(rig.engine.subscription("wide")).offsets == [0, 1, 2]
    assert GROUP not in [s.name for s in rig.engine.subscriptions()]


def test_many_subscriptions_go_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is gone at once; its name is free when the last of them is gone."""
    rig.numbers(3)
    for number in range(5):
        rig.subscribe(f"group-{number}")
    rig.subscribe("wide", "*")
    rig.flush()
    left: list[Callable[[], object]] = []
    monkeypatch.setattr(pace, "PIECE_S", -1.0)
    monkeypatch.setattr(rig.engine.pace, "soon", left.append)
    deleted = rig.ask(rig.engine.delete_topic, TOPIC)
    rig.run()
    turns = 0
    while left:
        rig.run()
        assert (deleted.calls, names(rig)) == (0, [])
        with pytest.raises(QueueFull) as caught:
            rig.offer(TOPIC, rig.columns([b"x"]))
        assert caught.value.code == "topic_changing"
        assert rig.engine.state._journal is not None
        rig.engine.state._journal.rewrite(list(snapshot(rig.engine)))
        rig.flush()
        left.pop()()
        turns += 1
    rig.run()
    assert turns == 6
    assert (deleted.calls, deleted.error) == (1, None)
    assert [s.name for s in rig.engine.subscriptions()] == ["wide"]
    monkeypatch.undo()
    rig.numbers(1)
    rig.crash()
    assert [s.name for s in rig.engine.subscriptions()] == ["wide"]
    assert rig.engine.subscription("wide").lag() == 1


# --- topics that nobody creates on purpose --------------------------------------------------------
def test_publishing_and_subscribing_cannot_take_all_partitions(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are left for topics that are created explicitly."""
    monkeypatch.setattr(limits, "PARTITIONS_TOTAL_MAX", 12)
    monkeypatch.setattr(limits, "PARTITIONS_RESERVED", 5)
    calls = [
        lambda name: rig.publish(name, b"x"),
        lambda name: rig.subscribe("billing", name),
        lambda name: rig.follow(name),
    ]
    for number in range(7):
        calls[number % 3](f"topic-{number}")
    for number, call in enumerate(calls):
        with pytest.raises(InvalidArgument) as caught:
            call(f"more-{number}")
        assert caught.value.code == "too_many_partitions"
    rig.engine.create_topic("on-purpose", TopicSettings(partitions=5))


def test_topics_are_not_created_faster_than_at_a_rate(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst, and then so many a second, whoever asks; an explicit creation is not slowed down."""
    monkeypatch.setattr(limits, "PARTITIONS_AUTO_BURST", 3)
    monkeypatch.setattr(limits, "PARTITIONS_AUTO_RATE", 2.0)
    rig.engine.topics._automatic = 3.0
    for number in range(3):
        rig.publish(f"topic-{number}", b"x")
    with pytest.raises(QueueFull) as caught:
        rig.publish("late", b"x")
    assert (caught.value.code, caught.value.retryable) == ("creating_too_fast", True)
    rig.engine.create_topic("on-purpose")
    rig.publish("topic-0", b"x")
    rig.advance(1)
    rig.publish("late", b"x")
    rig.publish("later", b"x")
    with pytest.raises(QueueFull):
        rig.follow("too-late")


def test_what_a_killed_broker_did_not_sync_is_synced_by_the_next() -> None:
    """Partitions are added, the broker is killed before the new name of topic.json is synced, the next one takes
    messages for them, and then the power fails: they are there."""
    lost = []
    for countdown in range(1, 12):
        files = Mains(SimulatedFiles(), ordered=True)
        rig = Rig(files)
        rig.engine.create_topic(TOPIC, TopicSettings())
        rig.publish(TOPIC, b"first")
        files.plan(countdown, 0, kills=True)
        with suppress(PowerFailed):
            rig.engine.change_topic(TOPIC, {"partitions": 2})
        files.countdown = 0
        rig.abandon()
        files.restored()
        rig.disk.kill()
        rig.open()
        count = len(rig.engine.topics.find(TOPIC).partitions)
        rig.publish(TOPIC, b"acknowledged", partition=count - 1)
        for seed in range(5):
            other = Rig(files.disk.clone())
            other.disk.crash(Random(seed), ordered=True)
            partitions = other.engine.topics.find(TOPIC).partitions
            found = [value for p in partitions for value in other.values(TOPIC, p.number)]
            if b"acknowledged" not in found:
                lost.append((countdown, seed))
    assert lost == []


def test_a_deleted_topic_removes_no_file_of_the_next_one() -> None:
    """Its old segments are removed by their names, which the next topic has, too: that one has to wait."""
    rig = Rig()
    for number in range(3):
        rig.publish(TOPIC, b"%d" % number)
        rig.roll()
    rig.workers.hold = True
    rig.log().drop_before(2)
    slow = rig.workers._held.popleft()
    rig.workers.hold = False
    deleted = rig.ask(rig.engine.delete_topic, TOPIC)
    rig.run()
    with pytest.raises(QueueFull):
        rig.engine.create_topic(TOPIC)
    rig.workers.submit(*slow)
    rig.run()
    deleted.get()
    rig.publish(TOPIC, b"new")
    assert rig.segments() == [0]
