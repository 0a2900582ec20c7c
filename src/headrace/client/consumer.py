"""Consuming: messages ahead of need, acknowledgements gathered and sent together.

A :class:`Feed` is the loop's side of one subscription: it asks the broker to deliver, turns deliveries
into messages, gathers acknowledgements into runs and sends them together, extends deadlines, and
subscribes again after a reconnect. What a user holds is a channel in front of it, for threads or for
asyncio.

After a reconnect all earlier deliveries are void: what was not yet taken from the channel is dropped
(it comes again), and settling an old message raises :class:`StaleDelivery`.

The broker answers an ack from memory and writes it a moment later, so an ack that no flush has covered may
be lost with the connection, even if it was answered. :class:`AckLedger` counts these; the next flush says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from headrace.channels import ACK, EXTEND, NACK, REPLY, UP_TO, Arrivals, AsyncConsumer, Consumer
from headrace.client.link import Link, Wire, error_of
from headrace.errors import DataCorrupt, HeadraceError, OutcomeUnknown, StaleDelivery
from headrace.log.batch import Batch, parse
from headrace.model import Message, Settling
from headrace.operations.catalog import OPERATIONS
from headrace.publication import Failures
from headrace.wire import binary
from headrace.wire.binary import Frame, Type

logger = logging.getLogger("headrace.client")
_FRAMES = {NACK: Type.NACK, EXTEND: Type.EXTEND, UP_TO: Type.ACK}


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClientLease:
    """A delivery as the client knows it. ``out`` is how many of it are not settled."""

    id: int
    out: int
    step: int
    """The distance of its offsets; 0 when they are irregular."""
    void: bool = False


@dataclass(slots=True, eq=False)
class AckLedger:
    """The settlements of one client: how many were sent, how many of them a flush has covered, and how
    many may be lost because their connection broke before.

    Acks of all subscriptions are gathered as runs of offsets, and sent together at the end of a turn of the loop.
    """

    _link: Link
    _runs: list[list[int]] = field(default_factory=list)
    """``[lease, first offset, last offset]`` of acks that are not sent yet."""
    _last_lease: ClientLease | None = None
    _sending: bool = False
    _unanswered: int = 0
    _idle: list[asyncio.Future[None]] = field(default_factory=list)
    sent: int = 0
    covered: int = 0
    lost: int = 0
    resumed: int = 0
    """How many of the lost ones the broker delivers again, because the connection came back."""
    refused: int = 0
    stale: int = 0
    """All that came too late so far, also extensions."""

    def connected(self) -> None:
        self.resumed = self.lost

    def refuse(self, count: int) -> None:
        """The broker has refused settlements: their deliveries had ended, and the messages come again."""
        self.refused += count
        if count:
            logger.warning("%d acknowledgements came too late: the messages come again", count)

    def cover(self, sent: int) -> None:
        """The broker has on disk what was sent up to this count."""
        self.covered = max(self.covered, sent)

    def connection_broke(self) -> None:
        self.lost += self.sent - self.covered + len(self._runs)
        self.covered = self.sent
        self._runs.clear()
        self._last_lease = None

    def ack(self, lease: ClientLease, offset: int) -> None:
        """Gathered, and sent at the end of this turn of the loop."""
        if lease.void:
            self.stale += 1
            self.lost += 1
            return
        runs = self._runs
        if lease is self._last_lease and lease.step and runs[-1][2] + lease.step == offset:
            runs[-1][2] = offset
        else:
            runs.append([lease.id, offset, offset])
            self._last_lease = lease
        lease.out -= 1
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self.send)

    def send(self) -> None:
        """Send the acks that wait."""
        self._sending = False
        runs, self._runs = self._runs, []
        self._last_lease = None
        wire = self._link.wire
        if not runs:
            return
        if wire is None:
            self.lost += len(runs)
            return
        self.sent += len(runs)
        for start in range(0, len(runs), binary.RUNS_MAX):
            part = runs[start : start + binary.RUNS_MAX]
            body = binary.encode_runs([(run[0], run[1], run[2]) for run in part])
            self._unanswered += 1
            wire.send(Type.SETTLE, {}, body, self._answered)

    def _answered(self, frame: Frame | None) -> None:
        self._unanswered -= 1
        if frame is not None:
            stale = int(frame.properties.get("stale", "0"))
            self.stale += stale
            self.refuse(stale)
        if not self._unanswered:
            idle, self._idle = self._idle, []
            for future in idle:
                if not future.done():
                    future.set_result(None)

    async def flush(self) -> None:
        """The broker has heard of every ack so far when this returns."""
        self.send()
        if self._unanswered:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(future)
            await future

    def errors(self, *, closing: bool = False) -> Iterator[HeadraceError]:
        """What became of settlements that nobody waits for; said once.

        ``closing``: what was lost with an earlier connection was delivered again since, and is left out.
        """
        lost = self.lost - self.resumed if closing else self.lost
        refused, self.refused, self.lost, self.resumed = self.refused, 0, 0, 0
        if lost:
            yield OutcomeUnknown(
                "the connection broke before all acknowledgements were on disk: some of them may be "
                "lost, and their messages are then delivered again",
                code="acks_unknown",
            )
        if refused:
            yield StaleDelivery(
                f"{refused} acknowledgements came too late: the messages were or will be delivered again"
            )

    def check(self) -> None:
        for error in list(self.errors()):
            raise error

    def report(self, failures: Failures, *, closing: bool = False) -> None:
        for error in self.errors(closing=closing):
            failures.add(error)


@dataclass(slots=True, eq=False)
class Feed:
    """One subscription of one client, on the loop."""

    _link: Link
    arrivals: Arrivals
    _settling: Settling | None
    ledger: AckLedger
    """Shared by all feeds of a client."""
    topic: str
    name: str | None = None
    channel: str = ""
    _prefetch: int = 0
    _ack_timeout: float = 30.0
    _auto_extend: bool = False
    _credit: int = 0
    _leases: WeakValueDictionary[int, ClientLease] = field(default_factory=WeakValueDictionary)
    """Deliveries of which somebody still holds a message."""
    _timer: asyncio.TimerHandle | None = None
    _ended: bool = False
    _retired: bool = False
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.arrivals.subscription_name = self.name
        if self.name is None:
            self.arrivals.refill = self._grant

    @property
    def is_leaving(self) -> bool:
        return self._ended

    @property
    def key(self) -> tuple[str, str | None, str]:
        return (self.topic, self.name, self.channel)

    # --- subscribing ------------------------------------------------------------------------
    async def subscribe(self, wire: Wire) -> None:
        """Ask for deliveries on a connection that has just come up."""
        if self._ended or self._retired:
            return
        properties = {"topic": self.topic, "mode": "batch", "client_id": self._link.client_id}
        if self.name is not None:
            properties |= {
                "subscription": self.name,
                "prefetch": str(self._prefetch),
                "ack": "manual",
            }
        else:
            self._credit = max(self.arrivals.capacity - len(self.arrivals), 0)
            properties |= {"channel": self.channel, "credit": str(self._credit)}
        answer = await wire.ask(Type.SUBSCRIBE, properties)
        self.arrivals.topic_created = answer.properties.get("topic_created") == "true"
        if self.is_leaving:  # it was left while we asked
            self.leave_later(wire)
            return
        if self._auto_extend and self._timer is None:
            self._arm()

    def leave_later(self, wire: Wire) -> None:
        """Have the broker end what it may have begun; nobody waits for it."""
        wire.send(Type.UNSUBSCRIBE, self._place(), b"", lambda frame: None)

    def disconnected(self) -> None:
        """What was delivered is not ours any more."""
        for lease in list(self._leases.values()):
            lease.void = True
        self._leases.clear()
        if self.name is not None:
            self.arrivals.clear()

    async def unsubscribe(self) -> None:
        if self._ended:
            await self.left.wait()
            return
        self._end()
        try:
            wire = self._link.wire
            if wire is not None:
                async with asyncio.timeout(self._link.request_timeout):
                    await self._leave(wire)
        except (HeadraceError, TimeoutError) as error:
            logger.debug("unsubscribing from %s: %s", self.topic, error)
        finally:
            self.arrivals.closed(None)
            self.left.set()

    async def retire(self) -> None:
        """Take nothing more, and give back what no caller has taken. What was taken can be settled."""
        self._retired = True
        wire = self._link.wire
        if wire is not None:
            with contextlib.suppress(HeadraceError, TimeoutError):
                async with asyncio.timeout(self._link.request_timeout):
                    await self._pause(wire)

    async def _pause(self, wire: Wire) -> None:
        # First no more deliveries: one on its way to us would count as begun when we leave.
        await wire.ask(Type.UNSUBSCRIBE, {**self._place(), "pause": "true"})
        self.ledger.send()
        self._release_unread(wire)

    async def _leave(self, wire: Wire) -> None:
        if self.name is not None:
            await self._pause(wire)
        await wire.ask(Type.UNSUBSCRIBE, self._place())

    def _place(self) -> dict[str, str]:
        mine = {"channel": self.channel} if self.name is None else {"subscription": self.name}
        return {"topic": self.topic, **mine}

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release_unread(self, wire: Wire) -> None:
        """What was never taken out of the channel goes back without having counted."""
        for message in self.arrivals.drain():
            if not message.lease.void:
                properties = {
                    "lease": str(message.lease.id),
                    "offset": str(message.offset),
                    "release": "true",
                }
                wire.send(Type.NACK, properties, b"", lambda frame: None)

    def end(self, error: HeadraceError | None) -> None:
        """The broker has closed it."""
        self._end()
        self.arrivals.closed(error)
        self.left.set()

    # --- deliveries -------------------------------------------------------------------------
    def delivered(self, frame: Frame) -> None:
        properties = frame.properties
        batch = _batch_in(frame.body)
        offsets = properties.get("offsets")
        places = (
            range(batch.base_offset, batch.end_offset)
            if offsets is None
            else [int(offset) for offset in offsets.split(",")]
        )
        lease = None
        if "lease" in properties:
            lease = ClientLease(int(properties["lease"]), batch.count, _step(places))
            self._leases[lease.id] = lease
        topic, partition = properties["topic"], int(properties["partition"])
        attempts = [int(attempt) for attempt in properties.get("attempts", "1").split(",")]
        if offsets is None and len(attempts) == 1:
            messages = batch.messages(
                topic, partition, attempt=attempts[0], settling=self._settling, lease=lease
            )
        else:
            many = attempts * batch.count if len(attempts) == 1 else attempts
            messages = batch.pick(
                topic, partition, range(batch.count), many, self._settling, lease, places
            )
        self.arrivals.put(messages)
        if self.name is None:
            self._credit -= len(messages)
            if self._credit <= self.arrivals.capacity // 2:
                self.arrivals.want_refill()

    def _grant(self) -> None:
        """A plain channel has room again: let the broker send as much."""
        wire = self._link.wire
        room = self.arrivals.capacity - len(self.arrivals) - self._credit
        if room > 0 and wire is not None and not self.is_leaving:
            self._credit += room
            properties = {"topic": self.topic, "channel": self.channel, "count": str(room)}
            wire.tell(Type.CREDIT, properties)

    # --- settling ---------------------------------------------------------------------------
    def settle(
        self, kind: int, lease: ClientLease, offset: int, argument: float | None, reason: str
    ) -> None:
        """A nack, an extension or an ack up to: sent by itself, after the acks before it."""
        wire = self._link.wire
        if lease.void or wire is None:
            self.ledger.stale += 1
            self.ledger.lost += kind != EXTEND
            return
        self.ledger.send()
        self.ledger.sent += kind != EXTEND
        properties = {"lease": str(lease.id), "offset": str(offset)}
        if kind == NACK:
            lease.out -= 1
            properties["reason"] = reason.replace("\0", " ")[:1000]
        if argument is not None:
            properties["delay" if kind == NACK else "seconds"] = repr(float(argument))
        if kind == UP_TO:
            properties["up_to"] = "true"
        wire.send(_FRAMES[kind], properties, b"", partial(self._single_answered, kind))

    def reply(self, given: dict[str, Any]) -> None:
        """Sent before the acknowledgement of its message: if one is lost, so is the other."""
        wire = self._link.wire
        if wire is not None:
            body = OPERATIONS["reply"].encode(given)
            wire.send(Type.ADMIN, {}, body, partial(self._single_answered, REPLY))

    def _single_answered(self, kind: int, frame: Frame | None) -> None:
        if frame is not None and frame.properties.get("status") == "error":
            self.ledger.stale += 1
            self.ledger.refuse(kind not in (EXTEND, REPLY))
            logger.info("%s: %s", self.name, error_of(frame))

    # --- deadlines --------------------------------------------------------------------------
    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._ack_timeout / 3, self._extend)

    def _extend(self) -> None:
        wire = self._link.wire
        if wire is not None:
            for lease in [lease for lease in self._leases.values() if lease.out > 0]:
                wire.send(Type.EXTEND, {"lease": str(lease.id)}, b"", lambda frame: None)
        self._arm()


_latest: tuple[bytes, Batch | None] = (b"", None)
"""The last small delivery: several subscriptions of a client often get the same one."""
_LATEST_BYTES_MAX = 4 << 10


def _batch_in(body: bytes) -> Batch:
    global _latest
    latest, batch = _latest
    if batch is not None and body == latest:
        return batch
    batch = parse(body)
    if batch is None:
        raise DataCorrupt("a delivery arrived damaged")
    if len(body) <= _LATEST_BYTES_MAX:
        _latest = (body, batch)
    return batch


def _step(places: range | list[int]) -> int:
    if isinstance(places, range) or len(places) == 1:
        return 1
    step = places[1] - places[0]
    return step if places == list(range(places[0], places[-1] + 1, step)) else 0


class _Remote:
    """The common part of both consumers: a feed that the broker fills."""

    feed: Feed

    def _lease_for(self, kind: int, message: Message) -> ClientLease:
        lease: ClientLease | None = message.lease
        if lease is None:
            raise StaleDelivery(
                f"the delivery of offset {message.offset} has ended: it was settled"
            )
        if lease.void:
            raise StaleDelivery(
                f"the delivery of offset {message.offset} has ended: the connection broke since"
            )
        if kind != EXTEND:  # the others end the delivery: a message is settled once
            message.lease = None
        return lease

    def _carry_out(
        self,
        kind: int,
        lease: ClientLease,
        message: Message,
        argument: Any,
        reason: str,
    ) -> None:
        if kind == ACK:
            self.feed.ledger.ack(lease, message.offset)
        elif kind == REPLY:
            self.feed.reply(argument)
        else:
            self.feed.settle(kind, lease, message.offset, argument, reason)


class AsyncRemoteConsumer(_Remote, AsyncConsumer):
    flush: Callable[[], Awaitable[None]]
    """Returns when the acknowledgements of the client so far are on disk in the broker."""


class RemoteConsumer(_Remote, Consumer):
    def ack(self, message: Message) -> None:
        # As ``_settle`` does, with fewer calls: it is the hot path.
        lease = message.lease
        if lease is None or lease.void:
            self._lease_for(ACK, message)  # raises
        message.lease = None
        self._settled.append((ACK, lease, message, None, ""))
        if not self._carrying:
            self._carry_soon()

    def carry_out(self) -> None:
        self._carrying = False
        settled, ack = self._settled, self.feed.ledger.ack
        while settled:
            kind, lease, message, argument, reason = settled.popleft()
            if kind == ACK:
                ack(lease, message.offset)
            elif kind == REPLY:
                self.feed.reply(argument)
            else:
                self.feed.settle(kind, lease, message.offset, argument, reason)
