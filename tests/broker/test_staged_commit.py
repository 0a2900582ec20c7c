"""A commit on its way into its partitions: bit by bit, whatever it weighs and whatever goes wrong."""

import errno
from pathlib import Path

import pytest

from headrace import limits
from headrace.broker import staged_commit
from headrace.broker.staged_commit import StagedPiece
from headrace.errors import DataCorrupt
from headrace.log.batch import LOST, encode
from tests.broker.rig import DATA, Answer, Rig, damage
from tests.broker.test_staging import ask, commit, content, finish, stage, step, with_topic
from tests.fakes import FaultyFiles, SimulatedFiles

STAGED = DATA / "__staged" / "0" / f"{0:020d}.log"


def held(rig: Rig) -> list[bool]:
    return [partition.log.is_held for partition in rig.engine.topics.find("lake").partitions]


def staged_while_held(rig: Rig, *values: bytes, partition: int = 0) -> Answer:
    return rig.ask(rig.engine.staging.stage, "lake", partition, encode(rig.columns(values)))


@pytest.mark.parametrize(
    "text",
    [
        "", "x", None, 7, "0/0/1/0", "0/0/1/0/", "0/0/0/0/lake", "0/-1/1/0/lake", "0/0/1/0/la/ke",
        "0/0/1/0/lake\n", "g/0/1/0/lake", "0/0/9999999/0/lake", f"0/{1 << 62}/1/0/lake",
        "0/0/1/٣/lake",
    ],
)  # fmt: skip
def test_what_does_not_look_like_a_piece_is_none(text: object) -> None:
    """Ids come back from outside."""
    assert StagedPiece.parse(text) is None


def test_a_piece_is_read_back_from_its_id() -> None:
    """Whatever place it has."""
    piece = StagedPiece(limits.OFFSET_MAX, limits.BATCH_RECORDS_MAX, 4095, "a.b-c_D" * 30)
    assert StagedPiece.parse(piece.id((1 << 53) - 1)) == ((1 << 53) - 1, piece)


def test_a_large_commit_is_in_memory_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much is under way as the window allows and one job reads; nobody sees any of it before."""
    monkeypatch.setattr(staged_commit, "READ_BYTES", 4_000)
    monkeypatch.setattr(limits, "COMMIT_WINDOW_BYTES", 8_000)
    rig = with_topic(hold=True)
    staged = [staged_while_held(rig, b"%d" % n, bytes(1000), partition=n % 3) for n in range(60)]
    finish(rig)
    done = ask(rig, 0, *[answer.get() for answer in staged])
    most = 0
    rig.run()
    while not done.calls:
        assert [len(values) for values in content(rig)] in ([0, 0, 0], [40, 40, 40])
        logs = [partition.log for partition in rig.engine.topics.find("lake").partitions]
        most = max(most, sum(log._waiting_bytes for log in logs))
        assert rig.workers.release(1)
        rig.run()
    assert 0 < most <= 8_000 + 4_000 + 2_000
    assert done.get() is True
    for number, values in enumerate(content(rig)):
        assert values[::2] == [b"%d" % n for n in range(number, 60, 3)]


def test_the_loop_is_never_held_up_by_reading() -> None:
    """Pieces are read in a worker; the loop only passes them on."""
    rig = with_topic(hold=True)
    staged = staged_while_held(rig, b"x")
    finish(rig)
    rig.engine.topics.storage.cache.forget(rig.log("__staged").number)
    ask(rig, 0, staged.get())
    step(rig, lambda: any(held(rig)))
    reads: list[Path] = []
    original = rig.files.read_at

    def read_at(handle: object, position: int, length: int) -> bytes:
        reads.append(handle.path)  # type: ignore[attr-defined]
        return original(handle, position, length)  # type: ignore[arg-type]

    rig.files.read_at = read_at  # type: ignore[method-assign, assignment]
    rig.run()
    assert reads == []
    finish(rig)
    assert [path for path in reads if path == STAGED]
    assert content(rig)[0] == [b"x"]


def test_publishes_that_wait_for_a_commit_do_not_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill the partition's queue; the commit, for which they wait, still finds its way in."""
    rig = with_topic(hold=True)
    staged = staged_while_held(rig, b"staged")
    finish(rig)
    done = ask(rig, 0, staged.get())
    step(rig, lambda: held(rig)[0])
    monkeypatch.setattr(limits, "COMMIT_QUEUE_BYTES_MAX", 200)
    published = [rig.send("lake", b"%d" % n, partition=0) for n in range(10)]
    finish(rig)
    assert done.get() is True
    stored = [answer for answer in published if answer.error is None]
    assert 0 < len(stored) < 10
    assert content(rig)[0] == [b"staged", *(b"%d" % n for n in range(len(stored)))]


def test_a_full_disk_delays_a_commit_that_is_decided() -> None:
    """It is tried again until there is room; nobody sees half of it, and it is answered then."""
    rig = with_topic(files=SimulatedFiles())
    rig.close()
    faulty = rig.files = FaultyFiles(rig.files)
    rig.open()
    pieces = [stage(rig, b"a"), stage(rig, b"b", partition=1)]
    fault = faulty.fail("write_at", 2, errno.ENOSPC, repeat=True, name=".log")
    done = ask(rig, 0, *pieces)
    rig.run()
    assert done.calls == 0
    assert content(rig) == [[], [], []]
    rig.advance(10)
    assert done.calls == 0
    assert content(rig) == [[], [], []]
    faulty.faults.remove(fault)
    rig.advance(10)
    assert done.get() is True
    assert content(rig)[:2] == [[b"a"], [b"b"]]


def test_a_topic_that_is_deleted_under_a_commit_takes_its_part_with_it() -> None:
    """The rest is shown; there is nobody left who could want the other."""
    rig = with_topic(hold=True)
    rig.engine.create_topic("brief")
    staged = [
        staged_while_held(rig, b"kept"),
        rig.ask(rig.engine.staging.stage, "brief", 0, encode(rig.columns([b"gone"]))),
    ]
    finish(rig)
    done = ask(rig, 0, *[answer.get() for answer in staged])
    rig.ask(rig.engine.delete_topic, "brief")
    rig.run()
    for _ in range(5):
        finish(rig)
        rig.advance(2)
    assert done.get() is True
    assert content(rig)[0] == [b"kept"]


# --- damage -------------------------------------------------------------------------------------
def _flip_body(content: bytearray) -> None:
    content[70] ^= 0xFF


def test_damage_is_found_before_a_commit_is_decided() -> None:
    """Pieces of an earlier run are read first; the driver stages them again, and all is well."""
    rig = with_topic()
    bad, good = stage(rig, b"one", b"two"), stage(rig, b"three")
    rig.close()
    damage(rig, STAGED, _flip_body)
    rig.open()
    with pytest.raises(DataCorrupt) as refused:
        commit(rig, 0, bad, good)
    assert refused.value.code == "piece_lost"
    assert content(rig)[0] == []
    assert not rig.log("__staged").read_only or rig.log("__staged").damage
    commit(rig, 0, good)
    assert content(rig)[0] == [b"three"]


def test_damage_to_what_is_decided_is_shown_as_what_it_is() -> None:
    """The commit happens, readers hear which records are gone, and so does whoever asked for it."""
    rig = with_topic(hold=True)
    staged = []
    for values in ([b"one", b"two"], [b"three"]):
        staged.append(staged_while_held(rig, *values))
        finish(rig)
    ask(rig, 0, *[answer.get() for answer in staged])
    step(rig, lambda: any(held(rig)))
    rig.abandon()
    rig.disk.kill()
    rig.workers.hold = False
    damage(rig, STAGED, _flip_body)
    rig.open()
    log = rig.log("lake")
    assert log.end_offset == 3
    first, second = log.read(0, 1), log.read(2, 1)
    assert first[0].flags & LOST
    assert second[0].values() == [b"three"]
    with pytest.raises(DataCorrupt):
        first[0].values()
    assert commit(rig, 0) is False
