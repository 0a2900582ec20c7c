"""Processes that open one data directory at the same moment.

``python -m tests.crash.racers DIRECTORY COUNT close|vanish`` forks them, lets them go together, and
passes on what each has to say, a JSON line each. The winner publishes a message and holds the
directory until stdin ends; then it closes the broker, or just vanishes.
"""

from __future__ import annotations

import os
import sys

import orjson

from headrace import Broker, HeadraceError


def race(directory: str, ending: str, gun: int, whistle: int) -> int:
    """One racer: opens the directory at the sound of the gun, ends at that of the whistle."""
    os.read(gun, 1)  # returns when the last writer has closed it
    try:
        broker = Broker.open(directory)
    except HeadraceError as error:
        say({"pid": os.getpid(), "code": error.code, "text": str(error)})
        return 1
    broker.publish("orders", f"by {os.getpid()}")
    say({"pid": os.getpid(), "code": "won"})
    os.read(whistle, 1)
    if ending == "close":
        broker.close()
    return 0


def say(what: dict[str, object]) -> None:
    os.write(sys.stdout.fileno(), orjson.dumps(what) + b"\n")


def main() -> int:
    directory, count, ending = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    gun, fire = os.pipe()
    whistle, blow = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(fire)
            os.close(blow)
            os._exit(race(directory, ending, gun, whistle))
        pids.append(pid)
    os.close(fire)
    sys.stdin.read()
    os.close(blow)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    say({"codes": codes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
