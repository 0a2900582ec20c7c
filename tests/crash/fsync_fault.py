"""A sync that really fails: the kernel's answer to one ``fdatasync`` is replaced by ``EIO``.

``strace`` does that from outside of the process, so the commits are written by threads here: it does not see what the
kernel does for io_uring (``tests/log/test_uring.py`` and the full ext4 of ``tests/faults/failing_syncs.py`` do). The broker must not try again: whoever waits hears
that the outcome is unknown, the process ends by itself with a code of its own, and the next start
does not trust what was cached. The checker looks at all of it, as after a kill.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from random import Random

from tests.crash.checker import Checker
from tests.crash.runner import CLOSE_S, START_S, Run
from tests.crash.victim import EXIT_FAILED


def absence() -> str | None:
    """Why it cannot be done here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace), so no fsync was made to fail"
    return None


def go(run: Run, rounds: int, progress: Callable[[str], None] = lambda line: None) -> Checker:
    random = Random(run.seed)
    run.options["disk"] = "threads"
    # Making a topic syncs files of its own; that one of those fails is a plain refusal.
    run.without.add("admin")
    run.set_the_stage()
    with run.victim("load") as victim:
        victim.opened.wait(START_S)
        time.sleep(1.0)
        run.kill(victim)
    for number in range(rounds):
        # Counted for each thread by itself. The loop's syncs some twenty times when it starts, and
        # then no more; those that wait for the disk do so all the time.
        when = random.choice((1, 8, 30, 30, 40, 50, 60, 80))
        inject = f"inject=fdatasync:error=EIO:when={when}"
        with run.victim("load", ["strace", "-f", "-qq", "-o", "/dev/null", "-e", inject]) as victim:
            code = victim.end(START_S)
            # It may not even have started, which is as good an end.
            opened = any(event["event"] == "opened" for event in victim.events)
            if code != (EXIT_FAILED if opened else 1):
                run.problem(f"a sync failed (the {when}th of a thread) and the code was {code}")
        if not (run.data / "@suspect").exists():
            run.problem("a sync failed and the directory was not marked")
        if run.checker.anomalies:
            break
        with run.victim("load") as victim:
            victim.opened.wait(START_S)
            time.sleep(0.5)
            if (run.data / "@suspect").exists():
                run.problem("the mark of a failed sync is still there after the next start")
            run.kill(victim)
            victim.end(CLOSE_S)
        progress(f"failed sync {number + 1}/{rounds}  {run.status()}")
        if run.checker.anomalies:
            break
    if not run.checker.anomalies:
        run.finish()
    return run.checker
