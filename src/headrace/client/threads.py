"""``BrokerClient``: a broker over the network, for programs that use threads.

The connection runs on an event loop in a thread of its own; this class carries calls over. ``publish``
does not wait: it returns a :class:`Publication` to wait on, and publishes that follow each other travel
together. All methods may be called from any thread. A client that is still connected when the program
ends is closed then, so that what it has published is sent.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from headrace import limits
from headrace.channels import Channel
from headrace.client.administration import Start
from headrace.client.aio import AsyncClient
from headrace.client.consumer import Consumer, Feed
from headrace.client.publication import Publication, renew_lock
from headrace.clock import Clock, new_loop
from headrace.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
)
from headrace.forking import put_aside, watch
from headrace.log.batch import Batch
from headrace.log.columns import Columns, expiry_of, one
from headrace.model import DeadLetter, Message, Receipt, Scheduled, not_a_topic

logger = logging.getLogger("headrace.client")
Result = TypeVar("Result")
Handler = Callable[[Message], object]
FAILED_KEPT_MAX = 100


class BrokerClient:
    """A client of one broker::

        client = BrokerClient(host='localhost', port=9999, client_id='publisher-1')
        client.connect()
        client.publish_text('events', 'Hello, World!')
        client.disconnect()

    or ``with BrokerClient() as client: ...``. Options as for ``AsyncClient``.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 9999,
        client_id: str | None = None,
        **options: Any,
    ):
        self._async = AsyncClient(host, port, client_id, **options)
        self._is_forked = False
        self._begin_anew()
        watch(self)

    def _begin_anew(self) -> None:
        self.client_id = self._async.client_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._outgoing: deque[tuple[str, Columns, int | None, Publication]] = deque()
        self._sending = False
        self._channels: dict[Channel, Feed] = {}
        self._consumers: dict[Consumer, str] = {}
        self._handlers: dict[Consumer, threading.Thread] = {}
        self._alone: set[Publication] = set()
        """On their way by themselves, not through the producer."""
        self._works: set[asyncio.Task[Receipt]] = set()
        """Which bring those on their way."""
        self._failed: list[Publication] = []

    def forked(self) -> None:
        """In a child process: the connection and all that hangs on it stay with the parent."""
        renew_lock()
        if self._loop is None:
            self._lock = threading.Lock()
            return
        put_aside(self._loop, self._thread, self._async)
        _connected.discard(self)
        error = _forked()
        for feed in [*self._channels.values(), *[each.feed for each in self._consumers]]:
            feed.disconnected()
        for channel in [*self._channels, *self._consumers]:
            channel.on_close = lambda channel: None
            channel.forked(error)
        self._is_forked = True
        self._async = self._async.anew()
        self._begin_anew()

    # --- connecting -------------------------------------------------------------------------
    def connect(self) -> BrokerClient:
        with self._lock:
            if self._loop is not None:
                return self
            self._is_forked = False
            self._loop = new_loop()
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop,), name="headrace-client", daemon=True
            )
            self._thread.start()
        try:
            self._run(self._async.connect())
        except BaseException:
            self._stop()
            raise
        _connected.add(self)
        return self

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    def _stop(self) -> None:
        _connected.discard(self)
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        # What other threads handed over too late for the loop, nobody will answer any more.
        self._sending = False
        while self._outgoing:
            self._outgoing.popleft()[-1].settle(None, _closed())
        while self._alone:
            self._alone.pop().settle(None, _closed())

    def disconnect(self) -> None:
        """Send what waits, end the subscriptions, close the connection."""
        if self._loop is None:
            return
        for consumer in list(self._handlers):
            self._end_handler(consumer)
        for consumer in list(self._consumers):
            self._call(consumer.carry_out)
        with contextlib.suppress(Closed):  # another thread was faster
            self._run(self._close())
        self._channels.clear()
        self._consumers.clear()
        self._stop()

    async def _close(self) -> None:
        if self._works:  # each ends in its own time
            await asyncio.wait(self._works)
        await self._async.close()

    close = disconnect

    def __enter__(self) -> BrokerClient:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    @property
    def is_connected(self) -> bool:
        return self._loop is not None and self._async.is_connected

    def _call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have it run on the loop, soon; if the client is closed meanwhile, nobody is left to tell."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *args)

    def _begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        loop = self._loop
        if loop is None:
            coroutine.close()
            raise self._not_connected()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgument("do not call the client from a callback of its own thread")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def _not_connected(self) -> Closed:
        if self._is_forked:
            return _forked()
        return Closed("the client is not connected: call connect() first", code="not_connected")

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        loop = self._loop
        try:
            return self._begin(coroutine).result()
        except (CancelledError, RuntimeError):
            if self._loop is loop:
                raise
            coroutine.close()
            raise Closed("the client was closed meanwhile") from None

    # --- topics -----------------------------------------------------------------------------
    def create_topic(self, name: str, partitions: int | None = None, **settings: Any) -> None:
        """Make a topic. One that exists with these settings is fine."""
        if partitions is not None:
            settings["partitions"] = partitions
        self._run(self._async.create_topic(name, **settings))

    def change_topic(self, name: str, **changes: Any) -> None:
        self._run(self._async.change_topic(name, **changes))

    def delete_topic(self, name: str) -> None:
        self._run(self._async.delete_topic(name))

    def topics(self) -> list[str]:
        return self._run(self._async.topics())

    def topic_stats(self, name: str) -> dict[str, Any]:
        return self._run(self._async.topic_stats(name))

    # --- publishing -------------------------------------------------------------------------
    def publish(
        self,
        topic: str,
        value: bytes | str,
        headers: Mapping[str, str] | None = None,
        *,
        key: bytes | str | None = None,
        id: uuid.UUID | str | None = None,
        partition: int | None = None,
        to: str | None = None,
        delay: float | None = None,
        deliver_at: int | None = None,
        ttl: float | None = None,
        timestamp: int | None = None,
        idempotency_key: str | None = None,
    ) -> Publication:
        """Publish without waiting; ``.result()`` of what is returned waits for the receipt."""
        loop = self._loop
        if loop is None:
            raise self._not_connected()
        if not isinstance(topic, str):
            raise not_a_topic(topic)
        publication = Publication()
        if delay is not None or deliver_at is not None or idempotency_key is not None:
            work = partial(
                self._async.publish,
                topic,
                value,
                headers,
                key=key,
                id=id,
                partition=partition,
                to=to,
                delay=delay,
                deliver_at=deliver_at,
                ttl=ttl,
                timestamp=timestamp,
                idempotency_key=idempotency_key,
            )
            self._alone.add(publication)
            self._call(self._start_alone, work, publication)
            if self._loop is not loop and publication in self._alone:
                raise _closed()
            return publication
        columns = one(
            value,
            bytes_max=self._async._max_message_size,
            key=key,
            headers=headers,
            id=id,
            timestamp=timestamp,
            expires_at=expiry_of(ttl, Clock().now_ms()),
            target=to,
        )
        self._outgoing.append((topic, columns, partition, publication))
        if not self._sending:
            self._sending = True
            self._call(self._send)
        return publication

    def _start_alone(
        self, work: Callable[[], Coroutine[Any, Any, Receipt]], publication: Publication
    ) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._works.add(task)

        def done(task: asyncio.Task[Receipt]) -> None:
            self._works.discard(task)
            self._alone.discard(publication)
            if task.cancelled():
                self._settled(publication, None, OutcomeUnknown("the client was closed meanwhile"))
                return
            error = task.exception()
            if error is None:
                self._settled(publication, task.result(), None)
            elif isinstance(error, HeadraceError):
                self._settled(publication, None, error)
            else:
                self._settled(publication, None, HeadraceError(repr(error)))

        task.add_done_callback(done)

    def _send(self) -> None:
        """On the loop: hand over what was published since the last time."""
        self._sending = False
        outgoing, publish = self._outgoing, self._async.produce
        while outgoing:
            topic, columns, partition, publication = outgoing.popleft()
            publish(topic, columns, partition, partial(self._settled, publication))

    def _settled(
        self, publication: Publication, receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        publication.settle(receipt, error)
        if error is not None and not publication._waited and len(self._failed) < FAILED_KEPT_MAX:
            self._failed.append(publication)

    def publish_text(
        self, topic: str, text: str, headers: Mapping[str, str] | None = None, **properties: str
    ) -> Receipt:
        """Store a text and wait for it; further keyword arguments become headers."""
        merged = {**(headers or {}), **{name: str(value) for name, value in properties.items()}}
        return self.publish(topic, text.encode(), merged).result()

    def publish_many(
        self,
        topic: str,
        values: Sequence[bytes | str],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[Receipt]:
        """Store many messages and wait for them."""
        return self._run(self._async.publish_many(topic, values, headers, **options))

    def flush(self) -> None:
        """Everything published and acknowledged so far is known to the broker.

        Raises the first error of a publish that nobody waited for.
        """
        self._call(self._send)
        for consumer in list(self._consumers):
            self._call(consumer.carry_out)
        self._run(self._async.flush())
        failed, self._failed = self._failed, []
        for publication in failed:
            if publication._error is not None and not publication._waited:
                raise publication._error

    # --- reading ----------------------------------------------------------------------------
    def fetch(
        self, topic: str, offset: Start = "earliest", limit: int = 1000, **options: Any
    ) -> list[Message]:
        """Messages from an offset (or a time) on; see ``AsyncClient.fetch``."""
        return self._run(self._async.fetch(topic, offset, limit, **options))

    def fetch_values(self, topic: str, offset: Start = "earliest", **options: Any) -> list[bytes]:
        return self._run(self._async.fetch_values(topic, offset, **options))

    def fetch_batches(self, topic: str, offset: Start = "earliest", **options: Any) -> list[Batch]:
        return self._run(self._async.fetch_batches(topic, offset, **options))

    def find(self, message_id: uuid.UUID | str) -> Message:
        return self._run(self._async.find(message_id))

    # --- subscribing ------------------------------------------------------------------------
    def subscribe(self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT) -> Channel:
        """Every message of the topic (or wildcard) from now on, in a channel."""
        channel = Channel(topic, capacity, self._call)
        self._channels[channel] = self._run(self._async.follow(channel))
        channel.on_close = self._close_channel
        return channel

    def _close_channel(self, channel: Channel) -> None:
        feed = self._channels.pop(channel, None)
        if feed is not None:
            self._run(self._async.unfollow(feed))

    def unsubscribe(self, topic: str) -> None:
        """Close the plain channels of the topic."""
        for channel in list(self._channels):
            if channel.topic == topic:
                channel.close()

    def create_subscription(
        self,
        name: str,
        topic: str,
        start_offset: Start | None = None,
        *,
        start: Start = "earliest",
        **settings: Any,
    ) -> None:
        """Make a subscription, or change the settings given of one that is there."""
        where = start if start_offset is None else start_offset
        self._run(self._async.create_subscription(name, topic, start=where, **settings))

    def subscription(
        self,
        name: str,
        topic: str | None = None,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        auto_extend: bool = False,
        **settings: Any,
    ) -> Consumer:
        """Join a durable subscription; with a topic it is made if it is not there yet."""
        consumer = Consumer(topic or name, prefetch, self._call)

        async def join() -> None:
            if topic is not None:
                await self._async.create_subscription(name, topic, start=start, **settings)
            await self._async.join(consumer, consumer, name, topic, prefetch, auto_extend)

        self._run(join())
        self._consumers[consumer] = name
        consumer.on_close = lambda channel: self._leave(name, consumer)
        return consumer

    def _leave(self, name: str, consumer: Consumer) -> None:
        self._consumers.pop(consumer, None)

        async def leave() -> None:
            consumer.carry_out()
            with contextlib.suppress(NotFound):
                await self._async.leave(name, consumer.feed.topic)

        self._run(leave())

    def subscribe_to_subscription(
        self, name: str, handler: Handler, topic: str | None = None, **options: Any
    ) -> None:
        """Join a subscription and run ``handler(message)`` for each message, in a thread.

        The message is acknowledged when the handler returns and given back when it raises.
        """
        consumer = self.subscription(name, topic, auto_extend=True, **options)
        thread = threading.Thread(
            target=_handle_all, args=(consumer, handler), name=f"headrace-{name}", daemon=True
        )
        self._handlers[consumer] = thread
        thread.start()

    def unsubscribe_from_subscription(self, name: str) -> None:
        """End this client's part in a subscription; the subscription stays."""
        joined = [consumer for consumer, joined in self._consumers.items() if joined == name]
        if not joined:
            raise NotFound(f"this client has not joined {name!r}", code="not_subscribed")
        for consumer in joined:
            self._end_handler(consumer)
            consumer.close()

    def _end_handler(self, consumer: Consumer) -> None:
        """Let the handler finish the message it is at, and begin no other."""
        thread = self._handlers.pop(consumer, None)
        if thread is not None:
            consumer.halt()
            if thread is not threading.current_thread():
                thread.join(timeout=self._async._link_options["request_timeout"])

    def delete_subscription(self, name: str, topic: str | None = None) -> None:
        self._run(self._async.delete_subscription(name, topic))

    def subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        return self._run(self._async.subscriptions(topic))

    def subscription_stats(self, name: str, topic: str | None = None) -> dict[str, Any]:
        return self._run(self._async.subscription_stats(name, topic))

    def seek(
        self, name: str, to: Start, *, topic: str | None = None, partition: int | None = None
    ) -> None:
        """Replay a subscription from ``earliest``, ``latest``, an offset or a time on."""
        self._run(self._async.seek(name, to, topic=topic, partition=partition))

    # --- dead letters and delayed messages ------------------------------------------------------
    def dead_letters(
        self, subscription: str, *, after: int = -1, limit: int = 100
    ) -> list[DeadLetter]:
        return self._run(self._async.dead_letters(subscription, after=after, limit=limit))

    def redrive(self, subscription: str, **options: Any) -> int:
        return self._run(self._async.redrive(subscription, **options))

    def edit_dead_letter(self, subscription: str, offset: int, **changes: Any) -> int:
        return self._run(self._async.edit_dead_letter(subscription, offset, **changes))

    def purge_dead_letters(self, subscription: str, offsets: list[int] | None = None) -> int:
        return self._run(self._async.purge_dead_letters(subscription, offsets))

    def scheduled(self, topic: str | None = None, *, limit: int = 1000) -> list[Scheduled]:
        return self._run(self._async.scheduled(topic, limit=limit))

    def cancel(self, message_id: uuid.UUID | str) -> None:
        self._run(self._async.cancel(message_id))

    # --- pipelines --------------------------------------------------------------------------
    def report_pipeline(self, name: str, report: dict[str, Any]) -> dict[str, Any]:
        return self._run(self._async.report_pipeline(name, report))

    def pipelines(self) -> list[dict[str, Any]]:
        return self._run(self._async.pipelines())

    def stop_pipeline(self, name: str) -> None:
        self._run(self._async.stop_pipeline(name))

    def forget_pipeline(self, name: str) -> None:
        self._run(self._async.forget_pipeline(name))

    # --- jobs of many tasks -------------------------------------------------------------------
    def stage(
        self,
        topic: str,
        batch: Batch,
        *,
        partition: int | None = None,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> str:
        """Store a batch durably but out of sight; returns the piece's id, for ``commit_staged``.

        The whole batch goes to one partition: the one named, or else the topic's next in turn.
        With ``name`` and ``number``, it is dropped once that commit is done without it.
        ``delayed``: its times say when each record is to be published, from its commit on.
        """
        return self._run(
            self._async.stage(
                topic, batch, partition=partition, name=name, number=number, delayed=delayed
            )
        )

    def stage_nowait(
        self,
        topic: str,
        batch: Batch,
        *,
        partition: int | None = None,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> Future[str]:
        """The same without waiting, so that many can be under way."""
        return self._begin(
            self._async.stage(
                topic, batch, partition=partition, name=name, number=number, delayed=delayed
            )
        )

    def publish_batch_nowait(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Future[Receipt]:
        """Store a whole batch, at least once, without waiting. Sent in the order of the calls."""
        return self._begin(self._async.publish_batch(topic, batch, partition=partition))

    def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        """Show all pieces at once; False when this number of the name was committed before."""
        return self._run(self._async.commit_staged(name, number, pieces))

    def abort_staged(self, pieces: list[str]) -> None:
        """Give pieces up that will not be committed."""
        self._run(self._async.abort_staged(pieces))

    def positions(
        self, topics: str | list[str], *, at: int | datetime | None = None
    ) -> dict[str, list[dict[str, int]]]:
        """Start, end and bytes of every partition of the topics; with ``at`` an ``offset``, too."""
        return self._run(self._async.positions(topics, at=at))

    def wait_for(
        self,
        positions: Mapping[str, Mapping[int, int]],
        *,
        topics: str | list[str] | None = None,
        timeout: float,
    ) -> bool:
        """Wait until one of the partitions has more than that; False: the time was up."""
        return self._run(self._async.wait_for(positions, topics=topics, timeout=timeout))

    def advance(
        self, name: str, positions: Mapping[str, Mapping[int, int]], *, topic: str | None = None
    ) -> None:
        """Everything before these offsets is done for the subscription; it never moves back."""
        self._run(self._async.advance(name, positions, topic=topic))

    def admin(self, operation: str, **arguments: Any) -> Any:
        """An administrative operation by name; the result is JSON."""
        return self._run(self._async.admin(operation, **arguments))


_connected: set[BrokerClient] = set()


@atexit.register
def _close_all() -> None:
    """Whoever has not closed his client does not lose by it what is on its way."""
    for client in list(_connected):
        with contextlib.suppress(HeadraceError):
            client.disconnect()


async def _cancel_all() -> None:
    """Whoever still waits for something in another thread hears that it is over."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _forked() -> Closed:
    return Closed(
        "the connection belongs to the process that this one was forked from: call connect() here",
        code="not_connected",
    )


def _closed() -> Closed:
    return Closed("the client was closed before the message was sent")


def _handle_all(consumer: Consumer, handler: Handler) -> None:
    for message in consumer:
        if consumer.is_halted:
            consumer.give_back(message)
            return
        try:
            handler(message)
        except Exception as error:
            logger.exception("the handler failed for %r", message)
            with contextlib.suppress(HeadraceError):
                message.nack(reason=f"{type(error).__name__}: {error}")
        else:
            with contextlib.suppress(HeadraceError):
                message.ack()
