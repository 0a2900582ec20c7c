"""The power fails, again and again, at any operation; each time the log is what it promised to be.

A simulated disk keeps what was synced and, of the rest, what the dice say. The power may fail between
any two operations inside a commit, a roll, a rewrite or a recovery. Over any sequence of that:

- always: what was acknowledged, or once shown to a reader, is there for ever, at its offset;
- interval, never: what survives is a prefix, and at least what was synced;
- in every mode: offsets are gapless, no offset changes its bytes while it is there, nothing is
  invented, nothing that was refused is there, and a producer's batch is there at most once.
"""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError, OutcomeUnknown
from headrace.log.interface import Append
from tests.fakes import Mains, PowerFailed, SimulatedFiles
from tests.fakes.eager import eager_rewriting
from tests.log.rig import Rig, records

pytestmark = pytest.mark.usefixtures("quiet")


class World:
    """A partition, those who publish to it, and those who read it, over many lives."""

    def __init__(self, durability: str, compression: str, **crash: object):
        self.durability = durability
        self.files = Mains(SimulatedFiles(), **crash)
        self.options = {
            "segment_bytes": 4096,
            "durability": durability,
            "sync_interval_ms": 50,
            "compression": compression,
        }
        self.said: dict[bytes, Append] = {}
        self.shown: dict[int, bytes] = {}
        self.synced = 0
        """Offsets below this were on disk when somebody asked for it."""
        self.sequence = 0
        self.rig = self.new_rig()
        self.start()

    def new_rig(self) -> Rig:
        return Rig(self.files, rewrite=True, **self.options)  # type: ignore[arg-type]

    # --- lives --------------------------------------------------------------------------------
    def start(self) -> None:
        """Open it, as often as it takes: the power may fail during a recovery as well."""
        while True:
            self.files.restored()
            self.rig = self.new_rig()
            try:
                log = self.rig.open()
            except PowerFailed:
                continue
            self.judge(records(log))
            return

    def run(self) -> None:
        """Let the loop run; if the power failed meanwhile, everybody finds that out."""
        with suppress(PowerFailed):
            self.rig.loop.run_until_idle()
        if self.files.dead:
            self.start()
        elif self.durability == "always":
            self.look()

    def look(self) -> None:
        """Somebody reads everything; from now on it has been seen."""
        self.shown.update(records(self.rig.log))

    # --- what happens ---------------------------------------------------------------------------
    def publish(self, count: int, size: int) -> None:
        for _ in range(count):
            value = b"%d," % len(self.said) * size
            self.said[value] = self.rig.append(value)
        self.run()

    def produce(self) -> None:
        """An idempotent producer, who sends the same again until he knows that it is there."""
        value = b"p%d," % self.sequence * 30
        entry = self.rig.append(value, producer=(7, 0, self.sequence))
        self.said[value] = entry
        self.run()
        if entry.error is None:
            self.sequence += 1

    def wait(self, milliseconds: int) -> None:
        with suppress(PowerFailed):
            self.rig.loop.advance(milliseconds / 1000)
        self.run()

    def roll(self) -> None:
        self.rig.change(segment_hours=-1)
        self.rig.log.roll_if_old(self.rig.clock.now_ms())
        self.run()
        self.rig.change(segment_hours=24)

    def flush(self) -> None:
        rig, end = self.rig, self.rig.log.end_offset
        rig.log.flush()
        self.run()
        if self.rig is rig:
            self.synced = end

    def restart(self) -> None:
        rig, end = self.rig, self.rig.log.end_offset
        rig.log.close(lambda: None)
        with suppress(PowerFailed):
            rig.loop.run_until_idle()
        if not self.files.dead:
            self.synced = end
        self.start()

    def kill(self) -> None:
        """The process ends; what it had written is still in the page cache."""
        self.files.disk.kill()
        before = len(self.shown)
        self.start()
        assert len(self.shown) >= before

    def power(self, countdown: int, seed: int) -> None:
        self.files.plan(countdown, seed)
        if not countdown:
            self.files.random = Random(seed)
            self.files.cut()
            self.start()

    def drop(self) -> None:
        try:
            self.rig.log.drop_before(self.rig.log.end_offset - 5)
        except PowerFailed:
            self.start()
        start = self.rig.log.start_offset
        self.shown = {offset: value for offset, value in self.shown.items() if offset >= start}

    # --- what must hold -------------------------------------------------------------------------
    def judge(self, found: list[tuple[int, bytes]]) -> None:
        """After a start: is this what the log had promised to be?"""
        log = self.rig.log
        assert log.read_only is None, "a crash is not damage"
        assert [offset for offset, _ in found] == list(range(log.start_offset, log.end_offset))
        there = dict(found)
        offsets = {value: offset for offset, value in found}
        assert len(offsets) == len(found), "nothing is there twice"
        for value, offset in offsets.items():
            entry = self.said.get(value)
            assert entry is not None, "invented"
            if isinstance(entry.error, HeadraceError):
                assert isinstance(entry.error, OutcomeUnknown), "refused, and stored all the same"
            elif entry.first_offset >= 0:
                assert entry.first_offset == offset, "moved"
        if self.durability == "always":
            for value, entry in self.said.items():
                if entry.error is None and entry.first_offset >= log.start_offset:
                    assert offsets.get(value) == entry.first_offset, "acknowledged, and lost"
            for offset, value in self.shown.items():
                if offset >= log.start_offset:
                    assert there.get(offset) == value, "shown, and lost or changed"
        else:
            assert log.end_offset >= self.synced, "synced, and lost"
            # What was acknowledged behind the end is gone, and its offsets will be given again.
            for entry in self.said.values():
                if entry.error is None and entry.first_offset >= log.end_offset:
                    entry.error = OutcomeUnknown("lost in a crash, as its mode allows")
            self.sequence = log.next_sequence(7)
        self.shown = there
        self.synced = log.end_offset


steps = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 4), st.sampled_from([1, 20, 150, 500])),
    st.tuples(st.just("publish"), st.integers(1, 4), st.sampled_from([1, 20, 150, 500])),
    st.tuples(st.just("power"), st.integers(0, 25), st.integers(0, 1 << 32)),
    st.tuples(st.just("produce")),
    st.tuples(st.just("wait"), st.sampled_from([10, 60])),
    st.tuples(st.just("roll")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("kill")),
)
crashes = st.fixed_dictionaries(
    {
        "sector": st.sampled_from([8, 64, 512]),
        "ordered": st.booleans(),
        "garbage": st.booleans(),
    }
)


def live(world: World, script: list[tuple]) -> None:
    with eager_rewriting():
        for step, *args in script:
            getattr(world, step)(*args)
            world.wait(3)  # some steps of a rewrite
        world.power(0, len(script))
        world.publish(2, 20)
        world.restart()


@pytest.mark.parametrize("durability", ["always", "interval", "never"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@given(script=st.lists(steps, max_size=25), crash=crashes)
def test_the_log_survives_any_life(
    durability: str, compression: str, script: list, crash: dict
) -> None:
    """Publishes, rolls, restarts, kills and power failures in any order break no promise."""
    live(World(durability, compression, **crash), script)


@pytest.mark.parametrize("durability", ["always", "never"])
@given(
    script=st.lists(steps | st.tuples(st.just("drop")), max_size=25),
    sector=st.sampled_from([8, 512]),
)
def test_retention_and_crashes_go_together(durability: str, script: list, sector: int) -> None:
    """With segments being deleted on a journaling file system, what is kept is kept."""
    live(World(durability, "none", sector=sector, ordered=True), script)


def commits(world: World) -> None:
    """A short life with everything in it."""
    for size in (500, 500, 150, 20, 500, 500, 500):
        world.publish(2, size)
        world.produce()
    world.roll()
    world.publish(3, 150)
    world.restart()
    world.publish(1, 500)


def operations() -> int:
    world = World("always", "none")
    before = len(world.files.changes)
    commits(world)
    return len(world.files.changes) - before


OPERATIONS = operations()
MORE_THROWS = pytest.param(range(1, 4), marks=pytest.mark.slow)


@pytest.mark.parametrize("durability", ["always", "interval", "never"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("throws", [range(1), MORE_THROWS], ids=len)
def test_the_power_fails_at_every_operation(durability: str, ordered: bool, throws: range) -> None:
    """Right before each single operation of a life; `make slow` throws the dice more often for each."""
    for countdown in range(1, OPERATIONS + 2):
        for seed in throws:
            world = World(durability, "none", sector=64, ordered=ordered)
            world.power(countdown, 1_000 * countdown + seed)
            commits(world)
            world.power(0, seed)
            world.publish(1, 20)


@pytest.mark.slow
@settings(max_examples=3_000)
@given(
    script=st.lists(steps, min_size=20, max_size=80),
    crash=crashes,
    durability=st.sampled_from(["always", "interval", "never"]),
)
def test_the_log_survives_long_lives(script: list, crash: dict, durability: str) -> None:
    """The same for longer lives, and more of them."""
    live(World(durability, "none", **crash), script)
