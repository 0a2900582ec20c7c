"""``BrokerClient``: a broker over the network, for programs that use threads.

A shell (``shell.py``) around ``AsyncClient``. Only a publish that waits may go around it (``exchange.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from functools import partial
from typing import Unpack

from headrace import tracing
from headrace.channels import Channel
from headrace.client.aio import (
    AsyncClient,
    ClientOptions,
    alone,
    goes_alone,
    is_plain,
    not_connected,
)
from headrace.client.consumer import Feed, RemoteConsumer
from headrace.client.exchange import Exchange, send_again
from headrace.client.outgoing import BundledPublication, PublishQueue, may_be_stored
from headrace.clock import Clock
from headrace.errors import Closed, HeadraceError
from headrace.facade import BlockingFacade
from headrace.forking import put_aside
from headrace.log.columns import record
from headrace.model import PublishOptions, Receipt, check_options, checked_topic
from headrace.publication import Publication
from headrace.shell import documented_as
from headrace.wire.binary import Frame


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
        known = frozenset(ClientOptions.__annotations__) | {"host", "port", "client_id"}
        check_options(options, known, "BrokerClient")
        self._core = AsyncClient(host, port, client_id, **options)
        super().__init__()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.client_id = self._core.client_id
        self._outgoing = self._new_outgoing()
        self._exchange: Exchange | None = None
        self._unanswered: set[Publication] = set()
        """Publishes under way that are not plain: ``_outgoing`` does not know them."""

    def _new_outgoing(self) -> PublishQueue[Publication]:
        core = self._core
        return PublishQueue(
            partial(self._call, self._send),
            BundledPublication,
            core._failures,
            int(core._producer_options["batch_bytes"]),
            lambda: core.is_connected and threading.current_thread() is not self._thread,
        )

    def forked(self) -> None:
        """In a child process: the connection and all that hangs on it stay with the parent."""
        is_open, failures = self._loop is not None, self._core._failures
        if is_open:
            for feed in [*self._channels.values(), *[each.feed for each in self._consumers()]]:
                feed.disconnected()
            if self._exchange is not None:
                self._exchange.forked()
            put_aside(self._core)
            self._core = self._core.anew()
        super().forked()
        if is_open:
            failures.no_answers = self._not_open()

    # --- connecting -------------------------------------------------------------------------
    @documented_as(AsyncClient.connect)
    def connect(self) -> BrokerClient:
        if self._outgoing.is_closed:
            self._outgoing = self._new_outgoing()
            self._unanswered = set()
        if self._start(self._core.connect):
            core = self._core
            self._exchange = Exchange(core.link, core.producing, self._send_again, self._call)
        return self

    def _stop(self) -> None:
        super()._stop()
        self._outgoing.close()  # nobody answers what other threads published too late for the loop

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
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
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
    def _publish_and_wait(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> Receipt:
        exchange = self._exchange
        if exchange is not None and self._may_exchange(topic, options):
            receipt = exchange.publish(topic, value, headers, options, self._core.max_message_size)
            if receipt is not None:
                return receipt
        return super()._publish_and_wait(topic, value, headers, options)

    def _may_exchange(self, topic: object, options: PublishOptions) -> bool:
        return (
            self._outgoing.is_idle
            and not self._unanswered
            and tracing.active is None
            and type(topic) is str
            and (
                not options
                or (type(options.get("partition", 0)) is int and not goes_alone(options))
            )
        )

    def _send_again(self, properties: dict[str, str], raw: bytes) -> Frame:
        core = self._core
        try:
            return self._run(send_again(core.link, properties, raw, core.patience))
        except Closed:
            raise may_be_stored("the client was closed before the answer") from None

    def _publish(
        self, topic: str, value: object, headers: Mapping[str, str] | None, options: PublishOptions
    ) -> Publication:
        core = self._core
        if self._loop is None:
            raise self._not_open()
        if not options and not headers:
            return self._outgoing.add(topic, value, None, core.max_message_size)
        if is_plain(value, headers, options):
            return self._outgoing.add(topic, value, options["key"], core.max_message_size)
        topic = checked_topic(topic)
        publication = Publication(core._failures)
        done = partial(self._settled, publication)
        if goes_alone(options):
            frame = alone(topic, value, headers, options, core.max_message_size)
            publish = partial(core.publish_alone, *frame, done)
        else:
            columns = record(value, headers, options, core.max_message_size, Clock().now_ms())
            publish = partial(core.produce, topic, columns, options.get("partition"), done)
        self._unanswered.add(publication)
        publication.add_done_callback(self._unanswered.discard)
        self._outgoing.put(topic, publish, done)
        return publication

    def _send(self) -> None:
        """On the loop: hand over what was published since the last time."""
        self._outgoing.hand_over(self._core.produce)

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
