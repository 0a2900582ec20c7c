"""Staged batches: nobody sees them before their commit, and a commit is seen whole or not at all."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from headrace import limits
from headrace.broker import staging
from headrace.broker.publishing import RESERVED_PRODUCERS
from headrace.broker.staged_commit import StagedPiece
from headrace.doctor.commands import examine
from headrace.errors import (
    Closed,
    DataCorrupt,
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    QueueFull,
    TooLarge,
    TopicNotFound,
)
from headrace.log.batch import encode
from headrace.log.interface import Append
from tests.broker.rig import DATA, Answer, Rig
from tests.fakes import FaultyFiles, SimulatedFiles, SlowStorage


def stage(
    rig: Rig, *values: bytes, topic: str = "lake", partition: int | None = 0, **more: Any
) -> Any:
    batch = encode(rig.columns(values, **{k: more.pop(k) for k in ("timestamps",) if k in more}))
    return rig.wait(rig.engine.staging.stage, topic, partition, batch, **more)


def commit(rig: Rig, number: int, *pieces: Any, name: str = "job") -> bool:
    first: bool = rig.wait(rig.engine.staging.commit, name, number, list(pieces))
    return first


def ask(rig: Rig, number: int, *pieces: Any, name: str = "job") -> Answer:
    return rig.ask(rig.engine.staging.commit, name, number, list(pieces))


def step(rig: Rig, until: Callable[[], object]) -> None:
    """Let the disk do one job after the other until the condition holds."""
    rig.run()
    while not until():
        assert rig.workers.release(1), "nothing is left to be done"
        rig.run()


def finish(rig: Rig) -> None:
    rig.run()
    while rig.workers.release():
        rig.run()


def content(rig: Rig, topic: str = "lake") -> list[list[bytes]]:
    """The visible values of each partition."""
    found = []
    for partition in rig.engine.topics.find(topic).partitions:
        log = partition.log
        values: list[bytes] = []
        while log.start_offset + len(values) < log.end_offset:
            for batch in rig.complete(partial(log.read, log.start_offset + len(values))):
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
    assert commit(rig, 7, piece) is True
    assert commit(rig, 7, piece) is False
    rig.reopen()
    assert commit(rig, 7, piece) is False
    assert commit(rig, 7, stage(rig, b"the same batch by another attempt")) is False
    assert commit(rig, 3, stage(rig, b"long ago")) is False
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
    before_ms = rig.clock.now_ms() - 60_000
    assert rig.complete(lambda: rig.engine.staging.expire(before_ms)) == 1
    commit(rig, 0, fresh)
    assert content(rig)[0] == [b"fresh"]


def test_retention_lets_orphans_go_by_itself() -> None:
    """The broker's own housekeeping expires what was staged a day ago."""
    rig = with_topic()
    orphan = stage(rig, b"orphan")
    rig.advance(25 * 3600)
    with pytest.raises(MessageNotFound):
        commit(rig, 0, orphan)


def slow_rig() -> tuple[Rig, SlowStorage]:
    """Its logs take longer to read than the clock's smallest step."""
    rig = Rig()
    engine = rig.make()
    storage = engine.topics.storage = SlowStorage(engine.topics.storage, rig.loop, delay_s=0.05)
    engine.open()
    rig._engine = engine
    engine.create_topic("lake")
    return rig, storage


def test_orphans_are_looked_for_once_in_a_round() -> None:
    """A disk that takes a while is asked for the same time again, and not for one that was meanwhile."""
    rig, storage = slow_rig()
    stage(rig, b"kept")
    rig.engine.staging.expire_orphans()
    rig.advance(1)
    assert sum(log.waited for log in storage.logs) == 1


@pytest.mark.parametrize("piece", ["nonsense", "550e8400-e29b-41d4-a716-446655440000"])
def test_what_is_no_piece_is_refused(piece: str) -> None:
    """An id that was never handed out by staging is a clear error."""
    rig = with_topic()
    with pytest.raises(InvalidArgument):
        commit(rig, 0, piece)


# --- what is no piece, or not any more -----------------------------------------------------------
def test_a_piece_is_what_its_id_says() -> None:
    """An id that was changed by hand does not lead a batch elsewhere, nor cut it."""
    rig = with_topic()
    piece = stage(rig, b"one", b"two")
    home, offset, _, partition, topic = piece.split("/")
    for wrong in (
        f"{home}/{offset}/1/{partition}/{topic}",
        f"{home}/{offset}/2/1/{topic}",
        f"{home}/1/1/{partition}/{topic}",
        f"{home}/{offset}/2/{partition}/__staged",
    ):
        with pytest.raises(HeadraceError):
            commit(rig, 0, wrong)
    rig.reopen()
    with pytest.raises(DataCorrupt) as refused:
        commit(rig, 0, f"{home}/{offset}/1/{partition}/{topic}")
    assert refused.value.code == "piece_lost"
    assert commit(rig, 0, piece) is True


def test_a_piece_of_another_broker_is_not_taken_for_one_of_ours() -> None:
    """A broker that was made anew has other pieces at the same places."""
    old, new = with_topic(seed=1), with_topic(seed=2)
    piece = stage(old, b"theirs")
    ours = stage(new, b"ours")
    with pytest.raises(MessageNotFound) as refused:
        commit(new, 0, piece)
    assert refused.value.code == "piece_gone"
    new.wait(new.engine.staging.abort, [piece])
    assert commit(new, 0, ours) is True


def test_a_piece_is_in_one_commit_only() -> None:
    """While a commit is under way, and after it; not twice in one; and a repetition takes nobody's."""
    rig = with_topic(hold=True)
    staged = rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"x"])))
    finish(rig)
    piece = staged.get()
    done = ask(rig, 0, piece)
    with pytest.raises(MessageNotFound):
        ask(rig, 0, piece, name="thief")
    rig.ask(rig.engine.staging.abort, [piece])
    empty = ask(rig, 5, name="other")
    finish(rig)
    assert empty.get() is True
    ask(rig, 4, piece, name="other")
    finish(rig)
    assert done.get() is True
    assert content(rig)[0] == [b"x"]
    with pytest.raises(InvalidArgument):
        ask(rig, 1, piece, piece)


def test_too_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit stands in one entry of the journal, which has a bound."""
    monkeypatch.setattr(limits, "COMMIT_PIECES_MAX", 2)
    rig = with_topic()
    with pytest.raises(TooLarge) as refused:
        commit(rig, 0, *[stage(rig, b"x") for _ in range(3)])
    assert refused.value.code == "commit_too_large"


def test_what_stands_against_a_commit_is_found_before_it_is_decided() -> None:
    """A topic that is gone, or full, refuses; later the same commit may pass."""
    rig = with_topic()
    rig.engine.create_topic("small", rig.engine.topics.defaults.but({"max_queue_size": 1}))
    rig.engine.create_topic("brief")
    full, gone = stage(rig, b"a", b"b", topic="small"), stage(rig, b"c", topic="brief")
    with pytest.raises(QueueFull):
        commit(rig, 0, full)
    rig.wait(rig.engine.delete_topic, "brief")
    with pytest.raises(TopicNotFound):
        commit(rig, 0, gone)
    assert "job" not in rig.engine.staging.decisions
    rig.wait(rig.engine.change_topic, "small", {"max_queue_size": 2})
    assert commit(rig, 0, full) is True


# --- staging for a commit ------------------------------------------------------------------------
def test_what_was_staged_for_a_commit_goes_with_it() -> None:
    """Pieces of failed attempts are dropped; those of later commits and of others are not."""
    rig = with_topic()
    orphans = [stage(rig, b"orphan", name="job", number=n) for n in (3, 4)]
    others = [stage(rig, b"later", name="job", number=5), stage(rig, b"x", name="b", number=1)]
    commit(rig, 4, stage(rig, b"kept", name="job", number=4))
    for orphan in orphans:
        with pytest.raises(MessageNotFound):
            commit(rig, 9, orphan, name="late")
    commit(rig, 9, *others, name="late")
    assert content(rig)[0] == [b"kept", b"later", b"x"]
    assert rig.engine.staging._owned == {
        "job": {5: [others_piece(others[0])]},
        "b": {1: [others_piece(others[1])]},
    }
    for name, number in (("job", 5), ("b", 1)):
        commit(rig, number, name=name)
    assert rig.engine.staging._owned == {}


def others_piece(piece: str) -> StagedPiece:
    parsed = StagedPiece.parse(piece)
    assert parsed is not None
    return parsed[1]


def test_name_and_number_are_given_together() -> None:
    """One without the other says nothing."""
    rig = with_topic()
    for half in ({"name": "job"}, {"number": 1}, {"name": "no name", "number": 1}):
        with pytest.raises(InvalidArgument):
            stage(rig, b"x", **half)


# --- times ---------------------------------------------------------------------------------------
def test_times_are_those_of_the_records_not_of_staging() -> None:
    """What was staged before and at the same time has no influence; only the partition's own order."""
    rig = with_topic()
    now = rig.clock.now_ms()
    early = stage(rig, b"a", b"b", timestamps=[now - 9_000, now - 8_000])
    stage(rig, b"between")
    later = stage(rig, b"c", b"d", timestamps=[now - 7_000, now - 9_500])
    commit(rig, 0, early, later)
    times = [message.timestamp for message in rig.read("lake")]
    assert times == [now - 9_000, now - 8_000, now - 7_000, now - 7_000]


def test_the_doctor_finds_nothing_wrong_with_what_is_staged() -> None:
    """Times that are not in order are the client's, and no damage."""
    rig = with_topic()
    now = rig.clock.now_ms()
    stage(rig, b"a", b"b", timestamps=[now - 1_000, now - 9_000])
    stage(rig, b"c", timestamps=[now - 20_000])
    rig.close()
    report = examine(DATA, rig.files)
    assert report.findings == []


# --- one after the other -------------------------------------------------------------------------
def test_the_next_commit_of_a_name_waits_for_the_last() -> None:
    """The journal knows one commit of each name; none is forgotten by the next."""
    rig = with_topic(hold=True)
    staged = [
        rig.ask(rig.engine.staging.stage, "lake", n % 2, encode(rig.columns([b"%d" % n])))
        for n in range(3)
    ]
    finish(rig)
    answers = [ask(rig, n, staged[n].get()) for n in range(3)]
    again = ask(rig, 1, staged[1].get())
    step(rig, lambda: answers[0].calls)
    assert answers[1].calls == 0
    finish(rig)
    assert [answer.get() for answer in answers] == [True, True, True]
    assert again.get() is False
    assert content(rig)[:2] == [[b"0", b"2"], [b"1"]]


def test_a_repetition_waits_for_the_first_one() -> None:
    """Whoever asks while it is decided or applied is answered when it is done."""
    rig = with_topic(hold=True)
    staged = rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"x"])))
    finish(rig)
    first, second = ask(rig, 0, staged.get()), ask(rig, 0, staged.get())
    step(rig, lambda: rig.log("lake").is_held)
    third = ask(rig, 0, staged.get())
    assert not any(answer.calls for answer in (first, second, third))
    finish(rig)
    assert [first.get(), second.get(), third.get()] == [True, False, False]


def test_after_a_kill_a_repetition_waits_for_the_unfinished_commit() -> None:
    """An answered commit is visible, also when the broker that decided it was killed."""
    rig = with_topic(hold=True)
    staged = rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"x"])))
    finish(rig)
    ask(rig, 0, staged.get())
    step(rig, lambda: rig.log("lake").is_held)
    rig.kill()
    again = ask(rig, 0, staged.get())
    rig.run()
    assert (again.calls, content(rig)[0]) == (0, [])
    finish(rig)
    assert again.get() is False
    assert content(rig)[0] == [b"x"]


def test_closing_tells_also_those_whose_commit_is_only_being_decided() -> None:
    """Nobody waits for a broker that is gone; asking again shows what became of it."""
    rig = with_topic(hold=True)
    staged = rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"x"])))
    finish(rig)
    answers = [ask(rig, 0, staged.get()), ask(rig, 0, staged.get()), ask(rig, 1)]
    rig.engine.close(lambda: None)
    finish(rig)
    for answer in answers:
        with pytest.raises(Closed):
            answer.get()
    rig._engine = None
    rig.open()
    finish(rig)
    assert content(rig)[0] == [b"x"]


def test_closing_tells_those_who_wait_and_the_commit_is_finished_later() -> None:
    """It is decided; the next start does the rest."""
    rig = with_topic(hold=True)
    staged = rig.ask(rig.engine.staging.stage, "lake", 0, encode(rig.columns([b"x"])))
    finish(rig)
    done = ask(rig, 0, staged.get())
    step(rig, lambda: rig.log("lake").is_held)
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    finish(rig)
    assert closed == [True]
    with pytest.raises(Closed):
        done.get()
    rig._engine = None
    rig.open()
    finish(rig)
    assert content(rig)[0] == [b"x"]
    again = ask(rig, 0, staged.get())
    finish(rig)
    assert again.get() is False


# --- names ---------------------------------------------------------------------------------------
def test_a_name_that_nobody_uses_is_forgotten() -> None:
    """After thirty days, also over a restart; should it come back, its commits are new ones."""
    rig = with_topic()
    commit(rig, 7, stage(rig, b"a"))
    commit(rig, 0, stage(rig, b"b"), name="busy")
    rig.clock.jump(29 * 86_400_000)
    commit(rig, 1, stage(rig, b"c"), name="busy")
    rig.reopen()
    assert set(rig.engine.staging.decisions) == {"job", "busy"}
    rig.clock.jump(2 * 86_400_000)
    rig.advance(20)
    assert set(rig.engine.staging.decisions) == {"busy"}
    assert commit(rig, 7, stage(rig, b"d")) is True
    assert commit(rig, 0, name="busy") is False
    assert rig.log("lake").end_offset == 4


def test_names_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used longest ago make room."""
    monkeypatch.setattr(limits, "COMMIT_NAMES_MAX", 2)
    rig = with_topic()
    for name in ("a", "b", "a", "c"):
        commit(rig, rig.clock.now_ms(), stage(rig, b"x"), name=name)
        rig.advance(1)
    rig.advance(20)
    assert set(rig.engine.staging.decisions) == {"a", "c"}


def test_a_lost_journal_shows_nothing_twice() -> None:
    """What lies in the staging log may have been committed; nobody can know, so it is gone."""
    rig = with_topic()
    shown, waiting = stage(rig, b"shown"), stage(rig, b"waiting")
    commit(rig, 0, shown)
    rig.close()
    rig.files.remove(DATA / "@subscriptions.journal")
    rig.open()
    for piece in (shown, waiting):
        with pytest.raises(MessageNotFound):
            commit(rig, 0, piece)
    commit(rig, 1, stage(rig, b"new"))
    assert content(rig)[0] == [b"shown", b"new"]


# --- room ----------------------------------------------------------------------------------------
def test_files_go_when_their_pieces_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a commit at once, the one being written a moment later: nothing stays of what was staged."""
    monkeypatch.setattr(staging, "SETTINGS", staging.SETTINGS.but({"segment_bytes": 4096}))
    monkeypatch.setattr(staging, "ROLL_BYTES_MIN", 1)
    rig = with_topic()
    pieces = [stage(rig, bytes(2000)) for _ in range(10)]
    assert len(rig.segments("__staged")) > 3
    commit(rig, 0, *pieces[5:])
    assert len(rig.segments("__staged")) > 3, "an earlier piece still waits"
    rig.wait(rig.engine.staging.abort, pieces[:5])
    commit(rig, 1)
    assert len(rig.segments("__staged")) == 1
    rig.advance(25)
    log = rig.log("__staged")
    assert log.size_bytes() == 0
    assert log.start_offset == log.end_offset == 10
    commit(rig, 2, stage(rig, b"x"))
    assert content(rig)[0][-1] == b"x"


def test_without_a_disk_staging_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in memory is counted in bytes, and let go of with its commit."""
    monkeypatch.setattr(limits, "STAGED_MEMORY_BYTES_MAX", 45_000)
    rig = Rig(directory=None, topic={"max_queue_size": 1_000_000})
    for number in range(3):
        piece = stage(rig, *[b"%d" % n for n in range(1_000)], topic="lake")
        with pytest.raises(QueueFull) as refused:
            stage(rig, bytes(40_000))
        assert refused.value.retryable
        commit(rig, number, piece)
        assert rig.log("__staged").size_bytes() == 0
    assert len(content(rig)[0]) == 3_000


# --- crashes -------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("seed", range(2))
def test_what_is_published_behind_a_commit_stays_there(seed: int) -> None:
    """The power fails at each disk operation of commits with publishes in between: all is in order."""
    operation = 0
    while True:
        operation += 1
        rig, faulty = _ready()
        faulty.fail(None, operation)
        answered: list[bytes] = []
        try:
            for number in range(2):
                pieces = [stage(rig, b"%d-a" % number), stage(rig, b"%d-b" % number, partition=1)]
                commit(rig, number, *pieces)
                answered.append(b"%d-a" % number)
                rig.publish("lake", b"p%d" % number, partition=0)
                answered.append(b"p%d" % number)
            return  # it failed behind the end: everything has been seen
        except (HeadraceError, OSError, AssertionError):
            pass
        rig.files = rig.disk
        rig.abandon()
        rig.disk.crash(Random(seed * 10_000 + operation))
        rig._engine = rig.make()
        rig.engine.open()
        for _ in range(2):  # before anything is finished, and after
            first, second = content(rig)[:2]
            shown = [value for value in first if value.endswith(b"-a")]
            assert [v[:1] for v in shown] == [v[:1] for v in second], operation
            rig.run()
        order = [b"0-a", b"p0", b"1-a", b"p1"]
        assert content(rig)[0] == order[: len(content(rig)[0])], operation
        assert content(rig)[0][: len(answered)] == answered, operation


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


# --- a forged producer ------------------------------------------------------------------------------
def forge(rig: Rig, partition: int, producer: int) -> None:
    """What a client could do when ids of commits were not reserved: take over a commit's producer."""
    answer = Answer()
    entry = Append(
        rig.columns([b"forged"]),
        None,
        lambda entry: answer.done(entry.error),
        producer_id=producer,
        producer_epoch=limits.EPOCH_MAX,
    )
    rig.engine.topics.find("lake").partitions[partition].log.append(entry)
    rig.run()
    assert answer.error is None


@pytest.mark.parametrize("restart", [False, True])
def test_a_commit_that_is_fenced_off_goes_on_under_another_producer(restart: bool) -> None:
    """A forged epoch blocks neither the topic nor any later commit."""
    rig = with_topic()
    assert commit(rig, 1, stage(rig, b"a"), stage(rig, b"b", partition=1))
    decision = rig.engine.staging.decisions["job"]
    assert decision.producer >= RESERVED_PRODUCERS
    forge(rig, 1, decision.producer)
    pieces = [stage(rig, b"c"), stage(rig, b"d", partition=1)]
    assert commit(rig, 2, *pieces)
    assert content(rig) == [[b"a", b"c"], [b"b", b"forged", b"d"], []]
    assert rig.engine.staging.trouble is None
    if restart:
        rig.kill()
    assert not commit(rig, 2, *pieces)
    assert commit(rig, 3, stage(rig, b"e", partition=1))
    rig.publish("lake", b"f", partition=1)
    assert content(rig)[1] == [b"b", b"forged", b"d", b"e", b"f"]


def test_a_name_of_an_earlier_version_gets_a_reserved_producer() -> None:
    """Its next commit has an id that no client can use."""
    rig = with_topic()
    assert commit(rig, 1, stage(rig, b"a"))
    rig.engine.staging.decisions["job"].producer = 4711
    assert commit(rig, 2, stage(rig, b"b"))
    assert rig.engine.staging.decisions["job"].producer >= RESERVED_PRODUCERS


def test_a_commit_that_cannot_go_on_is_no_secret() -> None:
    """Whoever asks whether the broker is ready hears of it, until it has gone on."""
    files = FaultyFiles(SimulatedFiles())
    rig = with_topic(files=files)
    piece = stage(rig, b"a")
    for kind in ("write_at", "allocate"):
        files.fail(kind, repeat=True, name=".log", code=28)
    answer = ask(rig, 1, piece)
    rig.run()
    assert answer.calls == 0
    assert rig.engine.staging.trouble is not None
    assert "job/1" in rig.engine.staging.trouble
    files.heal()
    rig.advance(staging.RETRY_S)
    assert answer.get()
    assert rig.engine.staging.trouble is None
