"""The audit: who changed what, and who failed to log in, as records of the topic ``__audit``.

The key of a record is the principal, the value::

    {"time": ms, "who": "user:alice", "from": "10.0.0.7:51234", "action": "change_topic",
     "target": "orders", "arguments": {"settings": {"retention_hours": 1}}, "outcome": "ok"}

``outcome`` is ``ok`` or the error's code. A failed login has the action ``login``.

Rules:
- Every operation that needs ``manage`` or ``admin`` is recorded, and those that create or seek a
  subscription; refused ones too. Messages, passwords and
  tokens never are: only arguments that are in ``SHOWN``.
- The rate is bounded (``PER_SECOND_MAX``): beyond it records are counted, and the next record says how
  many are ``missing``. Whoever guesses passwords cannot fill the disk. Nor can he hide a change among his
  failures: what failed takes at most half of the rate.
- Records are gathered for a moment and stored together, as durably as any topic. An audit that the disk
  refuses is logged; it never stops the broker.
- A broker without access control has no audit, because it knows nobody's name; neither has one in
  memory. Its log still names failed logins.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson

from headrace import limits
from headrace.errors import HeadraceError
from headrace.log.columns import Columns
from headrace.log.interface import Append
from headrace.model import TopicSettings

if TYPE_CHECKING:
    from headrace.broker.engine import Engine

logger = logging.getLogger("headrace.audit")
TOPIC = "__audit"
GATHER_S = 0.1
PER_SECOND_MAX = 100
ARGUMENTS_BYTES_MAX = 4_000
SHOWN = (
    "settings", "grants", "certificates", "quotas", "disabled", "expires", "user", "topic", "to",
    "partition", "offsets", "offset", "reason", "limit", "id", "addresses", "default",
)  # fmt: skip
"""Arguments that a record may show."""


class Audit:
    def __init__(self, engine: Engine):
        self._engine = engine
        self._new: list[tuple[str, dict[str, Any]]] = []
        self._timer: Any = None
        self._second = 0
        self._count = 0
        self._missing = 0
        self._refused = False
        self.recorded = 0

    @property
    def is_on(self) -> bool:
        return self._engine.access.is_on and self._engine.directory is not None

    def operation(
        self,
        who: str,
        where: str,
        action: str,
        target: object,
        arguments: dict[str, Any],
        outcome: str,
    ) -> None:
        """Somebody has changed something, or tried to."""
        shown = {n: arguments[n] for n in SHOWN if arguments.get(n) not in (None, target, {})}
        more = {"arguments": shown} if shown else {}
        self.record(who, where, action, outcome, target=str(target)[:300], **more)

    def record(self, who: str, where: str, action: str, outcome: str, **more: Any) -> None:
        if not self.is_on:
            return
        now = self._engine.now_ms()
        if now // 1000 != self._second:
            self._second, self._count = now // 1000, 0
        if self._count >= (PER_SECOND_MAX if outcome == "ok" else PER_SECOND_MAX // 2):
            self._missing += 1
            return
        self._count += 1
        record = {"time": now, "who": who, "from": where, "action": action, **more}
        record["outcome"] = outcome
        if self._missing:
            record["missing"], self._missing = self._missing, 0
        self.recorded += 1
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
        keys: list[bytes | None] = [who.encode() for who, _ in new]
        values = [_encode(record) for _, record in new]
        try:
            topic = self._engine.topics.get(TOPIC)
            if topic is None:
                topic = self._engine.create_topic(TOPIC, SETTINGS, internal=True)
        except (HeadraceError, OSError) as error:
            self._stored(error)
            return
        stored = Append(Columns(values, keys), None, lambda entry: self._stored(entry.error))
        self._engine.append(topic, 0, stored)

    def _stored(self, error: Exception | None) -> None:
        if error is not None and not self._refused:
            logger.error("the audit is not stored: %s", error)
        self._refused = error is not None


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
