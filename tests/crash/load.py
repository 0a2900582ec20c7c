"""The publishers of a victim, or of a cluster: each a thread that tells the oracle what it asks for and what it gets.

Everything they do follows from the seed and the life, so that a run can be repeated (its timing
cannot). A publisher's name begins its values; ``k…`` publishes with keys.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from headrace import Broker, BrokerClient, HeadraceError, Receipt
from headrace.errors import (
    BrokerFailed,
    Closed,
    ConnectFailed,
    ConnectionLost,
    OutcomeUnknown,
    ProducerFenced,
    RequestTimeout,
    StorageFailed,
    StorageFull,
)
from tests.crash.history import Oracle, body_of, headers_of, key_of, value_of

TOPICS: dict[str, dict[str, Any]] = {
    "orders": {"partitions": 4, "segment_bytes": 64 << 10},
    "events": {
        "partitions": 2,
        "durability": "interval",
        "sync_interval_ms": 20,
        "compression": "zstd",
        "segment_bytes": 4 << 10,
        "retention_bytes": 0,
    },
    "notes": {"durability": "never", "segment_bytes": 16 << 10, "retention_hours": None},
    "later": {"partitions": 2, "segment_bytes": 16 << 10},
}
"""Small segments, so that they roll all the time. A kill loses nothing in any durability mode: what
was written is in the page cache. (What a power cut would lose is ``tests/log``'s to test.)"""

GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "workers": ("orders", {"max_deliveries": 4, "backoff": 0.01, "backoff_max": 0.5}),
    "in-turn": (
        "orders",
        {"max_deliveries": 4, "backoff": 0.01, "backoff_max": 0.5, "ordering": "key"},
    ),
    "timid": (
        "events",
        {"max_deliveries": 0, "backoff": 0.01, "backoff_max": 0.5, "ack_timeout": 0.5},
    ),
    "patient": ("later", {"max_deliveries": 3, "backoff": 0.01, "backoff_max": 0.5}),
}

PUBLISHERS = {
    "publish": ["s1", "s2", "k1", "k2", "b1", "kb1", "e1", "ke1", "eb1", "n1", "nb1"],
    "idempotent": ["i1", "i2", "i3", "x1", "f1"],
    "delay": ["d1", "d2", "d3"],
    "admin": ["a1"],
}
"""By mode; ``mixed`` is all of them."""


UNKNOWN = (OutcomeUnknown, RequestTimeout, ConnectionLost, ConnectFailed)
"""After these, the call may have had its effect or not."""


class Client:
    """A thread with a broker, or with a client of one, until it is stopped."""

    is_patient = False
    """The broker comes back: go on after an error."""
    pace = 1.0
    """How many times as long it pauses."""

    def __init__(
        self,
        name: str,
        broker: Broker | BrokerClient,
        oracle: Oracle,
        life: int,
        random: Random,
    ):
        self.name, self.broker, self.oracle = name, broker, oracle
        self.life, self.random = life, random
        self.stopping = threading.Event()
        self.is_unknown = False
        """The outcome of the last call."""
        self.trouble: HeadraceError | None = None
        """The last error outside of a call that is told."""
        self._count = 0
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _main(self) -> None:
        try:
            while not self.stopping.is_set():
                try:
                    self.run()
                except HeadraceError as error:
                    if not self.is_patient:
                        raise
                    self.trouble = error
                    self.stopping.wait(0.2)
        except (Closed, BrokerFailed, OutcomeUnknown):
            pass  # the broker went first, or is about to
        except Exception as error:
            self.oracle.tell("problem", what=f"{self.name}: {type(error).__name__}: {error}")

    def run(self) -> None:
        while not self.stopping.is_set():
            self.step()

    def step(self) -> None:
        raise NotImplementedError

    def pause(self, seconds_max: float) -> None:
        self.stopping.wait(self.random.random() * seconds_max * self.pace)

    def next_op(self) -> str:
        self._count += 1
        return f"{self.name}-{self.life}-{self._count}"

    def call(
        self, op: str, what: str, topic: str, call: Callable[[], Any], **fields: Any
    ) -> Any | None:
        """Make a call and tell of it. None: it was refused, or nobody knows."""
        self.oracle.tell("invoke", op=op, what=what, topic=topic, **fields)
        self.is_unknown = False
        try:
            answer = call()
        except UNKNOWN as error:
            self.is_unknown = True
            self.oracle.tell("unknown", op=op, code=error.code)
            return None
        except HeadraceError as error:
            self.oracle.tell("fail", op=op, code=error.code)
            if isinstance(error, (Closed, BrokerFailed)) and not self.is_patient:
                raise
            return None
        receipts = answer if isinstance(answer, list) else [answer]
        self.oracle.tell(
            "ok",
            op=op,
            receipts=[[r.partition, r.offset, r.count] for r in receipts if isinstance(r, Receipt)],
        )
        return answer


def values_of(op: str, count: int) -> list[str]:
    return [value_of(op, index) for index in range(count)]


class Single(Client):
    """One message after the other."""

    def __init__(self, name: str, topic: str, *rest: Any):
        super().__init__(name, *rest)
        self.topic = topic

    def step(self) -> None:
        op = self.next_op()
        value = value_of(op, 0)
        self.call(
            op,
            "publish",
            self.topic,
            lambda: self.broker.publish(
                self.topic, body_of(value), headers_of(value), key=key_of(value)
            ),
            count=1,
        )
        self.pause(0.008)


class Pinned(Single):
    """To one partition: ``p3-`` to partition 3. ``answered``: when the last call that had an answer began."""

    answered = 0

    def step(self) -> None:
        op = self.next_op()
        value, partition = value_of(op, 0), int(self.name[1:])
        began = time.monotonic_ns()
        receipt = self.call(
            op,
            "publish",
            self.topic,
            lambda: self.broker.publish(
                self.topic, body_of(value), headers_of(value), partition=partition
            ),
            count=1,
        )
        if receipt is not None:
            self.answered = began
        self.pause(0.008)


class Bulk(Single):
    """Many at once; with keys they go to several partitions."""

    def step(self) -> None:
        op = self.next_op()
        values = values_of(op, self.random.choice((1, 2, 10, 50, 150, 300)))
        keys = [key_of(value) for value in values]
        self.call(
            op,
            "publish",
            self.topic,
            lambda: self.broker.publish_many(
                self.topic,
                [body_of(value) for value in values],
                [headers_of(value) for value in values],
                keys=keys if any(keys) else None,
            ),
            count=len(values),
        )
        self.pause(0.1)


class Idempotent(Client):
    """Numbers its batches; after a kill it sends the one that had no answer again."""

    TOPIC = "orders"

    def __init__(self, name: str, memory: dict[str, Any] | None, *rest: Any):
        super().__init__(name, *rest)
        self.memory = memory or {}
        """What the parent remembers: id, epoch, next sequence, and the batch without an answer."""

    def run(self) -> None:
        while not self.memory and not self.stopping.is_set():
            self.become()
        super().run()

    def become(self) -> None:
        """Get an id and the next epoch."""
        op = self.next_op()
        self.oracle.tell("invoke", op=op, what="producer", topic=self.name)
        try:
            id, epoch = self.broker.producer(self.name)
        except (StorageFailed, StorageFull) as error:
            self.oracle.tell("fail", op=op, code=error.code)
            self.pause(0.5)
            return
        self.memory = {"id": id, "epoch": epoch, "next": 0, "pending": None}
        self.oracle.tell("ok", op=op, producer=self.name, id=id, epoch=epoch)

    def step(self) -> None:
        pending = self.memory["pending"]
        if pending:  # whatever it takes: with this sequence nothing else may ever be sent
            self.publish(*pending)
        else:
            op, count = self.next_op(), self.random.choice((1, 1, 5, 40))
            sequence = self.memory["next"]
            if self.publish(op, sequence, count) and self.random.random() < 0.2:
                self.publish(op, sequence, count)  # as if the answer had been lost
        self.pause(0.03)

    def publish(self, op: str, sequence: int, count: int) -> bool:
        producer = (self.memory["id"], self.memory["epoch"], sequence)
        bodies = [body_of(value) for value in values_of(op, count)]
        headers = [headers_of(value) for value in values_of(op, count)]
        answer = self.call(
            op,
            "publish",
            self.TOPIC,
            lambda: self.broker.publish_many(self.TOPIC, bodies, headers, producer=producer),
            count=count,
            atomic=True,
            producer=self.name,
            sequence=sequence,
        )
        if answer is not None:
            self.memory["next"] = sequence + count
            self.memory["pending"] = None
        elif self.is_unknown:
            self.memory["pending"] = (op, sequence, count)
        return answer is not None


class Fenced(Idempotent):
    """Takes a new epoch in each life; its old one can publish no more."""

    def run(self) -> None:
        before, self.memory = self.memory, {}
        while not self.memory and not self.stopping.is_set():
            self.become()
        if before and self.memory:
            if self.memory["epoch"] <= before["epoch"]:
                what = f"{self.name}: epoch {self.memory['epoch']} after {before['epoch']}"
                self.oracle.tell("problem", what=what)
            if self.publish(self.next_op(), 0, 1):
                self._old(before)
        super().run()

    def _old(self, before: dict[str, Any]) -> None:
        op = self.next_op()
        self.oracle.tell("invoke", op=op, what="publish", topic=self.TOPIC, count=1)
        try:
            self.broker.publish(
                self.TOPIC,
                body_of(value_of(op, 0)),
                producer=(before["id"], before["epoch"], before["next"]),
            )
            self.oracle.tell("problem", what=f"{self.name}: an old epoch could publish")
        except (ProducerFenced, StorageFailed, StorageFull) as error:
            self.oracle.tell("fail", op=op, code=error.code)


class Keyed(Client):
    """A caller's own idempotency key, used again when there was no answer, and sometimes twice."""

    TOPIC = "notes"

    def __init__(self, name: str, memory: dict[str, Any] | None, *rest: Any):
        super().__init__(name, *rest)
        self.pending = (memory or {}).get("pending")

    def step(self) -> None:
        op = self.pending[0] if self.pending else self.next_op()
        self.pending = None
        self.publish(op)
        if self.is_unknown:
            self.pending = (op,)
        elif self.random.random() < 0.3:
            self.publish(op)
        self.pause(0.02)

    def publish(self, op: str) -> None:
        value = value_of(op, 0)
        self.call(
            op,
            "publish",
            self.TOPIC,
            lambda: self.broker.publish(
                self.TOPIC, body_of(value), headers_of(value), idempotency_key=op
            ),
            count=1,
            atomic=True,
            producer=self.name,
            sequence=0,
        )


class Delay(Client):
    """Messages for later, some of them cancelled."""

    TOPIC = "later"

    def step(self) -> None:
        op = self.next_op()
        value = value_of(op, 0)
        delay = self.random.choice((0.02, 0.02, 0.05, 0.3, 1.0, 3.0))
        receipt = self.call(
            op,
            "delay",
            self.TOPIC,
            lambda: self.broker.publish(self.TOPIC, body_of(value), headers_of(value), delay=delay),
            count=1,
            # The wall clock, in whole milliseconds, decides when it is due.
            due=time.monotonic_ns() + int(delay * 1e9) - 2_000_000,
        )
        if receipt is not None and self.random.random() < 0.1:
            self.pause(delay)
            self.call(
                self.next_op(),
                "cancel",
                self.TOPIC,
                lambda: self.broker.cancel(receipt.id),
                of=op,
            )
        self.pause(0.005)


class Admin(Client):
    """Topics and subscriptions come and go, and old segments with them."""

    def step(self) -> None:
        name = f"made-{self.next_op()}"
        self.made = 0
        self.define(name, lambda: self.broker.create_topic(name, partitions=2))
        group = f"{name}:readers"
        self.define(group, lambda: self.broker.create_subscription("readers", name))
        if self.random.random() < 0.7 and self.made == 2:
            with contextlib.suppress(StorageFull):
                self.broker.publish_many(name, [b"x"] * 10)
            self.oracle.tell("invoke", op=(gone := self.next_op()), what="drop", topic=group)
            drop = self.call(
                self.next_op(), "drop", name, lambda: self.broker.delete_topic(name) or []
            )
            if drop is not None:
                self.oracle.tell("ok", op=gone)
        if isinstance(self.broker, Broker):
            self.retain(self.broker)
        self.pause(0.3)

    @staticmethod
    def retain(broker: Broker) -> None:
        done = threading.Event()

        def retain() -> None:
            broker.engine.retention.run()
            done.set()

        broker._call(retain)
        done.wait(5)

    def define(self, name: str, call: Callable[[], Any]) -> None:
        self.made += self.call(self.next_op(), "define", name, lambda: call() or []) is not None


def publishers(
    names: Sequence[str],
    broker: Broker | BrokerClient,
    oracle: Oracle,
    life: int,
    seed: int,
    memory: dict[str, Any],
) -> list[Client]:
    """The clients of these names. What kind they are and where they publish is in the name."""
    clients: list[Client] = []
    for name in names:
        common = (broker, oracle, life, Random(f"{seed}/{life}/{name}"))
        kind = name.strip("0123456789")
        topic = {"e": "events", "n": "notes"}.get(kind.removeprefix("k")[:1], "orders")
        if kind == "i":
            clients.append(Idempotent(name, memory.get(name), *common))
        elif kind == "f":
            clients.append(Fenced(name, memory.get(name), *common))
        elif kind == "x":
            clients.append(Keyed(name, memory.get(name), *common))
        elif kind == "d":
            clients.append(Delay(name, *common))
        elif kind == "a":
            clients.append(Admin(name, *common))
        elif kind == "p":
            clients.append(Pinned(name, topic, *common))
        elif kind.endswith("b"):
            clients.append(Bulk(name, topic, *common))
        else:
            clients.append(Single(name, topic, *common))
    return clients
