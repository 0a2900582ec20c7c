"""What the options choose of a store: topics, wildcards, a regular expression, or single partitions.

:class:`ChosenTopics` asks the store and leaves out what was not chosen, so that readers, groups and the
arithmetic of ``positions.py`` see only what is read. It has no state but the store's.

A regular expression has to match the whole name, as in Kafka's source. Like a wildcard it never matches
internal and dead-letter topics, and leaves out topics that the caller may not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from headrace.errors import Forbidden, InvalidArgument, NotFound, TopicNotFound
from headrace.model import INTERNAL_PREFIX, pattern_matches
from headrace.spark.options import wrong
from headrace.spark.source.options import Place, SourceOptions
from headrace.spark.source.positions import Extent, Known, Positions, TopicExtents, resolve
from headrace.spark.source.stores import Store, existing_topics, open_store

NAMES_SHOWN = 5
READABLE = (NotFound, Forbidden)


def topics_of(options: SourceOptions, *, some: bool = False) -> Known:
    """The topics of these options, from a store that is opened for this question. ``some``: at least one."""
    with closing(open_store(options)) as store:
        chosen = ChosenTopics(options, store)
        return chosen.some() if some else chosen.known()


class ChosenTopics:
    def __init__(self, options: SourceOptions, store: Store):
        self._options = options
        self._store = store

    # --- what there is --------------------------------------------------------------------------
    def known(self) -> Known:
        """What is read, as it is now. A topic or partition that was named and does not exist is an error."""
        if self._options.subscribe_pattern is not None:
            return self.existing()
        found = self._assigned(self._store.topics(self._options.topics))
        for topic, numbers in (self._options.assigned or {}).items():
            missing = sorted(numbers - found[topic].partitions.keys())
            if missing:
                raise wrong("assign", f"{topic!r} has no partition {missing[0]}")
        return found

    def some(self) -> Known:
        """The same, and an error if no topic matches."""
        found = self.known()
        if not found:
            raise self.nothing_matches()
        return found

    def existing(self) -> Known:
        """The same, without topics and partitions that were deleted."""
        if self._options.subscribe_pattern is None:
            return self._assigned(existing_topics(self._store, self._options.topics))
        matches = re.compile(self._options.subscribe_pattern).fullmatch
        names = [
            name for name in self._store.names() if pattern_matches(">", name) and matches(name)
        ]
        return existing_topics(self._store, names, unless=READABLE)

    def check_same(self, read: Positions) -> None:
        """Raise an error if the query read topics that it is not to read any more: it is another query."""
        pattern = self._options.subscribe_pattern
        for topic in read.offsets:
            if pattern is None:
                is_read = any(pattern_matches(each, topic) for each in self._options.topics)
            else:
                is_read = re.fullmatch(pattern, topic) is not None
            if not is_read:
                wanted = pattern or ", ".join(self._options.topics)
                raise InvalidArgument(
                    f"the checkpoint is of a query that read {topic}, and this one reads {wanted}: "
                    f"give it another checkpointLocation, or read {topic} as well",
                    code="query_changed",
                )

    def _assigned(self, known: Known) -> Known:
        if self._options.assigned is None:
            return known
        return {
            topic: TopicExtents(
                state.incarnation,
                {
                    number: extent
                    for number, extent in state.partitions.items()
                    if number in self._options.assigned[topic]
                },
            )
            for topic, state in known.items()
        }

    def nothing_matches(self) -> TopicNotFound:
        """The error, or the warning, when no topic was found."""
        pattern = self._options.subscribe_pattern
        if pattern is not None:
            why = f"no topic matches the regular expression {pattern!r}, which has to match whole names"
        else:
            why = (
                f"no topic matches {', '.join(self._options.topics)}. In a wildcard, * stands for exactly "
                "one word between dots, and a last > for all further words: orders.* matches orders.eu, "
                "and neither orders nor orders-eu. For a regular expression use the option subscribePattern"
            )
        names = sorted(each for each in self._store.names() if not each.startswith(INTERNAL_PREFIX))
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        there = (
            f"there are {', '.join(names[:NAMES_SHOWN])}{more}" if names else "there are no topics"
        )
        return TopicNotFound(f"{why}; {there}")

    # --- news -----------------------------------------------------------------------------------
    def wait(self, known: Known, seconds: float) -> bool:
        """Wait for records that ``known`` does not have; False when the time is up.

        A new topic that matches a regular expression is only found by the next look at all names.
        """
        wanted: Sequence[str] = self._options.topics
        if self._options.assigned is not None:
            wanted = ()  # partitions that are not assigned are no news
        elif self._options.subscribe_pattern is not None:
            wanted = tuple(known)
        return self._store.wait(known, wanted, seconds)

    # --- times ----------------------------------------------------------------------------------
    def resolve(
        self, place: Place, known: Known, group: Mapping[str, Mapping[int, int]] | None = None
    ) -> Positions:
        """The offsets of a place that a user named."""
        by_time: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for topic, state in known.items():
            for number in state.partitions:
                time_ms = place.time_of(topic, number)
                if time_ms is not None:
                    by_time[time_ms].append((topic, number))
        found: dict[str, dict[int, Extent]] = {
            topic: dict(state.partitions) for topic, state in known.items()
        }
        for time_ms, partitions in by_time.items():
            at = self.at(time_ms, {topic for topic, _ in partitions})
            for topic, number in partitions:
                # A topic that was deleted meanwhile has nothing: the next look reports it.
                extent = found[topic][number]
                found[topic][number] = replace(extent, at=at.get((topic, number), extent.end))
                self._check_time(place, topic, number, found[topic][number])
        dated = {t: TopicExtents(state.incarnation, found[t]) for t, state in known.items()}
        return resolve(place, dated, group or {})

    def _check_time(self, place: Place, topic: str, number: int, extent: Extent) -> None:
        strategy = self._options.starting_offsets_by_timestamp_strategy
        if strategy == "error" and place.option.startswith("starting"):
            assert extent.at is not None
            if extent.at >= extent.end:
                raise wrong(
                    place.option,
                    f"{topic}/{number} has no record at or after {place.time_of(topic, number)}; with "
                    "startingOffsetsByTimestampStrategy=latest it begins at the end",
                )

    def at(self, time_ms: int, topics: set[str]) -> dict[tuple[str, int], int]:
        """The first offset at or after a time, of every partition of the topics."""
        found = existing_topics(self._store, sorted(topics), time_ms, unless=READABLE)
        return {
            (topic, number): extent.at or 0
            for topic, state in found.items()
            for number, extent in state.partitions.items()
        }
