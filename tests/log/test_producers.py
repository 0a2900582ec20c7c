"""Idempotent producers: stored once, in order, for one owner, whatever is sent again."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import ProducerFenced, SequenceGap
from headrace.log.batch import Batch
from headrace.log.producers import Producers


def test_a_producer_begins_at_zero() -> None:
    """The first batch of a producer has sequence 0; any other is a gap."""
    table = Producers()
    assert table.judge(7, 0, 0, 10) is None
    assert isinstance(table.judge(7, 0, 1, 10), SequenceGap)
    assert table.last(7) is None
    assert table.next_sequence(7) == 0


def test_the_next_batch_is_new_and_a_repeated_one_is_known() -> None:
    """What continues is stored; what was stored is answered with its first offset."""
    table = Producers()
    table.add(7, 0, 0, 10, 100)
    table.add(7, 0, 10, 5, 300)
    assert table.judge(7, 0, 15, 1) is None
    assert table.judge(7, 0, 0, 10) == 100
    assert table.judge(7, 0, 10, 5) == 300
    assert table.last(7) == (300, 5)
    assert table.next_sequence(7) == 15
    assert table.next_sequence(7, 0) == 15
    assert table.next_sequence(7, 1) == 0


@pytest.mark.parametrize(("first", "count"), [(16, 1), (14, 1), (0, 9), (0, 15), (10, 6), (5, 5)])
def test_what_neither_continues_nor_repeats_is_a_gap(first: int, count: int) -> None:
    """A jump, an overlap and a known start with another count are all refused."""
    table = Producers()
    table.add(7, 0, 0, 10, 100)
    table.add(7, 0, 10, 5, 300)
    assert isinstance(table.judge(7, 0, first, count), SequenceGap)


def test_a_new_epoch_takes_over() -> None:
    """A higher epoch begins again at 0, and from then on the lower one is fenced."""
    table = Producers()
    table.add(7, 1, 0, 10, 100)
    assert isinstance(table.judge(7, 2, 10, 1), SequenceGap)
    assert table.judge(7, 2, 0, 1) is None
    table.add(7, 2, 0, 1, 500)
    assert isinstance(table.judge(7, 1, 10, 1), ProducerFenced)
    assert isinstance(table.judge(7, 1, 0, 10), ProducerFenced)
    assert table.judge(7, 2, 0, 1) == 500
    assert table.next_sequence(7, 2) == table.next_sequence(7)


def test_sequences_wrap_around() -> None:
    """Behind 2**32 - 1 comes 0, and a repetition across the border is known."""
    table = Producers()
    table.add(7, 0, 0xFFFF_FFFE, 4, 100)
    assert table.next_sequence(7) == 2
    assert table.judge(7, 0, 2, 1) is None
    assert table.judge(7, 0, 0xFFFF_FFFE, 4) == 100


class Model:
    """All batches of all producers, for ever: what the bounded table must agree with."""

    def __init__(self) -> None:
        self.stored: dict[int, list[tuple[int, int, int, int]]] = {}

    def judge(self, producer: int, epoch: int, first: int, count: int) -> object:
        stored = self.stored.get(producer, [])
        newest = stored[-1][0] if stored else -1
        if epoch > newest:
            return None if first == 0 else SequenceGap
        if epoch < newest:
            return ProducerFenced
        mine = [batch for batch in stored if batch[0] == epoch]
        if first == mine[-1][1] + mine[-1][2]:
            return None
        for _, known, size, offset in mine[-limits.PRODUCER_BATCHES_KEPT :]:
            if (known, size) == (first, count):
                return offset
        return SequenceGap


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(0, 2),
            st.integers(0, 8),
            st.integers(1, 3),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_the_table_judges_as_an_unbounded_one_would(sends: list) -> None:
    """Against a model that forgets nothing, each batch is new, known, a gap or fenced alike."""
    table, model, end = Producers(), Model(), 0
    for producer, epoch, first, count, continues in sends:
        if continues:
            first = table.next_sequence(producer)
        verdict = table.judge(producer, epoch, first, count)
        expected = model.judge(producer, epoch, first, count)
        if isinstance(expected, type):
            assert type(verdict) is expected
        else:
            assert verdict == expected
        if verdict is None:
            table.add(producer, epoch, first, count, end)
            model.stored.setdefault(producer, []).append((epoch, first, count, end))
            end += count
        again = Producers.load(table.dump())
        assert again is not None
        assert again.dump() == table.dump()


def test_those_used_longest_ago_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded, and using a producer keeps it."""
    monkeypatch.setattr(limits, "PRODUCERS_PER_PARTITION_MAX", 3)
    table = Producers()
    for number in (1, 2, 3):
        table.add(number, 0, 0, 1, number)
    table.add(1, 0, 1, 1, 10)
    table.add(4, 0, 0, 1, 11)
    assert len(table) == 3
    assert table.last(2) is None
    assert table.last(1) == (10, 1)
    again = Producers.load(table.dump())
    assert again is not None
    again.add(5, 0, 0, 1, 12)
    assert again.last(3) is None, "a snapshot keeps the order of use"
    assert again.last(1) == (10, 1)


def test_batches_without_a_producer_are_not_remembered() -> None:
    """Producer 0 is nobody."""
    table = Producers()
    table.add_batch(Batch(b"", 0, 5, 0))
    assert len(table) == 0


def test_every_damage_of_a_snapshot_is_found() -> None:
    """A snapshot with any bit changed, or cut anywhere, is no snapshot; an empty one is."""
    table = Producers()
    table.add(7, 1, 0, 10, 100)
    table.add(8, 0, 0, 1, 110)
    raw = table.dump()
    for at, bit in product(range(len(raw)), range(8)):
        wrong = bytearray(raw)
        wrong[at] ^= 1 << bit
        assert Producers.load(bytes(wrong)) is None
    for length in range(len(raw)):
        assert Producers.load(raw[:length]) is None
    assert Producers.load(raw + bytes(28)) is None
    assert Producers.load(Producers().dump()) is not None
