"""What the statistics of the console cost a publish: processor time of the broker for each message, with and without.

One broker is measured both ways: a signal switches its statistics off and on (the publishers that it notes and the
history that it keeps), and many short rounds alternate. So layout of memory, disk and load of the machine are the same
for both. Processor time counts all threads of the broker (``/proc/PID/task/*/schedstat``).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks._loopback import TOPIC, VALUE, Load, loading
from benchmarks.harness import Benchmark, Case, console, data_directory
from headrace.client.threads import BrokerClient
from headrace.testing import ServerProcess

SWITCHED = """
import signal
from headrace.broker import history, publishers
from headrace.server.connection import Connection

def publish(self, publish, done):  # as it is, but nobody is noted
    caller, engine = self.caller, self.hub.engine
    try:
        if not caller.unlimited and publish.topic not in caller.publishes:
            self.permissions.check_publish(publish.topic)
        if engine.topics.get(publish.topic) is None:
            with self.permissions.owning():
                engine.publish(publish, done)
        else:
            engine.publish(publish, done)
    except Exception as error:
        done([], error)

nothing = lambda self, *arguments: None
places = {(Connection, "publish"): publish, (publishers.RecentPublishers, "note"): nothing,
          (publishers.RecentPublishers, "note_gathered"): nothing, (history.Recording, "_step"): nothing}
others = {place: getattr(*place) for place in places}

def switch(number, frame):
    for (cls, name), off in places.items():
        setattr(cls, name, off if number == signal.SIGUSR1 else others[cls, name])

signal.signal(signal.SIGUSR1, switch)
signal.signal(signal.SIGUSR2, switch)
from headrace.cli import main; main()
"""
COMMAND = b"PUB t %d\r\n%b" % (len(VALUE), VALUE)
SHAPES = {
    "pipelined by 1,000, 4 connections": (1000, 4, 10),
    "one at a time, 100 connections": (1, 100, 40),
}
"""How many are sent at once, over how many connections, in how many rounds."""
TARGET = 1.01


class SwitchedServer(ServerProcess):
    main = SWITCHED


def cpu_ns(pid: int) -> int:
    """Of all threads, since the start."""
    found = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in found)


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    if not Path("/proc/self/schedstat").exists():
        console.print("[yellow]this system has no schedstat: statistics is not measured[/yellow]")
        yield None
        return
    with loading() as load, data_directory() as directory:
        if load is None:
            yield None
            return
        process = SwitchedServer(directory / "data", False, {})
        process.start()
        try:
            with process.client() as client:
                client.create_topic(TOPIC, durability="never", retention_bytes=64 << 20)
                cases = []
                for shape, how in SHAPES.items():
                    off, on = f"{shape}, without", f"{shape}, with"
                    run = partial(cost, load, process, client, how)
                    cases += [
                        Case(off, partial(run, signal.SIGUSR1), "ns/message", smaller=True),
                        Case(on, partial(run, signal.SIGUSR2), "ns/message", TARGET, smaller=True,
                             reference=off, relative=True),
                    ]  # fmt: skip
                yield Benchmark(
                    "statistics",
                    "processor time of a broker for each PUB of 100 bytes, with and without statistics",
                    cases,
                    repeat=150,
                    is_shuffled=True,
                )
        finally:
            process.kill()


def cost(
    load: Load,
    process: ServerProcess,
    client: BrokerClient,
    how: tuple[int, int, int],
    switch: signal.Signals,
) -> float:
    pipeline, connections, rounds = how
    process.signal(switch)
    client.info()  # it has heard the signal by now
    before = cpu_ns(process.pid)
    load.publish(
        process.address,
        "lines",
        COMMAND * pipeline,
        each=pipeline,
        rounds=rounds,
        connections=connections,
    )
    return (cpu_ns(process.pid) - before) / (rounds * pipeline * connections)
