"""Run the named benchmarks, or all of them; with --strict, exit 1 if a target is missed."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import benchmarks
from benchmarks._against import SLOWER, against
from benchmarks.harness import RESULTS, console, write


def names() -> list[str]:
    hidden = ("__main__", "harness", "peers", "spark")  # the last two have commands of their own
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return [name for name in found if name not in hidden and not name.startswith("_")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="small data, few repetitions")
    parser.add_argument("--json", type=Path, default=None, help=f"where to write; {RESULTS.name}/")
    parser.add_argument("--strict", action="store_true", help="fail if a target is missed")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with another checkout: each case runs in both, alternately",
    )
    parser.add_argument("--rounds", type=int, help="with --against: rounds instead of the default")
    arguments = parser.parse_args()
    chosen = arguments.names or names()
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(names())}")
    if arguments.against is not None:
        other = arguments.against.resolve()
        if not (other / "benchmarks" / "harness.py").is_file():
            parser.error(f"{other} is not a checkout with benchmarks")
        slower = against(
            other,
            chosen,
            quick=arguments.quick,
            rounds=arguments.rounds,
            directory=arguments.json or RESULTS,
        )
        if slower:
            console.print(f"slower than {SLOWER} ×: " + "; ".join(slower))
        return 1 if slower and arguments.strict else 0
    missed = []
    for name in chosen:
        module = importlib.import_module(f"benchmarks.{name}")
        with module.prepared(quick=arguments.quick) as benchmark:
            if benchmark is None:
                continue
            benchmark.run(quick=arguments.quick)
            benchmark.print()
            if not arguments.quick or arguments.json:
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
