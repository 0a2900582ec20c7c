"""A follower: everything from now on, to one sink, gone with it."""

import pytest

from headrace.broker.selection import select
from headrace.errors import DataCorrupt, InvalidArgument
from headrace.log.batch import LOST, Batch, encode
from headrace.log.columns import Columns
from headrace.model import TopicSettings
from tests.broker.rig import DATA, TOPIC, Rig, damage, flip
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_from_now_on(rig: Rig) -> None:
    """What was published before is not seen; every follower gets everything after."""
    rig.numbers(3)
    first, second = rig.follow(), rig.follow()
    rig.numbers(3, start=3)
    assert first.values == second.values == [b"3", b"4", b"5"]
    assert all(delivery.lease is None for delivery in first.deliveries)
    assert first.follower is not None
    assert first.follower.delivered == 3


def test_following_makes_the_topic(rig: Rig) -> None:
    """As a publish would; a wildcard makes none."""
    rig.follow()
    rig.follow("other.*")
    assert [topic.name for topic in rig.engine.topics] == [TOPIC]


def test_a_wildcard_and_what_comes_later(rig: Rig) -> None:
    """Topics and partitions made later are followed from their first record."""
    inbox = rig.follow("orders.*")
    rig.numbers(1, topic="orders.eu")
    rig.wait(rig.engine.change_topic, "orders.eu", {"partitions": 2})
    rig.publish("orders.eu", b"p1", partition=1)
    rig.numbers(1, topic="users")
    assert [(m.topic, m.partition) for m in inbox.messages] == [("orders.eu", 0), ("orders.eu", 1)]


def test_a_slow_one_costs_an_offset(rig: Rig) -> None:
    """It reads from the log when it has room again; nothing is kept for it, nothing is lost."""
    inbox = rig.follow(space=0)
    for start in range(0, 3000, 1000):
        rig.numbers(1000, start=start)
    assert inbox.messages == []
    inbox.space = 7
    assert inbox.follower is not None
    inbox.follower.wake()
    rig.run()
    assert [int(value) for value in inbox.values] == list(range(3000))
    assert max(len(delivery) for delivery in inbox.deliveries) == 7


def test_direct_and_expired_messages_are_not_for_it(rig: Rig) -> None:
    """A message meant for one subscription is for nobody else; one past its time for nobody."""
    inbox = rig.follow(space=0)
    rig.publish(TOPIC, b"direct", to="billing")
    rig.publish(TOPIC, b"short", ttl=5)
    rig.publish(TOPIC, b"long", ttl=50)
    rig.advance(10)
    inbox.space = 10
    assert inbox.follower is not None
    inbox.follower.wake()
    rig.run()
    assert inbox.values == [b"long"]


def test_the_topics_time_to_live_counts_for_it_too(rig: Rig) -> None:
    """A slow follower does not get what nobody else would get any more."""
    rig.engine.create_topic(TOPIC, TopicSettings(message_ttl_ms=5000))
    inbox = rig.follow(space=0)
    rig.publish(TOPIC, b"old")
    rig.advance(10)
    rig.publish(TOPIC, b"new")
    inbox.space = 10
    assert inbox.follower is not None
    inbox.follower.wake()
    rig.run()
    assert inbox.values == [b"new"]


def test_overtaken_by_retention(rig: Rig) -> None:
    """A follower that was too slow goes on with what is there and counts what it missed."""
    rig.engine.create_topic(TOPIC, TopicSettings(retention_hours=1))
    inbox = rig.follow(space=0)
    rig.numbers(4)
    rig.roll()
    rig.numbers(2, start=4)
    rig.advance(2 * 3600)
    inbox.space = 10
    assert inbox.follower is not None
    inbox.follower.wake()
    rig.run()
    assert inbox.values == [b"4", b"5"]
    assert inbox.follower.missed == 4


def test_leaving(rig: Rig) -> None:
    """Nothing comes after ``unfollow``; the sink hears once; a second time is no mistake."""
    inbox = rig.follow("*")
    rig.numbers(1)
    assert inbox.follower is not None
    rig.engine.unfollow(inbox.follower)
    rig.engine.unfollow(inbox.follower)
    rig.numbers(1)
    rig.numbers(1, topic="new")
    assert inbox.values == [b"0"]
    assert inbox.ends == [None]
    for topic in rig.engine.topics:
        assert all(not partition.watchers for partition in topic.partitions)


def test_a_deleted_topic(rig: Rig) -> None:
    """It lets go of it, and follows one of the same name that is made later."""
    inbox = rig.follow()
    rig.numbers(1)
    rig.wait(rig.engine.delete_topic, TOPIC)
    rig.numbers(1, start=7)
    assert inbox.values == [b"0", b"7"]
    assert inbox.ends == []


def damaged(rig: Rig) -> None:
    """The third of five batches fails its checksum."""
    for number in range(5):
        rig.numbers(1, start=number)
    rig.close()
    path = DATA / TOPIC / "0" / f"{0:020d}.log"
    damage(rig, path, flip(2 * (rig.files.file_size(path) // 5) + 70))
    rig.open()


def test_damage_ends_it_with_a_reason(rig: Rig) -> None:
    """A follower that cannot read on says why, and nobody trips over what is left of it."""
    damaged(rig)
    inbox = rig.follow()
    assert inbox.follower is not None
    inbox.follower.move(rig.engine.partition(TOPIC, 0), 0)
    rig.run()
    assert inbox.values == [b"0", b"1"]
    assert isinstance(inbox.ends[0], DataCorrupt)
    rig.engine.create_topic("later")
    rig.wait(rig.engine.delete_topic, TOPIC)
    assert inbox.follower not in rig.engine._followers
    rig.engine.unfollow(inbox.follower)
    assert len(inbox.ends) == 1


def test_lost_records_are_missed(rig: Rig) -> None:
    """What a repair gave up is counted and passed over."""
    rig.numbers(2)
    rig.close()
    lost = Batch(b"", 0, 3, LOST)
    lost.base_offset = 2
    path = DATA / TOPIC / "0" / f"{0:020d}.log"
    damage(rig, path, lambda content: content.extend(lost.raw()))
    rig.open()
    rig.numbers(1, start=5)
    inbox = rig.follow()
    assert inbox.follower is not None
    inbox.follower.move(rig.engine.partition(TOPIC, 0), 0)
    rig.run()
    assert inbox.values == [b"0", b"1", b"5"]
    assert inbox.follower.missed == 3


def test_a_disk_that_cannot_be_read() -> None:
    """An error of the disk ends it as one of ours."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files)
    rig.numbers(3)
    rig.reopen()
    inbox = rig.follow()
    files.fail("read_at", repeat=True)
    assert inbox.follower is not None
    inbox.follower.move(rig.engine.partition(TOPIC, 0), 0)
    rig.run()
    assert inbox.ends[0] is not None
    assert inbox.ends[0].code == "data_corrupt"


@pytest.mark.parametrize("bad", ["", "a b", "a.>.b", None, 7, "__scheduled", ["a"]])
def test_bad_patterns(rig: Rig, bad: object) -> None:
    """What cannot be a topic cannot be followed."""
    with pytest.raises(InvalidArgument) as caught:
        rig.follow(bad)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_topic"
    assert not rig.engine._followers


# --- who gets what of a batch (selection) ---------------------------------------------------------
def test_selection() -> None:
    """Targets first, then the record's own end, then the topic's; nothing asked, nothing looked at."""
    plain = encode(Columns([b"0", b"1"]))
    plain.base_timestamp = 1000
    assert select(plain, range(2), target=b"me", ttl_ms=None, now_ms=9999).wanted == range(2)
    assert select(plain, range(2), target=b"me", ttl_ms=100, now_ms=1099).wanted == [0, 1]
    assert select(plain, range(2), target=b"me", ttl_ms=100, now_ms=1100).expired == [0, 1]
    full = encode(
        Columns(
            [b""] * 5,
            times=[1000, 1000, 1000, 1000, 2000],
            expiry=[0, 1500, 5000, 0, 0],
            targets=[b"", b"", b"me", b"you", b""],
        )
    )
    for_me = select(full, range(5), target=b"me", ttl_ms=600, now_ms=1600)
    assert (for_me.wanted, for_me.foreign, for_me.expired) == ([2, 4], [3], [0, 1])
    for_all = select(full, [1, 2, 4], target=b"", ttl_ms=None, now_ms=1499)
    assert (for_all.wanted, for_all.foreign, for_all.expired) == ([1, 4], [2], [])
