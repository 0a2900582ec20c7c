"""Positions: what a checkpoint holds, what is missing, how far a batch goes, which tasks it makes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidArgument
from headrace.spark.source.options import Place, parse_place
from headrace.spark.source.positions import (
    Extent,
    Known,
    Positions,
    TaskSpan,
    TopicExtents,
    Waiting,
    ends,
    find_losses,
    limited,
    loss_error,
    resolve,
    spans,
    split,
    waiting,
)

KNOWN: Known = {
    "b": TopicExtents(7, {0: Extent(0, 10, 1000)}),
    "a": TopicExtents(3, {0: Extent(5, 100, 9500, at=50), 1: Extent(0, 0, 0, at=0)}),
}
STARTING = "startingOffsets"


def at(incarnations: dict[str, int] | None = None, **offsets: dict[int, int]) -> Positions:
    return Positions(
        offsets, incarnations or {topic: KNOWN[topic].incarnation for topic in offsets}
    )


# --- as Spark keeps them --------------------------------------------------------------------------
def test_equal_positions_are_equal_texts() -> None:
    """Spark compares texts, so the order is always the same, and numbers are in their order."""
    one = Positions({"b": {10: 1, 9: 2}, "a": {0: 3}}, {"b": 7, "a": 3})
    two = Positions({"a": {0: 3}, "b": {9: 2, 10: 1}}, {"a": 3, "b": 7})
    text = json.dumps(one.as_dict())
    assert text == json.dumps(two.as_dict())
    assert text == '{"@topics": {"a": 3, "b": 7}, "a": {"0": 3}, "b": {"9": 2, "10": 1}}'
    assert Positions.of(json.loads(text)) == one


def test_where_a_query_began_is_kept_in_its_first_end() -> None:
    """So a first batch that is repeated begins where it began, whatever "latest" is by then."""
    end = Positions({"a": {0: 20}}, {"a": 3}, begin={"a": {0: 15}})
    again = Positions.of(json.loads(json.dumps(end.as_dict())))
    assert again == end
    later = at(a={0: 90})
    assert spans(later, again) == [TaskSpan("a", 0, 15, 20, 3)]
    assert spans(again, again) == []  # the first batch is done, and nothing has come since


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"a": {"0": 1}},
        {"@topics": {"a": 1}},
        {"@topics": {"a": 1}, "a": {"x": 1}},
        {"@topics": 5},
    ],
)
def test_a_strange_checkpoint_is_refused(document: dict[str, object]) -> None:
    """With a sentence that says what it may be."""
    with pytest.raises(InvalidArgument) as failed:
        Positions.of(document)
    assert failed.value.code == "invalid_checkpoint"


# --- where to begin and to end --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "offsets"),
    [
        (Place("earliest", STARTING), {"a": {0: 5, 1: 0}, "b": {0: 0}}),
        (Place("latest", STARTING), {"a": {0: 100, 1: 0}, "b": {0: 10}}),
        (parse_place(STARTING, '{"a": {"0": 23}}'), {"a": {0: 23, 1: 0}, "b": {0: 0}}),
        (
            parse_place(STARTING, '{"a": {"0": -1}, "b": {"0": -2}}'),
            {"a": {0: 100, 1: 0}, "b": {0: 0}},
        ),
        (parse_place("endingOffsets", '{"a": {"0": 23}}'), {"a": {0: 23, 1: 0}, "b": {0: 10}}),
        (Place("group", STARTING), {"a": {0: 40, 1: 0}, "b": {0: 0}}),
    ],
)
def test_a_place_becomes_offsets(place: Place, offsets: dict[str, dict[int, int]]) -> None:
    """What is not named is read from its beginning, or to its end."""
    found = resolve(place, KNOWN, {"a": {0: 40}})
    assert found.offsets == offsets
    assert found.incarnations == {"a": 3, "b": 7}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"c": {"0": 1}}', "'c' is not among the topics"),
        ('{"a": {"2": 1}}', "'a' has no partition 2, only 0 to 1"),
        ('{"a": {"0": 101}}', "a/0 ends at 100; there is no offset 101 yet"),
    ],
)
def test_offsets_that_cannot_be_are_named(text: str, complaint: str) -> None:
    """With the option that named them."""
    with pytest.raises(InvalidArgument, match="option startingOffsets") as failed:
        resolve(parse_place(STARTING, text), KNOWN, {})
    assert complaint in str(failed.value)


# --- what is gone -----------------------------------------------------------------------------------
def test_nothing_is_missing() -> None:
    """Neither where all is there, nor where partitions and topics have been added."""
    assert find_losses(at(a={0: 5, 1: 0}, b={0: 10}), KNOWN) == []
    assert find_losses(at(b={0: 3}), KNOWN) == []


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (at(a={0: 2}), "a/0: offsets 2 to 4 were deleted by retention"),
        (at(b={0: 12}), "b/0: offsets 10 to 11 were read once and do not exist any more"),
        (at({"c": 1}, c={0: 4}), "c/0: the topic was deleted"),
        (at({"a": 99}, a={0: 50}), "a/0: the topic was deleted and created again"),
        (at(b={0: 1, 4: 1}), "b/4: the partition does not exist any more"),
        (at(a={1: 0}), "a/0: offsets 0 to 4 were deleted by retention"),
    ],
)
def test_what_is_missing_is_said_exactly(read: Positions, said: str) -> None:
    """Topic, partition and offsets; and what to do about it."""
    losses = find_losses(read, KNOWN)
    assert len(losses) == 1
    assert said in str(losses[0])
    error = loss_error(losses)
    assert error.code == "data_loss"
    assert said in error.message
    assert "failOnDataLoss=false" in error.message


# --- how far one batch goes -------------------------------------------------------------------------
def test_what_waits() -> None:
    """From where it was read, or from where it begins now."""
    found = waiting(at(a={0: 2}, b={0: 4}), ends(KNOWN), KNOWN, by_bytes=False)
    assert found == [Waiting("b", 0, 4, 10, 1.0), Waiting("a", 0, 5, 100, 1.0)]
    sizes = waiting(at(a={0: 95}), ends(KNOWN), KNOWN, by_bytes=True)
    assert sizes == [Waiting("b", 0, 0, 10, 100.0), Waiting("a", 0, 95, 100, 100.0)]


def test_a_limit_is_shared_by_what_waits() -> None:
    """As Kafka's source does it: in proportion."""
    parts = [Waiting("a", 0, 0, 300, 1.0), Waiting("a", 1, 0, 100, 1.0)]
    target = Positions({"a": {0: 300, 1: 100, 2: 7}}, {"a": 1})
    assert limited(target, parts, 40).offsets == {"a": {0: 30, 1: 10, 2: 7}}
    assert limited(target, parts, 400) is target
    assert limited(target, parts, 1).offsets == {"a": {0: 1, 1: 0, 2: 7}}


def test_a_record_larger_than_the_limit_is_read_all_the_same() -> None:
    """One at a time, or the query would stand still."""
    parts = [Waiting("a", 0, 0, 5, 1e6), Waiting("b", 0, 0, 5, 1e6)]
    target = Positions({"a": {0: 5}, "b": {0: 5}}, {"a": 1, "b": 1})
    assert limited(target, parts, 1000).offsets == {"a": {0: 1}, "b": {0: 0}}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 1000)), min_size=1, max_size=8),
    st.integers(1, 500),
)
def test_a_limit_is_kept_and_the_end_is_reached(sizes: list[tuple[int, int]], maximum: int) -> None:
    """No batch is larger, none is empty, and after enough of them everything was read once."""
    final = {number: start + count for number, (start, count) in enumerate(sizes)}
    known = {
        "t": TopicExtents(
            1, {n: Extent(start, start + count) for n, (start, count) in enumerate(sizes)}
        )
    }
    read = Positions({"t": {n: start for n, (start, _) in enumerate(sizes)}}, {"t": 1})
    while read.offsets["t"] != final:
        parts = waiting(read, ends(known), known, by_bytes=False)
        new = limited(ends(known), parts, maximum)
        moved = [new.offsets["t"][n] - read.offsets["t"][n] for n in final]
        assert 0 < sum(moved) <= maximum
        assert min(moved) >= 0
        read = new


# --- which tasks that makes -------------------------------------------------------------------------
def test_tasks_lie_between_two_positions() -> None:
    """What was added meanwhile is read from its beginning; what has not grown makes no task."""
    end = Positions({"a": {0: 100, 1: 5}, "b": {0: 10}}, {"a": 3, "b": 7})
    assert spans(at(a={0: 40}, b={0: 10}), end) == [
        TaskSpan("a", 0, 40, 100, 3),
        TaskSpan("a", 1, 0, 5, 3),
    ]


def test_a_topic_that_was_made_again_is_read_from_its_beginning() -> None:
    """The old offsets mean nothing in it."""
    end = Positions({"a": {0: 20}}, {"a": 4})
    assert spans(at(a={0: 15}), end) == [TaskSpan("a", 0, 0, 20, 4)]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), min_size=1, max_size=6),
    st.integers(1, 200),
)
def test_splitting_leaves_nothing_out(sizes: list[tuple[int, int]], at_least: int) -> None:
    """So many tasks as asked for, if there are so many records; each record in one of them."""
    whole = [TaskSpan("t", n, start, start + count, 1) for n, (start, count) in enumerate(sizes)]
    parts = split(whole, at_least)
    assert len(parts) >= min(at_least, sum(span.rows for span in whole))
    assert all(part.rows > 0 for part in parts)
    for span in whole:
        mine = [part for part in parts if part.partition == span.partition]
        assert [mine[0].start, *(part.end for part in mine)] == [
            *(part.start for part in mine),
            span.end,
        ]
        assert mine[0].start == span.start
    assert split(whole, None) == whole
