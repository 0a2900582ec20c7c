"""The process that is killed: a session and one query, told what to do in one line of JSON on stdin.

It says what happens in lines of JSON on stdout: ``started``; ``batch``, with its number and rows, for each
batch that is done; ``finished``, after it was told to finish (a second line on stdin) and nothing is left to
read; ``failed``, with the reason. It ends with its query.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Any

import orjson

from headrace.spark.sessions.builder import session
from tests.faults_spark.pipelines import PIPELINES

LOOK_AGAIN_S = 0.05


def tell(event: str, **more: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps({"event": event, **more}) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    orders = orjson.loads(sys.stdin.buffer.raw.readline())
    spark = session(
        "faults",
        master="local[2,4]",
        log_level="ERROR",
        log_file=orders["log"],
        **{"spark.driver.memory": "1g"},
    )
    finish = threading.Event()

    def listen() -> None:
        # Not through sys.stdin: its lock would be in the way of a process that ends.
        if not os.read(sys.stdin.fileno(), 1):
            os._exit(1)  # the runner is gone
        finish.set()

    threading.Thread(target=listen, daemon=True).start()
    query = PIPELINES[orders["pipeline"]].start(spark, orders)
    tell("started")
    last = None
    while query.isActive and not finish.wait(LOOK_AGAIN_S):
        progress = query.lastProgress
        if progress is not None and progress["batchId"] != last and progress["numInputRows"]:
            last = progress["batchId"]
            tell("batch", number=last, rows=progress["numInputRows"])
    if query.isActive:
        query.processAllAvailable()
        query.stop()
        tell("finished")
        return 0
    tell("failed", error=str(query.exception())[:2000])
    return 1


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # as a rule, that its JVM was killed
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # the session's own end takes seconds, and nothing is left to keep
