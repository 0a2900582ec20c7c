"""RabbitMQ, through pika: its blocking connection for one at a time, its callbacks for everything in flight.

Measured and rejected: aio-pika, which takes a lock and a future for each publish and a task for each delivery, and
reaches a third of pika's rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pika
from pika.adapters.select_connection import IOLoop

from benchmarks.peers.driver import Driver, Ready, Seen

WINDOW = 2000
"""Publishes whose confirmation is outstanding."""
PREFETCH = 1000
_PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Session:
    """A connection with callbacks. ``loop.start`` runs until a callback stops it; what fails raises there."""

    def __init__(self, parameters: pika.ConnectionParameters, loop: IOLoop | None = None):
        self._is_closing = False
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=self._closed,
            on_close_callback=self._closed,
            custom_ioloop=loop,
        )
        self.loop = self._connection.ioloop
        self.loop.start()

    def _opened(self, channel: Any) -> None:
        self.channel = channel
        channel.add_on_close_callback(self._closed)
        self.loop.stop()

    def _closed(self, what: Any, reason: Any) -> None:
        if not self._is_closing:
            raise RuntimeError(f"RabbitMQ closed the connection: {reason}")
        if what is self._connection:
            self.loop.stop()

    def close(self) -> None:
        self._is_closing = True
        self._connection.close()
        self.loop.start()

    # --- publishing -------------------------------------------------------------------------
    def confirm(self) -> None:
        self._tag, self._oldest, self._outstanding = 0, 1, set[int]()
        self.channel.confirm_delivery(self._confirmed, callback=lambda _frame: self.loop.stop())
        self.loop.start()

    def send(self, queue: str, values: Iterable[bytes]) -> None:
        self._queue, self._values, self._is_last = queue, iter(values), False
        self._more()
        if self._outstanding:
            self.loop.start()

    def _more(self) -> None:
        publish, outstanding = self.channel.basic_publish, self._outstanding
        while len(outstanding) < WINDOW and not self._is_last:
            value = next(self._values, None)
            if value is None:
                self._is_last = True
                break
            publish("", self._queue, value, _PERSISTENT)
            self._tag += 1
            outstanding.add(self._tag)

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        if not isinstance(method, pika.spec.Basic.Ack):
            raise RuntimeError("RabbitMQ refused a message")
        if method.multiple:
            self._outstanding.difference_update(range(self._oldest, method.delivery_tag + 1))
            self._oldest = method.delivery_tag + 1
        else:
            self._outstanding.discard(method.delivery_tag)
        if self._is_last:
            if not self._outstanding:
                self.loop.stop()
        elif len(self._outstanding) <= WINDOW // 2:
            self._more()

    # --- consuming --------------------------------------------------------------------------
    def consume(
        self, queue: str, got: Callable[..., object], ready: Ready, **arguments: object
    ) -> None:
        self.channel.basic_qos(prefetch_count=PREFETCH)
        self.channel.basic_consume(queue, got, arguments=arguments, callback=lambda _frame: ready())


class Client(Driver):
    def __init__(self, address: str, mode: str, topic: str, as_log: bool = False):
        super().__init__(address, mode, topic, as_log)
        if as_log and mode == "fsync":
            raise NotImplementedError  # a stream is never synced
        self._parameters = pika.ConnectionParameters(self.host, self.port, heartbeat=0)
        self._connection = pika.BlockingConnection(self._parameters)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        kind = "stream" if as_log else "quorum" if mode == "fsync" else "classic"
        self._channel.queue_declare(topic, durable=True, arguments={"x-queue-type": kind})
        self._session: Session | None = None

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._connection.close()

    def drop(self) -> None:
        self._channel.queue_delete(self.topic)

    # --- publishing -------------------------------------------------------------------------
    def put(self, value: bytes) -> None:
        self._channel.basic_publish("", self.topic, value, _PERSISTENT)

    def send_all(self, values: Iterable[bytes]) -> None:
        if self._session is None:
            self._session = Session(self._parameters)
            self._session.confirm()
        self._session.send(self.topic, values)

    def send_paced(self, due: Iterable[list[bytes]]) -> None:
        """Without confirms: with them, this connection of pika waits for each."""
        channel = self._connection.channel()
        for value in chain.from_iterable(due):
            channel.basic_publish("", self.topic, value, _PERSISTENT)
        self._connection.process_data_events(0)

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int, ready: Ready) -> int:
        if not self.as_log:
            raise NotImplementedError
        session, found = Session(self._parameters), 0

        def got(channel: Any, method: Any, _properties: object, _body: bytes) -> None:
            nonlocal found
            found += 1
            if not found % (PREFETCH // 4) or found == count:
                channel.basic_ack(method.delivery_tag, multiple=True)  # it is only flow control
            if found == count:
                session.loop.stop()

        session.consume(self.topic, got, ready, **{"x-stream-offset": "first"})
        session.loop.start()
        session.close()
        return found

    def take(self, count: int, ready: Ready, seen: Seen | None = None) -> None:
        session, left = Session(self._parameters), count

        def got(channel: Any, method: Any, _properties: object, body: bytes) -> None:
            nonlocal left
            if seen:
                seen(body)
            channel.basic_ack(method.delivery_tag)
            left -= 1
            if not left:
                session.loop.stop()

        session.consume(self.topic, got, ready)
        session.loop.start()
        session.close()

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        """A stream that each connection reads."""
        loop = IOLoop()
        sessions = [Session(self._parameters, loop) for _ in range(subscribers + 1)]
        sessions[0].confirm()
        left, joined = subscribers * len(values), 0

        def got(channel: Any, method: Any, _properties: object, _body: bytes) -> None:
            nonlocal left
            left -= 1
            if not method.delivery_tag % (PREFETCH // 4):
                channel.basic_ack(method.delivery_tag, multiple=True)
            if not left:
                loop.stop()

        def ready() -> None:
            nonlocal joined
            joined += 1
            if joined == subscribers:
                loop.stop()

        for session in sessions[1:]:
            session.consume(self.topic, got, ready, **{"x-stream-offset": "first"})
        loop.start()
        began = time.perf_counter()
        sessions[0].send(self.topic, values)
        if left:
            loop.start()
        took = time.perf_counter() - began
        for session in sessions:
            session.close()
        return took
