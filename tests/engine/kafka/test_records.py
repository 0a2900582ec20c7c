"""Keys of Kafka's records: what the rule needs, and nothing else is taken for it."""

import pytest

from headrace.engine.kafka.records import batches_of, entry_of, key_of, value_of
from headrace.engine.kafka.rule import Checkpoint, Claim, Entry, Stretch
from headrace.log.batch import encode
from headrace.log.columns import Columns

ENTRIES = [
    Claim(7, "node1:9999/0f3a"),
    Claim(1, "knoten-ü"),
    Stretch(7, 1 << 40, 10_000),
    Checkpoint((1 << 63) - 1, 0, 3, 1, 2),
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_key_says_what_it_was_made_of(entry: Entry) -> None:
    """Each kind of entry is the same after it was written and read."""
    assert entry_of(key_of(entry)) == entry


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_flipped_bit_is_not_taken_for_another_entry(entry: Entry) -> None:
    """Any changed bit, and any cut, makes the key foreign."""
    key = key_of(entry)
    for at in range(len(key)):
        assert entry_of(key[:at]) is None
        for bit in range(8):
            assert entry_of(key[:at] + bytes([key[at] ^ (1 << bit)]) + key[at + 1 :]) is None


@pytest.mark.parametrize("key", [None, b"", b"order-17", b"\0" * 40])
def test_a_foreign_key_is_no_entry(key: bytes | None) -> None:
    """What other programs write into the topic is skipped."""
    assert entry_of(key) is None


def test_a_value_holds_the_batches_of_a_commit() -> None:
    """Batches lie one after the other, and a damaged one ends the list."""
    batches = [encode(Columns([b"a", b"b"])), encode(Columns([b"c" * 1000]))]
    batches[1].base_offset = 2
    value = value_of(batches)
    assert [batch.values() for batch in batches_of(value)] == [[b"a", b"b"], [b"c" * 1000]]
    broken = value[:-500] + bytes([value[-500] ^ 1]) + value[-499:]
    assert [batch.values() for batch in batches_of(broken)] == [[b"a", b"b"]]
