"""Compare Headrace with Redis, NATS, RabbitMQ and Kafka: all works, or those that are named.

``--quick`` takes about five minutes and the whole comparison at most forty, besides the first fetch of the peers.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks._loopback import JSON_VALUE, bare
from benchmarks.harness import RESULTS, ROOT, console, data_directory, machine, number
from benchmarks.peers import native
from benchmarks.peers.brokers import BROKERS
from benchmarks.peers.drive import RESULT
from benchmarks.peers.fetching import CACHE
from benchmarks.peers.server import Missing, Server, output_of, versions
from benchmarks.peers.works import NAMED, WORKS, Work

MODES = ("fsync", "default")
DRIVE_S = 180.0
PATIENCE_S = {True: 0.8, False: 3.0}  # quick or not
FILL_S = {True: 20.0, False: 180.0}
MINUTES = 40.0
SETTLE_S = 1.0


class Run:
    """One comparison: servers that run, works that take turns, samples that grow."""

    def __init__(self, directory: Path, quick: bool, ends: float):
        self._directory = directory
        self._quick = quick
        self._ends = ends
        self._topics = itertools.count()
        self._classes: dict[str, type[Server]] = {}
        self._servers: dict[tuple[str, str], Server] = {}
        self.about: dict[str, dict[str, Any]] = {}
        """Peer -> its version, its client, its configuration."""
        self.missing: dict[str, str] = {}
        self.samples: dict[str, dict[str, list[float]]] = {}
        """Work -> peer and mode -> a value for each round."""
        self.failures: list[str] = []
        self.busy: list[float] = []
        self.is_cut = False
        """Whether the last round is not complete, because the time was over."""
        self._parts: dict[tuple[str, str, str], Any] = {}

    # --- the servers ------------------------------------------------------------------------
    def fetch(self, peers: list[str]) -> None:
        for peer in peers:
            try:
                cls = BROKERS[peer]
                _has_client(peer)
                cls.fetch()
                self._classes[peer] = cls
                self.about[peer] = {
                    "name": cls.name,
                    "version": cls.version(),
                    "client": versions(cls.clients),
                    "modes": cls.modes,
                }
            except Missing as error:
                self.missing[peer] = str(error)
                console.print(f"[yellow]{peer} is missing: {error}[/yellow]")

    def open(self, modes: list[str], stack: ExitStack) -> None:
        """Start all at the same time: what a start costs is measured elsewhere."""
        for peer, mode in itertools.product(self._classes, modes):
            server = self._classes[peer](mode, self._directory / f"{peer}-{mode}")
            stack.callback(server.kill)
            server.launch()
            self._servers[(peer, mode)] = server
        for (peer, mode), server in list(self._servers.items()):
            try:
                server.wait()
            except RuntimeError as error:
                self._fail(f"{peer} {mode}", error)
                del self._servers[(peer, mode)]

    # --- the works --------------------------------------------------------------------------
    def round(self, turn: int, works: list[Work]) -> None:
        """Each round begins with another peer, so a slow minute of the machine hits all of them."""
        self._parts.clear()
        self.busy.append(busy_share(0.5))
        keys = list(self._servers)
        for work in works:
            if work.call == "store" and turn:
                continue  # a long work: its restarts are repeated within
            shift = (turn * len(MODES)) % len(keys)
            for key in keys[shift:] + keys[:shift]:
                self._one(work, *key)

    def _one(self, work: Work, peer: str, mode: str) -> None:
        label, title = f"{peer} {mode}", work.title(self._quick)
        if time.monotonic() > self._ends:
            self.is_cut = True
            if not self.samples.get(work.name, {}).get(label):
                self._fail(f"{title}, {label}", "there was no time left")
            return
        began = time.monotonic()
        try:
            with console.status(f"{title}: {label}"):
                value = self._value(work, peer, mode)
        except NotImplementedError:
            return
        except (Missing, RuntimeError, OSError) as error:
            self._fail(f"{title}, {label}", error)
            return
        self.samples.setdefault(work.name, {}).setdefault(label, []).append(value)
        console.print(
            f"{title}, {label}: {number(value)} {work.unit} ({time.monotonic() - began:.1f} s)",
            highlight=False,
        )

    def _fail(self, what: str, error: object) -> None:
        text = f"{what}: {error}"
        self.failures.append(text)
        console.print(text, style="red", markup=False)

    def _value(self, work: Work, peer: str, mode: str) -> float:
        """One measurement may have several parts, each of which is a work."""
        amounts = work.amounts(self._quick)
        key = (peer, mode, work.call + json.dumps(amounts))
        if key not in self._parts:
            try:
                self._parts[key] = self._measure(work, peer, mode, amounts)
            except Exception as error:
                self._parts[key] = error
                raise
        found = self._parts[key]
        if isinstance(found, Exception):
            raise NotImplementedError  # its first part has said why
        if work.part and work.part not in found:
            raise NotImplementedError
        return float(found[work.part] if work.part else found)

    def _measure(self, work: Work, peer: str, mode: str, amounts: dict[str, Any]) -> Any:
        server, topic = self._servers[(peer, mode)], f"t{next(self._topics)}"
        if work.call == "native":
            return native.load(peer, server, topic, amounts["count"])
        if work.call == "http":
            return native.http(peer, server, topic, amounts["seconds"])
        if work.call == "echo":
            return self._echo(peer, mode, amounts["seconds"])
        if work.call == "store":
            return self._store(peer, mode, **amounts)
        return self._drive(server, peer, work.call, topic, amounts, PATIENCE_S[self._quick])

    def _drive(
        self, server: Server, peer: str, call: str, topic: str, amounts: dict[str, Any], patience: float
    ) -> Any:  # fmt: skip
        given = {
            "peer": peer, "mode": server.mode, "address": server.address, "topic": topic,
            "call": call, "amounts": amounts, "patience": patience,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.peers.drive", json.dumps(given)]
        lines = output_of(command, patience + DRIVE_S).splitlines()
        result = json.loads(next(line for line in lines if line.startswith(RESULT))[len(RESULT) :])
        if isinstance(result, dict) and result.get("absent"):
            raise NotImplementedError
        return result

    def _echo(self, peer: str, mode: str, seconds: int) -> float:
        """What this machine allows: it belongs to no peer, and is noted once."""
        if (peer, mode) != ("headrace", "fsync"):
            raise NotImplementedError
        with bare("http") as address:
            return native.post(address.port, "/", JSON_VALUE.decode(), seconds)

    def _store(
        self, peer: str, mode: str, few: int, many: int, megabytes: int, restarts: int
    ) -> dict[str, float]:
        """In a server of its own, so that nothing else is in its memory or on its disk."""
        cls = self._classes[peer]
        if cls.is_one_store and mode != "default" and (peer, "default") in self._servers:
            raise NotImplementedError  # the report takes those of the other mode
        name = f"t{next(self._topics)}"
        server = cls(mode, self._directory / f"{peer}-{mode}-{name}")
        found: dict[str, float] = {}
        try:
            found["start"] = server.start()
            time.sleep(SETTLE_S)
            found["empty"] = server.memory_mb()
            for part, count in (("few", few), ("many", many)):
                self._fill(server, peer, f"{name}-{part}", count, 100)
                found[part] = server.memory_mb()
            self._fill(server, peer, f"{name}-large", megabytes * 1000, 1000)
            times = []
            for _ in range(restarts):
                server.stop()
                times.append(server.start())
            found["restart"] = statistics.median(times)
        except RuntimeError as error:
            self._fail(f"memory and restart, {peer} {mode}", error)
        finally:
            server.kill()
        return found

    def _fill(self, server: Server, peer: str, topic: str, count: int, size: int) -> None:
        patience = FILL_S[self._quick]
        amounts = {"count": count, "size": size}
        done = self._drive(server, peer, "fill", topic, amounts, patience)
        if done < count:
            raise RuntimeError(f"it took {done:,} of {count:,} messages in {patience:.0f} s")
        time.sleep(SETTLE_S)


def _has_client(peer: str) -> None:
    try:
        importlib.import_module(f"benchmarks.peers.{peer}")
    except ImportError as error:
        raise Missing(f"{error}; pip install -e '.[peers]' installs the clients") from None


def busy_share(seconds: float) -> float:
    """How much of the machine's processors is in use: before the run, and between rounds, by others."""

    def ticks() -> tuple[int, int]:
        fields = [
            int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        ]
        return sum(fields), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    later, idle_later = ticks()
    return 1 - (idle_later - idle) / max(later - total, 1)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: every server is stopped, every file removed."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {sign: signal.signal(sign, stop) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(NAMED)}")
    parser.add_argument("--peers", default=",".join(BROKERS), help="with commas; all if not given")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas: fsync, default")
    parser.add_argument("--quick", action="store_true", help="small amounts, one round")
    parser.add_argument("--rounds", type=int, help="repetitions; 3, or 1 with --quick")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"begin nothing after; {MINUTES:g}"
    )
    parser.add_argument(
        "--json", type=Path, help=f"where the samples go; {RESULTS.name}/peers.json if all were run"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / "bench-data", help="where the servers keep their data"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="JSON",
        help="replace these works in the samples of an earlier run",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="write the report of the samples that exist"
    )
    given = parser.parse_args(words)
    given.peers, given.modes = given.peers.split(","), given.modes.split(",")
    for name, known in (("works", NAMED), ("peers", BROKERS), ("modes", MODES)):
        if unknown := sorted(set(getattr(given, name)) - set(known)):
            parser.error(f"unknown {name}: {', '.join(unknown)}; choose from {', '.join(known)}")
    if given.into:
        given.json = given.into
    if given.json is None:  # a part must not replace the report of everything
        is_part = given.works or set(given.peers) != set(BROKERS) or set(given.modes) != set(MODES)
        given.json = (CACHE / "part" if is_part else RESULTS) / "peers.json"
    given.json = given.json.resolve()
    given.rounds = given.rounds or (1 if given.quick else 3)
    return given


def compared(given: argparse.Namespace) -> dict[str, Any]:
    works = [work for work in WORKS if not given.works or work.name in given.works]
    facts, began, before = machine(), time.monotonic(), busy_share(1.0)
    with (
        ended_by_signals(),
        data_directory(given.data.resolve()) as directory,
        ExitStack() as stack,
    ):
        run = Run(directory, given.quick, began + given.minutes * 60)
        run.fetch(given.peers)
        fetched = time.monotonic()
        run.open(given.modes, stack)
        for turn in range(given.rounds):
            if not run.is_cut:
                console.rule(f"round {turn + 1} of {given.rounds}")
                run.round(turn, works)
    return {
        **facts,
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "quick": given.quick,
        "rounds": given.rounds,
        "is cut": run.is_cut,
        "seconds": time.monotonic() - fetched,
        "fetching seconds": fetched - began,
        "busy before": before,
        "busy between rounds": run.busy,
        "missing": run.missing,
        "failures": run.failures,
        "about": run.about,
        "samples": run.samples,
    }


def added(before: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The earlier run, with the works of the later one in place of its own. Ratios stay within a run."""
    titles = [NAMED[name].title(before["quick"]) for name in later["samples"]]
    kept = [failure for failure in before["failures"] if not failure.startswith(tuple(titles))]
    return {
        **before,
        "added": [*before.get("added", []), later["command"]],
        "failures": kept + later["failures"],
        "samples": {**before["samples"], **later["samples"]},
    }


def main(words: list[str] | None = None) -> int:
    from benchmarks.peers.report import write_report

    given = parsed(words)
    if given.report_only:
        result = json.loads(given.json.read_text())
    else:
        result = compared(given)
        if given.into:
            result = added(json.loads(given.into.read_text()), result)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    folder = given.json.parent
    report = write_report(result, folder.parent if folder == RESULTS else folder)
    console.print(f"samples: {given.json}; report: {report}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
