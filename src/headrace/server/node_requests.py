"""What other nodes of a cluster ask over the binary protocol, besides what clients do.

A node logs in with the cluster's secret (``AUTH node=… secret=…``). What it forwards carries ``forwarded=true``: it was checked by the node
that got it from a client, and is carried out here or not at all, so that no request goes in a circle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.access.caller import OWNER
from headrace.broker.delivery import Delivery
from headrace.broker.permissions import Permissions
from headrace.broker.slots import moved
from headrace.errors import (
    Conflict,
    InvalidArgument,
)
from headrace.log.batch import Batch, parse
from headrace.log.interface import Append
from headrace.model import Receipt
from headrace.server.settling import deliveries_in, owner_among, settle_those_out, settling
from headrace.wire import binary
from headrace.wire.binary import Frame, Type

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.publishing import PublishDone
    from headrace.server.connection import Connection
    from headrace.server.members import WireSink


def log_in(connection: Connection, properties: Mapping[str, str]) -> None:
    """:class:`Unauthenticated` if it is no node of this cluster."""
    cluster = connection.hub.engine.cluster
    if cluster is None or not cluster.is_node(properties.get("secret", "")):
        raise connection.hub.logins.wrong(connection.source, None)
    connection.enter(OWNER)
    connection.is_node = True


def owner_elsewhere(engine: Engine, topic: str, partition: int | None) -> dict[str, str]:
    """For the answer to a client: which other node serves the partition, so that the client can go there."""
    cluster = engine.cluster
    if cluster is None or partition is None:
        return {}
    owner = cluster.owner_of(topic, partition)
    return {} if owner is None or owner == cluster.address else {"owner": owner}


def is_owned(engine: Engine, frame: Frame) -> bool:
    """Whether this node owns all that a fetch reads: then it knows the end without asking Kafka."""
    properties = frame.properties
    topic, number = engine.topics.get(properties.get("topic", "")), properties.get("partition", "0")
    if topic is None or not number.isascii() or not number.isdigit() or len(number) > 9:
        return False
    partitions = topic.partitions
    if properties.get("merge") != "true":
        partitions = partitions[int(number) :][:1]
    return bool(partitions) and all(each.log.owned for each in partitions)


def is_forwarded(connection: Connection, frame: Frame) -> bool:
    return connection.is_node and frame.properties.get("forwarded") == "true"


def publish(connection: Connection, frame: Frame, done: PublishDone) -> None:
    """Store a batch in a partition that this node owns, or keep it until it is due."""
    engine, properties = connection.hub.engine, frame.properties
    batch = parse(frame.body)
    if batch is None:
        raise InvalidArgument("the batch fails its checksum", code="invalid_batch")
    if "deliver_at" in properties:
        name, number = properties["topic"], properties.get("partition")
        if engine.cluster is None or not engine.cluster.leads:
            raise moved()
        place = None if number is None else int(number)
        at = int(properties["deliver_at"])
        engine.schedule.add(name, batch.columns(), at, place, done)
        return
    topic = engine.topics.find(properties["topic"])
    partition = topic.partition(int(properties["partition"]))
    if not partition.log.owned:
        raise moved()

    def stored(entry: Append) -> None:
        if entry.error is not None:
            done([], entry.error)
        else:
            place = (topic.name, partition.number, entry.first_offset, entry.timestamp)
            done([Receipt(*place, entry.count, entry.duplicate)], None)

    entry = Append.of_batch(batch, stored)
    if properties.get("only_repeated") == "true":
        entry.refusal = Conflict(
            "the topic has another number of partitions; plan again", code="partitions_changed"
        )
    engine.append(topic, partition.number, entry)


async def stage(connection: Connection, frame: Frame, topic: str) -> bytes:
    """Have the node that leads stage a batch; the answer for the client."""
    engine = connection.hub.engine
    assert engine.cluster is not None
    await engine.cluster.ensure(topic)
    piece = await engine.cluster.stage(dict(frame.properties), frame.body)
    properties = {"status": "success", "piece": engine.access.seal(piece, topic)}
    return binary.encode(Type.ACK, frame.sequence, properties)


async def call(connection: Connection, frame: Frame, operation: Any, given: Any) -> Any:
    """An operation for somebody who is connected to another node."""
    access, cluster = connection.hub.engine.access, connection.hub.engine.cluster
    assert cluster is not None
    if operation != "cluster_status":
        await cluster.fresh()  # it may be about something that the other node has just created
    if operation in ("slot_states", "hold_retention"):
        connection.hub.engine.backups.hold(given["hold"])
        return await cluster.slot_states() if operation == "slot_states" else {}
    name = frame.properties.get("caller")
    caller = OWNER if name is None else access.principal(name)
    if operation == "settle_pulled":
        permissions = Permissions(connection.hub.engine, caller, connection.source)
        return {"stale": _settle_pulled(connection, permissions, given)}
    operations = connection.hub.operations
    return await operations.call(operation, given, caller, connection.source, forwarded=True)


def _settle_pulled(
    connection: Connection, permissions: Permissions, given: dict[str, Any]
) -> list[str]:
    """Settle what was handed out here over HTTP; returns those that had ended."""
    topic, verb = given.pop("topic", None), given.pop("verb")
    each, deliveries = settling(verb, given), deliveries_in(given)
    owner = owner_among(connection.hub.pulled, permissions, topic)
    return settle_those_out(deliveries, each, owner)


def delivered(sink: WireSink, delivery: Delivery, source: dict[str, str]) -> bytes:
    """A delivery with its whole batch: the other node cuts it, as this one does for its own members."""
    batch: Batch = delivery.batch
    indexes, base = delivery.indexes, batch.base_offset
    properties = {
        "topic": delivery.topic,
        "partition": str(delivery.partition),
        "member": sink.channel,
        **source,
    }
    if isinstance(indexes, range):
        places = (base + indexes.start, base + indexes.stop, indexes.step)
        properties["offsets"] = ":".join(map(str, places))
    else:
        properties["offsets"] = ",".join([str(base + index) for index in indexes])
    if delivery.lease is not None:
        properties["lease"] = str(delivery.lease.id)
    if delivery.attempts != 1:
        attempts = delivery.attempts
        many = [attempts] if isinstance(attempts, int) else attempts
        properties["attempts"] = ",".join(map(str, many))
    return binary.encode(Type.DELIVER, base, properties, batch.raw())
