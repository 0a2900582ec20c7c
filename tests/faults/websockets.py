"""Many WebSockets for a long time: each subscribed, each gets every message; then they go, and so does their memory.

The clients are the native load generator of the benchmarks, because ten thousand clients in Python would take more of
the machine than the broker.
"""

from __future__ import annotations

import time

from benchmarks._loopback import TOPIC, Load, allow_open_files, handshake, loading, ws_subscribe
from headrace.testing import ServerProcess, server_process
from tests.faults.peers import open_sockets
from tests.faults.scenario import Outcome, RunOptions, Scenario

SPARE_BYTES = 100 << 20
"""What the process may keep of freed memory, and use for other things."""
ANSWER_S = 10.0
"""However many are connected, a publish is answered within this time; a generous bound."""


def run(options: RunOptions) -> Outcome:
    limit = allow_open_files() - 1_000
    outcome = Outcome()
    if options.amount > limit:
        outcome.absent = (
            f"{options.amount} sockets were wanted, the limit of open files allows {limit}"
        )
    with loading() as load:
        if load is None:
            outcome.absent = "gcc is not installed"
            return outcome
        with server_process() as server:
            _hold(server, load, min(options.amount, limit), options, outcome)
    return outcome


def _hold(
    server: ServerProcess, load: Load, many: int, options: RunOptions, outcome: Outcome
) -> None:
    with server.client(request_timeout=60.0) as client:
        client.create_topic(TOPIC)
        memory, files = server.rss_bytes(), open_sockets(server.pid)
        sent, frames, slowest, most = 0, 0.0, 0.0, 0
        greeting = handshake(server.http_address) + ws_subscribe()
        with load.listening(server.http_address, "frames", many, greeting) as listeners:
            end = time.monotonic() + options.seconds
            told = time.monotonic()
            while time.monotonic() < end or sent < 3:
                began = time.monotonic()
                client.publish(TOPIC, b'{"number": %d}' % sent)
                slowest = max(slowest, time.monotonic() - began)
                sent += 1
                time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
                found = listeners.counts()
                frames += found["frames"]
                most = max(most, server.rss_bytes())
                if found["open"] != many:
                    outcome.anomalies.append(
                        f"lost connections: {found['open']} of {many} are open"
                    )
                    break
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    options.progress(
                        f"{sent} messages to {many:,} WebSockets, {frames:,.0f} frames"
                    )
            for _ in range(60):  # what is still on its way
                if frames >= sent * many:
                    break
                time.sleep(0.5)
                frames += listeners.counts()["frames"]
        if frames != sent * many:
            outcome.anomalies.append(
                f"{sent} messages to {many} WebSockets were {frames:.0f} frames"
            )
        if slowest > ANSWER_S:
            outcome.anomalies.append(f"a publish took {slowest:.1f} seconds")
        for _ in range(120):
            if open_sockets(server.pid) <= files:
                break
            time.sleep(0.5)
        left = open_sockets(server.pid) - files
        kept = server.rss_bytes() - memory
        if left > 0:
            outcome.anomalies.append(f"stuck: {left} sockets more than before")
        if kept > SPARE_BYTES:
            outcome.anomalies.append(f"stuck: {kept >> 20} MiB more memory than before")
    outcome.amount = many
    outcome.figures = {
        "seconds held": round(options.seconds),
        "messages published": sent,
        "frames delivered": round(frames),
        "slowest publish, ms": round(slowest * 1000),
        "memory at most, MiB": most >> 20,
        "memory kept at the end, MiB": max(kept, 0) >> 20,
    }


SCENARIO = Scenario(
    name="websockets",
    what="subscribed WebSockets held for a long time: every message to each, memory and files come back",
    unit="WebSockets",
    amount=10_000,
    quick=200,
    run=run,
    seconds=600.0,
    seconds_quick=3.0,
)
