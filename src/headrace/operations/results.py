"""Results of operations: plain dicts with known keys, the same in process, on the wire and in ``--json``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from headrace import limits
from headrace.model import SubscriptionSettings, TopicSettings
from headrace.operations.arguments import Offset, TimeMs

Count = Annotated[int, Meta(ge=0)]
Outcome = Literal["created", "updated", "unchanged"]
"""What a call did that creates or changes something."""
Text = Annotated[str, Meta(min_length=1, max_length=limits.PIPELINE_TEXT_CHARS_MAX)]


def _all_settings(kind: type[TopicSettings] | type[SubscriptionSettings]) -> Meta:
    schemas = kind.schemas()
    return Meta(extra_json_schema={"properties": schemas, "required": list(schemas)})


class PartitionStats(TypedDict):
    partition: Count
    start_offset: Offset
    """Of the first message that is kept."""
    end_offset: Offset
    """One after the last message."""
    bytes: Count
    read_only: str | None
    """Why publishes are refused."""


class TopicStats(TypedDict):
    topic: str
    partitions: list[PartitionStats]
    messages: Count
    bytes: Count
    backlog: Count
    """Messages that the slowest subscription has not finished."""
    subscriptions: list[str]
    durability: Literal["always", "interval", "never", "memory"]
    created: TimeMs
    settings: Annotated[dict[str, Any], _all_settings(TopicSettings)]


class ChangedTopic(TopicStats):
    outcome: Outcome


class CursorStats(TypedDict):
    topic: str
    partition: Count
    position: Offset
    """Everything before it is done."""
    end_offset: Offset
    lag: Count
    blocked: str | None
    """Why this partition is not delivered."""


Verdict = Literal["ok", "falling behind", "stalled"]
"""Over the last minute: ``falling behind``, the lag has grown; ``stalled``, messages wait and none was done."""


class SubscriptionStats(TypedDict):
    name: str
    topic: str
    members: Count
    lag: Count
    in_flight: Count
    waiting_for_retry: Count
    paused: bool
    """Nothing is delivered until it is resumed."""
    created: TimeMs
    settings: Annotated[dict[str, Any], _all_settings(SubscriptionSettings)]
    partitions: list[CursorStats]
    acked: Count
    dead_lettered: Count
    delivered: Count
    expired: Count
    lost: Count
    nacked: Count
    redelivered: Count
    skipped: Count
    timeouts: Count
    verdict: NotRequired[Verdict]
    """Whether it keeps up; of ``subscriptions`` and ``subscription_stats``."""
    topic_created: NotRequired[bool]
    """In the answer of ``create_subscription``: its topic did not exist, and was created empty."""


class ChangedSubscription(SubscriptionStats):
    outcome: Outcome


class DeadLetterCount(TypedDict):
    topic: str
    letters: Count


class Redriven(TypedDict):
    """What became, so far, of dead letters that were to be published again."""

    id: str
    state: Literal["running", "done", "stopped", "failed"]
    redriven: Count
    skipped: Count
    """Letters that cannot be published again; they stay."""
    reason: str | None
    """Why, of the first of them."""
    left: Count
    """Letters that it has not looked at: with a filter, at most so many follow."""
    rate: float | None
    by: str
    """Who began it."""
    began: TimeMs
    why: str | None
    """Why it ended early: who stopped it, or the error."""


class PartitionPosition(TypedDict):
    partition: Count
    incarnation: int
    """Distinguishes the topic from an earlier one of the same name."""
    start: Offset
    end: Offset
    bytes: Count
    offset: NotRequired[Offset]
    """Of the first message at or after the requested time."""


class BrokerInfo(TypedDict):
    server: str
    topics: Count
    subscriptions: Count
    max_message_size: Count
    durable: bool
    time: TimeMs
    cluster: str | None
    """The cluster that the broker is a node of, if the caller may see it; None otherwise."""


class BrokerLoad(TypedDict):
    connections: Count
    memory_used: Count
    """What counts against ``memory_limit``."""
    memory_limit: Count
    resident_bytes: int
    """Of the whole process; -1 if the system does not say."""
    disk_free_bytes: Count | None
    """None: everything is in memory."""
    disk_full: bool
    """Publishes are refused."""
    started: TimeMs


class OverviewRow(TypedDict):
    """A subscription, or a topic that has none."""

    topic: str
    subscription: str | None
    end: Count
    """Messages ever published to its topics: the sum of their end offsets."""
    lag: Count
    in_flight: Count
    waiting_for_retry: Count
    members: Count
    paused: bool
    blocked: Count
    """Partitions that cannot be read on, or written."""
    dead_letters: Count
    delivered: Count
    acked: Count
    redelivered: Count


class Overview(TypedDict):
    """Totals of what the caller may see. Counters begin at 0 when the broker starts."""

    time: TimeMs
    topics: Count
    subscriptions: Count
    bytes: Count
    published: Count
    delivered: Count
    acked: Count
    redelivered: Count
    lag: Count
    in_flight: Count
    dead_letters: Count
    """That wait to be dealt with."""
    rows: list[OverviewRow]
    """What needs attention first."""
    load: NotRequired[BrokerLoad]
    """For those who have the right ``metrics`` over everything."""


class HeldSubscription(TypedDict):
    topic: str
    subscription: str | None
    """None: a plain subscription, which holds nothing."""
    in_flight: Count


class ClientInfo(TypedDict):
    """A connection."""

    connection: Count
    """Its number; later connections have higher ones."""
    client_id: str | None
    """What the client says about itself."""
    name: str
    """Who it is logged in as, as ``whoami`` says it."""
    address: str
    protocol: str
    connected: TimeMs
    subscriptions: list[HeldSubscription]
    """The first of them."""
    subscriptions_total: Count
    in_flight: Count
    """Messages that it has not settled. HTTP requests hold none: a lease does."""
    unanswered: Count
    """Requests."""
    unsent_bytes: Count
    """Answers and deliveries that the client has not read."""


# --- access -----------------------------------------------------------------------------------------
class CallerInfo(TypedDict):
    name: str
    """``user:alice``, ``token:ci``; ``anyone`` while access control is off."""
    administrator: bool
    """It may do everything."""
    grants: list[str]
    quotas: dict[str, float]


class UserInfo(TypedDict):
    user: str
    created: TimeMs
    grants: list[str]
    quotas: dict[str, float]
    has_password: bool
    certificates: list[str]
    tokens: list[str]
    """The names of its tokens."""
    disabled: bool


class TokenInfo(TypedDict):
    token: str
    user: str | None
    """Whose rights it has; None: its own."""
    created: TimeMs
    expires: TimeMs | None
    expired: bool
    grants: list[str]
    quotas: dict[str, float]


class NewToken(TokenInfo):
    secret: str
    """Shown this once."""


class QuotaInfo(TypedDict):
    addresses: dict[str, float]
    default: dict[str, float]


# --- pipelines --------------------------------------------------------------------------------------
Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Measure = Annotated[float, Meta(ge=0)]


class QueryReport(TypedDict):
    """The report of a pipeline about one of its queries."""

    name: Text
    id: NotRequired[str | None]
    sink: NotRequired[str | None]
    error: NotRequired[str | None]
    batch_id: NotRequired[Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None]
    input_rows: NotRequired[Whole | None]
    batches_total: NotRequired[Whole | None]
    input_rows_total: NotRequired[Whole | None]
    dead_letters: NotRequired[Whole | None]
    lag: NotRequired[Whole | None]
    input_rows_per_second: NotRequired[Measure | None]
    processed_rows_per_second: NotRequired[Measure | None]
    trigger_ms: NotRequired[Measure | None]
    interval_ms: NotRequired[Measure | None]
    """How long the query waits from batch to batch; None: a batch begins as soon as records exist."""
    active: NotRequired[bool | None]
    """A batch is being processed."""
    watermark: NotRequired[TimeMs | None]
    state_rows: NotRequired[Whole | None]
    state_bytes: NotRequired[Whole | None]
    oldest_unread_at: NotRequired[TimeMs | None]
    """When the oldest record was published that is not processed; 0: all are. None: not known."""
    last_error: NotRequired[str | None]
    """Of this run, also if the query has recovered from it."""
    last_error_at: NotRequired[TimeMs | None]
    lag_seconds: NotRequired[Measure | None]
    """The age of the oldest record that is not processed. The broker computes it."""
    last_progress_at: NotRequired[TimeMs | None]
    sources: NotRequired[list[dict[str, Any]] | None]


class PipelineReport(TypedDict):
    """The report of a pipeline about itself."""

    state: Literal["running", "stopped", "failed", "finished"]
    run_id: Text
    started_at: TimeMs
    queries: Annotated[list[QueryReport], Meta(max_length=limits.PIPELINE_QUERIES_MAX)]


class PipelineStats(PipelineReport):
    """The last report of a pipeline, with fields that the broker adds."""

    name: str
    reported_at: TimeMs
    stale: bool
    """Its state is ``running``, but it has not reported for a while."""
    stopping: bool
    """A client has asked this run to stop."""
    verdict: Verdict
    """Whether it keeps up."""


class StopWanted(TypedDict):
    stop: bool
