"""Whole batches, many under way: staged or published, while the broker goes away and comes back."""

import pytest

from headrace import BrokerClient
from headrace.errors import Closed, InvalidArgument, RequestTimeout, TooLarge
from headrace.log.batch import Batch, encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, running_server


def batch(*values: bytes, keys: list[bytes | None] | None = None) -> Batch:
    return encode(Columns(list(values), keys))


def values(client: BrokerClient, topic: str, partition: int = 0) -> list[bytes]:
    return client.fetch_values(topic, partition=partition, max_bytes=1 << 24)


def test_batches_are_published_in_the_order_of_the_calls(client: BrokerClient) -> None:
    """None of them waits for the one before it."""
    waiting = [client.publish_batch_nowait("orders", batch(b"%d" % n)) for n in range(50)]
    receipts = [future.result(10) for future in waiting]
    assert [receipt.offset for receipt in receipts] == list(range(50))
    assert values(client, "orders") == [b"%d" % number for number in range(50)]


def test_a_published_batch_goes_where_its_keys_or_its_partition_say(client: BrokerClient) -> None:
    """With a partition all of it goes there; without, each record where its key belongs."""
    client.create_topic("orders", partitions=4)
    keyed = batch(*[b"%d" % n for n in range(40)], keys=[b"%d" % n for n in range(40)])
    assert client.publish_batch_nowait("orders", keyed, partition=2).result(10).partition == 2
    assert len(values(client, "orders", 2)) == 40
    client.publish_batch_nowait("orders", keyed).result(10)
    client.publish_many("other", [b"x"], keys=[b"1"])
    spread = [len(values(client, "orders", number)) for number in range(4)]
    assert sum(spread) == 80
    assert all(spread)


def test_a_batch_that_cannot_be_is_refused(client: BrokerClient) -> None:
    """The broker's own words, in the future."""
    with pytest.raises(TooLarge):
        client.publish_batch_nowait("orders", batch(bytes(2 << 20))).result(10)
    with pytest.raises(InvalidArgument):
        client.stage_nowait("no topic", batch(b"x")).result(10)


@pytest.mark.parametrize("gently", [True, False])
def test_what_is_under_way_survives_a_restart(server: RunningServer, gently: bool) -> None:
    """A broker that goes down, politely or not, is waited for; all pieces are there for the commit."""
    with server.client(delivery_timeout=30) as client:
        client.create_topic("orders")
        for number in range(5):
            staged = [
                client.stage_nowait("orders", batch(b"%d-%d" % (number, n))) for n in range(20)
            ]
            published = [client.publish_batch_nowait("copies", batch(b"%d" % n)) for n in range(20)]
            if gently:
                server.stop()
            else:
                server.kill()
            server.start()
            pieces = [future.result(30) for future in staged]
            assert client.commit_staged("job", number, pieces)
            for future in published:
                future.result(30)
        assert values(client, "orders") == [b"%d-%d" % (m, n) for m in range(5) for n in range(20)]
        assert set(values(client, "copies")) == {b"%d" % number for number in range(20)}


def test_a_broker_that_does_not_come_back_is_given_up() -> None:
    """After the delivery timeout, with an error that says so."""
    with running_server() as server, server.client(delivery_timeout=0.5) as client:
        client.create_topic("orders")
        server.kill()
        with pytest.raises(RequestTimeout):
            client.stage_nowait("orders", batch(b"x")).result(10)


def test_a_closed_client_takes_nothing(server: RunningServer) -> None:
    """And does not wait for a broker."""
    client = server.client().connect()
    client.close()
    with pytest.raises(Closed):
        client.stage_nowait("orders", batch(b"x"))
