"""How long a small batch takes: ten records are published, and are looked for at the other end.

Two numbers of the same triggers: what Spark says a trigger took, without the time for which it waited
for records; and the time from before the publish until the sink's topic has the rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Benchmark, Case, console
from benchmarks.spark.work import new_path, new_topic
from benchmarks.spark.world import World

ROWS = 10
TRIGGERS = 50
"""In one run; Spark keeps the progress of the last 100."""
PAUSE_S = 0.05
WAIT_S = 30.0


class Rig:
    """A stream from one topic to another, and what its triggers took."""

    def __init__(self, world: World, client: Any, query: Any, source: str, sink: str):
        self._client, self._query = client, query
        self._source, self._sink = source, sink
        self._end = 0
        self._count = 10 if world.quick else TRIGGERS
        self._last = -1
        self.seen_ms: list[float] = []
        self.trigger_ms: list[float] = []

    def run(self) -> None:
        self.seen_ms = [self._once() for _ in range(self._count)]
        self.trigger_ms = []
        for progress in self._query.recentProgress:
            number = progress["batchId"]
            if progress["numInputRows"] and number > self._last:
                took = progress["durationMs"]
                self.trigger_ms.append(took["triggerExecution"] - took.get("latestOffset", 0))
                self._last = number

    def _once(self) -> float:
        time.sleep(PAUSE_S)  # the last trigger's end is not the first thing that this one waits for
        started = time.perf_counter()
        self._client.publish_many(self._source, [b"x" * 100] * ROWS, partition=0)
        wanted = self._end + ROWS
        while self._end < wanted:
            seen = {self._sink: {0: self._end}}
            if not self._client.wait_for(seen, timeout=WAIT_S):
                raise AssertionError(f"nothing came for {WAIT_S} s: {self._query.exception()}")
            self._end = self._client.positions(self._sink)[self._sink][0]["end"]
        return (time.perf_counter() - started) * 1000


@contextmanager
def prepared(world: World) -> Iterator[Benchmark]:
    with (
        world.broker.client() as client,
        new_topic(world, "in") as source,
        new_topic(world, "out") as sink,
    ):
        client.delete_topic(sink)
        client.create_topic(sink, partitions=1)
        query = (
            world.stream(source, startingOffsets="earliest")
            .select("value")
            .writeStream.format("headrace")
            .options(**world.options(sink))
            .option("checkpointLocation", str(new_path(world, "checkpoint")))
            .start()
        )
        try:
            rig = Rig(world, client, query, source, sink)
            with console.status("warming up"):
                rig.run()
                rig.run()

            def first(choose: Callable[[list[float]], float]) -> Callable[[], float]:
                def work() -> float:
                    rig.run()
                    return choose(rig.trigger_ms)

                return work

            yield Benchmark(
                "spark_trigger",
                f"{ROWS} rows from topic to topic, exactly once, local[2], {TRIGGERS} triggers a run",
                [
                    Case("trigger, p50", first(statistics.median), "ms", 120, smaller=True),
                    Case("trigger, p90", lambda: _percentile(rig.trigger_ms), "ms", smaller=True),
                    Case("published to readable, p50", lambda: statistics.median(rig.seen_ms),
                         "ms", 120, smaller=True),
                    Case("published to readable, p90", lambda: _percentile(rig.seen_ms), "ms",
                         smaller=True),
                ],
                facts=world.facts,
            )  # fmt: skip
        finally:
            query.stop()


def _percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]
