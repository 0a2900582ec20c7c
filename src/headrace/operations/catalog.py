"""Every operation of a broker, declared once; ``declaring.py`` says what is derived from a declaration.

Those about users, tokens and quotas are in ``access_catalog.py``, redrives in ``redriving.py``.

To add one: declare it here, and write the method of the same name in ``broker/administration.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Unpack

from headrace.model import (
    DeadLetter,
    Message,
    ProducerIdentity,
    SubscriptionOptions,
    SubscriptionSettings,
    TopicOptions,
    TopicSettings,
)
from headrace.operations.access_catalog import AccessOperations
from headrace.operations.arguments import (
    AfterOffset,
    AliasOf,
    DefinedSubscription,
    ExistingMessage,
    ExistingSubscription,
    ExistingTopic,
    Headers,
    LetterOffset,
    Limit,
    Offset,
    Offsets,
    Partition,
    Payload,
    Pieces,
    Position,
    Positions,
    Seconds,
    SubscriptionName,
    Time,
    TopicFilter,
    TopicName,
    TopicPattern,
    Topics,
    UserTopic,
)
from headrace.operations.backups import BackupOperations
from headrace.operations.cluster_catalog import ClusterOperations
from headrace.operations.declaring import (
    Operation,
    deletion,
    on_letters,
    operation,
    route,
    table_of,
)
from headrace.operations.delayed import DelayedOperations
from headrace.operations.pipeline_catalog import PipelineOperations
from headrace.operations.redriving import RedriveOperations
from headrace.operations.requesting import Requesting
from headrace.operations.results import (
    BrokerInfo,
    ChangedSubscription,
    ChangedTopic,
    ClientInfo,
    DeadLetterCount,
    Overview,
    PartitionPosition,
    SubscriptionStats,
    TopicStats,
)
from headrace.operations.watching import WatchingOperations


class Operations(
    AccessOperations,
    BackupOperations,
    ClusterOperations,
    DelayedOperations,
    PipelineOperations,
    RedriveOperations,
    Requesting,
    WatchingOperations,
):
    """The operations of a broker: callable by name over every protocol, and as methods in process."""

    async def _operate(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Run an operation, here or on the broker."""
        raise NotImplementedError

    # --- topics -----------------------------------------------------------------------------
    @operation(
        permission="manage",
        about="topic",
        settings=TopicSettings,
        errors=("topic_exists", "too_many_partitions"),
    )
    @route("PUT", "/topics/{topic}", "Create a topic with settings")
    async def create_topic(
        self, topic: TopicName, partitions: int | None = None, **settings: Unpack[TopicOptions]
    ) -> ChangedTopic:
        """Create a topic. If it already exists with the same settings, nothing changes.

        The answer's ``outcome`` is ``created`` or ``unchanged``. Settings that are not given get the broker's defaults. If the topic exists with other settings, this
        raises ``Conflict``.

        Example::

            await client.create_topic("orders", partitions=4, retention_hours=72)
        """

    @operation(
        permission="manage", about="topic", settings=TopicSettings, errors=("too_many_partitions",)
    )
    @route("PATCH", "/topics/{topic}", "Change settings")
    async def change_topic(
        self, topic: UserTopic, partitions: int | None = None, **settings: Unpack[TopicOptions]
    ) -> ChangedTopic:
        """Change the settings that are given. Partitions can be added, not removed.

        The answer's ``outcome`` is ``updated`` or ``unchanged``.

        Example::

            await client.change_topic("orders", retention_bytes=10 << 30)
        """

    @deletion(permission="manage", about="topic")
    @route("DELETE", "/topics/{topic}", "Delete a topic")
    async def delete_topic(self, topic: UserTopic) -> None:
        """Delete a topic, its messages, and the subscriptions on this topic alone.

        Example::

            await client.delete_topic("orders")
        """

    @operation(name="topics", permission="see", runs="every node")
    @route("GET", "/topics", "List topics")
    async def list_topics(self) -> list[TopicStats]:
        """Statistics of every topic, by name. The broker's own topics are left out.

        Example::

            sizes = {stats["topic"]: stats["bytes"] for stats in await client.list_topics()}
        """

    async def topics(self) -> list[str]:
        """The names of all topics. The broker's own topics are left out.

        Example::

            for name in await client.topics():
                print(name)
        """
        return [stats["topic"] for stats in await self.list_topics()]

    @operation(name="topic", permission="see", about="topic", runs="every node")
    @route("GET", "/topics/{topic}", "Describe a topic")
    @route("GET", "/topics/{topic}/stats", "Statistics of a topic")
    async def topic_stats(self, topic: ExistingTopic, *, create: bool = False) -> TopicStats:
        """Partitions, sizes, backlog and settings of a topic.

        ``create``: create a topic that does not exist, as a publish would.

        Example::

            print((await client.topic_stats("orders"))["backlog"])
        """

    @operation(permission="browse", about="topic", answer="offset")
    async def offset_at(
        self, topic: ExistingTopic, at: Position, *, partition: Partition = 0
    ) -> int:
        """The offset that a position stands for: ``earliest``, ``latest``, an offset or a time.

        Example::

            offset = await client.offset_at("orders", datetime.now(UTC) - timedelta(hours=1))
        """

    @operation(permission="browse")
    async def find(self, id: ExistingMessage) -> Message:
        """The message that an id from a receipt belongs to.

        Example::

            message = await client.find(receipt.id)
        """

    # --- subscriptions ------------------------------------------------------------------------
    @operation(
        permission="consume",
        about="subscription",
        settings=SubscriptionSettings,
        errors=("subscription_busy", "too_many_subscriptions", "topic_not_found"),
    )
    @route(
        "POST",
        "/subscribe/{topic}",
        "Create a subscription",
        tag="subscriptions",
        rename={"group": "subscription"},
        defaults={"subscription": "default"},
    )
    async def create_subscription(
        self,
        subscription: SubscriptionName,
        topic: TopicPattern,
        start: Position = "earliest",
        *,
        start_offset: Annotated[Position | None, AliasOf("start")] = None,
        **settings: Unpack[SubscriptionOptions],
    ) -> ChangedSubscription:
        """Create a durable subscription on a topic or pattern.

        ``start`` (also called ``start_offset``) is where a new subscription begins. If the subscription
        already exists, its position stays (``seek`` moves it), and the given settings are changed. The
        answer's ``outcome`` is ``created``, ``updated`` or ``unchanged``.

        Example::

            await client.create_subscription("email", "orders", ack_timeout=60, max_deliveries=3)
        """

    @deletion(permission="manage", about="subscription")
    @route("DELETE", "/subscriptions/{subscription}", "Delete a subscription")
    async def delete_subscription(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> None:
        """Delete a subscription and its position. Name the topic if the name is not unique.

        Example::

            await client.delete_subscription("email")
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/subscriptions", "List subscriptions")
    async def subscriptions(self, topic: TopicFilter | None = None) -> list[SubscriptionStats]:
        """Statistics of every subscription, or of those on one topic.

        Example::

            lags = {stats["name"]: stats["lag"] for stats in await client.subscriptions("orders")}
        """

    @operation(name="subscription", permission="see", about="subscription", runs="every node")
    @route("GET", "/subscriptions/{subscription}", "Describe a subscription")
    async def subscription_stats(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> SubscriptionStats:
        """Members, lag, messages in flight, positions and settings of a subscription.

        Example::

            print((await client.subscription_stats("email"))["lag"])
        """

    @operation(
        permission="consume",
        about="subscription",
        runs="every node",
        errors=("offset_out_of_range",),
    )
    @route("POST", "/subscriptions/{subscription}/seek", "Replay, or skip")
    async def seek(
        self,
        subscription: DefinedSubscription,
        to: Position,
        *,
        topic: TopicFilter | None = None,
        partition: Partition | None = None,
    ) -> SubscriptionStats:
        """Move a subscription to ``earliest``, ``latest``, an offset or a time.

        Example::

            await client.seek("email", datetime.now(UTC) - timedelta(hours=1))  # deliver the last hour again
        """

    @operation(
        permission="consume",
        about="subscription",
        runs="every node",
        answer="advanced",
        patient=True,
        errors=("offset_out_of_range",),
    )
    async def advance(
        self,
        subscription: DefinedSubscription,
        positions: Positions,
        *,
        topic: TopicFilter | None = None,
    ) -> None:
        """Mark everything before these offsets as done. The subscription never moves back.

        Example::

            await client.advance("email", {"orders": {0: 100}})
        """

    @operation(permission="manage", about="subscription")
    @route("POST", "/subscriptions/{subscription}/pause", "Pause a subscription")
    async def pause_subscription(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> SubscriptionStats:
        """Deliver nothing more to any member until the subscription is resumed, also after a restart.

        Messages in flight may still be acknowledged. Publishing goes on, and the lag grows.

        Example::

            await client.pause_subscription("email")  # the mail server is down
        """

    @operation(permission="manage", about="subscription")
    @route("POST", "/subscriptions/{subscription}/resume", "Resume a subscription")
    async def resume_subscription(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> SubscriptionStats:
        """Deliver messages of a paused subscription again.

        Example::

            await client.resume_subscription("email")
        """

    # --- jobs of many tasks -------------------------------------------------------------------
    @operation(permission="browse", about="topics", patient=True)
    async def positions(
        self, topics: Topics, *, at: Time | None = None
    ) -> dict[str, list[PartitionPosition]]:
        """Start, end and bytes of every partition of the topics (names, patterns).

        With ``at``, a time (a datetime or milliseconds), also the ``offset`` of the first message at or
        after it; the end if there is none.

        Example::

            ends = [place["end"] for place in (await client.positions("orders"))["orders"]]
        """

    @operation(permission="browse", about="topics", answer="news", patient=True)
    async def wait_for(
        self,
        positions: Positions,
        *,
        topics: Topics | None = None,
        timeout: Annotated[Seconds, AliasOf("wait")],
    ) -> bool:
        """Wait until one of the partitions has messages at or after the given offset.

        It also returns when a topic that matches ``topics`` has a partition that is not in ``positions``.
        Returns False when the time is up.

        Example::

            while not await client.wait_for({"orders": {0: 100}}, timeout=10):
                print("nothing yet")
        """

    @operation(
        permission="publish",
        runs="leader",
        answer="committed",
        patient=True,
        errors=("piece_gone", "piece_lost", "commit_too_large"),
    )
    async def commit_staged(self, name: str, number: int, pieces: Pieces) -> bool:
        """Publish all staged pieces at once, under a name and a number that grows with each commit.

        To commit the same number again changes nothing and returns False. A client that had to repeat the
        request after a broken connection may also get False.

        Example::

            piece = await client.stage("copies", batch, name="job-1", number=5)
            await client.commit_staged("job-1", 5, [piece])
        """

    @operation(permission="publish", runs="leader", answer="number", patient=True)
    async def last_commit(self, name: str) -> int:
        """The number of the last commit of staged batches under a name; -1 if the broker knows none.

        Example::

            done = await client.last_commit("job-1")
        """

    @operation(permission="publish", runs="leader", answer="aborted", patient=True)
    async def abort_staged(self, pieces: Pieces) -> int:
        """Discard pieces that will not be committed. Committed pieces stay. Returns the number of ids.

        Example::

            await client.abort_staged([piece])
        """

    # --- dead letters -----------------------------------------------------------------------
    @operation(permission="see", runs="every node")
    @route("GET", "/dead-letters", "Count dead letters")
    async def dead_letter_topics(self) -> list[DeadLetterCount]:
        """The dead-letter topics, and how many letters each has.

        Example::

            for count in await client.dead_letter_topics():
                print(count["topic"], count["letters"])
        """

    @on_letters(permission="browse")
    @route("GET", "/dead-letters/{subscription}", "List dead letters")
    async def dead_letters(
        self,
        subscription: ExistingSubscription,
        *,
        after: AfterOffset = -1,
        limit: Limit = 100,
        reason: str | None = None,
        topic: TopicFilter | None = None,
    ) -> list[DeadLetter]:
        """The dead letters of a subscription after an offset, oldest first.

        ``reason`` (a part of it is enough) and ``topic`` limit the list.

        Example::

            for letter in await client.dead_letters("email"):
                print(letter.offset, letter.reason)
        """

    @on_letters(permission="browse")
    @route("GET", "/dead-letters/{subscription}/{offset}", "Show a dead letter")
    async def dead_letter(
        self, subscription: ExistingSubscription, offset: LetterOffset
    ) -> DeadLetter:
        """One dead letter.

        Example::

            letter = await client.dead_letter("email", 3)
        """

    @on_letters(permission="manage", repeatable=False, answer="offset")
    @route("PUT", "/dead-letters/{subscription}/{offset}", "Edit a dead letter")
    async def edit_dead_letter(
        self,
        subscription: ExistingSubscription,
        offset: LetterOffset,
        *,
        value: Payload | None = None,
        headers: Headers | None = None,
    ) -> int:
        """Correct a dead letter before it is redriven; returns its new offset.

        Example::

            offset = await client.edit_dead_letter("email", 3, value="corrected")
            await client.redrive("email", offsets=[offset])
        """

    @on_letters(
        permission="manage", repeatable=False, answer="purged", errors=("message_not_found",)
    )
    @route("DELETE", "/dead-letters/{subscription}", "Purge all dead letters")
    @route(
        "DELETE",
        "/dead-letters/{subscription}/{offset}",
        "Purge a dead letter",
        rename={"offset": "offsets"},
    )
    async def purge_dead_letters(
        self, subscription: ExistingSubscription, offsets: Offsets | None = None
    ) -> int:
        """Discard all dead letters, or those with these offsets; returns how many.

        Example::

            await client.purge_dead_letters("email", [3, 4])
        """

    # --- the broker -------------------------------------------------------------------------
    @operation(permission="publish")
    async def producer(self, name: str | None = None) -> ProducerIdentity:
        """The id and epoch of an idempotent producer. A name fences off the producer that had it before.

        Example::

            identity = await client.producer("importer")
            await client.publish("orders", b"x", producer=(*identity, 0))
        """

    @operation(permission="none", runs="every node")
    async def flush(self) -> None:
        """Wait until all acknowledgements so far are on disk.

        Example::

            message.ack()
            await client.flush()
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/clients", "List connections", tag="broker")
    async def clients(self, *, after: Offset = 0, limit: Limit = 1000) -> list[ClientInfo]:
        """Who is connected: address, login, ``client_id``, since when, and what it holds.

        An administrator sees all connections, everybody else those with the same login. ``after`` is the
        number of the last connection of the previous page.

        Example::

            for each in await client.clients():
                print(each["client_id"], each["in_flight"])
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/overview", "The broker at a glance", tag="broker")
    async def overview(self, *, limit: Limit = 100) -> Overview:
        """Totals of the broker, and the subscriptions that need attention first.

        Example::

            first = (await client.overview())["rows"][0]
        """

    @operation(permission="none")
    @route("GET", "/info", "The broker's limits", tag="broker")
    async def info(self) -> BrokerInfo:
        """The broker's limits and clock, and how many topics and subscriptions it has.

        Example::

            print((await client.info())["max_message_size"])
        """


OPERATIONS = (
    table_of(Operations)
    | table_of(AccessOperations)
    | table_of(BackupOperations)
    | table_of(ClusterOperations)
    | table_of(PipelineOperations)
    | table_of(DelayedOperations)
    | table_of(RedriveOperations)
    | table_of(Requesting)
    | table_of(WatchingOperations)
)
"""By their names on the wire."""
