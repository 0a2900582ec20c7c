"""Jobs of many tasks: staged batches and their commit, positions, waiting, advancing."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.errors import (
    HeadraceError,
    InvalidArgument,
    MessageNotFound,
    OffsetOutOfRange,
    SubscriptionNotFound,
    TopicNotFound,
)
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.model import derive_id, topic_hash
from tests.contract.front_end import JOBS, FrontEnd, Session

pytestmark = pytest.mark.needs(JOBS)


def batch(*values: bytes, keys: Sequence[bytes | None] | None = None) -> Batch:
    return encode(Columns(list(values), None if keys is None else list(keys)))


def stage(session: Session, *values: bytes, topic: str = "lake", **options: Any) -> str:
    piece: str = session.job("stage", topic, batch(*values), **options)
    return piece


def commit(session: Session, number: int, *pieces: str, name: str = "job") -> bool:
    first: bool = session.job("commit_staged", name, number, list(pieces))
    return first


def values(session: Session, topic: str = "lake") -> list[bytes]:
    return [got.value for got in session.fetch(topic)]


def ends(session: Session, topics: Any = "lake") -> dict[str, list[int]]:
    found = session.job("positions", topics)
    return {topic: [place["end"] for place in places] for topic, places in found.items()}


# --- staging --------------------------------------------------------------------------------------
def test_what_is_staged_is_seen_when_it_is_committed(session: Session) -> None:
    """Nobody sees a piece before; then all are there, in the order of the commit."""
    pieces = [stage(session, b"one", b"two", partition=0), stage(session, b"three", partition=0)]
    assert values(session) == []
    assert commit(session, 0, pieces[1], pieces[0]) is True
    assert values(session) == [b"three", b"one", b"two"]


def test_a_commit_is_repeated_without_harm(front: FrontEnd, session: Session) -> None:
    """The same number again changes nothing and says so, also after a restart."""
    piece = stage(session, b"once")
    assert commit(session, 7, piece) is True
    assert commit(session, 7, piece) is False
    front.restart()
    session = front.open()
    assert commit(session, 7, piece) is False
    assert commit(session, 7, stage(session, b"by another attempt")) is False
    assert commit(session, 3, stage(session, b"long ago")) is False
    assert values(session) == [b"once"]


def test_pieces_wait_over_a_restart(front: FrontEnd, session: Session) -> None:
    """What was staged is durable, and is committed after a restart as if there had been none."""
    pieces = [stage(session, b"one"), stage(session, b"two")]
    front.restart()
    session = front.open()
    assert values(session) == []
    assert commit(session, 0, *pieces, stage(session, b"three")) is True
    assert values(session) == [b"one", b"two", b"three"]


def test_an_aborted_piece_is_gone(session: Session) -> None:
    """It cannot be committed any more; aborting twice, or what is committed, does nothing."""
    gone, kept = stage(session, b"gone"), stage(session, b"kept")
    session.job("abort_staged", [gone])
    session.job("abort_staged", [gone])
    with pytest.raises(MessageNotFound) as refused:
        commit(session, 0, kept, gone)
    assert refused.value.code == "piece_gone"
    assert commit(session, 0, kept) is True
    session.job("abort_staged", [kept])
    assert values(session) == [b"kept"]


def test_a_batch_goes_to_one_partition(session: Session) -> None:
    """The one that is named, or the next in turn for the whole batch, whatever its keys are."""
    session.create_topic("lake", partitions=2)
    keyed = batch(*[b"%d" % n for n in range(20)], keys=[b"%d" % n for n in range(20)])
    named = [stage(session, b"x", partition=1), stage(session, b"y", partition=1)]
    commit(session, 0, *named)
    assert ends(session) == {"lake": [0, 2]}
    commit(session, 1, session.job("stage", "lake", keyed))
    assert sorted(ends(session)["lake"]) in ([0, 22], [2, 20])


def test_an_empty_commit_counts(session: Session) -> None:
    """A batch of a query may have nothing to write."""
    assert commit(session, 0) is True
    assert commit(session, 0) is False
    assert commit(session, 1, stage(session, b"x")) is True


def test_a_piece_of_a_failed_attempt_goes_with_its_commit(session: Session) -> None:
    """What was staged for a commit and is not in it, is dropped when that is done."""
    orphan = stage(session, b"orphan", name="job", number=1)
    later = stage(session, b"later", name="job", number=2)
    commit(session, 1, stage(session, b"kept", name="job", number=1))
    with pytest.raises(MessageNotFound):
        commit(session, 2, orphan)
    assert commit(session, 2, later) is True
    assert values(session) == [b"kept", b"later"]


@pytest.mark.parametrize(
    "piece", ["nonsense", str(derive_id(topic_hash("__staged"), 0, 0)), "0/0/1/0/lake", "1/2/0/0/x"]
)
def test_what_is_no_piece_is_refused(session: Session, piece: str) -> None:
    """An id that staging never gave out is an error, and nothing of the commit happens."""
    good = stage(session, b"good")
    with pytest.raises(HeadraceError) as refused:
        commit(session, 0, good, piece)
    assert refused.value.code in ("invalid_piece", "piece_gone")
    assert values(session) == []
    assert commit(session, 0, good) is True


def test_bad_commits_are_refused(session: Session) -> None:
    """A piece twice, a name or a number that cannot be."""
    piece = stage(session, b"x")
    with pytest.raises(InvalidArgument) as twice:
        commit(session, 0, piece, piece)
    assert twice.value.code == "invalid_piece"
    for name, number in (("no name", 0), ("__mine", 0), ("job", -1)):
        with pytest.raises(InvalidArgument):
            commit(session, number, piece, name=name)
    with pytest.raises(InvalidArgument):
        stage(session, b"x", partition=5)
    with pytest.raises(InvalidArgument):
        stage(session, b"x", topic="__staged")


# --- positions ------------------------------------------------------------------------------------
def test_positions_of_many_topics_in_one_call(session: Session) -> None:
    """By name, by list and by wildcard; internal topics only by their name."""
    session.create_topic("orders.eu", partitions=2)
    session.create_topic("orders.us")
    session.publish("orders.eu", b"one", partition=1)
    session.publish("orders.us", b"two")
    session.publish("other", b"three")
    stage(session, b"x", topic="other")
    assert ends(session, "orders.*") == {"orders.eu": [0, 1], "orders.us": [1]}
    assert ends(session, ["other", "orders.us"]) == {"orders.us": [1], "other": [1]}
    assert ends(session, ">") == {"orders.eu": [0, 1], "orders.us": [1], "other": [1]}
    assert ends(session, "__staged") == {"__staged": [1]}
    assert ends(session, "nothing.*") == {}
    place = session.job("positions", "orders.us")["orders.us"][0]
    assert place["partition"] == place["start"] == 0
    assert place["bytes"] > 0
    with pytest.raises(TopicNotFound):
        session.job("positions", ["orders.us", "nowhere"])


def test_positions_at_a_time(session: Session) -> None:
    """The first record at or after it; the end if there is none."""
    session.publish("orders", b"one")
    middle = session.fetch("orders")[0].timestamp + 1
    found = session.job("positions", "orders", at=0)["orders"][0]
    assert (found["offset"], found["end"]) == (0, 1)
    assert session.job("positions", "orders", at=middle + 1_000_000)["orders"][0]["offset"] == 1


def test_waiting_ends_with_the_first_record(front: FrontEnd, session: Session) -> None:
    """At once if it is there; else when it comes, also by a commit; False when it does not."""
    session.create_topic("lake", partitions=2)
    session.create_topic("sea")
    nothing: dict[str, dict[int, int]] = {"lake": {0: 0, 1: 0}, "sea": {0: 0}}
    assert session.job("wait_for", nothing, timeout=0.01) is False
    other = front.open()
    piece = stage(other, b"x", partition=1)
    thread = threading.Timer(0.05, commit, (other, 0, piece))
    thread.start()
    assert session.job("wait_for", nothing, timeout=10) is True
    thread.join()
    assert session.job("wait_for", nothing, timeout=0) is True
    assert session.job("wait_for", {"lake": {0: 0, 1: 1}}, timeout=0.01) is False


def test_waiting_ends_with_a_new_topic_or_partition(front: FrontEnd, session: Session) -> None:
    """Who follows a wildcard hears of what the positions do not know yet."""
    session.create_topic("orders.eu")
    known: dict[str, dict[int, int]] = {"orders.eu": {0: 0}}
    assert session.job("wait_for", known, topics="orders.*", timeout=0.01) is False
    other = front.open()
    thread = threading.Timer(0.05, other.create_topic, ("orders.us",))
    thread.start()
    assert session.job("wait_for", known, topics=["orders.*"], timeout=10) is True
    thread.join()
    with pytest.raises(TopicNotFound):
        session.job("wait_for", {"nowhere": {0: 0}}, timeout=1)


# --- advancing ------------------------------------------------------------------------------------
def test_a_reader_advances_its_subscription(front: FrontEnd, session: Session) -> None:
    """The lag shrinks, it never grows again by an older position, and it is durable."""
    session.create_topic("orders", partitions=2)
    for number in range(4):
        session.publish("orders", b"%d" % number, partition=number % 2)
    session.create_subscription("spark", "orders")
    assert session.stats("spark", "orders")["lag"] == 4
    session.job("advance", "spark", {"orders": {0: 2, 1: 1}})
    assert session.stats("spark", "orders")["lag"] == 1
    session.job("advance", "spark", {"orders": {0: 1}}, topic="orders")
    assert session.stats("spark", "orders")["lag"] == 1
    front.restart()
    assert front.open().stats("spark", "orders")["lag"] == 1


def test_advancing_to_where_nothing_is_is_refused(session: Session) -> None:
    """Beyond the end, in a topic or partition that is not there, or without a subscription."""
    session.publish("orders", b"one")
    session.publish("other", b"one")
    session.create_subscription("spark", "orders")
    with pytest.raises(OffsetOutOfRange):
        session.job("advance", "spark", {"orders": {0: 2}})
    for wrong in ({"orders": {3: 0}}, {"other": {0: 0}}, {"orders": {0: -1}}):
        with pytest.raises(InvalidArgument):
            session.job("advance", "spark", wrong)
    with pytest.raises(TopicNotFound):
        session.job("advance", "spark", {"nowhere": {0: 0}})
    with pytest.raises(SubscriptionNotFound):
        session.job("advance", "nobody", {"orders": {0: 0}})
    with pytest.raises(InvalidArgument):
        session.job("advance", "__staging", {"orders": {0: 0}})
    assert session.stats("spark", "orders")["lag"] == 1
