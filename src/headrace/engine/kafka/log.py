"""A partition in Kafka, with the same interface as the one on disk.

Rules:
- The loop's thread owns everything here, after the thread that opens it.
- A commit (``log/commit.py``) is one Kafka record. It is sent, and when it is *read back* as valid, ``end_offset``
  moves and the entries are answered; then the next commit is gathered. One is under way at a time (``rule.py``).
- If Kafka does not answer for ``timeout`` seconds, the entries under way get ``OutcomeUnknown``, because the record may
  still arrive; those that only waited get a definite error, and new ones are refused at once. The record
  stays under way. When it is read back, the partition takes publishes again.
- If Kafka has no such topic any more, somebody has deleted it there. Reads of what is not in the cache and publishes are
  refused at once, with ``kafka_topic_missing``. The log looks again from time to time.
- A checkpoint is written after ``CHECKPOINT_BYTES``, when the partition was idle for a while, and at a clean close. A
  start reads only what lies behind the last one. Retention deletes what lies before one (``places.py``).
- Reads are served from the cache that all partitions share, which bounds their memory. What is not there is fetched
  in large pieces, and the next piece before a reader needs it; meanwhile :class:`ReadPending` tells the caller to read
  again. A piece stays as long as the cache has room for it.

Every node reads every partition, and one owns it (``host``): the others show what is valid, and pass
entries on to the owner. ``take`` claims the partition, ``let_go`` stops serving it. What is under way when a higher claim is
read is void, so it is passed on, too, and its publisher does not notice.

Rejected: to answer when Kafka has confirmed the record. A node that lost the partition meanwhile would answer for a record
that is void.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

from headrace import limits
from headrace.clock import Clock, Loop, Timer
from headrace.engine.kafka.link import (
    MISSING_S,
    RECORD_BYTES_MAX,
    FetchOrder,
    Found,
    KafkaLink,
    TopicMissing,
)
from headrace.engine.kafka.places import Places, StretchPlace
from headrace.engine.kafka.records import batches_of, entry_of, value_of
from headrace.engine.kafka.replica import Replica
from headrace.engine.kafka.rule import Checkpoint, Claim, Ownership, Stretch
from headrace.errors import (
    Closed,
    DataCorrupt,
    HeadraceError,
    OutcomeUnknown,
    QueueFull,
    StorageFailed,
    TooLarge,
)
from headrace.log.base import BaseLog, out_of_range
from headrace.log.batch import Batch
from headrace.log.cache import BatchCache
from headrace.log.commit import CommitGroup
from headrace.log.interface import Append, ClosedSegment, ReadPending
from headrace.log.producers import Producers
from headrace.log.run import is_small, merge
from headrace.log.segment import offset_in
from headrace.log.workers import Workers
from headrace.model import TopicSettings

logger = logging.getLogger("headrace.kafka")
CHECKPOINT_BYTES = 4 << 20
CHECKPOINT_SHARE = 16
"""A checkpoint is written only after this many times the size of the last one."""
CHECKPOINT_IDLE_S = 30.0
FETCH_BYTES = 2 << 20
SLOW_S = 1.0
"""After so long without an answer, a log asks whether Kafka has its topic."""
GONE_LOOK_S = MISSING_S
"""How often a log whose topic is deleted in Kafka looks for it."""
_CONTENT = struct.Struct("<QQqI")
_numbers = count(1 << 32)
"""In the shared cache; partitions on disk count from 1."""


class Host(Protocol):
    """Who divides the partitions between nodes."""

    def forward(self, log: KafkaLog, entry: Append) -> None:
        """Have the owner store the entry, whoever that is now."""

    def claimed(self, log: KafkaLog, node: str, *, ours: bool) -> None:
        """A node owns the partition now."""

    def doubt(self) -> Callable[[Callable[[], None]], None] | None:
        """Whether this node may have lost what it owns and not know it; if so, who reads gives a callback, and reads again then."""


class KafkaLog(BaseLog):
    """See :class:`headrace.log.interface.Log`."""

    durable = True
    thread_safe_reads = False

    def __init__(
        self,
        link: KafkaLink,
        topic: str,
        number: int,
        settings: TopicSettings,
        *,
        clock: Clock,
        loop: Loop,
        cache: BatchCache,
        workers: Workers,
        host: Host,
    ):
        super().__init__(clock, loop, Producers())
        self._link = link
        self._host = host
        self.owned = False
        """Whether this node serves it."""
        self.about = (topic, number)
        """The topic and partition of Headrace."""
        self._letting_go: list[Callable[[], None]] = []
        self.replica = Replica(link, topic, number, self)
        self.settings = settings
        self._cache, self._workers = cache, workers
        self.number = next(_numbers)
        self.start_offset = self.end_offset = 0
        self._places = Places()
        # --- writing
        self._waiting: list[Append] = []
        self._waiting_bytes = 0
        self._busy = False
        self._group: CommitGroup | None = None
        self._hidden = False
        self._first_arrival = self._began = self._sent_s = 0.0
        self.on_read_back: Callable[[float], None] = lambda seconds: None
        """How long Kafka took from getting a commit to giving it back."""
        self._pieces: list[bytes] = []
        """The parts of a checkpoint that are still to be sent."""
        self._timer: Timer | None = None
        self._stalled = False
        self._gone: DataCorrupt | None = None
        """Set while Kafka has no such topic."""
        self._look_timer: Timer | None = None
        # --- checkpoints
        self._checkpoint_size = 0
        self._checkpoint_at = 0
        """``Places.size`` at the last checkpoint."""
        self._checkpoint_offset = self._checkpoint_position = 0
        self._checkpoint_s = loop.time()
        self._wants_checkpoint = False
        # --- reading
        self._fetching: dict[int, list[Callable[[], None]]] = {}
        """Kafka's offset of a piece that is being fetched -> who waits for it."""
        self._damaged: list[tuple[int, int]] = []
        self._after_fetched: StretchPlace | None = None

    # --- several nodes ------------------------------------------------------------------------
    def take(self) -> None:
        """Claim it; ``Host.claimed`` is told when that is read back."""
        self.replica.claim()

    def let_go(self, done: Callable[[], None]) -> None:
        """Another node is to own it: store what is under way, and pass the rest on."""
        self.owned = False
        waiting, self._waiting = self._waiting + self._parked, []
        self._parked, self._waiting_bytes = [], 0
        self._letting_go.append(done)
        if self._group is None or self._stalled:
            self._let_go()
        self._forward_all(waiting)

    def _let_go(self) -> None:
        waiting, self._letting_go = self._letting_go, []
        for done in waiting:
            done()

    def _forward_all(self, entries: list[Append]) -> None:
        for entry in entries:
            if entry.error is None and not (
                entry.duplicate and 0 <= entry.first_offset < self.end_offset
            ):
                entry.first_offset, entry.duplicate, entry.timestamp = -1, False, 0
                self._host.forward(self, entry)
            else:
                entry.done(entry)

    def claimed(self, claim: Claim, *, ours: bool) -> None:
        self.owned = ours
        self._host.claimed(self, claim.node, ours=ours)

    # --- appending ----------------------------------------------------------------------------
    def append(self, entry: Append) -> None:
        if not self.owned and not self._closed:
            self._host.forward(self, entry)
            return
        refusal = self._refusal(entry)
        if refusal is not None:
            entry.fail(refusal)
            return
        self._waiting_bytes += entry.bytes
        if not self._waiting:
            self._first_arrival = self._clock.seconds()
        self._put(entry)

    def _refusal(self, entry: Append) -> HeadraceError | None:
        if self._closed or self._closing:
            return Closed("the log is closed")
        if self._stalled or self._gone is not None:
            return self._away()
        if (
            self._waiting_bytes + entry.bytes > limits.COMMIT_QUEUE_BYTES_MAX and not entry.hidden
        ):  # as on disk
            return QueueFull(
                "more is being published than Kafka can take; try again in a moment",
                code="overloaded",
            )
        return None

    def _away(self) -> HeadraceError:
        if self._gone is not None:
            return self._gone.with_traceback(None)
        return StorageFailed(
            f"Kafka has not answered for {self._link.timeout:g} seconds; nothing was stored, try again",
            code="kafka_unavailable",
        )

    def _enqueue(self, entry: Append) -> None:
        self._waiting.append(entry)
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            # Not at once: everything that arrives in this turn of the loop joins the commit.
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Send the next commit, or a checkpoint that is due, or be idle."""
        while self._waiting and self.owned:
            entries, self._waiting = self._waiting, []
            kinds = [entry.hidden for entry in entries]
            if (
                any(kinds) and not kinds[0]
            ):  # those that become visible at once have their own commit
                first = kinds.index(True)
                self._waiting, entries = entries[first:], entries[:first]
            group, left = self._gather(entries)
            self._waiting[:0] = left
            self._waiting_bytes -= sum(each.bytes for each in entries[: len(entries) - len(left)])
            if group.batches:
                self._hidden = entries[0].hidden
                self._group, self._began = group, self._first_arrival
                if self.settings.compression == "none":
                    self._send()
                else:
                    self._workers.submit(partial(_pack, group.batches), self._packed)
                return
            for entry in group.entries:
                entry.done(entry)
        if self.owned and self._next_part():
            return
        self._busy = False
        if self._letting_go:
            self._let_go()
        if self._closing is not None:
            self._finish_closing()

    def _packed(self, _result: object, _error: BaseException | None) -> None:
        if self._group is not None:
            self._send()

    def _send(self) -> None:
        group = self._group
        assert group is not None
        value = value_of(group.batches)
        if len(value) > RECORD_BYTES_MAX:
            self._group = None
            error = TooLarge(
                f"a publish has at most {RECORD_BYTES_MAX} bytes over Kafka; publish fewer messages at once",
                code="batch_too_large",
            )
            self._answer_all(group.entries, error)
            self._next()
            return
        self._watch()
        self._sent_s = self._clock.seconds()
        self.replica.stretch(sum(batch.count for batch in group.batches), value)

    @property
    def is_stalled(self) -> bool:
        """Whether Kafka has not given a record back in time, and publishes are refused."""
        return self._stalled

    # --- a topic that is deleted in Kafka -----------------------------------------------------
    def unknown(self) -> None:
        if self._gone is None and not self._closed:
            self._link.look(self.replica.topic, self._looked)

    def _looked(self, is_missing: bool | None) -> None:
        self._look_timer = None
        if self._closed or (is_missing is None and self._gone is None):
            return
        if is_missing is False:
            if self._gone is not None:
                logger.warning("%s: Kafka has this topic again", self.replica.topic)
            self._gone = None
            return
        if self._gone is None:
            topic, _ = self.about
            self._gone = DataCorrupt(
                f"somebody has deleted topic {topic!r} in Kafka ({self.replica.topic}), with its messages. "
                "Delete it in Headrace, too, and publish its messages again from a backup",
                code="kafka_topic_missing",
            )
            logger.error("%s/%d: %s", self.replica.topic, self.replica.number, self._gone)
            if self._group is not None and not self._stalled:
                if self._timer is not None:
                    self._timer.cancel()
                self._stall()
        self._look_timer = self._loop.call_later(GONE_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._link.look(self.replica.topic, self._looked)

    def _watch(self) -> None:
        self._timer = self._loop.call_later(min(SLOW_S, self._link.timeout), self._be_slow)

    def _be_slow(self) -> None:
        self.unknown()  # librdkafka itself says so only after half a minute
        left = max(self._link.timeout - SLOW_S, 0.0)
        self._timer = self._loop.call_later(left, self._stall)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stalled:
            logger.info("%s/%d: Kafka answers again", self.replica.topic, self.replica.number)
            self._stalled = False

    def _stall(self) -> None:
        """Kafka does not answer. What is under way stays so; those who wait for it are told."""
        self._timer = None
        self._stalled = True
        why = f"Kafka has not answered for {self._link.timeout:g} seconds"
        if self._gone is not None:
            why = f"Kafka has no topic {self.replica.topic} any more"
        logger.error(
            "%s/%d: %s; publishes are refused until that changes",
            self.replica.topic, self.replica.number, why,
        )  # fmt: skip
        if self._group is not None:
            entries, self._group.entries = self._group.entries, []
            self._answer_all(entries, OutcomeUnknown(f"{why}: this may be stored, now or later"))
        waiting, self._waiting = self._waiting + self._parked, []
        self._parked, self._waiting_bytes = [], 0
        self._answer_all(waiting, self._away())
        if self._closing is not None:
            self._finish_closing()

    def _answer_all(self, entries: list[Append], error: HeadraceError) -> None:
        for entry in entries:
            # A repetition keeps its answer if the first entry is stored.
            stored = entry.duplicate and entry.first_offset < self.end_offset
            if entry.error is None and not stored:
                entry.error = error
                entry.first_offset = -1
            entry.done(entry)

    # --- what the replica tells ---------------------------------------------------------------
    def stretched(self, at: int, entry: Stretch, value: bytes, *, ours: bool) -> None:
        group = self._group if ours else None
        batches = batches_of(value) if group is None else group.batches
        if not batches or batches[-1].end_offset != entry.first_offset + entry.records:
            raise DataCorrupt(
                f"{self.replica.topic}/{self.replica.number} of Kafka holds a damaged record at its offset {at}"
            )
        last = batches[-1]
        self._places.add(entry.first_offset, at, entry.epoch, last.max_timestamp, len(value))
        for batch in batches:
            self._producers.add_batch(batch)
            self._cache.put(self.number, batch)
        self._last_timestamp = last.max_timestamp
        self._next_offset = last.end_offset
        if not (self._held if group is None else self._hidden):
            self.end_offset = self._next_offset
            if not ours:
                self.on_advance()
        if ours:
            self._unwatch()
            self._group = None
            try:
                if group is not None:
                    self._answer(group.entries, shown=not self._hidden)
                    now = self._clock.seconds()
                    self.on_commit(now - self._began, entry.records)
                    self.on_read_back(now - self._sent_s)
            finally:
                self._next()

    def checkpointed(self, at: int, entry: Checkpoint, parts: list[bytes], *, ours: bool) -> None:
        if not ours:
            self._load(b"".join(parts), entry, at)
        self._places.mark(entry.first_offset, at, entry.epoch)
        self._checkpoint_at = self._places.size
        self._checkpoint_offset = entry.first_offset
        self._checkpoint_position = at
        self._checkpoint_size = sum(map(len, parts))
        self._checkpoint_s = self._loop.time()
        if ours:
            self._unwatch()
            self._link.remember(self.replica, at)
            self._next()

    def part_stored(self) -> None:
        self._unwatch()
        self._next()

    def lost(self, claim: Claim) -> None:
        """Another node owns it: what was under way is void, and goes there."""
        self._unwatch()
        group, self._group = self._group, None
        entries = (group.entries if group is not None else []) + self._waiting + self._parked
        self._waiting, self._parked, self._pieces = [], [], []
        self._waiting_bytes = 0
        self._busy = False
        self._let_go()
        self._forward_all(entries)
        if self._closing is not None:
            self._finish_closing()

    # --- checkpoints --------------------------------------------------------------------------
    def _next_part(self) -> bool:
        """Whether a part of a checkpoint was sent."""
        if not self._pieces:
            if not self._is_checkpoint_due():
                return False
            self._wants_checkpoint = False
            content = self._dump()
            self._pieces = [
                content[low : low + RECORD_BYTES_MAX // 8]
                for low in range(0, len(content), RECORD_BYTES_MAX // 8)
            ]
            self._parts = len(self._pieces)
        value = self._pieces.pop(0)
        self._watch()
        self.replica.checkpoint(self._parts - len(self._pieces), self._parts, value)
        return True

    def _is_checkpoint_due(self) -> bool:
        if self._next_offset == self._checkpoint_offset or self._held or self._stalled:
            return False
        if not self.owned or self._gone is not None:
            return False
        if self._wants_checkpoint or self._closing is not None:
            return True
        size = self._places.size - self._checkpoint_at
        least = max(CHECKPOINT_BYTES, CHECKPOINT_SHARE * self._checkpoint_size)
        return size >= min(least, self.settings.segment_bytes)

    def _dump(self) -> bytes:
        producers, places = self._producers.dump(), self._places.dump()
        head = _CONTENT.pack(
            self.start_offset, self._places.size, self._last_timestamp, len(producers)
        )
        return head + producers + places

    def _load(self, content: bytes, entry: Checkpoint, at: int) -> None:
        """Know what lies before a checkpoint. Whoever has read it knows it already, but for what was deleted."""
        start, size, timestamp, length = _CONTENT.unpack_from(content)
        if self._next_offset == entry.first_offset and self._places.places:
            self.start_offset = max(self.start_offset, start)
            return
        self._last_timestamp = timestamp
        producers = Producers.load(content[_CONTENT.size : _CONTENT.size + length])
        if producers is None:
            raise DataCorrupt(
                f"{self.replica.topic}/{self.replica.number} of Kafka holds a damaged checkpoint at its offset {at}"
            )
        self._producers = producers
        self._places.load(content[_CONTENT.size + length :], size, timestamp)
        self.start_offset = start
        self._next_offset = self.end_offset = entry.first_offset

    def opened(self, reached: int = 0) -> None:
        """It has been read to the end. ``reached``: how far it reached when this node stopped."""
        if self.replica.begins:
            if not self._places.marks or self._places.marks[-1].position < self.replica.begins:
                raise DataCorrupt(
                    f"{self.replica.topic}/{self.replica.number} of Kafka begins at its offset "
                    f"{self.replica.begins}, where no checkpoint is: something else than Headrace has deleted "
                    "its records",
                    code="kafka_topic_unsafe",
                )
            self.start_offset = self._places.begin_at(self.replica.begins)
        if self._checkpoint_position > self.replica.began:  # its owner was killed before it said so
            self._link.remember(self.replica, self._checkpoint_position)
        if reached > self.end_offset:
            logger.error(
                "%s/%d: Kafka has lost offsets %d to %d, which were once stored; the partition goes on without them",
                self.replica.topic, self.replica.number, self.end_offset, reached - 1,
            )  # fmt: skip

    # --- reading ------------------------------------------------------------------------------
    def read(self, offset: int, max_bytes: int = limits.READ_BYTES_DEFAULT) -> list[Batch]:
        end = self.end_offset
        if offset == end:
            return []
        found = [self.read_cached(offset)]
        size = found[0].stored_bytes
        while found[-1].end_offset < end:
            batch = self._known(found[-1].end_offset)
            if batch is None:
                break
            size += batch.stored_bytes
            if size > max_bytes or batch.end_offset > end:
                break
            found.append(batch)
        return found

    def read_cached(self, offset: int) -> Batch:
        start, end = self.start_offset, self.end_offset
        if not start <= offset < end:
            raise out_of_range(offset, start, end)
        wait = self._host.doubt() if self.owned else None
        if wait is not None:
            raise ReadPending(wait)
        batch = self._known(offset)
        if batch is None:
            for low, high in self._damaged:
                if low <= offset < high:
                    raise DataCorrupt(f"offsets {low} to {high - 1} are damaged in Kafka")
            if self._gone is not None:
                raise self._gone.with_traceback(None)
            raise ReadPending(self._fetch(self._place(offset)).append)
        if batch.end_offset < end:
            if is_small(batch):
                following = self._cache.following(self.number, batch, end)
                if len(following) > 1:
                    batch = merge(following)
                    self._cache.put(self.number, batch)
            after = self._after_fetched
            # Joined with the batches after it, it may reach the end, after which there is nothing to fetch.
            is_last = after is not None and after.offset == batch.end_offset < end
            if is_last and not self._fetching and self._known(batch.end_offset) is None:
                self._fetch(self._place(batch.end_offset))  # before it is needed
        return batch

    def _place(self, offset: int) -> StretchPlace:
        """Where to begin to fetch: at the end of the last piece, if that is nearest."""
        place, after = self._places.before(offset), self._after_fetched
        if after is not None and after.offset <= offset and after[:2] > place[:2]:
            return after
        return place

    def _known(self, offset: int) -> Batch | None:
        return self._cache.find(self.number, offset)

    def _fetch(self, place: StretchPlace) -> list[Callable[[], None]]:
        """Fetch from a place on; returns the list of those who wait."""
        waiting = self._fetching.get(place.position)
        if waiting is None:
            waiting = self._fetching[place.position] = []
            self._link.fetch(
                FetchOrder(
                    self.replica.topic,
                    self.replica.number,
                    place.position,
                    self.replica.position,
                    FETCH_BYTES,
                    partial(self._arrived, place),
                )
            )
        return waiting

    def _arrived(self, place: StretchPlace, found: list[Found], why: Exception | None) -> None:
        if isinstance(why, TopicMissing):
            if self._gone is None:
                self._looked(True)
        elif why is not None:
            logger.warning(
                "%s/%d cannot be read yet: %s", self.replica.topic, self.replica.number, why
            )
        if found and not self._closed:
            ownership = Ownership(place.epoch, place.offset)
            for _, key, value in found:
                entry = entry_of(key)
                if entry is None or isinstance(entry, Checkpoint) or not ownership.apply(entry):
                    continue
                if isinstance(entry, Stretch):
                    self._keep(entry, batches_of(value or b""))
            self._after_fetched = StretchPlace(
                ownership.next_offset, found[-1][0] + 1, ownership.epoch, 0, 0
            )
        for callback in self._fetching.pop(place.position):
            callback()

    def _keep(self, entry: Stretch, batches: list[Batch]) -> None:
        for batch in batches:
            self._cache.put(self.number, batch)
        end = batches[-1].end_offset if batches else entry.first_offset
        damaged = end, entry.first_offset + entry.records
        if damaged[0] < damaged[1] and damaged not in self._damaged:
            self._damaged.append(damaged)

    def offset_at(self, timestamp_ms: int) -> int:
        place = self._places.at_time(timestamp_ms)
        offset = self.end_offset if place is None else max(place.offset, self.start_offset)
        while offset < self.end_offset:
            batch = self.read_cached(offset)
            if batch.max_timestamp >= timestamp_ms:
                return max(offset_in(batch, timestamp_ms), self.start_offset)
            offset = batch.end_offset
        return self.end_offset

    def whereabouts(self, offset: int) -> None:
        return None

    def size_bytes(self) -> int:
        return self._places.size - self._places.size_at(self.start_offset)

    # --- keeping house ------------------------------------------------------------------------
    def change(self, settings: TopicSettings) -> None:
        self.settings = settings

    def closed_segments(self) -> list[ClosedSegment]:
        return self._places.closed(self.start_offset) if self.owned else []

    def drop_before(self, offset: int) -> None:
        mark = self._places.drop_before(offset) if self.owned else None
        if mark is not None and mark.offset > self.start_offset:
            self.start_offset = mark.offset
            self._link.delete_before(self.replica, mark.position)

    def roll_if_old(self, now_ms: int) -> None:
        """Write a checkpoint if something is new since the last one, and that is some time ago."""
        if self._loop.time() - self._checkpoint_s > CHECKPOINT_IDLE_S:
            self.roll_soon(1)

    def roll_soon(self, bytes_min: int) -> None:
        if self._places.size - self._checkpoint_at >= bytes_min and self._refusal_now() is None:
            self._wants_checkpoint = True
            self._wake()

    def _refusal_now(self) -> Any:
        return self._closing or self._closed or self._stalled or not self.owned or None

    def close(self, done: Callable[[], None]) -> None:
        if not self._begins_to_close(done):
            return
        if self._stalled:
            self._answer_all(self._waiting, Closed("the log is closed"))
            self._finish_closing()
        else:
            self._wake()

    def _finish_closing(self) -> None:
        done, self._closing = self._closing, None
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        self._refuse_parked()
        self.replica.forget()
        self._link.logs.leave(self.replica)
        self._cache.forget(self.number)
        if done is not None:
            done()


def _pack(batches: list[Batch]) -> None:
    for batch in batches:
        batch.pack()
