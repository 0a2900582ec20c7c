"""The consumers of a victim: members of groups that ack, refuse, forget, leave and come back."""

from __future__ import annotations

import time
from random import Random
from typing import Any

from headrace import Broker, BrokerClient, HeadraceError, Message
from headrace.errors import Closed, RequestTimeout, StaleDelivery, StorageFailed, StorageFull
from tests.crash.history import Oracle, identify, is_poison
from tests.crash.load import GROUPS, Client

MEMBERS = {"workers": 3, "in-turn": 2, "timid": 2, "patient": 1}


class Member(Client):
    """One member of a group. When it is ``tidy`` it refuses nothing but poison."""

    def __init__(self, name: str, group: str, tidy: bool, *rest: Any):
        super().__init__(name, *rest)
        self.group = group
        self.tidy = tidy
        self.topic, self.settings = GROUPS[group]
        self._joined = 0
        self.member = ""

    def run(self) -> None:
        while not self.stopping.is_set():
            self.join_group()

    def join_group(self) -> None:
        self._joined += 1
        self.member = f"{self.name}-{self._joined}"
        with self.broker.subscription(
            self.group,
            self.topic,
            prefetch=self.random.choice((5, 50, 500)),
            **self.settings,
        ) as consumer:
            self.consume(consumer, self.random.choice((50, 500, 5000)))
            self.oracle.tell("left", member=self.member, life=self.life)

    def consume(self, consumer: Any, count: int) -> None:
        for number in range(count):
            if self.stopping.is_set():
                return
            try:
                message = consumer.get(0.05)
            except RequestTimeout:
                if self.random.random() < 0.2:
                    self.flush()
                continue
            except Closed:
                if not self.is_patient:
                    self.stopping.set()
                return
            self.handle(message)
            if self.group == "timid" and not self.tidy and self.random.random() < 0.02:
                time.sleep(0.05)  # falls behind, so that retention has to wait for it
            if number % 64 == 63 and self.random.random() < 0.5:
                self.flush()

    def deadline(self, message: Message) -> int:
        return int(message.lease.deadline * 1e9)

    def flush(self) -> None:
        since = time.monotonic_ns()
        try:
            self.broker.flush()
        except (StorageFailed, StorageFull):
            return  # the disk is full to the brim; the broker tries again by itself
        except StaleDelivery:
            return  # some acks came too late, of this member or of another; the next flush says more
        self.oracle.tell("flushed", member=self.member, life=self.life, since=since)

    def handle(self, message: Message) -> None:
        value = identify(message)
        self._count += 1
        delivery = f"{self.life}/{self.name}/{self._count}"
        self.oracle.tell(
            "deliver",
            delivery=delivery,
            group=self.group,
            member=self.member,
            life=self.life,
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            value=value,
            key=None if message.key is None else message.key.decode(),
            attempt=message.attempt,
            deadline=self.deadline(message),
        )
        fate = 1.0 if self.tidy else self.random.random()
        try:
            if fate < (0.01 if self.group == "timid" else 0.003):
                pass  # forgotten: it comes again when its time is up, or when this one leaves
            elif fate < 0.02 or (is_poison(value) and self.settings["max_deliveries"]):
                self.oracle.tell("nack", delivery=delivery)
                message.nack()
            else:
                self.oracle.tell("ack", delivery=delivery)
                message.ack()
        except StaleDelivery:
            self.oracle.tell("stale", delivery=delivery)


def members(
    broker: Broker, oracle: Oracle, life: int, seed: int, *, tidy: bool = False
) -> list[Client]:
    return [
        Member(
            f"{group}-{number}",
            group,
            tidy,
            broker,
            oracle,
            life,
            Random(f"{seed}/{life}/{group}/{number}"),
        )
        for group, count in MEMBERS.items()
        for number in range(count)
    ]


def is_idle(broker: Broker | BrokerClient) -> str | None:
    """None when every group is done with everything; else what is missing."""
    waiting = len(broker.scheduled())
    if waiting:
        return f"{waiting} delayed messages wait"
    for group, (topic, _) in GROUPS.items():
        try:
            found = broker.subscription_stats(group, topic)
        except HeadraceError as error:
            return str(error)
        if found["lag"]:
            return f"{group} lags by {found['lag']}: {found}"
    return None
