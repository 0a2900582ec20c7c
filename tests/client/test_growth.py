"""Partitions are added under live clients: they learn it before the next publish is accepted."""

import threading

import pytest

from headrace import BrokerClient
from headrace.errors import Conflict, HeadraceError, SequenceGap
from headrace.log.columns import Columns
from headrace.partitioning import partition_of_key
from headrace.testing import RunningServer
from tests.client.rig import Rig, run

CHANGED = Conflict("partitions were added", code="partitions_changed")


def publish(rig: Rig, *values: bytes) -> None:
    """Each with itself as the key."""
    for value in values:
        rig.producer.publish("orders", Columns([value], [value]), None, rig._hear(value))


# --- the producer by itself -----------------------------------------------------------------------
@run
async def test_every_planned_batch_says_on_how_many_partitions() -> None:
    """A partition that the caller has named is not planned."""
    rig = Rig()
    rig.partitions["orders"] = 4
    publish(rig, b"a")
    request = await rig.one()
    assert (request.partition, request.planned_on) == (partition_of_key(b"a", 4), 4)
    request.store(0)
    rig.publish(b"b", partition=2)
    assert (await rig.one()).planned_on is None


@run
async def test_a_refused_plan_is_made_again_in_order() -> None:
    """Nothing of the topic is sent until all that was sent is answered; then all goes to its new place."""
    rig = Rig(batch_bytes=1)
    rig.partitions["orders"] = 1
    publish(rig, b"a", b"b", b"c")
    first, second, third = await rig.sent()
    first.store(0)
    second.refuse(CHANGED)
    publish(rig, b"d")
    rig.partitions["orders"] = 8
    publish(rig, b"e")
    assert await rig.sent() == []
    third.refuse(SequenceGap("the batch before it is missing"))
    sent = await rig.sent()
    assert {request.planned_on for request in sent} == {8}
    assert [request.values for request in sorted(sent, key=lambda r: r.values)] == [
        [b"b"], [b"c"], [b"d"], [b"e"]
    ]  # fmt: skip
    for request in sent:
        assert request.partition == partition_of_key(request.values[0], 8)
        request.store(request.partition)
    await rig.settle()
    assert sorted(rig.results) == [b"a", b"b", b"c", b"d", b"e"]
    assert not any(isinstance(result, HeadraceError) for result in rig.results.values())


@run
async def test_what_may_be_stored_is_not_sent_to_another_partition() -> None:
    """After a broken connection the same batches go to the same partition first: the broker knows them."""
    rig = Rig(batch_bytes=1)
    rig.partitions["orders"] = 1
    publish(rig, b"a", b"b", b"c")
    rig.go_down(*await rig.sent())
    rig.partitions["orders"] = 4
    rig.come_up()
    first, second, third = await rig.sent()
    assert [r.planned_on for r in (first, second, third)] == [1, 1, 1]
    first.store(7, duplicate=True)
    second.refuse(CHANGED)
    third.refuse(SequenceGap("the batch before it is missing"))
    sent = await rig.sent()
    assert sorted(request.values for request in sent) == [[b"b"], [b"c"]]
    for request in sent:
        request.store(0)
    await rig.settle()
    assert rig.offset(b"a") == 7
    assert (rig.offset(b"b"), rig.offset(b"c")) == (0, 0)


@run
async def test_records_without_a_key_are_planned_again_too() -> None:
    """So that the new partitions are used at once."""
    rig = Rig()
    rig.partitions["orders"] = 1
    rig.publish(b"a", partition=None)
    rig.partitions["orders"] = 3
    (await rig.one()).refuse(CHANGED)
    request = await rig.one()
    assert (request.values, request.planned_on) == ([b"a"], 3)


@run
async def test_a_flush_and_a_close_do_not_forget_what_is_planned_again() -> None:
    """Every record is answered."""
    rig = Rig(batch_bytes=1)
    rig.partitions["orders"] = 1
    publish(rig, b"a", b"b")
    first, _ = await rig.sent()
    first.refuse(CHANGED)
    await rig.settle()
    rig.producer.close()
    assert sorted(rig.results) == [b"a", b"b"]


# --- with a broker --------------------------------------------------------------------------------
@pytest.mark.parametrize("many", [False, True])
def test_partitions_added_under_live_clients_keep_the_order_of_keys(
    server: RunningServer, client: BrokerClient, many: bool
) -> None:
    """Two clients publish while a third adds partitions: an ordered subscription that has caught up gets
    each key in order, and each key lies where all clients look for it."""
    client.create_topic("orders", partitions=2)
    client.create_subscription("billing", "orders", ordering="key")
    keys = [f"key-{number}" for number in range(12)]
    rounds = 40
    seen: dict[str, list[int]] = {key: [] for key in keys}
    done = threading.Event()

    def consume() -> None:
        with server.client() as reader, reader.subscription("billing", "orders") as member:
            count = 0
            while count < len(keys) * rounds:
                message = member.get(30)
                assert message.key is not None
                seen[message.key.decode()].append(int(message.value))
                message.ack()
                count += 1
            done.set()

    consumer = threading.Thread(target=consume)
    consumer.start()
    others = [server.client().connect() for _ in range(2)]
    try:
        for number in range(rounds):
            if number in (10, 20, 30):
                client.change_topic("orders", partitions=2 + number // 5)
            publisher = others[number % 2]
            value = str(number).encode()
            if many:
                publisher.publish_many("orders", [value] * len(keys), keys=keys)
            else:
                for publication in [
                    publisher.publish_nowait("orders", value, key=key) for key in keys
                ]:
                    publication.result(20)
        assert done.wait(30)
    finally:
        consumer.join(30)
        for other in others:
            other.close()
    assert seen == {key: list(range(rounds)) for key in keys}
    for key in keys:
        receipt = client.publish("orders", b"last", key=key)
        assert receipt.partition == partition_of_key(key.encode(), 8)


def test_a_repetition_is_known_after_partitions_were_added(client: BrokerClient) -> None:
    """An idempotency key, with and without a key, and a named producer."""
    client.create_topic("orders", partitions=2)
    first = [
        client.publish("orders", b"x", idempotency_key=f"i{n}", key=f"k{n}" if n % 2 else None)
        for n in range(10)
    ]
    identity = client.producer("importer")
    batch = client.publish_many("orders", [b"y"], producer=(identity.id, identity.epoch, 0))
    client.change_topic("orders", partitions=7)
    again = [
        client.publish("orders", b"x", idempotency_key=f"i{n}", key=f"k{n}" if n % 2 else None)
        for n in range(10)
    ]
    assert [(r.partition, r.offset) for r in again] == [(r.partition, r.offset) for r in first]
    assert all(receipt.duplicate for receipt in again)
    repeated = client.publish_many("orders", [b"y"], producer=(identity.id, identity.epoch, 0))
    assert (repeated[0].partition, repeated[0].offset) == (batch[0].partition, batch[0].offset)
    following = client.publish_many("orders", [b"z"], producer=(identity.id, identity.epoch, 1))
    assert following[0].partition == batch[0].partition
