"""The producer alone: what it gathers, what it sends again, and what it says of each message."""

import asyncio

from headrace.client import producer as producing
from headrace.errors import (
    BrokerFailed,
    Closed,
    Conflict,
    Forbidden,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    RequestTimeout,
    SequenceGap,
    StorageFull,
    TooLarge,
    TopicNotFound,
)
from headrace.log.columns import Columns
from headrace.model import Receipt
from headrace.partitioning import partition_of_key
from tests.client.rig import Rig, run, until


# --- gathering ------------------------------------------------------------------------------------
@run
async def test_what_is_published_together_travels_together() -> None:
    """One batch for all that was published in one turn, one receipt for each call."""
    rig = Rig()
    rig.publish(b"a", b"b", b"c")
    request = await rig.one()
    assert request.values == [b"a", b"b", b"c"]
    request.store(7)
    assert [rig.offset(value) for value in (b"a", b"b", b"c")] == [7, 8, 9]


@run
async def test_while_one_is_under_way_the_next_are_gathered() -> None:
    """A busy client sends larger batches by itself."""
    rig = Rig()
    rig.publish(b"a")
    first = await rig.one()
    rig.publish(b"b", b"c")
    assert await rig.sent() == []
    rig.publish(b"d")
    first.store(0)
    assert (await rig.one()).values == [b"b", b"c", b"d"]


@run
async def test_full_batches_do_not_wait_for_each_other() -> None:
    """Up to five are under way at once, each of about the size that was asked for."""
    rig = Rig(batch_bytes=200)
    rig.publish(*(b"%d" % number + bytes(99) for number in range(20)))
    requests = await rig.sent()
    assert len(requests) == producing.IN_FLIGHT_MAX == 5
    assert all(sum(map(len, request.values)) <= 200 for request in requests)
    sequences = [request.batch.first_sequence for request in requests]
    counts = [request.batch.count for request in requests]
    assert sequences == [sum(counts[:n]) for n in range(5)]


@run
async def test_linger_waits_for_more() -> None:
    """Nothing leaves before its time, unless there is enough, or somebody flushes."""
    rig = Rig(linger=60, batch_bytes=300)
    rig.publish(b"a")
    assert await rig.sent() == []
    rig.publish(bytes(300))
    assert [len(request.values) for request in await rig.sent()] == [1, 1]
    rig = Rig(linger=60)
    rig.publish(b"a")
    flushing = asyncio.create_task(rig.producer.flush())
    request = await rig.one()
    assert not flushing.done()
    request.store(0)
    await flushing


@run
async def test_linger_ends() -> None:
    """After so many seconds what there is leaves."""
    rig = Rig(linger=0.05)
    rig.publish(b"a")
    assert await rig.sent() == []
    await until(lambda: rig.link.wire and rig.link.wire.requests)
    assert (await rig.one()).values == [b"a"]


@run
async def test_messages_with_their_own_times_travel_alone() -> None:
    """A batch has one time for all, or one for each: they are not mixed."""
    rig = Rig()
    rig.publish(b"a")
    first = await rig.one()
    rig.publish(b"b")
    rig.producer.publish("orders", Columns([b"t"], times=[5]), 0, lambda *_: None)
    rig.publish(b"c")
    first.store(0)
    for values in ([b"b"], [b"t"], [b"c"]):
        request = await rig.one()
        assert request.values == values
        request.store(1)


@run
async def test_partitions_have_lanes_of_their_own() -> None:
    """One that is slow does not hold up another."""
    rig = Rig()
    rig.publish(b"a", partition=0)
    rig.publish(b"b", partition=1)
    zero, one = await rig.sent()
    assert (zero.partition, one.partition) == (0, 1)
    assert zero.batch.producer_id != one.batch.producer_id
    rig.publish(b"c", partition=1)
    one.store(0)
    assert (await rig.one()).values == [b"c"]


# --- which partition ------------------------------------------------------------------------------
@run
async def test_the_number_of_partitions_is_asked_for_once() -> None:
    """And what was published meanwhile goes out in its order."""
    rig = Rig()
    rig.hold = asyncio.Event()
    rig.publish(b"a", b"b", partition=None)
    assert await rig.sent() == []
    rig.publish(b"c", partition=None)
    rig.hold.set()
    assert (await rig.one()).values == [b"a", b"b", b"c"]
    assert rig.questions == 1


@run
async def test_nothing_overtakes_what_waits_for_the_number_of_partitions() -> None:
    """Not even what is published in the very turn in which the answer comes."""
    for turns in range(8):
        rig = Rig()
        rig.hold = asyncio.Event()
        rig.publish(b"first", partition=None)
        await rig.settle()
        rig.hold.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        rig.publish(b"second", partition=None)
        order: list[bytes] = []
        while len(order) < 2:
            for request in await rig.sent():
                order += request.values
                request.store(len(order))
        assert order == [b"first", b"second"], f"after {turns} turns"


@run
async def test_a_key_chooses_the_partition() -> None:
    """The same one each time, as the broker would."""
    rig = Rig()
    rig.partitions["orders"] = 4
    places: dict[bytes, set[int]] = {}
    for number in range(40):
        key = b"customer-%d" % (number % 5)
        columns = Columns([key], [key])
        rig.producer.publish("orders", columns, None, lambda *_: None)
        for request in await rig.sent():
            places.setdefault(request.values[0], set()).add(request.partition)
            request.store(0)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) > 1


@run
async def test_without_a_key_a_batch_goes_to_the_next_partition() -> None:
    """Records that leave together stay together; the next batch goes to the next partition."""
    rig = Rig()
    rig.partitions["orders"] = 3
    places = []
    for number in range(6):
        rig.publish(b"%d" % number, b"%d, too" % number, partition=None)
        request = await rig.one()
        assert len(request.values) == 2
        places.append(request.partition)
        request.store(number)
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[:3] == places[3:]


@run
async def test_records_without_a_key_among_others_go_to_one_partition() -> None:
    """The same as of a publish to the broker: those with a key go where the key says."""
    rig = Rig()
    rig.partitions["orders"] = 4
    keys = [b"a", None, b"b", None]
    columns = Columns([b"0", b"1", b"2", b"3"], keys)
    places = await rig.producer.spread("orders", columns, None)
    assert {planned_on for _, planned_on, _ in places} == {4}
    found = {value: number for number, _, part in places for value in part.values}
    assert (found[b"0"], found[b"2"]) == (partition_of_key(b"a", 4), partition_of_key(b"b", 4))
    assert found[b"1"] == found[b"3"]


@run
async def test_a_topic_that_cannot_be_asked_about_fails_its_messages() -> None:
    """At once, with the broker's own error, and a flush does not wait for them."""
    rig = Rig()
    rig.partitions["orders"] = TopicNotFound("there is no topic")
    rig.publish(b"a", b"b", partition=None)
    async with asyncio.timeout(0.5):
        await rig.producer.flush()
    assert (rig.code(b"a"), rig.code(b"b")) == ("topic_not_found", "topic_not_found")
    rig.partitions["orders"] = 1
    rig.publish(b"c", partition=None)
    (await rig.one()).store(0)
    assert rig.offset(b"c") == 0


@run
async def test_a_question_that_is_not_answered_is_asked_again() -> None:
    """For as long as the message may wait, not for as long as a question may."""
    rig = Rig()
    rig.partitions["orders"] = RequestTimeout("no answer")
    rig.publish(b"a", partition=None)
    await until(lambda: rig.questions >= 2)
    assert rig.results == {}
    rig.partitions["orders"] = 1
    await until(lambda: rig.link.wire and rig.link.wire.requests)
    (await rig.one()).store(0)
    assert rig.offset(b"a") == 0


@run
async def test_a_message_whose_question_is_never_answered_times_out() -> None:
    """It was never sent, so that is definite."""
    rig = Rig(timeout=0.2)
    rig.partitions["orders"] = RequestTimeout("no answer")
    rig.publish(b"a", partition=None)
    await until(lambda: rig.results)
    assert rig.code(b"a") == "timeout"


@run
async def test_after_a_refusal_the_partitions_are_asked_for_again() -> None:
    """The topic may have been made anew, with fewer."""
    rig = Rig()
    rig.partitions["orders"] = 2
    rig.publish(b"a", partition=None)
    (await rig.one()).refuse(InvalidArgument("no such partition", code="invalid_partition"))
    assert rig.code(b"a") == "invalid_partition"
    rig.partitions["orders"] = 1
    rig.publish(b"b", partition=None)
    assert (await rig.one()).partition == 0
    assert rig.questions == 2


# --- the connection breaks ------------------------------------------------------------------------
@run
async def test_what_was_not_answered_is_sent_again_with_the_same_numbers() -> None:
    """In order; the broker's word that it has it already counts."""
    rig = Rig(batch_bytes=100)
    rig.publish(b"a" * 90, b"b" * 90, b"c" * 90)
    first, second, third = await rig.sent()
    first.store(0)
    rig.go_down(second, third)
    rig.publish(b"d")
    await rig.settle()
    rig.come_up()
    again = await rig.sent()
    assert [r.identity for r in again[:2]] == [second.identity, third.identity]
    again[0].store(1, duplicate=True)
    again[1].store(2)
    (await rig.one()).store(3)
    assert [rig.offset(value) for value in (b"a" * 90, b"b" * 90, b"c" * 90, b"d")] == [0, 1, 2, 3]


@run
async def test_what_is_published_while_it_is_down_waits() -> None:
    """And leaves when it is up."""
    rig = Rig()
    rig.go_down()
    rig.publish(b"a", b"b")
    await rig.settle()
    assert rig.results == {}
    rig.come_up()
    assert (await rig.one()).values == [b"a", b"b"]


@run
async def test_what_waits_for_too_long_is_given_up() -> None:
    """Never sent: a timeout. Sent and not answered: the outcome is unknown."""
    rig = Rig(timeout=0.2)
    rig.publish(b"sent")
    request = await rig.one()
    rig.go_down(request)
    rig.publish(b"waits")
    await until(lambda: len(rig.results) == 2)
    assert rig.code(b"sent") == "outcome_unknown"
    assert rig.code(b"waits") == "timeout"


@run
async def test_after_something_was_given_up_publishing_goes_on() -> None:
    """What was sent and given up is sent again first: the numbers behind it count on it."""
    rig = Rig(timeout=0.2)
    rig.publish(b"lost")
    request = await rig.one()
    rig.go_down(request)
    await until(lambda: rig.results)
    rig.come_up()
    again = await rig.one()
    assert again.identity == request.identity
    rig.publish(b"next")
    again.store(0)
    following = await rig.one()
    assert following.identity == (request.batch.producer_id, 1)
    following.store(1)
    assert rig.offset(b"next") == 1


@run
async def test_what_was_given_up_and_then_refused_does_not_stop_those_behind_it() -> None:
    """They go on under a new identity: the numbers of the refused one were never used."""
    rig = Rig(timeout=0.2, batch_bytes=100)
    rig.publish(b"a" * 90)
    request = await rig.one()
    rig.go_down(request)
    await until(lambda: rig.results)
    rig.come_up()
    again = await rig.one()
    rig.publish(b"next")
    again.refuse(QueueFull("full"))
    following = await rig.one()
    assert following.batch.producer_id != request.batch.producer_id
    assert following.batch.first_sequence == 0


# --- refusals -------------------------------------------------------------------------------------
@run
async def test_a_refusal_that_may_pass_is_tried_again() -> None:
    """With the same numbers, and those behind it keep their order."""
    rig = Rig(batch_bytes=100)
    rig.publish(b"a" * 90, b"b" * 90)
    first, second = await rig.sent()
    first.refuse(QueueFull("full"))
    second.refuse(SequenceGap("gap"))
    await until(lambda: rig.link.wire and len(rig.link.wire.requests) == 2)
    again = await rig.sent()
    assert [r.identity for r in again] == [first.identity, second.identity]
    again[0].store(0)
    again[1].store(1)
    assert (rig.offset(b"a" * 90), rig.offset(b"b" * 90)) == (0, 1)


@run
async def test_a_refusal_that_does_not_pass_in_time_is_told_as_what_it_is() -> None:
    """Definite: it was not stored, because the queue was full all the time."""
    rig = Rig(timeout=0.3)
    rig.publish(b"a")
    while not rig.results:
        for request in await rig.sent():
            request.refuse(QueueFull("full"))
        await asyncio.sleep(0.005)
    assert rig.code(b"a") == "queue_full"
    rig.publish(b"b")
    await until(lambda: rig.link.wire and rig.link.wire.requests)
    (await rig.one()).store(0)
    assert rig.offset(b"b") == 0


@run
async def test_a_refusal_is_not_repeated_without_time_for_an_answer() -> None:
    """The repetition would have an unknown outcome, and the message is known not to be stored."""
    rig = Rig(timeout=30)
    rig.producer.answer_s = 31
    rig.publish(b"a")
    (await rig.one()).refuse(QueueFull("full"))
    assert rig.code(b"a") == "queue_full"


@run
async def test_a_refusal_after_the_connection_broke_is_not_definite() -> None:
    """The first try may have been stored before the disk was full."""
    rig = Rig(timeout=0.3)
    rig.publish(b"a")
    request = await rig.one()
    rig.go_down(request)
    rig.come_up()
    while not rig.results:
        for request in await rig.sent():
            request.refuse(StorageFull("full"))
        await asyncio.sleep(0.005)
    assert rig.code(b"a") == "outcome_unknown"


@run
async def test_a_refusal_for_good_after_the_connection_broke_is_not_definite_either() -> None:
    """The first try may have been stored before the right was taken away, or before the broker stopped."""
    for error in (Forbidden("no"), Closed("it stops"), BrokerFailed("it has failed")):
        rig = Rig()
        rig.publish(b"a")
        rig.go_down(await rig.one())
        rig.come_up()
        (await rig.one()).refuse(error)
        assert rig.code(b"a") == "outcome_unknown"
        assert error.message in str(rig.results[b"a"])


@run
async def test_a_refusal_for_good_does_not_lose_those_behind_it() -> None:
    """They were refused as a gap, and go out again under a new identity."""
    rig = Rig(batch_bytes=100)
    rig.publish(b"a" * 90, b"b" * 90, b"c" * 90)
    first, second, third = await rig.sent()
    first.refuse(Conflict("no"))
    second.refuse(SequenceGap("gap"))
    third.refuse(SequenceGap("gap"))
    assert rig.code(b"a" * 90) == "conflict"
    again = await rig.sent()
    assert [r.values for r in again] == [[b"b" * 90], [b"c" * 90]]
    assert again[0].batch.producer_id != first.batch.producer_id
    assert [r.batch.first_sequence for r in again] == [0, 1]


@run
async def test_nothing_new_leaves_between_a_refusal_and_the_last_answer() -> None:
    """It would be refused as a gap, too."""
    rig = Rig(batch_bytes=100)
    rig.publish(b"a" * 90, b"b" * 90)
    first, second = await rig.sent()
    first.refuse(Conflict("no"))
    rig.publish(b"c" * 90)
    assert await rig.sent() == []
    second.refuse(SequenceGap("gap"))
    assert [r.values for r in await rig.sent()] == [[b"b" * 90], [b"c" * 90]]


@run
async def test_the_innocent_are_sent_again_without_the_guilty() -> None:
    """One message that is too large does not take along those it was gathered with."""
    rig = Rig()
    rig.publish(b"a", b"guilty", b"c")
    (await rig.one()).refuse(TooLarge("too large"))
    stored = 0
    while len(rig.results) < 3:
        for request in await rig.sent():
            if b"guilty" in request.values:
                request.refuse(TooLarge("too large"))
            else:
                request.store(stored)
                stored += len(request.values)
    assert rig.code(b"guilty") == "too_large"
    assert (rig.offset(b"a"), rig.offset(b"c")) == (0, 1)


@run
async def test_a_broker_that_has_forgotten_us_gets_it_under_a_new_identity() -> None:
    """It restarted with its topic in memory, or the topic was made anew: nobody has to notice."""
    rig = Rig()
    rig.publish(b"a")
    (await rig.one()).store(0)
    rig.publish(b"b")
    request = await rig.one()
    request.refuse(SequenceGap("begins with sequence 1"))
    again = await rig.one()
    assert again.batch.producer_id != request.batch.producer_id
    assert again.batch.first_sequence == 0
    again.store(0)
    assert rig.offset(b"b") == 0


@run
async def test_forgotten_in_the_middle_of_a_batch_the_outcome_is_unknown() -> None:
    """It was sent, the connection broke, and the broker that came back cannot tell."""
    rig = Rig()
    rig.publish(b"a")
    (await rig.one()).store(0)
    rig.publish(b"b")
    rig.go_down(await rig.one())
    rig.publish(b"c")
    rig.come_up()
    (await rig.one()).refuse(SequenceGap("begins with sequence 1"))
    assert rig.code(b"b") == "outcome_unknown"
    (await rig.one()).store(0)
    assert rig.offset(b"c") == 0


# --- bounds, flush, close -------------------------------------------------------------------------
@run
async def test_only_so_much_waits_in_a_client() -> None:
    """What is more is refused at once, as something that may pass; then there is room again."""
    rig = Rig(batch_bytes=1 << 20)
    rig.go_down()
    half = producing.BUFFER_BYTES_MAX // 2
    rig.publish(b"1" * half, b"2" * (half - 1000), b"3" * half)
    assert rig.code(b"3" * half) == "client_buffer_full"
    assert rig.results[b"3" * half].retryable  # type: ignore[union-attr]
    assert rig.producer.is_busy
    rig.come_up()
    first, second = await rig.sent()
    first.store(0)
    rig.publish(b"4" * half)
    assert b"4" * half not in rig.results
    second.store(1)


@run
async def test_one_message_is_always_taken() -> None:
    """However large: the limit is on what waits, not on what is."""
    rig = Rig(batch_bytes=100)
    value = bytes(producing.BUFFER_BYTES_MAX + 1)
    rig.publish(value)
    assert (await rig.one()).values == [value]


@run
async def test_a_flush_does_not_wait_for_what_is_published_after_it() -> None:
    """Otherwise it would never end while others publish."""
    rig = Rig()
    rig.publish(b"a")
    first = await rig.one()
    flushing = asyncio.create_task(rig.producer.flush())
    await rig.settle()
    rig.publish(b"b")
    first.store(0)
    second = await rig.one()
    await rig.settle()
    assert flushing.done()
    another = asyncio.create_task(rig.producer.flush())
    await rig.settle()
    assert not another.done()
    second.store(1)
    await another


@run
async def test_a_flush_of_nothing_is_done() -> None:
    """Also twice, and also when everything has failed."""
    rig = Rig()
    await rig.producer.flush()
    await rig.producer.flush()
    rig.publish(b"a")
    flushing = asyncio.create_task(rig.producer.flush())
    (await rig.one()).refuse(Conflict("no"))
    await flushing
    assert rig.code(b"a") == "conflict"


@run
async def test_a_flush_hurries_what_waits_for_the_number_of_partitions() -> None:
    """It does not linger afterwards."""
    rig = Rig(linger=60)
    rig.hold = asyncio.Event()
    rig.publish(b"a", partition=None)
    flushing = asyncio.create_task(rig.producer.flush())
    await rig.settle()
    rig.hold.set()
    (await rig.one()).store(0)
    await flushing


@run
async def test_closing_tells_everybody() -> None:
    """What was sent has an unknown outcome; what was not, was certainly not stored."""
    rig = Rig()
    rig.hold = asyncio.Event()
    rig.publish(b"sent")
    await rig.one()
    rig.publish(b"waits")
    rig.publish(b"unplaced", partition=None, topic="other")
    await rig.settle()
    rig.producer.close()
    await rig.settle()
    assert rig.code(b"sent") == "outcome_unknown"
    assert rig.code(b"waits") == "closed"
    assert rig.code(b"unplaced") == "closed"
    rig.publish(b"late")
    assert rig.code(b"late") == "closed"


@run
async def test_a_receipt_says_what_an_own_id_is() -> None:
    """The client's own id where it gave one; each call has its own."""
    rig = Rig()
    found: list[Receipt] = []
    for number in range(2):
        columns = Columns([b"x"], ids=[bytes([number + 1]) * 16])
        rig.producer.publish("orders", columns, 0, lambda r, e: found.append(r))  # type: ignore[arg-type]
    (await rig.one()).store(5)
    assert [receipt.id.bytes for receipt in found] == [b"\1" * 16, b"\2" * 16]


@run
async def test_what_may_be_stored_is_not_sent_under_another_identity() -> None:
    """Both were cut off; the first is given up, and the refusal of the second's repetition may pass."""
    rig = Rig(batch_bytes=200)
    rig.publish(b"a" + bytes(200), b"b" + bytes(200))
    first, second = await rig.sent()
    rig.go_down(first, second)
    rig.come_up()
    first, second = await rig.sent()
    first.refuse(OutcomeUnknown("Kafka does not answer"))
    second.refuse(StorageFull("not now"))
    assert await rig.sent() == []
    assert rig.code(b"b" + bytes(200)) == "outcome_unknown"
