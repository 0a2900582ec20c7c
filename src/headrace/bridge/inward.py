"""Kafka → Headrace, exactly once.

A round of records becomes one commit of staged batches (``broker/staging.py``), and the *positions* after the round are
a message of the same commit: in the topic ``bridge.<name>``, of which the last message counts. So the messages and the
position appear together or not at all, whatever is killed. ::

    Kafka ──consume──▶ round n ──stage──▶ orders/0, orders/1, …, bridge.<name>/0 ──commit n──▶ all visible at once
                       round n + 1 is read meanwhile

The commits of a bridge are numbered without gaps, and a number is committed once. Each start reads the last
positions and commits them again under the next number, before it copies anything. If two bridges have one name, the
older one finds its next number taken, reads the last positions, sees that they are not its own, and stops. So the newer
one takes over, and nothing is doubled even if the older one was only asleep.

Order: records of a Kafka partition go to one Headrace partition in order (the one of the same number, or with
``repartition`` that of the key), so messages of a key keep their order.

Rejected: an idempotent producer whose sequence is Kafka's offset. Offsets have gaps (compaction, transactions), a broker
remembers only a producer's last batches, and a repetition must have the same batches. Kafka's consumer groups as
the truth about positions: a crash between the commit here and the one there doubles a round. The bridge only tells
the group ``headrace-bridge.<name>`` its positions, for tools that show lag.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from headrace.bridge.kafka import KafkaInquiry, explained, replaced
from headrace.bridge.routes import BridgeRoute
from headrace.bridge.running import LOOK_S, UNCOPIED, Bridge, Reopen, logger
from headrace.bridge.translating import KafkaRecord, to_message
from headrace.client.own_times import OwnTimes
from headrace.client.threads import BrokerClient
from headrace.errors import (
    Conflict,
    DataCorrupt,
    InvalidArgument,
    OffsetOutOfRange,
    TooLarge,
    TopicNotFound,
)
from headrace.log.batch import encode
from headrace.log.columns import Columns, Headers, pieces
from headrace.partitioning import partition_of_key

ROUND_RECORDS = 20_000
ROUND_BYTES = 4 << 20
ROUND_S = 0.1
"""How long a round waits for its first record."""
CHUNK_MAX = 2_000
TELL_S = 1.0
_NO_TIME = 0  # confluent_kafka.TIMESTAMP_NOT_AVAILABLE

Places = dict[str, dict[int, int]]
"""Kafka's topic -> partition -> offset of the next record."""


class BridgeLedger:
    """The positions of a bridge in Headrace: a topic of its own, whose last message counts."""

    def __init__(self, client: BrokerClient, name: str):
        self._client = client
        self.topic = f"bridge.{name}"
        self._commit = f"bridge-in-{name}"
        self._run = uuid.uuid4().hex
        self.number = -1
        self.document: dict[str, Any] = {}

    def open(self) -> None:
        """Read the last positions, after all commits that are under way."""
        client = self._client
        last = client.last_commit(self._commit)
        try:
            client.topic_stats(self.topic)
        except TopicNotFound:
            client.create_topic(
                self.topic,
                1,
                retention_hours=None,
                retention_bytes=1 << 20,
                segment_bytes=256 << 10,
            )
        found = self._last()
        if found is None and last >= 0:
            raise DataCorrupt(
                f"topic {self.topic} held the bridge's positions, and is empty: somebody has deleted it. To copy "
                "everything again, choose another --name",
                code="bridge_positions_lost",
            )
        self.document = found or {}
        self.number = max(last, self.document.get("number", -1))

    def _last(self) -> dict[str, Any] | None:
        place = self._client.positions([self.topic])[self.topic][0]
        if place["end"] == place["start"]:
            return None
        batch = self._client.fetch_batches(self.topic, place["end"] - 1)[-1]
        document = orjson.loads(batch.values()[-1])
        assert isinstance(document, dict)
        return document

    def store(self, document: dict[str, Any], batches: Sequence[tuple[str, int, Columns]]) -> None:
        """Commit the batches (topic, partition, columns) together with the positions."""
        client, number = self._client, self.number + 1
        document = {**document, "number": number, "run": self._run}
        batches = [*batches, (self.topic, 0, Columns([orjson.dumps(document)]))]
        staged = [
            client.stage_nowait(
                topic, encode(part), partition=partition, name=self._commit, number=number
            )
            for topic, partition, columns in batches
            for part in pieces(columns)
        ]
        is_first = client.commit_staged(self._commit, number, [each.result() for each in staged])
        if not is_first:  # our own request, sent again; or another bridge
            stored = self._last() or {}
            if (stored.get("run"), stored.get("number")) != (self._run, number):
                raise replaced(self.topic)
        self.number, self.document = number, document


@dataclass(eq=False)
class _Lane:
    """The records of a round for one partition of Headrace."""

    values: list[bytes] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    times: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Round:
    lanes: dict[tuple[str, int], _Lane] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Records by Kafka's topic."""
    bytes: int = 0
    records: int = 0


class InwardBridge(Bridge):
    _gone = "Kafka has deleted them"

    def __init__(self, *given: Any, repartition: bool = False, **more: Any):
        super().__init__(*given, **more)
        self._repartition = repartition
        self._routes = {route.kafka: route for route in self.progress.routes}
        self._consumer: Consumer | None = None
        self._storing: Future[None] | None = None
        self._stored: _Round | None = None
        self._worker: ThreadPoolExecutor | None = None

    # --- opening ------------------------------------------------------------------------------
    def _open(self) -> None:
        client, inquiry = self._client, KafkaInquiry(self._place)
        cluster = inquiry.cluster()
        ids = inquiry.topic_ids(self._routes)
        counts = {name: inquiry.partitions(name) for name in self._routes}
        self._partitions = {
            route.headrace: self._prepare(route, counts[route.kafka])
            for route in self.progress.routes
        }
        self._bytes_max = client.info()["max_message_size"]
        self._times = OwnTimes(client)
        self._ledger = BridgeLedger(client, self._name)
        self._ledger.open()
        known = self._ledger.document
        if known.get("kafka", cluster) != cluster:
            raise Conflict(
                f"bridge {self._name} has copied from another Kafka cluster ({known['kafka']}); choose another "
                "--name for this one",
                code="bridge_other_cluster",
            )
        places = [(name, number) for name, count in counts.items() for number in range(count)]
        positions = self._begin(inquiry, places, known, ids)
        for name, route in self._routes.items():
            route.positions = dict(positions[name])
        self._base: dict[str, Any] = {
            "kafka": cluster,
            "ids": {**known.get("ids", {}), **ids},
            # Of topics that are not copied now, the positions stay.
            "positions": {
                **known.get("positions", {}),
                **{name: _texts(some) for name, some in positions.items()},
            },
        }
        self._ledger.store(self._base, [])
        self._ends: set[tuple[str, int]] = set()
        self._all = set(places)
        self._chunk = 16
        self._look_at = time.monotonic() + LOOK_S
        self._tell_at = 0.0
        self._inquiry, self._counts = inquiry, counts
        self._worker = ThreadPoolExecutor(1, "headrace-bridge")
        self._consumer = self._place.consumer(f"headrace-bridge.{self._name}")
        self._consumer.assign(
            [TopicPartition(name, number, positions[name][number]) for name, number in places]
        )

    def _prepare(self, route: BridgeRoute, count: int) -> int:
        """Create the topic if it does not exist. Returns how many partitions it has."""
        try:
            found = len(self._client.topic_stats(route.headrace)["partitions"])
        except TopicNotFound:
            self._client.create_topic(route.headrace, count)
            return count
        if found >= count or self._repartition:
            return found
        if route.positions:  # it had enough of them: Kafka's topic has grown
            self._client.change_topic(route.headrace, partitions=count)
            return count
        raise InvalidArgument(
            f"Kafka's topic {route.kafka} has {count} partitions, and {route.headrace} has {found}. Add partitions "
            f"(headrace alter-topic {route.headrace} --set partitions={count}), or let keys decide (--repartition)",
            code="too_few_partitions",
        )

    def _begin(
        self,
        inquiry: KafkaInquiry,
        places: list[tuple[str, int]],
        known: dict[str, Any],
        ids: dict[str, str],
    ) -> Places:
        """Where each partition continues."""
        first = inquiry.offsets(places, OffsetSpec.earliest())
        last = inquiry.offsets(places, OffsetSpec.latest())
        beginnings = last if self._start == "latest" else first
        found: Places = {}
        for name, number in places:
            route = self._routes[name]
            route.ends[number] = last[name, number]
            is_known = name in known.get("positions", {})
            at = known["positions"][name].get(str(number)) if is_known else None
            if at is None:  # a partition that was added later is read from its beginning
                at = first[name, number] if is_known else beginnings[name, number]
            else:
                other = known.get("ids", {}).get(name, "")
                if at > last[name, number] or (other and ids[name] and other != ids[name]):
                    raise Conflict(
                        f"Kafka's {name} is not the topic that bridge {self._name} has copied up to {number}@{at}: it "
                        "was created anew, or has lost records. To copy it from its beginning, choose another --name",
                        code="kafka_topic_changed",
                    )
                at = self._after_gap(route, f"{route.kafka}/{number}", at, first[name, number])
            found.setdefault(name, {})[number] = at
        return found

    def _deleted(self, where: str) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"Kafka has deleted {where} {UNCOPIED}", code="kafka_records_deleted"
        )

    # --- copying ------------------------------------------------------------------------------
    def _round(self) -> None:
        found = self._gather()
        self._finish()
        if found.records:
            positions = {name: _texts(route.positions) for name, route in self._routes.items()}
            document = {**self._base, "positions": {**self._base["positions"], **positions}}
            assert self._worker is not None
            self._stored = found
            self._storing = self._worker.submit(self._store, found, document)
        elif self._ends >= self._all:
            self.progress.is_caught_up = True
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            if any(self._inquiry.partitions(name) > count for name, count in self._counts.items()):
                raise Reopen("a topic has more partitions")
            self.progress.trouble = None  # Kafka answers

    def _store(self, found: _Round, document: dict[str, Any]) -> None:
        batches = []
        for (topic, partition), lane in found.lanes.items():
            headers = self._times.kept(topic, partition, lane.times, lane.headers)
            columns = Columns(
                lane.values,
                lane.keys if any(key is not None for key in lane.keys) else None,
                headers if any(headers) else None,
                lane.times,
            )
            batches.append((topic, partition, columns))
        self._ledger.store(document, batches)

    def _finish(self) -> None:
        """Wait until the round before is stored."""
        storing, self._storing = self._storing, None
        stored, self._stored = self._stored, None
        if storing is None or stored is None:
            return
        storing.result()
        for name, count in stored.counts.items():
            self._routes[name].copied += count
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_S
            self._tell_kafka()

    def _tell_kafka(self) -> None:
        """For tools that show the lag of Kafka's groups; nothing depends on it."""
        assert self._consumer is not None
        places = [
            TopicPartition(name, number, at)
            for name, some in self._ledger.document["positions"].items()
            if name in self._routes
            for number, at in _numbers(some).items()
        ]
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except KafkaException as error:
            logger.info("Kafka's group does not know the positions: %s", error)
        for name, number in self._all:
            place = TopicPartition(name, number)
            _, end = self._consumer.get_watermark_offsets(place, cached=True)
            if end > 0:
                self._routes[name].ends[number] = end

    def _gather(self) -> _Round:
        """Some records, or what comes within a moment."""
        assert self._consumer is not None
        found = _Round()
        while True:
            first = self._consumer.poll(0.01 if found.records else ROUND_S)
            messages = [] if first is None else [first, *self._consumer.consume(self._chunk, 0)]
            largest = 1
            for message in messages:
                error = message.error()
                if error is not None:
                    self._heard(message, error)
                else:
                    largest = max(largest, len(message))
                    self._take(message, found)
            if messages:
                self.progress.trouble = None
                self._chunk = max(1, min(CHUNK_MAX, ROUND_BYTES // largest))
            is_full = found.records >= ROUND_RECORDS or found.bytes >= ROUND_BYTES
            # While the round before is being stored, more is gathered: the slower the broker, the larger the rounds.
            is_free = self._storing is None or self._storing.done()
            if is_full or self.stop.is_set() or (is_free and (found.records or not messages)):
                return found

    def _take(self, message: Any, found: _Round) -> None:
        name, number, offset = message.topic(), message.partition(), message.offset()
        route = self._routes[name]
        if offset < route.positions[number]:
            return
        kind, timestamp = message.timestamp()
        own = None if kind == _NO_TIME else max(timestamp, 0)
        record = KafkaRecord(message.key(), message.value(), message.headers() or (), own)
        try:
            value, key, headers = to_message(record, self._bytes_max)
        except TooLarge as error:
            where = f"{name}/{number}@{offset}"
            refusal = TooLarge(
                f"Kafka's {where} cannot be copied: {error.message}. Raise the limit, or start with "
                "--skip too-large",
                code=error.code,
            )
            self._skip("too-large", route, where, 1, error.message, refusal)
        else:
            lane = found.lanes.setdefault(
                (route.headrace, self._target(route, number, key)), _Lane()
            )
            lane.values.append(value)
            lane.keys.append(key)
            lane.headers.append(headers)
            lane.times.append(time.time_ns() // 1_000_000 if own is None else own)
            found.counts[name] = found.counts.get(name, 0) + 1
        route.positions[number] = offset + 1
        route.ends[number] = max(route.ends.get(number, 0), offset + 1)
        found.records += 1
        found.bytes += len(message)

    def _target(self, route: BridgeRoute, number: int, key: bytes | None) -> int:
        count = self._partitions[route.headrace]
        if not self._repartition:
            return number
        return number % count if key is None else partition_of_key(key, count)

    def _heard(self, message: Any, error: KafkaError) -> None:
        name, number = message.topic(), message.partition()
        if error.code() == KafkaError._PARTITION_EOF:
            self._ends.add((name, number))
            self._routes[name].ends[number] = message.offset()
            self._routes[name].positions[number] = message.offset()
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise Reopen(
                f"{name}/{number}: {error.str()}"
            )  # it begins later now, or is another one
        else:
            found = explained(error, f"topic {name} cannot be read")
            if not (error.retriable() and found.retryable):
                raise found

    def _close(self) -> None:
        try:
            self._finish()
        finally:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                consumer.close()
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.shutdown()


def _texts(positions: dict[int, int]) -> dict[str, int]:
    return {str(number): at for number, at in positions.items()}


def _numbers(positions: dict[str, int]) -> dict[int, int]:
    return {int(number): at for number, at in positions.items()}
