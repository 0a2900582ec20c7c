"""Deletes old records, and refuses publishes while the disk is full.

:class:`Retention` deletes whole closed segments by age and by size, oldest first; never the one being
written, and, if the topic has ``retain_unread``, never records that a subscription has not finished. In
memory topics it drops the records that every subscription has finished. A round goes through all partitions in pieces
(``pace.py``), and one whose log has to read its indexes from the disk comes later.

:class:`DiskGuard` refuses publishes while free space is below the reserve, before anything is
appended, and accepts them again when a quarter more than that is free. Acks, positions and deletions
use the reserve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.broker.pace import Pace
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition, Topic
from headrace.clock import Clock, Loop, Timer
from headrace.errors import HeadraceError, StorageFull
from headrace.files import Files
from headrace.log.interface import ReadPending
from headrace.log.workers import Workers

if TYPE_CHECKING:
    from headrace.broker.topics import Topics

logger = logging.getLogger("headrace.broker")
INTERVAL_S = 10.0


def low_water(partition: Partition) -> int | None:
    """The lowest position of any subscription in the partition; None without subscriptions."""
    positions = [
        watcher.cursors[(partition.topic, partition.number)].position
        for watcher in partition.watchers
        if isinstance(watcher, Subscription)
    ]
    return min(positions, default=None)


class Retention:
    def __init__(self, topics: Topics, clock: Clock, loop: Loop, pace: Pace):
        self._topics, self._clock, self._loop, self._pace = topics, clock, loop, pace
        self._timer: Any = None
        self._trims: set[Partition] = set()
        self.deleted_bytes = 0
        self.before_run: Callable[[], object] = lambda: None
        self.may_delete: Callable[[Partition], bool] = lambda partition: True
        """Whether all subscriptions have their positions in it: with several nodes, the owner's alone."""
        self.is_held: Callable[[], bool] = lambda: False
        """Whether a backup reads what would be deleted (``backups.py``)."""

    def start(self) -> None:
        self._timer = self._loop.call_later(INTERVAL_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.start()
        self.run()

    def run(self) -> None:
        """Look at every topic once."""
        self.before_run()
        places = [(topic, partition) for topic in self._topics for partition in topic.partitions]
        self._pace.go_through(places, lambda place: self._look_at(*place), lambda: None)

    def _look_at(self, topic: Topic, partition: Partition, *, again: bool = False) -> None:
        """``again``: in the same round, because its log had to read its indexes first."""
        if self._timer is None or self._topics.get(topic.name) is not topic:
            return
        try:
            if not again and self.may_delete(partition):
                partition.log.roll_if_old(self._clock.now_ms())
            self._run_partition(topic, partition)
        except ReadPending as pending:
            pending.then(lambda: self._look_at(topic, partition, again=True))
        except (HeadraceError, OSError) as error:  # the next round tries again
            self._report(topic.name, error)

    def _report(self, topic: str, error: Exception) -> None:
        logger.error("retention of %s: %s", topic, error, extra={"topic": topic})

    def _run_partition(self, topic: Topic, partition: Partition) -> None:
        settings, log = topic.settings, partition.log
        if not self.may_delete(partition):
            return
        now = self._clock.now_ms()
        closed = log.closed_segments()
        if not closed:
            return
        total = log.size_bytes()
        oldest = None
        if settings.retention_hours is not None:
            oldest = now - int(settings.retention_hours * 3_600_000)
        keep_from = closed[0].base_offset
        for segment in closed:
            too_old = oldest is not None and segment.max_timestamp < oldest
            too_much = settings.retention_bytes is not None and total > settings.retention_bytes
            if not (too_old or too_much):
                break
            keep_from = segment.end_offset
            total -= segment.bytes
        if settings.retain_unread:
            low = low_water(partition)
            if low is not None:
                keep_from = min(keep_from, low)
        if keep_from == closed[0].base_offset or (log.durable and self.is_held()):
            return
        before = log.size_bytes()
        log.drop_before(keep_from)
        self.deleted_bytes += before - log.size_bytes()

    def drop_done(self, partition: Partition) -> None:
        """Delete the segments that every subscription has finished, one in each turn of the loop."""
        log, low = partition.log, low_water(partition)
        if low is None or self._timer is None or not self.may_delete(partition):
            return
        try:
            closed = log.closed_segments()
        except ReadPending as pending:
            pending.then(lambda: self.drop_done(partition))
            return
        except (HeadraceError, OSError) as error:  # the next round tries again
            self._report(partition.topic, error)
            return
        if not closed or closed[0].end_offset > low or (log.durable and self.is_held()):
            return
        log.drop_before(closed[0].end_offset)
        self.deleted_bytes += closed[0].bytes
        self._loop.call_soon(self.drop_done, partition)

    # --- memory -----------------------------------------------------------------------------
    def trim(self, partition: Partition) -> None:
        """A position in a memory topic moved: soon drop the records that are finished."""
        if not self._trims:
            self._loop.call_soon(self._trim)
        self._trims.add(partition)

    def _trim(self) -> None:
        trims, self._trims = self._trims, set()
        for partition in trims:
            low = low_water(partition)
            if low is not None and not partition.log.durable:
                partition.log.drop_before(low)


class DiskGuard:
    """Knows how much space is free, as of a moment ago: a disk thread looks, because a network's file system may take long."""

    CHECK_S = 0.25

    def __init__(
        self,
        directory: Path | None,
        reserve_bytes: int,
        files: Files,
        loop: Loop,
        workers: Workers,
    ):
        self._directory = directory
        self.reserve_bytes = reserve_bytes
        self._files, self._loop, self._workers = files, loop, workers
        self._checked_at = 0.0
        self._is_checking = self._is_closed = False
        self._timer: Timer | None = None
        """While it is full, it looks without being asked."""
        self.free_bytes = 0
        self.full = False

    def open(self) -> None:
        """Look now, and wait for it."""
        self._checked_at = self._loop.time()
        if self._directory is not None:
            try:
                self._found(self._files.free_bytes(self._directory), None)
            except OSError as error:
                self._found(0, error)

    def refusal(self) -> StorageFull | None:
        """Why nothing can be published now, or None."""
        if self._directory is None:
            return None
        if self._loop.time() - self._checked_at >= self.CHECK_S:
            self._look()
        if not self.full:
            return None
        return StorageFull(
            f"only {self.free_bytes >> 20} MiB are free on the disk, and {self.reserve_bytes >> 20} MiB are "
            "reserved; publishing resumes by itself when there is room again"
        )

    def _look(self) -> None:
        if not self._is_checking and self._directory is not None:
            self._is_checking = True
            self._workers.submit(partial(self._files.free_bytes, self._directory), self._looked)

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.full and not self._is_closed:
            self._timer = self._loop.call_later(self.CHECK_S, self._look)

    def close(self) -> None:
        self._is_closed = True
        self._look_again()

    def _looked(self, free_bytes: int, error: BaseException | None) -> None:
        self._is_checking = False
        self._checked_at = self._loop.time()
        self._found(free_bytes, error)

    def _found(self, free_bytes: int, error: BaseException | None) -> None:
        if error is not None:
            logger.error("free space cannot be read: %s", error)
        else:
            self._compare(free_bytes)
        self._look_again()

    def _compare(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        needed = self.reserve_bytes + self.reserve_bytes // 4 if self.full else self.reserve_bytes
        full = free_bytes < needed
        if full != self.full:
            self.full = full
            logger.warning(
                "%d MiB are free: publishes are %s",
                free_bytes >> 20,
                "refused" if full else "accepted again",
            )

    def hit_the_wall(self) -> None:
        """A write found no room, whatever the last check of the disk said."""
        if not self.full:
            self.full = True
            self._checked_at = self._loop.time()
            self._look_again()
            logger.warning("the disk is full: publishes are refused")
