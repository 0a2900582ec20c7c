"""Methods that ``Broker``, ``AsyncBroker``, ``BrokerClient`` and ``AsyncClient`` share, besides operations:
publishing, reading, subscribing, and workers.

Signatures and documentation are here, once for asyncio and once for threads. The four classes implement
the calls (``_publish``, ``_read``, ``_join`` and so on).

Workers, which call a handler for each message of a subscription, are in ``working.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from headrace import limits, tracing
from headrace.channels import (
    AsyncChannel,
    AsyncConsumer,
    Channel,
    Consumer,
    Opening,
    check_count,
    check_prefetch,
    reply_of,
)
from headrace.contents import Value, check_value, check_values
from headrace.errors import Closed, HeadraceError, NotFound
from headrace.log.batch import Batch
from headrace.misspelt import watch
from headrace.model import (
    JoinOptions,
    Message,
    PublishManyOptions,
    PublishOptions,
    Receipt,
    Start,
    SubscriptionOptions,
    check_join,
)
from headrace.operations.blocking import BlockingOperations
from headrace.operations.catalog import Operations
from headrace.paging import Asked, From, Page
from headrace.publication import Failures, Publication, note_failure
from headrace.shell import blocking, documented_as, nowait
from headrace.times import Duration, seconds
from headrace.tracing import published, sending
from headrace.working import AsyncHandler, AsyncWorker, Handler, Worker, check_worker, log_failure


class AsyncFacade(Operations):
    _failures: Failures
    """What failed while nobody waited, for ``flush`` and ``close`` to raise."""
    _handlers: dict[AsyncWorker, str]
    """Every worker, and the subscription that it joined."""
    _running: dict[AsyncWorker, asyncio.Task[None]]
    """The workers in the background, and their tasks."""

    # A broker and a client implement these differently.
    _open: Callable[[], Coroutine[Any, Any, Self]]
    close: Callable[[], Coroutine[Any, Any, None]]
    _publish: Callable[..., asyncio.Future[Receipt]]
    _publish_many: Callable[..., Awaitable[list[Receipt]]]
    _stage: Callable[..., Awaitable[str]]
    _read: Callable[[Asked, bool], Awaitable[Page[Any]]]
    """A page of messages or, if the last argument is true, of values."""
    _fetch_batches: Callable[[Asked], Awaitable[list[Batch]]]
    _open_channel: Callable[[str, int], Coroutine[Any, Any, AsyncChannel]]
    _join: Callable[[str, str | None, int, bool], Awaitable[AsyncConsumer]]
    _retire: Callable[[Any], Coroutine[Any, Any, None]]
    """Take no more messages, and give back those that no caller has taken."""
    _leave: Callable[[Any], Coroutine[Any, Any, None]]
    """Give back the messages that no caller has taken, and leave the subscription."""

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self.close()
        except HeadraceError as failure:
            note_failure(error, failure)

    if not TYPE_CHECKING:  # mypy finds this mistake by itself

        def __enter__(self):
            raise TypeError(f"use async with: {type(self).__name__} is for asyncio")

        def __exit__(self, *error):
            """Python looks for it before it calls ``__enter__``."""

    # --- publishing -------------------------------------------------------------------------
    async def publish(
        self,
        topic: str,
        value: Value | None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Receipt:
        """Store one message. When this returns, the message is as durable as its topic promises.

        ``to`` names the only subscription that gets it. ``delay`` (seconds) or ``deliver_at``
        (ms) publish it later. ``ttl`` (seconds) is its time to live. A repeated
        ``idempotency_key`` or ``producer`` (id, epoch, sequence) is answered with the first receipt.
        Publishes that run at the same time are sent together. A dict or a list is JSON; None is a tombstone.

        Example::

            receipt = await client.publish("orders", {"order": 7}, key="alice", delay=timedelta(minutes=5))
        """
        return cast(Receipt, await published(self._publish, topic, value, headers, options))

    def publish_nowait(
        self,
        topic: str,
        value: Value | None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> asyncio.Future[Receipt]:
        """Publish without waiting; the future gets the receipt, or the error.

        An error that nobody asks the future for is logged, and raised by ``flush`` and ``close``.

        Example::

            futures = [client.publish_nowait("orders", order) for order in orders]
            await client.flush()
        """
        future: asyncio.Future[Receipt] = published(self._publish, topic, value, headers, options)
        return future

    async def publish_text(
        self, topic: str, text: str, headers: Mapping[str, str] | None = None, **properties: str
    ) -> Receipt:
        """Store a text. Further keyword arguments become headers.

        Example::

            await client.publish_text("orders", "hello", source="shop")
        """
        return await self.publish(topic, text.encode(), _merged(headers, properties))

    async def publish_many(
        self,
        topic: str,
        values: Sequence[Value | None],
        headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None = None,
        **options: Unpack[PublishManyOptions],
    ) -> list[Receipt]:
        """Store many messages together. Each receipt is for messages that went to one partition together.

        Example::

            await client.publish_many("orders", [b"one", {"order": 2}], keys=["a", "b"])
        """
        with sending("publish", topic, headers, len(check_values(values))) as headers:
            return await self._publish_many(topic, values, headers, options)

    async def publish_batch(
        self, topic: str, batch: Batch, *, partition: int | None = None
    ) -> Receipt:
        """Store a whole batch. A client sends it again if the connection breaks before the answer.

        Without ``partition``, keys decide the partition of their records; the receipt is the first
        partition's.

        Example::

            for batch in await client.fetch_batches("orders"):
                await client.publish_batch("copies", batch)
        """
        raise NotImplementedError

    async def stage(
        self,
        topic: str,
        batch: Batch,
        *,
        partition: int | None = None,
        name: str | None = None,
        number: int | None = None,
        delayed: bool = False,
    ) -> str:
        """Store a hidden batch, durably; returns the piece's id, for ``commit_staged``.

        The whole batch goes to one partition: the named one, or the topic's next in turn,
        whatever keys its records have. To keep the records of a key together, sort them into batches
        by partition first.

        ``name`` and ``number`` name the commit that the piece is for: it is dropped when that commit, or a
        later one of the same name, is done without it. Otherwise it is kept for a day, with everything
        that is staged after it. This is also true for a batch that a client staged twice because the
        connection broke. ``delayed``: the times of the batch say when each record is published, after its
        commit.

        Example::

            piece = await client.stage("copies", batch, name="job-1", number=5)
            await client.commit_staged("job-1", 5, [piece])
        """
        purpose = {"name": name, "number": number, "delayed": delayed}
        return await self._stage(topic, batch, partition, **purpose)

    # --- requests ---------------------------------------------------------------------------
    async def request(
        self,
        topic: str,
        value: Value,
        headers: Mapping[str, str] | None = None,
        *,
        key: bytes | str | None = None,
        timeout: Duration = 30.0,
    ) -> Message:
        """Publish a request and wait for the reply of a worker.

        Raises ``RequestTimeout`` (``no_reply``) if there is none after ``timeout`` seconds; the request may
        still be handled. Topic, partition and offset of the reply are those of the request.

        Example::

            reply = await client.request("prices", "apple", timeout=5)
            print(reply.text())
        """
        checked = check_value(value, limits.MESSAGE_BYTES_CEILING)
        with sending("request", topic, headers) as headers:
            return await self.send_request(
                topic, checked, headers=headers, key=key, timeout=seconds(timeout)
            )

    async def reply(
        self,
        message: Message,
        value: Value,
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Reply to a request, however you got it. False: nobody waits for the reply any more.

        ``message.reply(value)`` does the same for a message of a subscription, without waiting.

        Example::

            await client.reply(message, "0.50")
        """
        return await self.send_reply(**reply_of(message, value, headers))

    # --- reading ----------------------------------------------------------------------------
    async def fetch(
        self,
        topic: str,
        offset: From = "earliest",
        limit: int = 1000,
        *,
        partition: int | None = None,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: Duration = 0.0,
    ) -> Page[Message]:
        """Read messages. This moves no position and acknowledges nothing.

        All partitions are read, in the order of time, unless ``partition`` names one. ``offset`` is
        ``earliest``, ``latest``, a time, or ``next`` of the page before; an offset, if the topic has one
        partition or you name it. ``wait``: seconds to wait for the first message if there is none yet.

        The result is a list. It may have fewer than ``limit`` messages although more exist; continue with
        its ``next``, the positions after it.

        Example::

            page = await client.fetch("orders")
            while page:
                ...
                page = await client.fetch("orders", page.next)
        """
        check_count("limit", limit)
        return await self._read(
            Asked(topic, offset, partition, max_bytes, seconds(wait), limit), False
        )

    async def fetch_values(
        self,
        topic: str,
        offset: From = "earliest",
        *,
        partition: int | None = None,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: Duration = 0.0,
    ) -> Page[bytes]:
        """Like ``fetch``, but returns plain values, of about ``max_bytes`` together.

        Example::

            values = await client.fetch_values("orders", datetime.now(UTC) - timedelta(hours=1))
        """
        return await self._read(Asked(topic, offset, partition, max_bytes, seconds(wait)), True)

    async def fetch_batches(
        self,
        topic: str,
        offset: Start = "earliest",
        *,
        partition: int = 0,
        max_bytes: int = limits.READ_BYTES_DEFAULT,
        wait: Duration = 0.0,
    ) -> list[Batch]:
        """Read whole batches of one partition, as they are stored; the first one holds the offset.

        Example::

            count = sum(batch.count for batch in await client.fetch_batches("orders", partition=0))
        """
        return await self._fetch_batches(Asked(topic, offset, partition, max_bytes, seconds(wait)))

    # --- subscribing ------------------------------------------------------------------------
    def subscribe(
        self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT
    ) -> Opening[AsyncChannel]:
        """Receive every message of the topic (or wildcard) from now on.

        Example::

            async for message in client.subscribe("orders.>"):
                print(message.text())
        """
        return Opening(self._open_channel(topic, capacity))

    async def unsubscribe(self, topic: str) -> None:
        """Close the plain channels of the topic.

        Example::

            await client.unsubscribe("orders.>")
        """
        raise NotImplementedError

    def subscription(
        self,
        name: str,
        topic: str | None = None,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        auto_extend: bool = False,
        **settings: Unpack[SubscriptionOptions],
    ) -> Opening[AsyncConsumer]:
        """Join a durable subscription. With a topic, it is created if it does not exist.

        ``prefetch``: how many unacknowledged messages this member may have. ``auto_extend``: extend their
        deadlines until they are settled.

        Example::

            async with client.subscription("email", "orders", ack_timeout=60) as consumer:
                async for message in consumer:
                    message.ack()
        """

        async def join() -> AsyncConsumer:
            check_join("subscription", topic, settings, start)
            check_prefetch(prefetch)
            if topic is None:
                return await self._join(name, None, prefetch, auto_extend)
            made = await self.create_subscription(name, topic, start, **settings)
            consumer = await self._join(name, topic, prefetch, auto_extend)
            watch(self.topic_stats, made, topic, consumer)
            return consumer

        return Opening(join())

    # --- workers ----------------------------------------------------------------------------
    async def consume(
        self,
        name: str,
        handler: AsyncHandler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        timeout: Duration | None = None,
        **options: Unpack[JoinOptions],
    ) -> None:
        """Call ``handler`` for each message until the worker is stopped or the subscription ends.

        The message is acknowledged when the handler returns, and given back when it raises or takes longer
        than ``timeout`` seconds. ``concurrency`` messages are handled at the same time. Other options as for
        ``subscription``.

        Ctrl-C, SIGTERM, ``unsubscribe_from_subscription`` and ``close`` stop it: the handlers finish their
        messages, and all other messages go back. If it is cancelled, the handlers are cancelled, too.

        Example::

            await client.consume("email", send_mail, "orders", concurrency=10)
        """
        worker = await self._worker(name, handler, topic, concurrency, timeout, options)
        with self._remembered(worker, name):
            await worker.run()

    async def subscribe_to_subscription(
        self,
        name: str,
        handler: AsyncHandler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        timeout: Duration | None = None,
        **options: Unpack[JoinOptions],
    ) -> None:
        """Like ``consume``, but in the background: it returns when the subscription is joined.

        Example::

            await client.subscribe_to_subscription("email", send_mail, "orders")
        """
        worker = await self._worker(name, handler, topic, concurrency, timeout, options)

        async def run() -> None:
            with self._remembered(worker, name), log_failure(name):
                await worker.run(signals=False)

        self._handlers[worker] = name
        self._running[worker] = asyncio.get_running_loop().create_task(run())

    async def _worker(
        self, name: str, handler: AsyncHandler, topic: str | None, concurrency: int,
        timeout: Duration | None, options: JoinOptions,
    ) -> AsyncWorker:  # fmt: skip
        check_join("consume", topic, options)
        limit = check_worker(handler, concurrency, timeout, is_async=True)
        consumer = await self.subscription(name, topic, auto_extend=True, **options)
        retire, leave = partial(self._retire, consumer), partial(self._leave, consumer)
        return AsyncWorker(consumer, handler, name, retire, leave, concurrency, limit)

    @contextlib.contextmanager
    def _remembered(self, worker: AsyncWorker, name: str) -> Iterator[None]:
        self._handlers[worker] = name
        try:
            yield
        finally:
            self._handlers.pop(worker, None)
            self._running.pop(worker, None)

    async def unsubscribe_from_subscription(self, name: str) -> None:
        """Stop the workers of a subscription: the handlers finish their messages. The subscription stays.

        Example::

            await client.unsubscribe_from_subscription("email")
        """
        workers = [worker for worker, joined in self._handlers.items() if joined == name]
        if not workers:
            raise NotFound(f"{name!r} was not joined here", code="not_subscribed")
        await self._stop_handlers(workers)

    async def _stop_handlers(self, workers: list[AsyncWorker] | None = None) -> None:
        stopping = list(self._handlers) if workers is None else workers
        running = [self._running[worker] for worker in stopping if worker in self._running]
        await asyncio.gather(*[worker.stop() for worker in stopping])
        await asyncio.gather(*running, return_exceptions=True)


class BlockingFacade(BlockingOperations):
    # A broker and a client implement these differently. All except the first run on the loop.
    _publish: Callable[..., Publication]
    _follow: Callable[[Channel], Coroutine[Any, Any, Any]]
    """Deliver the channel's topic to the channel. The result is the argument of ``_unfollow``."""
    _unfollow: Callable[[Any], Coroutine[Any, Any, None]]
    _join: Callable[[str, str | None, int, bool], Coroutine[Any, Any, Consumer]]
    _retire: Callable[[Any], Coroutine[Any, Any, None]]
    """Take no more messages, and give back those that no caller has taken."""
    _leave: Callable[[Any], Coroutine[Any, Any, None]]
    """Give back the messages that no caller has taken, and leave the subscription."""

    def __init__(self) -> None:
        super().__init__()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._channels: dict[Channel, Any] = {}
        """Every plain channel, and what fills it."""
        self._joined: dict[Consumer, str] = {}
        """Every consumer, and the subscription that it joined."""
        self._workers: dict[Consumer, Worker] = {}

    def forked(self) -> None:
        super().forked()
        for channel in [*self._channels, *self._joined]:
            channel.on_close = lambda channel: None
            channel.forked(self._not_open())
        self._begin_anew()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except HeadraceError as failure:
            note_failure(error, failure)

    # --- publishing -------------------------------------------------------------------------
    @documented_as(AsyncFacade.publish)
    def publish(
        self,
        topic: str,
        value: Value | None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Receipt:
        return self._publish_and_wait(topic, value, headers, options)

    def _publish_and_wait(self, *given: Any) -> Receipt:
        return cast(Receipt, published(self._publish, *given).result())

    def publish_nowait(
        self,
        topic: str,
        value: Value | None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PublishOptions],
    ) -> Publication:
        """Publish without waiting. ``result()`` of the publication waits for the receipt.

        Publishes that follow each other are sent and stored together. An error that nobody asks the publication
        for is logged, and raised by ``flush`` and ``close``.

        Example::

            publications = [client.publish_nowait("orders", order) for order in orders]
            client.flush()
        """
        if tracing.active is None:  # a plain loop calls this for each message
            return self._publish(topic, value, headers, options)
        return cast(Publication, published(self._publish, topic, value, headers, options))

    publish_many = blocking(AsyncFacade.publish_many)
    publish_batch = blocking(AsyncFacade.publish_batch)
    publish_batch_nowait = nowait(AsyncFacade.publish_batch)
    stage = blocking(AsyncFacade.stage)
    stage_nowait = nowait(AsyncFacade.stage)
    request = blocking(AsyncFacade.request)
    reply = blocking(AsyncFacade.reply)
    fetch = blocking(AsyncFacade.fetch)
    fetch_values = blocking(AsyncFacade.fetch_values)
    fetch_batches = blocking(AsyncFacade.fetch_batches)

    @documented_as(AsyncFacade.publish_text)
    def publish_text(
        self, topic: str, text: str, headers: Mapping[str, str] | None = None, **properties: str
    ) -> Receipt:
        return self.publish(topic, text.encode(), _merged(headers, properties))

    # --- subscribing ------------------------------------------------------------------------
    @documented_as(AsyncFacade.subscribe)
    def subscribe(self, topic: str, *, capacity: int = limits.CHANNEL_CAPACITY_DEFAULT) -> Channel:
        channel = Channel(topic, capacity, self._call)
        follower = self._run(self._follow(channel))
        _forget_closed(self._channels)
        self._channels[channel] = follower
        channel.on_close = self._close_channel
        return channel

    def _close_channel(self, channel: Channel) -> None:
        follower = self._channels.pop(channel, None)
        if follower is not None:  # two threads may close it at once
            with contextlib.suppress(Closed):
                self._run(self._unfollow(follower))

    @documented_as(AsyncFacade.unsubscribe)
    def unsubscribe(self, topic: str) -> None:
        for channel in list(self._channels):
            if channel.topic == topic:
                channel.close()

    @documented_as(AsyncFacade.subscription)
    def subscription(
        self,
        name: str,
        topic: str | None = None,
        *,
        start: Start = "earliest",
        prefetch: int = limits.PREFETCH_DEFAULT,
        auto_extend: bool = False,
        **settings: Unpack[SubscriptionOptions],
    ) -> Consumer:
        check_join("subscription", topic, settings, start)
        check_prefetch(prefetch)

        async def join() -> Consumer:
            if topic is None:
                return await self._join(name, None, prefetch, auto_extend)
            made = await self._core.create_subscription(name, topic, start, **settings)
            consumer = await self._join(name, topic, prefetch, auto_extend)
            watch(self._core.topic_stats, made, topic, consumer)
            return consumer

        consumer = self._run(join())
        _forget_closed(self._joined)
        self._joined[consumer] = name
        consumer.on_close = self._close_consumer
        return consumer

    def _close_consumer(self, channel: Channel) -> None:
        assert isinstance(channel, Consumer)
        if self._joined.pop(channel, None) is not None:  # two threads may close it at once
            with contextlib.suppress(Closed):
                self._run(self._leave(channel))

    # --- workers ----------------------------------------------------------------------------
    def consume(
        self,
        name: str,
        handler: Handler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        timeout: Duration | None = None,
        **options: Unpack[JoinOptions],
    ) -> None:
        """Call ``handler`` for each message until the worker is stopped or the subscription ends.

        ``concurrency`` messages are handled at the same time, each in a thread of its own. A handler
        cannot be interrupted: after ``timeout`` seconds its message goes back, and what it returns is
        ignored. See ``AsyncClient.consume``.

        Example::

            client.consume("email", send_mail, "orders", concurrency=10)
        """
        worker = self._worker(name, handler, topic, concurrency, timeout, options)
        try:
            worker.run()
        finally:
            self._workers.pop(worker.consumer, None)
            worker.consumer.close()

    @documented_as(AsyncFacade.subscribe_to_subscription)
    def subscribe_to_subscription(
        self,
        name: str,
        handler: Handler,
        topic: str | None = None,
        *,
        concurrency: int = 1,
        timeout: Duration | None = None,
        **options: Unpack[JoinOptions],
    ) -> None:
        self._worker(name, handler, topic, concurrency, timeout, options).start()

    def _worker(
        self, name: str, handler: Handler, topic: str | None, concurrency: int,
        timeout: Duration | None, options: JoinOptions,
    ) -> Worker:  # fmt: skip
        check_join("consume", topic, options)
        limit = check_worker(handler, concurrency, timeout, is_async=False)
        consumer = self.subscription(name, topic, auto_extend=True, **options)
        worker = Worker(
            consumer, handler, name, lambda: self._run(self._retire(consumer)), concurrency, limit
        )
        _forget_closed(self._workers)
        self._workers[consumer] = worker
        return worker

    @documented_as(AsyncFacade.unsubscribe_from_subscription)
    def unsubscribe_from_subscription(self, name: str) -> None:
        joined = [consumer for consumer, other in self._joined.items() if other == name]
        if not joined:
            raise NotFound(f"{name!r} was not joined here", code="not_subscribed")
        for consumer in joined:
            self._stop_worker(consumer)
            consumer.close()

    def _stop_workers(self) -> None:
        for consumer in list(self._workers):
            self._stop_worker(consumer)

    def _stop_worker(self, consumer: Consumer) -> None:
        """Let the handlers finish their messages; they get no further ones."""
        worker = self._workers.pop(consumer, None)
        if worker is not None:
            worker.stop()


def _forget_closed(channels: dict[Any, Any]) -> None:
    """Remove channels that the broker closed, because their topic or subscription was deleted."""
    for channel in list(channels):
        if channel.is_closed:
            channels.pop(channel, None)


def _merged(headers: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    return {**(headers or {}), **{name: str(value) for name, value in more.items()}}
