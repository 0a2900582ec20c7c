"""One small message at a time to 500 subscriptions with a member each: the cost of a subscriber.

The publisher waits for each receipt. Beside it stands a loop that only relays each message to as many sockets: most
of a delivery to a connection of its own is the system call.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks._loopback import TOPIC, VALUE, Load, bare, broker, loading
from benchmarks.harness import Benchmark, Case
from headrace import AsyncClient
from headrace.clock import new_loop
from headrace.testing import Address, ServerProcess

SUBSCRIPTIONS = 500
GIVE_UP_S = 60.0
PUBLISH = b"PUB %b %d\r\n%b" % (TOPIC.encode(), len(VALUE), VALUE)
RELAY = "a loop that only relays, 500 connections"


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    count = 50 if quick else 200
    with loading() as load:
        if load is None:
            yield None
            return
        one_by_one = b"SUB t group=g#### ack=auto\r\n"
        together = b"".join(b"SUB t group=g%d ack=auto\r\n" % n for n in range(SUBSCRIPTIONS))

        def relay() -> float:
            with bare("relay") as address:
                return _deliveries(load, address, SUBSCRIPTIONS, b"SUB t\r\n", 1, count)

        def subscriptions(connections: int, greeting: bytes) -> Callable[[], float]:
            def run() -> float:
                with broker() as process:
                    answers = SUBSCRIPTIONS // connections
                    return _deliveries(load, process.address, connections, greeting, answers, count)

            return run

        def acknowledged() -> float:
            with broker() as process, asyncio.Runner(loop_factory=new_loop) as runner:
                return runner.run(_acknowledged(process, count))

        yield Benchmark(
            "net_fan_out",
            f"{count} messages, each to {SUBSCRIPTIONS} subscriptions, fdatasync before each receipt",
            [
                Case(RELAY, relay, "deliveries/s"),
                Case("500 connections, a subscription each", subscriptions(500, one_by_one),
                     "deliveries/s", 100_000, reference=RELAY),
                Case("one connection, 500 subscriptions", subscriptions(1, together),
                     "deliveries/s", 100_000),
                Case("one AsyncClient, 500 subscriptions, ack each", acknowledged, "deliveries/s"),
            ],
        )  # fmt: skip


def _deliveries(
    load: Load, address: Address, connections: int, greeting: bytes, answers: int, count: int
) -> float:
    """Deliveries a second, from the first publish to the last delivery."""
    wanted = count * SUBSCRIPTIONS
    with (
        load.listening(address, "lines", connections, greeting, answers) as listeners,
        socket.create_connection(address) as publisher,
    ):
        began = time.monotonic()
        for _ in range(count):
            publisher.sendall(PUBLISH)
            assert publisher.recv(100).startswith(b"OK")
        got = 0.0
        while got < wanted and time.monotonic() - began < GIVE_UP_S:
            found = listeners.counts()
            got += found["frames"]
            last = found["last"] or time.monotonic()
            time.sleep(0.005)
        assert got == wanted, f"{got} of {wanted} deliveries"
        return wanted / (last - began)


async def _acknowledged(process: ServerProcess, count: int) -> float:
    async with AsyncClient(*process.address) as client, AsyncClient(*process.address) as publisher:
        consumers = [
            await client.subscription(f"g{number}", TOPIC) for number in range(SUBSCRIPTIONS)
        ]

        async def consume(number: int) -> None:
            for _ in range(count):
                (await consumers[number].get(GIVE_UP_S)).ack()

        began = time.monotonic()
        tasks = [asyncio.create_task(consume(number)) for number in range(SUBSCRIPTIONS)]
        for _ in range(count):
            await publisher.publish(TOPIC, VALUE)
        await asyncio.gather(*tasks)
        await client.flush()
        return count * SUBSCRIPTIONS / (time.monotonic() - began)
