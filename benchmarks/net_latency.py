"""From publish to delivery at 1,000 messages a second: between two sockets, and between two clients.

In memory there is the loop and two system calls each way; a durable topic adds one ``fdatasync``, which
is measured beside it: what is left of the latency without it has the same target.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._loopback import VALUE, bare, broker, loading
from benchmarks.harness import Benchmark, Case, data_directory
from headrace.client.aio import AsyncClient
from headrace.client.threads import BrokerClient
from headrace.clock import new_loop
from headrace.testing import Address, ServerProcess

PER_SECOND = 1000
TOPICS = {"memory": "in memory", "durable": "durable"}


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    count = 1000 if quick else 5000
    with (
        loading() as load,
        bare("relay") as nothing,
        data_directory() as directory,
        broker() as process,
    ):
        if load is None:
            yield None
            return
        with process.client() as client:
            client.create_topic("memory", durable=False, max_queue_size=10**9)
            client.create_topic("durable")
        sync = Reading(lambda: _syncs(directory / "sync", 200 if quick else 1000))

        def sockets(topic: str, address: Address = process.address) -> Reading:
            return Reading(
                lambda: load.latencies(
                    address,
                    "lines",
                    per_second=PER_SECOND,
                    count=count,
                    listen=f"SUB {topic}\r\n".encode(),
                    request=b"PUB %b %d\r\n%b" % (topic.encode(), len(VALUE), VALUE),
                )
            )

        def asynchronous(topic: str) -> Reading:
            return Reading(lambda: _between("asyncio", process, topic, count))

        def clients(topic: str) -> Reading:
            return Reading(lambda: _between("threads", process, topic, count))

        relay = sockets("t", nothing)
        cases = [
            Case("one fdatasync, p50 (reference)", sync.p50, "µs"),
            Case("two sockets, a loop that only relays, p50", relay.p50, "µs"),
            Case("two sockets, a loop that only relays, p99", relay.p99, "µs"),
        ]
        for who, make in (
            ("sockets", sockets),
            ("AsyncClients", asynchronous),
            ("BrokerClients", clients),
        ):
            for topic, where in TOPICS.items():
                reading = make(topic)
                p50 = f"two {who}, {where}, p50"
                if topic == "memory":
                    cases.append(Case(p50, reading.p50, "µs", 200, smaller=True))
                else:
                    without = f"two {who}, {where}, p50 without the sync"
                    cases.append(Case(p50, reading.p50, "µs"))
                    cases.append(Case(without, _less(reading, sync), "µs", 200, smaller=True))
                p99 = f"two {who}, {where}, p99"
                cases.append(
                    Case(p99, reading.p99, "µs", 5, smaller=True, reference=p50, relative=True)
                )
        yield Benchmark("net_latency", "publish to delivery at 1,000/s, 100-byte messages", cases)


class Reading:
    """One measurement, asked in several ways: ``p50`` takes it, the others look at it."""

    def __init__(self, measure: Callable[[], list[float]]):
        self._measure = measure
        self.found: list[float] = []

    def at(self, percent: float) -> float:
        return self.found[min(int(len(self.found) * percent / 100), len(self.found) - 1)]

    def p50(self) -> float:
        self.found = self._measure()
        return self.at(50)

    def p99(self) -> float:
        return self.at(99)


def _less(reading: Reading, other: Reading) -> Callable[[], float]:
    return lambda: reading.at(50) - other.at(50)


def _syncs(path: Path, count: int) -> list[float]:
    """Microseconds of a small append in reserved space and its sync, at the same pace, sorted."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.posix_fallocate(handle, 0, 1 << 20)
        os.fsync(handle)
        found = []
        due = time.perf_counter()
        for number in range(count):
            due += 1 / PER_SECOND
            time.sleep(max(due - time.perf_counter(), 0))
            began = time.perf_counter()
            os.pwrite(handle, VALUE * 2, number * 200)
            os.fdatasync(handle)
            found.append((time.perf_counter() - began) * 1e6)
        return sorted(found)
    finally:
        os.close(handle)
        path.unlink()


# --- between two clients, each in a process of its own --------------------------------------------
def _between(who: str, process: ServerProcess, topic: str, count: int) -> list[float]:
    listen, publish = (_listen, _publish) if who == "threads" else (_listen_async, _publish_async)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    listener = context.Process(target=listen, args=(process.address, topic, count, theirs))
    listener.start()
    assert ours.recv() == "ready"
    publisher = context.Process(target=publish, args=(process.address, topic, count))
    publisher.start()
    assert ours.poll(60 + count / PER_SECOND)
    found: list[float] = ours.recv()
    publisher.join()
    listener.join()
    return found


def _value() -> bytes:
    return b"%020d%b" % (time.monotonic_ns(), VALUE[20:])


def _since(value: bytes) -> float:
    """Microseconds. The monotonic clock is the same in every process."""
    return (time.monotonic_ns() - int(value[:20])) / 1000


def _waits(count: int) -> Iterator[float]:
    """How long to sleep before each message."""
    due = time.monotonic()
    for _ in range(count):
        due += 1 / PER_SECOND
        yield max(due - time.monotonic(), 0)


def _listen(address: Address, topic: str, count: int, pipe: Connection) -> None:
    with BrokerClient(*address) as client:
        channel = client.subscribe(topic, capacity=10_000)
        pipe.send("ready")
        pipe.send(sorted(_since(channel.get(30).value) for _ in range(count)))


def _publish(address: Address, topic: str, count: int) -> None:
    with BrokerClient(*address) as client:
        client.publish("warm-up", b"")
        for wait in _waits(count):
            time.sleep(wait)
            client.publish_nowait(topic, _value())
        client.flush()


def _listen_async(address: Address, topic: str, count: int, pipe: Connection) -> None:
    async def main() -> None:
        async with AsyncClient(*address) as client:
            channel = await client.subscribe(topic, capacity=10_000)
            pipe.send("ready")
            pipe.send(sorted([_since((await channel.get(30)).value) for _ in range(count)]))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def _publish_async(address: Address, topic: str, count: int) -> None:
    async def main() -> None:
        async with AsyncClient(*address) as client:
            await client.publish("warm-up", b"")
            sent = []
            for wait in _waits(count):
                await asyncio.sleep(wait)
                sent.append(asyncio.ensure_future(client.publish(topic, _value())))
            await asyncio.gather(*sent)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
