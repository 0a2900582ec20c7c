"""Delayed messages through a commit: they begin to wait when it is shown, all of them or none."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from headrace import limits
from headrace.errors import HeadraceError, InvalidArgument, NotFound, QueueFull
from headrace.log.batch import encode
from headrace.log.columns import Columns
from tests.broker.rig import TOPIC, Rig
from tests.fakes import FaultyFiles, SimulatedFiles


def stage(rig: Rig, *values: bytes, delay: float = 10, **more: Any) -> Any:
    """Messages that are due so many seconds from now."""
    due = rig.clock.now_ms() + int(delay * 1000)
    columns = Columns(list(values), more.pop("keys", None), more.pop("headers", None))
    columns.times = more.pop("times", [due] * len(values))
    partition = more.pop("partition", None)
    staging = rig.engine.staging
    return rig.wait(staging.stage, TOPIC, partition, encode(columns), delayed=True, **more)


def stage_plain(rig: Rig, *values: bytes) -> Any:
    return rig.wait(rig.engine.staging.stage, TOPIC, 0, encode(Columns(list(values))))


def commit(rig: Rig, number: int, *pieces: Any) -> bool:
    return rig.wait(rig.engine.staging.commit, "job", number, list(pieces))


def test_they_wait_from_their_commit_on() -> None:
    """Before it nobody knows of them; then each comes when its time comes, beside what did not wait."""
    rig = Rig()
    now = rig.clock.now_ms()
    pieces = [
        stage(rig, b"b", b"a", times=[now + 20_000, now + 10_000]),
        stage_plain(rig, b"at once"),
    ]
    assert len(rig.engine.schedule) == 0
    rig.advance(1)
    assert rig.values() == []
    assert commit(rig, 0, *pieces)
    assert rig.values() == [b"at once"]
    assert [s.topic for s in rig.engine.schedule.listing().collect()] == [TOPIC, TOPIC]
    rig.advance(9)
    assert rig.values() == [b"at once", b"a"]
    rig.advance(10)
    assert rig.values() == [b"at once", b"a", b"b"]


def test_a_time_that_is_past_is_now() -> None:
    """Also when the commit comes after it."""
    rig = Rig()
    piece = stage(rig, b"late", delay=1)
    rig.advance(5)
    assert rig.values() == []
    commit(rig, 0, piece)
    rig.advance(0.1)
    assert rig.values() == [b"late"]


def test_they_keep_key_headers_and_place() -> None:
    """And can be listed and cancelled like any other."""
    rig = Rig(topic={"partitions": 4})
    piece = stage(rig, b"x", b"y", keys=[b"k", None], headers=[{"a": "1"}, None], partition=3)
    commit(rig, 0, piece)
    first, second = rig.engine.schedule.listing().collect()
    rig.wait(rig.engine.schedule.cancel, second.id)
    rig.advance(10)
    (message,) = rig.read(TOPIC, 3)
    assert (message.value, message.key, message.headers) == (b"x", b"k", {"a": "1"})
    assert message.id == first.id


def test_a_repeated_commit_does_not_schedule_twice() -> None:
    """The same number again, with the same pieces or with others."""
    rig = Rig()
    piece = stage(rig, b"once")
    assert commit(rig, 0, piece)
    assert not commit(rig, 0, piece)
    assert not commit(rig, 0, stage(rig, b"once"))
    rig.reopen()
    assert not commit(rig, 0, stage(rig, b"once"))
    assert len(rig.engine.schedule) == 1
    rig.advance(20)
    assert rig.values() == [b"once"]


def test_what_is_aborted_never_waits() -> None:
    """Nor what is only staged."""
    rig = Rig()
    rig.wait(rig.engine.staging.abort, [stage(rig, b"aborted")])
    stage(rig, b"staged")
    rig.reopen()
    rig.advance(100)
    assert rig.values() == []


def test_batches_that_cannot_wait_are_refused() -> None:
    """Without times, too far ahead, for a partition that is not there, or too many."""
    rig = Rig()
    with pytest.raises(InvalidArgument) as refused:
        stage(rig, b"x", times=None)
    assert refused.value.code == "invalid_delay"
    with pytest.raises(InvalidArgument) as refused:
        stage(rig, b"x", delay=limits.DELAY_S_MAX + 60)
    assert refused.value.code == "invalid_delay"
    with pytest.raises((NotFound, InvalidArgument)):
        stage(rig, b"x", partition=7)


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound for delayed messages holds here, too."""
    monkeypatch.setattr(limits, "SCHEDULED_MAX", 3)
    rig = Rig()
    commit(rig, 0, stage(rig, b"1", b"2"))
    with pytest.raises(QueueFull):
        stage(rig, b"3", b"4")


def test_a_piece_cannot_be_led_into_an_internal_topic() -> None:
    """Ids are checked against what was staged; of an earlier run only what they may say."""
    rig = Rig()
    plain = stage_plain(rig, b"x")
    commit(rig, 0, stage(rig, b"waits"))
    rig.reopen()
    head = plain.rpartition("/")[0]
    with pytest.raises(InvalidArgument):
        commit(rig, 1, f"{head}/__staged")
    commit(rig, 1, f"{head}/__scheduled")  # it does not say for what it waits, and so it does not
    assert len(rig.engine.schedule) == 1
    rig.reopen()
    rig.advance(20)
    assert rig.values() == [b"waits"]


def test_once_wherever_the_power_fails() -> None:
    """At every call to the disk of a job with both kinds: all of a commit or nothing, and once."""

    def job(rig: Rig, numbers: range) -> None:
        for number in numbers:
            pieces = [
                stage(
                    rig,
                    b"%d-late" % number,
                    b"%d-later" % number,
                    delay=5,
                    name="job",
                    number=number,
                ),
                stage_plain(rig, b"%d-now" % number),
            ]
            commit(rig, number, *pieces)

    def expected(count: int) -> Counter[bytes]:
        return Counter(b"%d-%s" % (n, w) for n in range(count) for w in (b"now", b"late", b"later"))

    half_applied = 0
    for operation in range(1, 400):
        rig = Rig(SimulatedFiles(), seed=operation)
        rig.engine.create_topic(TOPIC)
        rig.close()
        faulty = rig.files = FaultyFiles(rig.files)
        rig.open()
        fault = faulty.fail(None, operation)
        reached = 0
        try:
            for reached in range(2):
                job(rig, range(reached, reached + 1))
            reached = 2
        except (HeadraceError, OSError, AssertionError):
            pass
        hits = fault.hits
        rig.files = rig.disk
        rig.abandon()
        rig.disk.crash(Random(operation))
        rig._engine = rig.make()
        rig.engine.open()
        half_applied += any(p.log.is_held for t in rig.engine.topics for p in t.partitions)
        rig.run()
        shown = len(rig.values())
        assert len(rig.engine.schedule) == 2 * shown, operation  # all of a commit, or nothing of it
        job(rig, range(reached, 2))
        rig.advance(20)
        assert Counter(rig.values()) == expected(2), operation
        assert len(rig.engine.schedule) == 0
        if not hits:
            break
    assert operation > 30
    assert half_applied
