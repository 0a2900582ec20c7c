"""Ranges of offsets are sets, whatever order they are made in."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.spark.lake import Offsets, Span

spans = st.lists(
    st.builds(
        lambda topic, partition, start, length: Span(topic, partition, start, start + length),
        st.sampled_from(["a", "b.c"]),
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(0, 6),
    ),
    max_size=12,
)


def numbers(offsets: Offsets | list[Span]) -> set[tuple[str, int, int]]:
    return {
        (topic, partition, offset)
        for topic, partition, start, end in offsets
        for offset in range(start, end)
    }


@given(spans)
def test_it_holds_what_was_added(some: list[Span]) -> None:
    """Once each, in as few ranges as can be."""
    offsets = Offsets(some)
    assert numbers(offsets) == numbers(some)
    assert offsets.count == len(numbers(some))
    for topic, partition in offsets.partitions():
        ranges = offsets.of(topic, partition)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))


@given(spans, spans)
def test_sets(some: list[Span], others: list[Span]) -> None:
    """What two have in common, and what only the first has."""
    mine, theirs = Offsets(some), Offsets(others)
    assert numbers(mine.common(theirs)) == numbers(mine) & numbers(theirs)
    assert numbers(mine.without(theirs)) == numbers(mine) - numbers(theirs)
    assert numbers(Offsets(mine).add_all(theirs)) == numbers(mine) | numbers(theirs)


@given(spans)
def test_text_and_back(some: list[Span]) -> None:
    offsets = Offsets(some)
    assert Offsets.of_text(offsets.as_text()) == offsets


def test_gaps_and_ends() -> None:
    """What is missing in between, and where to go on."""
    offsets = Offsets([Span("a", 0, 5, 8), Span("a", 0, 10, 12), Span("a", 1, 0, 3)])
    assert list(offsets.gaps()) == [Span("a", 0, 8, 10)]
    assert offsets.ends() == {"a": {0: 12, 1: 3}}
    assert str(Span("a", 0, 8, 10)) == "a/0@8-9"
    assert str(Span("a", 0, 8, 9)) == "a/0@8"
