"""The history: what was asked for, what was answered, what was seen.

One JSON object a line, from the victim to its parent through a pipe: what has been written to a pipe
survives the writer. ``invoke`` is written before a call and its answer after it, so a call that a
kill interrupted has no answer: *unknown*. ``at`` is the monotonic clock in nanoseconds, which all
processes of a machine share.

=============  =====================================================================================
``topic``      one that the load writes to: ``name``, ``partitions``, ``retention`` (may drop its start)
``group``      a subscription: ``name``, ``topic``, ``ordering``, ``max_deliveries``
``start``      a victim begins its ``life``; ``opened`` when its broker is ready, ``closed`` when it was
               closed in good order (``files_open``: of its directory), ``killed`` when it was not
``invoke``     ``op``, ``what`` (publish, delay, cancel, define, drop), ``topic``, ``count``; for
               ``delay`` also ``due``; for ``cancel`` also ``of``; ``atomic`` for an idempotent one
``ok``         ``op``, ``receipts`` as [partition, offset, count]
``fail``       ``op``, ``code``: definite, nothing was stored
``unknown``    ``op``, ``code``: it may have been stored
``bounds``     ``topic``, ``partition``, ``start``, ``end``, as a broker says; ``since``: when it was asked
``read``       ``topic``, ``partition``, ``offset``, ``values``: what stands there one behind the other
``defined``    ``names`` of all topics and subscriptions there are; ``since`` likewise
``deliver``    ``delivery`` (its number), ``group``, ``member``, ``life``, ``topic``, ``partition``,
               ``offset``, ``value``, ``key``, ``attempt``, ``deadline``
``ack``        ``delivery``; before the call. ``nack`` likewise; ``stale`` when it was refused
``flushed``    ``member``, ``life``, ``since``: all it had acknowledged before then is durable
``left``       ``member``, ``life``: it closes
``dead``       a dead letter: ``group``, ``topic``, ``partition``, ``offset``, ``value``, ``stored_ms``
``rest``       ``left``: what is left over after the drain, by name; all of it has to be 0
``unflushed``  ``member``, ``life``: of all that it had acknowledged nothing is known to be durable
``fault``      of a cluster: ``what``, ``who``, ``until``, ``at_ms``, ``until_ms``, ``holds`` (it keeps messages back)
``final``      from here on, ``read`` shows everything there is at the end
``stuck``      ``what`` was not delivered within the recovery window
``problem``    ``what`` should never have happened
=============  =====================================================================================

A value is ``<op>.<index>``: unique, and it leads back to the call that sent it. A message carries its
value and bytes that follow from it (:func:`body_of`), so that :func:`identify` proves every one that
is read: body, key and headers.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import Any

import orjson

from headrace import Message

Event = dict[str, Any]
KEYS = 24


def value_of(op: str, index: int) -> str:
    return f"{op}.{index}"


def op_of(value: str) -> tuple[str, int]:
    op, _, index = value.rpartition(".")
    return op, int(index) if index.isdigit() else -1


def _digest(value: str) -> bytes:
    return hashlib.blake2b(value.encode(), digest_size=16).digest()


def body_of(value: str) -> bytes:
    """The message's bytes: mostly short, now and then some kilobytes."""
    digest = _digest(value)
    size = digest[0] if digest[1] else 64 * digest[0]
    return value.encode() + b"|" + (digest * (size // 16 + 1))[:size]


def key_of(value: str) -> str | None:
    """Clients whose name begins with ``k`` publish with keys."""
    return f"key-{_digest(value)[2] % KEYS}" if value.startswith("k") else None


def headers_of(value: str) -> dict[str, str] | None:
    return {"value": value} if _digest(value)[3] % 4 == 0 else None


def is_poison(value: str) -> bool:
    """One of fifty is always refused, and ends as a dead letter."""
    return _digest(value)[4] % 50 == 0


def identify(message: Message) -> str:
    """The value of a message, or a word with '?' when anything about it is not as it was sent."""
    raw = message.value.partition(b"|")[0]
    value = raw.decode("ascii", "replace")
    key = key_of(value)
    if (
        message.value == body_of(value)
        and message.key == (None if key is None else key.encode())
        and dict(message.headers) == (headers_of(value) or {})
    ):
        return value
    return f"?damaged:{value[:40]}"


class Oracle:
    """Writes the history to a pipe: one whole line at a time, from any thread."""

    def __init__(self, fd: int):
        self._fd = fd
        self._lock = threading.Lock()

    def tell(self, event: str, **fields: Any) -> None:
        fields["event"] = event
        fields.setdefault("at", time.monotonic_ns())
        line = memoryview(orjson.dumps(fields) + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]
