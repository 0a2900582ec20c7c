"""The broker goes away and comes back, gently or not: clients go on, and nothing is stored twice."""

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.client.link import BACKOFF_S
from headrace.client.threads import Publication
from headrace.errors import (
    Closed,
    HeadraceError,
    OutcomeUnknown,
    RequestTimeout,
    StaleDelivery,
    StorageFailed,
    SubscriptionNotFound,
)
from headrace.server.members import Memberships
from headrace.testing import RunningServer, running_server, server_process, wait_until

SEED = random.SystemRandom().randrange(1 << 32)


def reconnects(client: BrokerClient) -> int:
    return client._core.link.reconnects


# --- coming back ----------------------------------------------------------------------------------
def test_everything_goes_on_after_a_restart(server: RunningServer, client: BrokerClient) -> None:
    """Publishing, fetching, plain channels, memberships and administration."""
    plain, member = client.subscribe("orders"), client.subscription("billing", "orders")
    client.publish("orders", b"before")
    assert plain.get(10).value == b"before"
    member.get(10).ack()
    client.flush()
    for number in range(3):
        server.restart()
        client.publish("orders", b"%d" % number)
        got = member.get(10)
        assert got.value == b"%d" % number
        got.ack()
        assert plain.get(10).value == b"%d" % number
        client.flush()
        assert client.subscription_stats("billing", "orders")["lag"] == 0
    assert reconnects(client) == 3
    assert len(client.fetch("orders")) == 4


def test_a_broker_in_memory_that_restarts_is_published_to_again(
    server: RunningServer,
) -> None:
    """It has forgotten who published; nobody has to notice."""
    with running_server(memory=True) as memory, memory.client() as client:
        for _ in range(3):
            for number in range(5):
                assert client.publish("orders", b"x").offset == number
            memory.restart()


def test_a_topic_that_is_made_anew_is_published_to_again(client: BrokerClient) -> None:
    """Also with fewer partitions than before."""
    client.create_topic("orders", partitions=3)
    for number in range(200):
        client.publish_nowait("orders", b"x", key=str(number))
    client.flush()
    client.delete_topic("orders")
    client.create_topic("orders", partitions=1)
    publications = [client.publish_nowait("orders", b"y", key=str(number)) for number in range(20)]
    for publication in publications:
        try:
            publication.result(10)
        except HeadraceError as error:
            assert error.code == "invalid_partition"  # noqa: PT017 - that the topic is another was news
    assert client.publish("orders", b"z", key="0").partition == 0


def test_the_pauses_between_attempts_grow(
    client: BrokerClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client tries again almost at once, and then after longer and longer pauses."""
    link = client._core.link
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(delay: float, *more: object) -> object:
        if asyncio.current_task() is link._keeper:
            pauses.append(delay)
        return await sleep(delay, *more)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    server.stop()
    wait_until(lambda: len(pauses) >= 6)
    for pause, longest in zip(pauses, BACKOFF_S, strict=False):
        assert longest / 2 <= pause <= longest
    assert list(BACKOFF_S) == sorted(BACKOFF_S)
    server.start()
    wait_until(lambda: client.is_connected)
    assert client.topics() == []


def test_questions_asked_while_it_is_away_are_answered_when_it_is_back(
    server: RunningServer, client: BrokerClient
) -> None:
    """Reading, describing, subscribing and publishing wait for it."""
    client.publish("orders", b"x")
    server.stop()
    results: dict[str, object] = {}

    def ask(name: str, call: object) -> threading.Thread:
        thread = threading.Thread(target=lambda: results.update({name: call()}))  # type: ignore[operator]
        thread.start()
        return thread

    threads = [
        ask("fetch", lambda: client.fetch("orders")[0].value),
        ask("topics", client.topics),
        ask("subscribe", lambda: client.subscribe("orders")),
        ask("publish", lambda: client.publish("orders", b"y").offset),
    ]
    server.start()
    for thread in threads:
        thread.join(15)
    channel = results.pop("subscribe")
    assert results == {"fetch": b"x", "topics": ["orders"], "publish": 1}
    client.publish("orders", b"z")
    while channel.get(10).value != b"z":  # type: ignore[attr-defined]
        pass
    assert reconnects(client) == 1


def test_questions_asked_while_it_is_away_end_after_the_request_timeout(
    server: RunningServer,
) -> None:
    """All of them: nobody waits for ever."""
    with server.client(request_timeout=0.4) as client:
        member = client.subscription("billing", "orders")
        server.stop()
        for call in (
            client.topics,
            lambda: client.fetch("orders"),
            lambda: client.fetch("orders", wait=0.1),
            lambda: client.subscribe("orders"),
            lambda: client.subscription("mail", "orders"),
            lambda: client.create_topic("x"),
            lambda: client.publish("orders", b"x", delay=5),
            lambda: client.publish("orders", b"x", idempotency_key="k"),
        ):
            began = time.monotonic()
            with pytest.raises(RequestTimeout):
                call()
            assert time.monotonic() - began < 5
        member.close()
        assert member.is_closed


def test_a_broker_that_hangs_is_noticed() -> None:
    """It neither answers nor closes: questions end in time, and the connection is given up."""
    with (
        server_process() as server,
        server.client(request_timeout=0.5, heartbeat_interval=0.6) as client,
    ):
        client.publish("orders", b"x")
        server.suspend()
        with pytest.raises(RequestTimeout):
            client.topics()
        wait_until(lambda: not client.is_connected)
        server.resume()
        wait_until(lambda: client.is_connected)
        assert client.publish("orders", b"y").offset == 1


def test_closing_a_client_of_a_broker_that_hangs_ends(server: RunningServer) -> None:
    """After a timeout or two, with everything told."""
    with server_process() as hanging:
        client = hanging.client(request_timeout=0.3, delivery_timeout=30).connect()
        inboxes = [client.subscribe(f"topic-{number}") for number in range(5)]
        client.subscription("billing", "orders")
        client.publish("orders", b"x")
        hanging.suspend()
        publication = client.publish_nowait("orders", b"y")
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            client.close()
        assert time.monotonic() - began < 6
        with pytest.raises(OutcomeUnknown):
            publication.result(0)
        assert all(inbox.is_closed for inbox in inboxes)


# --- subscriptions --------------------------------------------------------------------------------
def test_what_was_delivered_before_the_connection_broke_is_void(
    server: RunningServer, client: BrokerClient
) -> None:
    """An old message cannot be settled; it comes again, and that one can."""
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders")
    old = member.get(10)
    server.restart()
    new = member.get(10)
    assert (new.value, new.attempt) == (b"x", 1)
    for settle in (old.ack, old.nack, old.extend):
        with pytest.raises(StaleDelivery, match="connection broke"):
            settle()
    new.ack()
    client.flush()
    assert client.subscription_stats("billing", "orders")["lag"] == 0


@pytest.mark.parametrize("how", ["ack", "ack_up_to"])
def test_a_flush_does_not_vouch_for_acks_that_broke_with_the_connection(
    server: RunningServer, client: BrokerClient, how: str
) -> None:
    """The broker was killed after the ack: the next flush says that it may be lost, once."""
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders")
    getattr(member, how)(member.get(10))
    server.kill()
    server.start()
    with pytest.raises(OutcomeUnknown) as caught:
        client.flush()
    assert caught.value.code == "acks_unknown"
    client.flush()


def test_a_flush_is_not_disturbed_by_a_break_after_the_last_one(
    server: RunningServer, client: BrokerClient
) -> None:
    """What an earlier flush has covered is on disk, however the broker ends."""
    client.publish("orders", b"x")
    member = client.subscription("billing", "orders")
    member.get(10).ack()
    client.flush()
    server.kill()
    server.start()
    client.flush()
    assert client.subscription_stats("billing", "orders")["lag"] == 0


def test_unread_messages_of_a_broken_connection_are_not_shown_twice(
    server: RunningServer, client: BrokerClient
) -> None:
    """What waited in the channel is dropped, because it comes again."""
    client.publish_many("orders", [b"%d" % number for number in range(50)])
    member = client.subscription("billing", "orders")
    wait_until(lambda: len(member) == 50)
    server.restart()
    wait_until(lambda: reconnects(client) == 1 and len(member) == 50)
    found = []
    for _ in range(50):
        message = member.get(10)
        found.append(message.value)
        message.ack()
    client.flush()
    assert found == [b"%d" % number for number in range(50)]
    assert member.get_nowait() is None


def test_a_subscription_that_is_gone_after_the_restart_ends(server: RunningServer) -> None:
    """Somebody deleted it meanwhile: its consumer hears of it, others go on."""
    with server.client() as client:
        gone, stays = client.subscription("gone", "orders"), client.subscription("stays", "orders")
        server.stop()
        server.start()
        with server.client() as admin:
            wait_until(lambda: client.is_connected)
            admin.delete_subscription("gone")
        with pytest.raises(SubscriptionNotFound):
            gone.get(10)
        client.publish("orders", b"x")
        assert stays.get(10).value == b"x"


@pytest.mark.parametrize("error", [StorageFailed("Kafka is away"), Closed("it stops")])
def test_a_subscription_that_is_refused_for_a_moment_comes_back(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, error: HeadraceError
) -> None:
    """Only a refusal for good ends it."""
    with server.client() as client:
        member = client.subscription("billing", "orders")
        join, refused = Memberships.join, []

        def refuse_twice(self: Memberships, *arguments: Any) -> Any:
            if len(refused) < 2:
                refused.append(error)
                raise error
            return join(self, *arguments)

        monkeypatch.setattr(Memberships, "join", refuse_twice)
        server.restart()
        client.publish("orders", b"x")
        assert member.get(10).value == b"x"
        assert len(refused) == 2


def test_a_consumer_closed_while_the_broker_is_away_stays_closed(
    server: RunningServer, client: BrokerClient
) -> None:
    """It does not come back as a member that nobody reads."""
    member, plain = client.subscription("billing", "orders"), client.subscribe("orders")
    server.stop()
    member.close()
    plain.close()
    server.start()
    client.publish("orders", b"x")
    assert client.subscription_stats("billing", "orders")["members"] == 0
    assert server.call(lambda: len(server.engine._followers)) == 0


def test_a_plain_channel_misses_what_came_while_it_was_away(
    server: RunningServer, client: BrokerClient
) -> None:
    """It is from now on, and gone with the connection: what was before the break is still there."""
    inbox = client.subscribe("orders")
    client.publish("orders", b"before")
    wait_until(lambda: len(inbox) == 1)
    server.restart()
    wait_until(lambda: reconnects(client) == 1)
    client.publish("orders", b"after")
    assert [inbox.get(10).value for _ in range(2)] == [b"before", b"after"]


# --- exactly once ---------------------------------------------------------------------------------
class Publisher:
    """Publishes in a thread of its own until it is told to stop."""

    def __init__(self, client: BrokerClient, rng: random.Random):
        self._client, self._rng = client, rng
        self.publications: dict[bytes, Publication] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def _publish(self) -> None:
        while not self._stop.is_set():
            for _ in range(self._rng.randint(1, 50)):
                value = b"%d" % len(self.publications)
                self.publications[value] = self._client.publish_nowait("orders", value, key=value)
            if self._rng.random() < 0.5:
                self.publications[value].result(30)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_killed_at_any_moment_every_message_is_stored_once() -> None:
    """kill -9 under load, again and again: no acknowledged message is lost, none is there twice."""
    rng = random.Random(SEED)
    with server_process() as server, server.client(request_timeout=30) as client:
        client.create_topic("orders", partitions=2)
        publisher = Publisher(client, rng)
        for kill in range(3):
            target = len(publisher.publications) + rng.randint(50, 1500)
            wait_until(lambda: len(publisher.publications) > target, 30)  # noqa: B023
            server.kill()
            server.start()
            wait_until(lambda: reconnects(client) > kill, 30)  # noqa: B023
        publisher.stop()
        client.flush()
        stored: Counter[bytes] = Counter()
        for partition in range(2):
            offset = 0
            while values := client.fetch_values("orders", offset, partition=partition):
                stored.update(values)
                offset += len(values)
        assert {value for value, times in stored.items() if times > 1} == set(), f"seed {SEED}"
        for value, publication in publisher.publications.items():
            publication.result(10)
            assert stored[value] == 1, f"seed {SEED}: {value!r} is lost"


def test_killed_while_publishes_with_a_key_are_under_way() -> None:
    """By an idempotency key: sent again after the kill, and stored once."""
    with server_process() as server, server.client(request_timeout=20) as client:
        client.publish("orders", b"first")
        keyed = [
            client.publish_nowait("orders", b"k%d" % number, idempotency_key=f"key-{number}")
            for number in range(50)
        ]
        server.kill()
        server.start()
        assert len({publication.result(20).offset for publication in keyed}) == 50
        values = client.fetch_values("orders", max_bytes=16 << 20)
        assert Counter(values).most_common(1)[0][1] == 1
        assert len(values) == 51


def test_killed_while_delayed_publishes_are_under_way() -> None:
    """They are sent again under the same id, and wait once."""
    with server_process() as server, server.client(request_timeout=20) as client:
        client.create_topic("orders")
        delayed = [
            client.publish_nowait("orders", b"%d" % number, delay=3600) for number in range(50)
        ]
        wait_until(delayed[10].done)
        server.kill()
        server.start()
        ids = {publication.result(20).id for publication in delayed}
        waiting = [item.id for item in client.scheduled("orders")]
        assert len(waiting) == 50
        assert set(waiting) == ids


def test_an_administrative_call_that_was_cut_off_says_that_it_may_have_been_done() -> None:
    """What cannot safely be done twice is not; a deletion, say."""
    with server_process() as server, server.client(request_timeout=20) as client:
        client.create_topic("orders")
        server.suspend()
        outcome: list[BaseException] = []

        def delete() -> None:
            try:
                client.delete_topic("orders")
            except HeadraceError as error:
                outcome.append(error)

        thread = threading.Thread(target=delete)
        wire = client._core.link.wire
        assert wire is not None
        before = wire._next
        thread.start()
        wait_until(lambda: wire._next > before)
        server.kill()
        server.start()
        thread.join(20)
        assert [type(error) for error in outcome] == [OutcomeUnknown]


# --- asyncio --------------------------------------------------------------------------------------
def test_the_same_for_asyncio(server: RunningServer) -> None:
    """Publishes in flight over a restart, and a member that comes back."""

    async def main() -> None:
        async with AsyncClient(*server.address, request_timeout=10) as client:
            member = await client.subscription("billing", "orders")
            sent = [client.publish_nowait("orders", b"%d" % number) for number in range(500)]
            await asyncio.to_thread(server.kill)
            sent += [client.publish_nowait("orders", b"%d" % number) for number in range(500, 1000)]
            await asyncio.to_thread(server.start)
            receipts = await asyncio.gather(*sent)
            assert len({receipt.offset for receipt in receipts}) == 1000
            found: set[bytes] = set()
            while len(found) < 1000:
                message = await member.get(10)
                found.add(message.value)
                message.ack()
            await client.flush()
            assert (await client.subscription_stats("billing", "orders"))["lag"] == 0

    asyncio.run(main())


def test_a_lost_broker_is_told_once_and_so_is_its_return(
    client: BrokerClient, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that waits for its broker says so at the level that Python shows by default."""
    caplog.set_level(logging.DEBUG, "headrace.client")
    server.stop()
    wait_until(lambda: len([each for each in caplog.records if each.levelname == "DEBUG"]) >= 2)
    server.start()
    client.publish("orders", b"x")
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 2
    assert told[0].startswith("the connection is lost, and is tried again: no broker answers at")
    assert told[1].startswith("connected again to ")
