"""One work of one peer, in a process of its own: ``python -m benchmarks.peers.drive '{"peer": …}'`` prints JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.peers.driver import Driver, paced

FILL = 10_000
LOOP = 20_000
FILL_S = 30.0
WORK_S = 20.0
"""A work that takes longer ends here, and its rate is that of what was done."""


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


def fill(driver: Driver, count: int, size: int) -> int:
    """Publish so many, or as many as the peer takes in ``FILL_S``; returns how many."""
    step = max(1, min(FILL, (1 << 20) // max(size, 1)))
    chunk, ends = values(step, size), time.monotonic() + FILL_S
    for start in range(0, count, step):
        driver.send_batch(chunk[: count - start])
        if time.monotonic() > ends:
            return min(start + step, count)
    return count


def rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


# --- works ------------------------------------------------------------------------------------------
def one(driver: Driver, *, count: int, size: int) -> dict[str, float]:
    times = []
    for value in values(count, size):
        began = time.perf_counter()
        driver.put(value)
        times.append(time.perf_counter() - began)
    return spread(times[count // 10 :])


def loop(driver: Driver, *, count: int, size: int) -> float:
    given = values(count, size)
    driver.put(given[0])
    done, began = 0, time.perf_counter()
    while done < count and time.perf_counter() - began < WORK_S:
        driver.send_all(given[done : done + LOOP])
        done += LOOP
    return rate(done, began)


def batches(driver: Driver, *, count: int, size: int, by: int) -> float:
    given = values(by, size)
    driver.send_batch(given)
    began = time.perf_counter()
    done = 0
    while done < count and time.perf_counter() - began < WORK_S:
        driver.send_batch(given)
        done += by
    return rate(done, began)


def read(driver: Driver, *, count: int, size: int) -> float:
    count = fill(driver, count, size)
    began = time.perf_counter()
    found = driver.read(count)
    assert found == count, f"{found:,} of {count:,} were read"
    return rate(count, began)


def values_only(driver: Driver, *, count: int, size: int) -> float:
    count = fill(driver, count, size)
    began = time.perf_counter()
    found = driver.values(count)
    assert found == count, f"{found:,} of {count:,} were read"
    return rate(count, began)


def queue(driver: Driver, *, count: int, size: int) -> float:
    count = fill(driver, count, size)
    began = time.perf_counter()
    driver.take(count)
    return rate(count, began)


def singles(driver: Driver, *, count: int, size: int) -> float:
    """The queue as most programs fill it: each message was published and answered before the next."""
    ends = time.monotonic() + FILL_S
    for number, value in enumerate(values(count, size), 1):
        driver.put(value)
        if time.monotonic() > ends:
            count = number
            break
    began = time.perf_counter()
    driver.take(count)
    return rate(count, began)


def fan_out(driver: Driver, *, count: int, size: int, subscribers: int) -> float:
    return count * subscribers / driver.fan_out(subscribers, values(count, size))


def latency(
    driver: Driver, *, rate: int, seconds: float, size: int, given: dict[str, Any]
) -> dict[str, float]:
    count = int(rate * seconds)
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers.drive",
        json.dumps({**given, "call": "pace"}),
    ]
    publisher: list[subprocess.Popen[bytes]] = []
    times: list[float] = []
    clock, number = time.monotonic_ns, int.from_bytes

    def seen(value: bytes) -> None:
        times.append((clock() - number(value[:8], "little")) / 1e9)

    driver.take(count, seen, ready=lambda: publisher.append(subprocess.Popen(command)))
    assert publisher[0].wait(60) == 0
    return spread(times[count // 10 :])


def pace(driver: Driver, *, rate: int, seconds: float, size: int) -> None:
    driver.send_paced(paced(int(rate * seconds), rate, size))


def memory(driver: Driver, *, count: int, size: int) -> None:
    fill(driver, count, size)


CALLS = {
    "one": one, "loop": loop, "batches": batches, "read": read, "values": values_only, "queue": queue,
    "singles": singles, "fan_out": fan_out, "latency": latency, "pace": pace, "memory": memory,
}  # fmt: skip


def main() -> None:
    given = json.loads(sys.argv[1])
    module = importlib.import_module(f"benchmarks.peers.{given['peer']}")
    driver: Driver = module.Client(given["address"], given["mode"], given["topic"])
    amounts = dict(given["amounts"])
    if given["call"] == "latency":
        amounts["given"] = given
    try:
        result: Any = CALLS[given["call"]](driver, **amounts)  # type: ignore[operator]
    except NotImplementedError:
        result = {"absent": True}
    finally:
        driver.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
