"""The connections to Kafka: sending, reading what was sent back, fetching old records, and asking the cluster.

    loop, workers ──send──▶ producer (librdkafka's threads)          Kafka
                                                                       │
    loop ◀── call_soon_threadsafe ── Tail "logs"      ◀── every record of the partitions of topics
    the tail's own thread ────────── Tail "journals"  ◀── every record of the journals
    loop ◀── call_soon_threadsafe ── Fetcher          ◀── a range of old records, on request
    the caller's thread ──────────── open             ◀── from the checkpoint to the end, then our claims

Rules:
- ``send`` never blocks and never gives up: librdkafka sends again until Kafka has it. The rule makes copies void,
  so the producer needs neither idempotence nor an order between requests.
- A tail gives the loop a few chunks and then waits until the loop has read them: memory is bounded.
- Journals have a tail of their own, which needs no loop: a start and a change of topics wait for a journal on the loop.
- Everything else waits at most ``timeout`` seconds, and raises ``TimeoutError`` (an ``OSError``) with a sentence.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

from headrace.clock import Loop
from headrace.engine.kafka.replica import Replica
from headrace.engine.kafka.tail import METADATA_S, POLL_S, RETRY_S, Tail, learn, some
from headrace.errors import StorageFailed

logger = logging.getLogger("headrace.kafka")
RECORD_BYTES_MAX = 64 << 20
"""The largest record: a commit, which has 16 MB, or one larger publish."""
QUEUE_KBYTES = 32 << 10
"""What librdkafka may fetch ahead."""
FETCH_WAIT_MS = 25
"""A partition that a consumer gets is read only after the request that waits has come back."""
CLAIMS_MAX = 20
SAID_AGAIN_S = 60.0
SAID_MAX = 1000
RETRY_S_MAX = 5.0
MISSING_S = 5.0
LOOK_S = 0.25
"""A fetch that has found nothing for so long asks whether there is such a topic."""
UNKNOWN = (
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)
NOT_READY = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)

FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
REACH_S = 0.5

librdkafka = logging.getLogger("headrace.kafka.client")


def _mistake(trouble: KafkaError) -> StorageFailed | None:
    """What is wrong with the login or the certificates, if that is the trouble. Waiting does not help."""
    found = None
    if trouble.code() == KafkaError._AUTHENTICATION:
        found = StorageFailed(
            f"Kafka refuses the login: {trouble.str()}; check sasl.mechanism, sasl.username and "
            "sasl.password in the file of kafka_config",
            code="kafka_login_failed",
        )
    elif trouble.code() == KafkaError._SSL:
        found = StorageFailed(
            f"the TLS connection to Kafka fails: {trouble.str()}; check security.protocol and "
            "ssl.ca.location in the file of kafka_config, and Kafka's certificate",
            code="kafka_tls_failed",
        )
    if found is not None:
        found.retryable = False
    return found


class _Seldom(logging.Filter):
    """Lets a message pass once a minute: while Kafka is away, each client says so several times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = re.sub(r"\[.*?\]|\(after .*?\)", "", record.getMessage())
        now = time.monotonic()
        if now - self._said.get(text, -SAID_AGAIN_S) < SAID_AGAIN_S:
            return False
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[text] = now
        return True


librdkafka.addFilter(_Seldom())

Found = tuple[int, bytes | None, bytes | None]
"""Kafka's offset, key, value."""


class Timeout(TimeoutError):
    """Kafka did not answer in time. Whoever asked may ask again."""

    def __init__(self, what: str):
        super().__init__(errno.ETIMEDOUT, what)


def failure_of(error: KafkaException, what: str, right: str = "") -> Timeout | StorageFailed:
    """What to raise: a definite error if Kafka refuses, else one after which the same may be tried again.

    ``right`` is what the user lacks then, for example ``CREATE on topic shop.state``.
    """
    found = error.args[0]
    if found.code() in FORBIDDEN:
        return forbidden(right or f"{what}: {found.str()}")
    return Timeout(f"Kafka: {what}: {found.str()}")


def forbidden(what: str) -> StorageFailed:
    return StorageFailed(
        f"Kafka's access rules do not allow it: {what}. Give the user of kafka_config the rights that docs/cluster.md lists",
        code="kafka_forbidden",
        retryable=False,
    )


class TopicMissing(Exception):
    """Kafka has no such topic any more."""


class FetchOrder(NamedTuple):
    topic: str
    number: int
    position: int
    stop: int
    """Kafka's offset at which to stop."""
    bytes_max: int
    done: Callable[[list[Found], Exception | None], None]


class Look(Enum):
    """An order to look which topics there are."""

    NOW = 1


class KafkaLink:
    def __init__(
        self,
        servers: str,
        node: str,
        loop: Loop,
        *,
        cluster: str,
        options: dict[str, str] | None = None,
        timeout: float = 10.0,
    ):
        self.servers, self.node, self.cluster, self.timeout = servers, node, cluster, timeout
        self._loop = loop
        self._common: dict[str, Any] = {
            "bootstrap.servers": servers,
            "client.id": f"headrace-{cluster}",
            "socket.keepalive.enable": True,
            "receive.message.max.bytes": 3 * RECORD_BYTES_MAX,
            "reconnect.backoff.max.ms": 1000,
            **(options or {}),
        }
        self._closing = threading.Event()
        self._trouble: KafkaError | None = None
        """The last one with the connection."""
        self.producer = Producer(
            {
                **self._common,
                "error_cb": self._note,
                "acks": "all",
                "linger.ms": 0,
                "message.max.bytes": RECORD_BYTES_MAX + (1 << 20),
                "message.timeout.ms": 0,
                "queue.buffering.max.kbytes": 1 << 20,
                "delivery.report.only.error": True,
            },
            logger=librdkafka,
        )
        self.admin = AdminClient(self._common, logger=librdkafka)
        self._opener = self._consumer()
        self._opening = threading.Lock()
        self.progress = 0, 0
        """Of the partitions that were opened last: records read, and how many there are to read."""
        self.logs = Tail(self._consumer, self._closing, self._on_loop)
        self.journals = Tail(self._consumer, self._closing, lambda work: work())
        self._fetches: SimpleQueue[FetchOrder | Literal[Look.NOW] | None] = SimpleQueue()
        self._looks: dict[str, list[Callable[[bool | None], None]]] = {}
        """Topic -> who wants to know whether it is missing."""
        self._missing: dict[str, float] = {}
        """Topics that Kafka does not have, and until when it is not asked for them again."""
        self._fetcher = self._consumer()
        self._learned: set[str] = set()
        self._threads = [
            threading.Thread(target=target, name=f"headrace-kafka-{name}", daemon=True)
            for name, target in (
                ("send", self._poll),
                ("logs", self.logs.run),
                ("journals", self.journals.run),
                ("fetch", self._fetch),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- reaching Kafka -----------------------------------------------------------------------
    def _note(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # the others say why
            self._trouble = error

    def reach(self) -> None:
        """Wait until Kafka answers. Raises what is wrong with the login or the certificates, if that is why it does not. Blocks."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self.admin.list_topics(timeout=min(REACH_S, self.timeout))
                return
            except KafkaException as error:
                trouble = self._trouble
                mistake = None if trouble is None else _mistake(trouble)
                if mistake is not None:
                    raise mistake from None
                if time.monotonic() > deadline:
                    why = error.args[0] if trouble is None else trouble
                    raise Timeout(
                        f"Kafka does not answer at {self.servers}: {why.str()}; check kafka_servers, whether Kafka runs, "
                        "and security.protocol in the file of kafka_config"
                    ) from None

    def learn(self, topics: set[str]) -> None:
        """Know the leaders of topics that are new. Blocks."""
        learn(self.producer, topics, self.timeout)

    def _consumer(self, **more: Any) -> Consumer:
        return Consumer(
            {
                **self._common,
                "group.id": self.group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.message.max.bytes": 4 << 20,
                "queued.max.messages.kbytes": QUEUE_KBYTES,
                "fetch.queue.backoff.ms": 5,
                "fetch.error.backoff.ms": 100,
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                **more,
            },
            logger=librdkafka,
        )

    def member(self, group: str, session_s: float, heartbeat_s: float | None = None) -> Consumer:
        """A consumer that is a member of a group; whoever gets it closes it."""
        return self._consumer(
            **{
                "group.id": group,
                "client.id": self.node,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": int(session_s * 1000),
                "heartbeat.interval.ms": int((heartbeat_s or session_s / 4) * 1000),
            }
        )

    @property
    def group(self) -> str:
        """Its committed offsets are the last checkpoints of the partitions: hints, where to begin."""
        return f"{self.cluster}.checkpoints"

    # --- sending ------------------------------------------------------------------------------
    def send(
        self,
        topic: str,
        number: int,
        key: bytes,
        value: bytes,
        again: Callable[[], None],
        unknown: Callable[[], None],
        tries: int = 0,
    ) -> None:
        """``again`` is called later, in any thread, if Kafka did not take it; the pauses grow with ``tries``.

        ``unknown`` is called on the loop if librdkafka does not know the topic: yet, or not any more.
        """

        def refused(error: KafkaError | None) -> None:
            if self._closing.is_set():
                return
            if error is not None and error.code() in UNKNOWN:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(unknown)
            pause = min(RETRY_S * 2 ** min(tries, 10), RETRY_S_MAX)
            threading.Timer(pause, again).start()

        def failed(error: KafkaError | None, _message: object) -> None:
            if error is not None and not self._closing.is_set():
                logger.warning("Kafka did not take a record of %s/%d: %s", topic, number, error)
                refused(error)

        try:
            self.producer.produce(topic, value, key, number, on_delivery=failed)
        except (BufferError, KafkaException) as error:
            # The queue is full, or librdkafka does not know the topic yet, or not any more.
            logger.info("a record of %s/%d waits: %s", topic, number, error)
            refused(error.args[0] if isinstance(error, KafkaException) else None)

    def _poll(self) -> None:
        while not self._closing.is_set():
            self.producer.poll(POLL_S)

    # --- opening ------------------------------------------------------------------------------
    def open(
        self, replicas: Sequence[Replica], tail: Tail, *, new: bool = False, claim: bool = True
    ) -> None:
        """Read each from its checkpoint to the end, claim it, read the claim back, and follow it from there.

        ``new``: their topic was just created, so there is nothing to look up. Without ``claim``, somebody else owns them.
        """
        if not replicas:
            return
        places = {(each.topic, each.number): each for each in replicas}
        with self._opening:
            ends = dict.fromkeys(places, 0) if new else self._look_up(places)
            consumer = self._opener
            topics = {each.topic for each in replicas}
            for client in (self.producer, consumer):
                learn(client, topics, self.timeout)
            consumer.assign(
                [TopicPartition(*place, each.position) for place, each in places.items()]
            )
            left = sum(max(ends[place] - each.position, 0) for place, each in places.items())
            self.progress = 0, left
            try:
                self._read(
                    consumer, places, lambda place, each: each.position >= ends[place], "the end"
                )
                for _ in range(CLAIMS_MAX):
                    wanting = {
                        place: each
                        for place, each in places.items()
                        if claim and each.seat.owned != each.seat.ownership.epoch
                    }
                    if not wanting:
                        break
                    before = {place: each.seat.ownership.epoch for place, each in wanting.items()}
                    for each in wanting.values():
                        each.claim()
                    self._read(consumer, places, partial(_has_changed, before), "its claims")
                else:
                    raise StorageFailed(
                        "other nodes claim the same partitions again and again; start again",
                        code="cluster_busy",
                    )
            finally:
                consumer.unassign()
        tail.follow(replicas)

    def _look_up(self, places: dict[tuple[str, int], Replica]) -> dict[tuple[str, int], int]:
        """Set where each begins to read; returns where each ends."""
        partitions = [TopicPartition(*place) for place in places]
        try:
            first = self.offsets(places, OffsetSpec.earliest())
            last = self.offsets(places, OffsetSpec.latest())
            committed = self._opener.committed(partitions, timeout=self.timeout)
        except KafkaException as error:
            raise failure_of(error, "it does not say where partitions begin and end") from None
        hints = {(each.topic, each.partition): each.offset for each in committed}
        for place, replica in places.items():
            begins, hint = first[place], hints[place]
            usable = hint != OFFSET_INVALID and begins <= hint < last[place]
            replica.begin(hint if usable else begins, begins)
        return last

    def offsets(
        self, places: Iterable[tuple[str, int]], spec: OffsetSpec
    ) -> dict[tuple[str, int], int]:
        """The first or last offsets of partitions, in one request to each of Kafka's nodes."""
        deadline = time.monotonic() + self.timeout
        places = list(places)
        while True:
            try:
                return self._offsets(places, spec)
            except KafkaException as error:
                # The leader of a new partition is known before it is ready.
                if error.args[0].code() not in NOT_READY or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _offsets(
        self, places: Iterable[tuple[str, int]], spec: OffsetSpec
    ) -> dict[tuple[str, int], int]:
        partitions = {TopicPartition(*place): spec for place in places}
        if not partitions:
            return {}
        asked = self.admin.list_offsets(partitions, request_timeout=self.timeout)
        return {
            (each.topic, each.partition): future.result(self.timeout + 1).offset
            for each, future in asked.items()
        }

    def ends(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Where partitions end; 0 for those of topics that somebody has deleted in Kafka. Blocks.

        Many wait for one question, so a topic that is missing must not hold it up.
        """
        places = list(places)
        now = time.monotonic()
        missing = {topic for topic, until in tuple(self._missing.items()) if until > now}
        asked = [place for place in places if place[0] not in missing]
        try:
            found = self._offsets(asked, OffsetSpec.latest())
        except KafkaException as error:
            if error.args[0].code() not in NOT_READY:
                raise
            missing = self._missing_of(topic for topic, _ in asked)
            left = [place for place in asked if place[0] not in missing]
            found = self.offsets(left, OffsetSpec.latest())
        return dict.fromkeys(places, 0) | found

    def _read(
        self,
        consumer: Consumer,
        places: dict[tuple[str, int], Replica],
        is_done: Callable[[tuple[str, int], Replica], bool],
        what: str,
    ) -> None:
        left = {place for place, each in places.items() if not is_done(place, each)}
        deadline = time.monotonic() + self.timeout
        while left:
            found = some(consumer)
            for message in found:
                place = message.topic(), message.partition()
                replica = places[place]
                replica.read(message.offset(), message.key(), message.value())
                if place in left and is_done(place, replica):
                    left.discard(place)
            self.progress = self.progress[0] + len(found), self.progress[1]
            if found:
                deadline = time.monotonic() + self.timeout
            elif time.monotonic() > deadline:
                topic, number = next(iter(left))
                raise Timeout(
                    f"Kafka has not answered for {self.timeout:g} seconds: {len(left)} partitions have not "
                    f"read {what}, for example {topic}/{number}"
                )

    # --- fetching -----------------------------------------------------------------------------
    def fetch(self, request: FetchOrder) -> None:
        """``done`` runs on the loop, with the records or with a reason why there are none."""
        self._fetches.put(request)

    def look(self, topic: str, done: Callable[[bool | None], None]) -> None:
        """``done`` hears, on the loop, whether Kafka has no such topic; None if Kafka does not say."""
        if not self._looks:
            self._fetches.put(Look.NOW)
        self._looks.setdefault(topic, []).append(done)

    def _looked(self, topics: tuple[str, ...], missing: set[str] | None) -> None:
        waiting = [(topic, self._looks.pop(topic)) for topic in topics]
        if self._looks:
            self._fetches.put(Look.NOW)
        for topic, told in waiting:
            for done in told:
                done(None if missing is None else topic in missing)

    def _look(self) -> None:
        topics = tuple(self._looks)
        missing = None
        try:
            missing = self._missing_of(topics)
        except KafkaException as error:
            logger.info("Kafka does not say which topics it has: %s", error)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._looked, topics, missing)

    def _missing_of(self, topics: Iterable[str]) -> set[str]:
        """Those that Kafka does not have. Asks twice: a node of Kafka that has just started may not know all."""
        missing = set(topics) - set(self._listed())
        if missing:
            self._closing.wait(RETRY_S)
            missing -= set(self._listed())
        until = time.monotonic() + MISSING_S
        self._missing |= dict.fromkeys(missing, until)
        return missing

    def _listed(self) -> Iterable[str]:
        """All topics of Kafka. This question creates none."""
        topics: dict[str, Any] = self.admin.list_topics(timeout=self.timeout).topics
        return topics

    def _fetch(self) -> None:
        while (request := self._fetches.get()) is not None:
            if request is Look.NOW:
                self._look()
                continue
            found: list[Found] = []
            why: Exception | None = None
            try:
                found = self._fetched(request)
            except TopicMissing as error:
                why = error
            except (KafkaException, OSError) as error:
                why = error
                self._closing.wait(RETRY_S)
            try:
                self._loop.call_soon_threadsafe(request.done, found, why)
            except RuntimeError:
                return

    def _fetched(self, request: FetchOrder) -> list[Found]:
        consumer = self._fetcher
        if request.topic not in self._learned:
            learn(consumer, {request.topic}, METADATA_S)
            self._learned.add(request.topic)
        consumer.assign([TopicPartition(request.topic, request.number, request.position)])
        found: list[Found] = []
        size = 0
        began = time.monotonic()
        looks = False
        try:
            while size < request.bytes_max and not self._closing.is_set():
                for message in some(consumer):
                    found.append((message.offset(), message.key(), message.value()))
                    size += len(message)
                    if message.offset() + 1 >= request.stop:
                        return found
                if found:
                    continue
                if not looks and time.monotonic() > began + LOOK_S:
                    looks = True
                    if self._missing_of([request.topic]):
                        raise TopicMissing(request.topic)
                if time.monotonic() > began + self.timeout:
                    raise Timeout(f"Kafka has not answered for {self.timeout:g} seconds")
        finally:
            consumer.unassign()
        return found

    # --- checkpoints and deletion -----------------------------------------------------------------
    def remember(self, replica: Replica, position: int) -> None:
        """Commit where the next start may begin. It is a hint: nothing depends on its success."""
        self.logs.remember(replica, position)

    def delete_before(self, replica: Replica, position: int) -> None:
        """Delete the records before a checkpoint, some time. A later deletion includes this one."""
        try:
            self.admin.delete_records([TopicPartition(replica.topic, replica.number, position)])
        except KafkaException as error:
            logger.warning("records of %s/%d: %s", replica.topic, replica.number, error)

    # --- ending -------------------------------------------------------------------------------
    def _on_loop(self, work: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Let go of Kafka. What was sent and not read back is not waited for."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._fetches.put(None)
        self.logs.wake()
        for thread in self._threads:
            thread.join(2 * self.timeout)
        self.producer.flush(1.0)
        for consumer in (self.logs.consumer, self.journals.consumer, self._opener, self._fetcher):
            consumer.close()


def _has_changed(
    before: dict[tuple[str, int], int], place: tuple[str, int], replica: Replica
) -> bool:
    return place not in before or replica.seat.ownership.epoch > before[place]
