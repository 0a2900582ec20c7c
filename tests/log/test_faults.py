"""Every single disk operation of a run fails once, and nobody is lied to.

The run publishes, rolls, closes, loses power, opens again and publishes on. It is done once without
faults to count its operations, and then once for each of them, with that one failing. What must hold,
however it ends:

- what was acknowledged is there, at its offset, with its bytes;
- what failed with a definite error is not there; what is unknown may be, at most once;
- offsets are gapless, and nothing else is there;
- after a failed sync of a segment nobody syncs that file again: the partition says so and stops.
"""

import errno
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, OutcomeUnknown
from headrace.log.interface import Append
from tests.fakes import Fault, FaultyFiles, SimulatedFiles
from tests.log.rig import Rig, number_of, records

pytestmark = pytest.mark.usefixtures("quiet")


class Run:
    """A partition on a disk with faults, and what was said to those who published."""

    def __init__(self, seed: int = 1, **options: object):
        self.disk = SimulatedFiles()
        self.files = FaultyFiles(self.disk)
        self.random = Random(seed)
        self.options = {"segment_bytes": 4096, **options}
        self.rig = Rig(self.files, **self.options)  # type: ignore[arg-type]
        self.said: dict[bytes, Append] = {}
        self.suspect = False

    # --- what a broker and its operator do ---------------------------------------------------
    def start(self) -> None:
        """Open the partition; where that fails, as after a failed sync, the next start is suspicious."""
        for _ in range(4):
            try:
                self.rig.open(suspect=self.suspect)
            except OSError:
                self.suspect = True
                self.disk.kill()
                self.rig = Rig(self.files, **self.options)  # type: ignore[arg-type]
            else:
                self.suspect = False
                return
        self.files.heal()
        self.rig.open(suspect=True)
        self.suspect = False

    def publish(self, count: int = 1, size: int = 700) -> None:
        """Some publishes that share a commit, each with a value that is never used again."""
        entries = []
        for _ in range(count):
            value = b"%d." % len(self.said) * (size // 3)
            entry = self.rig.append(value)
            self.said[value] = entry
            entries.append(entry)
        self.rig.loop.run_until_idle()
        assert all(number_of(entry) == 1 for entry in entries), "each is answered once"
        self.look_at_failure()
        if any(fault.hits for fault in self.files.faults):
            self.look()

    def look(self) -> None:
        """What was acknowledged can be read, from the partition that goes on after a fault."""
        there = dict(records(self.rig.log))
        for value, entry in self.said.items():
            if entry.error is None:
                assert there.get(entry.first_offset) == value

    def look_at_failure(self) -> None:
        """The broker stops when a partition says so, and is started again."""
        if self.rig.failures:
            assert len(self.rig.failures) == 1
            self.no_further_sync()
            self.disk.kill()
            self.suspect = True
            self.rig = Rig(self.files, **self.options)  # type: ignore[arg-type]
            self.start()

    def no_further_sync(self) -> None:
        """Nothing that the stopped partition is still asked to do touches its files."""
        before = len(self.files.changes)
        late = self.rig.append(b"too late")
        self.rig.log.flush()
        self.rig.log.roll_if_old(1 << 50)
        self.rig.log.close(lambda: None)
        self.rig.loop.run_until_idle()
        assert isinstance(late.error, HeadraceError)
        assert len(self.files.changes) == before

    def stop(self) -> None:
        closed: list[int] = []
        self.rig.log.close(lambda: closed.append(1))
        self.rig.loop.run_until_idle()
        assert closed == [1]
        if self.rig.failures:
            self.suspect = True
        self.rig = Rig(self.files, **self.options)  # type: ignore[arg-type]

    def lose_power(self) -> None:
        self.disk.crash(self.random, sector=64)
        self.rig = Rig(self.files, **self.options)  # type: ignore[arg-type]

    # --- what must hold -----------------------------------------------------------------------
    def check(self) -> None:
        self.files.heal()
        self.lose_power()
        self.rig.open()
        assert self.rig.log.read_only is None
        found = records(self.rig.log)
        assert [offset for offset, _ in found] == list(range(self.rig.log.end_offset)), "gapless"
        there = {value: offset for offset, value in found}
        assert len(there) == len(found), "nothing is there twice"
        for value, entry in self.said.items():
            if entry.error is None:
                assert there.get(value) == entry.first_offset, "acknowledged, and lost or moved"
            elif not isinstance(entry.error, OutcomeUnknown):
                assert value not in there, "refused, and stored all the same"
        assert set(there) <= set(self.said), "invented"


def script(run: Run) -> None:
    """Five segments' worth of commits, with a clean restart and a crash among them."""
    run.start()
    for _ in range(7):
        run.publish()
    run.publish(3)
    run.stop()
    run.start()
    for _ in range(6):
        run.publish(2)
    run.lose_power()
    run.start()
    run.publish(2)
    run.publish()
    run.stop()
    run.start()
    run.publish(6)


def changes_of(scenario: Callable[[Run], None]) -> list[str]:
    """The kinds of all operations of a run without faults."""
    run = Run()
    scenario(run)
    assert all(entry.error is None for entry in run.said.values())
    run.check()
    return [call.kind for call in run.files.changes]


KINDS = changes_of(script)


def test_the_run_does_everything_that_can_fail() -> None:
    """The run without faults meets every kind of operation, so that each of them gets its turn."""
    assert set(KINDS) >= {
        "allocate", "create", "rename", "sync", "sync_directory", "truncate", "write_at",
    }  # fmt: skip
    assert KINDS.count("sync") > 20


def single_faults() -> Iterator[tuple[str, int, int, int | None]]:
    for kind in sorted({*KINDS, "open"}):
        for number in range(1, KINDS.count(kind) + 3 if kind != "open" else 40):
            if kind in ("open", "create", "sync_directory"):
                yield kind, number, errno.EMFILE, None
            for code in (errno.EIO, errno.ENOSPC):
                yield kind, number, code, None
                if kind == "write_at":
                    for short in (30, 64, 700, 1 << 20):
                        yield kind, number, code, short


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_single_operation_may_fail(seed: int) -> None:
    """Each operation of each kind fails once, with EIO and with ENOSPC, writes also halfway."""
    hits = 0
    for kind, number, code, short in single_faults():
        run = Run(seed)
        fault = run.files.fail(kind, number, code, short=short)
        try:
            script(run)
            run.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}, {kind} number {number} fails with {code}, short {short}")
            raise
        hits += fault.hits
    assert hits > 300


@pytest.mark.parametrize("durability", ["interval", "never"])
def test_any_operation_may_fail_in_the_other_modes(durability: str) -> None:
    """With weaker promises an error is still definite, and what was acknowledged survives a kill."""
    for number in range(1, len(KINDS) + 1):
        for code in (errno.EIO, errno.ENOSPC):
            run = Run(durability=durability)
            run.lose_power = lambda: None  # type: ignore[method-assign]
            run.files.fail(None, number, code)
            run.start()
            for step in range(12):
                run.publish(1 + step % 3)
                run.rig.loop.advance(0.04)
                run.look_at_failure()
            run.stop()
            run.start()
            run.publish()
            run.stop()
            run.check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "sync", "write_at", "allocate", "truncate", "sync_directory"]),
            st.integers(1, 60),
            st.sampled_from([errno.EIO, errno.ENOSPC]),
            st.sampled_from([None, 64, 700]),
            st.booleans(),
        ),
        min_size=2,
        max_size=5,
    ),
    st.integers(),
)
def test_several_operations_may_fail(plan: list, seed: int) -> None:
    """Any handful of faults, some of them lasting until the next start, breaks no promise."""
    run = Run(seed)
    for kind, number, code, short, repeat in plan:
        run.files.fail(kind, number, code, short=short, repeat=repeat and kind == "allocate")
    script(run)
    run.check()


# --- one by one -----------------------------------------------------------------------------------
def test_too_many_open_files_is_no_failed_sync() -> None:
    """A new segment waits until there is a descriptor again; until then publishes are refused."""
    run = Run()
    run.start()
    run.files.fail("sync_directory", code=errno.EMFILE, repeat=True)
    run.publish()
    assert not run.rig.failures
    assert [entry.error.code for entry in run.said.values() if entry.error] == ["storage_failed"]
    run.files.heal()
    run.publish()
    run.stop()
    run.check()
    assert len(run.said) == 2


def failed_sync(run: Run) -> Fault:
    run.start()
    run.publish()
    return run.files.fail("sync", name=".log")


def test_a_failed_sync_is_unknown_to_all_who_waited() -> None:
    """All entries of the commit, and those behind it, hear that the outcome is unknown."""
    run = Run()
    fault = failed_sync(run)
    rig = run.rig
    rig.workers.hold = True
    waiting = [rig.publish(b"in the commit"), rig.publish(b"behind it")]
    duplicate = rig.publish(b"behind it, too", producer=(7, 0, 0))
    rig.workers.release()
    rig.loop.run_until_idle()
    assert fault.hits == 1
    for entry in (*waiting, duplicate):
        assert isinstance(entry.error, OutcomeUnknown)
        assert number_of(entry) == 1
    assert [error.code for error in rig.failures] == ["outcome_unknown"]
    assert rig.log.end_offset == 1
    assert rig.log.failed is rig.failures[0]


def test_a_failed_sync_is_never_tried_again() -> None:
    """After a failed sync the file is not touched any more: no sync, no write, no truncate."""
    run = Run()
    failed_sync(run)
    rig = run.rig
    rig.publish(b"unknown")
    assert len(rig.failures) == 1
    run.no_further_sync()
    assert run.files.count("sync", ".log") == 2
    assert len(rig.failures) == 1


@pytest.mark.parametrize("durability", ["interval", "never"])
def test_a_failed_sync_in_the_background_stops_it_too(durability: str) -> None:
    """A sync that nobody waits for fails as loudly as one that somebody does."""
    run = Run(durability=durability)
    failed_sync(run)
    run.rig.publish(b"acknowledged already")
    run.rig.log.flush()
    run.rig.loop.advance(1)
    assert [error.code for error in run.rig.failures] == ["outcome_unknown"]
    run.no_further_sync()


def test_a_sync_that_fails_while_closing_is_told() -> None:
    """A close whose sync fails is finished, and the failure is reported."""
    run = Run(durability="never")
    failed_sync(run)
    closed: list[int] = []
    run.rig.log.close(lambda: closed.append(1))
    run.rig.loop.run_until_idle()
    assert (closed, len(run.rig.failures)) == ([1], 1)


def test_a_write_that_cannot_be_taken_back_is_unknown() -> None:
    """When a failed write can be neither finished nor undone, nobody is told that it is not there."""
    run = Run()
    run.start()
    run.publish()
    run.files.fail("write_at", 1, short=500)
    run.files.fail("truncate")
    entry = run.rig.publish(b"x" * 1000)
    assert isinstance(entry.error, OutcomeUnknown)
    assert len(run.rig.failures) == 1


@pytest.mark.parametrize("short", [64, 500, 1 << 20])
def test_what_was_refused_does_not_come_back(short: int) -> None:
    """A failed write is taken back durably: the power may fail right behind its error."""
    for seed in range(30):
        run = Run(seed)
        run.start()
        run.publish()
        run.files.fail("write_at", 1, errno.ENOSPC, short=short)
        run.publish()
        assert [entry.error is None for entry in run.said.values()] == [True, False]
        run.check()


def test_a_mistake_of_our_own_stops_the_partition() -> None:
    """An exception that nobody foresaw is treated like an unknown outcome, not swallowed."""
    run = Run()
    run.start()
    run.rig.log.write = lambda batches: 1 // 0  # type: ignore[method-assign]
    entry = run.rig.publish(b"x")
    assert isinstance(entry.error, OutcomeUnknown)
    assert len(run.rig.failures) == 1


def test_reading_goes_on_after_a_failed_sync() -> None:
    """What was durable before stays readable until the broker is gone."""
    run = Run()
    failed_sync(run)
    run.rig.publish(b"unknown")
    assert [offset for offset, _ in records(run.rig.log)] == [0]
