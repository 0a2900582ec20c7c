"""The records of a batch before it is encoded, and how a user's arguments become them.

Every published message passes :func:`record` or :func:`records`. All checks are here, so every front end
refuses the same values with the same words, and later code need not check types and sizes again. ``records``
checks whole columns with builtins; a loop per record runs only for columns that need one (headers, keys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from headrace import limits
from headrace.contents import (
    check_headers,
    check_key,
    check_value,
    check_values,
    null_headers,
)
from headrace.errors import InvalidArgument, TooLarge
from headrace.model import (
    PUBLISH_MANY_OPTIONS,
    PUBLISH_OPTIONS,
    PublishManyOptions,
    PublishOptions,
    check_options,
    check_subscription_name,
    parse_id,
)
from headrace.times import check_seconds, check_time

Headers = Mapping[str, str] | None
NO_ID = bytes(16)


@dataclass(slots=True, eq=False)
class Columns:
    """The records of a batch before it is encoded; absent columns are None."""

    values: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] | None = None
    times: Sequence[int] | None = None
    ids: Sequence[bytes] | None = None
    expiry: Sequence[int] | None = None
    targets: Sequence[bytes] | None = None


_NAMES = tuple(Columns.__dataclass_fields__)
_OPTIONAL: tuple[tuple[str, Any], ...] = (
    ("keys", None),
    ("headers", None),
    ("ids", NO_ID),
    ("expiry", 0),
    ("targets", b""),
)


def cut(columns: Columns, start: int, stop: int) -> Columns:
    """The records ``start:stop``."""
    return _each(columns, lambda column: column[start:stop])


def pieces(columns: Columns) -> list[Columns]:
    """The columns, cut into parts if one batch would be too large for readers."""
    count = len(columns.values)
    if count == 1:
        return [columns]
    size = sum(map(len, columns.values)) + 1
    most = limits.BATCH_RECORDS_TARGET
    if columns.headers is not None:  # a broker takes no batch with more than BATCH_HEADERS_MAX
        each = max((len(headers) for headers in columns.headers if headers), default=0)
        most = min(most, limits.BATCH_HEADERS_MAX // max(each, 1))
    if count <= most and size <= 2 * limits.BATCH_BYTES_TARGET:
        return [columns]
    step = max(1, min(most, count * limits.BATCH_BYTES_TARGET // size))
    return [cut(columns, start, start + step) for start in range(0, count, step)]


def pick(columns: Columns, indexes: Sequence[int]) -> Columns:
    """The records at the indexes."""
    return _each(columns, lambda column: [column[index] for index in indexes])


def _each(columns: Columns, some: Callable[[Sequence[Any]], Sequence[Any]]) -> Columns:
    """The same part of every column."""
    parts: list[Any] = [getattr(columns, name) for name in _NAMES]
    return Columns(*[None if part is None else some(part) for part in parts])  # type: ignore[arg-type]


def concat(parts: Sequence[Columns]) -> Columns:
    """Join the columns. If only some parts have a column, the other parts get empty values for it."""
    if len(parts) == 1:
        return parts[0]
    assert all(part.times is None for part in parts), "own times are not gathered"
    joined = Columns(list(chain.from_iterable([part.values for part in parts])))
    for name, absent in _OPTIONAL:
        columns = [getattr(part, name) for part in parts]
        if any(column is not None for column in columns):
            filled = (
                repeat(absent, len(part.values)) if column is None else column
                for part, column in zip(parts, columns, strict=True)
            )
            setattr(joined, name, list(chain.from_iterable(filled)))
    return joined


# --- from a user's arguments ----------------------------------------------------------------------
def record(
    value: object,
    headers: Mapping[str, str] | None,
    options: PublishOptions,
    bytes_max: int,
    now_ms: int,
) -> Columns:
    """One message with the options of a publish, checked."""
    if value is None:
        value, headers = b"", null_headers(headers, options.get("key"))
    checked = check_value(value, bytes_max)
    if not options and not headers:
        return Columns([checked])
    check_options(options, PUBLISH_OPTIONS)
    key, id, time = options.get("key"), options.get("id"), options.get("timestamp")
    expires_at, target = expiry_of(options.get("ttl"), now_ms), options.get("to")
    return Columns(
        [checked],
        None if key is None else [check_key(key)],
        [check_headers(headers)] if headers else None,
        None if time is None else [check_time("timestamp", time)],
        None if id is None else [parse_id(id).bytes],
        None if expires_at is None else [expires_at],
        None if target is None else [check_subscription_name(target).encode()],
    )


def records(
    values: Sequence[object],
    headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None,
    options: PublishManyOptions,
    bytes_max: int,
    now_ms: int,
) -> Columns:
    """Many messages with the options of a publish, checked column by column.

    If ``headers`` is one mapping, it is for all messages.
    """
    check_options(options, PUBLISH_MANY_OPTIONS, "publish_many")
    checked: Sequence[Any] = list(check_values(values))
    count = len(checked)
    if not count:
        raise InvalidArgument("there is nothing to publish: the list is empty", code="empty_batch")
    if count > limits.BATCH_RECORDS_MAX:
        raise TooLarge(
            f"{count} messages at once are more than {limits.BATCH_RECORDS_MAX}; publish fewer",
            code="batch_too_large",
        )
    kinds = set(map(type, checked))
    if type(None) in kinds:
        headers = _with_nulls(checked, headers, options.get("keys"))
        checked = [b"" if value is None else value for value in checked]
    if kinds != {bytes} or max(map(len, checked)) > bytes_max:
        checked = [check_value(value, bytes_max) for value in checked]
    columns = Columns(checked)
    keys, ids, timestamps = options.get("keys"), options.get("ids"), options.get("timestamps")
    expires_at, target = expiry_of(options.get("ttl"), now_ms), options.get("to")
    if keys is not None:
        _same_length("keys", keys, count)
        first = keys[0] if count else None
        if first is not None and keys.count(first) == count:  # as over HTTP
            columns.keys = [check_key(first)] * count
        else:
            columns.keys = [None if key is None else check_key(key) for key in keys]
    if headers:
        if isinstance(headers, Mapping):
            columns.headers = [check_headers(headers)] * count
        else:
            _same_length("headers", headers, count)
            columns.headers = [check_headers(each) if each else None for each in headers]
    if ids is not None:
        _same_length("ids", ids, count)
        columns.ids = [NO_ID if each is None else parse_id(each).bytes for each in ids]
    if timestamps is not None:
        _same_length("timestamps", timestamps, count)
        columns.times = [check_time("timestamp", each) for each in timestamps]
    if expires_at is not None:
        columns.expiry = [expires_at] * count
    if target is not None:
        columns.targets = [check_subscription_name(target).encode()] * count
    return columns


def _with_nulls(
    values: Sequence[object],
    headers: Sequence[Mapping[str, str] | None] | Mapping[str, str] | None,
    keys: Sequence[Any] | None,
) -> list[Mapping[str, str] | None]:
    """The headers of messages of which some have no value."""
    count = len(values)
    each = [headers] * count if headers is None or isinstance(headers, Mapping) else headers
    named = [None] * count if keys is None else keys
    _same_length("headers", each, count)
    _same_length("keys", named, count)
    return [
        null_headers(own, key) if value is None else own
        for value, own, key in zip(values, each, named, strict=True)
    ]


def _same_length(name: str, column: Sequence[Any], count: int) -> None:
    if isinstance(column, (str, bytes)) or not isinstance(column, Sequence):
        raise InvalidArgument(
            f"{name} are a list, one for each value, not {type(column).__name__}",
            code="invalid_columns",
        )
    if len(column) != count:
        raise InvalidArgument(
            f"there are {count} values and {len(column)} {name}: give one for each, or none",
            code="invalid_columns",
        )


def expiry_of(ttl: object, now_ms: int) -> int | None:
    """When a message with a time to live of ``ttl`` seconds expires."""
    if ttl is None:
        return None
    return now_ms + max(int(check_seconds("ttl", ttl, limits.DELAY_S_MAX) * 1000), 1)


def time_of(delay: object, deliver_at: object, now_ms: int) -> int | None:
    """When to publish a message with a ``delay`` in seconds, or a time in milliseconds."""
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("give delay or deliver_at, not both", code="invalid_delay")
    if deliver_at is not None:
        at = check_time("deliver_at", deliver_at)
        if at > now_ms + limits.DELAY_S_MAX * 1000:
            raise InvalidArgument(
                f"deliver_at is more than {limits.DELAY_S_MAX:.0f} seconds ahead",
                code="invalid_delay",
            )
        return at
    if delay is None:
        return None
    return now_ms + int(check_seconds("delay", delay, limits.DELAY_S_MAX) * 1000)
