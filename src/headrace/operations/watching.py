"""The operations that say how a broker is doing, and why: a part of ``catalog.py``.

The console is made of these, and ``headrace`` and the clients have them too. None of them changes anything.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from headrace.operations.arguments import (
    DefinedSubscription,
    ExistingMessage,
    ExistingSubscription,
    ExistingTopic,
    Limit,
    Offset,
    Offsets,
    Partition,
    Position,
    TimeMs,
    TopicFilter,
)
from headrace.operations.declaring import on_letters, operation, route
from headrace.operations.results import Count, Verdict

Severity = Literal["critical", "warning", "notice", "ok"]
Match = Annotated[str, Meta(max_length=249)]
"""A part of a name, in small letters or capitals."""
SearchText = Annotated[str, Meta(min_length=1, max_length=1000)]
SearchKind = Literal["text", "key", "header", "json"]
CursorText = Annotated[str, Meta(max_length=100_000)]
"""``partition:offset,…``, as the answer before said it."""
TopicSort = Literal["topic", "messages", "bytes", "rate", "backlog", "subscriptions"]
SubscriptionSort = Literal["subscription", "topic", "lag", "in_flight", "rate", "members"]
Transform = dict[str, Any] | list[dict[str, Any]]
"""A JSON Merge Patch (an object, RFC 7396), or a JSON Patch (a list, RFC 6902)."""


class History(TypedDict):
    """Measurements at equal distances of time, oldest first."""

    interval_ms: Count
    times: list[TimeMs]
    series: dict[str, list[float]]
    """Each as long as ``times``. Names that end in ``_per_second`` are rates."""


class Concern(TypedDict):
    severity: Severity
    code: str
    """Stable, for programs."""
    text: str
    """What is the case, and what to do."""
    topic: NotRequired[str]
    subscription: NotRequired[str]
    pipeline: NotRequired[str]


class TopicRow(TypedDict):
    topic: str
    partitions: Count
    messages: Count
    bytes: Count
    rate: float
    """Messages published per second, lately."""
    bytes_rate: float
    backlog: Count
    subscriptions: Count
    read_only: Count
    """Partitions that take no publishes."""
    durability: str
    retention_hours: float | None


class TopicTable(TypedDict):
    total: Count
    """Topics that match."""
    rows: list[TopicRow]


class SubscriptionRow(TypedDict):
    subscription: str
    topic: str
    lag: Count
    growth: float
    """Messages by which the lag has grown in the last minute."""
    in_flight: Count
    waiting_for_retry: Count
    members: Count
    paused: bool
    blocked: Count
    rate: float
    """Messages acknowledged per second, lately."""
    verdict: Verdict
    dead_letters: Count


class SubscriptionTable(TypedDict):
    total: Count
    rows: list[SubscriptionRow]


class Held(TypedDict):
    """A message that a member holds."""

    topic: str
    partition: Count
    offset: Offset
    attempt: Count
    since: TimeMs
    deadline: TimeMs
    """When it counts as failed, if nothing is heard."""


class MemberInfo(TypedDict):
    name: str
    """The client's id, or what it joined as."""
    connection: int | None
    address: str
    prefetch: Count
    in_flight: Count
    stalled: bool
    """It let a deadline pass and has settled nothing since."""
    reads: bool
    """False: its connection takes nothing more at present."""
    joined: TimeMs | None
    """None: it has left, or asked over HTTP, and still holds messages."""
    oldest: Held | None
    held: list[Held]
    """What it holds, the oldest first; a few of them."""


class WaitingRetry(TypedDict):
    topic: str
    partition: Count
    offset: Offset
    attempts: Count
    due: TimeMs | None
    """None: as soon as a member has room."""


class OldestMessage(TypedDict):
    topic: str
    partition: Count
    offset: Offset
    timestamp: TimeMs
    state: str
    """As in ``MessageState``."""


class Explanation(TypedDict):
    """Why a subscription is where it is."""

    subscription: str
    topic: str
    state: Literal["stuck", "slow", "working", "idle"]
    verdict: Verdict
    findings: list[Concern]
    """What matters most first."""
    oldest: OldestMessage | None
    """The oldest message that is not done."""
    members: list[MemberInfo]
    members_total: Count
    retries: list[WaitingRetry]
    retries_total: Count


class SeekStep(TypedDict):
    topic: str
    partition: Count
    position: Offset
    target: Offset
    again: Count
    """Messages that are done and would be delivered again."""
    skipped: Count
    """Messages that are not done and would never be delivered."""


class SeekPreview(TypedDict):
    partitions: list[SeekStep]
    """The first of them."""
    again: Count
    skipped: Count
    lag: Count
    lag_after: Count
    in_flight: Count
    """Deliveries that become stale."""


class RedriveSample(TypedDict):
    offset: Offset
    topic: str
    before: str
    after: str | None
    """None: it cannot be published again."""
    error: str | None


class RedrivePreview(TypedDict):
    matching: Count
    """Letters that would be published again, or cannot be."""
    complete: bool
    """False: there are more than were counted."""
    failing: Count
    """Of these, letters that cannot be."""
    samples: list[RedriveSample]


class PublisherInfo(TypedDict):
    """A client that has published."""

    client_id: str | None
    """What the client says about itself."""
    name: str
    """Who it was logged in as; empty without the right ``manage`` over the topic."""
    address: str
    """Empty without the right ``manage`` over the topic."""
    protocol: str


class TopicPublisher(PublisherInfo):
    last: TimeMs
    """When it published last, as far as is known."""


class FoundMessage(TypedDict):
    """Where a message is; ``fetch`` reads it."""

    partition: Count
    offset: Offset


class SearchPage(TypedDict):
    """What one stretch of a topic has."""

    found: list[FoundMessage]
    next: str
    """The cursor for the next stretch."""
    scanned: Count
    """Messages that were looked through."""
    left: Count
    """Messages after them; 0: that was all."""


class MessageFailure(TypedDict):
    time: TimeMs
    attempt: Count
    member: str
    reason: str


class MessageDelivery(TypedDict):
    """A delivery of a message that the broker remembers."""

    since: TimeMs
    until: TimeMs | None
    """When it had ended, with all that the member got together; None: not yet."""
    attempt: Count
    member: str
    outcome: Literal["in flight", "acknowledged", "failed", "given back"]
    """``given back``: before the member had begun with it, or the subscription was moved."""


class MessagePlace(TypedDict):
    """Where a message is."""

    topic: str
    partition: Count
    offset: Offset


class MessageRedriven(MessagePlace):
    """Where a dead letter was published again."""

    time: TimeMs
    dead_lettered: TimeMs
    """When it became a dead letter."""


class MessageState(TypedDict):
    """What became of a message in one subscription."""

    subscription: str
    topic: str
    """The topic or pattern of the subscription."""
    state: Literal[
        "done", "in flight", "waiting for a retry", "waiting for its key", "being dead-lettered",
        "dead letter", "not delivered yet",
    ]  # fmt: skip
    attempts: Count
    """Deliveries that failed, or the present one."""
    member: str | None
    since: TimeMs | None
    due: TimeMs | None
    """The deadline of a delivery, or the time of the next one."""
    dead_letter: Offset | None
    dead_lettered: TimeMs | None
    """When it became one, if it still is."""
    redriven: MessageRedriven | None
    """If it was a dead letter that was published again, as far as the broker remembers."""
    deliveries: list[MessageDelivery]
    failures: list[MessageFailure]
    """That the broker remembers."""
    sinks: list[str]
    """Where the Spark pipeline or the archive of this name writes what it has done."""


class MessageLife(TypedDict):
    id: str
    topic: str
    partition: Count
    offset: Offset
    published: TimeMs
    publisher: PublisherInfo | None
    """None: not known any more, or not a client."""
    first_published: TimeMs | None
    """If it was redriven: when it was published at first."""
    origin: MessagePlace | None
    """If it was redriven: where it was published at first."""
    subscriptions: list[MessageState]


class WatchingOperations:
    """How the broker is doing."""

    @operation(permission="metrics")
    @route("GET", "/history", "The last ten minutes", tag="watching")
    async def history(self) -> History:
        """Rates, times and sizes of the whole broker over the last ten minutes.

        Example::

            print((await client.history())["series"]["published_per_second"][-1:])
        """

    @operation(permission="see", about="topic")
    @route("GET", "/topics/{topic}/history", "The last ten minutes of a topic")
    async def topic_history(self, topic: ExistingTopic) -> History:
        """The rates of a topic over the last ten minutes.

        Example::

            rates = (await client.topic_history("orders"))["series"]["published_per_second"]
        """

    @operation(permission="see", about="topic", runs="every node")
    @route("GET", "/topics/{topic}/publishers", "Who published to a topic lately")
    async def topic_publishers(
        self, topic: ExistingTopic, *, limit: Limit = 100
    ) -> list[TopicPublisher]:
        """The clients that published to a topic lately, the last one first. A restart forgets them.

        Example::

            for each in await client.topic_publishers("orders"):
                print(each["client_id"], each["last"])
        """

    @operation(permission="see", about="subscription")
    @route("GET", "/subscriptions/{subscription}/history", "The last ten minutes of a subscription")
    async def subscription_history(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> History:
        """The lag and the rates of a subscription over the last ten minutes.

        Example::

            lags = (await client.subscription_history("email"))["series"]["lag"]
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/attention", "What needs attention", tag="watching")
    async def attention(self, *, limit: Limit = 100) -> list[Concern]:
        """What an operator should look at, the worst first; empty if all is well.

        Example::

            for finding in await client.attention():
                print(finding["severity"], finding["text"])
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/tables/topics", "A page of the topics", tag="watching")
    async def topic_table(
        self,
        *,
        match: Match = "",
        sort: TopicSort = "topic",
        descending: bool = False,
        skip: Offset = 0,
        limit: Limit = 100,
    ) -> TopicTable:
        """Some of the topics, with their rates: those whose names contain ``match``, sorted.

        Example::

            busiest = (await client.topic_table(sort="rate", descending=True, limit=10))["rows"]
        """

    @operation(permission="see", runs="every node")
    @route("GET", "/tables/subscriptions", "A page of the subscriptions", tag="watching")
    async def subscription_table(
        self,
        *,
        match: Match = "",
        topic: TopicFilter | None = None,
        sort: SubscriptionSort = "subscription",
        descending: bool = False,
        skip: Offset = 0,
        limit: Limit = 100,
    ) -> SubscriptionTable:
        """Some of the subscriptions, with their rates: those whose names contain ``match``, sorted.

        Example::

            behind = (await client.subscription_table(sort="lag", descending=True, limit=10))["rows"]
        """

    @operation(permission="see", about="subscription", runs="every node")
    @route("GET", "/subscriptions/{subscription}/explain", "Why is a subscription behind?")
    async def explain_subscription(
        self, subscription: DefinedSubscription, topic: TopicFilter | None = None
    ) -> Explanation:
        """Why a subscription is stuck or behind, in words, with its members and what they hold.

        Example::

            for finding in (await client.explain_subscription("email"))["findings"]:
                print(finding["text"])
        """

    @operation(
        permission="consume",
        about="subscription",
        runs="every node",
        errors=("offset_out_of_range",),
    )
    @route("GET", "/subscriptions/{subscription}/seek", "What a seek would do")
    async def preview_seek(
        self,
        subscription: DefinedSubscription,
        to: Position,
        *,
        topic: TopicFilter | None = None,
        partition: Partition | None = None,
    ) -> SeekPreview:
        """How many messages a ``seek`` with these arguments would deliver again, or skip.

        Example::

            print((await client.preview_seek("email", "latest"))["skipped"])
        """

    @on_letters(permission="browse", errors=("invalid_transform",))
    @route("POST", "/dead-letters/{subscription}/preview", "What a redrive would do")
    async def preview_redrive(
        self,
        subscription: ExistingSubscription,
        *,
        offsets: Offsets | None = None,
        reason: str | None = None,
        topic: TopicFilter | None = None,
        limit: Offset | None = None,
        destination: TopicFilter | None = None,
        transform: Transform | None = None,
    ) -> RedrivePreview:
        """What a ``redrive`` with these arguments would publish: how many letters, and the first of them.

        Example::

            preview = await client.preview_redrive("email", transform={"currency": "EUR"})
            print(preview["samples"][0]["after"])
        """

    @operation(permission="browse", about="topic", errors=("invalid_search", "invalid_cursor"))
    @route("GET", "/topics/{topic}/search", "Search a topic", tag="reading")
    async def search_messages(
        self,
        topic: ExistingTopic,
        wanted: SearchText,
        *,
        kind: SearchKind = "text",
        start: Position = "earliest",
        until: Position = "latest",
        partition: Partition | None = None,
        cursor: CursorText = "",
        limit: Limit = 100,
    ) -> SearchPage:
        """Look for messages: by a text, a key, a header (``name=part``) or a JSON path (``customer.id=c5``).

        One call looks through a stretch of some megabytes; go on with ``next`` as the ``cursor`` until
        ``left`` is 0. The message at ``until`` is not looked at. A text is found whatever its case and white space.

        Example::

            page = await client.search_messages("orders", "customer.id=c5", kind="json")
            while page["left"]:
                page = await client.search_messages(
                    "orders", "customer.id=c5", kind="json", cursor=page["next"]
                )
        """

    @operation(permission="browse", runs="owner of message")
    @route("GET", "/messages/{id}/life", "What became of a message", tag="reading")
    async def message_life(self, id: ExistingMessage) -> MessageLife:
        """Who published a message, and what became of it in each subscription of its topic.

        Example::

            for state in (await client.message_life(receipt.id))["subscriptions"]:
                print(state["subscription"], state["state"])
        """

    @operation(
        permission="browse", about="topic", runs="owner of message", errors=("message_not_found",)
    )
    @route(
        "GET",
        "/topics/{topic}/messages/{partition}/{offset}/life",
        "What became of the message at a place",
        tag="reading",
    )
    async def life_at(
        self, topic: ExistingTopic, partition: Partition, offset: Offset
    ) -> MessageLife:
        """The same for the message at a place: a redriven message has the id of the first one.

        Example::

            life = await client.life_at("orders", 0, 17)
            print(life["origin"], life["publisher"])
        """
