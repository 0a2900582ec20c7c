"""Publishing: where records go, what is refused, and that a refusal leaves nothing behind."""

from typing import Any

import pytest

from headrace import limits
from headrace.broker.publishing import Publish, idempotency_producer, producer_of
from headrace.broker.schedule import PRODUCER_ID
from headrace.errors import (
    Closed,
    Conflict,
    HeadraceError,
    InvalidArgument,
    OutcomeUnknown,
    ProducerFenced,
    QueueFull,
    ReadOnly,
    SequenceGap,
    TopicNotFound,
)
from headrace.log.batch import encode
from headrace.log.columns import record
from headrace.model import Receipt, TopicSettings
from tests.broker.rig import DATA, TOPIC, Answer, Rig, damage, flip
from tests.fakes import FaultyFiles, SimulatedFiles


@pytest.fixture
def rig() -> Rig:
    return Rig()


def made(rig: Rig, **settings: Any) -> None:
    rig.engine.create_topic(TOPIC, rig.engine.topics.defaults.but(settings))


# --- where records go -------------------------------------------------------------------------
def test_a_receipt_leads_to_the_record(rig: Rig) -> None:
    """Topic, partition, offset, time and id; the id finds the message again."""
    rig.numbers(2)
    receipt = rig.publish(TOPIC, b"third", headers=[{"a": "b"}])
    assert (receipt.topic, receipt.partition, receipt.offset) == (TOPIC, 0, 2)
    assert receipt.timestamp == rig.clock.now_ms()
    assert not receipt.duplicate
    found = rig.engine.topics.find_message(receipt.id)
    assert (found.value, found.headers, found.id) == (b"third", {"a": "b"}, receipt.id)


def test_one_key_one_partition(rig: Rig) -> None:
    """A key's partition is the same in every batch, alone or among others, and after a restart."""
    made(rig, partitions=7)
    keys = [b"key-%d" % n for n in range(50)]
    together = {}
    rig.publish_all(TOPIC, *keys, keys=keys)
    for number in range(7):
        together |= {m.key: number for m in rig.read(TOPIC, number)}
    assert len(together) == 50
    assert len(set(together.values())) == 7
    rig.reopen()
    alone = {key: rig.publish(TOPIC, b"x", keys=[key]).partition for key in keys}
    assert alone == together
    # The hash is a promise: it must not change from one version to the next.
    assert [together[key] for key in keys[:8]] == [1, 5, 0, 6, 6, 2, 5, 4]


def test_records_of_one_publish_keep_their_order(rig: Rig) -> None:
    """Within a partition the order is that of the list, with and without keys."""
    made(rig, partitions=3)
    values = [b"%d" % n for n in range(30)]
    receipts = rig.publish_all(
        TOPIC, *values, keys=[v[-1:] if n % 4 else None for n, v in enumerate(values)]
    )
    assert sum(receipt.count for receipt in receipts) == 30
    for number in range(3):
        found = [int(m.value) for m in rig.read(TOPIC, number)]
        assert found == sorted(found)


def test_without_a_key_partitions_take_turns(rig: Rig) -> None:
    """One publish stays together; the next goes to the next partition."""
    made(rig, partitions=3)
    places = [rig.numbers(2).partition for _ in range(6)]
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[:3] == places[3:]


def test_a_batch_goes_as_it_is(rig: Rig) -> None:
    """Whole to one partition, or by its keys to several."""
    made(rig, partitions=4)

    def batch(keys: list[bytes | None] | None) -> Any:
        return encode(rig.columns([b"a", b"b", b"c", b"d"], keys=keys))

    def stored(keys: list[bytes | None] | None, **placing: Any) -> list[Receipt]:
        answer = rig.offer(TOPIC, batch(keys), **placing)
        rig.run()
        receipts: list[Receipt] = answer.get()
        return receipts

    assert [receipt.count for receipt in stored(None)] == [4]
    assert sum(receipt.count for receipt in stored([b"1", b"2", b"3", None])) == 4
    chosen = stored([b"1", b"1", b"1", b"1"], partition=2)
    assert [(receipt.partition, receipt.count) for receipt in chosen] == [(2, 4)]


def test_auto_creation_can_be_off() -> None:
    """Then a publish makes no topic, neither now nor later."""
    rig = Rig(auto_create_topics=False)
    for more in ({}, {"delay": 5}):
        with pytest.raises(TopicNotFound):
            rig.publish(TOPIC, b"x", **more)
    with pytest.raises(TopicNotFound):
        rig.subscribe()
    assert len(rig.engine.topics) == 0
    rig.engine.create_topic(TOPIC)
    rig.publish(TOPIC, b"x")


# --- what is refused --------------------------------------------------------------------------
SURROGATE = "\ud800"
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no name", {"topic": ""}, "invalid_topic"),
    ("a dot", {"topic": "."}, "invalid_topic"),
    ("two dots", {"topic": ".."}, "invalid_topic"),
    ("a path", {"topic": "../etc"}, "invalid_topic"),
    ("a slash", {"topic": "a/b"}, "invalid_topic"),
    ("NUL", {"topic": "a\0"}, "invalid_topic"),
    ("a line end", {"topic": "a\n"}, "invalid_topic"),
    ("a letter of another script", {"topic": "größe"}, "invalid_topic"),
    ("a wildcard", {"topic": "a.*"}, "invalid_topic"),
    ("a long name", {"topic": "x" * 250}, "invalid_topic"),
    ("ours", {"topic": "__scheduled"}, "invalid_topic"),
    ("at", {"topic": "@lock"}, "invalid_topic"),
    ("bytes as a name", {"topic": b"orders"}, "invalid_topic"),
    ("a list as a name", {"topic": ["orders"]}, "invalid_topic"),
    ("no name at all", {"topic": None}, "invalid_topic"),
    ("a set as a value", {"values": [{1}]}, "invalid_value"),
    ("a number as a value", {"values": [7]}, "invalid_value"),
    ("None as a value", {"values": [None]}, "invalid_value"),
    ("text that is none", {"values": [SURROGATE]}, "invalid_value"),
    ("a large value", {"values": [bytes(1001)]}, "message_too_large"),
    ("a large one among others", {"values": [b"x", bytes(1001), b"x"]}, "message_too_large"),
    ("nothing", {"values": []}, "empty_batch"),
    ("a number as a key", {"keys": [7]}, "invalid_key"),
    ("a key that is no text", {"keys": [SURROGATE]}, "invalid_key"),
    ("a large key", {"keys": [bytes(limits.KEY_BYTES_MAX + 1)]}, "key_too_large"),
    ("too many keys", {"keys": [b"a", b"b"]}, "invalid_columns"),
    ("a list as headers", {"headers": [["a"]]}, "invalid_headers"),
    ("a number in headers", {"headers": [{"a": 1}]}, "invalid_headers"),
    ("an empty header name", {"headers": [{"": "a"}]}, "invalid_headers"),
    ("a header with NUL", {"headers": [{"a": "\0"}]}, "invalid_headers"),
    ("a header with a line end", {"headers": [{"a": "b\r\nc: d"}]}, "invalid_headers"),
    ("a header name with =", {"headers": [{"a=b": "c"}]}, "invalid_headers"),
    ("a header that is no text", {"headers": [{"a": SURROGATE}]}, "invalid_headers"),
    ("large headers", {"headers": [{"a": "x" * limits.HEADER_BYTES_MAX}]}, "headers_too_large"),
    ("many headers", {"headers": [{str(n): "" for n in range(1001)}]}, "headers_too_large"),
    ("an id that is none", {"ids": ["seven"]}, "invalid_id"),
    ("a number as an id", {"ids": [7]}, "invalid_id"),
    ("a time before 1970", {"timestamps": [-1]}, "invalid_time"),
    ("a time as a float", {"timestamps": [1.5]}, "invalid_time"),
    ("a time beyond all", {"timestamps": [1 << 60]}, "invalid_time"),
    ("a target that is no name", {"to": "a b"}, "invalid_subscription"),
    ("a target of ours", {"to": "__schedule"}, "invalid_subscription"),
    ("a negative ttl", {"ttl": -1}, "invalid_ttl"),
    ("a text as ttl", {"ttl": "1"}, "invalid_ttl"),
    ("a ttl that is no number", {"ttl": float("nan")}, "invalid_ttl"),
    ("a negative delay", {"delay": -1}, "invalid_delay"),
    ("an endless delay", {"delay": float("inf")}, "invalid_delay"),
    ("a partition too far", {"partition": 1}, "invalid_partition"),
    ("a negative partition", {"partition": -1}, "invalid_partition"),
    ("a text as a partition", {"partition": "0"}, "invalid_partition"),
    ("a bool as a partition", {"partition": False}, "invalid_partition"),
    ("a late partition too far", {"partition": 1, "delay": 5}, "invalid_partition"),
    ("a late text as a partition", {"partition": "0", "delay": 5}, "invalid_partition"),
    ("a producer of text", {"producer": ("1", 0, 0)}, "invalid_producer"),
    ("a producer that is none", {"producer": 7}, "invalid_producer"),
    ("a short producer", {"producer": (1, 0)}, "invalid_producer"),
    ("producer 0", {"producer": (0, 0, 0)}, "invalid_producer"),
    ("a negative producer", {"producer": (-1, 0, 0)}, "invalid_producer"),
    ("a huge producer", {"producer": (1 << 64, 0, 0)}, "invalid_producer"),
    ("a huge epoch", {"producer": (1, 1 << 32, 0)}, "invalid_producer"),
    ("a negative sequence", {"producer": (1, 0, -1)}, "invalid_producer"),
    ("a huge sequence", {"producer": (1, 0, 1 << 32)}, "invalid_producer"),
    ("a bool in a producer", {"producer": (1, False, 0)}, "invalid_producer"),
    ("the schedule's producer", {"producer": (PRODUCER_ID, 0, 0)}, "invalid_producer"),
    ("a late producer", {"producer": (1, 0, 0), "delay": 5}, "invalid_delay"),
    ("many at a later time", {"values": [b"a", b"b"], "delay": 5}, "invalid_delay"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "code"), [(g, c) for _, g, c in BAD], ids=[n for n, _, _ in BAD])
def test_bad_input_is_refused_by_name_and_leaves_nothing(given: dict[str, Any], code: str) -> None:
    """Every bad name, size, type and number has its stable code, and nothing is half done."""
    rig = Rig(max_message_size=1000)
    rig.open()
    before = tree(rig)
    given = dict(given)
    topic, values = given.pop("topic", TOPIC), given.pop("values", [b"x"])
    with pytest.raises(HeadraceError) as caught:
        rig.publish(topic, *values, **given)
    assert isinstance(caught.value, InvalidArgument)
    assert caught.value.code == code
    assert not caught.value.retryable
    assert caught.value.message
    rig.run()
    assert len(rig.engine.topics) == 0
    assert tree(rig) == before
    assert not rig.failures
    assert rig.publish(TOPIC, b"fine").offset == 0


def tree(rig: Rig) -> list[str]:
    return rig.files.names(DATA)


@pytest.mark.parametrize("key", ["", 7, b"x", SURROGATE])
def test_bad_idempotency_keys(key: Any) -> None:
    """An idempotency key is a text, and not empty: an empty one would be shared by all."""
    with pytest.raises(InvalidArgument) as caught:
        idempotency_producer(key)
    assert caught.value.code == "invalid_idempotency_key"
    with pytest.raises(InvalidArgument):
        producer_of((1, 0, 0), "key")
    assert producer_of((1, 0, 0), None) == (1, 0, 0)


@pytest.mark.parametrize("bad", ["", "a b", "x" * 201, "__x", 7, "..", "a/b"])
def test_bad_producer_names(rig: Rig, bad: Any) -> None:
    """A producer's name follows the rules of all names."""
    with pytest.raises(InvalidArgument) as caught:
        rig.engine.publishing.producer(bad, lambda *answer: None)
    assert caught.value.code == "invalid_subscription"
    assert rig.engine.publishing.producers == {}


@pytest.mark.parametrize(
    ("name", "pattern", "code"),
    [
        ("a b", TOPIC, "invalid_subscription"),
        ("", TOPIC, "invalid_subscription"),
        (None, TOPIC, "invalid_subscription"),
        ("__x", TOPIC, "invalid_subscription"),
        ("x" * 201, TOPIC, "invalid_subscription"),
        ("group", "a..*", "invalid_topic"),
        ("group", "a.>.b", "invalid_topic"),
        ("group", "a*", "invalid_topic"),
        ("group", "__scheduled", "invalid_topic"),
        ("group", None, "invalid_topic"),
        ("group", ["a"], "invalid_topic"),
        ("group", "", "invalid_topic"),
    ],
)
def test_bad_subscriptions(rig: Rig, name: Any, pattern: Any, code: str) -> None:
    """A name or wildcard that is none is refused, and no topic is made for it."""
    with pytest.raises(InvalidArgument) as caught:
        rig.subscribe(name, pattern)
    assert caught.value.code == code
    if name == "group":
        with pytest.raises(InvalidArgument) as caught:
            rig.follow(pattern)
        assert caught.value.code == code
    assert rig.engine.all_subscriptions() == []
    assert len(rig.engine.topics) == 0


@pytest.mark.parametrize(
    "bad", [{"max_deliveries": -1}, {"ack_timeout": 0}, {"ordering": "random"}]
)
def test_bad_settings_make_no_topic(rig: Rig, bad: dict[str, Any]) -> None:
    """Settings are looked at before the topic of a new subscription is made."""
    with pytest.raises(InvalidArgument) as caught:
        rig.subscribe(**bad)
    assert caught.value.code == "invalid_setting"
    assert len(rig.engine.topics) == 0


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (5, "topic_not_found"),
        (-1, "invalid_offset"),
        ("newest", "invalid_offset"),
        (None, "invalid_offset"),
        ([], "invalid_offset"),
    ],
)
def test_a_bad_start_makes_no_topic(rig: Rig, start: Any, code: str) -> None:
    """A position that a new topic cannot have is looked at before the topic is made."""
    with pytest.raises(HeadraceError) as caught:
        rig.subscribe(start=start)
    assert caught.value.code == code
    assert len(rig.engine.topics) == 0
    rig.subscribe(start=0)


def test_an_unknown_id_finds_nothing(rig: Rig) -> None:
    """An id that leads nowhere, or that a client made, says so."""
    rig.numbers(1)
    receipt = rig.publish(TOPIC, b"own", ids=["12345678-1234-4234-8234-123456789abc"])
    for bad, code in [
        (receipt.id, "message_not_found"),
        ("12345678-1234-8234-8234-123456789abc", "message_not_found"),
        ("nonsense", "invalid_id"),
    ]:
        with pytest.raises(HeadraceError) as caught:
            rig.engine.topics.find_message(bad)
        assert caught.value.code == code


def test_nothing_is_taken_once_it_closes(rig: Rig) -> None:
    """What was on its way is stored; what comes later is refused."""
    early = rig.send(TOPIC, b"early")
    closed: list[bool] = []
    rig.engine.close(lambda: closed.append(True))
    with pytest.raises(Closed):
        rig.send(TOPIC, b"late")
    rig.run()
    assert closed == [True]
    assert early.get()[0].offset == 0
    rig.abandon()
    assert rig.values() == [b"early"]


# --- how much -----------------------------------------------------------------------------------
def test_a_memory_topic_holds_ten_thousand_unread() -> None:
    """The ten thousand and first is refused, retryable; an ack makes room for it."""
    rig = Rig(directory=None)
    group = rig.subscribe()
    inbox = rig.join(group, prefetch=10)
    rig.publish(TOPIC, *[b"x"] * limits.QUEUE_SIZE_MEMORY_DEFAULT)
    with pytest.raises(QueueFull) as caught:
        rig.publish(TOPIC, b"one more")
    assert caught.value.retryable
    inbox.ack(inbox.messages[0])
    rig.run()
    assert rig.publish(TOPIC, b"one more").offset == limits.QUEUE_SIZE_MEMORY_DEFAULT


def test_without_a_reader_a_memory_topic_keeps_what_it_has() -> None:
    """A group that comes later finds the first message; until then publishers are told to wait."""
    rig = Rig(directory=None, topic={"max_queue_size": 3})
    rig.numbers(3)
    with pytest.raises(QueueFull):
        rig.numbers(1)
    assert rig.join(rig.subscribe()).values == [b"0", b"1", b"2"]


def test_a_broadcast_in_memory_never_fills() -> None:
    """With followers alone the oldest make room; a slow one misses some and knows how many."""
    rig = Rig(directory=None, topic={"max_queue_size": 100, "partitions": 2})
    quick, slow = rig.follow(), rig.follow(space=0)
    for start in range(0, 1000, 10):
        rig.numbers(10, start=start)
    assert sorted(map(int, quick.values)) == list(range(1000))
    slow.space = 1000
    assert slow.follower is not None
    slow.follower.wake()
    rig.run()
    assert len(slow.messages) == 100
    assert slow.follower.missed == 900
    with pytest.raises(QueueFull):
        rig.numbers(101)
    rig.subscribe(start="earliest")
    with pytest.raises(QueueFull):
        rig.numbers(1)


def test_a_bound_on_a_durable_topic(rig: Rig) -> None:
    """``max_queue_size`` holds for durable topics too, and counts what is on its way."""
    made(rig, max_queue_size=5)
    answers = [rig.send(TOPIC, b"x", b"y") for _ in range(3)]
    rig.run()
    assert [answer.error is None for answer in answers] == [True, True, False]
    assert isinstance(answers[2].error, QueueFull)
    assert rig.engine.topics.find(TOPIC).appending == 0
    group = rig.subscribe()
    inbox = rig.join(group)
    inbox.ack(*inbox.take())
    rig.publish(TOPIC, *[b"z"] * 5)
    rig.wait(rig.engine.change_topic, TOPIC, {"max_queue_size": None})
    rig.publish(TOPIC, *[b"z"] * 50)


def test_several_partitions_or_none(rig: Rig) -> None:
    """A list that goes to several partitions is refused whole when it does not fit."""
    made(rig, partitions=4, max_queue_size=10)
    with pytest.raises(QueueFull):
        rig.publish(TOPIC, *[b"x"] * 11, keys=[b"%d" % n for n in range(11)])
    assert rig.engine.topics.find(TOPIC).end_offsets() == [0, 0, 0, 0]


def test_one_damaged_partition_refuses_the_whole_list() -> None:
    """Nothing is stored in the others when one of them is read-only."""
    rig = Rig(topic={"partitions": 2})
    for _ in range(3):
        rig.publish(TOPIC, b"x", partition=1)
    rig.close()
    path = DATA / TOPIC / "1" / f"{0:020d}.log"
    damage(rig, path, flip(70))
    rig.open()
    keys = [b"%d" % n for n in range(8)]
    with pytest.raises(ReadOnly):
        rig.publish(TOPIC, *keys, keys=keys)
    assert rig.log(TOPIC, 0).end_offset == 0
    rig.publish(TOPIC, b"x", partition=0)


def test_a_part_that_was_stored_is_not_called_refused() -> None:
    """When one of two partitions fails after the other has stored, the outcome is unknown."""
    files = FaultyFiles(SimulatedFiles())
    rig = Rig(files, topic={"partitions": 2})
    keys = [b"%d" % n for n in range(8)]
    rig.publish_all(TOPIC, *keys, keys=keys)
    files.fail("write_at", 1, name=".log")
    with pytest.raises(OutcomeUnknown) as caught:
        rig.publish(TOPIC, *keys, keys=keys)
    assert caught.value.code == "partly_stored"
    assert not rig.failures


# --- once -------------------------------------------------------------------------------------
def test_an_idempotent_producer_is_stored_once(rig: Rig) -> None:
    """A repetition is answered with the first offset, at once and after a restart or a crash."""
    producer, epoch = rig.wait(rig.engine.publishing.producer, None)
    first = rig.publish(TOPIC, b"a", b"b", producer=(producer, epoch, 0))
    second = rig.publish(TOPIC, b"c", producer=(producer, epoch, 2))
    for again in (lambda: None, rig.reopen, rig.crash):
        again()
        repeated = rig.publish(TOPIC, b"a", b"b", producer=(producer, epoch, 0))
        assert (repeated.offset, repeated.duplicate) == (first.offset, True)
        assert rig.publish(TOPIC, b"c", producer=(producer, epoch, 2)).offset == second.offset
    assert rig.values() == [b"a", b"b", b"c"]
    with pytest.raises(SequenceGap):
        rig.publish(TOPIC, b"e", producer=(producer, epoch, 4))
    assert rig.publish(TOPIC, b"d", producer=(producer, epoch, 3)).offset == 3


def test_repetitions_find_their_partition(rig: Rig) -> None:
    """An idempotent producer without a partition keeps to one, so that a repetition meets itself."""
    made(rig, partitions=5)
    for sequence in range(4):
        rig.publish(TOPIC, b"x", producer=(7, 0, sequence))
    assert rig.publish(TOPIC, b"x", producer=(7, 0, 3)).duplicate
    assert sorted(rig.engine.topics.find(TOPIC).end_offsets()) == [0, 0, 0, 0, 4]


def test_an_idempotency_key(rig: Rig) -> None:
    """The same key is stored once; a record's own key still decides the partition."""
    made(rig, partitions=5)
    for key in ("a", "b", "c", "d", "e", "f"):
        once = idempotency_producer(f"request of {key}")
        first = rig.publish(TOPIC, b"x", keys=[key], producer=once)
        again = rig.publish(TOPIC, b"x", keys=[key], producer=once)
        assert again.duplicate
        assert (again.partition, again.offset) == (first.partition, first.offset)
        assert first.partition == rig.publish(TOPIC, b"y", keys=[key]).partition
    rig.reopen()
    assert rig.publish(
        TOPIC, b"x", keys=["a"], producer=idempotency_producer("request of a")
    ).duplicate


def test_a_plan_on_another_number_of_partitions_is_refused() -> None:
    """Unless the batch is a repetition of one that was stored before, or is on its way."""
    rig = Rig()
    rig.engine.create_topic(TOPIC, TopicSettings(partitions=2))
    batches = [encode(rig.columns([b"%d" % n])) for n in range(2)]
    placing = [{"partition": 1, "planned_on": 2, "producer": (7, 0, n)} for n in range(2)]
    rig.workers.hold = True
    first = rig.offer(TOPIC, batches[0], **placing[0])
    rig.run()
    rig.workers.hold = False
    rig.wait(rig.engine.change_topic, TOPIC, {"partitions": 3})
    rig.workers.hold = True
    repeated = rig.offer(TOPIC, encode(rig.columns([b"0"])), **placing[0])
    refused = rig.offer(TOPIC, batches[1], **placing[1])
    rig.run()
    rig.workers.hold = False
    while rig.workers.release():
        rig.run()
    assert first.get()[0].offset == repeated.get()[0].offset == 0
    assert repeated.get()[0].duplicate
    assert refused.error is not None
    assert refused.error.code == "partitions_changed"
    with pytest.raises(Conflict):
        rig.offer(TOPIC, rig.columns([b"x"]), partition=9, planned_on=2)
    assert rig.values(TOPIC, 1) == [b"0"]
    rig.wait(rig.engine.publish, Publish(TOPIC, batches[1], 1, 3, producer=(7, 0, 1)))
    assert rig.values(TOPIC, 1) == [b"0", b"1"]


@pytest.mark.parametrize("producer", [1 << 63, (1 << 64) - 1])
def test_ids_of_commits_are_reserved(producer: int) -> None:
    """A client that knows the id of a commit cannot publish with it."""
    rig = Rig()
    with pytest.raises(InvalidArgument) as caught:
        rig.publish(TOPIC, b"x", producer=(producer, (1 << 32) - 1, 0))
    assert caught.value.code == "invalid_producer"


def test_a_named_producer_fences_its_predecessor(rig: Rig) -> None:
    """The next holder of a name has a higher epoch, over restarts too; the old one is refused."""
    first = rig.wait(rig.engine.publishing.producer, "payments")
    rig.publish(TOPIC, b"a", producer=(*first, 0))
    rig.crash()
    second = rig.wait(rig.engine.publishing.producer, "payments")
    assert second == (first[0], first[1] + 1)
    rig.publish(TOPIC, b"b", producer=(*second, 0))
    with pytest.raises(ProducerFenced):
        rig.publish(TOPIC, b"c", producer=(*first, 1))
    other = rig.wait(rig.engine.publishing.producer, "mail")
    assert other[0] != first[0]
    assert rig.values() == [b"a", b"b"]


def test_the_names_taken_last_are_remembered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a bound, and the one taken longest ago makes room; over restarts too."""
    monkeypatch.setattr(limits, "PRODUCER_NAMES_MAX", 2)
    first = {name: rig.wait(rig.engine.publishing.producer, name) for name in ("a", "b")}
    again = rig.wait(rig.engine.publishing.producer, "a")
    assert again == (first["a"][0], 1)
    rig.wait(rig.engine.publishing.producer, "c")
    assert list(rig.engine.publishing.producers) == ["a", "c"]
    rig.crash()
    assert list(rig.engine.publishing.producers) == ["a", "c"]
    assert rig.wait(rig.engine.publishing.producer, "b")[1] == 0
    assert list(rig.engine.publishing.producers) == ["c", "b"]


def test_own_ids_are_kept(rig: Rig) -> None:
    """An id that the client gave is the message's, in the receipt and in every delivery."""
    own = "12345678-1234-4234-8234-123456789abc"
    receipt = rig.publish(TOPIC, b"x", ids=[own])
    assert str(receipt.id) == own
    assert str(rig.join(rig.subscribe()).messages[0].id) == own


def test_times_never_run_backwards(rig: Rig) -> None:
    """A record's time is not before that of the one before it, whatever the clock does."""
    rig.numbers(1)
    first = rig.read()[0].timestamp
    rig.clock.jump(-3_600_000)
    rig.numbers(1)
    rig.publish(TOPIC, b"x", timestamps=[5])
    assert [m.timestamp for m in rig.read()] == [first] * 3


def test_columns_of_one_are_columns_of_many(rig: Rig) -> None:
    """A single publish and a list of one are the same record."""
    columns = record(b"v", {"h": "1"}, {"key": "k", "to": "t", "ttl": 5}, 100, 0)
    many = rig.columns([b"v"], keys=["k"], headers={"h": "1"}, to="t")
    assert (list(columns.values), columns.keys, columns.headers, columns.targets) == (
        list(many.values), many.keys, many.headers, many.targets,
    )  # fmt: skip


# --- gathering --------------------------------------------------------------------------------
def plain(rig: Rig, *values: bytes, topic: str = TOPIC) -> list[Answer]:
    """Publish single values that may be stored together."""
    build = rig.engine.publishing.message
    return [
        rig.ask(rig.engine.publish, build(topic, value, None, {}, gather=True)) for value in values
    ]


def test_plain_messages_of_one_turn_are_one_entry_in_the_log(rig: Rig) -> None:
    """Each gets the receipt of its own offset."""
    answers = plain(rig, b"a", b"b", b"c")
    assert [answer.calls for answer in answers] == [0, 0, 0]
    rig.run()
    assert [answer.get()[0].offset for answer in answers] == [0, 1, 2]
    [batch] = rig.engine.partition(TOPIC).log.read(0)
    assert batch.values() == [b"a", b"b", b"c"]


def test_nothing_overtakes_gathered_messages(rig: Rig) -> None:
    """What cannot be gathered goes after what was."""
    plain(rig, b"1", b"2")
    rig.send(TOPIC, b"3", keys=["k"])
    plain(rig, b"4")
    rig.run()
    assert [message.value for message in rig.read()] == [b"1", b"2", b"3", b"4"]


def test_gathered_messages_of_a_turn_take_one_partition(rig: Rig) -> None:
    """And those of the next turn the next one, like any batch without keys."""
    made(rig, partitions=3)
    places = []
    for _ in range(3):
        answers = plain(rig, b"a", b"b")
        rig.run()
        assert len({answer.get()[0].partition for answer in answers}) == 1
        places.append(answers[0].get()[0].partition)
    assert sorted(places) == [0, 1, 2]


def test_gathering_is_bounded(rig: Rig) -> None:
    """Enough for a batch is not kept until the end of the turn."""
    size = limits.BATCH_BYTES_TARGET // 4
    answers = plain(rig, *[bytes(size)] * 10)
    assert sum(len(publishes) for _, publishes in rig.engine.publishing._gathered.values()) <= 5
    rig.run()
    assert [answer.get()[0].offset for answer in answers] == list(range(10))


def test_a_topic_with_a_queue_limit_judges_each_message_by_itself(rig: Rig) -> None:
    """Where there is room for two, two of four are stored."""
    made(rig, max_queue_size=2)
    answers = plain(rig, b"1", b"2", b"3", b"4")
    rig.run()
    assert [answer.error is None for answer in answers] == [True, True, False, False]


def test_a_topic_that_is_deleted_refuses_what_was_gathered(rig: Rig) -> None:
    """Definitely, and so it is for the next topic of that name."""
    made(rig)
    rig.run()
    [before] = plain(rig, b"x")
    rig.ask(rig.engine.delete_topic, TOPIC)
    rig.run()
    assert isinstance(before.error, TopicNotFound)
    [after] = plain(rig, b"y")
    rig.run()
    assert after.get()[0].offset == 0
    assert [message.value for message in rig.read()] == [b"y"]


def test_a_broker_that_closes_stores_what_was_gathered(rig: Rig) -> None:
    """It was accepted before."""
    [last] = plain(rig, b"y")
    rig.engine.close(lambda: None)
    rig.run()
    assert last.get()[0].offset == 0
