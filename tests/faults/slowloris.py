"""Sockets that send the beginning of a request a byte at a time, thousands on each port.

Meanwhile everybody else is served on both ports, new connections come in, and segments roll (which needs file
descriptors). The broker closes them when their deadline is over (``server/deadlines.py``). At the end they are gone, and
so is their memory.
"""

from __future__ import annotations

import time
import urllib.request
from contextlib import ExitStack

from headrace.testing import ServerProcess, server_process
from tests.faults.peers import Peer, open_sockets
from tests.faults.scenario import Outcome, RunOptions, Scenario

ANSWER_S = 10.0
SPARE_BYTES = 100 << 20
DEADLINE_S = 90.0
"""``idle_timeout`` is 75 seconds, and a deadline may be a little late."""


def served(server: ServerProcess) -> float:
    """Seconds that a new client on each port takes to publish, the slower of the two."""
    began = time.monotonic()
    with server.client(request_timeout=30.0) as client:
        client.publish("orders", b"x" * 2000)
    tcp = time.monotonic() - began
    began = time.monotonic()
    url = f"http://{server.http_address.host}:{server.http_address.port}/health/ready"
    with urllib.request.urlopen(url, timeout=30) as answer:
        answer.read()
    return max(tcp, time.monotonic() - began)


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    with server_process(segment_bytes="64KB") as server:
        served(server)
        memory, files = server.rss_bytes(), open_sockets(server.pid)
        slowest, rounds, most = 0.0, 0, 0
        with ExitStack() as stack:
            peers = [
                stack.enter_context(Peer(what, address, options.amount))
                for what, address in (("mumble", server.address), ("drip", server.http_address))
            ]
            for peer in peers:
                peer.wait_ready(120)
            end = time.monotonic() + options.seconds
            while time.monotonic() < end or not rounds:
                for _ in range(20):  # enough for a segment to roll now and then
                    slowest = max(slowest, served(server))
                rounds += 1
                most = max(most, server.rss_bytes())
                if slowest > ANSWER_S:
                    outcome.anomalies.append(f"a new client waited {slowest:.1f} seconds")
                    break
                time.sleep(0.2)
            left = [int((peer.told("open") or ["-1"])[-1]) for peer in peers]
        if options.seconds > DEADLINE_S and any(left):
            outcome.anomalies.append(f"still open after {options.seconds:.0f} seconds: {left}")
        for _ in range(120):
            if open_sockets(server.pid) <= files:
                break
            time.sleep(0.5)
        more, kept = open_sockets(server.pid) - files, server.rss_bytes() - memory
        if more > 0:
            outcome.anomalies.append(f"stuck: {more} sockets more than before")
        if kept > SPARE_BYTES:
            outcome.anomalies.append(f"stuck: {kept >> 20} MiB more memory than before")
    outcome.amount = 2 * options.amount
    outcome.figures = {
        "seconds held": round(options.seconds),
        "new clients served meanwhile": rounds * 20,
        "slowest answer, ms": round(slowest * 1000),
        "still open at the end, TCP port": left[0],
        "still open at the end, HTTP port": left[1],
        "memory at most, MiB": most >> 20,
    }
    return outcome


SCENARIO = Scenario(
    name="slowloris",
    what="sockets on each port that drip a byte at a time: everybody else is served",
    unit="sockets",
    amount=5_000,
    quick=100,
    run=run,
    seconds=120.0,
    seconds_quick=2.0,
)
