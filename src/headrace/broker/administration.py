"""The operations of ``operations/catalog.py``, carried out on an engine for one caller.

Each method has the name of its declaration and takes the arguments by their names on the wire, checked.
:meth:`Administration.call` is the one place through which every operation of every protocol passes: it
checks the arguments, then the permission that the operation declares (``permissions.py``), and records
every administrative change (``audit.py``). What a declaration cannot say, such as the items of a list, is
checked by the method.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.access import hashing, management
from headrace.access.caller import OWNER, Caller
from headrace.access.management import Authority, quota_values
from headrace.access.rights import Right, grant_text
from headrace.access.rules import AccessRules
from headrace.broker import overview as overviews
from headrace.broker import positions as places
from headrace.broker.audit import IN_PROCESS, Source
from headrace.broker.awaiting import answer, done
from headrace.broker.backups import BackupAdministration
from headrace.broker.clustering import ClusterAdministration, WantedSubscription
from headrace.broker.engine import Engine
from headrace.broker.permissions import Permissions
from headrace.broker.redrives import RedriveAdministration
from headrace.broker.subscription import Subscription
from headrace.broker.topic import Partition, Topic
from headrace.broker.topic_statistics import topic_stats, topic_subscriptions
from headrace.broker.watching import WatchingAdministration, letter_filter
from headrace.errors import Done, HeadraceError, MessageNotFound, SubscriptionNotFound, unreadable
from headrace.log.interface import completed
from headrace.model import (
    REPLY_TO,
    DeadLetter,
    Message,
    ProducerIdentity,
    Start,
    split_position,
)
from headrace.operations.declaring import Operation
from headrace.operations.results import (
    BrokerInfo,
    CallerInfo,
    ChangedSubscription,
    ChangedTopic,
    ClientInfo,
    DeadLetterCount,
    NewToken,
    Overview,
    PartitionPosition,
    PipelineReport,
    PipelineStats,
    QuotaInfo,
    StopWanted,
    SubscriptionStats,
    TokenInfo,
    TopicStats,
    UserInfo,
)
from headrace.publication import settle

WAIT_S_MAX = 60.0
"""Of one ``wait_for``; a caller that waits longer asks again."""
LETTER_BYTES_MAX = 4 << 20
"""Of the dead letters of one answer."""
LETTERS_PAGE = 500


class New(dict[str, Any]):
    """A result that did not exist before. HTTP answers 201 for it."""


AUDITED = ("manage", "admin")
"""Permissions whose operations change something for others."""
AUDITED_TOO = ("create_subscription", "seek")
"""They take less, but move or keep what all members of a subscription get."""


def _is_audited(operation: Operation) -> bool:
    return operation.permission in AUDITED or operation.name in AUDITED_TOO


def _is_change(operation: Operation, checked: dict[str, Any], result: object) -> bool:
    """Not a list of users, and not a subscription that is there: every member creates it as it joins."""
    if operation.name == "create_subscription":
        return isinstance(result, New) or bool(checked["settings"])
    return operation.method not in ("users", "tokens", "read_backup", "read_backup_partition")


class Administration(
    BackupAdministration, ClusterAdministration, RedriveAdministration, WatchingAdministration
):
    def __init__(
        self,
        engine: Engine,
        caller: Caller = OWNER,
        source: Source = IN_PROCESS,
        *,
        forwarded: bool = False,
    ):
        self._forwarded = forwarded
        """Another node asks."""
        self.engine = engine
        self.caller = caller
        self.permissions = Permissions(engine, caller, source)
        self.source = source

    async def call(
        self, operation: Operation, given: dict[str, Any], *, strict: bool = True
    ) -> Any:
        """Check the arguments and the permission, and carry the operation out."""
        checked = operation.check(given, strict=strict)
        self.engine.check_open()
        if not _is_audited(operation):
            self.permissions.check(operation, checked)
            return await self._run(operation, checked)
        outcome, result = "bug", None
        try:
            self.permissions.check(operation, checked)
            result = await self._run(operation, checked)
            outcome = "ok"
            return result
        except HeadraceError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:  # the caller is gone, or the broker stops
            outcome = "interrupted"
            raise
        finally:
            if outcome != "ok" or _is_change(operation, checked, result):
                target = checked.get(operation.about or "")
                self.engine.audit.operation(
                    self.caller.name, self.source, operation.name, target, checked, outcome
                )

    async def _run(self, operation: Operation, checked: dict[str, Any]) -> Any:
        cluster = self.engine.cluster
        if cluster is not None:
            if not self._forwarded:
                return await cluster.call(self, operation, checked)
            await cluster.accept(operation, checked)
        return await self.here(operation, checked)

    async def here(self, operation: Operation, checked: dict[str, Any]) -> Any:
        """Carry it out on this node."""
        try:
            return await getattr(self, operation.method)(**checked)
        except HeadraceError:  # a RequestTimeout is an OSError, too
            raise
        except OSError as error:  # of a read: what is written answers with an error of its own
            raise unreadable(error) from error

    # --- topics -----------------------------------------------------------------------------
    async def create_topic(self, topic: str, settings: dict[str, Any]) -> ChangedTopic:
        await self._unchanged(topic)
        existing = self.engine.topics.get(topic)
        if existing is not None and existing.settings.but(settings) == existing.settings:
            return {**self._topic(existing), "outcome": "unchanged"}
        chosen = self.engine.topics.defaults.but(settings)
        self.permissions.need_to_create(topic, chosen.partitions)

        def create(done: Callable[..., None]) -> None:
            with self.permissions.owning():
                self.engine.create_topic_later(topic, chosen, done)

        made: Topic = await answer(create)
        return New(self._topic(made), outcome="created")  # type: ignore[return-value]

    async def change_topic(self, topic: str, settings: dict[str, Any]) -> ChangedTopic:
        if "partitions" in settings:
            self.permissions.need_to_create(topic, settings["partitions"])
        await self._unchanged(topic)
        before = self.engine.topics.find(topic).settings
        changed: Topic = await answer(self.engine.change_topic, topic, settings)
        is_same = before == changed.settings
        return {**self._topic(changed), "outcome": "unchanged" if is_same else "updated"}

    async def _unchanged(self, topic: str) -> None:
        """Wait while a worker creates or changes the topic for somebody else."""
        while (when := self.engine.topics.when_unchanged(topic)) is not None:
            unchanged = asyncio.Event()
            when(unchanged.set)
            await unchanged.wait()

    def _topic(self, topic: Topic) -> TopicStats:
        stats = topic_stats(self.engine, topic)
        if not self.caller.unlimited:
            seen = filter(self.permissions.sees, topic_subscriptions(topic, self.engine))
            stats["subscriptions"] = [subscription.name for subscription in seen]
        return stats

    async def delete_topic(self, topic: str) -> None:
        await self._unchanged(topic)
        self.engine.access.forget_topic(topic)
        await done(self.engine.delete_topic, topic)

    async def list_topics(self) -> list[TopicStats]:
        sees = self.caller.sees
        found = {
            t.name: t for t in self.engine.topics if not t.name.startswith("__") and sees(t.name)
        }
        topics = [found[name] for name in sorted(found)]
        return [
            self._topic(topic)
            async for topic in self.engine.pace.each(topics)
            if self.engine.topics.get(topic.name) is topic  # not deleted meanwhile
        ]

    async def topic_stats(self, topic: str, create: bool) -> TopicStats:
        if create:
            self.permissions.check_publish(topic)
        found = self.engine.topic_for_publish(topic) if create else self.engine.topics.find(topic)
        if create:
            await done(self.engine.topics.when_made, found)
        return self._topic(found)

    async def offset_at(self, topic: str, at: Start, partition: int) -> int:
        position, time_ms = split_position(at)
        place = self.engine.partition(topic, partition)
        return await completed(lambda: self.engine.resolve(place, position, time_ms=time_ms))

    async def find(self, id: uuid.UUID) -> Message:
        found = await completed(lambda: self.engine.topics.find_message(id))
        if not self.permissions.may("browse", found.topic):
            raise MessageNotFound(f"there is no message {id}, or you have no right to browse it")
        return found

    # --- subscriptions ------------------------------------------------------------------------
    async def create_subscription(
        self, subscription: str, topic: str, start: Start, settings: dict[str, Any]
    ) -> ChangedSubscription:
        position, time_ms = split_position(start)
        existing = self.engine.subscription_or_none(subscription, topic)
        before = None if existing is None else existing.settings
        no_topic = self.engine.topics.lacks(topic)
        owner = None if self.caller.unlimited else self.caller.name
        known: dict[Partition, int] = {}

        def subscribe(done: Done) -> None:
            with self.permissions.owning():
                self.engine.subscribe(
                    subscription,
                    topic,
                    start=position,
                    start_time_ms=time_ms,
                    settings=settings,
                    done=done,
                    owner=owner,
                    known=known,
                )

        cluster = self.engine.cluster
        if cluster is None:
            await done(subscribe)
        else:
            with self.permissions.owning():
                wanted = WantedSubscription(subscription, topic, position, time_ms, settings, owner)
                await cluster.subscribe(wanted)
        found = self.engine.subscription(subscription, topic)
        if before is None:
            created = {"topic_created": True} if no_topic else {}
            return New(found.statistics(), outcome="created", **created)  # type: ignore[return-value]
        is_same = before == found.settings
        return {**found.statistics(), "outcome": "unchanged" if is_same else "updated"}

    async def delete_subscription(self, subscription: str, topic: str | None) -> None:
        await done(self.engine.unsubscribe, self.permissions.subscription(subscription, topic))

    async def pause_subscription(self, subscription: str, topic: str | None) -> SubscriptionStats:
        return await self._pause(subscription, topic, True)

    async def resume_subscription(self, subscription: str, topic: str | None) -> SubscriptionStats:
        return await self._pause(subscription, topic, False)

    async def _pause(self, name: str, topic: str | None, paused: bool) -> SubscriptionStats:
        found = self.permissions.subscription(name, topic)
        if found.paused == paused:
            began = self.engine.loop.time()
        await done(self.engine.state.flush)
        if self._forwarded and self.engine.cluster is not None:
            self.engine.cluster.flushed(self.source, began)
        else:
            found.paused = paused
            found.wake()
            await done(self.engine.keep, found)
        return self._seen(found.statistics())

    async def subscriptions(self, topic: str | None) -> list[SubscriptionStats]:
        seen = filter(self.permissions.sees, self.engine.subscriptions(topic))
        return [self._stats(each) async for each in self.engine.pace.each(seen)]

    async def subscription_stats(self, subscription: str, topic: str | None) -> SubscriptionStats:
        return self._stats(self.permissions.subscription(subscription, topic))

    def _stats(self, found: Subscription) -> SubscriptionStats:
        return {**self._seen(found.statistics()), "verdict": self.engine.history.verdict(found)}

    def _seen(self, stats: SubscriptionStats) -> SubscriptionStats:
        """Without the topics of a wildcard that the caller has no right over."""
        if not self.caller.unlimited:
            sees = self.caller.sees
            stats["partitions"] = [each for each in stats["partitions"] if sees(each["topic"])]
        return stats

    async def seek(
        self, subscription: str, to: Start, topic: str | None, partition: int | None
    ) -> SubscriptionStats:
        found, only = self._to_seek(subscription, topic)
        position, time_ms = split_position(to)
        seek = partial(self.engine.seek, time_ms=time_ms, topic=only, partition=partition, known={})
        await done(seek, found, position)
        return found.statistics()

    async def advance(
        self, subscription: str, positions: places.Positions, topic: str | None
    ) -> None:
        found = self.permissions.subscription(subscription, topic)
        await done(places.advance, self.engine, found, positions)

    # --- jobs of many tasks -------------------------------------------------------------------
    async def positions(
        self, topics: str | list[str], at: int | None
    ) -> dict[str, list[PartitionPosition]]:
        describe = partial(places.describe, self.engine, topics, at, self._browses, known={})
        return await completed(describe)

    async def wait_for(
        self, positions: places.Positions, topics: str | list[str] | None, wait: float
    ) -> bool:
        self.permissions.need_topics("browse", list(positions))
        seconds = min(wait, WAIT_S_MAX)
        news = await places.wait_for(self.engine, positions, topics, seconds, self._browses)
        self.permissions.need_topics("browse", list(positions))  # it has waited
        return news

    def _browses(self, topic: str) -> bool:
        return self.permissions.may("browse", topic)

    async def commit_staged(self, name: str, number: int, pieces: list[str]) -> bool:
        self.caller.need("publish", name=name)
        pieces = self.permissions.pieces(pieces)
        return bool(await answer(self.engine.staging.commit, name, number, pieces))

    async def last_commit(self, name: str) -> int:
        self.caller.need("publish", name=name)
        return int(await answer(self.engine.staging.last_commit, name))

    async def abort_staged(self, pieces: list[str]) -> int:
        pieces = self.permissions.pieces(pieces)
        await done(self.engine.staging.abort, pieces)
        return len(pieces)

    # --- requests -----------------------------------------------------------------------------
    async def send_request(
        self,
        topic: str,
        value: bytes,
        headers: Mapping[str, str] | None,
        key: bytes | None,
        id: uuid.UUID | None,
        wait: float,
    ) -> Message:
        self.permissions.check_publish(topic)
        address = id or uuid.uuid4()
        sent = {**(headers or {}), REPLY_TO: str(address)}
        publish = self.engine.publishing.message(topic, value, sent, {"key": key})
        return await self.engine.requests.ask(publish, address, wait, self.caller.name)

    async def send_reply(
        self, to: uuid.UUID, value: bytes, headers: Mapping[str, str] | None
    ) -> bool:
        return self.engine.requests.reply(to, value, headers)

    # --- dead letters -----------------------------------------------------------------------
    async def dead_letter_topics(self) -> list[DeadLetterCount]:
        letters = self.engine.dead_letters.topics()
        known = set() if self.caller.unlimited else self.permissions.buried()
        return [
            {"topic": topic, "letters": count}
            for topic, count in letters
            if self.caller.sees(topic) or topic in known
        ]

    async def dead_letters(
        self, subscription: str, after: int, limit: int, reason: str | None, topic: str | None
    ) -> list[DeadLetter]:
        letters, sees = self.engine.dead_letters, self.permissions.sees
        where = letter_filter(reason, topic, self._letters_for("browse"))
        try:
            listing = letters.listing(subscription, after=after, limit=limit, where=where)
        except SubscriptionNotFound:
            if any(
                each.name == subscription and sees(each) for each in self.engine.subscriptions()
            ):
                return []
            raise
        found = await completed(listing.collect)
        size = 0
        for count, letter in enumerate(found):  # at least one, and no more than an answer may have
            size += len(letter.message.value or b"")
            if size > LETTER_BYTES_MAX and count:
                return found[:count]
        return found

    async def dead_letter(self, subscription: str, offset: int) -> DeadLetter:
        return await self._letter("browse", subscription, offset)

    async def _letter(self, right: Right, subscription: str, offset: int) -> DeadLetter:
        letters = self.engine.dead_letters
        letter = await completed(lambda: letters.show(subscription, offset))
        if not self.permissions.may_see_letter(right, letter):
            raise self.caller.refusal(right, letter.message.topic, letter.subscription)
        return letter

    def _letters_for(self, right: Right) -> Callable[[DeadLetter], bool] | None:
        """Only letters whose origin the caller has the right over; None: all."""
        return None if self.caller.unlimited else partial(self.permissions.may_see_letter, right)

    async def edit_dead_letter(
        self,
        subscription: str,
        offset: int,
        value: bytes | None,
        headers: Mapping[str, str] | None,
    ) -> int:
        if not self.caller.unlimited:
            await self._letter("manage", subscription, offset)
        new: int = await answer(self.engine.dead_letters.edit, subscription, offset, value, headers)
        return new

    async def purge_dead_letters(self, subscription: str, offsets: list[int] | None) -> int:
        if not self.caller.unlimited:
            offsets = await self._purgeable(subscription, offsets)
        count: int = await answer(self.engine.dead_letters.purge, subscription, offsets)
        if offsets and not count:
            raise MessageNotFound(
                f"{subscription!r} has no dead letter {', '.join(map(str, offsets[:5]))}, or it was "
                "dealt with"
            )
        return count

    async def _purgeable(self, subscription: str, offsets: list[int] | None) -> list[int]:
        """Those of the letters that the caller may purge."""
        found: list[int] = []
        after = -1
        where = self._letters_for("manage")
        while True:
            letters = self.engine.dead_letters
            listing = letters.listing(subscription, after=after, limit=LETTERS_PAGE, where=where)
            page = [letter.offset for letter in await completed(listing.collect)]
            if not page:
                break
            found += page
            after = page[-1]
            await asyncio.sleep(0)
        return found if offsets is None else sorted(set(offsets) & set(found))

    # --- pipelines --------------------------------------------------------------------------
    async def report_pipeline(self, pipeline: str, report: PipelineReport) -> StopWanted:
        return self.engine.pipelines.report(pipeline, report)

    async def pipelines(self) -> list[PipelineStats]:
        sees = self.caller.sees
        return [each for each in self.engine.pipelines if sees(name=each["name"])]

    async def pipeline_stats(self, pipeline: str) -> PipelineStats:
        return self.engine.pipelines.stats(pipeline)

    async def stop_pipeline(self, pipeline: str) -> PipelineStats:
        return self.engine.pipelines.stop(pipeline)

    async def forget_pipeline(self, pipeline: str) -> None:
        self.engine.pipelines.forget(pipeline)

    # --- access -----------------------------------------------------------------------------
    async def whoami(self) -> CallerInfo:
        caller = self.caller
        return {
            "name": caller.name,
            "administrator": caller.unlimited,
            "grants": [grant_text(grant) for grant in caller.grants],
            "quotas": quota_values(caller.quotas),
        }

    @property
    def _authority(self) -> Authority:
        return Authority.of(self.caller, has_setting=self.engine.access.setting is not None)

    @property
    def _rules(self) -> AccessRules:
        return self.engine.access.rules or AccessRules()

    async def _change(
        self, change: Callable[..., AccessRules], *args: Any, **given: Any
    ) -> AccessRules:
        return await self.engine.access.change(
            lambda rules: change(rules, self._authority, *args, **given)
        )

    async def users(self) -> list[UserInfo]:
        return management.users(self._rules, self._authority)  # type: ignore[return-value]

    async def create_user(
        self, user: str, password: str | None, grants: Any, certificates: Any, quotas: Any
    ) -> UserInfo:
        hashed = None if password is None else await self._hashed(password)
        rules = await self._change(
            management.create_user,
            user,
            now_ms=self.engine.now_ms(),
            password=hashed,
            grants=grants,
            certificates=certificates,
            quotas=quotas,
        )
        return New(_shown(rules, user))  # type: ignore[return-value]

    async def change_user(
        self,
        user: str,
        password: str | None,
        grants: Any,
        certificates: Any,
        quotas: Any,
        disabled: bool | None,
    ) -> UserInfo:
        hashed = None if password is None else await self._hashed(password)
        given = {"grants": grants, "certificates": certificates, "quotas": quotas}
        change = management.change_user
        rules = await self._change(change, user, password=hashed, disabled=disabled, **given)
        return _shown(rules, user)  # type: ignore[return-value]

    async def _hashed(self, password: str) -> str:
        return await self.engine.access.hashed(hashing.check_password(password))

    async def delete_user(self, user: str) -> None:
        await self._change(management.delete_user, user)

    async def tokens(self) -> list[TokenInfo]:
        found = management.tokens(self._rules, self._authority, self.engine.now_ms())
        return found  # type: ignore[return-value]

    async def create_token(
        self, token: str, user: str | None, grants: Any, expires: int | None, quotas: Any
    ) -> NewToken:
        secret = hashing.new_token()
        sha256, now = hashing.token_hash(secret), self.engine.now_ms()
        given = {"user": user, "grants": grants, "expires": expires, "quotas": quotas}
        create = management.create_token
        rules = await self._change(create, token, now_ms=now, sha256=sha256, **given)
        made = rules.token(token)
        assert made is not None
        shown = management.token_info(made, self.engine.now_ms())
        return New({**shown, "secret": secret})  # type: ignore[return-value]

    async def revoke_token(self, token: str) -> None:
        await self._change(management.revoke_token, token)

    async def change_quotas(self, addresses: Any, default: Any) -> QuotaInfo:
        rules = self._rules
        if not self.caller.unlimited:
            raise self.caller.refusal("admin", ">")
        if addresses is not None or default is not None:
            change = management.change_quotas
            rules = await self._change(change, addresses=addresses, default=default)
        return {
            "addresses": quota_values(rules.addresses),
            "default": quota_values(rules.default),
        }

    # --- the broker -------------------------------------------------------------------------
    async def producer(self, name: str | None) -> ProducerIdentity:
        if name is not None:
            self.caller.need("publish", name=name)
        future: asyncio.Future[ProducerIdentity] = asyncio.get_running_loop().create_future()
        self.engine.publishing.producer(
            name, lambda pid, epoch, error: settle(future, ProducerIdentity(pid, epoch), error)
        )
        return await future

    async def flush(self) -> None:
        await done(self.engine.state.flush)

    async def clients(self, after: int, limit: int) -> list[ClientInfo]:
        authority = self._authority

        def sees(other: Caller) -> bool:
            name = other.name.partition(":")[2]
            return other.name == self.caller.name or (
                bool(name) and authority.may_administer(name, other.grants)
            )

        connected = list(self.engine.connections())
        seen = (c for c in connected if c.number > after)
        if not self.caller.unlimited:
            seen = (c for c in seen if sees(c.caller))
        return await overviews.clients(self.engine, seen, limit)

    async def overview(self, limit: int) -> Overview:
        return await overviews.overview(self.engine, self.permissions, limit)

    async def info(self) -> BrokerInfo:
        engine = self.engine
        return {
            "server": "headrace",
            "topics": sum(
                not topic.name.startswith("__") and self.caller.sees(topic.name)
                for topic in engine.topics
            ),
            "subscriptions": sum(map(self.permissions.sees, engine.subscriptions())),
            "max_message_size": engine.max_message_size,
            "durable": engine.directory is not None,
            "time": engine.now_ms(),
            "cluster": None
            if engine.cluster is None or not self.caller.may("metrics")
            else engine.cluster.cluster_name,
        }


def _shown(rules: AccessRules, name: str) -> dict[str, Any]:
    user = rules.user(name)
    assert user is not None
    return management.user_info(rules, user)
