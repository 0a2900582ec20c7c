"""The arithmetic of the group commit, against a model that takes one entry at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import limits
from headrace.errors import HeadraceError, ProducerFenced, SequenceGap, TooLarge
from headrace.log.batch import AFTER_SYNC, LOST, STAGED, encode, lost
from headrace.log.columns import Columns
from headrace.log.commit import CommitGroup, gather
from headrace.log.interface import Append
from headrace.log.producers import Producers
from tests.log.rig import entry_of

NOW = 10_000


def commit(
    entries: list[Append], *, end: int = 0, last: int = 0, now: int = NOW,
    producers: Producers | None = None,
) -> CommitGroup:  # fmt: skip
    group, left = gather(
        entries,
        end_offset=end,
        last_timestamp=last,
        now_ms=now,
        producers=producers if producers is not None else Producers(),
    )
    assert left == []
    return group


def test_what_waits_together_becomes_one_batch() -> None:
    """Many small publishes are one batch, and each is told its own offset."""
    entries = [entry_of(b"a"), entry_of(b"b", b"c"), entry_of(b"d")]
    group = commit(entries, end=40)
    assert [batch.values() for batch in group.batches] == [[b"a", b"b", b"c", b"d"]]
    assert [entry.first_offset for entry in entries] == [40, 41, 43]
    assert [entry.timestamp for entry in entries] == [NOW] * 3
    assert (group.batches[0].base_offset, group.offset) == (40, 44)


def test_whole_batches_stay_whole_and_in_their_place() -> None:
    """A batch that came as one is stored as one, between what came before and behind it."""
    whole = encode(Columns([b"x", b"y"]))
    body = whole.body
    entries = [entry_of(b"a"), entry_of(batch=whole), entry_of(b"b"), entry_of(b"c")]
    group = commit(entries)
    assert [batch.values() for batch in group.batches] == [[b"a"], [b"x", b"y"], [b"b", b"c"]]
    assert group.batches[1].body is body
    assert [entry.first_offset for entry in entries] == [0, 1, 3, 4]


def test_a_copied_batch_is_not_changed() -> None:
    """A batch of another log keeps its offset, times, producer and flags; at another offset it is refused."""
    gone = lost(40, 3, 7)
    whole = encode(Columns([b"x"], times=[NOW + 5]))
    whole.base_offset, whole.base_timestamp, whole.max_timestamp = 43, NOW + 5, NOW + 5
    whole.producer_id, whole.producer_epoch, whole.first_sequence = 9, 2, 17
    wrong = encode(Columns([b"y"]))
    wrong.base_offset = 43
    entries = [Append(None, batch, lambda _: None, copied=True) for batch in (gone, whole, wrong)]
    group = commit(entries, end=40, last=8)
    assert [(each.base_offset, each.base_timestamp) for each in group.batches] == [
        (40, 7),
        (43, NOW + 5),
    ]
    assert (group.batches[0].flags, group.batches[1].first_sequence) == (LOST, 17)
    assert (group.offset, group.timestamp) == (44, NOW + 5)
    assert [entry.first_offset for entry in entries] == [40, 43, -1]
    assert entries[2].error is not None


def test_only_the_broker_says_after_sync_or_lost() -> None:
    """Flags that belong to the broker are taken off a batch that brings them."""
    whole = encode(Columns([b"x"]))
    whole.flags |= AFTER_SYNC | LOST
    group = commit([entry_of(batch=whole)])
    assert group.batches[0].flags == 0


def test_a_staged_batch_keeps_its_own_times() -> None:
    """It is only kept here: the header says when it came, and the column is not touched."""
    times = [NOW + 5_000, 3, 7_000]
    whole = encode(Columns([b"x", b"y", b"z"], times=times))
    body = whole.body
    (batch,) = commit([Append(None, whole, lambda entry: None, staged=True)], last=9_000).batches
    assert batch.flags & STAGED
    assert batch.body is body
    assert (batch.base_timestamp, batch.max_timestamp) == (NOW, NOW)
    assert batch.times() is None
    batch.flags &= ~STAGED
    assert batch.times() == times


def test_what_was_lost_before_its_commit_stays_lost() -> None:
    """Only a commit of staged batches stores such a thing."""
    (batch,) = commit([Append(None, lost(0, 3, 0), lambda entry: None, hidden=True)]).batches
    assert batch.flags & LOST
    assert batch.count == 3


def test_gathered_batches_are_closed_at_their_target() -> None:
    """Gathering stops near the target size, in bytes and in records."""
    group = commit([entry_of(bytes(limits.BATCH_BYTES_TARGET // 4)) for _ in range(9)])
    assert [batch.count for batch in group.batches] == [3, 3, 3]
    many = [entry_of(*[b""] * (limits.BATCH_RECORDS_TARGET // 2 - 1)) for _ in range(5)]
    group = commit(many)
    assert max(batch.count for batch in group.batches) <= limits.BATCH_RECORDS_TARGET
    assert [entry.first_offset for entry in many] == [4_999 * number for number in range(5)]


def test_a_commit_is_bounded_and_the_rest_waits() -> None:
    """What does not fit into one commit is handed back, in order; one entry always fits."""
    big = limits.COMMIT_BYTES_MAX // 2
    entries = [entry_of(bytes(big)) for _ in range(4)]
    group, left = gather(entries, end_offset=0, last_timestamp=0, now_ms=NOW, producers=Producers())
    assert group.entries == entries[:1]
    assert left == entries[1:]
    huge = entry_of(bytes(2 * limits.COMMIT_BYTES_MAX))
    assert commit([huge]).entries == [huge]


def test_large_keys_and_headers_count() -> None:
    """Small values with large keys and headers are not gathered into a batch too large to store."""
    key, header = bytes(limits.KEY_BYTES_MAX), {"h": "x" * 60_000}
    entries = [
        entry_of(columns=Columns([b"v"], keys=[key], headers=[header])) for _ in range(1_200)
    ]
    done = 0
    while entries:
        group, entries = gather(
            entries, end_offset=done, last_timestamp=0, now_ms=NOW, producers=Producers()
        )
        assert all(entry.error is None for entry in group.entries)
        assert all(batch.stored_bytes < 2 * limits.BATCH_BYTES_TARGET for batch in group.batches)
        done = group.offset
    assert done == 1_200


def test_one_that_cannot_be_encoded_fails_alone() -> None:
    """A batch too large is an error of its entry; its neighbours are stored without a gap."""
    part = bytes(1 << 20)
    entries = [entry_of(b"a"), entry_of(*[part] * 130, producer=(7, 0, 0)), entry_of(b"b")]
    left, end = entries, 0
    while left:
        group, left = gather(
            left, end_offset=end, last_timestamp=0, now_ms=NOW, producers=Producers()
        )
        end = group.offset
    assert isinstance(entries[1].error, TooLarge)
    assert [entries[0].first_offset, entries[2].first_offset, end] == [0, 1, 2]


# --- times ----------------------------------------------------------------------------------
def test_a_clock_that_runs_backwards_stands_still() -> None:
    """Records are never older than those before them, whatever the clock says."""
    group = commit([entry_of(b"a")], last=NOW + 500, now=NOW)
    assert group.batches[0].base_timestamp == NOW + 500
    assert group.timestamp == NOW + 500


def test_times_that_a_client_brings_are_kept_in_bounds() -> None:
    """Own times stay, as long as they lie between the last record and now."""
    entry = entry_of(b"a", b"b", b"c", times=[5, 9_990, 10**15])
    group = commit([entry], last=9_000)
    assert group.batches[0].times() == [9_000, 9_990, NOW]
    assert (entry.timestamp, group.timestamp) == (9_000, NOW)


# --- idempotent producers ---------------------------------------------------------------------
def test_a_repetition_in_the_same_group_is_stored_once() -> None:
    """A batch sent twice before the first is durable is stored once, and both get its offset."""
    entries = [entry_of(b"a", b"b", producer=(7, 0, 0)) for _ in range(2)]
    group = commit(entries, end=9)
    assert len(group.batches) == 1
    assert [entry.first_offset for entry in entries] == [9, 9]
    assert [entry.duplicate for entry in entries] == [False, True]


def test_producers_continue_within_a_group() -> None:
    """Pipelined batches of one producer are all new, and a reused sequence among them is refused."""
    entries = [entry_of(b"a", producer=(7, 0, number)) for number in range(3)]
    reused = entry_of(b"a", b"other", producer=(7, 0, 0))
    group = commit([*entries, reused])
    assert [entry.first_offset for entry in entries] == [0, 1, 2]
    assert isinstance(reused.error, SequenceGap)
    assert [batch.first_sequence for batch in group.batches] == [0, 1, 2]
    assert [batch.producer_id for batch in group.batches] == [7, 7, 7]


def test_a_new_epoch_fences_within_a_group() -> None:
    """An old owner cannot slip in behind the new one, though both are still on their way."""
    old, new = entry_of(b"old", producer=(7, 1, 0)), entry_of(b"new", producer=(7, 2, 0))
    late = entry_of(b"late", producer=(7, 1, 1))
    group = commit([old, new, late])
    assert [batch.values() for batch in group.batches] == [[b"old"], [b"new"]]
    assert isinstance(late.error, ProducerFenced)


def test_the_first_batch_of_a_new_epoch_is_not_that_of_the_old_one() -> None:
    """Two owners' first batches in one group differ, and each repetition gets its own offset."""
    old, new = entry_of(b"old", producer=(7, 1, 0)), entry_of(b"new", producer=(7, 2, 0))
    again = entry_of(b"new", producer=(7, 2, 0))
    commit([old, new, again])
    assert [old.first_offset, new.first_offset, again.first_offset] == [0, 1, 1]
    assert again.duplicate


def test_a_refused_entry_takes_no_offset() -> None:
    """Gaps and repetitions leave no hole in the offsets of the others."""
    producers = Producers()
    producers.add(7, 0, 0, 1, 3)
    entries = [
        entry_of(b"a"),
        entry_of(b"gap", producer=(7, 0, 5)),
        entry_of(b"b"),
        entry_of(b"known", producer=(7, 0, 0)),
        entry_of(b"c"),
    ]
    group = commit(entries, end=10, producers=producers)
    assert isinstance(entries[1].error, SequenceGap)
    assert [entry.first_offset for entry in entries] == [10, -1, 11, 3, 12]
    assert group.offset == 13


# --- against a model --------------------------------------------------------------------------
@st.composite
def sends(draw: st.DrawFn) -> list[dict]:
    found = []
    for number in range(draw(st.integers(1, 25))):
        count = draw(st.integers(1, 3))
        send: dict = {"values": [b"%d.%d" % (number, at) for at in range(count)]}
        kind = draw(st.sampled_from(["columns", "columns", "times", "whole", "producer"]))
        if kind == "times":
            send["times"] = draw(st.lists(st.integers(0, 20_000), min_size=count, max_size=count))
        elif kind == "producer":
            send["producer"] = (
                draw(st.integers(1, 2)),
                draw(st.integers(0, 1)),
                draw(st.integers(0, 5)),
            )
        send["whole"] = kind == "whole" or draw(st.booleans())
        found.append(send)
    return found


def entry(send: dict) -> Append:
    producer = send.get("producer", (0, 0, 0))
    if send["whole"]:
        batch = encode(Columns(send["values"], times=send.get("times")))
        return entry_of(batch=batch, producer=producer)
    return entry_of(*send["values"], times=send.get("times"), producer=producer)


@given(sends(), st.lists(st.integers(9_000, 11_000), min_size=25, max_size=25), st.data())
def test_gathering_is_the_same_as_one_at_a_time(
    script: list[dict], clock: list[int], data: st.DataObject
) -> None:
    """However entries fall into groups: the same records, offsets, verdicts, and times in order."""
    one_by_one: list[tuple] = []
    stored: list[bytes] = []
    producers = Producers()
    for send in script:  # the model: every entry is a group of its own
        single = entry(send)
        group = commit([single], end=len(stored), producers=producers)
        for batch in group.batches:
            producers.add_batch(batch)
            stored += batch.values()
        one_by_one.append((single.first_offset, single.duplicate, type(single.error)))

    entries = [entry(send) for send in script]
    producers, records, time, turn, at = Producers(), [], 0, 0, 0
    while at < len(entries):
        size = data.draw(st.integers(1, len(entries) - at))
        group = commit(
            entries[at : at + size],
            end=len(records),
            last=time,
            now=clock[turn],
            producers=producers,
        )
        for batch in group.batches:
            assert batch.base_offset == len(records)
            times = batch.times() or [batch.base_timestamp] * batch.count
            assert [time, *times] == sorted([time, *times])
            assert (batch.base_timestamp, batch.max_timestamp) == (times[0], times[-1])
            records += batch.values()
            producers.add_batch(batch)
            time = batch.max_timestamp
        assert (group.offset, group.timestamp) == (len(records), time)
        at, turn = at + size, turn + 1
    assert records == stored
    found = [(entry.first_offset, entry.duplicate, type(entry.error)) for entry in entries]
    assert found == one_by_one


def test_no_error_is_left_open() -> None:
    """An error that gathering gives is definite: never OutcomeUnknown."""
    bad = entry_of(b"x", producer=(7, 0, 9))
    commit([bad])
    assert isinstance(bad.error, HeadraceError)
    assert bad.error.code != "outcome_unknown"
    assert bad.first_offset == -1
    with pytest.raises(SequenceGap):
        raise bad.error
