"""How a node is, for operators: readiness, metrics, and its part of ``headrace cluster status``."""

from __future__ import annotations

import asyncio
from collections import Counter

from headrace.broker.clustering import ClusterFigures
from headrace.broker.engine import Engine
from headrace.broker.slots import SlotStates
from headrace.engine.kafka.log import KafkaLog
from headrace.engine.kafka.shared import SharedStorage
from headrace.operations.cluster_catalog import ClusterStatus

SPARE_S = 2.0


class Reporting:
    """The part of a node that says how it is."""

    engine: Engine
    storage: SharedStorage
    state: SlotStates
    address: str
    timeout: float
    assigned: set[int]
    figures: ClusterFigures
    drained: bool
    loop: asyncio.AbstractEventLoop
    answered_s: float
    """When Kafka last said which nodes there are. It is asked every second."""

    def logs(self) -> list[KafkaLog]:
        raise NotImplementedError

    @property
    def cluster_name(self) -> str:
        return self.storage.link.cluster

    @property
    def slots(self) -> set[int]:
        return set(self.state)

    @property
    def waiting_slots(self) -> set[int]:
        return self.assigned - self.slots

    @property
    def kafka_away(self) -> bool:
        silent_s = self.loop.time() - self.answered_s
        return silent_s > self.timeout + SPARE_S or self.stalled() > 0

    def stalled(self) -> int:
        return sum(log.owned and log.is_stalled for log in self.logs())

    async def status(self) -> ClusterStatus:
        """This node, as one of the cluster's."""
        partitions, lags = Counter[int](), Counter[int]()
        async for log in self.engine.pace.each(self.logs()):
            partitions[self.state.slot_of(*log.about)] += log.owned
        async for subscription in self.engine.pace.each(tuple(self.engine.subscriptions())):
            for cursor in tuple(subscription.cursors.values()):
                place = cursor.partition
                lags[self.state.slot_of(place.topic, place.number)] += cursor.lag()
        slots, figures = sorted(self.slots), self.figures
        return {
            "cluster": self.cluster_name,
            "slots": self.storage.slots,
            "nodes": [
                {
                    "node": self.address,
                    "reachable": True,
                    "slots": slots,
                    "drained": self.drained,
                    "partitions": sum(partitions[slot] for slot in slots),
                    "connections": sum(1 for _ in self.engine.connections()),
                    "lag": sum(lags[slot] for slot in slots),
                    "moves": figures.slots_taken + figures.slots_handed_back + figures.slots_lost,
                    "kafka_away": self.kafka_away,
                }
            ],
            "owners": [
                {
                    "slot": slot,
                    "node": self.address,
                    "partitions": partitions[slot],
                    "lag": lags[slot],
                }
                for slot in slots
            ],
            "missing": [],
        }

    def reasons(self) -> list[str]:
        if self.drained:
            return ["the node is drained: other nodes have its slots"]
        reasons = []
        if self.waiting_slots:
            reasons.append(f"the node does not serve {len(self.waiting_slots)} of its slots yet")
        elif not self.slots and not self._nodes_serve():
            reasons.append("the node has no slots yet")
        if self.kafka_away:
            reasons.append(f"Kafka has not answered for {self.timeout:g} seconds")
        return reasons

    def _nodes_serve(self) -> bool:
        return all(log.owned or log.replica.owner for log in self.logs())
