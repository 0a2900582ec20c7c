"""Requests that wait for their replies.

A request is a message like any other, with the header ``headrace-reply-to``. A worker answers to that address,
and the broker hands the reply to the requester, who waits. Replies are not stored::

    requester                    broker                                     worker
       │ request(topic, value) ──▶ a slot {id} until the deadline
       │                           publish(topic, headrace-reply-to: id) ──▶ handles the message
       │                           slot {id} ◀── reply(id, value) ────────── replies, then acknowledges
       │ ◀── the reply ──────────┘

Rules:
- The address is a random UUID, and whoever knows it may reply: the requester, and those that may read the
  request. So a worker needs no right besides ``consume`` on the topic, and nobody can reply at random.
- A slot ends with its deadline, whether or not the requester is still there, and with it the memory that it
  takes. A reply to a slot that does not exist is dropped: the requester has gone, or has its answer.
- A requester that lost its connection asks again with the same id and finds its slot. For this, the slots of the
  latest replies are kept for a while. After a restart of the broker the slot is new and the request is published
  again: a request is delivered at least once, like every message.
- The first reply counts.

Rejected: a reply topic for each client (a client that vanishes leaves a topic, and anybody can make a thousand);
one topic for all replies with a subscription for each client (every reply is written to disk for a reader that
waits for it now, and rights on that topic would be rights on everybody's replies).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace import limits
from headrace.broker.publishing import Publish
from headrace.clock import Timer
from headrace.contents import check_value
from headrace.errors import Conflict, HeadraceError, QueueFull, RequestTimeout
from headrace.model import Message, Receipt

if TYPE_CHECKING:
    from headrace.broker.engine import Engine


@dataclass(slots=True, eq=False)
class _Slot:
    owner: str
    topic: str
    deadline: float
    reply: asyncio.Future[Message]
    timer: Timer
    receipt: Receipt | None = None
    held: int = limits.REQUEST_BYTES


class Requests:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._slots: dict[uuid.UUID, _Slot] = {}
        self._answered: OrderedDict[uuid.UUID, None] = OrderedDict()
        self._answered_bytes = 0
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    async def ask(
        self, publish: Publish, address: uuid.UUID, seconds: float, owner: str
    ) -> Message:
        """Publish a request, unless that was done before, and wait for its reply."""
        topic = publish.topic
        slot = self._slots.get(address)
        if slot is None:
            slot = self._begin(address, topic, seconds, owner)
            try:
                self._publish(address, slot, publish)
            except HeadraceError:
                self._forget(address)
                raise
        elif (slot.owner, slot.topic) != (owner, topic):
            raise Conflict(
                f"there is another request {address}; use a new random id", code="request_exists"
            )
        left = max(min(slot.deadline - self._engine.time(), seconds), 0.0)
        done, _ = await asyncio.wait([slot.reply], timeout=left)
        if not done:
            raise RequestTimeout(
                f"nobody replied to the request to {topic!r} within {seconds:g} seconds. Is the topic "
                "right, and does a worker run? It may still handle the request",
                code="no_reply",
                retryable=False,
            )
        return slot.reply.result()

    def _begin(self, address: uuid.UUID, topic: str, seconds: float, owner: str) -> _Slot:
        if len(self._slots) >= limits.REQUESTS_MAX or (
            self._owned[owner] >= limits.REQUESTS_PER_CALLER_MAX
        ):
            raise QueueFull(
                f"{self._owned[owner]} of your requests wait for their replies; wait for some of them "
                "first",
                code="too_many_requests",
            )
        engine = self._engine
        engine.budget.take(limits.REQUEST_BYTES)
        loop = asyncio.get_running_loop()
        slot = self._slots[address] = _Slot(
            owner,
            topic,
            engine.time() + seconds,
            loop.create_future(),
            engine.call_later(seconds, partial(self._forget, address)),
        )
        self._owned[owner] += 1
        return slot

    def _publish(self, address: uuid.UUID, slot: _Slot, publish: Publish) -> None:
        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is None:
                slot.receipt = receipts[0]
            elif not slot.reply.done():
                self._end(slot, error)
                self._forget(address)

        self._engine.publish(publish, done)

    def reply(self, to: uuid.UUID, value: bytes, headers: Mapping[str, str] | None) -> bool:
        """Hand a reply to the requester. False: nobody waits for one any more."""
        slot = self._slots.get(to)
        if slot is None or slot.reply.done():
            return False
        engine = self._engine
        check_value(value, engine.max_message_size)
        size = len(value) + sum(len(n) + len(v) for n, v in (headers or {}).items())
        engine.budget.take(size)
        slot.held += size
        receipt = slot.receipt  # a message is delivered after its receipt is known
        partition = receipt.partition if receipt is not None else 0
        offset = receipt.offset if receipt is not None else 0
        assert partition is not None
        assert offset is not None
        now = engine.now_ms()
        slot.reply.set_result(Message(slot.topic, partition, offset, now, None, value, headers))
        self._answered[to] = None
        self._answered_bytes += slot.held
        slot.timer.cancel()
        left = max(slot.deadline - engine.time(), 0.0)
        slot.timer = engine.call_later(min(left, limits.REQUESTS_KEPT_S), partial(self._forget, to))
        while (
            len(self._answered) > limits.REQUESTS_KEPT_MAX
            or self._answered_bytes > limits.REQUESTS_KEPT_BYTES_MAX
        ):  # whoever waits for a reply has it, kept or not
            self._forget(next(iter(self._answered)))
        return True

    def _end(self, slot: _Slot, error: HeadraceError) -> None:
        slot.reply.set_exception(error)
        slot.reply.exception()  # perhaps nobody waits for it any more

    def _forget(self, address: uuid.UUID) -> None:
        slot = self._slots.pop(address, None)
        if slot is None:
            return
        if address in self._answered:
            del self._answered[address]
            self._answered_bytes -= slot.held
        slot.timer.cancel()
        self._engine.budget.give(slot.held)
        self._owned[slot.owner] -= 1
        if not self._owned[slot.owner]:
            del self._owned[slot.owner]

    def close(self, error: HeadraceError) -> None:
        for address, slot in list(self._slots.items()):
            if not slot.reply.done():
                self._end(slot, error)
            self._forget(address)
