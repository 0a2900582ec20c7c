"""The audit: who changed what, and who failed to log in.

One call feeds three places: the topic ``__audit``, a line in the log (logger ``headrace.audit``) and the
counters of the metrics. The key of a record in the topic is the principal, the value::

    {"time": ms, "who": "user:alice", "from": "10.0.0.7:51234", "action": "change_topic",
     "target": "orders", "arguments": {"settings": {"retention_hours": 1}}, "outcome": "ok"}

``outcome`` is ``ok``, the error's code, or ``interrupted``: the caller was gone before the end. A failed login has the action ``login``.

Rules:
- Every operation that needs ``manage`` or ``admin`` is recorded, and those that create or seek a
  subscription; refused ones too. So is a topic that a publish or a subscription creates (``automatic``).
  Messages, passwords and tokens never are: only arguments that are in ``SHOWN``.
- The rate is bounded (``PER_SECOND_MAX``): beyond it records are counted, and the next record says how
  many are ``missing``. Whoever guesses passwords cannot fill the disk. Nor can he hide a change among his
  failures, or among new topics: these take at most half of the rate.
- Records are gathered for a moment and stored together, as durably as any topic. An audit that the disk
  refuses is logged; it never stops the broker.
- A broker without access control has no such topic, because it knows nobody's name; neither has one in
  memory. Their logs and metrics tell of changes all the same.
- The line of a failed login is written by ``server/refusals.py``, which says it once and not each time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from headrace import limits
from headrace.access.caller import OWNER
from headrace.broker.own_topic import OwnTopic
from headrace.model import TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine
    from headrace.broker.topic import Topic

logger = logging.getLogger("headrace.audit")
TOPIC = "__audit"
GATHER_S = 0.1
PER_SECOND_MAX = 100
ARGUMENTS_BYTES_MAX = 4_000
LOGGED_CHARS_MAX = 500
LOGIN = "login"
"""The action of a failed login."""
SHOWN = (
    "settings", "grants", "certificates", "quotas", "disabled", "expires", "user", "topic", "to",
    "partition", "offsets", "offset", "reason", "limit", "id", "addresses", "default",
    "destination",
)  # fmt: skip
"""Arguments that a record may show."""


class Source(NamedTuple):
    """Where a request comes from."""

    peer: str = "in process"
    """Address and port."""
    address: str = ""
    connection: int | None = None
    client: str | None = None
    """The id that the client gave itself."""

    def fields(self, user: str | None = None) -> dict[str, Any]:
        """As a line of the log has it."""
        named = {"connection": self.connection, "peer": self.peer, "client": self.client}
        return named if user is None else {**named, "user": user}


IN_PROCESS = Source()
BROKER = (OWNER.name, IN_PROCESS)
"""The program that the broker is in, or the broker itself, such as when a delayed message is due."""


class Audit:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._topic = OwnTopic(engine, TOPIC, SETTINGS, "the audit is", logger, logging.ERROR)
        self._new: list[tuple[str, dict[str, Any]]] = []
        self._timer: Any = None
        self._second = 0
        self._count = 0
        self._missing = 0
        self.author = BROKER
        """For whom topics are created at this moment (``Permissions.owning``)."""
        self.recorded = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        """By action and outcome, also of those that were left out."""

    @property
    def is_on(self) -> bool:
        return self._engine.access.is_on and self._engine.directory is not None

    def operation(
        self,
        who: str,
        source: Source,
        action: str,
        target: object,
        arguments: dict[str, Any],
        outcome: str,
    ) -> None:
        """Somebody has changed something, or tried to."""
        shown = {n: arguments[n] for n in SHOWN if arguments.get(n) not in (None, target, {})}
        more: dict[str, Any] = {"arguments": shown} if shown else {}
        named: dict[str, Any] = {} if target is None else {"target": str(target)[:300]}
        about = {name: arguments.get(name) for name in ("topic", "subscription")}
        self.record(who, source, action, outcome, about, **named, **more)

    def created(self, topic: Topic) -> Topic:
        """A topic was created because somebody published or subscribed to it."""
        who, source = self.author
        about = {"topic": topic.name}
        shown = {"automatic": True}

        def record(outcome: str) -> None:
            self.record(
                who, source, "create_topic", outcome, about, minor=True, target=topic.name,
                arguments=shown,
            )  # fmt: skip

        record("ok")
        self._engine.topics.if_refused(topic.name, lambda error: record(error.code))
        return topic

    def record(
        self,
        who: str,
        source: Source,
        action: str,
        outcome: str,
        about: Mapping[str, Any] | None = None,
        *,
        minor: bool = False,
        **more: Any,
    ) -> None:
        """``about`` has fields for the line in the log, ``more`` for the record, too.

        ``minor``: anybody can cause many of these, so they get half of the rate, as failures do.
        """
        self.counts[action, outcome] += 1
        now = self._engine.now_ms()
        if now // 1000 != self._second:
            self._second, self._count = now // 1000, 0
        minor = minor or outcome != "ok"
        if self._count >= (PER_SECOND_MAX // 2 if minor else PER_SECOND_MAX):
            self._missing += 1
            return
        self._count += 1
        record = {"time": now, "who": who, "from": source.peer, "action": action, **more}
        record["outcome"] = outcome
        if self._missing:
            record["missing"], self._missing = self._missing, 0
        self.recorded += 1
        if action != LOGIN:
            _log(record, source, about or {})
        if not self.is_on:
            return
        self._new.append((who, record))
        if self._timer is None:
            self._timer = self._engine.call_later(GATHER_S, self._store)

    def close(self) -> None:
        """Store what was gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._store()

    def _store(self) -> None:
        self._timer = None
        new, self._new = self._new, []
        if not new or self._engine.failed is not None or self._engine.closing:
            return
        self._topic.append((who, _encode(record)) for who, record in new)


def _log(record: dict[str, Any], source: Source, named: Mapping[str, Any]) -> None:
    level = logging.DEBUG if source.connection is None else logging.INFO
    if not logger.isEnabledFor(level):
        return
    more = {
        name: record.get(name) for name in ("action", "target", "arguments", "outcome", "missing")
    }
    about = " ".join([record["action"], *([record["target"]] if "target" in record else [])])
    arguments = f" {_shown(more['arguments'])}" if more["arguments"] else ""
    missing = f" ({more['missing']} before it were not recorded)" if more["missing"] else ""
    logger.log(
        level,
        "%s from %s: %s%s: %s%s",
        record["who"],
        source.peer,
        about,
        arguments,
        record["outcome"],
        missing,
        extra={**source.fields(record["who"]), **named, **more},
    )


def _shown(arguments: Any) -> str:
    return orjson.dumps(arguments, default=str).decode()[:LOGGED_CHARS_MAX]


def _encode(record: dict[str, Any]) -> bytes:
    value = orjson.dumps(record, default=str)
    if len(value) > ARGUMENTS_BYTES_MAX:
        value = orjson.dumps({**record, "arguments": "too long to be kept"}, default=str)
    return value


SETTINGS = TopicSettings(
    compression="zstd",
    segment_bytes=16 << 20,
    retention_hours=limits.AUDIT_KEPT_HOURS,
    retention_bytes=limits.AUDIT_BYTES_MAX,
    retain_unread=False,
)
