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


class HeadraceError(Exception):
    """Base of all errors raised by Headrace. ``code`` is stable, the message is for people."""

    code = "error"
    retryable = False

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


class InvalidArgument(HeadraceError):
    """A name, size, offset, type or setting that can never be accepted."""

    code = "invalid_argument"


class TooLarge(InvalidArgument):
    """A message, batch, header or name above its limit."""

    code = "too_large"


class NotFound(HeadraceError):
    """The topic, partition, subscription or message does not exist."""

    code = "not_found"


class TopicNotFound(NotFound):
    code = "topic_not_found"


class SubscriptionNotFound(NotFound):
    code = "subscription_not_found"


class MessageNotFound(NotFound):
    code = "message_not_found"


class Conflict(HeadraceError):
    """It already exists, or its state does not allow this."""

    code = "conflict"


class OffsetOutOfRange(HeadraceError):
    """The offset is before the first record that is kept, or after the last one."""

    code = "offset_out_of_range"


class StaleDelivery(HeadraceError):
    """The delivery has ended: it was settled, it timed out, or the member left."""

    code = "stale_delivery"


class SequenceGap(HeadraceError):
    """An idempotent producer skipped a sequence number, or sent a batch that is too old to be known."""

    code = "sequence_gap"


class ProducerFenced(HeadraceError):
    """A newer instance of the same producer has taken over."""

    code = "producer_fenced"


class QueueFull(HeadraceError):
    """The topic holds its maximum of unread messages (``max_queue_size``)."""

    code = "queue_full"
    retryable = True


class MemoryFull(HeadraceError):
    """The broker holds as much memory as it may (``memory_limit``). Nothing was done."""

    code = "memory_full"
    retryable = True


class StorageFull(HeadraceError):
    """The disk is full. Nothing was stored; consuming continues."""

    code = "storage_full"
    retryable = True


class StorageFailed(HeadraceError):
    """The disk refused a write. Nothing of this call was stored."""

    code = "storage_failed"
    retryable = True


def refused_by_disk(error: OSError) -> StorageFull | StorageFailed:
    """The definite error for a write that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room on the disk: {error.strerror or error}")
    return StorageFailed(f"the disk refused the write: {error}")


def unreadable(error: OSError) -> StorageFailed:
    """The error for a read that the disk refused."""
    return StorageFailed(f"the disk could not be read: {error}; nothing was changed, try again")


class OutcomeUnknown(HeadraceError):
    """It may or may not have been stored. Only an idempotent producer can safely retry."""

    code = "outcome_unknown"


class DataCorrupt(HeadraceError):
    """Bytes on disk, or a batch from a client, fail their checksum or are invalid."""

    code = "data_corrupt"


class ReadOnly(HeadraceError):
    """The partition is damaged in the middle and refuses publishes until it is repaired."""

    code = "read_only"


class DirectoryLocked(HeadraceError):
    """Another process owns the data directory."""

    code = "directory_locked"


class Closed(HeadraceError):
    """The broker, channel or connection has been closed."""

    code = "closed"


class BrokerFailed(HeadraceError):
    """The broker stopped itself because it could no longer keep its promises."""

    code = "broker_failed"


class RequestTimeout(HeadraceError, TimeoutError):
    """No answer in time. For a publish without an idempotent producer: outcome unknown."""

    code = "timeout"
    retryable = True


class Unauthenticated(HeadraceError):
    code = "unauthenticated"


class Forbidden(HeadraceError):
    code = "forbidden"


def by_kind(kind: str) -> type[HeadraceError]:
    """The class whose own code is ``kind``. Clients use it to raise an error that a broker sent."""
    return _KINDS.get(kind, HeadraceError)


def kind_of(error: HeadraceError) -> str:
    return str(type(error).__dict__.get("code", "error"))


def _all(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [cls, *(deeper for below in cls.__subclasses__() for deeper in _all(below))]


_KINDS = {cls.__dict__.get("code", ""): cls for cls in _all(HeadraceError)}
