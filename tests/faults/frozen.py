"""SIGSTOP of both sides: the broker stands still under load, and so do clients with messages in their hands.

A frozen broker delays everybody and loses nothing. A frozen consumer's messages go to the others when their time
is up; what it acknowledges after that is refused. None of it makes a healthy message a dead letter.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from random import Random

from headrace.testing import server_process
from tests.faults.peer import ACK_TIMEOUT_S
from tests.faults.peers import Peer, check, open_sockets, wait_for_rest
from tests.faults.scenario import Outcome, RunOptions, Scenario


def run(options: RunOptions) -> Outcome:
    outcome = Outcome()
    random = Random(options.seed)
    with ExitStack() as stack:
        server = stack.enter_context(server_process())
        consumers = [stack.enter_context(Peer("consume", server.address, n)) for n in range(3)]
        publishers = [
            stack.enter_context(Peer("publish", server.address, f"p{n}")) for n in range(2)
        ]
        for peer in (*consumers, *publishers):
            peer.wait_ready()
        with server.client() as client:
            client.create_subscription("workers", "orders")
        files = open_sockets(server.pid)
        frozen = {"the broker": 0, "a consumer": 0, "a publisher": 0}
        while outcome.amount < options.amount:
            who = random.choice(("the broker", "a consumer", "a consumer", "a publisher"))
            seconds = random.choice((0.2, 1.0, ACK_TIMEOUT_S + 1.5))
            if who == "the broker":
                server.suspend()
                time.sleep(seconds)
                server.resume()
            else:
                peer = random.choice(consumers if who == "a consumer" else publishers)
                peer.freeze()
                time.sleep(seconds)
                peer.thaw()
            frozen[who] += 1
            outcome.amount += 1
            time.sleep(random.random() * 0.5)
        for publisher in publishers:
            publisher.end()
        outcome.anomalies += wait_for_rest(server)
        for consumer in consumers:
            consumer.end()
        outcome.anomalies += check(server, publishers, consumers)
        more = open_sockets(server.pid) - files
        if more > 0:
            outcome.anomalies.append(f"stuck: {more} sockets more than before")
        outcome.figures = {
            **{f"{who} frozen": count for who, count in frozen.items()},
            "messages acknowledged": sum(len(p.told("ok")) for p in publishers),
            "deliveries": sum(len(c.told("got")) for c in consumers),
        }
    return outcome


SCENARIO = Scenario(
    name="frozen",
    what="SIGSTOP of the broker, of consumers and of publishers, shorter and longer than the deadline",
    unit="freezes",
    amount=100,
    quick=3,
    run=run,
)
