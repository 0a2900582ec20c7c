"""What a Python client does for each work. A peer's module has a subclass; methods that it lacks are not measured."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import chain
from typing import Any

import uvloop

Seen = Callable[[bytes], object]
Ready = Callable[[], object]
SPIN_NS = 100_000


class Driver:
    """``topic`` is new for each work, and belongs to it alone."""

    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        """``as_log``: the topic is read and not consumed, for peers that have one kind for each."""
        self.host, _, port = address.partition(":")
        self.port = int(port)
        self.address = address
        self.mode = mode
        self.topic = topic
        self.as_log = as_log

    def close(self) -> None:
        pass

    def drop(self) -> None:
        """Remove the topic, so that the next work finds an empty server."""
        raise NotImplementedError

    def enqueue(self) -> None:
        """Have a queue that keeps what is published from now on, and has no consumer."""

    # --- publishing -------------------------------------------------------------------------
    def put(self, value: bytes) -> None:
        """Publish one message and wait for its answer."""
        raise NotImplementedError

    def put_each(self, values: Iterable[bytes]) -> list[float]:
        """Publish one after another, each after the answer to the one before; returns the seconds of each."""
        times, clock = [], time.perf_counter
        for value in values:
            began = clock()
            self.put(value)
            times.append(clock() - began)
        return times

    def send_all(self, values: Iterable[bytes]) -> None:
        """Publish in a plain loop, as a user would write it, then wait for all answers."""
        raise NotImplementedError

    def send_batch(self, values: Sequence[bytes]) -> None:
        """Publish together what belongs together, and wait for the answer."""
        self.send_all(values)

    def send_singly(self, values: Sequence[bytes]) -> None:
        """Publish in such a way that the server stores each as if it had come alone; then wait for all."""
        self.send_all(values)

    def send_paced(self, due: Iterable[list[bytes]]) -> None:
        """Publish what is due when the iterator has it, without waiting for answers; then wait for all."""
        self.send_all(chain.from_iterable(due))

    def topics(self, many: int, values: Sequence[bytes]) -> float:
        """Publish in a plain loop, round robin over so many topics; returns the seconds."""
        raise NotImplementedError

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, ready: Ready) -> int:
        """Read the topic from its beginning, as objects of the client; returns how many were read. Call ``ready``
        when connected."""
        raise NotImplementedError

    values: Callable[[int, Ready], int] | None = None
    """The same as plain values, if the client has such a form."""

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        """Consume as a queue from the beginning, with an ack for each message. Call ``ready`` after joining, and
        ``seen`` for each value; then deliveries must not wait for each other."""
        raise NotImplementedError

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        """Publish to so many subscribers, each with a connection; returns the seconds until all have all."""
        raise NotImplementedError

    def subscriptions(self, many: int, values: Sequence[bytes]) -> float:
        """Publish one after another to so many queues with a consumer each; returns the seconds until all
        consumers have acknowledged everything."""
        raise NotImplementedError


class AsyncDriver(Driver):
    """For clients that are asyncio only: each call runs a piece of one loop."""

    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        self._loop = uvloop.new_event_loop()

    def run(self, call: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(call)

    def close(self) -> None:
        self._loop.close()


def in_loop(call: Coroutine[Any, Any, float | None]) -> float:
    """Run a coroutine in a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(call) or 0.0


def paced(count: int, rate: int, size: int) -> Iterable[list[bytes]]:
    """The values that are due, at a fixed rate: one, or several for a publisher that fell behind. Each begins with
    the time at which it was due, in nanoseconds: to be late is not forgiven."""
    began = time.monotonic_ns() + 50_000_000
    pad = bytes(size - 8)
    times = [began + number * 1_000_000_000 // rate for number in range(count)]
    at = 0
    while at < count:
        while (left := times[at] - time.monotonic_ns()) > 0:
            time.sleep((left - SPIN_NS) / 1e9 if left > SPIN_NS else 0)
        end = bisect_right(times, time.monotonic_ns(), at)
        yield [due.to_bytes(8, "little") + pad for due in times[at:end]]
        at = end
