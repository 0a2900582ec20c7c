"""``python -m tests.crash --kills 100 [--seed N] [--mode mixed] [--keep DIR] [--fsync-fault]``"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.crash import fsync_fault
from tests.crash.load import PUBLISHERS
from tests.crash.runner import Run


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, help="repeats the load of an earlier run")
    parser.add_argument("--mode", default="mixed", choices=["mixed", "consume", *PUBLISHERS])
    parser.add_argument("--life", type=float, default=1.0, help="mean seconds between kills")
    parser.add_argument(
        "--fsync-fault",
        type=int,
        nargs="?",
        const=10,
        default=0,
        metavar="ROUNDS",
        help="instead of killing, let a sync fail so many times (needs strace)",
    )
    parser.add_argument("--keep", type=Path, help="keep data, log and history in this directory")
    return parser.parse_args(arguments)


def report(run: Run, where: Path) -> None:
    counts = run.checker.counts
    print(f"\nseed {run.seed}, mode {run.mode}; slowest open {run.slowest_open_s:.2f} s")
    for name in sorted(counts):
        if name != "anomalies":
            print(f"  {counts[name]:>10,}  {name}")
    if not run.checker.anomalies:
        print("nothing lost, nothing invented, nothing doubled, nothing out of order")
        return
    print(f"{counts['anomalies']} ANOMALIES; data, log and history are in {where}")
    for anomaly in run.checker.anomalies[:40]:
        print(f"  {anomaly}")


def main() -> int:
    options = parse()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    if options.fsync_fault and (why_not := fsync_fault.absence()) is not None:
        print(why_not)
        return 2
    where = options.keep or Path(tempfile.mkdtemp(prefix="headrace-crash-"))
    what = (
        f"{options.fsync_fault} failed syncs" if options.fsync_fault else f"{options.kills} kills"
    )
    print(f"seed {seed}, {what}, mode {options.mode}", flush=True)
    lines = 0

    def progress(line: str) -> None:
        nonlocal lines
        lines += 1
        if sys.stdout.isatty():
            print(f"\r{line}\033[K", end="", flush=True)
        elif lines % 10 == 0 or options.fsync_fault:
            print(line, flush=True)

    run = Run(
        where,
        kills=options.kills,
        seed=seed,
        mode=options.mode,
        life_s=options.life,
        progress=progress,
    )
    if options.fsync_fault:
        fsync_fault.go(run, options.fsync_fault, progress)
    else:
        run.go()
    report(run, where)
    if options.keep is None and not run.checker.anomalies:
        shutil.rmtree(where)
    return 1 if run.checker.anomalies else 0


if __name__ == "__main__":
    sys.exit(main())
