"""Checksums of messages do not depend on their batches, and see every difference."""

import pytest

from headrace.log.batch import Batch, encode, lost
from headrace.log.columns import Columns
from headrace.moving.digest import MessageDigest

ROWS = [
    Columns([b"a"], [b"k"], [{"h": "1"}], [1], [bytes(16)], [0], [b""]),
    Columns([b""], [None], [None], [2], [b"i" * 16], [7], [b"email"]),
    Columns([b"ccc"], [b""], [{"a": "b", "c": ""}], [3], [bytes(16)], [0], [b""]),
]


def joined(rows: list[Columns]) -> Columns:
    """All rows as one."""
    return Columns(
        *[[getattr(row, name)[0] for row in rows] for name in Columns.__dataclass_fields__]
    )


def digest(*batches: Batch) -> MessageDigest:
    found = MessageDigest()
    for batch in batches:
        found.add(batch)
    return found


def test_batches_do_not_matter() -> None:
    """One batch of three messages is the same as three of one, or as a part of a larger one."""
    one = digest(encode(joined(ROWS)))
    assert one == digest(*map(encode, ROWS))
    part = MessageDigest()
    part.add(encode(joined([ROWS[2], *ROWS])), 1)
    assert part == one
    assert (part.checksum, part.records) == (one.checksum, 3)


def test_a_time_of_the_header_is_a_time() -> None:
    """A column of equal times is the same as one time for all."""
    bare, with_times = encode(Columns([b"a", b"b"])), encode(Columns([b"a", b"b"], times=[5, 5]))
    bare.base_timestamp = bare.max_timestamp = 5
    assert digest(bare) == digest(with_times)


@pytest.mark.parametrize(
    "column", ["values", "keys", "headers", "times", "ids", "expiry", "targets"]
)
def test_every_column_counts(column: str) -> None:
    """Two messages that change places in one column are noticed."""
    changed = joined(ROWS)
    values = list(getattr(changed, column))
    setattr(changed, column, [values[1], values[0], values[2]])
    assert digest(encode(changed)) != digest(encode(joined(ROWS)))


def test_lost_messages_are_counted() -> None:
    """Destroyed messages are as many, and are not taken for others."""
    found = digest(lost(0, 3, 0))
    assert (found.records, found.lost) == (3, 3)
    assert found != digest(encode(joined(ROWS)))
