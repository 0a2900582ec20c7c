"""The scenario: runs of some faults each, over one Kafka; each run has a cluster of its own and is checked as a whole."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash.checker import Checker
from tests.faults.cluster.load import ClusterLoad, history
from tests.faults.cluster.pauses import Pauses
from tests.faults.cluster.plan import Step, plan
from tests.faults.scenario import Outcome, RunOptions, Scenario

if TYPE_CHECKING:
    from tests.faults.cluster.stage import Stage

FAULTS_A_RUN = 100
"""The checker has all of a run in memory."""
SERVED_S = 60.0
"""After the faults of a step, each partition answers within this time."""
DRAIN_S = 120.0


class ClusterRun:
    """``seconds``: no step begins later than this; 0 means that all are done."""

    def __init__(self, stage: Stage, directory: Path, seed: int, faults: int, seconds: float = 0.0):
        self.stage, self.directory, self.seed = stage, directory, seed
        self.steps, self.seconds = plan(seed, faults), seconds
        self.served: list[float] = []
        self.drained_s = 0.0
        self.pauses = Pauses([])
        directory.mkdir(parents=True)
        lines = [" + ".join(map(str, step.faults)) for step in self.steps]
        (directory / "plan.txt").write_text("\n".join(lines) + "\n")

    def go(self) -> Checker:
        self.stage.start_nodes(f"faults-{self.seed}")
        load = ClusterLoad(self.stage.servers, self.directory, self.seed)
        try:
            load.define()
            load.start()
            load.wait_until_served(SERVED_S)
            began = time.monotonic()
            for step in self.steps:
                self._step(step, load)
                if self.seconds and time.monotonic() - began > self.seconds:
                    break
            load.wait_until_served(SERVED_S)
            self.drained_s = load.drain(DRAIN_S)
            load.read_all()
        finally:
            load.close()
            self.stage.stop_nodes()
        problems, self.stage.problems = self.stage.problems, []
        self.pauses = Pauses(history(load.path))
        checker = load.verdict()
        for problem in problems:
            checker.add({"event": "problem", "what": problem})
        return checker

    def _step(self, step: Step, load: ClusterLoad) -> None:
        threads = []
        for fault in step.faults:

            def run(fault: Any = fault) -> None:
                try:
                    load.oracle.tell("fault", **self.stage.break_for_a_while(fault))
                except Exception as error:
                    self.stage.problems.append(f"{fault}: {type(error).__name__}: {error}")

            threads.append(threading.Thread(target=run))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if step.rests:
            took = load.wait_until_served(SERVED_S)
            if took is not None:
                self.served.append(took)
        time.sleep(step.pause)


def run(options: RunOptions) -> Outcome:
    # Here, because it takes its time, and not everybody who runs another scenario has it.
    from benchmarks.spark.kafka import NotFetched, broker_jars
    from tests.faults.cluster.stage import Stage

    outcome = Outcome()
    try:
        broker_jars()
    except (NotFetched, OSError, subprocess.TimeoutExpired) as error:
        outcome.absent = f"Kafka cannot be fetched: {error}"
        return outcome
    directory = Path(tempfile.mkdtemp(prefix="headrace-cluster-"))
    client_log = logging.FileHandler(directory / "clients.log")
    logging.getLogger("headrace").addHandler(client_log)
    counts: Counter[str] = Counter()
    failovers: list[float] = []
    drains: list[float] = []
    served: list[float] = []
    slowest = 0.0
    stage = Stage(directory)
    try:
        stage.start_kafka()
        number = 0
        while outcome.amount < options.amount and not outcome.anomalies:
            faults = min(FAULTS_A_RUN, options.amount - outcome.amount)
            seed = options.seed + number
            one = ClusterRun(stage, directory / f"run{number}", seed, faults, options.seconds)
            checker = one.go()
            number += 1
            outcome.amount += checker.counts["faults"]
            outcome.anomalies += [f"{each} (see {one.directory})" for each in checker.anomalies]
            counts += checker.counts
            failovers += one.pauses.failovers()
            drains += one.pauses.drains()
            served += one.served
            slowest = max(slowest, one.drained_s)
            options.progress(
                f"{outcome.amount} faults, {counts['messages acknowledged']:,} messages acknowledged, "
                f"{counts['deliveries']:,} deliveries, {len(outcome.anomalies)} anomalies"
            )
            if options.seconds:
                break
    finally:
        stage.close()
        logging.getLogger("headrace").removeHandler(client_log)
        client_log.close()
    outcome.figures = _figures(counts, failovers, drains, served, slowest, stage)
    if not outcome.anomalies:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _figures(
    counts: Counter[str],
    failovers: list[float],
    drains: list[float],
    served: list[float],
    slowest: float,
    stage: Stage,
) -> dict[str, Any]:
    told = {
        name: counts[name]
        for name in ("messages acknowledged", "deliveries", "dead letters", "calls repeated")
    }
    told |= {
        name.replace("faults: ", ""): count
        for name, count in sorted(counts.items())
        if name.startswith("faults: ")
    }
    told["messages of unknown outcome"] = counts["messages unknown"]
    told["flushes that failed"] = counts["flushes that failed"]
    told["nodes that ended by themselves"] = stage.ended_by_themselves
    for name, seconds in (
        ("failover after a kill", failovers),
        ("pause of a drain", drains),
        ("served again after a step", served),
    ):
        if seconds:
            told[f"{name}, ms (median)"] = round(sorted(seconds)[len(seconds) // 2] * 1000)
            told[f"{name}, ms (longest)"] = round(max(seconds) * 1000)
    told["last drain of all subscriptions, ms"] = round(slowest * 1000)
    told["slowest start of a node, ms"] = round(stage.slowest_start_s * 1000)
    return told


SCENARIO = Scenario(
    name="cluster",
    what="three nodes over three Kafka nodes, killed, frozen, drained, cut off and slowed, several at once",
    unit="faults",
    amount=100,
    quick=6,
    run=run,
)
