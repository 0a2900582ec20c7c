"""Staged batches: nobody sees them before their commit, and a commit is seen whole or not at all."""

from random import Random
from typing import Any

import pytest

from headrace.errors import HeadraceError, InvalidArgument, MessageNotFound
from headrace.log.batch import encode
from headrace.testing import FaultyFiles, SimulatedFiles
from tests.broker.rig import Rig


def stage(rig: Rig, *values: bytes, topic: str = "lake", partition: int | None = 0) -> Any:
    return rig.wait(rig.engine.staging.stage, topic, partition, encode(rig.columns(values)))


def commit(rig: Rig, number: int, *pieces: Any, name: str = "job") -> None:
    rig.wait(rig.engine.staging.commit, name, number, list(pieces))


def content(rig: Rig, topic: str = "lake") -> list[list[bytes]]:
    """The visible values of each partition."""
    found = []
    for partition in rig.engine.topics.find(topic).partitions:
        log = partition.log
        values: list[bytes] = []
        while log.start_offset + len(values) < log.end_offset:
            for batch in log.read(log.start_offset + len(values)):
                values += batch.values()
        found.append(values)
    return found


def with_topic(**options: Any) -> Rig:
    rig = Rig(**options)
    rig.engine.create_topic("lake", rig.engine.topics.defaults.but({"partitions": 3}))
    return rig


def test_what_is_staged_is_not_seen_before_its_commit() -> None:
    """Staging stores without showing; the commit shows all pieces, in order, in their partitions."""
    rig = with_topic()
    pieces = [stage(rig, b"a1", b"a2"), stage(rig, b"b1", partition=1), stage(rig, b"a3")]
    assert content(rig) == [[], [], []]
    commit(rig, 0, *pieces)
    assert content(rig) == [[b"a1", b"a2", b"a3"], [b"b1"], []]


def test_a_repeated_commit_changes_nothing() -> None:
    """A driver that does not know whether its commit arrived repeats it, also after a restart."""
    rig = with_topic()
    piece = stage(rig, b"once")
    commit(rig, 7, piece)
    commit(rig, 7, piece)
    rig.reopen()
    commit(rig, 7, piece)
    commit(rig, 7, stage(rig, b"the same batch by another attempt"))
    commit(rig, 3, stage(rig, b"long ago"))
    assert content(rig)[0] == [b"once"]


def test_a_subscription_gets_a_commit_like_any_publish() -> None:
    """Members and followers are woken when a commit is released."""
    rig = with_topic()
    inbox = rig.join(rig.subscribe("group", "lake"))
    pieces = [stage(rig, b"one"), stage(rig, b"two", partition=1)]
    rig.run()
    assert inbox.values == []
    commit(rig, 0, *pieces)
    assert sorted(inbox.values) == [b"one", b"two"]


def test_other_publishes_wait_for_a_commit_and_none_is_lost() -> None:
    """While the end is held, a publish to the partition is stored behind the commit."""
    rig = with_topic(hold=True)
    answers = [rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"staged"])))]
    rig.run()
    while rig.workers.release():
        rig.run()
    done = rig.ask(rig.engine.staging.commit, "job", 0, [answers[0].get()])
    published = []
    for number in range(20):
        published.append(rig.send("lake", b"%d" % number, partition=0))
        rig.run()
        rig.workers.release()
        rig.run()
    while rig.workers.release():
        rig.run()
    done.get()
    assert all(answer.get()[0].offset >= 0 for answer in published)
    values = content(rig)[0]
    assert sorted(values) == sorted([b"staged", *(b"%d" % n for n in range(20))])
    assert [v for v in values if v != b"staged"] == [b"%d" % n for n in range(20)]


def test_an_aborted_piece_cannot_be_committed() -> None:
    """An abort gives pieces up, but never those that a commit has decided about."""
    rig = with_topic()
    gone, kept = stage(rig, b"gone"), stage(rig, b"kept")
    rig.wait(rig.engine.staging.abort, [gone])
    with pytest.raises(MessageNotFound) as refused:
        commit(rig, 0, gone)
    assert refused.value.code == "piece_gone"
    commit(rig, 0, kept)
    rig.wait(rig.engine.staging.abort, [kept])
    assert content(rig)[0] == [b"kept"]


def test_pieces_that_nobody_commits_expire() -> None:
    """Orphans of failed attempts are dropped, and their segments with them."""
    rig = with_topic()
    stage(rig, b"orphan")
    rig.advance(3600)
    fresh = stage(rig, b"fresh")
    assert rig.engine.staging.expire(rig.clock.now_ms() - 60_000) == 1
    commit(rig, 0, fresh)
    assert content(rig)[0] == [b"fresh"]


def test_retention_lets_orphans_go_by_itself() -> None:
    """The broker's own housekeeping expires what was staged a day ago."""
    rig = with_topic()
    orphan = stage(rig, b"orphan")
    rig.advance(25 * 3600)
    with pytest.raises(MessageNotFound):
        commit(rig, 0, orphan)


@pytest.mark.parametrize("piece", ["nonsense", "550e8400-e29b-41d4-a716-446655440000"])
def test_what_is_no_piece_is_refused(piece: str) -> None:
    """An id that was never handed out by staging is a clear error."""
    rig = with_topic()
    with pytest.raises(InvalidArgument):
        commit(rig, 0, piece)


def _job(rig: Rig, numbers: range) -> None:
    """A driver: stage three pieces over two partitions for each number, then commit them."""
    for number in numbers:
        pieces = [
            stage(rig, b"%d-a" % number, b"%d-b" % number),
            stage(rig, b"%d-c" % number, partition=1),
            stage(rig, b"%d-d" % number),
        ]
        commit(rig, number, *pieces)


def _expected(numbers: int) -> list[list[bytes]]:
    first = [b"%d-%c" % (n, c) for n in range(numbers) for c in b"abd"]
    return [first, [b"%d-c" % n for n in range(numbers)], []]


def _is_whole(found: list[list[bytes]], numbers: int) -> bool:
    return any(found == _expected(n) for n in range(numbers + 1))


def _ready() -> tuple[Rig, FaultyFiles]:
    """A broker with its topic, on a disk that can be told to fail from now on."""
    rig = with_topic(files=SimulatedFiles())
    rig.close()
    faulty = rig.files = FaultyFiles(rig.files)
    rig.open()
    return rig, faulty


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_at_any_moment_shows_a_commit_whole_or_not(seed: int) -> None:
    """At each disk operation of a job the power fails: no half commit is ever seen, none is doubled."""
    rig, faulty = _ready()
    before = len(faulty.changes)
    _job(rig, range(3))
    operations = len(faulty.changes) - before
    half_applied = 0
    for operation in range(1, operations + 1):
        rig, faulty = _ready()
        faulty.fail(None, operation)
        reached = 0
        try:
            for reached in range(3):
                _job(rig, range(reached, reached + 1))
            reached = 3
        except (HeadraceError, OSError, AssertionError):
            pass  # what a driver sees of it: an error, or no answer
        rig.files = rig.disk
        rig.abandon()
        rig.disk.crash(Random(seed * 10_000 + operation))
        rig._engine = rig.make()
        rig.engine.open()
        assert _is_whole(content(rig), reached + 1), operation  # before anything is finished
        half_applied += any(p.log.is_held for p in rig.engine.topics.find("lake").partitions)
        rig.run()
        assert _is_whole(content(rig), reached + 1), operation
        assert len(content(rig)[1]) >= reached, "what was answered is there"
        _job(rig, range(reached, 3))  # a restarted driver repeats the batch it is not sure of
        assert content(rig) == _expected(3), operation
    assert half_applied, "no cut has left a commit half applied: this has shown nothing"
