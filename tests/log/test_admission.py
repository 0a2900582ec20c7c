"""Batches from clients: what is refused before it costs anything. ``test_batch.py`` has the rest."""

import struct
import tracemalloc

import pytest
import zstandard

from headrace import limits
from headrace.contents import check_headers
from headrace.errors import DataCorrupt, InvalidArgument, TooLarge
from headrace.log.admission import check
from headrace.log.batch import ZSTD, Batch, crc32c, encode
from headrace.log.columns import Columns

MAX = 1 << 20


def refused(batch: Batch) -> tuple[str, int]:
    """(the code, how much memory it took to refuse it)"""
    raw = batch.raw()
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as caught:
            check(raw, message_bytes_max=MAX)
        return caught.value.code, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_million_empty_records_are_refused_before_they_are_unpacked() -> None:
    """They have less than a kilobyte when they are packed."""
    batch = encode(Columns([b""] * 1_000_000))
    batch.pack()
    assert batch.stored_bytes < 1_000
    code, memory = refused(batch)
    assert code == "batch_too_large"
    assert memory < 50_000


def test_a_batch_that_grows_when_it_is_unpacked_is_refused_before() -> None:
    batch = encode(Columns([bytes(MAX)] * 15))
    batch.pack()
    check(batch.raw(), message_bytes_max=MAX)
    batch = encode(Columns([bytes(MAX)] * 20))
    content = zstandard.compress(batch.body)
    prefix = len(batch.body).to_bytes(4, "little") + len(content).to_bytes(4, "little")
    body = prefix + content + bytes(-len(prefix + content) % 8)
    code, memory = refused(Batch(body, crc32c(body), batch.count, batch.flags | ZSTD))
    assert code == "batch_too_large"
    assert memory < 200_000


def test_a_batch_that_is_large_unpacked_is_refused() -> None:
    """To check it takes as long as if it had been packed."""
    check(encode(Columns([bytes(MAX)] * 16)).raw(), message_bytes_max=MAX)
    assert refused(encode(Columns([bytes(MAX)] * 18)))[0] == "batch_too_large"


def test_the_most_messages_are_accepted() -> None:
    batch = encode(Columns([b"x"] * limits.CLIENT_BATCH_RECORDS_MAX))
    assert check(batch.raw(), message_bytes_max=MAX).count == limits.CLIENT_BATCH_RECORDS_MAX


def test_a_packed_batch_is_not_kept_unpacked() -> None:
    """What waits for the disk is counted as it was sent."""
    batch = encode(Columns([bytes(MAX)] * 10))
    batch.pack()
    raw = batch.raw()
    tracemalloc.start()
    try:
        kept = check(raw, message_bytes_max=MAX)
        memory = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept.count == 10
    assert memory < 100_000


def test_too_many_headers_are_refused() -> None:
    headers = {f"h{n}": "" for n in range(1_000)}
    batch = encode(Columns([b""] * 300, headers=[headers] * 300))
    assert refused(batch)[0] == "headers_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {"": "x"},
        {"a=b": "x"},
        {"a\tb": "x"},
        {"a": "x\ny"},
        {"a": "x\0"},
        {"a": "\r"},
        {"a": "x" * (limits.HEADER_BYTES_MAX + 1)},
        {"a" * 40_000: "x" * 40_000},
        {f"n{n:03}": "x" * 100 for n in range(700)},
        {"a": "ä" * 40_000},
        {"a": "x" * (limits.HEADER_BYTES_MAX - 1)},
        {"ä": "ö", "b": ""},
        {f"n{n:03}": "x" * 50 for n in range(1_000)},
    ],
    ids=str,
)
def test_headers_of_a_batch_are_checked_as_those_of_a_message(headers: dict[str, str]) -> None:
    """By columns and all together, with the same codes."""
    batch = encode(Columns([b"1", b"2", b"3"], headers=[{"good": "one"}, headers, None]))
    code = ""
    try:
        check_headers(headers)
    except InvalidArgument as error:
        code = error.code
    if code:
        with pytest.raises(InvalidArgument) as caught:
            check(batch.raw(), message_bytes_max=MAX)
        assert caught.value.code == code
    else:
        again = check(batch.raw(), message_bytes_max=MAX)
        assert (again.headers() or [])[1] == headers


def test_origins_are_refused() -> None:
    """Only a log has batches with origins: a client could make the broker take its messages for repetitions."""
    batch = encode(Columns([b"x"]))
    batch.origins = struct.pack("<QIIII", 7, 0, 0, 1, 0)
    with pytest.raises(DataCorrupt, match="not one whole batch"):
        check(batch.stored(), message_bytes_max=100)
