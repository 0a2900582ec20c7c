"""Headrace → Kafka, exactly once for readers of committed records.

A round of messages is one Kafka transaction, and the *positions* after the round are records of the same transaction: in the
topic ``headrace-bridge.<name>``. A consumer with ``isolation.level=read_committed`` (the default of librdkafka, not of
Kafka's Java client) sees each message once, whatever is killed; other consumers also see what was aborted. ::

    transaction n:   begin(n)   orders/0 …  orders/1 …   end(n, positions)   commit, then read both back

A start first calls ``init_transactions``: Kafka ends what an earlier process of this name has under way, and refuses
its later records. Then it reads the last positions. So two bridges of one name never write together; the newer one takes
over, and the older one stops.

Positions count only if *both* ``begin(n)`` and ``end(n)`` of one process are committed, and the bridge looks at that
after each commit. The reason is a weakness of the protocol that librdkafka speaks (it lacks KIP-890): a request to end
a transaction that the network has delayed can end a *later* transaction of the same process in its middle. Then one of
the two is missing, and the bridge begins again before that transaction: in this case some messages are in Kafka twice, but
none is lost. With positions in one record, they could be committed without the messages.

The subscription ``bridge.<name>`` follows, never ahead: it shows the lag, and retention keeps what is not copied yet.
Messages for one other subscription (``to``) and expired ones are not copied: the subscription would not get them either.

Rejected: at least once, with positions stored after the messages: a kill doubles a round, and every consumer has to
deal with it. To look at the end of the target for what was already written: it needs a header of ours in each record, and a
late request of a killed process is not seen.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec

from headrace.bridge.kafka import KafkaInquiry, KafkaPlace, explained, replaced
from headrace.bridge.routes import BridgeRoute
from headrace.bridge.running import LOOK_S, UNCOPIED, Bridge, Reopen
from headrace.bridge.translating import KafkaRecord, to_record
from headrace.clock import Clock
from headrace.errors import Conflict, DataCorrupt, OffsetOutOfRange, StorageFailed, TooLarge
from headrace.log.batch import LOST, Batch

ROUND_RECORDS = 20_000
ROUND_BYTES = 4 << 20
WAIT_S = 0.5
TRANSACTION_S = 30.0
TAIL_RECORDS = 1_000
RECORD_OVERHEAD_BYTES = 128
"""What a record has besides key, value and headers, and its batch."""
LEDGER_CONFIG = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": str(64 << 20),
    "segment.bytes": str(16 << 20),
}


class KafkaLedger:
    """The positions of a bridge in Kafka: a topic of its own, with pairs of begin and end."""

    def __init__(self, place: KafkaPlace, name: str):
        self.topic = f"headrace-bridge.{name}"
        self._place = place
        self._run = uuid.uuid4().hex
        self._consumer: Consumer | None = None
        self.number = -1
        self.document: dict[str, Any] = {}

    def open(self, inquiry: KafkaInquiry) -> None:
        """Read the last positions. Nothing is under way any more."""
        inquiry.create(self.topic, LEDGER_CONFIG)
        place = self.topic, 0
        first = inquiry.offsets([place], OffsetSpec.earliest())[place]
        last = inquiry.offsets([place], OffsetSpec.latest())[place]
        self._consumer = self._place.consumer()
        step = TAIL_RECORDS
        while True:
            at = max(first, last - step)
            found = self._read(at, last)
            if found or at == first:
                break
            step *= 8
        if found:
            self.document = found[-1]
            self.number = self.document["number"]

    def _read(self, at: int, end: int) -> list[dict[str, Any]]:
        """The positions that are committed whole, from Kafka's offset ``at`` on."""
        assert self._consumer is not None
        self._consumer.assign([TopicPartition(self.topic, 0, at)])
        self._begun: tuple[str, int] | None = None
        found = []
        for document in self._follow(time.monotonic() + TRANSACTION_S, end):
            if document is None:
                break
            found.append(document)
        return found

    def _follow(self, deadline: float, end: int) -> Iterator[dict[str, Any] | None]:
        """Positions as they are read; None at the end of the topic."""
        assert self._consumer is not None
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    if message.offset() >= end:
                        yield None
                elif not error.retriable():
                    raise explained(error, f"topic {self.topic} cannot be read")
                continue
            document = orjson.loads(message.value())
            step = document["run"], document["number"]
            if message.key() == b"begin":
                self._begun = step
            elif step == self._begun:
                yield document
        raise StorageFailed(
            f"Kafka has not shown the records of {self.topic} for {TRANSACTION_S:g} seconds",
            code="kafka_unavailable",
        )

    def begin(self, producer: Producer) -> None:
        self._put(producer, b"begin", {})

    def end(self, producer: Producer, document: dict[str, Any]) -> None:
        self.document = {**document, "number": self.number + 1, "run": self._run}
        self._put(producer, b"end", self.document)

    def _put(self, producer: Producer, key: bytes, document: dict[str, Any]) -> None:
        value = orjson.dumps({**document, "number": self.number + 1, "run": self._run})
        producer.produce(self.topic, value, key, 0)

    def read_back(self) -> None:
        """After a commit: until the transaction is seen as a whole. If it never is, the next session begins before it."""
        self.number += 1
        for document in self._follow(time.monotonic() + TRANSACTION_S, 0):
            if document is not None and (document["run"], document["number"]) == (
                self._run,
                self.number,
            ):
                return
            if document is not None and document["run"] != self._run:
                break
        raise replaced(self.topic)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


class OutwardBridge(Bridge):
    _gone = "they were deleted"

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self._routes = {route.headrace: route for route in self.progress.routes}
        self._subscription = f"bridge.{self._name}"
        self._producer: Producer | None = None
        self._ledger = KafkaLedger(self._place, self._name)
        self._error: KafkaError | None = None
        self._counts: dict[str, int] = {}
        self._bytes_max: dict[str, int] = {}

    # --- opening ------------------------------------------------------------------------------
    def _open(self) -> None:
        self._inquiry = inquiry = KafkaInquiry(self._place)
        inquiry.cluster()
        self._look()
        for topic in self._routes:
            self._client.create_subscription(self._subscription, topic, start="earliest")
        self._producer = producer = self._place.producer(f"headrace-bridge.{self._name}")
        try:
            producer.init_transactions(TRANSACTION_S)
        except KafkaException as error:
            raise explained(error.args[0], "the transactions of the bridge cannot begin") from None
        self._ledger = KafkaLedger(self._place, self._name)
        self._ledger.open(inquiry)
        self._begin()
        self._commit({})  # from here on, the beginnings are fixed

    def _look(self) -> None:
        """How many partitions the targets have, and what they take."""
        self._look_at = time.monotonic() + LOOK_S
        for route in self.progress.routes:
            count = self._inquiry.partitions(route.kafka)
            if self._counts.setdefault(route.headrace, count) != count:
                del self._counts[route.headrace]
                raise Reopen(
                    f"{route.kafka} has {count} partitions now"
                )  # its producer does not know
            self._bytes_max[route.headrace] = self._inquiry.message_bytes_max(route.kafka)
        self.progress.trouble = None  # Kafka answers

    def _begin(self) -> None:
        known = self._ledger.document.get("positions", {})
        self._incarnations = {}
        for topic, route in self._routes.items():
            places = self._client.positions([topic])[topic]
            incarnation = self._incarnations[topic] = places[0]["incarnation"]
            stored = known.get(topic, {"incarnation": incarnation, "offsets": None})
            if stored["incarnation"] != incarnation:
                raise Conflict(
                    f"topic {topic} was created anew since bridge {self._name} has copied it; choose another --name "
                    "to copy it from its beginning",
                    code="topic_changed",
                )
            route.positions, route.ends = {}, {}
            for place in places:
                number, first, last = place["partition"], place["start"], place["end"]
                route.ends[number] = last
                if stored["offsets"] is None:
                    at = last if self._start == "latest" else first
                else:  # a partition that was added later is read from its beginning
                    at = stored["offsets"].get(str(number), first)
                    at = self._after_gap(route, f"{route.headrace}/{number}", at, first)
                route.positions[number] = at

    def _deleted(self, where: str) -> OffsetOutOfRange:
        return OffsetOutOfRange(f"{where} were deleted {UNCOPIED}", code="records_deleted")

    # --- copying ------------------------------------------------------------------------------
    def _round(self) -> None:
        batches = self._gather()
        if batches:
            self._copy(batches)
            self.progress.is_caught_up = False
        else:
            self.progress.is_caught_up = True
        if time.monotonic() >= self._look_at:
            self._look()

    def _gather(self) -> list[tuple[BridgeRoute, int, Batch]]:
        """Batches that begin at or before the positions; waits a moment for them."""
        client, found = self._client, []
        size = records = 0
        asked = client.positions(list(self._routes))
        waiting: dict[str, dict[int, int]] = {}
        for topic, places in asked.items():
            route = self._routes[topic]
            if places[0]["incarnation"] != self._incarnations[topic]:
                raise Reopen(f"topic {topic} is another one now")
            for place in places:
                number = place["partition"]
                route.ends[number] = place["end"]
                at = route.positions.setdefault(number, 0)
                waiting.setdefault(topic, {})[number] = at
                if at >= place["end"] or size >= ROUND_BYTES or records >= ROUND_RECORDS:
                    continue
                try:
                    some = client.fetch_batches(
                        topic, at, partition=number, max_bytes=ROUND_BYTES // 4
                    )
                except OffsetOutOfRange:
                    raise Reopen(f"{topic}/{number} begins later now") from None
                for batch in some:
                    found.append((route, number, batch))
                    size += batch.stored_bytes
                    records += batch.count
        if not found and not self.stop.is_set() and not self.progress.is_caught_up:
            return found
        if not found and not self.stop.is_set():
            client.wait_for(waiting, timeout=WAIT_S)
        return found

    def _copy(self, batches: list[tuple[BridgeRoute, int, Batch]]) -> None:
        producer = self._producer
        assert producer is not None
        self._error = None
        counts: dict[str, int] = {}
        try:
            producer.begin_transaction()
            self._ledger.begin(producer)
            for route, number, batch in batches:
                counts[route.headrace] = counts.get(route.headrace, 0) + self._produce(
                    producer, route, number, batch
                )
        except KafkaException as error:
            self._failed(error.args[0])
        self._commit(counts, begun=True)

    def _commit(self, counts: dict[str, int], *, begun: bool = False) -> None:
        """End the round: the positions, the transaction, and whether it is whole."""
        producer = self._producer
        assert producer is not None
        positions = dict(self._ledger.document.get("positions", {}))
        for topic, route in self._routes.items():
            offsets = {str(number): at for number, at in route.positions.items()}
            positions[topic] = {"incarnation": self._incarnations[topic], "offsets": offsets}
        try:
            if not begun:
                producer.begin_transaction()
                self._ledger.begin(producer)
            self._ledger.end(producer, {"positions": positions})
            producer.commit_transaction(TRANSACTION_S)
        except KafkaException as error:
            self._failed(error.args[0])
        self.progress.trouble = None
        self._ledger.read_back()
        for topic, count in counts.items():
            self._routes[topic].copied += count
        for topic, route in self._routes.items():
            self._client.advance(self._subscription, {topic: dict(route.positions)}, topic=topic)

    def _failed(self, error: KafkaError) -> None:
        """Give the transaction up; the next session begins before it, unless another bridge has taken over."""
        error = self._error or error
        if error.code() == KafkaError._FATAL and self._producer is not None:
            try:
                self._producer.poll(1.0)  # raises the reason
            except KafkaException as reason:
                error = reason.args[0]
        raise explained(error, "a transaction could not be committed")

    def _produce(self, producer: Producer, route: BridgeRoute, number: int, batch: Batch) -> int:
        """The records of a batch from the position on; returns how many were copied."""
        low = max(route.positions[number] - batch.base_offset, 0)
        if batch.flags & LOST:
            where = f"{route.headrace}/{number}@{batch.base_offset + low} to {batch.end_offset - 1}"
            lost = DataCorrupt(
                f"{where} are destroyed in the broker; to go on without them, start with --skip deleted",
                code="records_lost",
            )
            self._skip("deleted", route, where, batch.count - low, "they are destroyed", lost)
            route.positions[number] = batch.end_offset
            return 0
        now, copied = Clock().now_ms(), 0
        high = batch.count
        targets, expiry = batch.targets(low, high), batch.expiry(low, high)
        own = self._subscription.encode()
        partition = number if number < self._counts[route.headrace] else -1
        bytes_max = self._bytes_max[route.headrace]
        for index, message in enumerate(batch.messages(route.headrace, number, low, high)):
            if targets is not None and targets[index] not in (b"", own):
                continue
            if expiry is not None and 0 < expiry[index] <= now:
                continue
            record = to_record(message.value, message.key, message.headers, message.timestamp)
            size = _size(record)
            if size > bytes_max:
                where = f"{route.headrace}/{number}@{message.offset}"
                why = (
                    f"it has {size:,} bytes with its headers, and Kafka's topic {route.kafka} takes {bytes_max:,} "
                    "(max.message.bytes)"
                )
                refusal = TooLarge(
                    f"{where} cannot be copied: {why}. Raise the limit, or start with --skip too-large",
                    code="message_too_large",
                )
                self._skip("too-large", route, where, 1, why, refusal)
                continue
            self._put(producer, route.kafka, partition, record)
            copied += 1
        producer.poll(0)
        if self._error is not None:
            self._failed(self._error)
        route.positions[number] = batch.end_offset
        return copied

    def _put(self, producer: Producer, topic: str, partition: int, record: KafkaRecord) -> None:
        while True:
            try:
                producer.produce(
                    topic,
                    record.value,
                    record.key,
                    partition,
                    timestamp=record.timestamp or 0,
                    headers=list(record.headers) or None,
                    on_delivery=self._delivered,
                )
                return
            except BufferError:
                producer.poll(0.1)
                if self._error is not None:
                    self._failed(self._error)

    def _delivered(self, error: KafkaError | None, _message: object) -> None:
        if error is not None and self._error is None:
            self._error = error

    def _close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(KafkaException):  # none is under way; or the next start ends it
                producer.abort_transaction(5.0)
        self._ledger.close()


def _size(record: KafkaRecord) -> int:
    size = len(record.key or b"") + len(record.value or b"") + RECORD_OVERHEAD_BYTES
    for name, value in record.headers:
        size += len(name.encode()) + len(value or b"") + 8
    return size
