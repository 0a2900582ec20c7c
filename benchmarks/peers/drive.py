"""One work of one peer, in a process of its own: ``python -m benchmarks.peers.drive '{"peer": …}'`` prints JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.driver import Driver, paced

RESULT = "result: "
"""Begins the line of the answer: a client may print others."""
LOOP = 20_000
"""How many go through the plain loop between two looks at the clock."""
PROBE = 500
"""How many tell whether a peer is slow."""


def percentile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(int(len(sorted_values) * share), len(sorted_values) - 1)]


def spread(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and p99.9 in microseconds."""
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    return {name: percentile(ordered, share) * 1e6 for name, share in shares.items()}


def values(count: int, size: int) -> list[bytes]:
    pool = [os.urandom(size) for _ in range(min(count, 1000))]
    return (pool * (count // len(pool) + 1))[:count]


class Works:
    """``patience`` seconds are enough for one part of a work: a peer that needs longer does less, and its rate is
    that of what it did."""

    def __init__(self, driver: Driver, patience: float, given: dict[str, Any]):
        self._driver = driver
        self._patience = patience
        self._given = given

    def _step(self, size: int, most: int) -> int:
        """How many are sent between two looks at the clock: few if the peer is slow. They warm it up, too."""
        began = time.perf_counter()
        self._driver.send_all(values(PROBE, size))
        return most if time.perf_counter() - began < self._patience / 20 else min(PROBE, most)

    def _fill(self, count: int, size: int) -> int:
        """Publish at least so many in batches, or as many as there is patience for; returns how many."""
        step = self._step(size, max(1, min(10_000, (1 << 20) // size)))
        chunk, ends, done = values(step, size), time.monotonic() + self._patience, PROBE
        while done < count and time.monotonic() < ends:
            self._driver.send_batch(chunk)
            done += step
        return done

    def _take(self, count: int) -> float:
        began = []
        self._driver.take(count, lambda: began.append(time.perf_counter()))
        return _rate(count, began[0])

    # --- publishing -------------------------------------------------------------------------
    def one(self, count: int, size: int) -> dict[str, float]:
        self._driver.put_each(values(count // 10, size))
        return spread(self._driver.put_each(values(count, size)))

    def loop(self, count: int, size: int) -> float:
        return self._send(self._driver.send_all, count, size, self._step(size, LOOP))

    def batches(self, count: int, size: int, by: int) -> float:
        self._driver.send_batch(values(by // 10, size))
        return self._send(self._driver.send_batch, count, size, by)

    def _send(self, send: Callable[[list[bytes]], None], count: int, size: int, step: int) -> float:
        given, began, done = values(step, size), time.perf_counter(), 0
        while done < count and time.perf_counter() - began < self._patience:
            send(given)
            done += step
        return _rate(done, began)

    def topics(self, count: int, size: int, many: int) -> float:
        return count / self._driver.topics(many, values(count, size))

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, size: int) -> dict[str, float]:
        count = self._fill(count, size)
        objects = self._read(self._driver.read, count)
        return {
            "objects": objects,
            "values": self._read(self._driver.values, count) if self._driver.values else objects,
        }

    def _read(self, read: Any, count: int) -> float:
        began = []
        found = read(count, lambda: began.append(time.perf_counter()))
        assert found == count, f"{found:,} of {count:,} were read"
        return _rate(count, began[0])

    def queue(self, count: int, size: int) -> float:
        return self._take(self._fill(count, size))

    def singly(self, count: int, size: int) -> dict[str, float]:
        """The topic as most programs fill it: a message at a time, and so it is stored."""
        part, ends, done = values(PROBE, size), time.monotonic() + self._patience, 0
        while done < count and time.monotonic() < ends:
            self._driver.send_singly(part)
            done += PROBE
        found = {"queue": self._take(done)}
        try:
            return {**found, "read": self._read(self._driver.read, done)}
        except NotImplementedError:
            return found

    def fan_out(self, count: int, size: int, subscribers: int) -> float:
        return count * subscribers / self._driver.fan_out(subscribers, values(count, size))

    def subscriptions(self, count: int, size: int, many: int) -> float:
        return count * many / self._driver.subscriptions(many, values(count, size))

    # --- latency ----------------------------------------------------------------------------
    def latency(self, rate: int, seconds: float, size: int) -> dict[str, float]:
        count = int(rate * seconds)
        given = json.dumps({**self._given, "call": "pace"})
        command = [sys.executable, "-m", "benchmarks.peers.drive", given]
        publisher: list[subprocess.Popen[bytes]] = []
        times: list[float] = []
        clock, number = time.monotonic_ns, int.from_bytes

        def seen(value: bytes) -> None:
            times.append((clock() - number(value[:8], "little")) / 1e9)

        self._driver.take(count, lambda: publisher.append(_quiet(command)), seen)
        assert publisher[0].wait(60) == 0
        return spread(times[count // 10 :])  # without the warm-up

    def pace(self, rate: int, seconds: float, size: int) -> None:
        self._driver.send_paced(paced(int(rate * seconds), rate, size))

    # --- the store ----------------------------------------------------------------------------
    def fill(self, count: int, size: int) -> int:
        self._driver.enqueue()
        return self._fill(count, size)


def _quiet(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


def main() -> None:
    given = json.loads(sys.argv[1])
    try:
        result = measure(given)
    except NotImplementedError:
        result = {"absent": True}
    print(f"{RESULT}{json.dumps(result)}", flush=True)


def measure(given: dict[str, Any]) -> Any:
    module = importlib.import_module(f"benchmarks.peers.{given['peer']}")
    as_log = given["call"] in ("read", "fan_out")
    driver: Driver = module.Client(given["address"], given["mode"], given["topic"], as_log)
    try:
        try:
            return getattr(Works(driver, given["patience"], given), given["call"])(
                **given["amounts"]
            )
        finally:
            if given["call"] not in ("fill", "pace"):  # others use their topics
                driver.drop()
    finally:
        driver.close()


if __name__ == "__main__":
    main()
