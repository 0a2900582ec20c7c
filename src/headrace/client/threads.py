"""``BrokerClient``: a broker over the network, for programs that use threads.

A shell (``shell.py``) around ``AsyncClient``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

from headrace.channels import Channel
from headrace.client.aio import AsyncClient, ClientOptions, alone, goes_alone, not_connected
from headrace.client.consumer import Feed, RemoteConsumer
from headrace.clock import Clock
from headrace.errors import Closed, HeadraceError
from headrace.facade import BlockingFacade
from headrace.forking import put_aside
from headrace.log.columns import record
from headrace.model import PublishOptions, Receipt, check_options, checked_topic
from headrace.publication import Publication, renew_lock
from headrace.shell import documented_as

Outgoing = tuple[str | None, Any, int | None, Publication]
"""Topic, record and partition; or None, and the properties and body of a frame."""


class BrokerClient(BlockingFacade):
    """A client of a broker::

        client = BrokerClient(host='localhost', port=9999, client_id='publisher-1')
        client.connect()
        client.publish_text('events', 'Hello, World!')
        client.disconnect()

    or ``with BrokerClient("localhost:9999") as client: ...``. Addresses and logins can be in the environment:
    see ``client/address.py``.
    """

    _core: AsyncClient
    _kind = "client"

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        client_id: str | None = None,
        **options: Unpack[ClientOptions],
    ):
        check_options(options, frozenset(ClientOptions.__annotations__), "BrokerClient")
        self._core = AsyncClient(host, port, client_id, **options)
        super().__init__()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.client_id = self._core.client_id
        self._outgoing: deque[Outgoing] = deque()
        self._sending = False

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
    @documented_as(AsyncClient.connect)
    def connect(self) -> BrokerClient:
        self._start(self._core.connect)
        return self

    def _stop(self) -> None:
        super()._stop()
        # Nobody will answer what other threads handed over too late for the loop.
        self._sending = False
        while self._outgoing:
            self._settled(self._outgoing.popleft()[-1], None, _closed())

    def disconnect(self) -> None:
        """Send what waits, end the subscriptions, close the connection.

        Raises the first error that nobody has seen, of a ``publish_nowait`` or an acknowledgement; the client
        is disconnected all the same.

        Example::

            client = BrokerClient("localhost:9999").connect()
            client.disconnect()
        """
        if self._loop is None:
            return
        self._stop_workers()
        for consumer in self._consumers():
            self._call(consumer.carry_out)
        self._call(self._send)
        with contextlib.suppress(Closed):  # another thread was faster
            self._run(self._core._shut_down())
        self._channels.clear()
        self._joined.clear()
        self._stop()
        self._core._failures.check()

    def close(self) -> None:
        """The same as ``disconnect``.

        Example::

            client = BrokerClient("localhost:9999").connect()
            client.close()
        """
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
        topic = checked_topic(topic)
        publication = Publication()
        most = self._core.max_message_size
        if goes_alone(options):
            frame = alone(topic, value, headers, options, most)
            self._outgoing.append((None, frame, None, publication))
        else:
            columns = record(value, headers, options, most, Clock().now_ms())
            self._outgoing.append((topic, columns, options.get("partition"), publication))
        if not self._sending:
            self._sending = True
            self._call(self._send)
        return publication

    def _send(self) -> None:
        """On the loop: hand over what was published since the last time."""
        self._sending = False
        outgoing, publish = self._outgoing, self._core.produce
        while outgoing:
            topic, what, partition, publication = outgoing.popleft()
            if topic is None:
                properties, body = what
                self._core.publish_alone(properties, body, partial(self._settled, publication))
            else:
                publish(topic, what, partition, partial(self._settled, publication))

    def _settled(
        self, publication: Publication, receipt: Receipt | None, error: HeadraceError | None
    ) -> None:
        publication.settle(receipt, error)
        if error is not None:
            self._core._failures.add(error, publication)

    @documented_as(AsyncClient.flush)
    def flush(self) -> None:
        self._call(self._send)
        for consumer in self._consumers():
            self._call(consumer.carry_out)
        self._run(self._core.flush())

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
