"""A publish that its caller waits for: the thread of the caller writes and reads by itself.

Over the loop, ``BrokerClient.publish`` changes threads twice: the loop's thread is woken, and then the caller's. That takes
longer than the broker. So a thread that publishes one message after the other gets an *exchange*, a second connection with
a plain blocking socket: one ``send``, one ``recv``, and no other thread::

    publish, publish, … ──▶ the loop      (the first ones, and whenever a rule below says so)
                      └───▶ the exchange  (from the twentieth on, while they follow each other)

Rules:
- Order: nothing of the client may be on its way that was published before. Then the exchange would overtake it, so the
  loop takes this one, too (``BrokerClient.publish`` looks).
- One thread at a time has the exchange. Whoever finds it taken goes over the loop, and waits for nobody.
- The caller's thread may be interrupted anywhere, by Ctrl-C or by a signal's handler that raises. So the exchange shares no
  state with the loop, and an interrupted one is thrown away, the connection and the numbers of its producers together.
- The batches are numbered, as the producer's are. If the connection breaks before the answer, the same batch goes over the
  loop with the same number, so it is stored once.
- It follows the loop's connection: if that one is lost, or is another one now, the exchange is closed. It is also closed
  after a few seconds without a publish, so that a quiet client has one connection.

Rejected: handing the loop over to the thread that waits. An exception in a signal's handler would come up in the middle of a
callback of the loop, and leave half-done changes to what all calls share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping

from headrace.client.link import GOODBYE_S, Link, Wire, error_of
from headrace.client.outgoing import may_be_stored
from headrace.client.producer import PARTITIONS_CHANGED, RETRY_S, Producer
from headrace.client.sockets import dial, wait_at_most
from headrace.clock import Clock
from headrace.errors import (
    ConnectionLost,
    HeadraceError,
    InvalidArgument,
    RequestTimeout,
    SequenceGap,
)
from headrace.log.batch import encode
from headrace.log.columns import Columns, record
from headrace.model import PublishOptions, Receipt
from headrace.partitioning import Partitioner, partition_of_key
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Frame, Type

logger = logging.getLogger("headrace.client")
STREAK = 20
"""So many publishes follow each other before a connection is opened for them."""
PAUSE_S = 0.25
"""After a longer pause, they do not."""
IDLE_S = 5.0
"""After so long without a publish it is closed."""
AGAIN_S = 30.0
"""If it could not be opened, when it is tried again."""
LOOK_S = 1.0
"""No thread waits for longer without running Python: a signal that comes just before a wait does not end it."""
_RECEIVE_BYTES = 64 << 10


class Exchange:
    """Made with each connection of the loop, and closed with it."""

    def __init__(
        self,
        link: Link,
        producer: Producer,
        again: Callable[[dict[str, str], bytes], Frame],
        call: Callable[..., None],
    ):
        self._link, self._producer = link, producer
        self._again = again
        """Send a batch that may be stored already once more, over the loop."""
        self._call = call
        """Have something called on the loop."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._wire: Wire | None = None
        """The loop's connection when this one was opened."""
        self._parser = BinaryParser()
        self._sequence = 0
        self._producers: dict[tuple[str, int], tuple[int, int]] = {}
        """(topic, partition) -> (producer id, number of the next record)."""
        self._partitioners: dict[str, Partitioner] = {}
        self._last = 0.0
        self._streak = 0
        self._not_before = 0.0
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    # --- publishing -------------------------------------------------------------------------
    def publish(
        self,
        topic: str,
        value: object,
        headers: Mapping[str, str] | None,
        options: PublishOptions,
        bytes_max: int,
    ) -> Receipt | None:
        """Publish and wait for the receipt. None: it was not published, and belongs to the loop."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not self._is_ready():
                return None
            columns = record(value, headers, options, bytes_max, Clock().now_ms())
            partition, planned_on = options.get("partition"), None
            if partition is None:
                planned_on = self._producer.partitions_of(topic)
                if planned_on is None:
                    return None
                partition = self._place(topic, columns, planned_on)
            if not self._producer.owners.is_main(topic, partition):
                return None
            return self._publish(topic, columns, partition, planned_on)
        except HeadraceError:
            raise
        except BaseException:  # a request may be half sent, or its answer half read
            self._discard()
            raise
        finally:
            self._lock.release()

    def _is_ready(self) -> bool:
        now, last = time.monotonic(), self._last
        self._last = now
        self._streak = self._streak + 1 if now - last < PAUSE_S else 0
        wire = self._link.wire
        if self._socket is not None:
            if wire is self._wire and now - last < IDLE_S:
                return True
            self._discard()
        if self._streak < STREAK or wire is None or now < self._not_before or self._closed:
            return False
        self._not_before = now + AGAIN_S
        try:
            self._open(wire)
        except HeadraceError as error:
            self._discard()
            logger.debug("publishes go over the loop: %s", error)
            return False
        self._not_before = 0.0
        return True

    def _place(self, topic: str, columns: Columns, count: int) -> int:
        if count == 1:
            return 0
        key = columns.keys[0] if columns.keys else None
        if key is not None:
            return partition_of_key(key, count)
        partitioner = self._partitioners.get(topic)
        if partitioner is None:
            partitioner = self._partitioners[topic] = Partitioner()
        return partitioner.take(count, len(columns.values[0]))

    def _publish(
        self, topic: str, columns: Columns, partition: int, planned_on: int | None
    ) -> Receipt | None:
        batch = encode(columns)
        place = (topic, partition)
        found = self._producers.pop(place, None)  # gone, unless this one is stored
        if found is None:
            found = (random.SystemRandom().getrandbits(63) | 1, 0)
        batch.producer_id, batch.first_sequence = found
        properties = {"topic": topic, "partition": str(partition)}
        if planned_on is not None:
            properties["partitions"] = str(planned_on)
        raw = batch.raw()
        try:
            answer = self._ask(Type.PUBLISH_BATCH, properties, raw)
            if answer.properties.get("status") == "error":
                raise error_of(answer)
        except ConnectionLost as error:
            self._discard()
            logger.debug("sent again over the loop: %s", error)
            try:
                answer = self._again(properties, raw)
            except HeadraceError as refusal:
                if refusal.code != PARTITIONS_CHANGED:
                    raise
                return None
        except HeadraceError as error:  # a refusal: the loop's producer knows what to do
            if (
                error.retryable
                or isinstance(error, SequenceGap)
                or error.code == PARTITIONS_CHANGED
            ):
                return None
            self._producer.forget(topic)
            raise
        else:
            self._producers[place] = (found[0], (found[1] + 1) & 0xFFFF_FFFF)
        stored = answer.properties
        if "owner" in stored:
            self._call(self._producer.owners.heard, topic, partition, stored, self._link)
        return Receipt(
            topic,
            partition,
            int(stored["offset"]),
            int(stored["timestamp"]),
            1,
            stored.get("duplicate") == "true",
            columns.ids[0] if columns.ids else None,
        )

    # --- the connection ---------------------------------------------------------------------
    def _open(self, wire: Wire) -> None:
        host, port, tls = self._link.broker
        self._wire, self._parser = wire, BinaryParser()
        self._socket = dial(host, port, tls, LOOK_S)
        wait_at_most(self._socket, LOOK_S)
        requests = [(Type.HEARTBEAT, {"client_id": self._link.client_id})]
        if self._link.login is not None:
            requests.insert(0, (Type.AUTH, dict(self._link.login)))
        for type_, properties in requests:
            answer = self._ask(type_, properties, b"")
            if answer.properties.get("status") == "error":
                raise error_of(answer)
        self._call(self._watch)

    def _ask(self, type_: int, properties: dict[str, str], body: bytes) -> Frame:
        """Send a request and wait for its answer. :class:`ConnectionLost`: nobody knows whether it was done."""
        found = self._socket
        assert found is not None
        self._sequence += 1
        frame = binary.encode(type_, self._sequence, properties, body)
        try:
            found.sendall(frame)
            answer = self._receive(found)
        except (OSError, HeadraceError) as error:
            raise ConnectionLost(f"the connection to the broker broke: {error}") from None
        return answer

    def _receive(self, found: socket.socket) -> Frame:
        deadline = 0.0
        while True:
            try:
                data = found.recv(_RECEIVE_BYTES)
            except (BlockingIOError, TimeoutError):  # LOOK_S is over
                now = time.monotonic()
                deadline = deadline or now + self._link.silence_s
                if now > deadline:
                    raise
                continue
            frames = self._parser.feed(data)
            if not data or self._parser.error is not None:
                raise self._parser.error or ConnectionResetError("it was closed")
            for frame in frames:
                if frame.sequence == self._sequence:
                    return frame
                raise ConnectionResetError(
                    frame.properties.get("error", "it answers what was not asked")
                )

    def _discard(self) -> None:
        """Close the connection, and forget the numbers that were sent over it."""
        found, self._socket = self._socket, None
        self._wire = None
        self._producers.clear()
        if found is not None:
            found.close()

    # --- ending -----------------------------------------------------------------------------
    def _watch(self) -> None:
        """On the loop: close the connection when nobody has used it for a while."""
        if not self._closed and self._socket is not None:
            asyncio.get_running_loop().call_later(IDLE_S, self._look)

    def _look(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._last >= IDLE_S or self._link.wire is not self._wire:
                    self._discard()
            finally:
                self._lock.release()
        self._watch()

    def close(self) -> None:
        """Let the publish under way finish, if it does so soon."""
        self._closed = True
        if self._lock.acquire(timeout=GOODBYE_S):
            try:
                self._discard()
            finally:
                self._lock.release()
        else:
            with contextlib.suppress(OSError, AttributeError):
                self._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def forked(self) -> None:
        """In a child process: the connection stays with the parent."""
        found, self._socket = self._socket, None
        if found is not None:
            found.close()  # this copy of it


async def send_again(link: Link, properties: dict[str, str], raw: bytes, patience: float) -> Frame:
    """On the loop: send a numbered batch that may be stored already, until it is known to be, or refused."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    unknown = may_be_stored("the broker did not answer in time")
    while True:
        left = deadline - loop.time()
        if left <= 0:
            raise unknown
        try:
            return await link.ask(Type.PUBLISH_BATCH, properties, raw, again=True, timeout=left)
        except (RequestTimeout, SequenceGap):
            raise unknown from None
        except HeadraceError as error:
            if isinstance(error, InvalidArgument) or error.code == PARTITIONS_CHANGED:
                raise  # that is so for the first one, too
            if not error.retryable:
                raise may_be_stored(
                    f"the connection broke before the answer, and the repetition was refused ({error})"
                ) from None
        await asyncio.sleep(RETRY_S)
