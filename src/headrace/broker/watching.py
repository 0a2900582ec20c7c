"""The operations of ``operations/watching.py`` and ``operations/delayed.py``: tables, explanations, previews."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.access.caller import Caller
from headrace.broker.awaiting import done
from headrace.broker.explaining import (
    SHOWN_MAX,
    findings_of,
    members_of,
    retries_of,
    state_of,
    worst_first,
)
from headrace.broker.permissions import Permissions
from headrace.broker.publishers import Publisher
from headrace.broker.searching import finder, search
from headrace.broker.topic_statistics import topic_subscriptions
from headrace.broker.transforming import check_transform, transformed
from headrace.errors import DataCorrupt, HeadraceError, NotFound, OffsetOutOfRange
from headrace.log.interface import completed
from headrace.model import (
    INTERNAL_PREFIX,
    DeadLetter,
    Message,
    Scheduled,
    Start,
    derive_id,
    split_id,
    split_position,
    topic_hash,
)
from headrace.operations.watching import (
    Concern,
    Explanation,
    History,
    MessageLife,
    MessagePlace,
    MessageState,
    OldestMessage,
    PublisherInfo,
    RedrivePreview,
    RedriveSample,
    SearchPage,
    SeekPreview,
    SeekStep,
    SubscriptionRow,
    SubscriptionTable,
    TopicPublisher,
    TopicRow,
    TopicTable,
)
from headrace.paging import parse_cursor, partition_needed

if TYPE_CHECKING:
    from headrace.broker.cursor import Cursor
    from headrace.broker.engine import Engine
    from headrace.broker.subscription import Subscription
    from headrace.broker.topic import Topic

SAMPLES_MAX = 10
SAMPLE_CHARS_MAX = 20_000
COUNTED_MAX = 100_000
"""Letters that a preview counts."""
LETTERS_PAGE = 500
MEMORY_SHARE = 0.9
DISK_SHARE = 2
"""Free space below this many reserves is worth a word."""
FIRST_PUBLISHED = "headrace-origin-timestamp"


class WatchingAdministration:
    """For :class:`~headrace.broker.administration.Administration`."""

    engine: Engine
    caller: Caller
    permissions: Permissions

    # --- delayed messages -----------------------------------------------------------------------
    async def scheduled(self, topic: str | None, limit: int) -> list[Scheduled]:
        may = None if self.caller.unlimited else partial(self.permissions.may, "browse")
        listing = await completed(lambda: self.engine.schedule.listing(topic, limit, may))
        return await completed(listing.collect)

    async def cancel(self, id: uuid.UUID) -> None:
        await self._need_to_move(id)
        await done(self.engine.schedule.cancel, id)

    async def publish_now(self, id: uuid.UUID) -> None:
        await self._need_to_move(id)
        self.engine.schedule.publish_now(id)

    async def _need_to_move(self, id: uuid.UUID) -> None:
        if not self.caller.unlimited:
            topic = await completed(lambda: self.engine.schedule.topic_of(id))
            if topic is not None:  # one that does not wait is refused below, as for everybody
                self.permissions.need("manage", topic)

    # --- history ------------------------------------------------------------------------------
    async def history(self) -> History:
        if not self.caller.may_all("metrics", ">", ">"):  # as for /metrics
            raise self.caller.refusal("metrics", ">")
        return self.engine.history.broker()

    async def topic_history(self, topic: str) -> History:
        return self.engine.history.topic(self.engine.topics.find(topic))

    async def topic_publishers(self, topic: str, limit: int) -> list[TopicPublisher]:
        found = self.engine.topics.find(topic)
        return [
            {**self._publisher(by, topic), "last": time_ms}
            for by, time_ms in self.engine.publishing.recent.of_topic(found)[:limit]
        ]

    def _publisher(self, by: Publisher, topic: str) -> PublisherInfo:
        is_full = self.permissions.may("manage", topic)  # as ``clients`` and ``explain`` do
        return {
            "client_id": by.client_id,
            "name": by.login if is_full else "",
            "address": by.address if is_full else "",
            "protocol": by.protocol,
        }

    async def subscription_history(self, subscription: str, topic: str | None) -> History:
        return self.engine.history.subscription(self.permissions.subscription(subscription, topic))

    # --- tables -------------------------------------------------------------------------------
    async def topic_table(
        self, match: str, sort: str, descending: bool, skip: int, limit: int
    ) -> TopicTable:
        part, sees = match.lower(), self.caller.sees
        topics = [
            topic
            for topic in self.engine.topics
            if part in topic.name.lower()
            and not topic.name.startswith(INTERNAL_PREFIX)
            and sees(topic.name)
        ]
        if sort == "topic":
            topics.sort(key=lambda topic: topic.name, reverse=descending)
            total, topics = len(topics), topics[skip : skip + limit]
            return {"total": total, "rows": [row async for row in self._topic_rows(topics)]}
        rows = [row async for row in self._topic_rows(topics)]
        return {"total": len(rows), "rows": _sorted(rows, sort, "topic", descending, skip, limit)}

    async def _topic_rows(self, topics: list[Topic]) -> Any:
        engine = self.engine
        async for topic in engine.pace.each(topics):
            rate, bytes_rate = engine.history.rates(topic)[:2]
            logs = [partition.log for partition in topic.partitions]
            subscriptions = filter(self.permissions.sees, topic_subscriptions(topic, self.engine))
            row: TopicRow = {
                "topic": topic.name,
                "partitions": len(logs),
                "messages": sum(log.end_offset - log.start_offset for log in logs),
                "bytes": topic.size_bytes(),
                "rate": rate,
                "bytes_rate": bytes_rate,
                "backlog": engine.publishing.backlog(topic),
                "subscriptions": sum(1 for _ in subscriptions),
                "read_only": sum(1 for log in logs if log.read_only),
                "durability": topic.settings.durability if topic.settings.durable else "memory",
                "retention_hours": topic.settings.retention_hours,
            }
            yield row

    async def subscription_table(
        self, match: str, topic: str | None, sort: str, descending: bool, skip: int, limit: int
    ) -> SubscriptionTable:
        part = match.lower()
        found: Iterable[Subscription] = self.engine.subscriptions(topic)
        if topic is not None and self.engine.topics.get(topic) is not None:  # wildcards, too
            found = topic_subscriptions(self.engine.topics.find(topic), self.engine)
        seen = [
            each
            for each in found
            if (part in each.name.lower() or part in each.pattern.lower())
            and self.permissions.sees(each)
        ]
        letters = dict(self.engine.dead_letters.topics())
        if sort == "subscription":
            seen.sort(key=lambda each: (each.name, each.pattern), reverse=descending)
            total, seen = len(seen), seen[skip : skip + limit]
            rows = [self._row(each, letters) async for each in self.engine.pace.each(seen)]
            return {"total": total, "rows": rows}
        rows = [self._row(each, letters) async for each in self.engine.pace.each(seen)]
        shown = _sorted(rows, sort, "subscription", descending, skip, limit)
        return {"total": len(rows), "rows": shown}

    def _row(self, each: Subscription, letters: dict[str, int]) -> SubscriptionRow:
        history = self.engine.history
        return {
            "subscription": each.name,
            "topic": each.pattern,
            "lag": each.lag(),
            "growth": history.growth(each),
            "in_flight": each.in_flight(),
            "waiting_for_retry": each.waiting_for_retry(),
            "members": len(each.members),
            "paused": each.paused,
            "blocked": sum(1 for cursor in each.cursors.values() if cursor.blocked),
            "rate": history.rates(each)[2],
            "verdict": history.verdict(each),
            "dead_letters": letters.get(self.engine.dead_letters.topic_name(each, each.pattern), 0),
        }

    # --- in words -----------------------------------------------------------------------------
    async def attention(self, limit: int) -> list[Concern]:
        engine = self.engine
        found: list[Concern] = [*self._broker_findings()]

        def add(findings: Iterable[Concern]) -> None:
            found.extend(findings)
            if len(found) > 10 * limit:  # of what there is much of, the worst
                found[:] = worst_first(found)[:limit]

        async for topic in engine.pace.each(list(engine.topics)):
            for partition in topic.partitions:
                if partition.log.read_only and self.caller.sees(topic.name):
                    text = (
                        f"{topic.name}/{partition.number} takes no publishes: "
                        f"{partition.log.read_only}. Run headrace doctor."
                    )
                    add([_finding("critical", "read_only", text, topic=topic.name)])
        async for each in engine.pace.each(engine.subscriptions()):
            if not each.closed and self.permissions.sees(each):
                findings = findings_of(each, engine.history, self.caller.sees)
                add(finding for finding in findings if finding["severity"] != "notice")
        known = set() if self.caller.unlimited else self.permissions.buried()
        for name, count in engine.dead_letters.topics():
            if count and (self.caller.sees(name) or name in known):
                text = f"{name} has {count:,} dead letter{'s' if count > 1 else ''}."
                about = name.removesuffix(".dlq")
                found.append(_finding("warning", "dead_letters", text, subscription=about))
        for pipeline in engine.pipelines:
            state = pipeline["state"]
            verdict = pipeline["verdict"]
            is_bad = state == "failed" or pipeline["stale"] or verdict != "ok"
            if self.caller.sees(name=pipeline["name"]) and is_bad:
                what = "has failed" if state == "failed" else "does not report any more"
                if verdict == "stalled":
                    what = "has records to process and finishes no batch"
                elif verdict == "falling behind":
                    what = "is falling behind: it processes fewer records than are published"
                text = f"The pipeline {pipeline['name']} {what}."
                found.append(_finding("warning", "pipeline", text, pipeline=pipeline["name"]))
        return worst_first(found)[:limit]

    def _broker_findings(self) -> Iterable[Concern]:
        engine = self.engine
        if not self.caller.may_all("metrics", ">", ">"):
            return
        refusal = engine.guard.refusal()
        if refusal is not None:
            yield _finding("critical", "disk_full", refusal.message)
        elif engine.directory is not None and engine.guard.free_bytes < (
            DISK_SHARE * engine.guard.reserve_bytes
        ):
            yield _finding(
                "warning",
                "disk_low",
                f"Only {engine.guard.free_bytes >> 20:,} MB of disk space are left; publishes are "
                f"refused below {engine.guard.reserve_bytes >> 20:,} MB.",
            )
        if engine.budget.used > MEMORY_SHARE * engine.budget.limit:
            text = "The broker's memory is nearly full; large requests are refused (memory_limit)."
            yield _finding("warning", "memory", text)
        if engine.access.problem is not None:
            text = f"The access file cannot be used: {engine.access.problem}"
            yield _finding("critical", "access", text)

    async def explain_subscription(self, subscription: str, topic: str | None) -> Explanation:
        engine = self.engine
        found = self.permissions.subscription(subscription, topic)
        oldest = await self._oldest(found)
        findings = worst_first([*findings_of(found, engine.history, self.caller.sees)])
        lag, rate = found.lag(), engine.history.rates(found)[2]
        severities = {finding["severity"] for finding in findings}
        stands = not {"no_members", "paused"}.isdisjoint(each["code"] for each in findings)
        if not lag:
            state: Any = "stuck" if "critical" in severities else "idle"
            text = f"{found.name} has nothing to do: every message is done."
        elif not stands and (rate > 0 or not severities & {"critical", "warning"}):
            state = "slow" if "warning" in severities else "working"
            text = f"{found.name} is working: {rate:,.1f} messages per second are acknowledged."
        else:
            state, text = "stuck", ""
        if not findings and text:
            findings.append(_finding("ok", state, text))
        members = [
            each
            for each in members_of(found)
            if each["oldest"] is None or self.caller.sees(each["oldest"]["topic"])
        ]
        for each in members:
            each["held"] = [held for held in each["held"] if self.caller.sees(held["topic"])]
        if not self.permissions.may_use("manage", found):  # as ``clients`` does
            for each in members:
                each["address"], each["connection"] = "", None
        retries = [each for each in retries_of(found, 20) if self.caller.sees(each["topic"])]
        return {
            "subscription": found.name,
            "topic": found.pattern,
            "state": state,
            "verdict": engine.history.verdict(found),
            "findings": findings,
            "oldest": oldest,
            "members": members,
            "members_total": len(found.members),
            "retries": retries,
            "retries_total": found.waiting_for_retry(),
        }

    async def _oldest(self, found: Subscription) -> OldestMessage | None:
        """The oldest of the first messages that are not done, of a few partitions."""
        best: OldestMessage | None = None
        for (topic, number), cursor in list(islice(found.cursors.items(), SHOWN_MAX)):
            log = cursor.partition.log
            offset = max(cursor.position, log.start_offset)
            if offset >= log.end_offset or not self.caller.sees(topic):
                continue
            try:
                batch = await completed(lambda log=log, offset=offset: log.read_cached(offset))  # type: ignore[misc]
                index = offset - batch.base_offset
                times = batch.times(index, index + 1)
            except (HeadraceError, OSError):  # damaged, or retention was faster
                continue
            time_ms = batch.base_timestamp if times is None else times[0]
            if best is None or time_ms < best["timestamp"]:
                state = state_of(self.engine, found, cursor, offset)["state"]
                best = {
                    "topic": topic,
                    "partition": number,
                    "offset": offset,
                    "timestamp": time_ms,
                    "state": state,
                }
        return best

    async def search_messages(
        self,
        topic: str,
        wanted: str,
        kind: str,
        start: Start,
        until: Start,
        partition: int | None,
        cursor: str,
        limit: int,
    ) -> SearchPage:
        engine, found, finds = self.engine, self.engine.topics.find(topic), finder(kind, wanted)
        given = parse_cursor(cursor)
        if given:
            chosen = [found.partition(number) for number in given]
        else:
            chosen = found.partitions if partition is None else [found.partition(partition)]
        stretches: dict[int, tuple[int, int]] = {}
        async for place in engine.pace.each(list(chosen)):
            at, end = [
                await completed(partial(engine.resolve, place, position, time_ms=time_ms))
                for position, time_ms in map(split_position, (start, until))
            ]
            stretches[place.number] = given.get(place.number, at), end
        for each in (start, until):
            if isinstance(each, int) and len(stretches) > 1 and not given:
                raise partition_needed(topic, len(stretches), each)
        return await search(engine, found, finds, stretches, limit)

    # --- a message ----------------------------------------------------------------------------
    async def message_life(self, id: uuid.UUID) -> MessageLife:
        return await self._life(await self.find(id))

    async def life_at(self, topic: str, partition: int, offset: int) -> MessageLife:
        place = self.engine.topics.find(topic).partition(partition)
        id = derive_id(topic_hash(topic), place.number, offset)
        return await self._life(await self.find(id))

    async def _life(self, message: Message) -> MessageLife:
        topic = self.engine.topics.find(message.topic)
        lives = self.engine.history.lives
        states: list[MessageState] = []
        async for each in self.engine.pace.each(topic_subscriptions(topic, self.engine)):
            cursor = each.cursors.get((message.topic, message.partition))
            if cursor is not None and self.permissions.sees(each):
                state = state_of(self.engine, each, cursor, message.offset)
                if state["state"] == "done":
                    letter = await self._letter_of(each, message)
                    if letter is not None:
                        state["state"] = "dead letter"
                        state["dead_letter"], state["dead_lettered"] = letter
                if state["state"] == "done":
                    state["sinks"] = self._sinks(each.name)
                origin = (message.topic, message.partition, message.offset, each.name)
                redriven = lives.redrive_of(origin)
                if redriven is not None and self.permissions.may("browse", redriven.topic):
                    state["redriven"] = {
                        "time": redriven.time_ms,
                        "dead_lettered": redriven.dead_lettered_ms,
                        "topic": redriven.topic,
                        "partition": redriven.partition,
                        "offset": redriven.offset,
                    }
                states.append(state)
            if len(states) >= SHOWN_MAX:
                break
        first = message.headers.get(FIRST_PUBLISHED, "")
        by = self.engine.publishing.recent.of_message(topic, message.partition, message.offset)
        return {
            "id": str(message.id),
            "topic": message.topic,
            "partition": message.partition,
            "offset": message.offset,
            "published": message.timestamp,
            "publisher": None if by is None else self._publisher(by, message.topic),
            "first_published": int(first) if first.isascii() and first.isdigit() else None,
            "origin": self._origin(message),
            "subscriptions": states,
        }

    def _origin(self, message: Message) -> MessagePlace | None:
        """Where a redriven message was published at first: it has kept its id."""
        parts = split_id(message.id)
        topic = None if parts is None else self.engine.topics.by_hash(parts[0])
        if parts is None or topic is None or FIRST_PUBLISHED not in message.headers:
            return None
        place: MessagePlace = {"topic": topic.name, "partition": parts[1], "offset": parts[2]}
        return place if self.permissions.may("browse", topic.name) else None

    def _sinks(self, name: str) -> list[str]:
        """Where the pipeline of this name writes. Its subscription moves when a batch is in the table."""
        if not self.caller.sees(name=name):
            return []
        try:
            pipeline = self.engine.pipelines.stats(name)
        except NotFound:
            return []
        return [sink for query in pipeline["queries"] if (sink := query.get("sink"))]

    async def find(self, id: uuid.UUID) -> Message:
        raise NotImplementedError

    async def _letter_of(
        self, subscription: Subscription, message: Message
    ) -> tuple[int, int] | None:
        """The dead letter that a message became, and when."""
        if not subscription.tally.dead_lettered and not self._has_letters(subscription):
            return None

        def same(letter: DeadLetter) -> bool:
            origin = letter.message
            return (origin.topic, origin.partition, origin.offset, letter.subscription) == (
                message.topic, message.partition, message.offset, subscription.name,
            )  # fmt: skip

        letters = self.engine.dead_letters
        try:
            listing = letters.listing(subscription.name, limit=1, where=same)
            found = await completed(listing.collect)
        except (NotFound, DataCorrupt):
            return None
        return (found[0].offset, found[0].timestamp) if found else None

    def _has_letters(self, subscription: Subscription) -> bool:
        name = self.engine.dead_letters.topic_name(subscription, subscription.pattern)
        return self.engine.topics.get(name) is not None

    # --- previews -----------------------------------------------------------------------------
    def _to_seek(self, name: str, topic: str | None) -> tuple[Subscription, str | None]:
        """The subscription that is moved, and the only topic of its pattern that is, or None for all."""
        found = None if topic is None else self.engine.subscription_or_none(name, topic)
        if found is None:  # the topic is one of those that a pattern matches
            found = self.permissions.subscription(name)
        self.permissions.need_to_use("consume", found)
        return found, None if topic == found.pattern else topic

    async def preview_seek(
        self, subscription: str, to: Start, topic: str | None, partition: int | None
    ) -> SeekPreview:
        position, time_ms = split_position(to)
        engine = self.engine
        found, only = self._to_seek(subscription, topic)
        steps: list[SeekStep] = []
        lag = found.lag()
        after = lag
        async for (name, number), cursor in engine.pace.each(sorted(found.cursors.items())):
            if only not in (None, name) or partition not in (None, number):
                continue
            place = cursor.partition
            target = await completed(
                lambda place=place: engine.resolve(place, position, time_ms=time_ms)  # type: ignore[misc]
            )
            end = place.log.end_offset
            undone = cursor.undone_count(target) if target > cursor.position else 0
            again = _done_between(cursor, target, end)
            after += (end - target) - cursor.lag()
            steps.append(
                {
                    "topic": name,
                    "partition": number,
                    "position": cursor.position,
                    "target": target,
                    "again": again,
                    "skipped": undone,
                }
            )
        if not steps:
            raise OffsetOutOfRange(f"{subscription!r} has no such partition")
        return {
            "partitions": steps[:SHOWN_MAX],
            "again": sum(step["again"] for step in steps),
            "skipped": sum(step["skipped"] for step in steps),
            "lag": lag,
            "lag_after": max(after, 0),
            "in_flight": found.in_flight(),
        }

    async def preview_redrive(
        self,
        subscription: str,
        offsets: list[int] | None,
        reason: str | None,
        topic: str | None,
        limit: int | None,
        destination: str | None,
        transform: Any,
    ) -> RedrivePreview:
        if transform is not None:
            check_transform(transform)
        only = None if offsets is None else set(offsets)
        wanted = letter_filter(reason, topic)
        allowed = None if self.caller.unlimited else self.permissions.may_see_letter

        def where(letter: DeadLetter) -> bool:
            return (
                (only is None or letter.offset in only)
                and (wanted is None or wanted(letter))
                and (allowed is None or allowed("browse", letter))
            )

        samples: list[RedriveSample] = []
        matching = failing = 0
        most = COUNTED_MAX if limit is None else min(limit, COUNTED_MAX)
        after, letters = -1, self.engine.dead_letters
        while matching < most:
            listing = letters.listing(
                subscription, after=after, limit=min(LETTERS_PAGE, most - matching), where=where
            )
            page = await completed(listing.collect)
            if not page:
                break
            after = page[-1].offset
            async for letter in self.engine.pace.each(page):
                matching += 1
                sample = _sample(letter, destination, transform)
                failing += sample["error"] is not None
                if len(samples) < SAMPLES_MAX:
                    samples.append(sample)
        return {
            "matching": matching,
            "complete": matching < COUNTED_MAX,
            "failing": failing,
            "samples": samples,
        }


def _sample(letter: DeadLetter, destination: str | None, transform: Any) -> RedriveSample:
    message = letter.message
    value = message.value or b""
    before = value[:SAMPLE_CHARS_MAX].decode(errors="replace")
    after: str | None = before
    error = None
    target = destination or message.topic
    if transform is not None:
        try:
            after = transformed(value, transform)[:SAMPLE_CHARS_MAX].decode(errors="replace")
        except HeadraceError as failure:
            after, error = None, failure.message
    if destination is None and message._id is None and message.topic.endswith(".dlq"):
        after, error = None, "it does not say which topic it came from"
    return {
        "offset": letter.offset,
        "topic": target,
        "before": before,
        "after": after,
        "error": error,
    }


def letter_filter(
    reason: str | None, topic: str | None, allowed: Callable[[DeadLetter], bool] | None = None
) -> Callable[[DeadLetter], bool] | None:
    """Letters with this reason (a part of it is enough), from this topic, and allowed; None: all."""
    if reason is None and topic is None:
        return allowed
    part = None if reason is None else reason.lower()

    def wanted(letter: DeadLetter) -> bool:
        return (
            (part is None or part in letter.reason.lower())
            and (topic is None or letter.message.topic == topic)
            and (allowed is None or allowed(letter))
        )

    return wanted


def _done_between(cursor: Cursor, start: int, end: int) -> int:
    """Messages from an offset on that are done."""
    if start < cursor.position:
        return cursor.position - start + cursor.done_count(end)
    return cursor.done_count(end) - cursor.done_count(start)


def _finding(severity: Any, code: str, text: str, **about: str) -> Concern:
    return {"severity": severity, "code": code, "text": text, **about}  # type: ignore[typeddict-item]


def _sorted(
    rows: list[Any], by: str, then: str, descending: bool, skip: int, limit: int
) -> list[Any]:
    """A part of the sorted rows; equal ones by name."""
    sign = -1 if descending else 1
    if by in ("topic", "subscription"):
        rows.sort(key=lambda row: row[by], reverse=descending)
        return rows[skip : skip + limit]
    first = heapq.nsmallest(skip + limit, rows, key=lambda row: (sign * row[by], row[then]))
    return first[skip:]
