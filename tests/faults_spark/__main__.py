"""``python -m tests.faults_spark --kills 30 [--seed N] [--pipeline topic] [--kinds jvm,broker] [--keep DIR]``"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults_spark.pipelines import PIPELINES
from tests.faults_spark.runner import KINDS, Kill, Run, table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults_spark", description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of each pipeline")
    parser.add_argument("--seed", type=int, help="repeats the choices of an earlier run")
    parser.add_argument("--pipeline", choices=[*PIPELINES, "all"], default="all")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is killed, in this order")
    parser.add_argument(
        "--keep", type=Path, help="keep data, checkpoint and logs in this directory"
    )
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    seed = secrets.randbits(32) if options.seed is None else options.seed
    where = options.keep or Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    good = True
    for name in PIPELINES if options.pipeline == "all" else [options.pipeline]:
        print(f"pipeline {name}: {options.kills} kills, seed {seed}", flush=True)

        def progress(row: Kill) -> None:
            print(list(table([row]))[1], flush=True)

        directory = where / name
        directory.mkdir(parents=True)
        print(next(table([])), flush=True)
        run = Run(
            directory,
            seed=seed,
            pipeline=name,
            kinds=options.kinds.split(","),
            early=0.25,
            progress=progress,
        )
        verdict = run.go(options.kills)
        print(f"{run.published:,} records published, {run.lives} drivers, {len(run.kills)} kills")
        if verdict.is_good:
            print("nothing lost, nothing doubled, nothing invented")
            continue
        good = False
        print(f"NOT EXACTLY ONCE (seed {seed}); data and logs are in {directory}")
        for what in ("lost", "doubled", "foreign"):
            texts = getattr(verdict, what)
            print(f"  {what}: {len(texts)} {texts[:10]}")
    if good and options.keep is None:
        shutil.rmtree(where)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
