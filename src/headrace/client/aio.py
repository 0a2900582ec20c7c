"""``AsyncClient``: a broker over the network, with the vocabulary of ``AsyncBroker``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict

from headrace import limits
from headrace.channels import Arrivals, AsyncChannel
from headrace.client.address import Login, find_brokers, find_login
from headrace.client.consumer import AckLedger, AsyncRemoteConsumer, Feed, RemoteConsumer
from headrace.client.link import Link, Wire, error_of, login_of
from headrace.client.outgoing import Bundle, PublishQueue
from headrace.client.owners import Owners, Question
from headrace.client.producer import PARTITIONS_CHANGED, RETRY_S, Done, Producer
from headrace.client.remote import RemoteOperations, batches_in, merged_page, receipt_of
from headrace.client.tls import brokers_of
from headrace.clock import Clock
from headrace.errors import (
    Closed,
    Conflict,
    ConnectionLost,
    HeadraceError,
    NotFound,
    OutcomeUnknown,
)
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns, concat, pieces, record, records, time_of
from headrace.model import (
    PublishManyOptions,
    PublishOptions,
    Receipt,
    checked_topic,
    position_text,
)
from headrace.operations import documents
from headrace.paging import Asked, Page, page_of, parse_from, readable
from headrace.publication import Failures, settle
from headrace.times import Duration, seconds
from headrace.wire import binary
from headrace.wire.binary import Frame, Type
from headrace.working import AsyncWorker

logger = logging.getLogger("headrace.client")
_GOING_DOWN = ("closed", "broker_failed")
"""Why a broker ends a subscription that comes back with the next one."""


def default_client_id() -> str:
    """The host, the process and the program: what an operator looks for (``headrace clients``)."""
    program = Path(sys.argv[0] if sys.argv else "").stem or "python"
    unique = uuid.uuid4().hex[:8]  # a program may have several clients
    return f"{socket.gethostname()}-{os.getpid()}-{program[:40]}-{unique}"


def _login(
    token: str | None,
    user: str | None,
    password: str | None,
    certificate: tuple[str, str] | None,
) -> Login:
    if certificate is not None and token is None and user is None:
        return Login()  # it is the login, whatever the environment says
    return find_login(token, user, password)


def not_connected(why: str = "the client is not connected: call connect() first") -> Closed:
    return Closed(why, code="not_connected")


_ALONE = ("delay", "deliver_at", "idempotency_key", "producer")


def goes_alone(options: PublishOptions) -> bool:
    """Whether a publish cannot be gathered with others."""
    return bool(options) and any(options.get(name) is not None for name in _ALONE)


def is_plain(value: object, headers: Mapping[str, str] | None, options: PublishOptions) -> bool:
    """Whether a message has nothing but a value and perhaps a key: such messages are gathered in bundles."""
    return (
        not headers
        and value is not None
        and (not options or (len(options) == 1 and "key" in options))
    )


def alone(
    topic: str,
    value: object,
    headers: Mapping[str, str] | None,
    options: PublishOptions,
    bytes_max: int,
) -> tuple[dict[str, str], bytes]:
    """The properties and the body of a publish in a frame of its own, checked."""
    now = Clock().now_ms()
    deliver_at = time_of(options.get("delay"), options.get("deliver_at"), now)
    if deliver_at is not None and options.get("id") is None:
        options["id"] = uuid.uuid4()
    columns = record(value, headers, options, bytes_max, now)
    producer, ttl = options.get("producer") or (None, None, None), options.get("ttl")
    own = (columns.headers[0] if columns.headers else None) or {}
    properties = {"topic": topic} | {f"h.{name}": text for name, text in own.items()}
    optional = {
        "id": str(uuid.UUID(bytes=columns.ids[0])) if columns.ids else None,
        "partition": options.get("partition"),
        "deliver_at": deliver_at,
        "ttl": None if ttl is None else seconds(ttl),
        "idempotency_key": options.get("idempotency_key"),
        "to": columns.targets[0].decode() if columns.targets else None,
        "timestamp": columns.times[0] if columns.times else None,
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "producer_sequence": producer[2],
    }
    properties |= {n: str(v) for n, v in optional.items() if v is not None}
    if columns.keys:
        documents.put_key(properties, columns.keys[0])
    return properties, columns.values[0]


def _is_misplaced(error: BaseException | None) -> bool:
    return isinstance(error, HeadraceError) and error.code == PARTITIONS_CHANGED


class ClientOptions(TypedDict, total=False):
    """The options of both clients, besides host, port and client_id."""

    servers: str | Sequence[str] | None
    """Several addresses of the broker: they are tried in turn, at first and after a broken connection."""
    token: str | None
    user: str | None
    password: str | None
    tls: bool | ssl.SSLContext
    ca: str | None
    """Use TLS and trust this certificate (the path of a PEM file)."""
    certificate: tuple[str, str] | None
    """The files of our own certificate and of its key: it is the login."""
    request_timeout: Duration
    """How long any waiting takes at most, except for a publish."""
    heartbeat_interval: Duration
    delivery_timeout: Duration
    """How long a publish is tried."""
    linger: Duration
    """How long publishes are gathered."""
    batch_bytes: int
    """How much is gathered."""
    max_message_size: int | None
    """Refuse larger messages; the broker's own limit is known without this."""


class AsyncClient(RemoteOperations):
    """A client of a broker. ``async with AsyncClient("localhost:9999") as client: ...``

    Addresses and logins can be in the environment: see ``client/address.py``. Options: ``ClientOptions``.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        client_id: str | None = None,
        *,
        servers: str | Sequence[str] | None = None,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: bool | ssl.SSLContext = False,
        ca: str | None = None,
        certificate: tuple[str, str] | None = None,
        request_timeout: Duration = 30.0,
        heartbeat_interval: Duration = 30.0,
        delivery_timeout: Duration = 120.0,
        linger: Duration = 0.0,
        batch_bytes: int = 256 << 10,
        max_message_size: int | None = None,
    ):
        self._is_named = client_id is not None
        self.client_id = client_id or default_client_id()
        self._link_options: dict[str, Any] = {
            "brokers": brokers_of(find_brokers(host, port, servers), tls, ca, certificate),
            "client_id": self.client_id,
            "login": login_of(_login(token, user, password, certificate)),
            "request_timeout": seconds(request_timeout),
            "heartbeat_interval": seconds(heartbeat_interval),
        }
        self._producer_options = {
            "linger": seconds(linger),
            "batch_bytes": batch_bytes,
            "timeout": seconds(delivery_timeout),
        }
        self._max_message_size = max_message_size or limits.MESSAGE_BYTES_CEILING
        self.max_message_size = self._max_message_size
        self._begin()

    def _begin(self) -> None:
        self._link: Link | None = None
        self._producer: Producer | None = None
        self._loop: asyncio.AbstractEventLoop
        self._feeds: dict[tuple[str, str | None, str], Feed] = {}
        self._acks: AckLedger
        self._failures = Failures()
        self._background: set[asyncio.Task[None]] = set()
        """Calls on their way that nobody need wait for, except those of the producer."""
        self._channels = 0
        self._handlers: dict[AsyncWorker, str] = {}
        self._running: dict[AsyncWorker, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def anew(self) -> AsyncClient:
        """Another with the same options, not connected yet; for a process that was forked."""
        other = copy(self)
        if not self._is_named:
            other.client_id = default_client_id()
            other._link_options = {**self._link_options, "client_id": other.client_id}
        other._begin()
        return other

    # --- connecting -------------------------------------------------------------------------
    async def connect(self) -> Self:
        """Connect, or say why not. ``await client`` and ``async with client`` do the same.

        Example::

            client = AsyncClient("localhost:9999")
            await client.connect()
        """
        if self._link is not None:
            self.link  # noqa: B018 - of another event loop: say so
            return self
        self._loop = asyncio.get_running_loop()
        link = Link(**self._link_options)
        link.on_frame = self._frame
        link.on_up = self._up
        link.on_down = self._down
        link.on_refused = self._refused
        self._producer = Producer(link, self._ask_partitions, **self._producer_options)  # type: ignore[arg-type]
        self._link = link
        self._acks = AckLedger(link)
        self._outgoing = self._new_outgoing()
        try:
            await link.open()
        except BaseException:
            self._link = None
            raise
        return self

    _open = connect

    async def close(self) -> None:
        """Send what waits, end the subscriptions, close the connection.

        Raises the first error that nobody has seen, of a ``publish_nowait`` or an acknowledgement; the client
        is closed all the same.

        Example::

            client = await AsyncClient("localhost:9999")
            await client.close()
        """
        await self._shut_down()
        self._failures.check()

    async def _shut_down(self) -> None:
        """Close, and keep the failures."""
        link, producer = self._link, self._producer
        if link is None or producer is None:
            return
        if self._loop.is_closed():  # everything ended with it
            return self._begin()
        await self._stop_handlers()
        self._hand_over()
        if self._background:
            await asyncio.wait(list(self._background), timeout=link.request_timeout)
        if not producer.is_idle and link.refused is None:
            # Also while the broker is away: it may be back in a moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(link.request_timeout):
                    await producer.flush()
        leaving = [self.unfollow(feed) for feed in self._feeds.values()]
        await asyncio.gather(*leaving, *self._tasks, return_exceptions=True)
        self._hand_over()
        producer.close()
        await producer.owners.close()
        await link.close()
        self._link = None
        self._acks.report(self._failures, closing=True)

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_up

    @property
    def link(self) -> Link:
        if self._link is None:
            raise not_connected()
        if self._loop.is_closed():
            raise not_connected(
                "the event loop in which the client was connected has ended: make a client in each asyncio.run"
            )
        return self._link

    @property
    def patience(self) -> float:
        return float(self._producer_options["timeout"])

    @property
    def producing(self) -> Producer:
        self.link  # noqa: B018 - not connected: say so
        assert self._producer is not None
        return self._producer

    @property
    def owners(self) -> Owners:
        return self.producing.owners

    async def _up(self, wire: Wire) -> None:
        self.max_message_size = min(self._max_message_size, self.link.max_message_size)
        self._acks.connected()
        for feed in list(self._feeds.values()):
            if not await self._is_subscribed(feed, wire):
                self._spawn(self._subscribe_again(feed, wire))
        self.producing.resume()

    async def _is_subscribed(self, feed: Feed, wire: Wire) -> bool:
        """After a reconnect. False: it was refused for a reason that may pass."""
        if self._feeds.get(feed.key) is not feed or wire.is_lost:
            return True  # it was closed meanwhile, or the next connection asks for it
        try:
            await feed.subscribe(wire)
        except HeadraceError as error:
            if error.retryable or error.code in _GOING_DOWN:
                return False
            self._feeds.pop(feed.key, None)
            feed.end(error)
        return True

    async def _subscribe_again(self, feed: Feed, wire: Wire) -> None:
        is_done = False
        while not is_done:
            await asyncio.sleep(RETRY_S)
            is_done = await self._is_subscribed(feed, wire)

    def _down(self) -> None:
        self._acks.connection_broke()
        for feed in self._feeds.values():
            feed.disconnected()

    def _refused(self, error: HeadraceError) -> None:
        """The login is not valid any more: whoever waits for messages hears it."""
        feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            feed.end(error)

    def _frame(self, frame: Frame) -> None:
        properties = frame.properties
        key = (
            properties.get("pattern", ""),
            properties.get("subscription"),
            properties.get("channel", ""),
        )
        feed = self._feeds.get(key)
        if feed is None:
            return
        if frame.type == Type.DELIVER:
            feed.delivered(frame)
        elif frame.type == Type.CLOSED and properties.get("code") not in _GOING_DOWN:
            del self._feeds[key]
            feed.end(error_of(frame))

    # --- publishing -------------------------------------------------------------------------
    async def _ask_partitions(self, topic: str) -> int:
        if self.owners.is_active:
            with contextlib.suppress(NotFound):
                return await self._ask_owners(topic)
        found = (await self.topic_stats(topic, create=True))["partitions"]
        # Many short programs publish a little each: together they fill all partitions.
        emptiest = min(found, key=lambda each: (each["bytes"], each["partition"]))
        self.producing.partitioner(topic, emptiest["partition"])
        return len(found)

    async def _ask_owners(self, topic: str) -> int:
        owners = (await self.topic_map(topic))["owners"]
        await self.owners.learn(topic, owners)
        return len(owners)

    def _publish(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> asyncio.Future[Receipt]:
        self.producing  # noqa: B018 - not connected: say so at once
        if is_plain(value, headers, options):
            key = options.get("key")
            return self._outgoing.add(topic, value, key, self.max_message_size)
        topic = checked_topic(topic)
        self._hand_over()  # what was published before
        if goes_alone(options):
            future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
            properties, body = alone(topic, value, headers, options, self.max_message_size)
            self.publish_alone(properties, body, partial(self._settle, future))
            return future
        columns = record(value, headers, options, self.max_message_size, Clock().now_ms())
        return self._produce(topic, columns, options.get("partition"))

    def _hand_over(self) -> None:
        self._outgoing.hand_over(self.produce)

    def _new_outgoing(self) -> PublishQueue[asyncio.Future[Receipt]]:
        loop = asyncio.get_running_loop()

        def future(bundle: Bundle, number: int) -> asyncio.Future[Receipt]:
            future = loop.create_future()
            bundle.futures[number] = future
            return future

        def wake() -> None:
            loop.call_soon(self._hand_over)

        return PublishQueue(
            wake, future, self._failures, int(self._producer_options["batch_bytes"])
        )

    def _settle(
        self, future: asyncio.Future[Receipt], receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        settle(future, receipt, error, self._failures)

    def _produce(
        self, topic: str, columns: Columns, partition: int | None, planned_on: int | None = None
    ) -> asyncio.Future[Receipt]:
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()

        settled = partial(self._settle, future)
        self.producing.publish(topic, columns, partition, settled, planned_on)
        return future

    def produce(self, topic: str, columns: Columns, partition: int | None, done: Done) -> None:
        """Checked records; ``done(receipt, error)`` hears of them, whatever happens."""
        if self._producer is None or self._link is None:
            done(None, Closed("the client was closed before the message was sent"))
        else:
            self._producer.publish(topic, columns, partition, done)

    def publish_alone(self, properties: Mapping[str, str], body: bytes, done: Done) -> None:
        """Publish in a frame of its own. The broker knows it again, so it is safe to send again."""
        if self._link is None:
            done(None, Closed("the client was closed before the message was sent"))
            return

        async def publish() -> None:
            try:
                frame = await self.link.ask(Type.PUBLISH, properties, body, again=True)
            except asyncio.CancelledError:
                done(None, OutcomeUnknown("the client was closed meanwhile"))
                raise
            except Exception as error:
                done(
                    None, error if isinstance(error, HeadraceError) else HeadraceError(repr(error))
                )
            else:
                done(receipt_of(frame), None)

        task = asyncio.get_running_loop().create_task(publish())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _publish_many(
        self, topic: str, values: Any, headers: Any, options: PublishManyOptions
    ) -> list[Receipt]:
        topic = checked_topic(topic)
        bytes_max, now = self.max_message_size, Clock().now_ms()
        columns = records(values, headers, options, bytes_max, now)
        partition, identity = options.get("partition"), options.get("producer")
        if identity is not None:
            batch = encode(columns)
            batch.producer_id, batch.producer_epoch, batch.first_sequence = identity
            return [await self.publish_batch(topic, batch, partition=partition)]
        receipts: list[Receipt] = []
        while True:
            stored, left = await self._produce_many(topic, columns, partition)
            receipts += stored
            if not left:
                return receipts
            columns = concat(left)  # partitions were added: spread them again

    async def _produce_many(
        self, topic: str, columns: Columns, partition: int | None
    ) -> tuple[list[Receipt], list[Columns]]:
        """The receipts, and what was refused because the number of partitions has changed."""
        producer = self.producing
        sent: list[tuple[Columns, asyncio.Future[Receipt]]] = []
        failed = False
        for number, planned_on, part in await producer.spread(topic, columns, partition):
            for piece in pieces(part):
                if failed:
                    break
                future = self._produce(topic, piece, number, planned_on)
                sent.append((piece, future))
                if producer.is_busy:
                    await asyncio.wait([future])
                    error = future.exception()
                    failed = error is not None and not _is_misplaced(error)
        await asyncio.wait([future for _, future in sent])
        misplaced = [_is_misplaced(future.exception()) for _, future in sent]
        stored = [future for (_, future), again in zip(sent, misplaced, strict=True) if not again]
        left = [piece for (piece, _), again in zip(sent, misplaced, strict=True) if again]
        return [future.result() for future in stored], left

    async def flush(self) -> None:
        """Everything published so far is stored, or has failed, and all acknowledgements are on disk.

        Raises the first error that nobody has seen, of a ``publish_nowait`` or an acknowledgement;
        :class:`OutcomeUnknown` if the connection broke before acknowledgements were on disk.

        Example::

            for order in orders:
                client.publish_nowait("orders", order)
            await client.flush()
        """
        self._hand_over()
        await self.producing.flush()
        if self._background:
            await asyncio.wait(list(self._background))
        await self._sync_acks()
        self._acks.report(self._failures)
        self._failures.check()

    async def _flush_acks(self) -> None:
        await self._sync_acks()
        self._acks.check()

    async def _sync_acks(self) -> None:
        await self.link.within_time(self._acks.flush())
        sent = self._acks.sent
        await super().flush()
        self._acks.cover(sent)

    # --- reading ----------------------------------------------------------------------------
    async def _fetch_batches(self, asked: Asked) -> list[Batch]:
        return batches_in((await self._fetch(asked)).body)

    async def _fetch(self, asked: Asked) -> Frame:
        start, body = parse_from(asked.offset), b""
        properties = {"topic": asked.topic, "max_bytes": str(asked.max_bytes)}
        if asked.partition is None:
            properties |= {"merge": "true", "limit": str(asked.limit)}
        else:
            properties["partition"] = str(asked.partition)
        if not isinstance(start, Mapping):
            properties["offset"] = position_text(start)
        elif asked.partition is None:
            body = binary.encode_places(start.items())
        else:
            properties["offset"] = str(start.get(asked.partition, "earliest"))
        if asked.wait:
            properties["wait"] = str(int(asked.wait * 1000))
        limit = self.link.request_timeout + asked.wait
        if asked.partition is not None and self.owners.is_active:
            place = (asked.topic, asked.partition)
            return await self.owners.ask(place, Question(Type.FETCH, properties, body), limit)
        return await self.link.ask(Type.FETCH, properties, body, again=True, timeout=limit)

    async def _read(self, asked: Asked, values: bool) -> Page[Any]:
        frame = await self._fetch(asked)
        if "merged" in frame.properties:
            return merged_page(asked.topic, frame, values=values)
        at = int(frame.properties["offset"])
        return page_of(readable([batches_in(frame.body)], at), at, asked, values=values)

    # --- subscribing ------------------------------------------------------------------------
    async def _open_channel(self, topic: str, capacity: int) -> AsyncChannel:
        channel = AsyncChannel(topic, capacity)
        await self.follow(channel)
        channel.on_close = self._close_channel
        return channel

    async def follow(self, arrivals: Arrivals) -> Feed:
        """Lead a topic into a channel of the caller's making."""
        self._channels += 1
        channel = str(self._channels)
        feed = Feed(self.link, arrivals, None, self._acks, topic=arrivals.topic, channel=channel)
        await self._start(feed)
        return feed

    def _close_channel(self, channel: AsyncChannel) -> None:
        for feed in list(self._feeds.values()):
            if feed.arrivals is channel:
                self._spawn(self.unfollow(feed))
        channel.closed(None)

    async def unsubscribe(self, topic: str) -> None:
        for feed in list(self._feeds.values()):
            if feed.topic == topic and feed.name is None:
                await self.unfollow(feed)

    async def unfollow(self, feed: Feed) -> None:
        """End a feed, also if the caller is cancelled. Until that is answered, deliveries for it may still arrive."""
        await asyncio.shield(self._spawn(self._unfollow(feed)))

    async def _unfollow(self, feed: Feed) -> None:
        await feed.unsubscribe()
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]

    async def _join(
        self, name: str, topic: str | None, prefetch: int, auto_extend: bool
    ) -> AsyncRemoteConsumer:
        consumer = AsyncRemoteConsumer(topic or name, prefetch)
        consumer.flush = self._flush_acks
        await self.join(consumer, name, topic, prefetch, auto_extend)
        consumer.on_close = self._close_channel
        return consumer

    async def _retire(self, consumer: AsyncRemoteConsumer) -> None:
        await consumer.feed.retire()

    async def _leave(self, consumer: AsyncRemoteConsumer) -> None:
        await self.unfollow(consumer.feed)

    async def join(
        self,
        consumer: AsyncRemoteConsumer | RemoteConsumer,
        name: str,
        topic: str | None,
        prefetch: int,
        auto_extend: bool,
    ) -> None:
        """Lead a subscription into a consumer of the caller's making."""
        stats = await self.subscription_stats(name, topic)
        consumer.feed = Feed(
            self.link,
            consumer,
            consumer,
            self._acks,
            stats["topic"],
            name,
            _prefetch=prefetch,
            _ack_timeout=stats["settings"]["ack_timeout"],
            _auto_extend=auto_extend,
        )
        await self._start(consumer.feed)

    async def _start(self, feed: Feed) -> None:
        await self.link.within_time(self._subscribe(feed))

    async def _subscribe(self, feed: Feed) -> None:
        while True:
            wire = await self.link.ready()
            other = self._feeds.get(feed.key)
            if other is not None and other.is_leaving:
                await other.left.wait()
                continue
            if other is not None:
                raise Conflict(
                    f"this client has subscribed to {feed.name or feed.topic!r} already; close "
                    "that first, or use another client",
                    code="subscribed",
                )
            # Only now: a link that comes up asks for every feed that is known, and once is enough.
            self._feeds[feed.key] = feed
            try:
                await feed.subscribe(wire)
                return
            except ConnectionLost:
                self._feeds.pop(feed.key, None)
            except HeadraceError:
                self._feeds.pop(feed.key, None)
                raise
            except (
                BaseException
            ):  # cancelled, or out of time: the broker may deliver to us all the same
                self._feeds.pop(feed.key, None)
                feed.leave_later(wire)
                raise

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def leave(self, name: str, topic: str | None = None) -> None:
        """End this client's part in a subscription; the subscription stays."""
        for feed in list(self._feeds.values()):
            if feed.name == name and topic in (None, feed.topic):
                await self.unfollow(feed)
                return
        raise NotFound(f"this client has not joined {name!r}", code="not_subscribed")
