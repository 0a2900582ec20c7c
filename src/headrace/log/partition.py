"""A partition on disk: segments, one writer, many readers.

Rules:
- The loop's thread owns everything here. A commit is prepared on it (``commit.gather``), written
  and synced in a worker (:class:`_DiskCommit`), and finished on it (index, ``end_offset``, answers).
  One commit at a time, so ``_DiskCommit.run`` may use the writer's fields without a lock.
- Reading is in ``segmented.py``.
- No file is opened, removed or cut on the loop: on a busy disk that takes long. Removed segments are gone for readers at
  once, and a worker removes their files, the oldest first, few at a time; after an error the rest waits for the next round of retention.
- ``end_offset`` moves only when a commit is as durable as the mode says.
- A write that fails is undone (truncate and sync) and is a definite error. A *sync* that fails
  is never tried again: every waiting entry gets ``OutcomeUnknown``, and ``on_failure`` stops the broker.

Segments roll only between commits, so a segment may exceed ``segment_bytes`` by one commit.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from headrace import limits
from headrace.clock import Clock, Loop, Timer
from headrace.errors import (
    Closed,
    HeadraceError,
    OutcomeUnknown,
    QueueFull,
    ReadOnly,
    refused_by_disk,
)
from headrace.files import IOV_MAX, Files, Handle
from headrace.log.batch import AFTER_SYNC, Batch
from headrace.log.cache import BatchCache
from headrace.log.commit import CommitGroup
from headrace.log.fetching import Fetching
from headrace.log.index import Index
from headrace.log.interface import CLEAN, Append, LastStop
from headrace.log.producers import Producers
from headrace.log.recovery import Recovered, recover
from headrace.log.rewriting import Rewrite, Rewriter
from headrace.log.segment import Readers, Segment, log_name, versions
from headrace.log.segmented import SegmentedLog
from headrace.log.workers import Lane, SyncFailed, Workers, Write
from headrace.model import TopicSettings

logger = logging.getLogger("headrace.log")
_numbers = count(1)


class _DiskCommit:
    """One group to write to the disk. It is created on the loop and run in a worker."""

    def __init__(self, partition: PartitionLog, group: CommitGroup, commands: set[str]):
        self.partition = partition
        self.roll = "roll" in commands
        self.cut = "cut" in commands
        self.sync = bool(commands) or partition.settings.durability == "always"
        self.batches = group.batches
        self.entries = group.entries
        self.started = partition.first_arrival
        self.synced = False
        self.rolled: Segment | None = None

    def run(self) -> None:
        partition = self.partition
        try:
            # Do not roll for a sync alone: on a full disk rolling would fail, and then the sync, too.
            if self.roll or (self.batches and partition.writer_is_full()):
                self.rolled = partition.roll()
            if self.batches:
                if partition.settings.compression != "none":
                    for batch in self.batches:
                        batch.pack()
                partition.write(self.batches)
        except OSError:
            if self.sync:  # the sync was also requested for earlier writes
                partition.sync()
            raise
        if self.sync:
            partition.sync()
            self.synced = True
        if self.cut:
            partition.cut()

    def request(self) -> Write | None:
        plain = self.batches and not self.roll and not self.cut
        return self.partition.plain_write(self.batches, self.sync) if plain else None

    def stored(self, seconds: float) -> None:
        self.synced = self.sync
        self.partition.was_written(self.batches, seconds if self.sync else None)


def _buffers(batches: list[Batch]) -> list[bytes]:
    return [part for batch in batches for part in (batch.header(), batch.body)]


class PartitionLog(SegmentedLog):
    """See :class:`headrace.log.interface.Log`."""

    durable = True

    def __init__(
        self,
        directory: Path,
        settings: TopicSettings,
        *,
        files: Files,
        clock: Clock,
        loop: Loop,
        workers: Workers,
        readers: Readers,
        cache: BatchCache,
        fetching: Fetching,
        on_failure: Callable[[HeadraceError], None],
        rewriter: Rewriter | None = None,
        is_new: bool = False,
        stop: LastStop = CLEAN,
    ):
        if settings.durability == "never":  # there nothing was ever promised
            stop = stop._replace(unclean=False)
        if is_new:  # its directory was just made
            found = Recovered([], None, Producers())
        else:
            found = recover(files, directory, stop)
        super().__init__(
            next(_numbers), clock=clock, loop=loop, producers=found.producers,
            workers=workers, cache=cache, fetching=fetching,
        )  # fmt: skip
        self.directory = directory
        self.settings = settings
        self._files, self._readers = files, readers
        self._on_failure = on_failure
        self.on_sync: Callable[[float], None] = lambda seconds: None
        self._lane: Lane[Append | str] = Lane(loop, workers.commit, self._prepare, self._finish)
        self._waiting_bytes = 0
        self._commit: _DiskCommit | None = None
        self.first_arrival = 0.0
        """When the first entry of the next commit arrived."""
        self._sync_timer: Timer | None = None

        segments = [
            Segment(files, readers, directory / log_name(base), base, size, version=next(versions))
            for base, size in found.closed
        ]
        self.damage: list[tuple[int, int]] = []
        self.torn_bytes = 0
        self._writer: Handle | None = None
        self._position = 0
        self._allocated = 0
        self._synced_position = 0
        self._segment_started_ms = clock.now_ms()
        if found.last is not None:
            last = found.last
            segment = Segment(files, readers, last.path, last.base_offset, last.size, last.index)
            segment.version = next(versions)
            segments.append(segment)
            self._position = self._synced_position = last.size
            self._last_timestamp = last.last_timestamp
            self.torn_bytes = last.torn_bytes
            self.damage = last.damage
            if last.index.times:
                self._segment_started_ms = last.index.times[0]
            if not self._last_timestamp and found.closed:
                self._last_timestamp = segments[-2].index().max_timestamp
        elif stop.reached:
            self.damage = [(0, stop.reached)]
        if self.damage:
            ranges = ", ".join(f"{low} to {high - 1}" for low, high in self.damage)
            self.read_only = (
                f"offsets {ranges} are damaged; run 'headrace doctor' to see what is lost "
                "and to repair it"
            )
            logger.error("%s opens read-only: %s", directory, self.read_only)
        self._segments = tuple(segments)
        self.end_offset = found.last.end_offset if found.last is not None else stop.reached
        self.start_offset = segments[0].base_offset if segments else self.end_offset
        self._next_offset = self.end_offset
        self._rewriter = rewriter
        self._rewritten_to = 0
        """Closed segments before this offset were rewritten, or looked at."""
        self._idle_at = -1
        """The size of the active segment when somebody last looked whether it still grows."""
        self._replacing: Segment | None = None
        """Another file is being put in its place."""
        self._dropped: deque[Segment] = deque()
        """Their files are to be removed."""
        self._is_removing = False
        self._is_left = rewriter is None
        """Whether the rewriter has nothing of it under way, and will not begin."""
        if rewriter is not None and found.closed:
            loop.call_soon_threadsafe(self._offer)  # this may run in any thread

    # --- writing: on the loop ---------------------------------------------------------------
    def append(self, entry: Append) -> None:
        refusal = self._refusal(entry)
        if refusal is not None:
            entry.fail(refusal)
            return
        self._waiting_bytes += entry.bytes
        if not self._lane.waiting:
            self.first_arrival = self._clock.seconds()
        self._put(entry)

    def _enqueue(self, entry: Append) -> None:
        self._lane.put(entry, entry.at_once)

    def _refusal(self, entry: Append) -> HeadraceError | None:
        if self.failed is not None:
            return self.failed
        if self._closed or self._closing:
            return Closed("the log is closed")
        if self.read_only:
            return ReadOnly(self.read_only)
        if (
            self._waiting_bytes + entry.bytes > limits.COMMIT_QUEUE_BYTES_MAX
            and not entry.hidden  # other publishers may wait for it, and would keep the queue full
        ):
            return QueueFull(
                "more is being published than the disk can take; try again in a moment",
                code="overloaded",
            )
        return None

    def _prepare(self, items: list[Append | str]) -> _DiskCommit:
        """Turn the waiting entries into one commit."""
        entries = [item for item in items if isinstance(item, Append)]
        # Entries that become visible at once get a commit of their own.
        kinds = [entry.hidden for entry in entries]
        most = kinds.index(True) if True in kinds and not kinds[0] else len(entries)
        group, left = self._gather(entries[:most])
        taken = most - len(left)
        if taken < len(entries):  # with the commands that came after them
            at = items.index(entries[taken])
            self._lane.waiting[:0] = items[at:]
            items, entries = items[:at], entries[:taken]
        commands = {item for item in items if isinstance(item, str)}
        self._waiting_bytes -= sum([entry.bytes for entry in entries])
        if group.batches and self._synced_position == self._position:
            group.batches[0].flags |= AFTER_SYNC
        self._commit = _DiskCommit(self, group, commands)
        return self._commit

    # --- writing: in the worker -------------------------------------------------------------
    def writer_is_full(self) -> bool:
        if not self._segments:
            return True
        index = self._segments[-1].index()
        return (
            self._position >= self.settings.segment_bytes
            or index.batches >= limits.SEGMENT_BATCHES_MAX
        )

    def roll(self) -> Segment | None:
        """Close the active segment and begin the next one. Returns None if it was empty."""
        old = self._segments[-1] if self._segments else None
        base = self._next_offset
        if old is not None:
            if old.base_offset == base:
                return None
            handle = self._open_writer()
            self._files.truncate(handle, self._position)
            self._allocated = self._position
            self.sync()
            self._files.replace(old.index_path, [old.index().dump()])
            self._files.replace(self.directory / f"{base:020d}.producers", [self._producers.dump()])
        path = self.directory / log_name(base)
        handle = self._files.open(path, write=True, create=True)
        try:
            self._files.sync_directory(self.directory)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOENT):
                raise  # no descriptor is free, or the topic was deleted: no sync has failed, it has not begun
            raise SyncFailed(f"{path}: {error}") from error
        self._writer = handle
        self._position = self._allocated = self._synced_position = 0
        segment = Segment(self._files, self._readers, path, base, 0, Index(base))
        segment.held, segment.version = handle, next(versions)
        return segment

    def _open_writer(self) -> Handle:
        if self._writer is None:
            segment = self._segments[-1]
            self._writer = self._files.open(segment.path, write=True)
            self._allocated = self._files.size(self._writer)
            segment.held = self._writer
        return self._writer

    def write(self, batches: list[Batch]) -> None:
        buffers = _buffers(batches)
        size = sum(map(len, buffers))
        handle = self._open_writer()
        position = self._position
        try:
            self._reserve(handle, position + size)
            self._files.write_at(handle, position, buffers)
        except OSError as error:
            self._take_back(handle, position, error)
            raise
        self._position = position + size

    def _reserve(self, handle: Handle, end: int) -> None:
        """Preallocate: a sync in reserved space is twice as fast, and a write there has room."""
        if end <= self._allocated:
            return
        step = min(max(end, limits.PREALLOCATE_BYTES_MIN), limits.PREALLOCATE_BYTES_MAX)
        limit = max(end, self.settings.segment_bytes)
        target = min(end + step, limit)
        try:
            self._files.allocate(handle, self._allocated, target - self._allocated)
        except OSError as error:
            if error.errno != errno.ENOSPC or target == end:
                raise
            target = end  # no room for the reserve; perhaps there is room for the data itself
            self._files.allocate(handle, self._allocated, target - self._allocated)
        self._allocated = target

    def _take_back(self, handle: Handle, position: int, cause: OSError) -> None:
        """Undo a failed write. If that fails, too, it counts as a failed sync."""
        try:
            self._files.truncate(handle, position)
            self._files.sync(handle)
        except OSError as error:
            raise SyncFailed(
                f"{handle.path}: a write failed ({cause}) and could not be taken back ({error})"
            ) from error
        self._allocated = position

    def sync(self) -> None:
        if self._writer is None or self._synced_position == self._position:
            return
        started = self._clock.seconds()
        try:
            self._files.sync(self._writer)
        except OSError as error:
            raise SyncFailed(f"{self._writer.path}: {error}") from error
        self._synced_position = self._position
        self.sync_seconds = self._clock.seconds() - started

    sync_seconds = 0.0

    def cut(self) -> None:
        """Give the reserved space back, before the file is closed."""
        if self._writer is not None and not self.read_only:
            try:
                self._files.truncate(self._writer, self._position)
            except OSError as error:  # the zeros stay; the next start recognizes them
                logger.warning("%s: %s", self._writer.path, error)

    # --- writing: by a ring -------------------------------------------------------------------
    def plain_write(self, batches: list[Batch], sync: bool) -> Write | None:
        """The batches, if there is nothing else to do than to write them."""
        size = sum(batch.stored_bytes for batch in batches)
        if (
            self._writer is None
            or self._position + size > self._allocated
            or self.settings.compression != "none"
            or 2 * len(batches) > IOV_MAX
            or self.writer_is_full()
        ):
            return None
        return Write(self._writer, self._position, _buffers(batches), sync)

    def was_written(self, batches: list[Batch], seconds: float | None) -> None:
        """``seconds``: how long it took with its sync; None if it was not synced."""
        self._position += sum(batch.stored_bytes for batch in batches)
        if seconds is not None:
            self._synced_position = self._position
            self.sync_seconds = seconds

    # --- finishing: on the loop -------------------------------------------------------------
    def _finish(self, _result: None, error: BaseException | None) -> None:
        commit, self._commit = self._commit, None
        assert commit is not None
        if commit.rolled is not None:
            # Rolling may have succeeded even if the write after it did not.
            if self._segments:
                self._segments[-1].held = None
            self._segments = (*self._segments, commit.rolled)
            self._segment_started_ms = self._clock.now_ms()
            self._offer()
        if error is not None:
            self._fail(commit, error)
        elif commit.batches:
            self._accept(commit)
        else:
            for entry in commit.entries:
                entry.done(entry)
        if commit.synced:
            self.on_sync(self.sync_seconds)
        if not self._lane.waiting:
            self._close_if_idle()

    def _accept(self, commit: _DiskCommit) -> None:
        segment = self._segments[-1]
        index = segment.index()
        position = segment.size
        count = 0
        for batch in commit.batches:
            size = batch.stored_bytes
            index.add(batch, position, size)
            position += size
            count += batch.count
            self._producers.add_batch(batch)
            self._cache.put(self.number, batch)
        segment.size = position
        self._last_timestamp = commit.batches[-1].max_timestamp
        self._next_offset = commit.batches[-1].end_offset
        hidden = commit.entries[0].hidden
        if not hidden:
            self.end_offset = self._next_offset
        wants_sync = self.settings.durability == "interval" and self._closing is None
        if wants_sync and self._sync_timer is None:
            self._sync_timer = self._loop.call_later(
                self.settings.sync_interval_ms / 1000, self.flush
            )
        self._answer(commit.entries, shown=not hidden)
        self.on_commit(self._clock.seconds() - commit.started, count)

    def flush(self) -> None:
        """Sync the written bytes, whatever the mode."""
        self._sync_timer = None
        if not self._closed and self.failed is None:
            self._lane.put("sync")

    def _fail(self, commit: _DiskCommit, error: BaseException) -> None:
        if isinstance(error, OSError):
            answer: HeadraceError = refused_by_disk(error)
        else:
            # SyncFailed, or our own mistake: in both cases we do not know what is on disk.
            answer = OutcomeUnknown(
                f"it is unknown whether this was stored: {error}. Without a sync that is known to "
                "have succeeded the broker stops; start it again and it will verify its log"
            )
            logger.critical("%s: %s", self.directory, error, exc_info=error)
            self.failed = answer
            waiting, self._lane.waiting = self._lane.waiting, []
            commit.entries.extend(item for item in waiting if isinstance(item, Append))
            commit.entries.extend(self._parked)
            self._parked = []
        for entry in commit.entries:
            # A repetition keeps its answer if the first entry is stored, but not if that entry failed here, too.
            stored = entry.duplicate and entry.first_offset < self.end_offset
            if entry.error is None and not (stored and self.failed is None):
                entry.error = answer
                entry.first_offset = -1
            entry.done(entry)
        if self.failed is not None:
            self._on_failure(self.failed)

    # --- keeping house ----------------------------------------------------------------------
    def change(self, settings: TopicSettings) -> None:
        must_sync = settings.durability == "always" != self.settings.durability
        self.settings = settings
        if must_sync:  # from now on, what was delivered is taken to be on disk (``witness.py``)
            self.flush()

    def drop_before(self, offset: int) -> None:
        """Drop the closed segments that end at or before the offset."""
        segments, gone = self._segments, 0
        while (
            gone + 1 < len(segments)
            and segments[gone + 1].base_offset <= offset
            and segments[gone] is not self._replacing
        ):
            segments[gone].forget()
            gone += 1
        if gone:
            self._segments = segments[gone:]
            self.start_offset = self._segments[0].base_offset
            self._dropped.extend(segments[:gone])
        self._remove_dropped()

    def _remove_dropped(self) -> None:
        """Not after it is closed: another topic may have the name, and files with the same names."""
        if self._dropped and not self._is_removing and not self._closed:
            self._is_removing = True
            self._workers.submit_idle(self._remove_files, self._were_removed)

    def _remove_files(self) -> None:
        """In a worker, the oldest first: a start after a crash must not find a gap."""
        while self._dropped:
            path = self._dropped[0].path
            for name in (path, path.with_suffix(".idx"), path.with_suffix(".producers")):
                with suppress(FileNotFoundError):
                    self._files.remove(name)
            self._dropped.popleft()

    def _were_removed(self, _result: None, error: BaseException | None) -> None:
        self._is_removing = False
        if error is not None:
            logger.error("old segments of %s cannot be removed yet: %s", self.directory, error)
        else:
            self._remove_dropped()
        if self._lane.idle:
            self._close_if_idle()

    # --- rewriting: see ``rewriting.py`` ------------------------------------------------------
    def _offer(self) -> None:
        """Not a log that has left: nobody would tell the rewriter again, and its timer would outlive the broker."""
        if self._rewriter is not None and len(self._segments) > 1 and self._is_writable:
            self._rewriter.offer(self)

    def next_rewrite(self) -> Rewrite | None:
        segments = self._segments
        at = bisect_left(segments, self._rewritten_to, key=lambda segment: segment.base_offset)
        if (
            at + 1 >= len(segments)
            or segments[at + 1].base_offset > self.end_offset  # it has hidden records
            or not self._is_writable
        ):
            return None
        end = self._rewritten_to = segments[at + 1].base_offset
        return Rewrite(self._files, segments[at], end, self.settings.compression != "none")

    def may_replace(self, segment: Segment) -> bool:
        if segment not in self._segments or not self._is_writable:
            return False
        self._replacing = segment
        return True

    def replaced(self, old: Segment, new: Segment) -> None:
        self._replacing = None
        self._segments = tuple(new if each is old else each for each in self._segments)
        old.forget()
        # Its file has no name any more: whoever closes it last waits until its space is free, so that is no reader here.
        last = [old]
        self._loop.call_soon(self._workers.submit_idle, last.clear, lambda result, error: None)

    def kept(self, segment: Segment) -> None:
        self._replacing = None

    def unsettled(self) -> int:
        bases = [segment.base_offset for segment in self._segments[:-1]]
        return len(bases) - bisect_left(bases, self._rewritten_to)

    @property
    def _is_writable(self) -> bool:
        return self.failed is None and not (self._closed or self._closing or self.read_only)

    def roll_if_old(self, now_ms: int) -> None:
        """Close the active segment if it is too old, so that retention by hours can delete it; and if nothing was
        appended since the last call and it has many batches, so that it can be rewritten."""
        self._remove_dropped()  # what the disk has refused before
        if self._rewriter is not None and self._segments:
            last = self._segments[-1]
            is_idle, self._idle_at = self._idle_at == last.size, last.size
            if is_idle and last.index().batches >= limits.REWRITE_IDLE_BATCHES and last.is_small():
                self.roll_soon(1)
                return
        if now_ms - self._segment_started_ms > self.settings.segment_hours * 3_600_000:
            self.roll_soon(1)

    def roll_soon(self, bytes_min: int) -> None:
        """Close the active segment after the waiting entries, if it has this many bytes."""
        if self._segments and self._segments[-1].size >= bytes_min and self._is_writable:
            self._lane.put("roll")

    def close(self, done: Callable[[], None]) -> None:
        if not self._begins_to_close(done):
            return
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if self._rewriter is None:
            self._left()
        else:
            self._rewriter.leave(self, self._left)

    def _left(self) -> None:
        """Nothing is being rewritten any more."""
        self._is_left = True
        if self.failed is not None or (self._writer is None and self._lane.idle):
            self._close_if_idle()
        else:
            self._lane.put("cut")

    def _close_if_idle(self) -> None:
        """Not while files are being removed: the next owner of the directory would miss them later."""
        if self._closing is None or not self._is_left or self._is_removing:
            return
        done, self._closing = self._closing, None
        self._closed = True
        self._refuse_parked()
        self._writer = None
        if self._segments:
            self._segments[-1].held = None
        for segment in self._segments:
            segment.forget()
        self._cache.forget(self.number)
        done()
