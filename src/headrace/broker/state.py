"""Subscriptions and their positions, kept in one journal.

Payloads (``log.journal`` frames and checksums them), by their first byte:

- ``S`` + JSON: a subscription is created or changed: id, name, topic pattern, settings, created_ms, and
  if there is one its owner, and whether it is paused
- ``D`` + JSON: it is deleted: id
- ``K`` + JSON: a cursor gets its number: cursor, subscription, topic, partition, incarnation
- ``C`` + binary: a cursor's changes or, with its reset flag, all of it (``cursor.Cursor._pack``)
- ``M`` + JSON: how far first deliveries at a cursor may go, and what killed brokers may have delivered:
  cursor, reserved, doubts (``attempts.py``)
- ``E`` + JSON: a named producer gets an epoch: name, id, epoch
- ``T`` + JSON: a commit of staged batches is decided or finished: name, number, pieces, finished

Definitions are durable before the caller gets an answer. Positions are written together for all
subscriptions: a crash may lose the last acks, and the messages are delivered again. ``flush`` is the barrier
for callers that need more. They are to be on disk ``FLUSH_S`` after the first of them. So the write begins
after half of that time, less what the last write took, and one that must wait for a write before it begins
when that one ends. A slow disk or a busy loop makes it later; ``oldest_unwritten`` shows that.

When the journal has grown, a snapshot replaces it. With 250,000 positions a snapshot takes some tenths of a second, so
it is gathered in pieces (``pace.py``) while writes go on. Everything that is written meanwhile is tapped and follows
the snapshot in the new file: entries say what is, not what to add, so replaying some of them twice changes nothing.

When the journal cannot be written (disk full), memory keeps everything and the write is retried; when
its *sync* fails the broker stops, as for any other failed sync. Deliveries that must be counted first
(``Entry.counts``) wait for the retry, unless the disk is full. After ``close`` nothing is written: the directory may
belong to another process by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from headrace import limits
from headrace.broker.cursor import Cursor
from headrace.broker.pace import Pace
from headrace.broker.topic import Partition
from headrace.clock import Loop
from headrace.errors import (
    Closed,
    Done,
    HeadraceError,
    OutcomeUnknown,
    StorageFailed,
    refused_by_disk,
)
from headrace.log.interface import StateLog
from headrace.log.witness import Ends, Witnesses
from headrace.log.workers import Lane, Workers

logger = logging.getLogger("headrace.broker")
MAGIC = b"headrace subscriptions 1"
FLUSH_S = 0.05
"""How old an ack may be until it is on disk, if the disk takes at most half of this for two writes."""
PAUSE_S_MIN = 0.005
RETRY_S = 1.0
CHANGED_MAX = 2_000
"""Cursors that may change during a round of gathering a snapshot if it is to be the last."""
ROUNDS_MAX = 8


class Entry(NamedTuple):
    """Something to write; without a payload, a request to write all positions."""

    payload: bytes | None
    done: Done | None
    counts: bool = False
    """A delivery waits for it: if the disk refuses the write for another reason than a lack of room, ``done`` is
    called after a later write."""


def _entry(kind: bytes, **item: Any) -> bytes:
    return kind + orjson.dumps(item)


def define(
    number: int,
    name: str,
    pattern: str,
    settings: dict[str, Any],
    created_ms: int,
    owner: str | None = None,
    paused: bool = False,
) -> bytes:
    more: dict[str, Any] = {} if owner is None else {"owner": owner}
    if paused:
        more["paused"] = True
    return _entry(
        b"S", id=number, name=name, topic=pattern, settings=settings, created_ms=created_ms, **more
    )


def delete(number: int) -> bytes:
    return _entry(b"D", id=number)


def number_cursor(cursor: Cursor, subscription: int, incarnation: int) -> bytes:
    return _entry(
        b"K",
        cursor=cursor.number,
        subscription=subscription,
        topic=cursor.partition.topic,
        partition=cursor.partition.number,
        incarnation=incarnation,
    )


def reserve(cursor: Cursor) -> bytes:
    return _entry(b"M", cursor=cursor.number, reserved=cursor.reserved, doubts=cursor.doubts)


def name_producer(name: str, producer_id: int, epoch: int) -> bytes:
    return _entry(b"E", name=name, id=producer_id, epoch=epoch)


def decide(commit: dict[str, Any]) -> bytes:
    return _entry(b"T", **commit)


class Loaded:
    """The journal's content, folded: the newest of each thing."""

    def __init__(self) -> None:
        self.subscriptions: dict[int, dict[str, Any]] = {}
        self.cursors: dict[int, dict[str, Any]] = {}
        self.deltas: dict[int, list[bytes]] = {}
        self.reserves: dict[int, dict[str, Any]] = {}
        self.producers: dict[str, tuple[int, int]] = {}
        self.commits: dict[str, dict[str, Any]] = {}
        self.next_number = 1
        self.witnesses = Witnesses()
        self.damaged = 0
        self.missing = False
        """No journal existed."""

    def add(self, payload: bytes) -> None:
        kind = payload[:1]
        self.witnesses.add(payload)
        if kind == b"C":
            number = Cursor.number_of(payload)
            self.deltas.setdefault(number, []).append(payload)
            return
        item = orjson.loads(payload[1:])
        if kind == b"S":
            self.subscriptions[item["id"]] = item
            self.next_number = max(self.next_number, item["id"] + 1)
        elif kind == b"D":
            self.subscriptions.pop(item["id"], None)
        elif kind == b"K":
            self.cursors[item["cursor"]] = item
            self.deltas.pop(item["cursor"], None)
            self.reserves.pop(item["cursor"], None)
            self.next_number = max(self.next_number, item["cursor"] + 1)
        elif kind == b"M":
            self.reserves[item["cursor"]] = item
        elif kind == b"E":
            remember(self.producers, item["name"], (item["id"], item["epoch"]))
        elif kind == b"T":
            self.commits[item["name"]] = item


def remember(producers: dict[str, tuple[int, int]], name: str, known: tuple[int, int]) -> None:
    """A name's (id, epoch); the one named longest ago makes room."""
    producers.pop(name, None)
    producers[name] = known
    if len(producers) > limits.PRODUCER_NAMES_MAX:
        del producers[next(iter(producers))]


class Tap:
    """Everything that the journal is told while a snapshot is gathered, for a rewrite or a backup (``backups.py``)."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.cursors: dict[int, Cursor] = {}

    def follow(self, snapshot: Iterable[bytes]) -> Iterator[bytes]:
        """The snapshot, and most of what changes until its end; ``take`` has the rest."""
        yield from snapshot
        for _ in range(ROUNDS_MAX):
            if len(self.cursors) <= CHANGED_MAX:
                return
            yield from self.take()

    def take(self) -> Iterator[bytes]:
        payloads, self.payloads = self.payloads, []
        cursors, self.cursors = self.cursors, {}
        yield from payloads
        for cursor in cursors.values():
            yield cursor.snapshot()


class Gathering:
    """A snapshot that the next rewrite will store."""

    def __init__(self) -> None:
        self.tap = Tap()
        self.payloads: list[bytes] = []
        self.complete = False


class StateJournal:
    """Collects the entries and writes them to the journal. ``journal`` None: nothing is kept."""

    def __init__(
        self,
        journal: StateLog | None,
        loop: Loop,
        workers: Workers,
        pace: Pace,
        snapshot: Callable[[], Iterable[bytes]],
        on_failure: Callable[[HeadraceError], None],
    ):
        self._journal = journal
        self._loop = loop
        self._pace = pace
        self._snapshot = snapshot
        self._on_failure = on_failure
        self._lane: Lane[Entry] = Lane(loop, workers.submit, self._prepare, self._finish)
        self._dirty: dict[int, Cursor] = {}
        self._timer: Any = None
        self._writing: list[Entry] = []
        self._cursors: list[Cursor] = []
        self._postponed: list[Entry] = []
        """Refused by the disk; the next write includes them."""
        self._failed: HeadraceError | None = None
        self._closed = False
        self._rewrite_due = False
        """The next write must be a whole snapshot: memory knows what the journal does not."""
        self._gathering: Gathering | None = None
        self._held: list[Entry] = []
        """They wait for the snapshot that is due."""
        self.writes = 0
        self.write_seconds = 0.0
        """How long the last write took."""
        self._began = 0.0
        self._dirty_since: float | None = None
        self._writing_since: float | None = None
        self.taps: list[Tap] = []
        self._paused: list[Entry] | None = None
        """They wait for the end of a pause."""
        self.leaving = False
        """Its cursors are being detached, so a snapshot would lack them: there is none any more."""

    def load(self, ends: Ends | None = None) -> Loaded:
        """What the journal holds. ``ends``: how far the partitions had reached at the last clean stop."""
        loaded = Loaded()
        loaded.witnesses = Witnesses(ends)
        if self._journal is None:
            return loaded
        payloads = self._journal.open()
        loaded.missing = payloads is None
        for payload in payloads or ():
            try:
                loaded.add(payload)
            except (orjson.JSONDecodeError, KeyError, ValueError) as error:
                logger.error("the subscription journal has an entry that makes no sense: %s", error)
                loaded.damaged += 1
        loaded.damaged += self._journal.damaged
        return loaded

    def start(self) -> None:
        """Write the loaded state as a new snapshot: short, and without damaged entries."""
        if self._journal is None:
            return
        try:
            self._journal.rewrite(list(self._snapshot()))
        except OSError as error:
            if not self._journal.size:
                raise
            logger.error("the subscription journal cannot be rewritten yet: %s", error)
            self._rewrite_due = True
            self._retry()

    def begin(self) -> None:
        """The same, later: the next write is the snapshot, whatever else it has."""
        self._rewrite_due = True
        self._put(Entry(None, None))

    def abandon(self, error: HeadraceError) -> None:
        """Another node has it now: nothing more is written, and who waits hears why."""
        if self._closed:
            return
        self._failed, self._closed = error, True
        self._go_on()
        self._end_gathering()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late = self._postponed + self._held + self._lane.waiting
        self._postponed, self._held, self._lane.waiting = [], [], []
        self._dirty.clear()
        for entry in late:
            self._put(entry)
        if self._journal is not None:
            self._journal.close()

    # --- writing ----------------------------------------------------------------------------
    def write(
        self,
        payload: bytes,
        done: Done | None = None,
        *,
        counts: bool = False,
        at: Partition | str | None = None,
    ) -> None:
        """Store a definition; ``done`` is called when it is durable. ``at`` says which slot it belongs to."""
        for tap in self.taps:
            tap.payloads.append(payload)
        self._put(Entry(payload, done, counts))

    def flush(self, done: Done, *, counts: bool = False) -> None:
        """Write all positions now; ``done`` is called when they are durable."""
        self._put(Entry(None, done, counts))

    def pause(self) -> Callable[[], None]:
        """Store nothing that is asked for from now on, until the returned function is called."""
        self._paused = []
        return self._go_on

    def _go_on(self) -> None:
        waiting, self._paused = self._paused or [], None
        for entry in waiting:
            self._put(entry)

    def _put(self, entry: Entry) -> None:
        if self._paused is not None:
            self._paused.append(entry)
        elif self._failed is None and self._journal is not None and not self._closed:
            if self._rewrite_due and not (self._gathering and self._gathering.complete):
                self._hold(entry)
            else:
                self._lane.put(entry)
        elif entry.done is not None:
            closed = Closed("the broker is closed") if self._closed else None
            self._loop.call_soon(entry.done, self._failed or closed)

    def changed(self, cursor: Cursor) -> None:
        self._dirty[cursor.number] = cursor
        for tap in self.taps:
            tap.cursors[cursor.number] = cursor
        if self._dirty_since is not None or self._journal is None or self._closed:
            return  # its write is on its way
        self._dirty_since = self._loop.time()
        if self._timer is None:
            pause = max(FLUSH_S / 2 - self.write_seconds, PAUSE_S_MIN)
            self._timer = self._loop.call_later(pause, self._flush_later)

    @property
    def oldest_unwritten(self) -> float:
        """The seconds since the oldest ack that is not on disk yet; 0 if all are."""
        since = self._dirty_since if self._writing_since is None else self._writing_since
        return 0.0 if since is None else self._loop.time() - since

    def forget(self, cursor: Cursor) -> None:
        self._dirty.pop(cursor.number, None)

    def _flush_later(self) -> None:
        self._timer = None
        if (self._dirty or self._rewrite_due or self._postponed) and self._failed is None:
            self._put(Entry(None, None))
        else:
            self._dirty_since = None

    def _retry(self) -> None:
        # A timer that runs already comes earlier; a second one would outlive the journal.
        if self._timer is None:
            self._timer = self._loop.call_later(RETRY_S, self._flush_later)

    def _hold(self, *entries: Entry) -> None:
        self._held += entries
        if self._held and self._gathering is None and not self.leaving:
            # Not now: those who hear that their entry was refused undo it in memory first.
            self._loop.call_soon(self._gather, self._begin_gathering())

    def _begin_gathering(self) -> Gathering:
        gathering = self._gathering = Gathering()
        self.taps.append(gathering.tap)
        return gathering

    def _gather(self, gathering: Gathering) -> None:
        """Take the first piece of a snapshot; the others follow in later turns of the loop."""

        def items() -> Iterator[bytes]:
            for payload in gathering.tap.follow(self._snapshot()):
                if self._gathering is not gathering:
                    return
                yield payload

        def gathered() -> None:
            if self._gathering is gathering:
                gathering.complete = True
                held, self._held = self._held, []
                for entry in held:
                    self._lane.put(entry)
                if self._lane.idle:
                    self._lane.put(Entry(None, None))

        self._pace.go_through(items(), gathering.payloads.append, gathered)

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self.taps.remove(self._gathering.tap)
            self._gathering = None

    def _prepare(self, entries: list[Entry]) -> Callable[[], None]:
        journal = self._journal
        assert journal is not None
        self._writing, self._postponed = self._postponed + entries, []
        self._cursors = [cursor for cursor in self._dirty.values() if cursor.dirty]
        self._dirty.clear()
        self._began = self._loop.time()
        self._writing_since, self._dirty_since = self._dirty_since, None
        if journal.wants_rewrite and self._gathering is None and not self.leaving:
            self._gather(self._begin_gathering())
        gathering = self._gathering
        if gathering is not None and gathering.complete:
            self._end_gathering()
            snapshot = gathering.payloads
            snapshot += gathering.tap.take()
            for cursor in self._cursors:
                cursor.take_delta()
            return lambda: journal.rewrite(snapshot)
        payloads = [entry.payload for entry in entries if entry.payload is not None]
        payloads += [cursor.take_delta() for cursor in self._cursors]
        return lambda: journal.append(payloads) if payloads else None

    def _finish(self, _result: None, error: BaseException | None) -> None:
        entries, self._writing = self._writing, []
        cursors, self._cursors = self._cursors, []
        answer: HeadraceError | None = None
        if self._closed and self._failed is not None:  # abandoned meanwhile
            for entry in entries:
                if entry.done is not None:
                    entry.done(self._failed)
            return
        self.writes += 1
        self.write_seconds = self._loop.time() - self._began
        since, self._writing_since = self._writing_since, None
        if error is not None:  # what was refused may be in the tap, and is undone in memory
            self._end_gathering()
        elif self._gathering is not None and self._gathering.complete and not self._lane.waiting:
            self._lane.put(Entry(None, None))
        if isinstance(error, OSError):
            self._dirty_since = since if since is not None else self._dirty_since
            answer = refused_by_disk(error)
            logger.error("the subscription journal cannot be written yet: %s", error)
            for cursor in cursors:
                cursor.rewrite()
                self._dirty[cursor.number] = cursor
            # A refused definition is only in memory; the next write must include it.
            self._rewrite_due |= any(entry.payload is not None for entry in entries)
            if isinstance(answer, StorageFailed):
                self._postponed = [entry for entry in entries if entry.counts]
                entries = [entry for entry in entries if not entry.counts]
            self._retry()
        elif error is None:
            self._rewrite_due = False  # if it was due, it has just been done
        else:
            answer = OutcomeUnknown(f"it is unknown whether this was stored: {error}")
            self._failed = answer
            logger.critical("the subscription journal failed: %s", error, exc_info=error)
            entries += self._held + self._lane.waiting
            self._held, self._lane.waiting = [], []
        for entry in entries:
            if entry.done is not None:
                entry.done(answer)
        if self._rewrite_due:
            self._held, self._lane.waiting = self._lane.waiting + self._held, []
            self._hold()
        if self._failed is not None:
            self._on_failure(self._failed)

    def close(self, done: Callable[[], None]) -> None:
        """Write the last changes, then nothing more."""

        def closed(_error: HeadraceError | None) -> None:
            self._closed = True
            self._end_gathering()
            # What came during the last write comes too late.
            late = self._postponed + self._held + self._lane.waiting
            self._postponed, self._held, self._lane.waiting = [], [], []
            for entry in late:
                self._put(entry)
            # Not earlier: a write that found no room has scheduled another one.
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._journal is not None:
                try:
                    self._journal.close()
                except OSError as error:  # preallocated zeros stay; the next start expects them
                    logger.warning("the subscription journal: %s", error)
            done()

        self._go_on()
        self.flush(closed)
