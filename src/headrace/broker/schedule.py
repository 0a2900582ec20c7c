"""Delayed messages: they wait in an internal topic and are published when their time comes.

A delayed publish is appended to ``__scheduled``, durable like any other; its place there is its id.
A hidden subscription over that topic knows which of them are done: published or cancelled. In
memory there is one heap entry for each that waits. Nothing else: storage, recovery, retention and
compact state are those of every topic.

Many at once come through a commit of staged batches (``staging.py``), which are made what they are stored
as when they are staged; when their commit is shown, they are taken in.

Exactly once: a round publishes what is due as one batch per partition, as an idempotent producer of
its own; then marks it done, durably; then the next round begins. After a crash between the two, the
newest batch of that producer in each partition says which ids are there already.

With several nodes, a batch may be stored later than its error says, by this leader or by the one before it, which does not know yet
that it leads no more. So the first batch for each partition, and each one after an error, begins with a *look*: which ids does the newest
batch have? Its number is the one that was next when that was looked up, so it is refused, or taken for a repetition, if another
one was stored since; both are looked at again.

Rejected: delayed records inside their own topic (every reader would have to step around them, a
start would have to scan for them, and Spark would see them early).
"""

from __future__ import annotations

import heapq
import logging
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import orjson

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.publishing import SCHEDULE_PRODUCER as PRODUCER_ID
from headrace.broker.scheduled_listing import LOOKED_AT_ONCE, ScheduledListing
from headrace.broker.topic import Topic
from headrace.errors import HeadraceError, InvalidArgument, MessageNotFound, QueueFull
from headrace.log.batch import HAS_TIMES, LOST, Batch, encode
from headrace.log.columns import NO_ID, Columns, time_of
from headrace.log.interface import Append, Log, ReadPending
from headrace.model import (
    Message,
    Receipt,
    TopicSettings,
    derive_id,
    split_id,
    topic_hash,
)

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.broker")
TOPIC = "__scheduled"
KEEPER = "__schedule"
SETTINGS = TopicSettings(retention_hours=0.0, segment_bytes=16 << 20)
CONTROL = "headrace-schedule"
ROUND_MAX = 1000
READ_AT_ONCE = 200
RECENT_MAX = 10_000
"""Messages that have gone and are still known when a client sends them again."""
PREPARING_BYTES = 1_500
"""What it takes to prepare one delayed message for its commit, besides its own bytes."""
WAITING_BYTES = 700
"""What the broker holds in memory for a message that waits; the message itself is in the log."""
READ_AGAIN_S = 1.0
READS_MAX = 5
"""At a start, reads that the disk refuses are tried again: so often, all together."""
LOOK_AGAIN_S = 60.0
"""The wall clock may jump, so no timer trusts it for longer than this."""


class WaitingMessage:
    __slots__ = ("control", "deliver_at", "id", "offset")

    def __init__(self, offset: int, control: dict[str, Any]):
        self.offset = offset
        self.control = control
        self.deliver_at: int = control["at"]
        self.id = uuid.UUID(control["id"]) if control.get("id") else derived_id(offset)

    def is_in(self, there: dict[bytes, int]) -> bool:
        """Whether it is among what was published, by id and time."""
        return there.get(self.id.bytes, -1) >= self.deliver_at


def derived_id(offset: int) -> uuid.UUID:
    return derive_id(topic_hash(TOPIC), 0, offset)


class Schedule:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._waiting: dict[int, WaitingMessage] = {}
        self._by_id: dict[uuid.UUID, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._moving: set[int] = set()
        self._timer: Any = None
        self._rounding = False
        self._forgetting: dict[str, int] = {}
        """Topics that were deleted -> the offset before which their messages still have to be dropped."""
        self._when_loaded: list[Callable[[], None]] | None = None
        """Callbacks that wait until the log has been read; None when it has."""
        self._again: Any = None
        """The timer of a read or a write that is tried again."""
        self._tries = READS_MAX
        self._looked: set[tuple[str, int]] = set()
        """With several nodes: partitions of which it is known what the schedule has published there."""
        self._recent: dict[tuple[str, str, int], None] = {}
        """Id, topic and time of the last messages that went."""

    def __len__(self) -> int:
        return len(self._waiting)

    # --- starting ---------------------------------------------------------------------------
    def load(self) -> None:
        """Find what still waits; called once, when topics and subscriptions are there."""
        topic = self._engine.topics.get(TOPIC)
        if topic is None:
            return
        self._rounding = True  # until everything is read, nothing is published
        self._when_loaded = []
        self._load_published(
            [
                (partition.log, *last)
                for topic in self._engine.topics
                for partition in topic.partitions
                if (last := partition.log.last_producer_batch(PRODUCER_ID)) is not None
            ],
            {},
            self._load_waiting,
        )

    def _load_published(
        self,
        last: list[tuple[Log, int, int]],
        there: dict[bytes, int],
        done: Callable[[dict[bytes, int]], None],
    ) -> None:
        """Read the newest batch that a schedule wrote to each partition: its ids, and when.

        Only these can have been published without having been marked done.
        """
        while last:
            log, offset, count = last[-1]
            try:
                batch = log.read(offset, 1)[0]  # it may begin earlier, and end later
                low = offset - batch.base_offset
                ids = batch.ids(low, low + count) or []
                times = batch.times(low, low + count) or repeat(batch.base_timestamp)
                there.update(zip(ids, times, strict=False))
            except ReadPending as pending:
                pending.then(lambda: self._load_published(last, there, done))
                return
            except HeadraceError:
                pass  # retention dropped it, long after it was marked done
            except OSError as error:
                # Without it a message might go twice. The disk may read it in a moment.
                logger.error("what was delayed cannot be read yet: %s", error)
                again = partial(self._load_published, last, there, done)
                self._again = self._engine.call_later(READ_AGAIN_S, again)
                return
            last.pop()
        done(there)

    def _load_waiting(self, there: dict[bytes, int]) -> None:
        published: list[int] = []

        def take(messages: list[Message]) -> bool:
            for message in messages:
                waiting = self._take(message)
                if waiting is not None and waiting.is_in(there):
                    published.append(message.offset)
            return True

        def loaded() -> None:
            callbacks, self._when_loaded = self._when_loaded, None
            self._drop(published)
            self._go_on_when_durable()
            for callback in callbacks or ():
                callback()

        log = self._engine.partition(TOPIC).log
        undone = self._cursor().undone(log.end_offset)
        self._read([at for at in undone if at >= log.start_offset], take, loaded)

    def _cursor(self) -> Cursor:
        return self._engine.keeper(KEEPER, TOPIC).cursors[(TOPIC, 0)]

    def _take(self, message: Message) -> WaitingMessage | None:
        """A record of the topic waits; None: it does not say for what."""
        try:
            return self._add(message.offset, orjson.loads(message.headers[CONTROL]))
        except (KeyError, ValueError):
            logger.error("offset %d of %s is no delayed message", message.offset, TOPIC)
            cursor = self._cursor()
            cursor.done(message.offset)
            self._engine.changed(cursor)
            return None

    def _add(self, offset: int, control: dict[str, Any]) -> WaitingMessage:
        waiting = WaitingMessage(offset, control)
        self._waiting[offset] = waiting
        self._engine.budget.used += WAITING_BYTES
        if control.get("id"):
            self._by_id[waiting.id] = offset
        heapq.heappush(self._heap, (waiting.deliver_at, offset))
        return waiting

    # --- asking for it ------------------------------------------------------------------------
    def add(
        self,
        topic: str,
        columns: Columns,
        deliver_at: int,
        partition: int | None,
        done: Callable[[list[Receipt], HeadraceError | None], None],
    ) -> None:
        """Keep one message until ``deliver_at``; the receipt's id cancels it."""
        engine = self._engine
        assert len(columns.values) == 1
        if len(self._waiting) >= limits.SCHEDULED_MAX:
            raise QueueFull(f"{limits.SCHEDULED_MAX} messages wait for their time already")
        known = self._by_id.get(uuid.UUID(bytes=columns.ids[0])) if columns.ids else None
        control = _control(topic, columns, 0, deliver_at, partition)
        is_gone = (control.get("id", ""), topic, deliver_at) in self._recent
        if is_gone or (known is not None and self._waiting[known].control["topic"] == topic):
            # Sent again by a client that did not hear the answer: it waits already, or was published.
            again = Receipt(topic, None, None, engine.now_ms(), duplicate=True, id=columns.ids[0])  # type: ignore[index]
            engine.call_soon(done, [again], None)
            return
        engine.budget.check(WAITING_BYTES)
        kept = _stored_as(columns, [control])

        def stored(entry: Append) -> None:
            if entry.error is not None:
                done([], entry.error)
                return
            waiting = self._add(entry.first_offset, control)
            self._arm()
            done([Receipt(topic, None, None, entry.timestamp, id=waiting.id.bytes)], None)

        engine.append(self.home(), 0, Append(kept, None, stored))

    def home(self) -> Topic:
        """The topic in which messages wait, created if needed."""
        home = self._engine.topics.get(TOPIC)
        if home is None:
            home = self._engine.create_topic(TOPIC, SETTINGS, internal=True)
            self._cursor()
        return home

    def prepare(
        self,
        topic: str,
        partition: int | None,
        batch: Batch,
        done: Callable[[Batch | None, HeadraceError | None], None],
    ) -> None:
        """What a batch of delayed messages is staged as; its times say when each is due."""
        if not batch.flags & HAS_TIMES:
            raise InvalidArgument(
                "a batch of delayed messages has a time for each of them", code="invalid_delay"
            )
        if len(self._waiting) + batch.count > limits.SCHEDULED_MAX:
            raise QueueFull(f"more than {limits.SCHEDULED_MAX} messages would wait for their time")
        self.home()
        size = batch.plain_bytes + batch.count * PREPARING_BYTES
        self._engine.budget.take(size)
        now = self._engine.now_ms()

        def make() -> Batch:
            """In a worker: ten microseconds for each message are too many for the loop."""
            columns = batch.columns()
            controls = [
                _control(topic, columns, index, time_of(None, at, now), partition)
                for index, at in enumerate(columns.times or ())
            ]
            return encode(_stored_as(columns, controls))

        def made(prepared: Batch | None, error: BaseException | None) -> None:
            self._engine.budget.give(size)
            if error is not None and not isinstance(error, HeadraceError):
                logger.error("delayed messages cannot be staged", exc_info=error)
                error = HeadraceError("the broker has a bug here; its log says more", code="bug")
            done(prepared, error)

        self._engine.workers.submit(make, made)

    def take_in(self, start: int, stop: int) -> None:
        """Records that a commit has shown here."""

        def take(messages: list[Message]) -> bool:
            for message in messages:
                self._take(message)
            return True

        self._read(list(range(start, stop)), take, self._arm)

    def listing(
        self,
        topic: str | None = None,
        limit: int = 1000,
        may: Callable[[str], bool] | None = None,
    ) -> ScheduledListing:
        """The messages that wait, soonest first; ``may`` tells which topics the caller may see."""

        def wanted(waiting: WaitingMessage) -> bool:
            name = waiting.control["topic"]
            return (topic is None or name == topic) and (may is None or may(name))

        self._check_loaded()
        return ScheduledListing(self._all(), wanted, limit, self._engine.pace)

    def _all(self) -> Iterator[WaitingMessage | None]:
        """All that wait now, with gaps. Messages may come and go meanwhile."""
        if self._waiting:
            yield from map(self._waiting.get, range(self._cursor().position, self._end_offset()))

    def _end_offset(self) -> int:
        return self._engine.topics.find(TOPIC).partitions[0].log.end_offset

    def _check_loaded(self) -> None:
        if self._when_loaded is not None:
            raise ReadPending(self._when_loaded.append)

    def cancel(self, message_id: uuid.UUID, done: Callable[[HeadraceError | None], None]) -> None:
        """It will not be published. :class:`MessageNotFound` if it was, or never waited."""
        self._engine.check_open()
        self._drop([self._movable(message_id)])
        self._engine.state.flush(done)

    def publish_now(self, message_id: uuid.UUID) -> None:
        """Its time has come. :class:`MessageNotFound` if it was published, or never waited."""
        self._engine.check_open()
        waiting = self._waiting[self._movable(message_id)]
        waiting.deliver_at = self._engine.now_ms()
        heapq.heappush(
            self._heap, (waiting.deliver_at, waiting.offset)
        )  # the old entry is passed over
        self._arm()

    def _movable(self, message_id: uuid.UUID) -> int:
        """The offset of a message that waits and is not on its way yet."""
        self._check_loaded()
        offset = self._offset_of(message_id)
        if offset is None or offset not in self._waiting or offset in self._moving:
            raise MessageNotFound(
                f"no message with the id {message_id} waits for its time; it may have been "
                "published already",
                code="not_scheduled",
            )
        return offset

    def _offset_of(self, message_id: uuid.UUID) -> int | None:
        offset = self._by_id.get(message_id)
        if offset is None:
            parts = split_id(message_id)
            if parts is not None and parts[0] == topic_hash(TOPIC):
                offset = parts[2]
        return offset

    def topic_of(self, message_id: uuid.UUID) -> str | None:
        """The topic that a waiting message goes to; None if it does not wait."""
        self._check_loaded()
        offset = self._offset_of(message_id)
        waiting = None if offset is None else self._waiting.get(offset)
        return None if waiting is None else str(waiting.control["topic"])

    def forget_topic(self, topic: str, done: Callable[[], None]) -> None:
        """The topic is deleted, and what was to be published to it with it.

        Not at once: millions may wait. Meanwhile none of these is published, which would create the topic.
        """
        if not self._waiting:
            done()
            return
        waiting, pace = self._all(), self._engine.pace
        end = self._forgetting[topic] = self._end_offset()

        def step() -> None:
            deadline = pace.deadline()
            while part := list(islice(waiting, LOOKED_AT_ONCE)):
                self._drop(
                    [w.offset for w in part if w is not None and w.control["topic"] == topic]
                )
                if pace.is_past(deadline):
                    pace.soon(step)
                    return
            if self._forgetting.get(topic) == end:  # else it was deleted again
                del self._forgetting[topic]
            done()

        step()

    def _drop(self, offsets: list[int]) -> None:
        if not offsets:
            return
        cursor = self._cursor()
        for offset in offsets:
            waiting = self._waiting.pop(offset)
            self._engine.budget.used -= WAITING_BYTES
            if self._by_id.get(waiting.id) == offset:  # two may have been given the same id
                del self._by_id[waiting.id]
                self._recent[
                    waiting.control["id"], waiting.control["topic"], waiting.control["at"]
                ] = None
            cursor.done(offset)
        for key in list(islice(self._recent, max(len(self._recent) - RECENT_MAX, 0))):
            del self._recent[key]
        self._engine.changed(cursor)

    # --- when the time comes ------------------------------------------------------------------
    def _arm(self) -> None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = self._engine.closing or self._engine.failed is not None
        if self._heap and not self._rounding and not ends:
            delay = (self._heap[0][0] - self._engine.now_ms()) / 1000
            self._timer = self._engine.call_later(min(max(delay, 0.0), LOOK_AGAIN_S), self._round)

    def _round(self) -> None:
        """Publish what is due."""
        self._timer = None
        if self._rounding or self._engine.closing:
            return
        now = self._engine.now_ms()
        due: list[WaitingMessage] = []
        while self._heap and self._heap[0][0] <= now and len(due) < ROUND_MAX:
            _, offset = heapq.heappop(self._heap)
            waiting = self._waiting.get(offset)
            if waiting is not None:
                due.append(waiting)
        if not due:
            self._arm()
            return
        self._rounding = True
        left = {waiting.offset: waiting for waiting in due}
        found: list[Message] = []
        size = 0
        self._moving = set(left)

        def take(messages: list[Message]) -> bool:
            nonlocal size
            for message in messages:
                if size > limits.COMMIT_BYTES_MAX:
                    return False
                size += len(message.value or b"")
                found.append(message)
            return True

        def read() -> None:
            pairs = [(left.pop(message.offset), message) for message in found]
            if size > limits.COMMIT_BYTES_MAX:  # the rest is for the next round
                for waiting in left.values():
                    heapq.heappush(self._heap, (waiting.deliver_at, waiting.offset))
                self._moving.difference_update(left)
                left.clear()
            self._place_and_publish(pairs, list(left.values()))

        self._read(sorted(left), take, read)

    def _read(
        self,
        offsets: list[int],
        take: Callable[[list[Message]], bool],
        done: Callable[[], None],
        at: int = 0,
    ) -> None:
        """Give the messages at the offsets to ``take``, batch by batch, until it says False.

        Messages that cannot be read are left out.
        """
        log = self._engine.topics.find(TOPIC).partitions[0].log
        pace = self._engine.pace
        deadline = pace.deadline()
        while at < len(offsets):
            if self._when_loaded is None and pace.is_past(deadline):
                pace.soon(partial(self._read, offsets, take, done, at))
                return
            try:
                batch = log.read_cached(offsets[at])
                last = min(at + READ_AT_ONCE, len(offsets))
                stop = bisect_left(offsets, batch.end_offset, at, last)
                indexes = [offset - batch.base_offset for offset in offsets[at:stop]]
                messages = []
                if not batch.flags & LOST:
                    messages = batch.pick(TOPIC, 0, indexes, [1] * len(indexes))
            except ReadPending as pending:
                pending.then(partial(self._read, offsets, take, done, at))
                return
            except (HeadraceError, OSError) as error:
                logger.error("a delayed message cannot be read: %s", error)
                if isinstance(error, OSError) and self._when_loaded is not None and self._tries:
                    # Left out now, it would wait for the next start; the disk may read it in a moment.
                    self._tries -= 1
                    again = partial(self._read, offsets, take, done, at)
                    self._again = self._engine.call_later(READ_AGAIN_S, again)
                    return
                at += 1
                continue
            if not take(messages):
                break
            at = stop
        done()

    def _place_and_publish(
        self, pairs: list[tuple[WaitingMessage, Message]], failed: list[WaitingMessage]
    ) -> None:
        """``failed``: the messages that could not be read."""
        places: dict[tuple[str, int], list[tuple[WaitingMessage, Message]]] = {}
        for waiting, message in pairs:
            deleted_at = self._forgetting.get(waiting.control["topic"], 0)
            if waiting.offset not in self._waiting or waiting.offset < deleted_at:
                continue  # its topic was deleted meanwhile
            try:
                places.setdefault(self._place(waiting, message), []).append((waiting, message))
            except (HeadraceError, OSError) as error:
                logger.error("a delayed message cannot be published yet: %s", error)
                failed.append(waiting)
        if self._engine.cluster is None:
            self._publish(places, failed, [], {})
            return
        logs = {place: self._log(*place) for place in places if place not in self._looked}
        sequences = {place: log.next_sequence(PRODUCER_ID) for place, log in logs.items()}
        last = [
            (log, *found)
            for log in logs.values()
            if (found := log.last_producer_batch(PRODUCER_ID)) is not None
        ]

        def looked(there: dict[bytes, int]) -> None:
            ids = map(uuid.UUID, map(bytes.hex, there))
            offsets = [self._offset_of(each) for each in ids]
            found = [self._waiting.get(at) for at in offsets if at is not None]
            moved = [w.offset for w in found if w is not None and w.is_in(there)]
            self._looked.update(logs)
            gone = set(moved)
            left = {k: [p for p in v if p[0].offset not in gone] for k, v in places.items()}
            self._publish({k: v for k, v in left.items() if v}, failed, moved, sequences)

        self._load_published(last, {}, looked)

    def _log(self, topic: str, number: int) -> Log:
        return self._engine.topics.find(topic).partitions[number].log

    def _place(self, waiting: WaitingMessage, message: Message) -> tuple[str, int]:
        topic = self._engine.topic_for_publish(waiting.control["topic"])
        number = waiting.control.get("partition")
        if number is None:
            key = message.key
            if key is not None:
                number = topic.partition_of_key(key)
            elif self._engine.cluster is None:
                number = topic.next_partition(len(message.value or b""))
            else:  # every leader chooses the same
                number = waiting.offset % len(topic.partitions)
        return topic.name, min(number, len(topic.partitions) - 1)

    def _publish(
        self,
        places: dict[tuple[str, int], list[tuple[WaitingMessage, Message]]],
        failed: list[WaitingMessage],
        moved: list[int],
        sequences: dict[tuple[str, int], int],
    ) -> None:
        """``moved``: the offsets of those that are published already."""
        entries: list[tuple[str, int, Append]] = []
        waiting_for = 1

        def finished(group: list[WaitingMessage], place: tuple[str, int], entry: Append) -> None:
            if entry.error is None and not entry.duplicate:
                moved.extend(waiting.offset for waiting in group)
            else:
                if entry.error is not None:
                    logger.error("delayed messages could not be published yet: %s", entry.error)
                self._looked.discard(place)
                failed.extend(group)
            ended()

        def ended() -> None:
            nonlocal waiting_for
            waiting_for -= 1
            if waiting_for == 0:
                self._end_round(moved, failed)

        for (name, number), pairs in places.items():
            # After a pause many are due at once: still the earlier before the later.
            pairs.sort(key=lambda pair: (pair[0].deliver_at, pair[0].offset))
            group = [waiting for waiting, _ in pairs]
            place = name, number
            try:
                following = self._log(*place).next_sequence(PRODUCER_ID)
            except HeadraceError:  # it was deleted meanwhile
                failed.extend(group)
                continue
            entry = self._entry(pairs, sequences.get(place, following))
            entry.done = partial(finished, group, place)
            entries.append((name, number, entry))
        waiting_for += len(entries)
        for name, number, entry in entries:
            self._engine.append(self._engine.topics.find(name), number, entry)
        ended()

    def _entry(self, pairs: list[tuple[WaitingMessage, Message]], sequence: int) -> Append:
        headers = [
            {key: text for key, text in message.headers.items() if key != CONTROL}
            for _, message in pairs
        ]
        controls = [waiting.control for waiting, _ in pairs]
        columns = Columns(
            [message.value or b"" for _, message in pairs],
            [m.key for _, m in pairs] if any(m.key is not None for _, m in pairs) else None,
            headers if any(headers) else None,
            ids=[waiting.id.bytes for waiting, _ in pairs],
            expiry=[c.get("expiry", 0) for c in controls]
            if any("expiry" in c for c in controls)
            else None,
            targets=[c.get("target", "").encode() for c in controls]
            if any("target" in c for c in controls)
            else None,
        )
        return Append(
            columns,
            None,
            lambda entry: None,
            producer_id=PRODUCER_ID,
            first_sequence=sequence,
        )

    def _end_round(self, moved: list[int], failed: list[WaitingMessage]) -> None:
        # Some may be gone: their topic was deleted meanwhile.
        self._drop([offset for offset in moved if offset in self._waiting])
        for waiting in failed:
            # Behind what is due later, so that one that cannot be published does not hold up all.
            retry = self._engine.now_ms() + 1000
            if waiting.offset in self._waiting:
                heapq.heappush(self._heap, (retry, waiting.offset))
        self._go_on_when_durable()

    def _go_on_when_durable(self) -> None:
        """Begin no round before it is known to be stored which messages are published.

        The next one puts other batches behind theirs, which then say so no more.
        """
        self._rounding = True

        def flushed(error: HeadraceError | None) -> None:
            if error is not None and self._engine.failed is None and not self._engine.closing:
                self._again = self._engine.call_later(1.0, self._engine.state.flush, flushed)
                return
            self._moving.clear()
            self._rounding = False
            self._arm()

        self._engine.state.flush(flushed)

    def close(self) -> None:
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        self._timer = self._again = None


def _control(
    topic: str, columns: Columns, index: int, deliver_at: int | None, partition: int | None
) -> dict[str, Any]:
    """What has to be known of a message that waits, beside its value, key and headers."""
    control: dict[str, Any] = {"topic": topic, "at": deliver_at}
    if partition is not None:
        control["partition"] = partition
    if columns.ids is not None and columns.ids[index] != NO_ID:
        control["id"] = str(uuid.UUID(bytes=columns.ids[index]))
    if columns.expiry is not None and columns.expiry[index]:
        control["expiry"] = columns.expiry[index]
    if columns.targets is not None and columns.targets[index]:
        control["target"] = columns.targets[index].decode()
    return control


def _stored_as(columns: Columns, controls: Sequence[dict[str, Any]]) -> Columns:
    given = columns.headers or [None] * len(controls)
    headers = [
        {**(own or {}), CONTROL: orjson.dumps(control).decode()}
        for own, control in zip(given, controls, strict=True)
    ]
    return Columns(columns.values, columns.keys, headers)
