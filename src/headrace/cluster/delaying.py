"""Delayed messages: the node that leads keeps them, whichever node gets them.

They have ids, by which the leader knows a repetition. So what was sent and not answered is sent again, to the same leader or to the next one.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from headrace.cluster.peers import NO_ANSWER, Peer, unanswered
from headrace.errors import HeadraceError, InvalidArgument
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.model import Receipt
from headrace.wire.binary import Frame, Type

if TYPE_CHECKING:
    from headrace.cluster.node import Node

AGAIN_S = 0.05
ELSEWHERE = ("partition_moved", "closed", "broker_failed")
"""Refusals of a node that does not lead, or not any more."""


async def delay(
    node: Node, topic: str, columns: Columns, deliver_at: int, partition: int | None
) -> list[Receipt]:
    """Have the leader keep one message until it is due."""
    if columns.ids is None:
        columns.ids = [uuid.uuid4().bytes]
    deadline, is_doubtful = node.loop.time() + node.timeout, False
    while True:
        try:
            peer = await node.leader()
            if peer is None:
                return await _keep(node, topic, columns, deliver_at, partition)
            return await _send(node, peer, topic, columns, deliver_at, partition)
        except NO_ANSWER:
            is_doubtful = True
        except InvalidArgument:
            raise  # so was the first one
        except HeadraceError as error:
            # A refusal is about this repetition only; the first one may be stored.
            is_over = error.code not in ELSEWHERE or node.loop.time() > deadline
            if not is_doubtful and is_over:
                raise
        if node.loop.time() > deadline:
            raise unanswered("the publish of a delayed message")
        await asyncio.sleep(AGAIN_S)


async def _keep(
    node: Node, topic: str, columns: Columns, deliver_at: int, partition: int | None
) -> list[Receipt]:
    answered: asyncio.Future[list[Receipt]] = node.loop.create_future()

    def stored(receipts: list[Receipt], error: HeadraceError | None) -> None:
        if not answered.done():
            if error is None:
                answered.set_result(receipts)
            else:
                answered.set_exception(error)

    node.engine.schedule.add(topic, columns, deliver_at, partition, stored)
    return await answered


async def _send(
    node: Node, peer: Peer, topic: str, columns: Columns, deliver_at: int, partition: int | None
) -> list[Receipt]:
    given = {"topic": topic, "deliver_at": str(deliver_at), "forwarded": "true"}
    if partition is not None:
        given["partition"] = str(partition)
    frame = await peer.ask(Type.PUBLISH_BATCH, given, encode(columns).raw(), timeout=node.timeout)
    return [_receipt(frame)]


def _receipt(frame: Frame) -> Receipt:
    properties = frame.properties
    return Receipt(
        properties["topic"],
        None,
        None,
        int(properties["timestamp"]),
        duplicate=properties.get("duplicate") == "true",
        id=uuid.UUID(properties["id"]).bytes,
    )
