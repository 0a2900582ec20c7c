"""The binary protocol's types. ``PUBLISH`` is ``on_publish``, found in a table.

Answers carry the number of their request. They leave in the order of the requests, except the answer to
a fetch that waits: it leaves when there is something to fetch, and does not hold up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar

import orjson

from headrace import limits
from headrace.broker.browsing import browse, one_batch
from headrace.broker.delivery import Delivery
from headrace.broker.positions import news_in
from headrace.broker.publishing import Publish, PublishDone
from headrace.broker.slots import moved
from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    MemoryFull,
    QueueFull,
    StaleDelivery,
    TooLarge,
    TopicNotFound,
    kind_of,
)
from headrace.files import machine
from headrace.log import batch as batches
from headrace.log.admission import check
from headrace.log.batch import HAS_KEYS, Batch
from headrace.log.interface import Log, ReadPending, completed
from headrace.model import Receipt, split_position
from headrace.operations import documents
from headrace.paging import Asked
from headrace.server import node_requests
from headrace.server.arguments import (
    number_of,
    publish_arguments,
    receipt_properties,
    seconds_of,
)
from headrace.server.connection import Connection
from headrace.server.frames import (
    delivery_in,
    need,
    number_in,
    object_in,
    settings_in,
    start_in,
)
from headrace.server.logins import Credentials
from headrace.server.members import WireSink
from headrace.server.session import RequestSession
from headrace.server.subscribing import SubscribingSession
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Frame, Type

REQUEST_BYTES_MAX = limits.CLIENT_BATCH_BYTES_MAX + binary.PROPERTIES_BYTES_MAX + 4096
"""Of one frame, besides one message: to put more together takes the loop too long."""
FETCH_BYTES_MAX = 32 << 20
FETCH_WAIT_S_MAX = 60.0
WAITING_MAX = 1_000
"""Fetches of one connection that may wait for new messages at the same time."""
_REDRIVES = "redrive", "redrive_progress", "stop_redrive"
TAKES_LONG = (*_REDRIVES, "commit_staged", "wait_for", "request")
"""Operations that are answered when they are done, and do not hold up later requests."""
ERROR_CHARS_MAX = 2_000
"""A sentence may quote the request, and the properties of an answer have a limit."""


def success(sequence: int, properties: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    return binary.encode(Type.ACK, sequence, {"status": "success", **(properties or {})}, body)


def failure(sequence: int, error: HeadraceError) -> bytes:
    return binary.encode(Type.ACK, sequence, {"status": "error", **_error(error)})


def _error(error: HeadraceError) -> dict[str, str]:
    return {
        "code": error.code,
        "error": error.message.replace("\0", " ")[:ERROR_CHARS_MAX],
        "kind": kind_of(error),
        "retryable": "true" if error.retryable else "false",
    }


class BinarySession(SubscribingSession, RequestSession[Frame]):
    protocol = "binary"
    login = "send AUTH first"

    def __init__(self, connection: Connection):
        message_max = connection.hub.engine.max_message_size
        super().__init__(connection, BinaryParser(REQUEST_BYTES_MAX + message_max))
        self._waiting = 0
        """Requests that are answered out of order, whenever they are ready."""
        self._heartbeat: asyncio.TimerHandle | None = None

    # --- in ---------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        if self._heartbeat is not None:
            self._expect_life()
        super().feed(data)

    def depends(self, item: Frame) -> bool:
        return item.type not in _INDEPENDENT

    def is_fresh(self, item: Frame) -> bool:
        return item.type == Type.FETCH and node_requests.is_owned(self.engine, item)

    def may_be_long(self, item: Frame) -> bool:
        return item.type not in _BRIEF

    def is_open(self, item: Frame) -> bool:
        return item.type in (Type.AUTH, Type.HEARTBEAT)

    def begin(self, item: Frame) -> None:
        handler = TYPES.get(item.type)
        if handler is None:
            error = InvalidArgument(
                f"there is no request of type {item.type}", code="unknown_command"
            )
            self.fail(item, error)
            if self.connection.is_stranger:  # this is some other protocol
                self.connection.close()
            return
        if self.connection.is_stranger and self.connection.authenticated:
            self.connection.meet()
        handler(self, item)

    def fail(self, item: Frame, error: HeadraceError) -> None:
        self.outbox.send(failure(item.sequence, error))

    def end(self, error: HeadraceError) -> None:
        if isinstance(error, (TooLarge, MemoryFull)):
            self.connection.unread = True  # the frame is still on its way; the answer must arrive
        self.outbox.send(failure(0, error))
        self.connection.close()

    def lost(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        super().lost()

    def expel(self, error: HeadraceError) -> None:
        self.end(error)

    def _expect_life(self) -> None:
        """A client that sends heartbeats is dropped when it falls silent."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        loop = asyncio.get_running_loop()
        self._heartbeat = loop.call_later(self.hub.heartbeat_s, self._silent)

    def _silent(self) -> None:
        if self.outbox.reading:
            self.connection.abort()
        else:  # it may have sent much that we have not read
            self._expect_life()

    def _later(
        self,
        sequence: int,
        work: Coroutine[Any, Any, bytes | list[bytes]],
        *,
        ordered: bool = True,
    ) -> None:
        """Answer when the work is done."""
        if not ordered and self._waiting >= WAITING_MAX:
            work.close()
            raise QueueFull(
                f"{WAITING_MAX} requests of this connection are waiting; wait for some of them first",
                code="too_many_waiting",
            )
        self._waiting += not ordered
        slot = self.outbox.reserve() if ordered else None

        def fill(answer: bytes | list[bytes]) -> None:
            if slot is None:
                self._answer_out_of_order(answer)
            else:
                slot.fill(answer)

        self.connection.answer_later(work, fill, lambda error: failure(sequence, error))

    def _answer_out_of_order(self, answer: bytes | list[bytes]) -> None:
        self._waiting -= 1
        if isinstance(answer, list):
            self.outbox.write_pieces(answer)
        else:
            self.outbox.write(answer)

    # --- topics and administration --------------------------------------------------------------
    def on_create_topic(self, frame: Frame) -> None:
        properties = frame.properties
        settings = settings_in(frame)
        if "partitions" in properties:
            settings["partitions"] = number_of(properties["partitions"], "partitions")
        topic = need(properties, "topic")

        async def create() -> bytes:
            await self.connection.call("create_topic", {"topic": topic, "settings": settings})
            return success(frame.sequence, {"topic": topic})

        self._later(frame.sequence, create())

    def on_admin(self, frame: Frame) -> None:
        request = object_in(frame, "the body")
        operation = request.pop("op", None)

        async def administer() -> list[bytes]:
            if node_requests.is_forwarded(self.connection, frame):
                result = await node_requests.call(self.connection, frame, operation, request)
            else:
                result = await self.connection.call(operation, request)
            pieces = await self.connection.hub.operations.encoded(result)
            size, properties = sum(map(len, pieces)), {"status": "success"}
            return [binary.encode_start(Type.ACK, frame.sequence, properties, size), *pieces]

        self._later(frame.sequence, administer(), ordered=operation not in TAKES_LONG)

    def on_auth(self, frame: Frame) -> None:
        if "node" in frame.properties:
            try:
                node_requests.log_in(self.connection, frame.properties)
            except HeadraceError as error:
                self.fail(frame, error)
                self.connection.close()
            else:
                self.outbox.send(success(frame.sequence))
            return
        answer, later = success(frame.sequence), partial(self._later, frame.sequence)
        self.log_in(frame, Credentials.of_properties(frame.properties), answer, later)

    def on_heartbeat(self, frame: Frame) -> None:
        if self._heartbeat is None:
            self._expect_life()
        if "client_id" in frame.properties:
            self.connection.named(frame.properties["client_id"])
        # Out of order: it shows that the connection lives, not that earlier requests are done.
        size = str(self.engine.max_message_size)
        bounds = {"interval": f"{self.hub.heartbeat_s:g}", "max_message_size": size}
        if self.engine.cluster is not None and self.connection.authenticated:
            bounds["node"] = self.engine.cluster.address
        self.outbox.write(binary.encode(Type.HEARTBEAT, frame.sequence, bounds))

    # --- publishing -------------------------------------------------------------------------
    def on_publish(self, frame: Frame) -> None:
        given = dict(frame.properties)
        topic = need(given, "topic")
        for name in ("topic", "client_id", "subscription", "offset"):
            given.pop(name, None)
        headers, options = publish_arguments(given)
        publish = self.publishing.message(topic, frame.body, headers, options, gather=True)
        self._publish(frame, publish)

    def on_publish_batch(self, frame: Frame) -> None:
        if node_requests.is_forwarded(self.connection, frame):
            self._answer_publish(frame, partial(node_requests.publish, self.connection, frame))
            return
        topic, partition, batch = self._batch_in(frame)
        producer = None
        if batch.producer_id:
            producer = (batch.producer_id, batch.producer_epoch, batch.first_sequence)
        if partition is None and producer is None and batch.flags & HAS_KEYS:
            self._check_spread(topic, batch)
        planned_on = number_in(frame.properties, "partitions")
        self._publish(frame, Publish(topic, batch, partition, planned_on, producer=producer))

    def _check_spread(self, topic: str, batch: Batch) -> None:
        """A client that sends large batches with keys sorts them by partition itself."""
        found = self.engine.topics.get(topic)
        if found is None or len(found.partitions) == 1:
            return
        if (
            batch.count > limits.SPREAD_RECORDS_MAX
            or batch.header_count() > limits.SPREAD_HEADERS_MAX
        ):
            raise TooLarge(
                f"a batch with keys and without a partition has at most {limits.SPREAD_RECORDS_MAX} "
                f"messages and {limits.SPREAD_HEADERS_MAX} headers; sort larger ones by partition",
                code="batch_too_large",
            )

    def _batch_in(self, frame: Frame) -> tuple[str, int | None, Batch]:
        """(topic, partition, batch) of a frame whose body is a batch."""
        properties = frame.properties
        topic = need(properties, "topic")
        batch = check(frame.body, message_bytes_max=self.engine.max_message_size)
        return topic, number_in(properties, "partition"), batch

    def _publish(self, frame: Frame, publish: Publish) -> None:
        self._answer_publish(frame, partial(self.connection.publish, publish))

    def _answer_publish(self, frame: Frame, store: Callable[[PublishDone], None]) -> None:
        slot = self.outbox.reserve(len(frame.body) + 256)

        def done(receipts: list[Receipt], error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(failure(frame.sequence, error))
            else:
                first, many = receipts[0], b""
                if len(receipts) > 1:
                    many = orjson.dumps([receipt_properties(r) for r in receipts])
                owner = node_requests.owner_elsewhere(self.engine, first.topic, first.partition)
                slot.fill(success(frame.sequence, receipt_properties(first) | owner, many))

        try:
            store(done)
        except HeadraceError as error:
            done([], error)

    def on_stage(self, frame: Frame) -> None:
        """A batch that nobody sees before its commit."""
        properties = frame.properties
        topic, partition, batch = self._batch_in(frame)
        self.connection.permissions.check_publish(topic)
        name, number = properties.get("name"), number_in(properties, "number")
        delayed = properties.get("delayed") == "true"
        cluster, forwarded = self.engine.cluster, node_requests.is_forwarded(self.connection, frame)
        if cluster is not None and not cluster.leads:
            if forwarded:
                raise moved()
            self._later(frame.sequence, node_requests.stage(self.connection, frame, topic))
            return

        def done(piece: str | None, error: HeadraceError | None) -> None:
            if error is not None:
                slot.fill(failure(frame.sequence, error))
            else:
                sealed = str(piece) if forwarded else self.engine.access.seal(str(piece), topic)
                slot.fill(success(frame.sequence, {"piece": sealed}))

        slot = self.outbox.reserve(len(frame.body) + 256)
        try:
            self.engine.staging.stage(
                topic, partition, batch, done, name=name, number=number, delayed=delayed
            )
        except HeadraceError as error:
            done(None, error)
        except Exception:
            done(None, self.connection.bug())

    # --- reading ----------------------------------------------------------------------------
    def topics_in(self, item: Frame) -> tuple[str, ...]:
        topic = item.properties.get("topic")
        return () if topic is None or item.type == Type.ADMIN else (topic,)

    def on_fetch(self, frame: Frame) -> None:
        properties = frame.properties
        topic, start = need(properties, "topic"), start_in(frame)
        self.connection.permissions.need("browse", topic)
        if properties.get("merge") == "true":
            if len(self.engine.topics.find(topic).partitions) > 1:
                self._fetch_merged(frame, topic, start)
                return
            start = start.get(0, "earliest") if isinstance(start, Mapping) else start
        partition = self.engine.partition(
            topic, number_of(properties.get("partition", "0"), "partition")
        )
        if "incarnation" in properties:  # not a later topic of the same name
            wanted = number_of(properties["incarnation"], "incarnation")
            if self.engine.topics.find(partition.topic).incarnation != wanted:
                raise TopicNotFound(
                    f"topic {partition.topic!r} was deleted and created again",
                    code="topic_replaced",
                )
        wait, size = self._bounds_of_fetch(properties)
        position, time_ms = split_position(start)
        log = partition.log
        owner = node_requests.owner_elsewhere(self.engine, partition.topic, partition.number)
        batches_at = partial(self._batches, frame.sequence, log, owner)

        def resolve() -> int:
            if isinstance(position, int) and time_ms is None:
                return position
            return self.engine.resolve(partition, position, time_ms=time_ms)

        async def fetch_later() -> list[bytes]:
            offset = await completed(resolve)
            if offset == log.end_offset and wait:
                await news_in([partition], wait)
                self.connection.permissions.need("browse", partition.topic)
                # One answer after the other: a publish may wake a thousand of these at once.
                await self.engine.pace.turn()
                return await completed(lambda: batches_at(offset, size), room)
            return await completed(lambda: answer(offset), room)

        async def room() -> None:
            """Whatever it has waited for: a client may ask for much and read nothing."""
            await self.outbox.when_writable()
            self.outbox.requests.check(size)

        def answer(offset: int) -> list[bytes]:
            if "direct" in properties and properties["direct"] == machine():
                found = _whereabouts(log, offset)
                if found is not None:
                    return [binary.encode(Type.BATCHES, frame.sequence, found)]
            redirects = owner and properties.get("redirect") == "true"
            return batches_at(offset, 0 if redirects else size)

        try:
            offset = resolve()
            if offset == log.end_offset and wait:
                self._later(frame.sequence, fetch_later(), ordered=False)
                return
            self.outbox.send_pieces(answer(offset))
        except ReadPending:
            self._later(frame.sequence, fetch_later(), ordered=False)

    def _bounds_of_fetch(self, properties: Mapping[str, str]) -> tuple[float, int]:
        """How many seconds it may wait, and how many bytes it may have."""
        wait = min(number_of(properties.get("wait", "0"), "wait") / 1000, FETCH_WAIT_S_MAX)
        size = number_of(properties.get("max_bytes", str(1 << 20)), "max_bytes")
        return wait, self.outbox.requests.fitting(min(max(size, 1), FETCH_BYTES_MAX))

    def _fetch_merged(self, frame: Frame, topic: str, start: Any) -> None:
        """All partitions in the order of time: positions, the places of the messages, and the messages."""
        wait, size = self._bounds_of_fetch(frame.properties)
        limit = number_of(frame.properties.get("limit", str(limits.LISTED_MAX)), "limit")
        limit = min(max(limit, 1), limits.LISTED_MAX)
        asked = Asked(topic, start, None, size, wait, limit)

        async def fetch() -> bytes:
            page = await browse(
                self.engine, asked, lambda: self.connection.permissions.need("browse", topic)
            )
            await self.outbox.when_writable()
            self.outbox.requests.check(size)
            places = [*page.next.items(), *[(each.partition, each.offset) for each in page]]
            body = binary.encode_places(places) + (one_batch(page).raw() if page else b"")
            properties = {
                "merged": "true",
                "count": str(len(page)),
                "partitions": str(len(page.next)),
            }
            return binary.encode(Type.BATCHES, frame.sequence, properties, body)

        self._later(frame.sequence, fetch(), ordered=False)

    def _batches(
        self, sequence: int, log: Log, owner: dict[str, str], offset: int, size: int
    ) -> list[bytes]:
        """The answer to a fetch, in pieces as they are in the log. Size 0: only who has them."""
        found = log.read(offset, size) if size else []
        pieces = [piece for batch in found for piece in (batch.header(), batch.body)]
        properties = _bounds(log, offset) | owner
        body_bytes = sum(map(len, pieces))
        return [binary.encode_start(Type.BATCHES, sequence, properties, body_bytes), *pieces]

    # --- subscribing ------------------------------------------------------------------------
    def on_create_subscription(self, frame: Frame) -> None:
        properties = frame.properties
        name, topic = need(properties, "subscription"), need(properties, "topic")
        request = {
            "subscription": name,
            "topic": topic,
            "start": properties.get("start_offset", "earliest"),
            "settings": settings_in(frame),
        }

        async def create() -> bytes:
            made = await self.connection.call("create_subscription", request)
            created = {"topic_created": "true"} if made.get("topic_created") else {}
            return success(frame.sequence, {"subscription": name, "topic": topic, **created})

        self._later(frame.sequence, create())

    def on_delete_subscription(self, frame: Frame) -> None:
        properties = frame.properties
        name = need(properties, "subscription")

        async def delete() -> bytes:
            arguments = {"subscription": name, "topic": properties.get("topic")}
            await self.connection.call("delete_subscription", arguments)
            return success(frame.sequence, {"subscription": name})

        self._later(frame.sequence, delete())

    def on_subscribe(self, frame: Frame) -> None:
        properties = frame.properties
        if "client_id" in properties:
            self.connection.named(properties["client_id"])
        batched = properties.get("mode") == "batch"
        name = properties.get("subscription")
        # The answer leaves before the first delivery: it is sent here, and joining only schedules one.
        if name is None:
            credit = number_in(properties, "credit")
            channel = properties.get("channel", "")
            sink = self._memberships.follow(need(properties, "topic"), channel, credit)
        else:
            permissions = self.connection.permissions
            subscription = permissions.subscription(name, properties.get("topic"))
            prefetch = number_of(properties.get("prefetch", "100"), "prefetch")
            auto = properties.get("ack", "auto") == "auto"
            client = self.connection.client_id or self.connection.peer
            channel = ""
            if node_requests.is_forwarded(self.connection, frame):
                client, channel = need(properties, "member"), need(properties, "channel")
            sink = self._memberships.join(subscription, client, prefetch, auto, channel)
        sink.batched = batched
        answer = {} if sink.subscription is None else {"topic": sink.subscription.pattern}
        answer |= {"topic_created": "true"} if sink.topic_created else {}
        self.outbox.send(success(frame.sequence, answer))

    def on_unsubscribe(self, frame: Frame) -> None:
        properties = frame.properties
        name = properties.get("subscription")
        topic = properties.get("topic") if name else need(properties, "topic")
        if properties.get("pause") == "true":
            self._memberships.pause(topic, name, properties.get("channel", ""))
        else:
            self._memberships.leave(topic, name, properties.get("channel", ""))
        self.outbox.send(success(frame.sequence))

    def on_credit(self, frame: Frame) -> None:
        """The client has room for more messages of a plain subscription. It gets no answer."""
        properties = frame.properties
        count = number_of(need(properties, "count"), "count")
        topic = need(properties, "topic")
        self._memberships.grant(topic, properties.get("channel", ""), count)

    def _subscription_closed(self, sink: WireSink, error: HeadraceError | None) -> None:
        properties = _source(sink) | ({} if error is None else _error(error))
        self.outbox.deliver(binary.encode(Type.CLOSED, 0, properties))

    def _delivered(self, sink: WireSink, delivery: Delivery) -> bytes:
        source = _source(sink)
        if sink.member is not None and sink.member.elsewhere:
            return node_requests.delivered(sink, delivery, source)
        if sink.batched:
            return self._delivered_batch(sink, delivery)
        parts = []
        for message in delivery.messages():
            properties = {"topic": message.topic, "partition": str(message.partition), **source}
            if delivery.lease is not None:
                properties["lease"] = str(delivery.lease.id)
            if message.attempt > 1:
                properties["attempt"] = str(message.attempt)
            if message._id is not None:
                properties["id"] = str(message.id)
            documents.put_key(properties, message.key)
            for header, value in message.headers.items():
                properties[f"h.{header}"] = value
            parts.append(
                binary.encode(
                    Type.DATA, message.offset, properties, message.value or b"", message.timestamp
                )
            )
        return b"".join(parts)

    _latest: ClassVar[tuple[Any, ...]] = (None, (), "", b"", b"")
    """Batch, indexes and topic of the last delivery, and its bytes: many subscriptions get the same."""

    def _delivered_batch(self, sink: WireSink, delivery: Delivery) -> bytes:
        """One frame with a batch; it is sent as it is in the log unless records must be left out."""
        batch, indexes = delivery.batch, delivery.indexes
        base = batch.base_offset
        latest = BinarySession._latest
        if batch is latest[0] and indexes == latest[1] and delivery.topic == latest[2]:
            properties, raw = latest[3:]
        else:
            properties, raw = _place_and_records(delivery)
            BinarySession._latest = (batch, indexes, delivery.topic, properties, raw)
        source = sink.source
        if not source:
            source = sink.source = binary.encode_properties(_source(sink))
        if delivery.lease is not None:
            source += b"lease=%d\0" % delivery.lease.id
        if delivery.attempts != 1:
            attempts = delivery.attempts
            many = [attempts] if isinstance(attempts, int) else attempts
            source += b"attempts=%b\0" % ",".join(map(str, many)).encode()
        start = binary.start(Type.DELIVER, base + indexes[0], properties + source, len(raw))
        return b"".join((start, raw))

    # --- settling ---------------------------------------------------------------------------
    def on_ack(self, frame: Frame) -> None:
        lease_id, offset = delivery_in(frame.properties)
        subscription = self._memberships.of_lease(lease_id)
        if frame.properties.get("up_to") == "true":
            subscription.ack_up_to(lease_id, offset)
        else:
            subscription.ack(lease_id, offset)
        self.outbox.send(success(frame.sequence))

    def on_nack(self, frame: Frame) -> None:
        properties = frame.properties
        lease_id, offset = delivery_in(properties)
        delay = seconds_of(properties["delay"], "delay") if "delay" in properties else None
        subscription = self._memberships.of_lease(lease_id)
        if properties.get("release") == "true":
            subscription.release(lease_id, offset)
        else:
            subscription.nack(lease_id, offset, delay, properties.get("reason", "nack"))
        self.outbox.send(success(frame.sequence))

    def on_extend(self, frame: Frame) -> None:
        properties = frame.properties
        lease_id = number_of(need(properties, "lease"), "lease")
        seconds = seconds_of(properties["seconds"], "seconds") if "seconds" in properties else None
        granted = self._memberships.of_lease(lease_id).extend(lease_id, seconds)
        self.outbox.send(success(frame.sequence, {"seconds": f"{granted:g}"}))

    def on_settle(self, frame: Frame) -> None:
        """Acks in bulk. Stale deliveries among them are counted in the answer; they are no error."""
        stale = 0
        for lease_id, first, last in binary.decode_runs(frame.body):
            try:
                subscription = self._memberships.of_lease(lease_id)
                stale += subscription.ack_run(lease_id, first, last)
            except StaleDelivery:
                stale += max(last - first + 1, 1)
        self.outbox.send(success(frame.sequence, {"stale": str(stale)} if stale else None))


TYPES: dict[int, Callable[[BinarySession, Frame], None]] = {
    Type[name.removeprefix("on_").upper()]: handler
    for name, handler in vars(BinarySession).items()
    if name.startswith("on_")
}


_INDEPENDENT = {
    Type.PUBLISH,
    Type.PUBLISH_BATCH,
    Type.STAGE,
    Type.HEARTBEAT,
    Type.ACK,
    Type.NACK,
    Type.EXTEND,
    Type.SETTLE,
    Type.CREDIT,
}


_BRIEF = _INDEPENDENT - {Type.PUBLISH_BATCH, Type.STAGE, Type.SETTLE} | {Type.AUTH}
"""All others may take long, however small they are."""


def _bounds(log: Log, offset: int) -> dict[str, str]:
    """The properties of every answer to a fetch."""
    return {
        "status": "success",
        "offset": str(offset),
        "start_offset": str(log.start_offset),
        "end_offset": str(log.end_offset),
    }


def _whereabouts(log: Log, offset: int) -> dict[str, str] | None:
    """An answer to a fetch that points into a file (``client/direct.py``), or None."""
    if offset == log.end_offset:
        return None
    try:
        found = log.whereabouts(offset)
        if found is None:
            return None
        str(found.path).encode()
    except (OSError, UnicodeEncodeError):
        # Reading it will fail, and the error is reported there; or its name is not text, as a property must be.
        return None
    return {
        **_bounds(log, offset),
        "file": str(found.path),
        "inode": found.identity,
        "position": str(found.position),
        "length": str(found.length),
    }


def _place_and_records(delivery: Delivery) -> tuple[bytes, bytes]:
    """The properties of a delivered batch that are the same for all subscriptions, and its records."""
    batch, indexes = delivery.batch, delivery.indexes
    properties = {"topic": delivery.topic, "partition": str(delivery.partition)}
    if len(indexes) == batch.count:
        return binary.encode_properties(properties), batch.raw()
    part = batches.encode(batch.columns(indexes))
    part.base_offset = batch.base_offset + indexes[0]
    part.base_timestamp, part.max_timestamp = batch.base_timestamp, batch.max_timestamp
    if not (isinstance(indexes, range) and indexes.step == 1):
        properties["offsets"] = ",".join([str(batch.base_offset + index) for index in indexes])
    return binary.encode_properties(properties), part.raw()


def _source(sink: WireSink) -> dict[str, str]:
    """The properties that name one of the connection's subscriptions."""
    if sink.subscription is not None:
        member = {"member": sink.channel} if sink.channel else {}
        source = {"subscription": sink.subscription.name, "pattern": sink.subscription.pattern}
        return source | member
    assert sink.follower is not None
    source = {"pattern": sink.follower.pattern}
    return source | {"channel": sink.channel} if sink.channel else source
