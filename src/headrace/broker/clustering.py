"""What a broker asks of its cluster, if it has one: the partitions are divided between several nodes.

Every node knows all topics and subscriptions and can read all partitions; it serves those that it owns (``Log.owned``): it
has the cursors there, and delivers. What concerns other partitions goes to their owners (``headrace/cluster``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace.access.caller import Caller
from headrace.broker.audit import Source
from headrace.broker.delivery import Member
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Topic
from headrace.errors import Done, InvalidArgument
from headrace.log.columns import Columns
from headrace.model import SubscriptionSettings, TopicSettings
from headrace.operations.cluster_catalog import ClusterStatus, TopicMap
from headrace.operations.declaring import Operation

if TYPE_CHECKING:
    from headrace.broker.administration import Administration
    from headrace.broker.backups import Entries, Take
    from headrace.broker.engine import Engine
    from headrace.broker.publishing import Publish
    from headrace.broker.topics import TopicDone


@dataclass(slots=True)
class ClusterFigures:
    """What a node has counted since its start."""

    slots_taken: int = 0
    slots_handed_back: int = 0
    slots_lost: int = 0
    """That another node had claimed while this one served them."""
    forwarded_batches: int = 0
    """Of publishes, sent to the owners of their partitions."""
    forwarded_bytes: int = 0
    on_taken: Callable[[float], None] = lambda seconds: None
    """How long it took from the moment a slot was given to this node until it is served."""
    on_read_back: Callable[[float], None] = lambda seconds: None
    """How long Kafka took from getting a commit to giving it back."""


class WantedSubscription(NamedTuple):
    name: str
    pattern: str
    start: str | int
    start_time_ms: int | None
    settings: dict[str, Any]
    owner: str | None


class Cluster(Protocol):
    address: str
    """Of this node, as the others and clients reach it."""
    figures: ClusterFigures

    @property
    def leads(self) -> bool:
        """Whether this node owns the slot with the broker's own topics: delayed messages, staged batches, reports."""

    # --- what all nodes agree on ----------------------------------------------------------------
    def create_then(self, name: str, go_on: Done) -> None:
        """Create a topic that somebody publishes to or subscribes to, unless it is there, and go on."""

    def create_letters(self, name: str, owner: str | None, then: Callable[[], None]) -> None:
        """Create a topic for dead letters; ``then`` is called when that is done, or should be tried again."""

    def create_topic(self, name: str, settings: TopicSettings, done: TopicDone) -> None: ...

    def change_topic(self, topic: Topic, settings: TopicSettings, done: TopicDone) -> None: ...

    def delete_topic(self, name: str, done: Done) -> None: ...

    async def subscribe(self, wanted: WantedSubscription) -> None:
        """Create the subscription, or change its settings."""

    def define(self, subscription: Subscription, done: Done) -> None:
        """Its settings have changed, or it is paused."""

    def undefine(self, subscription: Subscription, done: Done) -> None: ...

    def name_producer(
        self, name: str, new_id: int, done: Callable[[int, int, Any], None]
    ) -> None: ...

    # --- what goes to owners --------------------------------------------------------------------
    def delay(self, publish: Publish, columns: Columns, deliver_at: int) -> None:
        """Have the node that leads keep a delayed message."""

    async def ensure(self, name: str) -> None:
        """The topic is there; it is created if needed."""

    async def stage(self, properties: dict[str, str], body: bytes) -> str:
        """Have the node that leads stage a batch; returns its piece."""

    async def settle(
        self, verb: str, deliveries: list[str], fields: dict[str, Any], caller: str | None
    ) -> list[str]:
        """Settle what another node has handed out over HTTP; returns those that had ended."""

    def joined(self, subscription: Subscription, member: Member) -> None: ...

    def left(self, subscription: Subscription, member: Member, *, gives_back: bool) -> None: ...

    def is_sharing(self, subscription: Subscription) -> bool: ...

    async def call(
        self, administration: Administration, operation: Operation, checked: dict[str, Any]
    ) -> Any:
        """Carry an operation out where it belongs."""

    async def accept(self, operation: Operation, checked: dict[str, Any]) -> None:
        """Another node asks for it: refuse it unless it belongs here."""

    def flushed(self, source: Source, began: float) -> None:
        """A flush that began then has ended well; :class:`OutcomeUnknown` if acks were lost before it."""

    def fresh(self, topics: tuple[str, ...] = ()) -> Awaitable[None]:
        """Know everything that any node answered before now."""

    def is_node(self, secret: str) -> bool:
        """Whether a login is one of another node."""

    # --- for a backup ---------------------------------------------------------------------------
    def point_in_time(self, take: Take, hold_s: float) -> AbstractAsyncContextManager[Entries]:
        """The journal of all slots, older than the ends of the partitions that this node knows inside of it."""

    def hold_elsewhere(self, hold_s: float) -> None:
        """Have the other nodes delete no messages for so long."""

    async def slot_states(self) -> dict[str, Any]:
        """The state of the slots of this node, for the one that leads."""

    # --- for operators --------------------------------------------------------------------------
    def reasons(self) -> list[str]:
        """Why it is not ready."""

    async def status(self) -> ClusterStatus:
        """This node."""

    @property
    def cluster_name(self) -> str: ...

    @property
    def slots(self) -> set[int]:
        """That this node serves."""

    @property
    def waiting_slots(self) -> set[int]:
        """That this node should serve, and does not yet."""

    @property
    def drained(self) -> bool:
        """Whether it has handed all its slots to others."""

    @property
    def kafka_away(self) -> bool:
        """Whether Kafka does not answer this node."""

    def stalled(self) -> int:
        """Partitions of this node that Kafka has not given a record back of in time."""

    async def drain(self) -> None:
        """Hand all slots of this node to others."""

    def owner_of(self, topic: str, partition: int = 0) -> str | None:
        """The address of the node that serves a partition."""


class ClusterAdministration:
    """See :class:`headrace.operations.cluster_catalog.ClusterOperations`."""

    engine: Engine
    caller: Caller

    @property
    def _cluster(self) -> Cluster:
        if self.engine.cluster is None:
            raise InvalidArgument(
                "this broker is not a node of a cluster (engine=kafka, with slots)",
                code="no_cluster",
            )
        return self.engine.cluster

    async def cluster_status(self) -> ClusterStatus:
        return await self._cluster.status()

    async def drain_node(self, node: str) -> None:
        self.caller.need_everything()
        await self._cluster.drain()

    async def topic_map(self, topic: str) -> TopicMap:
        partitions = self.engine.topics.find(topic).partitions
        owner_of = self._cluster.owner_of
        return {"topic": topic, "owners": [owner_of(topic, each.number) for each in partitions]}


def settings_of(item: dict[str, Any]) -> SubscriptionSettings:
    """Of a definition; without settings that only another version has."""
    known = SubscriptionSettings.__dataclass_fields__
    found: SubscriptionSettings = SubscriptionSettings.of(
        {name: value for name, value in item["settings"].items() if name in known}
    )
    return found
