"""Peers that vanish without a word: the link goes down, and no packet says that they are gone.

The clients run in a network namespace that is joined to the broker's by a virtual cable. The cable is pulled
while a consumer has messages in its hands and many other sockets are open. TCP keep-alive and the user timeout
have to find that out: within a minute the sockets are gone, and a consumer on this side gets the messages.
It needs root and ``ip``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.testing import server_process
from tests.faults.peers import Peer, check, open_sockets, wait_for_rest
from tests.faults.scenario import Outcome, RunOptions, Scenario

NOTICED_S = 75.0
"""Half a minute by the settings of the sockets, and time for a busy machine."""
ADDRESS, PEER_ADDRESS = "10.217.43.1", "10.217.43.2"


def absence() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "a network namespace needs root and the command ip"
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def cable() -> Iterator[tuple[str, str]]:
    """(namespace, our end of the cable)"""
    name = f"headrace{os.getpid()}"
    ours, theirs = f"hr{os.getpid()}a", f"hr{os.getpid()}b"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        _ip("link", "set", theirs, "netns", name)
        _ip("addr", "add", f"{ADDRESS}/24", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "addr", "add", f"{PEER_ADDRESS}/24", "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        yield name, ours
    finally:
        subprocess.run(["ip", "link", "del", ours], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(options: RunOptions) -> Outcome:
    outcome = Outcome(absent=absence())
    if outcome.absent:
        return outcome
    with cable() as (namespace, ours), server_process(host=ADDRESS, insecure=True) as server:
        there = ("ip", "netns", "exec", namespace)
        with server.client() as client:
            client.create_subscription("workers", "orders")
        files = open_sockets(server.pid)
        sockets = [
            Peer("hold", address, options.amount // 2, *there)
            for address in (server.address, server.http_address)
        ]
        consumer = Peer("consume", server.address, "gone", *there)
        publisher = Peer("publish", server.address, "p0")
        try:
            for peer in (*sockets, consumer, publisher):
                peer.wait_ready(120)
            time.sleep(1.0)
            _ip("link", "set", ours, "down")
            # The consumer's process goes on in its namespace: it does not know either.
            began = time.monotonic()
            with Peer("consume", server.address, "here") as here:
                here.wait_ready()
                time.sleep(1.0)
                publisher.end()
                # The publisher's own socket is gone by now, the other consumer's is there.
                while open_sockets(server.pid) > files + 3:
                    if time.monotonic() - began > NOTICED_S:
                        left = open_sockets(server.pid) - files - 1
                        outcome.anomalies.append(
                            f"stuck: {left} sockets of vanished peers are open"
                        )
                        break
                    time.sleep(0.5)
                noticed = time.monotonic() - began
                outcome.anomalies += wait_for_rest(server)
            outcome.anomalies += check(server, [publisher], [consumer, here])
        finally:
            for peer in (*sockets, consumer, publisher):
                peer.kill()
                peer.end()
    outcome.amount = options.amount + 1
    outcome.figures = {
        "seconds until all were noticed": round(noticed),
        "messages acknowledged": len(publisher.told("ok")),
    }
    return outcome


SCENARIO = Scenario(
    name="vanished",
    what="peers whose link goes down: noticed within a minute, and their messages go to others",
    unit="peers",
    amount=1_000,
    quick=50,
    run=run,
)
