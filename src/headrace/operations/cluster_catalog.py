"""The operations about a cluster of several nodes: a part of ``catalog.py``."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from headrace.operations.arguments import ExistingTopic
from headrace.operations.declaring import operation, route
from headrace.operations.results import Count

NodeName = Annotated[str, Meta(min_length=1, max_length=200)]


class NodeStatus(TypedDict):
    node: str
    """Its address, as ``--advertise`` says."""
    reachable: bool
    """Whether it answered the node that was asked; if not, nothing else is known of it."""
    slots: list[Count]
    """That it serves now."""
    drained: bool
    partitions: Count
    """That it serves."""
    connections: Count
    lag: Count
    """Messages in its partitions that subscriptions have not finished."""
    moves: Count
    """Slots that it got or lost since it was started."""
    kafka_away: bool
    """Kafka does not answer it."""


class SlotStatus(TypedDict):
    slot: Count
    node: str | None
    """The node that serves it; None: no node does now."""
    partitions: Count
    lag: Count


class ClusterStatus(TypedDict):
    cluster: str
    slots: Count
    nodes: list[NodeStatus]
    owners: list[SlotStatus]
    """Each slot."""
    missing: list[Count]
    """Slots that no node serves now."""


class TopicMap(TypedDict):
    topic: str
    owners: list[str | None]
    """The address of the node that serves each partition; None: no node does now."""


class ClusterOperations:
    """Nodes that divide the partitions."""

    @operation(permission="metrics", runs="every node", errors=("no_cluster",))
    @route("GET", "/cluster", "The nodes of the cluster", tag="cluster")
    async def cluster_status(self) -> ClusterStatus:
        """The nodes of the cluster, and which slots each of them serves.

        Example::

            for node in (await client.cluster_status())["nodes"]:
                print(node["node"], node["slots"])
        """

    @operation(
        permission="admin", runs="named node", answer="drained", errors=("no_cluster", "last_node")
    )
    @route("POST", "/cluster/{node}/drain", "Hand a node's slots to others", tag="cluster")
    async def drain_node(self, node: NodeName) -> None:
        """Hand the slots of a node to the others, before it is stopped. It forwards until then.

        Example::

            await client.drain_node("node1:9999")
        """

    @operation(permission="see", about="topic", errors=("no_cluster",))
    @route("GET", "/topics/{topic}/owners", "Who serves a topic's partitions", tag="cluster")
    async def topic_map(self, topic: ExistingTopic) -> TopicMap:
        """Which node serves each partition of a topic. Clients connect there.

        Example::

            print((await client.topic_map("orders"))["owners"])
        """
