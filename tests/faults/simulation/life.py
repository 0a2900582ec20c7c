"""One life: a broker, its clients and its misfortunes, all from one seed."""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from headrace.doctor.commands import examine
from headrace.errors import HeadraceError
from headrace.model import TopicSettings
from tests.broker.rig import DATA
from tests.fakes import PowerFailed
from tests.fakes.eager import eager_rewriting
from tests.faults.simulation.clients import STEPS, Clients
from tests.faults.simulation.groups import GroupOracle
from tests.faults.simulation.logs import LogOracle, Violation
from tests.faults.simulation.world import SimulatedMachine

STEPS_MAX = 120
DRAIN_ROUNDS = 500
CHECK_EVERY = 10
"""The doctor examines the disk of one life in ten."""


class Life:
    def __init__(self, seed: int, often: str | None = None):
        self.seed = seed
        self.often = often
        """A misfortune that comes all the time."""
        self.random = Random(seed)
        self.world = SimulatedMachine(Random(self.random.getrandbits(64)))
        self.log = LogOracle(self.world.files)
        self.clients = Clients(self.world, self.log, self.random)
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, what: str) -> None:
        at = f"{len(self.trace)}. {self.world.loop.time() - 1000:.2f} s: {what}"
        self.trace.append(at)
        state = f"{at} {len(self.log.sent)} {[len(g.out) for g in self.clients.groups]}"
        self._digest.update(state.encode())

    @property
    def digest(self) -> str:
        """The same for the same seed, or something other than the seed has decided."""
        return self._digest.hexdigest()

    # --- the stage --------------------------------------------------------------------------
    def set_the_stage(self) -> None:
        """Topics and subscriptions of every kind; nothing fails yet."""
        random, world = self.random, self.world
        world.start()
        self.watch()
        for name in ("t.one", "t.two", "t.three")[: random.randint(1, 3)]:
            settings = self._topic_settings()
            self.log.topics[name] = settings
            world.engine.create_topic(name, TopicSettings(**settings))
        if any(each["retention_hours"] is not None for each in self.log.topics.values()):
            # File systems keep the order of removals; without it, a hole among old segments is no surprise.
            world.files.crash["ordered"] = True
        names = list(self.log.topics)
        for number in range(random.randint(1, 3)):
            settings = {
                "ordering": random.choice(("none", "key")),
                "max_deliveries": random.choice((0, 1, 2, 3)),
                "ack_timeout": random.choice((1.0, 10.0, 30.0)),
                "backoff": random.choice((0.0, 0.1, 2.0)),
                "backoff_max": 5.0,
            }
            pattern = random.choice((*names, *names, "t.*"))
            group = GroupOracle(world, self.log, f"g{number}", pattern, settings)
            self.clients.groups.append(group)
            world.call(
                lambda done, group=group: world.engine.subscribe(
                    group.name, group.pattern, settings=group.settings, done=done
                )
            )

    def watch(self) -> None:
        """Read the logs of a broker that was just started, and always before retention deletes some."""
        engine = self.log.engine = self.world.engine
        before_run = engine.retention.before_run

        def look_first() -> None:
            self.log.look()
            before_run()

        engine.retention.before_run = look_first

    def _topic_settings(self) -> dict[str, Any]:
        random = self.random
        settings: dict[str, Any] = {
            "partitions": random.randint(1, 3),
            "segment_bytes": 4096,
            "compression": random.choice(("none", "zstd")),
            "retention_hours": random.choice((None, None, 0.001)),
        }
        kind = random.random()
        if kind < 0.15:
            settings |= {"durability": random.choice(("interval", "never"))}
        elif kind < 0.22:
            settings |= {"durable": False}
        if random.random() < 0.1:
            settings["message_ttl_ms"] = random.choice((2_000, 100_000))
        if random.random() < 0.1:
            settings["max_queue_size"] = 60
        return settings

    # --- misfortunes ------------------------------------------------------------------------
    def restart(self) -> None:
        self.counts["clean restarts"] += 1
        faults = self.world.files.faults
        hits = sum(fault.hits for fault in faults)
        self.stop()
        if self.world.engine_failed:
            self.crashed(power_cut=False)
            return
        # A stop in which the disk refused something may not have stored everything.
        clean = hits == sum(fault.hits for fault in faults)
        self.start_again(clean=clean, power_cut=False)

    def stop(self) -> None:
        self.tell_time()
        if not self.world.engine_failed:
            for group in self.clients.groups:
                group.stopping()
        self.world.stop()

    def kill(self) -> None:
        self.counts["kills"] += 1
        self.world.disk.kill()
        self.crashed(power_cut=False)

    def cut_power(self) -> None:
        self.world.files.plan(0, self.random.getrandbits(32))
        self.world.files.cut()
        self.crashed(power_cut=True)

    def crashed(self, *, power_cut: bool) -> None:
        self.counts["power cuts"] += power_cut
        if not power_cut:
            self.world.disk.kill()
        self.start_again(clean=False, power_cut=power_cut)

    def start_again(self, *, clean: bool, power_cut: bool) -> None:
        interrupted, cut_again = self.world.start()
        self.watch()
        shorter = self.log.restarted(power_cut=power_cut or cut_again)
        for group in self.clients.groups:
            group.restarted(clean=clean, interrupted=interrupted, shorter=shorter)
        self.clients.restarted()
        self.log.look(everything=True)

    def plan_cut(self) -> None:
        """The power fails, or the process dies, at one of the next disk operations."""
        self.world.files.plan(
            self.random.randint(1, 25),
            self.random.getrandbits(32),
            kills=self.random.random() < 0.3,
        )

    def plan_fault(self) -> None:
        """One of the next disk operations fails."""
        random, files = self.random, self.world.files
        files.heal()
        kind = random.choice(("sync", "sync", "write_at", "write_at", "create", None, "read_at"))
        code = errno.EIO if kind in ("sync", "read_at") or random.random() < 0.3 else errno.ENOSPC
        short = random.choice((None, 1, 50, 500)) if kind == "write_at" else None
        files.fail(kind, random.randint(1, 12), code, short=short)
        self.counts["disk faults planned"] += 1

    def wait(self) -> None:
        seconds = self.random.choice((0.01, 0.06, 0.5, 2.0, 11.0, 40.0))
        while seconds > 0:
            step = min(seconds, self.random.choice((0.05, 0.5, 5.0)))
            self.world.pass_time(step)
            self.tell_time()
            self.world.work()
            seconds -= step

    def tell_time(self) -> None:
        for group in self.clients.groups:
            group.time_passed()

    def jump(self) -> None:
        """The wall clock is set, forwards or back."""
        now = self.world.clock.now_ms()
        for sent in self.log.sent.values():
            if sent.due_ms and not sent.places:
                sent.peak_ms = max(sent.peak_ms, now)
        self.world.jump(self.random.choice((-3_600_000, -5_000, -50, 50, 5_000, 60_000, 3_600_000)))
        self.counts["clock jumps"] += 1

    # --- living -----------------------------------------------------------------------------
    def step(self, name: str, act: Callable[[], None]) -> None:
        self.note(name)
        try:
            try:
                act()
                self.world.work()
                self.tell_time()
                if self.random.random() < 0.3:
                    self.log.look()
                    for group in self.clients.groups:
                        group.check_letters()
            except HeadraceError as error:
                if not self.may_refuse(error):
                    raise
            if self.world.engine_failed:
                self.note("the broker has stopped itself")
                self.counts["failed syncs"] += 1
                if self.random.random() < 0.3:
                    self.cut_power()
                else:
                    self.crashed(power_cut=False)
        except PowerFailed:
            killed = self.world.files.kills
            self.note("killed" if killed else "the power fails")
            self.counts["kills"] += killed
            self.crashed(power_cut=not killed)

    def may_refuse(self, error: HeadraceError) -> bool:
        """Whether a call may be refused with this: the disk failed, or has."""
        codes = {"storage_failed", "storage_full", "broker_failed", "closed"}
        return error.code in codes and (bool(self.world.files.faults) or self.world.engine_failed)

    def run(self) -> None:
        random = self.random
        self.set_the_stage()
        misfortunes: dict[str, Callable[[], None]] = {
            "restart": self.restart,
            "kill": self.kill,
            "cut_power": self.cut_power,
            "plan_cut": self.plan_cut,
            "plan_fault": self.plan_fault,
            "jump": self.jump,
        }
        often: dict[str, Callable[[], None]] = {"wait": self.wait}
        often |= {name: lambda act=act: act(self.clients) for name, act in STEPS.items()}
        weights = {name: random.choice((0, 1, 1, 2, 4)) for name in often}
        for name in ("publish", "settle", "join", "wait"):
            weights[name] = random.choice((2, 4, 8))
        weights |= {name: random.choice((0.0, 0.0, 0.2, 0.6)) for name in misfortunes}
        if self.often is not None:
            weights[self.often] = sum(weights.values()) / 4
        acts = often | misfortunes
        names = list(acts)
        for _ in range(random.choice((20, 60, STEPS_MAX))):
            name = random.choices(names, [weights[each] for each in names])[0]
            self.step(name, acts[name])
            self.counts["steps"] += 1
        self.finish()
        self.counts["messages"] += len(self.log.sent)
        self.counts["deliveries"] += sum(len(group.seen) for group in self.clients.groups)
        self.counts["dead letters"] += len(self.log.letters)

    # --- the end ----------------------------------------------------------------------------
    def finish(self) -> None:
        """The faults stop. Everything has to arrive, and nothing may be left over."""
        self.note("the end: no more faults")
        world = self.world
        world.files.heal()
        world.files.countdown = 0
        for name, settings in self.log.topics.items():
            if "max_queue_size" in settings:  # nobody may read it, and then it stays full
                world.work(1_000_000)  # it may still grow, and then it refuses other changes
                world.engine.change_topic(name, {"max_queue_size": None})
        if world.clock.now_ms() < world.highest_ms:
            world.jump(world.highest_ms - world.clock.now_ms())  # the clock is right again
        world.finish_jobs(lambda: not self.clients.open_calls)
        self.tell_time()
        self.clients.finish()
        self.drain()
        self.log.look(everything=True)
        self.log.finish()
        for group in self.clients.groups:
            group.finish()
        self.check_disk()
        for again in range(2):  # what was done stays done
            self.stop()
            if self.seed % CHECK_EVERY == 0 and not again:
                report = examine(DATA, world.disk)
                if not report.healthy:
                    raise Violation("damage", f"the doctor finds {report.findings}")
            self.start_again(clean=True, power_cut=False)
            missing = self.missing(volatile=False)
            if missing:
                raise Violation("done", f"after a clean restart: {missing}")
        self.world.stop()

    def missing(self, *, volatile: bool = True) -> str | None:
        engine = self.world.engine
        if self.clients.open_calls:
            return f"{self.clients.open_calls} calls are not answered"
        if engine.schedule._when_loaded is not None:
            return "delayed messages are still being read"
        if len(engine.schedule):
            return f"{len(engine.schedule)} delayed messages wait: {engine.schedule.listing().collect()}"
        for group in self.clients.groups:
            missing = group.check_idle()
            if missing is not None:
                return missing
        return None

    def drain(self) -> None:
        members = [group.join(10_000) for group in self.clients.groups]
        for number in range(DRAIN_ROUNDS):
            self.world.work(1_000_000)
            for group in self.clients.groups:
                for place in sorted(group.out):
                    group.ack(place)
            self.world.work(1_000_000)
            missing = self.missing()
            if missing is None:
                break
            self.world.pass_time(0.05 if number < 20 else 0.5)
            self.tell_time()
        else:
            raise Violation("stuck", str(missing))
        for group, member in zip(self.clients.groups, members, strict=True):
            if member in group.members:
                group.leave(member, count=False)
        self.world.call(self.world.engine.state.flush)

    def check_disk(self) -> None:
        """Retention deletes what everybody has finished."""
        world = self.world
        for _ in range(4):
            world.pass_time(11.0)
            world.work(1_000_000)
        for name, settings in self.log.topics.items():
            if settings["retention_hours"] is None or not settings.get("durable", True):
                continue
            now = world.clock.now_ms()
            for partition in world.engine.topics.find(name).partitions:
                for segment in partition.log.closed_segments():
                    if segment.max_timestamp < now - 60_000:
                        raise Violation("stuck", f"{name}: {segment} is old, finished and kept")


def live(seed: int, often: str | None = None) -> Life:
    """One life; what is wrong comes out as an :class:`AssertionError` with the seed and the last steps."""
    life = Life(seed, often)
    try:
        with eager_rewriting():
            life.run()
    except Exception as error:
        last = "\n  ".join(life.trace[-15:])
        scenario = "simulation" if often is None else "clock-jumps"
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n  {last}\n"
            f"repeat: python -m tests.faults {scenario} --seed {seed} --amount 1"
        ) from error
    return life
