"""Batches that cannot be decoded say so: those given up by a repair, and packed ones that lie."""

import struct

import pytest
import zstandard

from headrace.errors import DataCorrupt
from headrace.log.batch import LOST, ZSTD, Batch, Columns, crc32c, encode, lost, parse


def test_a_lost_batch_survives_its_bytes() -> None:
    """What is written for lost records reads back with the same offsets, and marked as lost."""
    batch = parse(lost(100, 20, 5_000).raw())
    assert batch is not None
    assert batch.flags & LOST
    assert (batch.base_offset, batch.end_offset, batch.max_timestamp) == (100, 120, 5_000)
    assert batch.stored_bytes == 64


@pytest.mark.parametrize("ask", ["values", "columns", "plain"])
def test_the_records_of_a_lost_batch_are_an_explicit_error(ask: str) -> None:
    """Decoding a lost batch names exactly the offsets that are gone."""
    with pytest.raises(DataCorrupt, match="offsets 100 to 119") as caught:
        getattr(lost(100, 20, 5_000), ask)()
    assert caught.value.code == "records_lost"


def test_a_lost_batch_makes_no_messages() -> None:
    """Nobody is handed an invented message for a record that is gone."""
    with pytest.raises(DataCorrupt):
        lost(100, 20, 5_000).messages("orders", 0)


def test_optional_columns_of_a_lost_batch_are_absent() -> None:
    """A lost batch has no keys, headers, times, ids, expiry or targets."""
    batch = lost(100, 20, 5_000)
    assert batch.keys() is None
    assert batch.headers() is None
    assert batch.times() is None
    assert batch.ids() is None
    assert batch.expiry() is None
    assert batch.targets() is None


def test_a_packed_body_that_understates_its_size_is_refused_unopened() -> None:
    """A few bytes that unpack to far more than they claim are refused before memory is taken."""
    packed = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    body = struct.pack("<II", 1024, len(packed)) + packed
    body += bytes(-len(body) % 8)
    batch = Batch(body, crc32c(body), 1, ZSTD)
    with pytest.raises(DataCorrupt, match="another length"):
        batch.values()


def test_packing_changes_nothing_but_the_size() -> None:
    """A packed batch gives back the very values that went in."""
    values = [b"the same words again and again"] * 100
    batch = encode(Columns(values))
    size = batch.stored_bytes
    batch.pack()
    assert batch.stored_bytes < size
    again = parse(batch.raw())
    assert again is not None
    assert again.values() == values
