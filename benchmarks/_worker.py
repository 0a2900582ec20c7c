"""Runs the cases of one benchmark on demand: ``python -c "$(cat benchmarks/_worker.py)" NAME QUICK``.

``_against`` starts it in two checkouts. It imports ``benchmarks`` from the checkout that it runs in, so it
uses only what every version of that package has. Standard input names a case by its index; each answer
is one line of JSON. End of input ends it.
"""

import importlib
import json
import os
import sys

name, quick = sys.argv[1], sys.argv[2] == "True"
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # a benchmark may print; that is not an answer
with importlib.import_module(f"benchmarks.{name}").prepared(quick=quick) as benchmark:
    if benchmark is None:
        answers.write("null\n")
        sys.exit()
    order = [case for case in benchmark.cases if not case.is_repeated]
    order += [case for case in benchmark.cases if case.is_repeated]
    facts = {
        "repeat": benchmark.repeat,
        "cases": [{"name": c.name, "unit": c.unit, "smaller": c.smaller} for c in order],
    }
    answers.write(json.dumps(facts) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(order[int(line)].run()) + "\n")
