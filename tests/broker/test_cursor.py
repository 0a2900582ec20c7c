"""A cursor is a set of done offsets that is cheap: everything here compares it with a plain set."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker import cursor as module
from headrace.broker.cursor import CHUNK, Cursor

END = 3 * CHUNK
# Near the edges of chunks is where a mistake would be.
OFFSETS = st.one_of(
    st.integers(0, 40),
    st.integers(CHUNK - 20, CHUNK + 20),
    st.integers(2 * CHUNK - 5, 2 * CHUNK + 5),
    st.integers(0, END - 1),
)
RUNS = st.tuples(OFFSETS, st.one_of(st.integers(0, 30), st.integers(0, 2 * CHUNK)))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("done"), OFFSETS),
        st.tuples(st.just("run"), RUNS),
        st.tuples(st.just("failed"), st.tuples(OFFSETS, st.integers(1, 9))),
        st.tuples(st.just("seek"), OFFSETS),
        st.tuples(st.just("write"), st.none()),
        st.tuples(st.just("lose"), st.none()),
        st.tuples(st.just("snapshot"), st.none()),
    ),
    max_size=60,
)


def cursor_at(position: int = 0, end: int = END) -> Cursor:
    partition: Any = SimpleNamespace(log=SimpleNamespace(end_offset=end))
    return Cursor(7, partition, position)


class Model:
    """The same as a set and a dict."""

    def __init__(self, position: int = 0):
        self.done = set(range(position))
        self.attempts: dict[int, int] = {}

    def mark(self, *offsets: int) -> None:
        self.done.update(offsets)
        for offset in offsets:
            self.attempts.pop(offset, None)

    def seek(self, offset: int) -> None:
        self.done = set(range(offset))
        self.attempts.clear()

    @property
    def position(self) -> int:
        return next(offset for offset in range(END + 2 * CHUNK) if offset not in self.done)

    def check(self, cursor: Cursor) -> None:
        position = self.position
        assert cursor.position == position
        assert cursor.high >= max(self.done, default=-1) + 1
        beyond = sorted(offset for offset in self.done if offset > position)
        assert [o for start, stop in cursor.runs() for o in range(start, stop)] == beyond
        assert all(a[1] < b[0] for a, b in zip(cursor.runs(), cursor.runs()[1:], strict=False))
        undone = [offset for offset in range(END) if offset not in self.done]
        assert list(cursor.undone(END)) == undone
        assert cursor.done_count() == len(beyond)
        for stop in (0, position, position + 1, END // 3, CHUNK, CHUNK + 1, END):
            assert cursor.done_count(stop) == sum(offset < stop for offset in beyond)
            assert cursor.undone_count(stop) == sum(n not in self.done for n in range(stop))
        if beyond and beyond[-1] >= END:
            assert cursor.lag() <= len(undone)  # more is done than the partition has
        else:
            assert cursor.lag() == len(undone)
        for offset in (0, position, *beyond[:3], END - 1):
            assert cursor.is_done(offset) == (offset in self.done)


@given(STEPS)
def test_it_is_a_set_of_done_offsets(steps: list[tuple[str, Any]]) -> None:
    """Whatever is done, run by run or one by one, position, runs, lag and undone are the set's."""
    cursor, model = cursor_at(), Model()
    for kind, argument in steps:
        if kind == "done":
            assert cursor.done(argument) == (argument not in model.done)
            model.mark(argument)
        elif kind == "run":
            start, length = argument
            cursor.done_run(start, start + length)
            model.mark(*range(start, start + length))
        elif kind == "seek":
            cursor.seek(argument)
            model.seek(argument)
        elif kind == "failed" and not cursor.is_done(argument[0]):
            cursor.failed(*argument)
            model.attempts[argument[0]] = argument[1]
        assert cursor.attempts == model.attempts
    model.check(cursor)


@given(STEPS)
def test_the_journal_gives_back_what_was_written(steps: list[tuple[str, Any]]) -> None:
    """Deltas and snapshots, in any order, replayed give the cursor as it was at the last of them.

    ``lose`` is a write that failed: the next one has to make up for it.
    """
    cursor = cursor_at()
    journal = [cursor.take_delta()]
    for kind, argument in steps:
        if kind == "done":
            cursor.done(argument)
        elif kind == "run":
            cursor.done_run(argument[0], argument[0] + argument[1])
        elif kind == "seek":
            cursor.seek(argument)
        elif kind == "failed" and not cursor.is_done(argument[0]):
            cursor.failed(*argument)
        elif kind == "write":
            journal.append(cursor.take_delta())
        elif kind == "lose":
            cursor.take_delta()
            cursor.rewrite()
        elif kind == "snapshot":
            journal.append(cursor.snapshot())
    journal.append(cursor.take_delta())
    assert not cursor.dirty

    copy = cursor_at()
    for payload in journal:
        assert Cursor.number_of(payload) == cursor.number
        copy.apply(payload)
    assert copy.position == cursor.position
    assert copy.runs() == cursor.runs()
    assert copy.attempts == cursor.attempts
    assert copy.next == copy.position
    assert not copy.dirty


@given(st.lists(st.one_of(OFFSETS.map(lambda o: (o, o + 1)), RUNS.map(lambda r: (r[0], sum(r))))))
def test_replaying_twice_does_no_harm(runs: list[tuple[int, int]]) -> None:
    """Each delta applied twice, and the whole journal once more, is the same cursor."""
    cursor = cursor_at()
    journal = [cursor.take_delta()]
    for start, stop in runs:
        cursor.done_run(start, stop)
        journal.append(cursor.take_delta())
    copy = cursor_at()
    for payload in [*journal, *journal[1:]]:
        copy.apply(payload)
        copy.apply(payload)
    assert (copy.position, copy.runs()) == (cursor.position, cursor.runs())


@given(st.lists(OFFSETS, unique=True, max_size=30), st.data())
def test_a_lost_entry_only_makes_it_older(offsets: list[int], data: st.DataObject) -> None:
    """Without some of the deltas nothing is done that was not done: messages come again, no more."""
    cursor = cursor_at()
    journal = [cursor.take_delta()]
    for offset in offsets:
        cursor.done(offset)
        journal.append(cursor.take_delta())
    copy = cursor_at()
    for payload in journal:
        if data.draw(st.booleans()):
            copy.apply(payload)
    assert set(range(copy.position)) <= {o for o in range(END) if cursor.is_done(o)}
    for start, stop in copy.runs():
        assert all(cursor.is_done(offset) for offset in range(start, stop))


def test_a_full_chunk_costs_nothing() -> None:
    """What lies before the position takes no memory, in whatever order it was done."""
    cursor = cursor_at()
    for offset in reversed(range(2 * CHUNK)):
        cursor.done(offset)
    assert cursor.position == 2 * CHUNK
    assert not cursor._chunks
    assert cursor.runs() == []


def test_a_million_out_of_order_acks_are_small() -> None:
    """Every second of a million done: chunks of bits, not a million objects."""
    cursor = cursor_at(end=1_000_000)
    cursor.take_delta()
    for offset in range(1, 1_000_000, 2):
        cursor.done(offset)
    assert cursor.position == 0
    assert cursor.lag() == 500_000
    assert sum(chunk.bit_length() // 8 for chunk in cursor._chunks.values()) < 130_000


def test_news_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit the cursor writes all of itself instead of remembering each run."""
    monkeypatch.setattr(module, "RUNS_KEPT_MAX", 10)
    cursor = cursor_at()
    cursor.take_delta()
    for offset in range(1, 100, 2):
        cursor.done(offset)
        assert len(cursor._fresh_runs) <= 10
    copy = cursor_at()
    copy.apply(cursor.take_delta())
    assert copy.runs() == cursor.runs()


def test_what_is_to_be_written_whole_is_not_remembered_in_parts() -> None:
    """A cursor whose next write is a snapshot, as in a broker without a disk, keeps no news."""
    cursor = cursor_at()
    for offset in range(1, 1000, 2):
        cursor.done(offset)
        cursor.failed(offset + 1, 1)
    cursor.done_run(2000, 3000)
    assert cursor.dirty
    assert not cursor._fresh_runs
    assert not cursor._fresh_attempts


def test_attempts_end_with_the_message() -> None:
    """The count of failures is kept while the message is not done, and survives the journal."""
    cursor = cursor_at()
    cursor.failed(3, 1)
    cursor.failed(4, 2)
    cursor.done(3)
    copy = cursor_at()
    copy.apply(cursor.take_delta())
    assert copy.attempts == {4: 2}
    cursor.done_run(0, 5)
    copy.apply(cursor.take_delta())
    assert copy.attempts == {}
    assert copy.position == 5


def test_seek_forgets() -> None:
    """After a seek everything from there on is to be delivered, and nothing blocks it."""
    cursor = cursor_at()
    cursor.done_run(0, 10)
    cursor.done(20)
    cursor.failed(30, 4)
    cursor.blocked = "damaged"
    cursor.seek(5)
    assert (cursor.position, cursor.next, cursor.runs()) == (5, 5, [])
    assert not cursor.is_done(20)
    assert cursor.attempts == {}
    assert cursor.blocked is None
