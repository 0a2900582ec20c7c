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
from headrace.clock import Timer
from headrace.contents import check_value
from headrace.errors import Conflict, HeadraceError, QueueFull, RequestTimeout
from headrace.model import REPLY_TO, Message, Receipt

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

SLOT_BYTES = 1024
"""About what a slot without a reply takes."""
KEPT_MAX = 1_000
"""Slots that are kept after their reply, for a requester that lost its connection just then."""


@dataclass(slots=True, eq=False)
class _Slot:
    owner: str
    topic: str
    deadline: float
    reply: asyncio.Future[Message]
    timer: Timer
    receipt: Receipt | None = None
    held: int = SLOT_BYTES


class Requests:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._slots: dict[uuid.UUID, _Slot] = {}
        self._answered: OrderedDict[uuid.UUID, None] = OrderedDict()
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    async def ask(
        self,
        topic: str,
        value: bytes,
        headers: Mapping[str, str] | None,
        key: bytes | None,
        id: uuid.UUID | None,
        seconds: float,
        owner: str,
    ) -> Message:
        """Publish a request, unless that was done before, and wait for its reply."""
        address = id or uuid.uuid4()
        slot = self._slots.get(address)
        if slot is None:
            slot = self._begin(address, topic, seconds, owner)
            try:
                self._publish(address, slot, value, headers, key)
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
                f"nobody replied to the request to {topic!r} within {seconds:g} seconds; a worker may "
                "still handle it",
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
        engine.budget.take(SLOT_BYTES)
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

    def _publish(
        self,
        address: uuid.UUID,
        slot: _Slot,
        value: bytes,
        headers: Mapping[str, str] | None,
        key: bytes | None,
    ) -> None:
        engine = self._engine
        sent = {**(headers or {}), REPLY_TO: str(address)}
        publish = engine.publishing.message(slot.topic, value, sent, {"key": key})

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is None:
                slot.receipt = receipts[0]
            elif not slot.reply.done():
                self._end(slot, error)
                self._forget(address)

        engine.publish(publish, done)

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
        if len(self._answered) > KEPT_MAX:
            self._forget(next(iter(self._answered)))
        return True

    def _end(self, slot: _Slot, error: HeadraceError) -> None:
        slot.reply.set_exception(error)
        slot.reply.exception()  # perhaps nobody waits for it any more

    def _forget(self, address: uuid.UUID) -> None:
        self._answered.pop(address, None)
        slot = self._slots.pop(address, None)
        if slot is None:
            return
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
