"""The nouns of Headrace: read this file and you know the system.

A *record* is stored in a partition of a topic, at an offset. A :class:`Message` is a record as a user
gets it. A *subscription* is a durable position on topics; a *delivery* is one message that one member has
until it is settled or its deadline passes. :class:`TopicSettings` and :class:`SubscriptionSettings` hold all
settings of both, with defaults. They are checked in one place, so every protocol refuses the same values
with the same words.

A message's id, unless the client gave one, is derived and takes no storage. It is a UUID, version 8::

     48 bits topic hash | 0x8 | 12 bits partition | 0b10 | 62 bits offset

so the broker finds the record from the id (:func:`split_id`).
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict, get_type_hints

from msgspec import Meta

from headrace import limits
from headrace.checking import check, schema_of
from headrace.contents import TOMBSTONE_HEADER, TOMBSTONE_TEXT, Value
from headrace.errors import Closed, InvalidArgument, NotJson
from headrace.notation import BYTES, HOURS, MILLISECONDS, SECONDS, Unit, position_of, unit_of
from headrace.times import Duration, Moment, to_ms

Durability = Literal["always", "interval", "never"]
Compression = Literal["none", "zstd"]
Ordering = Literal["none", "key"]

# --- names ------------------------------------------------------------------------------------
_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
INTERNAL_PREFIX = "__"
DEAD_LETTER_SUFFIX = ".dlq"
DEAD_LETTER_HEADERS = (
    "headrace-origin-topic",
    "headrace-origin-partition",
    "headrace-origin-offset",
    "headrace-origin-id",
    "headrace-subscription",
    "headrace-reason",
    "headrace-attempts",
    "headrace-origin-timestamp",
)
"""The headers that a dead letter has besides its message's own, in this order. A redriven message keeps the
last one: when it was first published, in milliseconds since 1970."""
REPLY_TO = "headrace-reply-to"
"""The header of a request: where its reply goes."""


def check_topic_name(name: object, *, internal: bool = False) -> str:
    """Return the name, or raise :class:`InvalidArgument`. A name becomes a directory, so it is strict."""
    return _check_name("topic", name, limits.TOPIC_NAME_CHARS_MAX, internal)


@lru_cache(maxsize=4096)
def _checked_topic(name: str) -> str:
    return check_topic_name(name)


def checked_topic(name: object) -> str:
    """The same, many times as fast for a name that was checked before: it is done for each publish."""
    return _checked_topic(name) if isinstance(name, str) else check_topic_name(name)


def check_subscription_name(name: object, *, internal: bool = False) -> str:
    return _check_name("subscription", name, limits.SUBSCRIPTION_NAME_CHARS_MAX, internal)


def check_pipeline_name(name: object) -> str:
    """Pipelines are named like subscriptions: their names are part of URLs and metrics."""
    return _check_name("pipeline", name, limits.SUBSCRIPTION_NAME_CHARS_MAX, internal=False)


def check_principal_name(name: object) -> str:
    """Users and tokens are named like subscriptions, so that a prefix can be a team's."""
    return _check_name("principal", name, limits.SUBSCRIPTION_NAME_CHARS_MAX, internal=False)


def _check_name(kind: str, name: object, chars_max: int, internal: bool) -> str:
    if not isinstance(name, str):
        raise _bad_name(kind, f"a {kind} name is a str, not {type(name).__name__}")
    if not 1 <= len(name) <= chars_max:
        raise _bad_name(kind, f"a {kind} name has 1 to {chars_max} characters, not {len(name)}")
    if not _NAME.match(name) or name in (".", ".."):
        raise _bad_name(
            kind, f"{kind} {name!r} is not a valid name: use letters, digits, '.', '_' and '-'"
        )
    if name.startswith(INTERNAL_PREFIX) and not internal:
        raise _bad_name(
            kind, f"{kind} {name!r}: names that begin with '{INTERNAL_PREFIX}' belong to the broker"
        )
    return name


def _bad_name(kind: str, why: str) -> InvalidArgument:
    return InvalidArgument(why, code=f"invalid_{kind}")


def is_pattern(name: str) -> bool:
    return "*" in name or ">" in name


def check_pattern(pattern: object) -> str:
    """A topic name, or a pattern: ``*`` stands for one word and a last ``>`` for one or more words."""
    if not isinstance(pattern, str) or not is_pattern(pattern):
        return check_topic_name(pattern)
    if len(pattern) > limits.TOPIC_NAME_CHARS_MAX:
        raise InvalidArgument(f"pattern {pattern[:40]!r}… is too long", code="invalid_topic")
    words = pattern.split(".")
    for position, word in enumerate(words):
        rest = word == ">" and position == len(words) - 1
        if not (rest or word == "*" or _NAME.match(word)):
            raise InvalidArgument(
                f"pattern {pattern!r} is not valid: '*' stands alone for one word between dots, "
                "and '>' alone as the last word for all the rest",
                code="invalid_topic",
            )
    return pattern


def pattern_matches(pattern: str, topic: str) -> bool:
    """Whether the pattern matches. It never matches internal and dead-letter topics: name these in full."""
    if not is_pattern(pattern):
        return pattern == topic
    if topic.startswith(INTERNAL_PREFIX) or topic.endswith(DEAD_LETTER_SUFFIX):
        return False
    return _compiled(pattern)(topic) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Callable[[str], object]:
    """A wildcard is compared with thousands of topics: five times as fast as word by word."""
    parts = {"*": "[^.]*", ">": ".*"}
    words = [parts.get(word, re.escape(word)) for word in pattern.split(".")]
    return re.compile(r"\.".join(words), re.DOTALL).fullmatch


# --- ids ------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def topic_hash(topic: str) -> int:
    return int.from_bytes(hashlib.sha256(topic.encode()).digest()[:6], "big")


def derive_id(topic_hash48: int, partition: int, offset: int) -> uuid.UUID:
    return uuid.UUID(
        int=topic_hash48 << 80 | 0x8 << 76 | partition << 64 | 0b10 << 62 | offset,
    )


def split_id(message_id: uuid.UUID) -> tuple[int, int, int] | None:
    """(topic hash, partition, offset) of a derived id; None for an id that a client gave."""
    number = message_id.int
    if number >> 76 & 0xF != 0x8 or number >> 62 & 0b11 != 0b10:
        return None
    return number >> 80, number >> 64 & 0xFFF, number & limits.OFFSET_MAX


def parse_id(text: object) -> uuid.UUID:
    if isinstance(text, uuid.UUID):
        return text
    try:
        return uuid.UUID(str(text))
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is not a UUID, which an id of a message is",
            code="invalid_id",
        ) from None


# --- positions --------------------------------------------------------------------------------
Start = str | int | datetime
"""Where to begin: ``earliest``, ``latest``, an offset, or a time. As text also ``1h``: an hour ago."""


def parse_position(value: Any) -> Any:
    """Convert a position from outside: text becomes an offset or a time; other values are not changed."""
    if isinstance(value, str) and value not in ("earliest", "latest"):
        return position_of(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, datetime)):
        raise InvalidArgument(
            f"a position is 'earliest', 'latest', an offset or a time, not {value!r}",
            code="invalid_offset",
        )
    return value


def position_text(start: Start) -> str:
    """A position as it travels: a time is ``@`` and milliseconds."""
    return f"@{to_ms(start)}" if isinstance(start, datetime) else str(start)


def split_position(position: Start) -> tuple[str | int, int | None]:
    """(position, time in ms): a datetime is a time, anything else a position."""
    if isinstance(position, datetime):
        return "earliest", to_ms(position)
    return position, None


# --- messages ---------------------------------------------------------------------------------
class Settling(Protocol):
    """Takes the ack, nack or extension of a delivered message."""

    def ack(self, message: Message) -> None: ...

    def nack(self, message: Message, delay: Duration | None, reason: str) -> None: ...

    def extend(self, message: Message, seconds: Duration | None) -> None: ...

    def reply(self, message: Message, value: Any, headers: Mapping[str, str] | None) -> None: ...


_NO_HEADERS: Mapping[str, str] = {}


class Message:
    """A record in a user's hands.

    ``value`` is also called ``payload`` and ``body``. From a subscription it can be settled:
    ``ack()``, ``nack(delay)``, ``extend(seconds)``.
    """

    __slots__ = (
        "_id",
        "_settling",
        "attempt",
        "headers",
        "key",
        "lease",
        "offset",
        "partition",
        "timestamp",
        "topic",
        "value",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, str] | None,
        id: bytes | None = None,
        attempt: int = 1,
        settling: Settling | None = None,
        lease: Any = None,
    ):
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.timestamp = timestamp
        self.key = key
        self.value = value
        """None: it is null (a tombstone)."""
        if headers:
            self.headers = headers
            if not value and headers.get(TOMBSTONE_HEADER) == TOMBSTONE_TEXT:
                self.value = None
        else:
            self.headers = _NO_HEADERS
        self._id = id
        self.attempt = attempt
        self._settling = settling
        self.lease = lease

    @property
    def payload(self) -> bytes | None:
        return self.value

    @property
    def body(self) -> bytes | None:
        return self.value

    @property
    def id(self) -> uuid.UUID:
        """The client's own id if it gave one, else derived from topic, partition and offset."""
        if self._id is not None and self._id != _NO_ID:
            return uuid.UUID(bytes=self._id)
        return derive_id(topic_hash(self.topic), self.partition, self.offset)

    @property
    def retry_count(self) -> int:
        return self.attempt - 1

    def text(self) -> str:
        """The value as text; empty if it is null.

        Example::

            print(message.text())
        """
        return (self.value or b"").decode()

    def json(self) -> Any:
        """The value, read as JSON; None if it is null. :class:`NotJson`, a ``ValueError``, if it is not JSON.

        Example::

            order = message.json()["order"]
        """
        if self.value is None:
            return None
        try:
            return json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise NotJson(f"{self!r} is not JSON: {error}") from None

    def ack(self) -> None:
        """The message is done: it is not delivered to this subscription again.

        Example::

            for message in consumer:
                handle(message)
                message.ack()
        """
        self._settler().ack(self)

    def nack(self, delay: Duration | None = None, reason: str = "nack") -> None:
        """The message failed: deliver it again, after ``delay`` or the subscription's backoff.

        Example::

            message.nack(delay=30, reason="the shop is closed")
        """
        self._settler().nack(self, delay, reason)

    def extend(self, seconds: Duration | None = None) -> None:
        """Extend the deadline to ``seconds`` (or the ack timeout) from now.

        Example::

            message.extend(timedelta(minutes=5))
        """
        self._settler().extend(self, seconds)

    def reply(self, value: Value, headers: Mapping[str, str] | None = None) -> None:
        """Answer the request that this message is. Nobody waits for this; a late reply is dropped.

        Example::

            message.reply({"price": 0.5})
        """
        if self._settling is None:
            raise not_a_delivery("use reply of the client to answer it")
        self._settling.reply(self, value, headers)

    def _settler(self) -> Settling:
        if self._settling is None:
            raise not_a_delivery()
        return self._settling

    def __repr__(self) -> str:
        value = self.value
        if value is not None and len(value) > 60:
            value = value[:57] + b"..."
        return f"<Message {self.topic}/{self.partition}@{self.offset} {value!r}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            self.topic == other.topic
            and self.partition == other.partition
            and self.offset == other.offset
            and self.value == other.value
            and self.key == other.key
            and self.headers == other.headers
        )

    def __hash__(self) -> int:
        return hash((self.topic, self.partition, self.offset))


def not_a_delivery(instead: str = "use a subscription for ack and nack") -> Closed:
    return Closed(
        "this message was fetched or came from a plain subscribe, so there is nothing to "
        f"acknowledge; {instead}",
        code="not_a_delivery",
    )


_NO_ID = bytes(16)


class Receipt:
    """The answer to a publish: where the records are stored. ``offset`` is that of the first record.

    A delayed message has no place yet: its ``partition`` and ``offset`` are None.
    """

    __slots__ = ("_id", "count", "duplicate", "offset", "partition", "timestamp", "topic")

    def __init__(
        self,
        topic: str,
        partition: int | None,
        offset: int | None,
        timestamp: int,
        count: int = 1,
        duplicate: bool = False,
        id: bytes | None = None,
    ):
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.timestamp = timestamp
        self.count = count
        self.duplicate = duplicate
        """The records were stored before; this publish stored nothing."""
        self._id = id

    @property
    def id(self) -> uuid.UUID:
        """The first record's id."""
        if self._id is not None and self._id != _NO_ID:
            return uuid.UUID(bytes=self._id)
        assert self.partition is not None  # a delayed one has an id
        assert self.offset is not None
        return derive_id(topic_hash(self.topic), self.partition, self.offset)

    @property
    def is_delayed(self) -> bool:
        """The message waits for its time; ``id`` cancels it."""
        return self.offset is None

    @property
    def offsets(self) -> range:
        return range(0) if self.offset is None else range(self.offset, self.offset + self.count)

    def __repr__(self) -> str:
        again = " (again)" if self.duplicate else ""
        if self.offset is None:
            return f"<Receipt {self.topic}, delayed{again}>"
        span = f"{self.offset}" if self.count == 1 else f"{self.offset}..{self.offsets[-1]}"
        return f"<Receipt {self.topic}/{self.partition}@{span}{again}>"


ProducerBatch = tuple[int, int, int]
"""(producer id, epoch, sequence of the first record)"""


class PublishOptions(TypedDict, total=False):
    """The options of ``publish``, besides topic, value and headers."""

    key: bytes | str | None
    """Messages with the same key go to the same partition and keep their order."""
    id: uuid.UUID | str | None
    partition: int | None
    to: str | None
    """The only subscription that gets the message."""
    delay: Duration | None
    """The time until it is published."""
    deliver_at: Moment | None
    """When it is published."""
    ttl: Duration | None
    """Time to live: after that it is no longer delivered."""
    timestamp: Moment | None
    """Its own time."""
    producer: ProducerBatch | None
    """A repetition is answered with the first receipt."""
    idempotency_key: str | None
    """The same, for callers that have a key of their own for each publish."""


class PublishManyOptions(TypedDict, total=False):
    """The options of ``publish_many``, besides topic, values and headers."""

    keys: Sequence[bytes | str | None] | None
    ids: Sequence[uuid.UUID | str | None] | None
    partition: int | None
    to: str | None
    ttl: Duration | None
    timestamps: Sequence[Moment] | None
    producer: ProducerBatch | None


def check_options(
    options: Mapping[str, object], known: frozenset[str], method: str = "publish"
) -> None:
    """Refuse an unknown keyword argument, as Python itself does."""
    if not known.issuperset(options):
        [name, *_] = sorted(set(options) - known)
        raise TypeError(
            f"{method} got an unexpected keyword argument {name!r}; it takes {', '.join(sorted(known))}"
        )


PUBLISH_OPTIONS = frozenset(PublishOptions.__annotations__)
PUBLISH_MANY_OPTIONS = frozenset(PublishManyOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A message that waits for its time. ``id`` cancels it."""

    id: uuid.UUID
    topic: str
    deliver_at: int
    """Milliseconds since 1970."""


class ProducerIdentity(NamedTuple):
    """An idempotent producer. A higher epoch fences off a lower one."""

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that the broker gave up, with its origin and the reason."""

    offset: int
    """Its offset in the dead-letter topic, for ``redrive``, ``edit_dead_letter`` and ``purge_dead_letters``."""
    message: Message
    """The original payload, key, headers, topic, partition, offset and time; ``attempt`` is ``attempts``."""
    subscription: str
    reason: str
    attempts: int
    timestamp: int
    """When the broker gave it up, in milliseconds since 1970."""


# --- settings ---------------------------------------------------------------------------------
class _Settings:
    """Settings whose bounds are their annotations. An error names the setting."""

    def __post_init__(self) -> None:
        for name, annotation in _annotations(type(self)).items():
            value = getattr(self, name)
            checked = check(name, value, annotation, code="invalid_setting")
            if isinstance(value, (str, timedelta)):  # it may be a size or a duration with a unit
                object.__setattr__(self, name, checked)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Any:
        known = _annotations(cls)
        for name in values:
            if name not in known:
                raise InvalidArgument(
                    f"unknown setting {name!r}; known are {', '.join(sorted(known))}",
                    code="unknown_setting",
                )
        return cls(**values)

    def but(self, values: Mapping[str, Any]) -> Any:
        """A copy with some values changed; unknown names are refused."""
        type(self).of(values)
        return replace(self, **values)  # type: ignore[type-var]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _annotations(type(self))}

    @classmethod
    def units(cls) -> dict[str, Unit | None]:
        """The unit of each setting that has one."""
        return {name: unit_of(annotation) for name, annotation in _annotations(cls).items()}

    @classmethod
    def schemas(cls, of: Callable[..., dict[str, Any]] = schema_of) -> dict[str, dict[str, Any]]:
        """The JSON schema of each setting."""
        return {name: of(annotation) for name, annotation in _annotations(cls).items()}


def _annotations(settings: type[_Settings]) -> dict[str, Any]:
    """Name -> annotation of a class of settings."""
    known = _ANNOTATIONS.get(settings)
    if known is None:
        known = _ANNOTATIONS[settings] = get_type_hints(settings, include_extras=True)
    return known


_ANNOTATIONS: dict[type[_Settings], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class TopicSettings(_Settings):
    """All settings of a topic."""

    partitions: Annotated[int, Meta(ge=1, le=limits.PARTITIONS_PER_TOPIC_MAX)] = 1
    durable: bool = True
    """False: messages are kept in memory, until every subscription has finished them."""
    durability: Durability = "always"
    """When a publish is confirmed: ``always`` after ``fdatasync``; ``interval`` after the write, with a
    sync every ``sync_interval_ms``; ``never`` after the write alone."""
    sync_interval_ms: Annotated[int, Meta(ge=1, le=60_000), MILLISECONDS] = 100
    compression: Compression = "none"
    segment_bytes: Annotated[int, Meta(ge=4096, le=1 << 31), BYTES] = limits.SEGMENT_BYTES_DEFAULT
    segment_hours: Annotated[float, Meta(ge=0.001, le=24 * 366), HOURS] = 24.0
    retention_hours: Annotated[float, Meta(ge=0, le=24 * 366_000), HOURS] | None = 24.0
    retention_bytes: Annotated[int, Meta(ge=0, le=1 << 60), BYTES] | None = None
    retain_unread: bool = True
    """Retention never deletes messages that a subscription has not finished."""
    max_queue_size: Annotated[int, Meta(ge=1, le=limits.OFFSET_MAX)] | None = None
    """The maximum of unread messages; further publishes are refused. Topics in memory: 10,000 by default."""
    message_ttl_ms: Annotated[int, Meta(ge=1, le=limits.TIMESTAMP_MS_MAX), MILLISECONDS] | None = (
        None
    )
    """The time to live of messages that have none of their own."""


class TopicOptions(TypedDict, total=False):
    """:class:`TopicSettings` as keyword arguments, without ``partitions``; durations also as timedelta."""

    durable: bool
    durability: Durability
    sync_interval_ms: int | timedelta
    compression: Compression
    segment_bytes: int
    segment_hours: float | timedelta
    retention_hours: float | timedelta | None
    retention_bytes: int | None
    retain_unread: bool
    max_queue_size: int | None
    message_ttl_ms: int | timedelta | None


@dataclass(frozen=True, slots=True)
class SubscriptionSettings(_Settings):
    """All settings of a subscription."""

    ack_timeout: Annotated[float, Meta(ge=0.001, le=limits.ACK_TIMEOUT_S_MAX), SECONDS] = 30.0
    """Seconds a member has for a message before it is delivered again."""
    max_deliveries: Annotated[int, Meta(ge=0, le=limits.MAX_DELIVERIES_MAX)] = 5
    """A message that failed this often goes to the dead-letter topic. 0: never."""
    ordering: Ordering = "none"
    """``key``: messages of one key go to one member at a time, in order."""
    backoff: Annotated[float, Meta(ge=0, le=86_400), SECONDS] = 0.1
    """Seconds before the first redelivery; doubles with each further one."""
    backoff_max: Annotated[float, Meta(ge=0, le=86_400), SECONDS] = 60.0
    dead_letter_topic: str | None = None
    """None: ``<subscription>.dlq``."""

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.dead_letter_topic is not None:
            check_topic_name(self.dead_letter_topic)

    def delay_after(self, attempt: int) -> float:
        """Seconds between failed delivery number ``attempt`` and the next one."""
        return min(self.backoff_max, self.backoff * float(2 ** min(attempt - 1, 40)))


class SubscriptionOptions(TypedDict, total=False):
    """:class:`SubscriptionSettings` as keyword arguments."""

    ack_timeout: Duration
    max_deliveries: int
    ordering: Ordering
    backoff: Duration
    backoff_max: Duration
    dead_letter_topic: str | None


class JoinOptions(SubscriptionOptions, total=False):
    """The options of ``consume``: those of ``subscription``, except ``auto_extend``, which is on."""

    start: Start
    prefetch: int


_JOIN = frozenset({*SubscriptionOptions.__annotations__, *JoinOptions.__annotations__})
_JOINING = {
    "subscription": _JOIN | {"auto_extend"},
    "consume": _JOIN | {"concurrency", "timeout"},
}


def check_join(
    method: str, topic: str | None, options: Mapping[str, object], start: Start = "earliest"
) -> None:
    """Refuse options that would have no effect: unknown ones, and settings of a subscription without a topic."""
    check_options(options, _JOINING[method], method)
    unused = sorted(set(options) - {"prefetch"}) or (["start"] if start != "earliest" else [])
    if topic is None and unused:
        raise InvalidArgument(
            f"{unused[0]} has an effect only with a topic: without one, the subscription is joined as it is; "
            "name the topic, too"
        )


def check_reason(reason: object) -> str:
    if not isinstance(reason, str):
        raise InvalidArgument(f"a reason is a str, not {reason!r}", code="invalid_reason")
    return reason
