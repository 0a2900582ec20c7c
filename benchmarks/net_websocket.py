"""WebSocket: publishes one message a frame, fan-out, many connections, and how long a message takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks._loopback import (
    JSON_VALUE,
    TOPIC,
    Listeners,
    Load,
    allow_open_files,
    broker,
    handshake,
    http_of,
    kilobytes_each,
    loading,
    ws_publish,
    ws_subscribe,
)
from benchmarks.harness import Benchmark, Case
from headrace.testing import ServerProcess

GIVE_UP_S = 60.0


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    total = 50_000 if quick else 400_000
    subscribers = 1000
    many = min(1_000 if quick else 10_000, allow_open_files() - 500)
    with loading() as load, broker() as process:
        if load is None:
            yield None
            return
        held = _Held(load, many, 5 if quick else 20)
        routing = _Routing(load, process, 500 if quick else 2000)

        yield Benchmark(
            "net_websocket",
            "over loopback, 100-byte JSON messages, fdatasync before each answer and delivery",
            [
                Case("publish, a message a frame, 10 connections",
                     lambda: _publish(load, process, total), "messages/s", 80_000),
                Case(f"fan-out to {subscribers:,} subscribers",
                     lambda: _fan_out(load, subscribers, 100 if quick else 400),
                     "deliveries/s", 200_000),
                Case(f"{many:,} connections, each receiving", held.memory, "KB each", 15,
                     smaller=True),
                Case(f"{many:,} connections, dropped", held.dropped, "connections", 0,
                     smaller=True),
                Case(f"{many:,} connections, deliveries", held.rate, "deliveries/s"),
                Case("routing at 100/s, mean", routing.mean, "µs", 1000, smaller=True),
                Case("routing at 100/s, p99", routing.p99, "µs", 3000, smaller=True),
            ],
        )  # fmt: skip


def _publish(load: Load, process: ServerProcess, total: int) -> float:
    address = http_of(process)
    return load.publish(
        address,
        "frames",
        ws_publish() * 100,
        each=100,
        rounds=total // 1000,
        connections=10,
        greeting=handshake(address),
    )


def _deliver(
    process: ServerProcess, listeners: Listeners, many: int, messages: int
) -> tuple[float, int]:
    """Publish so that every listener gets each message; (deliveries a second, connections left).

    Messages arrive ten at a time, as they would from a busy publisher.
    """
    listeners.counts()
    with process.client() as client:
        began = time.monotonic()
        for _ in range(messages // 10 or 1):
            client.publish_many(TOPIC, [JSON_VALUE] * 10)
    wanted = (messages // 10 or 1) * 10 * many
    frames, last = 0.0, began
    while frames < wanted and time.monotonic() - began < GIVE_UP_S:
        time.sleep(0.05)
        found = listeners.counts()
        frames += found["frames"]
        last = max(last, found["last"])
        left = int(found["open"])
    return frames / (last - began), left - (frames < wanted)


def _fan_out(load: Load, subscribers: int, messages: int) -> float:
    with broker() as process:
        address = http_of(process)
        greeting = handshake(address) + ws_subscribe()
        with load.listening(address, "frames", subscribers, greeting) as listeners:
            speed, left = _deliver(process, listeners, subscribers, messages)
            assert left == subscribers
            return speed


class _Held:
    """Many connections at once; each sample is a fresh broker, looked at in three ways."""

    def __init__(self, load: Load, many: int, messages: int):
        self._load, self._many, self._messages = load, many, messages
        self._dropped = self._rate = 0.0

    def memory(self) -> float:
        with broker() as process:
            address = http_of(process)
            before = process.rss_bytes()
            greeting = handshake(address) + ws_subscribe()
            with self._load.listening(address, "frames", self._many, greeting) as listeners:
                self._rate, left = _deliver(process, listeners, self._many, self._messages)
                self._dropped = self._many - left
                return kilobytes_each(before, process.rss_bytes(), self._many)

    def dropped(self) -> float:
        return self._dropped

    def rate(self) -> float:
        return self._rate


class _Routing:
    """From a publisher's socket to a subscriber's, while little else happens."""

    def __init__(self, load: Load, process: ServerProcess, count: int):
        address = http_of(process)
        self._measure: Callable[[], list[float]] = lambda: load.latencies(
            address,
            "frames",
            per_second=100,
            count=count // 4,
            listen=handshake(address) + ws_subscribe(),
            request=ws_publish(),
            greeting=handshake(address),
        )
        self._found: list[float] = []

    def mean(self) -> float:
        self._found = self._measure()
        return statistics.fmean(self._found)

    def p99(self) -> float:
        return self._found[len(self._found) * 99 // 100]
