"""Consuming with real clients: settling, handlers, deadlines, and what a close gives back."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.errors import (
    Closed,
    HeadraceError,
    NotFound,
    RequestTimeout,
    StaleDelivery,
    SubscriptionNotFound,
    TopicNotFound,
)
from headrace.model import Message
from headrace.testing import RunningServer, wait_until


def stats(client: BrokerClient, name: str = "billing", topic: str = "orders") -> dict[str, Any]:
    return client.subscription_stats(name, topic)


# --- settling -------------------------------------------------------------------------------------
def test_many_acks_are_few_requests(client: BrokerClient) -> None:
    """Acknowledged one by one, they leave as runs."""
    client.publish_many("orders", [b"x"] * 5000)
    member = client.subscription("billing", "orders", prefetch=5000)
    wire = client._core.link.wire
    assert wire is not None
    before = wire._next
    for _ in range(5000):
        member.get(10).ack()
    client.flush()
    assert wire._next - before < 600
    assert stats(client)["lag"] == 0
    assert member.feed.ledger.stale == 0


def test_acks_of_many_subscriptions_are_one_request(server: RunningServer) -> None:
    """What is acknowledged in one turn of the loop leaves together, whichever subscriptions it is of."""

    async def main() -> None:
        async with AsyncClient(server.host, server.port) as client:
            await client.publish("orders", b"x")
            members = [await client.subscription(f"g{number}", "orders") for number in range(20)]
            messages = [await member.get(10) for member in members]
            wire = client.link.wire
            assert wire is not None
            before = wire._next
            for message in messages:
                message.ack()
            await client._acks.flush()
            assert wire._next - before == 1
            for number in range(20):
                assert (await client.subscription_stats(f"g{number}", "orders"))["lag"] == 0

    asyncio.run(main())


def test_acks_in_any_order_are_understood(client: BrokerClient) -> None:
    """Backwards and every other one: what was not acknowledged comes again, and nothing else."""
    client.create_subscription("billing", "orders", backoff=0)
    client.publish_many("orders", [b"%d" % number for number in range(100)])
    member = client.subscription("billing", "orders", prefetch=100)
    messages = [member.get(10) for _ in range(100)]
    member.ack_many(reversed(messages[::2]))
    client.flush()
    member.close()
    again = client.subscription("billing", "orders", prefetch=100)
    assert [int(again.get(10).value) for _ in range(50)] == list(range(1, 100, 2))


def test_an_ack_up_to_settles_everything_before(client: BrokerClient) -> None:
    """And does not pile up in the client."""
    member = client.subscription("billing", "orders", prefetch=1000)
    for _ in range(50):
        client.publish_many("orders", [b"x"] * 10)
        messages = [member.get(10) for _ in range(10)]
        member.ack_up_to(messages[-1])
    client.flush()
    assert stats(client)["lag"] == 0
    del messages
    gc.collect()
    assert len(member.feed._leases) == 0


def test_a_message_is_settled_once(client: BrokerClient) -> None:
    """The second time is refused on the spot; extending before is fine."""
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders")
    message = member.get(10)
    message.extend(60)
    message.ack()
    for again in (message.ack, message.nack, message.extend):
        with pytest.raises(StaleDelivery, match="settled"):
            again()
    client.flush()
    assert stats(client)["lag"] == 0


def test_what_came_from_a_plain_subscribe_cannot_be_settled(client: BrokerClient) -> None:
    """In words."""
    inbox = client.subscribe("orders")
    client.publish("orders", b"x")
    with pytest.raises(Closed, match="nothing to acknowledge"):
        inbox.get(10).ack()


def test_a_reason_may_hold_anything(client: BrokerClient) -> None:
    """Also what no protocol likes."""
    client.create_subscription("billing", "orders", max_deliveries=1, backoff=0)
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders")
    member.get(10).nack(reason="line\r\n\0two" + "x" * 5000)
    wait_until(lambda: stats(client)["dead_lettered"] == 1)
    (letter,) = client.dead_letters("billing")
    assert letter.reason.startswith("line two")
    assert len(letter.reason) <= 1000


# --- handlers -------------------------------------------------------------------------------------
def test_a_handler_that_returns_acknowledges(client: BrokerClient) -> None:
    """Each message, in order, in a thread of its own."""
    seen: list[bytes] = []
    client.publish_many("orders", [b"%d" % number for number in range(100)])
    client.subscribe_to_subscription("billing", lambda m: seen.append(m.value), "orders")
    wait_until(lambda: len(seen) == 100)
    client.flush()
    wait_until(lambda: stats(client)["lag"] == 0)
    assert seen == [b"%d" % number for number in range(100)]


def test_a_handler_that_raises_gives_back_with_the_reason(client: BrokerClient) -> None:
    """After max_deliveries tries the dead letter says what was raised; the rest goes on."""
    client.create_subscription("billing", "orders", max_deliveries=2, backoff=0)
    attempts: list[tuple[bytes, int]] = []

    def handler(message: Message) -> None:
        attempts.append((message.value, message.attempt))
        if message.value == b"bad":
            raise ValueError("no such customer")

    client.subscribe_to_subscription("billing", handler)
    client.publish("orders", b"bad")
    client.publish("orders", b"good")
    wait_until(lambda: stats(client)["dead_lettered"] == 1)
    (letter,) = client.dead_letters("billing")
    assert letter.reason == "ValueError: no such customer"
    assert (b"bad", 1) in attempts
    assert (b"bad", 2) in attempts
    wait_until(lambda: stats(client)["lag"] == 0)


def test_a_handler_may_take_longer_than_the_ack_timeout(client: BrokerClient) -> None:
    """Its deadline is extended while it runs, and so are those of what waits behind it."""
    client.create_subscription("billing", "orders", ack_timeout=0.9, backoff=0)
    seen: list[tuple[bytes, int]] = []
    go_on = threading.Event()

    def handler(message: Message) -> None:
        seen.append((message.value, message.attempt))
        if message.value == b"slow":
            go_on.wait(10)

    client.publish("orders", b"slow")
    client.publish("orders", b"quick")
    client.subscribe_to_subscription("billing", handler)
    wait_until(lambda: seen)
    before = client._core.link.wire._next  # type: ignore[union-attr]
    # Eight extensions are more than two ack timeouts.
    wait_until(lambda: client._core.link.wire._next >= before + 8)  # type: ignore[union-attr]
    go_on.set()
    wait_until(lambda: stats(client)["lag"] == 0)
    assert seen == [(b"slow", 1), (b"quick", 1)]
    assert stats(client)["timeouts"] == 0


def test_a_message_that_nobody_holds_is_not_extended(client: BrokerClient) -> None:
    """A program that lost it gets it again."""
    client.create_subscription("billing", "orders", ack_timeout=0.3, backoff=0)
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders", auto_extend=True)
    assert member.get(10).attempt == 1
    gc.collect()
    assert member.get(10).attempt == 2


def test_leaving_a_subscription_ends_its_handler(client: BrokerClient) -> None:
    """The subscription stays, with its place; joining again goes on there."""
    seen: list[bytes] = []
    client.create_subscription("billing", "orders")
    client.subscribe_to_subscription("billing", lambda m: seen.append(m.value))
    client.publish("orders", b"one")
    wait_until(lambda: seen)
    client.unsubscribe_from_subscription("billing")
    with pytest.raises(NotFound, match="not joined"):
        client.unsubscribe_from_subscription("billing")
    client.publish("orders", b"two")
    assert stats(client)["members"] == 0
    client.subscribe_to_subscription("billing", lambda m: seen.append(m.value))
    wait_until(lambda: seen == [b"one", b"two"])


def test_joining_twice_is_refused(client: BrokerClient) -> None:
    """Two members of one connection would be one."""
    client.subscription("billing", "orders")
    with pytest.raises(HeadraceError, match="already") as caught:
        client.subscription("billing", "orders")
    assert caught.value.code == "subscribed"


def test_one_name_over_two_topics_are_two_subscriptions(client: BrokerClient) -> None:
    """Both can be joined, and leaving by name leaves both."""
    orders = client.subscription("audit", "orders")
    users = client.subscription("audit", "users")
    client.publish("orders", b"o")
    client.publish("users", b"u")
    assert (orders.get(10).value, users.get(10).value) == (b"o", b"u")
    client.unsubscribe_from_subscription("audit")
    assert orders.is_closed
    assert users.is_closed


def test_joining_what_is_not_there_is_told(client: BrokerClient) -> None:
    """Without a topic it cannot be made."""
    with pytest.raises(SubscriptionNotFound):
        client.subscription("billing")


# --- asyncio --------------------------------------------------------------------------------------
def test_consume_runs_a_handler_until_cancelled(server: RunningServer) -> None:
    """With several at a time; what raised comes again, what was cut off too."""

    async def main() -> None:
        seen: list[bytes] = []
        stuck = asyncio.Event()

        async def handler(message: Message) -> None:
            if message.value == b"fails" and message.attempt == 1:
                raise ValueError("once")
            if message.value == b"stuck":
                stuck.set()
                await asyncio.Event().wait()
            seen.append(message.value)

        async with AsyncClient(*server.address) as client:
            await client.create_subscription("billing", "orders", backoff=0)
            task = asyncio.create_task(client.consume("billing", handler, concurrency=4))
            for value in (b"one", b"fails", b"two"):
                await client.publish("orders", value)
            async with asyncio.timeout(10):
                while sorted(seen) != [b"fails", b"one", b"two"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await client.publish("orders", b"stuck")
                await stuck.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            again = await client.subscription("billing", "orders")
            message = await again.get(10)
            assert (message.value, message.attempt) == (b"stuck", 2)

    asyncio.run(main())


def test_consume_outlives_a_broken_connection(server: RunningServer) -> None:
    """What was being handled when it broke comes again; nothing is raised."""

    async def main() -> None:
        seen: list[tuple[bytes, int]] = []
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def handler(message: Message) -> None:
            seen.append((message.value, message.attempt))
            if message.attempt == 1:
                inside.set()
                await go_on.wait()

        async with AsyncClient(*server.address) as client:
            task = asyncio.create_task(client.consume("billing", handler, "orders"))
            await client.publish("orders", b"x")
            async with asyncio.timeout(15):
                await inside.wait()
                await asyncio.to_thread(server.restart)
                while client.link.reconnects == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                go_on.set()
                while len(seen) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            assert seen == [(b"x", 1), (b"x", 1)]  # a broker that stops uses up no delivery
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_closing_a_consumer_and_its_client_at_once_gives_back_unread_messages(
    server: RunningServer,
) -> None:
    """Also when the client is closed before the consumer has said goodbye."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            await client.publish_many("orders", [b"x"] * 10)
            consumer = await client.subscription("billing", "orders")
            await consumer.get(10)
            consumer.close()
        async with AsyncClient(*server.address) as client:
            consumer = await client.subscription("billing", "orders")
            messages = [await consumer.get(10) for _ in range(10)]
            assert sorted(m.attempt for m in messages) == [1] * 9 + [2]

    asyncio.run(main())


# --- closing --------------------------------------------------------------------------------------
def test_unread_messages_go_back_without_having_counted(server: RunningServer) -> None:
    """Only what the program had taken may have failed because of it."""
    with server.client() as client:
        client.publish_many("orders", [b"%d" % number for number in range(20)])
        member = client.subscription("billing", "orders")
        taken = [member.get(10) for _ in range(5)]
        taken[0].ack()
    with server.client() as client:
        member = client.subscription("billing", "orders")
        found = {m.offset: m.attempt for m in (member.get(10) for _ in range(19))}
        assert found == {offset: 2 if offset < 5 else 1 for offset in range(1, 20)}


def test_what_is_on_its_way_when_a_consumer_leaves_does_not_count_either(
    server: RunningServer,
) -> None:
    """While somebody publishes all the time, consumers come and go; nothing is given up unseen."""
    going = threading.Event()
    with server.client() as publisher, server.client() as client:
        client.create_subscription("billing", "orders", max_deliveries=1)

        def publish() -> None:
            while not going.is_set():
                publisher.publish_many("orders", [b"x"] * 20)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for _ in range(30):
                with client.subscription("billing", "orders") as member:
                    member.get(10).ack()
        finally:
            going.set()
            thread.join(10)
        found = stats(client)
        assert found["dead_lettered"] == 0
        assert found["lag"] == publisher.topic_stats("orders")["messages"] - 30


def test_a_consumer_can_be_left_and_joined_again_at_once(server: RunningServer) -> None:
    """Joining waits until the broker has heard of the leaving."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            await client.create_subscription("billing", "orders", max_deliveries=0)
            await client.publish("orders", b"x")
            for _ in range(20):
                consumer = await client.subscription("billing", "orders")
                assert (await consumer.get(10)).value == b"x"
                consumer.close()
            stats = await client.subscription_stats("billing", "orders")
            assert stats["members"] <= 1

    asyncio.run(main())


def test_joining_that_is_cancelled_leaves_no_member_behind(server: RunningServer) -> None:
    """The broker would deliver to it, and nobody would ever acknowledge."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            await client.create_subscription("billing", "orders")
            joining = asyncio.create_task(client.subscription("billing", "orders"))
            while not client._feeds:  # noqa: ASYNC110 - in this turn it asks the broker
                await asyncio.sleep(0)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            assert (await client.subscription_stats("billing", "orders"))["members"] == 0

    asyncio.run(main())


def test_leaving_that_is_cancelled_ends_all_the_same(server: RunningServer) -> None:
    """The broker hears of it, and the subscription can be joined again."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            await client.subscription("billing", "orders")
            leaving = asyncio.create_task(client.leave("billing"))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            again = await client.subscription("billing", "orders")
            await client.publish("orders", b"x")
            assert (await again.get(10)).value == b"x"

    asyncio.run(main())


def test_leaving_twice_waits_for_the_broker_twice(server: RunningServer) -> None:
    """Whoever leaves as the second one may join again, too."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            consumer = await client.subscription("billing", "orders")
            consumer.close()
            await asyncio.sleep(0)  # it begins
            await client.leave("billing")
            assert (await client.subscription_stats("billing", "orders"))["members"] == 0

    asyncio.run(main())


def test_acks_just_before_the_close_count(server: RunningServer) -> None:
    """Nobody has to flush before leaving."""
    with server.client() as client:
        client.publish_many("orders", [b"x"] * 500)
        member = client.subscription("billing", "orders")
        for _ in range(500):
            member.get(10).ack()
    with server.client() as client:
        assert stats(client)["lag"] == 0


def test_a_closed_channel_gives_what_has_arrived_and_then_ends(client: BrokerClient) -> None:
    """Iteration stops; get says why."""
    inbox = client.subscribe("orders")
    for number in range(3):
        client.publish("orders", b"%d" % number)
    wait_until(lambda: len(inbox) == 3)
    inbox.close()
    assert [message.value for message in inbox] == [b"0", b"1", b"2"]
    with pytest.raises(Closed):
        inbox.get(1)
    inbox.close()


def test_unsubscribe_closes_the_channels_of_a_topic(client: BrokerClient) -> None:
    """All of them, and no others."""
    first, second, other = (client.subscribe(topic) for topic in ("orders", "orders", "users"))
    client.unsubscribe("orders")
    assert first.is_closed
    assert second.is_closed
    assert not other.is_closed
    client.publish("users", b"x")
    assert other.get(10).value == b"x"


def test_the_end_of_a_subscription_is_raised_where_it_is_read(client: BrokerClient) -> None:
    """With the class that it has in process; also inside a for loop."""
    member = client.subscription("billing", "orders")
    client.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        for _ in member:
            pass
    again = client.subscription("billing", "orders")
    client.publish("orders", b"x")
    assert again.get(10).value == b"x"


def test_waiting_for_a_message_ends(client: BrokerClient) -> None:
    """get(timeout) and get_nowait, for threads."""
    inbox = client.subscribe("orders")
    with pytest.raises(RequestTimeout) as caught:
        inbox.get(0.05)
    assert caught.value.code == "no_message"
    assert inbox.get_nowait() is None


# --- credit ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("capacity", [1, 2, 10, 100])
def test_a_slow_plain_channel_stays_bounded_and_loses_nothing(
    client: BrokerClient, capacity: int
) -> None:
    """What does not fit waits in the broker's log, not in anybody's memory."""
    inbox = client.subscribe("orders", capacity=capacity)
    client.publish_many("orders", [b"%d" % number for number in range(2000)])
    found = []
    for _ in range(2000):
        assert len(inbox) <= capacity
        found.append(int(inbox.get(10).value))
    assert found == list(range(2000))


def test_a_slow_channel_does_not_slow_the_others(client: BrokerClient) -> None:
    """On the same connection, the same topic."""
    slow = client.subscribe("orders", capacity=5)
    quick = client.subscribe("orders", capacity=5)
    client.publish_many("orders", [b"%d" % number for number in range(1000)])
    assert [int(quick.get(10).value) for _ in range(1000)] == list(range(1000))
    assert [int(slow.get(10).value) for _ in range(1000)] == list(range(1000))


def test_a_slow_channel_for_asyncio(server: RunningServer) -> None:
    """The same bound, the same completeness."""

    async def main() -> None:
        async with AsyncClient(*server.address) as client:
            inbox = await client.subscribe("orders", capacity=7)
            await client.publish_many("orders", [b"%d" % number for number in range(1000)])
            for number in range(1000):
                assert len(inbox) <= 7
                assert int((await inbox.get(10)).value) == number

    asyncio.run(main())
