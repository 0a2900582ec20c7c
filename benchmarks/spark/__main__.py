"""Run benchmarks of Spark by name, all of them without one; exit 1 when one is missed and --strict."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.harness import RESULTS, console, write
from benchmarks.spark import __doc__ as text
from benchmarks.spark.kafka import packages
from benchmarks.spark.world import world

NAMES = ("scan", "sink", "trigger", "archive", "history", "upsert", "growth")
RECORDS = 10_000_000
RECORDS_QUICK = 200_000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--records", type=int, help=f"how many; {RECORDS:,}")
    parser.add_argument("--quick", action="store_true", help=f"{RECORDS_QUICK:,} of them")
    parser.add_argument("--no-kafka", action="store_true", help="do not fetch and measure Kafka")
    parser.add_argument("--json", type=Path, default=None, help=f"where to write; {RESULTS.name}/")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    arguments = parser.parse_args()
    chosen = arguments.names or list(NAMES)
    unknown = sorted(set(chosen) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    records = arguments.records or (RECORDS_QUICK if arguments.quick else RECORDS)
    found = packages() if "scan" in chosen and not arguments.no_kafka else None
    missed = []
    with world(records, quick=arguments.quick, jars=found.connector if found else None) as around:
        for name in chosen:
            module = importlib.import_module(f"benchmarks.spark.{name}")
            prepared = module.prepared(around, found) if name == "scan" else module.prepared(around)
            with prepared as benchmark:
                benchmark.run(quick=arguments.quick)
                benchmark.print()
                if arguments.json or records >= RECORDS:
                    write(benchmark, arguments.json or RESULTS)
                missed += [
                    f"{name}: {case.name}"
                    for case in benchmark.cases
                    if benchmark.judge(case)[1] is False
                ]
    if missed:
        console.print("missed: " + "; ".join(missed))
    return 1 if missed and arguments.strict else 0


if __name__ == "__main__":
    sys.exit(main())
