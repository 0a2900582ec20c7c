"""``BrokerClient``: a broker over the network, for programs that use threads.

A shell (``shell.py``) around ``AsyncClient``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from headrace.channels import Channel
from headrace.client.aio import AsyncClient, goes_alone, not_connected
from headrace.client.consumer import Feed, RemoteConsumer
from headrace.clock import Clock
from headrace.errors import Closed, HeadraceError, OutcomeUnknown
from headrace.facade import BlockingFacade
from headrace.forking import put_aside
from headrace.log.columns import Columns, record
from headrace.model import PublishOptions, Receipt, not_a_topic
from headrace.publication import Publication, renew_lock

FAILED_KEPT_MAX = 100


class BrokerClient(BlockingFacade):
    """A client of one broker::

        client = BrokerClient(host='localhost', port=9999, client_id='publisher-1')
        client.connect()
        client.publish_text('events', 'Hello, World!')
        client.disconnect()

    or ``with BrokerClient() as client: ...``. Options as for ``AsyncClient``.
    """

    _core: AsyncClient
    _kind = "client"

    def __init__(
        self,
        host: str = "localhost",
        port: int = 9999,
        client_id: str | None = None,
        **options: Any,
    ):
        self._core = AsyncClient(host, port, client_id, **options)
        super().__init__()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.client_id = self._core.client_id
        self._outgoing: deque[tuple[str, Columns, int | None, Publication]] = deque()
        self._sending = False
        self._alone: set[Future[Receipt]] = set()
        """Publishes on their way by themselves, not through the producer."""
        self._failed: list[Publication] = []

    def forked(self) -> None:
        """In a child process: the connection and all that hangs on it stay with the parent."""
        renew_lock()
        if self._loop is not None:
            for feed in [*self._channels.values(), *[each.feed for each in self._consumers()]]:
                feed.disconnected()
            put_aside(self._core)
            self._core = self._core.anew()
        super().forked()

    # --- connecting -------------------------------------------------------------------------
    def connect(self) -> BrokerClient:
        self._start(self._core.connect)
        return self

    def _stop(self) -> None:
        super()._stop()
        # Nobody will answer what other threads handed over too late for the loop.
        self._sending = False
        while self._outgoing:
            self._outgoing.popleft()[-1].settle(None, _closed())

    def disconnect(self) -> None:
        """Send what waits, end the subscriptions, close the connection."""
        if self._loop is None:
            return
        self._stop_workers()
        for consumer in self._consumers():
            self._call(consumer.carry_out)
        with contextlib.suppress(Closed):  # another thread was faster
            self._run(self._close())
        self._channels.clear()
        self._joined.clear()
        self._stop()

    async def _close(self) -> None:
        if self._alone:  # each ends in its own time
            await asyncio.wait([asyncio.wrap_future(future) for future in list(self._alone)])
        await self._core.close()

    def close(self) -> None:
        """The same as ``disconnect``."""
        self.disconnect()

    def __enter__(self) -> BrokerClient:
        return self.connect()

    @property
    def is_connected(self) -> bool:
        return self._loop is not None and self._core.is_connected

    def _not_open(self) -> Closed:
        if self._is_forked:
            return Closed(
                "the connection belongs to the process that this one was forked from: call connect() "
                "here",
                code="not_connected",
            )
        return not_connected()

    def _consumers(self) -> list[RemoteConsumer]:
        return [each for each in self._joined if isinstance(each, RemoteConsumer)]

    # --- publishing -------------------------------------------------------------------------
    def _publish(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> Publication:
        if self._loop is None:
            raise self._not_open()
        if not isinstance(topic, str):
            raise not_a_topic(topic)
        publication = Publication()
        if goes_alone(options):
            future = self._begin(self._core.publish_alone(topic, value, headers, options))
            self._alone.add(future)
            future.add_done_callback(partial(self._alone_settled, publication))
            return publication
        columns = record(value, headers, options, self._core._max_message_size, Clock().now_ms())
        self._outgoing.append((topic, columns, options.get("partition"), publication))
        if not self._sending:
            self._sending = True
            self._call(self._send)
        return publication

    def _alone_settled(self, publication: Publication, future: Future[Receipt]) -> None:
        self._alone.discard(future)
        try:
            self._settled(publication, future.result(), None)
        except CancelledError:
            self._settled(publication, None, OutcomeUnknown("the client was closed meanwhile"))
        except HeadraceError as error:
            self._settled(publication, None, error)
        except Exception as error:
            self._settled(publication, None, HeadraceError(repr(error)))

    def _send(self) -> None:
        """On the loop: hand over what was published since the last time."""
        self._sending = False
        outgoing, publish = self._outgoing, self._core.produce
        while outgoing:
            topic, columns, partition, publication = outgoing.popleft()
            publish(topic, columns, partition, partial(self._settled, publication))

    def _settled(
        self, publication: Publication, receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        publication.settle(receipt, error)
        if error is not None and not publication._waited and len(self._failed) < FAILED_KEPT_MAX:
            self._failed.append(publication)

    def flush(self) -> None:
        """Everything published so far is stored, or has failed, and all acknowledgements so far are on disk.

        Raises the first error of a publish that nobody waited for, and :class:`OutcomeUnknown` if the
        connection broke before acknowledgements were on disk.
        """
        self._call(self._send)
        for consumer in self._consumers():
            self._call(consumer.carry_out)
        self._run(self._core.flush())
        failed, self._failed = self._failed, []
        for publication in failed:
            if publication._error is not None and not publication._waited:
                raise publication._error

    # --- subscribing ------------------------------------------------------------------------
    async def _follow(self, channel: Channel) -> Feed:
        return await self._core.follow(channel)

    async def _unfollow(self, follower: Feed) -> None:
        await self._core.unfollow(follower)

    async def _join(
        self, name: str, topic: str | None, prefetch: int, auto_extend: bool
    ) -> RemoteConsumer:
        consumer = RemoteConsumer(topic or name, prefetch, self._call)
        await self._core.join(consumer, name, topic, prefetch, auto_extend)
        return consumer

    async def _retire(self, consumer: RemoteConsumer) -> None:
        consumer.carry_out()
        await consumer.feed.retire()

    async def _leave(self, consumer: RemoteConsumer) -> None:
        consumer.carry_out()
        await self._core.unfollow(consumer.feed)


def _closed() -> Closed:
    return Closed("the client was closed before the message was sent")
