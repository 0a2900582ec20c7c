"""Every error that Headrace raises on purpose.

There is one class for each kind of error that a caller can act on, and one stable ``code`` per cause. The
code is the same in process, on every wire and in the logs; the sentence is for people and may change at
any time. ``retryable`` says whether the same call may succeed later, unchanged.

Rules:
- A user's mistake is a :class:`HeadraceError` with a sentence that says what to do, never a
  ``ValueError`` from a lower layer.
- *Definite* failure (nothing was stored) and *unknown outcome* (it may have been stored) are never mixed:
  only :class:`OutcomeUnknown` means an unknown outcome.
"""

from __future__ import annotations

import errno
from collections.abc import Callable


class HeadraceError(Exception):
    """Base of all errors raised by Headrace. ``code`` is stable, the message is for people."""

    code = "error"
    retryable = False

    def __init_subclass__(cls, *, code: str | None = None, retryable: bool | None = None):
        """``class QueueFull(HeadraceError, code="queue_full", retryable=True)``"""
        if code is not None:
            cls.code = code
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None):
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.retryable))


def _rebuild(cls: type[HeadraceError], message: str, code: str, retryable: bool) -> HeadraceError:
    return cls(message, code=code, retryable=retryable)


class InvalidArgument(HeadraceError, code="invalid_argument"):
    """A name, size, offset, type or setting that can never be accepted."""


class TooLarge(InvalidArgument, code="too_large"):
    """A message, batch, header or name above its limit."""


class NotJson(InvalidArgument, ValueError, code="invalid_json"):
    """The value of a message is not JSON. It is a ``ValueError``, as an error of the module ``json`` is."""


class NotFound(HeadraceError, code="not_found"):
    """The topic, partition, subscription or message does not exist."""


class TopicNotFound(NotFound, code="topic_not_found"):
    """The topic does not exist."""


class SubscriptionNotFound(NotFound, code="subscription_not_found"):
    """The subscription does not exist."""


class MessageNotFound(NotFound, code="message_not_found"):
    """The message, dead letter or delayed message does not exist."""


class Conflict(HeadraceError, code="conflict"):
    """It already exists, or its state does not allow this."""


class OffsetOutOfRange(HeadraceError, code="offset_out_of_range"):
    """The offset is before the first record that is kept, or after the last one."""


class StaleDelivery(HeadraceError, code="stale_delivery"):
    """The delivery has ended: it was settled, it timed out, or the member left."""


class SequenceGap(HeadraceError, code="sequence_gap"):
    """An idempotent producer skipped a sequence number, or sent a batch that is too old to be known."""


class ProducerFenced(HeadraceError, code="producer_fenced"):
    """A newer instance of the same producer has taken over."""


class QueueFull(HeadraceError, code="queue_full", retryable=True):
    """The topic holds its maximum of unread messages (``max_queue_size``)."""

    missing_topic = ""
    """With several nodes: this topic has to be created first. The broker waits for that, and begins again."""


class MemoryFull(HeadraceError, code="memory_full", retryable=True):
    """The broker holds as much memory as it may (``memory_limit``). Nothing was done."""


class StorageFull(HeadraceError, code="storage_full", retryable=True):
    """The disk is full. Nothing was stored; consuming continues."""


class StorageFailed(HeadraceError, code="storage_failed", retryable=True):
    """The disk refused a write. Nothing of this call was stored."""


Done = Callable[[HeadraceError | None], None]
"""Called when something is done: without an error, or with the one because of which it is not."""


def refused_by_disk(error: OSError) -> StorageFull | StorageFailed:
    """The definite error for a write that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room on the disk: {error.strerror or error}")
    if error.errno == errno.ETIMEDOUT:  # it is not a disk: Kafka has not answered
        return StorageFailed(f"{error.strerror}; try again in a moment", code="kafka_unavailable")
    return StorageFailed(f"the disk refused the write: {error}")


def unreadable(error: OSError) -> StorageFailed:
    """The error for a read that the disk refused."""
    return StorageFailed(f"the disk could not be read: {error}; nothing was changed, try again")


class OutcomeUnknown(HeadraceError, code="outcome_unknown"):
    """It may or may not have been stored. Only an idempotent producer can safely retry."""


class DataCorrupt(HeadraceError, code="data_corrupt"):
    """Bytes on disk, or a batch from a client, fail their checksum or are invalid."""


class ReadOnly(HeadraceError, code="read_only"):
    """The partition is damaged in the middle and refuses publishes until it is repaired."""


class DirectoryLocked(HeadraceError, code="directory_locked"):
    """Another process owns the data directory."""


class Closed(HeadraceError, code="closed"):
    """The broker, channel or connection has been closed."""


class ConnectFailed(HeadraceError, code="connect_failed", retryable=True):
    """The broker could not be reached."""


class ConnectionLost(HeadraceError, code="connection_lost", retryable=True):
    """The connection broke before the answer came."""


class BrokerFailed(HeadraceError, code="broker_failed"):
    """The broker stopped itself because it could no longer keep its promises."""


class RequestTimeout(HeadraceError, TimeoutError, code="timeout", retryable=True):
    """No answer in time. For a publish without an idempotent producer: outcome unknown."""


class Unauthenticated(HeadraceError, code="unauthenticated"):
    """The client is not logged in, or its login is wrong."""


class Forbidden(HeadraceError, code="forbidden"):
    """The caller has no permission for this."""


def by_kind(kind: str) -> type[HeadraceError]:
    """The class whose own code is ``kind``. Clients use it to raise an error that a broker sent."""
    return _KINDS.get(kind, HeadraceError)


def kind_of(error: HeadraceError) -> str:
    return str(type(error).__dict__.get("code", "error"))


def _all(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [cls, *(deeper for below in cls.__subclasses__() for deeper in _all(below))]


_KINDS = {cls.__dict__.get("code", ""): cls for cls in _all(HeadraceError)}
