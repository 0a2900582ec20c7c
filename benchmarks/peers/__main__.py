"""Run the comparison: all peers and works, or those that are named. ``--quick`` takes about five minutes."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, console, data_directory, machine, number
from benchmarks.peers import headrace, kafka, native, nats, rabbitmq, redis
from benchmarks.peers.fetching import Missing
from benchmarks.peers.report import write_report
from benchmarks.peers.server import Server
from benchmarks.peers.works import WORKS, Work

PEERS: dict[str, type[Server]] = {
    module.__name__.rpartition(".")[2]: module.Broker
    for module in (headrace, redis, nats, rabbitmq, kafka)
}
WORK_S = 600.0


class Run:
    """One comparison: servers that run, works that take turns, samples that grow."""

    def __init__(self, directory: Path, quick: bool):
        self._directory = directory
        self._quick = quick
        self._topics = itertools.count()
        self.servers: dict[tuple[str, str], Server] = {}
        self.missing: dict[str, str] = {}
        self.samples: dict[str, dict[str, list[float]]] = {}
        """Work -> peer and mode -> a value for each round."""
        self.failures: list[str] = []
        self._parts: dict[tuple[str, str, str], Any] = {}

    def open(self, peers: list[str], modes: list[str], stack: ExitStack) -> None:
        for peer in peers:
            cls = PEERS[peer]
            try:
                cls.fetch()
            except Missing as error:
                self.missing[cls.name] = str(error)
                console.print(f"[yellow]{cls.name} is missing: {error}[/yellow]")
                continue
            for mode in modes:
                server = cls(mode, self._directory / f"{peer}-{mode}")
                stack.callback(server.stop)
                took = server.start()
                console.print(f"{cls.name}, {mode}: serves after {took:.1f} s")
                self.servers[(peer, mode)] = server

    def round(self, turn: int, works: list[Work]) -> None:
        order = list(self.servers)
        shift = turn % len(order)
        self._parts.clear()
        for work in works:
            for key in order[shift:] + order[:shift]:
                self._one(work, *key)

    def _one(self, work: Work, peer: str, mode: str) -> None:
        label = f"{peer} {mode}"
        began = time.monotonic()
        with console.status(f"{work.title}: {label}"):
            try:
                value = self._measure(work, peer, mode)
            except NotImplementedError:
                return
            except (Missing, RuntimeError, subprocess.TimeoutExpired) as error:
                self.failures.append(f"{work.title}, {label}: {error}")
                console.print(f"[red]{work.title}, {label}: {error}[/red]")
                return
        self.samples.setdefault(work.name, {}).setdefault(label, []).append(value)
        console.print(
            f"{work.title}, {label}: {number(value)} {work.unit} ({time.monotonic() - began:.0f} s)"
        )

    def _measure(self, work: Work, peer: str, mode: str) -> float:
        server, amounts = self.servers[(peer, mode)], work.amounts(self._quick)
        topic = f"t{next(self._topics)}"
        if work.call == "native":
            return native.load(server, topic, amounts["count"])
        if work.call == "http":
            return native.http(server, topic, amounts["count"])
        if work.call in ("memory", "start"):
            return self._alone(work, peer, mode, topic, amounts)
        if not work.part:
            return float(self._drive(server, peer, work.call, topic, amounts))
        key = (peer, mode, work.call + json.dumps(amounts))
        if key not in self._parts:  # one measurement has several parts
            self._parts[key] = self._drive(server, peer, work.call, topic, amounts)
        return float(self._parts[key][work.part])

    def _drive(
        self, server: Server, peer: str, call: str, topic: str, amounts: dict[str, Any]
    ) -> Any:
        given = {
            "peer": peer, "mode": server.mode, "address": server.address, "topic": topic,
            "call": call, "amounts": amounts,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.peers.drive", json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WORK_S)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "it failed")
        result = json.loads(done.stdout.splitlines()[-1])
        if isinstance(result, dict) and result.get("absent"):
            raise NotImplementedError
        return result

    def _alone(
        self, work: Work, peer: str, mode: str, topic: str, amounts: dict[str, Any]
    ) -> float:
        """In a server of its own, so that nothing else is in its memory or on its disk."""
        server = PEERS[peer](mode, self._directory / f"{peer}-{mode}-{topic}")
        try:
            took = server.start()
            if amounts["count"]:
                before = server.memory_mb()
                self._drive(server, peer, "memory", topic, amounts)
                if work.call == "memory":
                    console.print(f"  empty: {before:.0f} MB")
                    return server.memory_mb()
                server.stop()
                took = server.start()
            return took
        finally:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "works", nargs="*", metavar="WORK", help=f"of {', '.join(w.name for w in WORKS)}"
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="with commas; all if not given")
    parser.add_argument("--modes", default="fsync,default", help="with commas: fsync, default")
    parser.add_argument("--quick", action="store_true", help="small amounts, one round")
    parser.add_argument("--rounds", type=int, help="repetitions; 5, or 1 with --quick")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "peers.json", help="where the samples go"
    )
    given = parser.parse_args()
    unknown = set(given.works) - {work.name for work in WORKS} | set(given.peers.split(",")) - set(
        PEERS
    )
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    works = [work for work in WORKS if not given.works or work.name in given.works]
    rounds = given.rounds or (1 if given.quick else 5)
    with data_directory() as directory, ExitStack() as stack:
        run = Run(directory, given.quick)
        run.open(given.peers.split(","), given.modes.split(","), stack)
        for turn in range(rounds):
            console.rule(f"round {turn + 1} of {rounds}")
            run.round(turn, works)
    result = {
        **machine(),
        "command": "python -m benchmarks.peers " + " ".join(sys.argv[1:]),
        "quick": given.quick,
        "rounds": rounds,
        "missing": run.missing,
        "failures": run.failures,
        "configured": {cls.name: cls.modes for cls in PEERS.values()},
        "tools": native.TOOLS,
        "samples": run.samples,
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    report = write_report(
        result, given.json.parent.parent if given.json.parent == RESULTS else given.json.parent
    )
    console.print(f"samples: {given.json}; report: {report}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
