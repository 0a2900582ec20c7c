"""``Broker``: the whole broker in a program of threads. Real threads and real files, nothing faked.

Every wait has a bound, so that a mistake is a failure and not a standstill.
"""

import faulthandler
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace import Broker, HeadraceError
from headrace.channels import Channel
from headrace.errors import (
    BrokerFailed,
    Closed,
    DirectoryLocked,
    InvalidArgument,
    OutcomeUnknown,
    QueueFull,
    RequestTimeout,
    StaleDelivery,
    SubscriptionNotFound,
    TopicNotFound,
)
from tests.fakes import FaultyFiles

WAIT = 20.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def memory() -> Iterator[Broker]:
    with Broker() as opened:
        yield opened


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run it beside us; what it returns or raises is put into the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def joined(thread: threading.Thread) -> None:
    thread.join(WAIT)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.__stderr__)  # where everybody stands
    assert not thread.is_alive(), "it still waits"


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to come so far."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


# --- publish and subscribe -----------------------------------------------------------------------
def test_the_example_from_the_documentation(tmp_path: Path) -> None:
    """Open, subscribe, publish, receive; it is all there the next time."""
    with Broker.open(tmp_path / "data") as broker:
        channel = broker.subscribe("events")
        broker.publish("events", b"Hello World")
        broker.publish("events", "Another message", {"priority": "high", "source": "api"})
        first, second = channel.get(timeout=WAIT), channel.get(timeout=WAIT)
        assert (first.topic, first.payload) == ("events", b"Hello World")
        assert second.headers == {"priority": "high", "source": "api"}
        assert (second.body, second.text()) == (b"Another message", "Another message")
    with Broker.open(tmp_path / "data") as broker:
        assert broker.fetch_values("events") == [b"Hello World", b"Another message"]


def test_every_subscriber_gets_every_message(memory: Broker) -> None:
    """Fan-out: three channels of one topic, and one of another topic that sees nothing."""
    channels = [memory.subscribe("orders") for _ in range(3)]
    other = memory.subscribe("users")
    memory.publish("orders", b"New order")
    assert [channel.get(WAIT).value for channel in channels] == [b"New order"] * 3
    assert other.get_nowait() is None


def test_a_channel_is_iterable_until_it_is_closed(memory: Broker) -> None:
    """``for`` ends when the topic is unsubscribed; what had arrived comes first."""
    channel = memory.subscribe("events")
    thread, results = in_thread(lambda: [message.value for message in channel])
    for number in range(5):
        memory.publish("events", b"%d" % number)
    until(lambda: len(channel) == 0)
    memory.unsubscribe("events")
    joined(thread)
    assert results == [[b"0", b"1", b"2", b"3", b"4"]]
    assert channel.is_closed
    with pytest.raises(Closed):
        channel.get(timeout=WAIT)


def test_get_waits_no_longer_than_told(memory: Broker) -> None:
    """Without a message it is a ``RequestTimeout``, retryable; 0 does not wait at all."""
    channel = memory.subscribe("events")
    started = time.monotonic()
    with pytest.raises(RequestTimeout) as caught:
        channel.get(timeout=0.05)
    assert 0.04 < time.monotonic() - started < 5
    assert (caught.value.code, caught.value.retryable) == ("no_message", True)
    with pytest.raises(RequestTimeout):
        channel.get(timeout=0)
    assert channel.get_nowait() is None


@pytest.mark.parametrize("end", ["unsubscribe", "channel", "broker", "delete"])
def test_whoever_waits_is_woken(end: str) -> None:
    """By ``unsubscribe``, by closing the channel or the broker, and when the topic is deleted."""
    broker = Broker()
    channel = broker.subscribe("events")
    waiters = [in_thread(channel.get) for _ in range(3)]
    until(lambda: channel._sleepers == 3)
    match end:
        case "unsubscribe":
            broker.unsubscribe("events")
        case "channel":
            channel.close()
            channel.close()
        case "broker":
            broker.close()
        case "delete":
            broker.delete_topic("events")
            assert not channel.is_closed  # it may come back
            channel.close()
    for thread, results in waiters:
        joined(thread)
        assert isinstance(results[0], Closed)
    broker.close()


def test_a_channel_holds_a_hundred(broker: Broker) -> None:
    """Its capacity bounds it; the rest waits in the log and comes when there is room."""
    channel = broker.subscribe("events")
    assert channel.capacity == 100
    broker.publish_many("events", [b"%d" % n for n in range(1000)])
    until(lambda: len(channel) == 100)
    time.sleep(0.01)
    assert len(channel) == 100
    assert [int(channel.get(WAIT).value) for _ in range(1000)] == list(range(1000))
    small = broker.subscribe("events", capacity=1)
    broker.publish_many("events", [b"a", b"b", b"c"])
    assert [small.get(WAIT).value for _ in range(3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("bad", [0, -1, 1.5, "1", True, None])
def test_a_capacity_is_a_number(memory: Broker, bad: Any) -> None:
    """Anything else is refused, and so is a prefetch."""
    with pytest.raises(InvalidArgument):
        memory.subscribe("events", capacity=bad)
    with pytest.raises(InvalidArgument):
        memory.subscription("group", "events", prefetch=bad)


def test_wildcards(memory: Broker) -> None:
    """One channel over topics that are not there yet."""
    channel = memory.subscribe("orders.>")
    memory.publish("orders.eu.west", b"1")
    memory.publish("users", b"2")
    memory.publish("orders.us", b"3")
    assert [channel.get(WAIT).value for _ in range(2)] == [b"1", b"3"]
    assert channel.get_nowait() is None


def test_without_a_directory_a_broadcast_goes_on_for_ever(memory: Broker) -> None:
    """Plain subscribers alone do not fill a topic in memory."""
    channel = memory.subscribe("ticks", capacity=50_000)
    for _ in range(30):
        memory.publish_many("ticks", [b"x"] * 1000)
    for _ in range(30_000):
        channel.get(WAIT)


def test_a_plain_message_cannot_be_settled(broker: Broker) -> None:
    """There is nothing to acknowledge, and the error says what to use instead."""
    channel, consumer = broker.subscribe("events"), broker.subscription("group", "events")
    broker.publish("events", b"x")
    plain = channel.get(WAIT)
    for settle in (plain.ack, plain.nack, plain.extend, lambda: consumer.ack(plain)):
        with pytest.raises(Closed) as caught:
            settle()
        assert caught.value.code == "not_a_delivery"


# --- subscriptions --------------------------------------------------------------------------------
def test_a_subscription_is_durable(tmp_path: Path) -> None:
    """Acknowledged messages do not come again, in the next process either; ``close`` flushes."""
    with Broker.open(tmp_path) as broker:
        consumer = broker.subscription("billing", "orders")
        for number in range(10):
            broker.publish("orders", b"%d" % number)
        for _ in range(7):
            consumer.get(WAIT).ack()
    with Broker.open(tmp_path) as broker:
        consumer = broker.subscription("billing", "orders")
        assert [consumer.get(WAIT).value for _ in range(3)] == [b"7", b"8", b"9"]


def test_ack_nack_and_dead_letters(broker: Broker) -> None:
    """A message that fails comes again with its attempt; after the last one it is a dead letter."""
    consumer = broker.subscription("billing", "orders", max_deliveries=2, backoff=0.001)
    broker.publish("orders", b"poison", {"a": "b"})
    first = consumer.get(WAIT)
    assert (first.attempt, first.retry_count) == (1, 0)
    first.nack(reason="no")
    second = consumer.get(WAIT)
    assert second.attempt == 2
    second.nack(delay=0, reason="no, really")
    until(lambda: broker.subscription_stats("billing")["dead_lettered"] == 1)
    (letter,) = broker.dead_letters("billing")
    assert (letter.message.value, letter.reason) == (b"poison", "no, really")
    new = broker.edit_dead_letter("billing", letter.offset, value=b"cured")
    assert broker.redrive("billing", offsets=[new])["redriven"] == 1
    cured = consumer.get(WAIT)
    published = {"headrace-origin-timestamp": str(letter.message.timestamp)}
    assert (cured.value, cured.headers) == (b"cured", {"a": "b"} | published)
    cured.ack()
    broker.flush()
    assert broker.subscription_stats("billing")["lag"] == 0
    assert broker.purge_dead_letters("billing") == 0


def test_a_stale_settlement_is_refused(broker: Broker) -> None:
    """What has timed out, or was settled, cannot be settled again."""
    consumer = broker.subscription("billing", "orders", ack_timeout=0.01, backoff=0.0)
    broker.publish("orders", b"x")
    first = consumer.get(WAIT)
    second = consumer.get(WAIT)
    with pytest.raises(StaleDelivery):
        first.ack()
    second.extend(60)
    second.ack()
    broker.flush()
    with pytest.raises(StaleDelivery):
        second.ack()


def test_what_timed_out_in_the_channel_is_not_handed_out(broker: Broker) -> None:
    """A slow reader gets the delivery that counts, not the one whose ack would be refused."""
    consumer = broker.subscription(
        "billing", "orders", ack_timeout=0.05, backoff=0.0, max_deliveries=0
    )
    broker.publish_many("orders", [b"a", b"b"])
    until(lambda: broker.subscription_stats("billing")["timeouts"] >= 4)
    broker.create_subscription("billing", "orders", ack_timeout=60.0)
    until(lambda: broker.subscription_stats("billing")["in_flight"] == 2)
    time.sleep(0.1)
    for value in (b"a", b"b"):
        message = consumer.get(WAIT)
        assert (message.value, message.attempt > 2) == (value, True)
        message.ack()
    broker.flush()
    assert broker.subscription_stats("billing")["lag"] == 0


@pytest.mark.parametrize("bad", [-1, float("nan"), "soon", True])
def test_bad_delays_are_refused_where_they_are_given(broker: Broker, bad: Any) -> None:
    """In the caller's thread, at once, and the message is still his."""
    consumer = broker.subscription("billing", "orders")
    broker.publish("orders", b"x")
    message = consumer.get(WAIT)
    for settle in (lambda: message.nack(delay=bad), lambda: message.extend(bad)):
        with pytest.raises(InvalidArgument):
            settle()
    with pytest.raises(InvalidArgument):
        message.nack(reason=7)  # type: ignore[arg-type]
    message.ack()
    broker.flush()
    assert broker.subscription_stats("billing")["acked"] == 1


def test_closing_a_consumer_gives_back_what_it_has_not_begun(broker: Broker) -> None:
    """What it took counts as an attempt, what only lay in its channel does not."""
    first = broker.subscription("billing", "orders")
    broker.publish_many("orders", [b"a", b"b", b"c"])
    assert first.get(WAIT).value == b"a"
    until(lambda: len(first) == 2)
    first.close()
    second = broker.subscription("billing", "orders")
    found = {message.value: message.attempt for message in (second.get(WAIT) for _ in range(3))}
    assert found == {b"a": 2, b"b": 1, b"c": 1}


def test_members_share(broker: Broker) -> None:
    """Two consumers of one group get each message once between them."""
    consumers = [broker.subscription("billing", "orders") for _ in range(2)]
    broker.publish_many("orders", [b"%d" % n for n in range(100)])
    seen: Counter[bytes] = Counter()
    for consumer in consumers:
        for _ in range(50):
            message = consumer.get(WAIT)
            seen[message.value] += 1
            message.ack()
    assert len(seen) == 100
    assert set(seen.values()) == {1}


def test_many_acks_at_once(broker: Broker) -> None:
    """A list, or everything up to one."""
    consumer = broker.subscription("billing", "orders")
    broker.publish_many("orders", [b"x"] * 10)
    messages = [consumer.get(WAIT) for _ in range(10)]
    consumer.ack_many(messages[:3])
    consumer.ack_up_to(messages[7])
    broker.flush()
    assert broker.subscription_stats("billing")["lag"] == 2


def test_moving_and_looking(broker: Broker) -> None:
    """Seek to an offset, a time and an end; statistics by name; deleting ends the consumer."""
    consumer = broker.subscription("billing", "orders", ack_timeout=60)
    broker.publish("orders", b"0", timestamp=1_000)
    broker.publish("orders", b"1", timestamp=61_000)
    for _ in range(2):
        consumer.get(WAIT).ack()
    broker.seek("billing", 1)
    assert consumer.get(WAIT).value == b"1"
    broker.seek("billing", datetime.fromtimestamp(1, UTC) - timedelta(seconds=1))
    assert consumer.get(WAIT).value == b"0"
    broker.seek("billing", "latest")
    assert broker.subscription_stats("billing")["lag"] == 0
    assert [s["name"] for s in broker.subscriptions()] == ["billing"]
    assert broker.topic_stats("orders")["messages"] == 2
    broker.delete_subscription("billing")
    with pytest.raises(SubscriptionNotFound):
        consumer.get(WAIT)
    with pytest.raises(SubscriptionNotFound):
        broker.seek("billing", 0)


def test_a_deleted_topic_ends_its_consumers(broker: Broker) -> None:
    """They hear why; closing them afterwards is no mistake, and nothing is remembered of them."""
    consumer = broker.subscription("billing", "orders")
    thread, results = in_thread(lambda: list(consumer))
    until(lambda: consumer._sleepers == 1)
    broker.delete_topic("orders")
    joined(thread)
    assert isinstance(results[0], TopicNotFound)
    consumer.close()
    broker.subscribe("other")
    assert consumer not in broker._channels


# --- the rest of the API --------------------------------------------------------------------------
def test_topics(broker: Broker) -> None:
    """Made, listed, changed, deleted; the broker's own are not listed."""
    broker.create_topic("orders", partitions=2)
    broker.publish("later", b"x", delay=3600)
    assert broker.topics() == ["orders"]
    broker.change_topic("orders", partitions=3)
    assert len(broker.topic_stats("orders")["partitions"]) == 3
    broker.delete_topic("orders")
    assert broker.topics() == []
    with pytest.raises(TopicNotFound):
        broker.topic_stats("orders")


def test_reading_by_offset(broker: Broker) -> None:
    """Messages, values and whole batches; from an offset, a time, an end; from any thread."""
    broker.publish_many("orders", [b"%d" % n for n in range(50)], keys=["k"] * 50)
    receipt = broker.publish("orders", b"last")
    assert [m.value for m in broker.fetch("orders", 48)] == [b"48", b"49", b"last"]
    assert len(broker.fetch("orders", limit=7)) == 7
    assert broker.fetch("orders", "latest") == []
    assert broker.fetch_values("orders", 50) == [b"last"]
    assert sum(batch.count for batch in broker.fetch_batches("orders")) == 51
    assert broker.find(receipt.id).value == b"last"
    with pytest.raises(HeadraceError) as caught:
        broker.fetch("orders", 52)
    assert caught.value.code == "offset_out_of_range"
    for bad in (-1, "newest", 1.5, None, True):
        with pytest.raises(InvalidArgument):
            broker.fetch("orders", bad)  # type: ignore[arg-type]
    for bad_limit in (0, -1, "3", True):
        with pytest.raises(InvalidArgument):
            broker.fetch("orders", limit=bad_limit)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            broker.fetch_values("orders", max_bytes=bad_limit)  # type: ignore[arg-type]
    for bad_partition in (1, -1, "0", False, 1.5):
        with pytest.raises(InvalidArgument):
            broker.fetch("orders", partition=bad_partition)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        broker.fetch("orders", datetime.min)
    with pytest.raises(TopicNotFound):
        broker.fetch("nothing")


def test_reading_from_memory(memory: Broker) -> None:
    """The same calls on a topic that is in no file."""
    memory.publish_many("orders", [b"a", b"b"])
    assert [m.value for m in memory.fetch("orders")] == [b"a", b"b"]
    assert memory.fetch_values("orders", 1) == [b"b"]
    assert memory.fetch_batches("orders")[0].count == 2


def test_delayed_messages(broker: Broker) -> None:
    """Listed, cancelled, and published in their time."""
    channel = broker.subscribe("orders")
    later = broker.publish("orders", b"later", delay=3600)
    broker.publish("orders", b"soon", delay=0.02)
    assert [s.id for s in broker.scheduled("orders")][-1] == later.id
    broker.cancel(later.id)
    assert channel.get(WAIT).value == b"soon"
    assert broker.scheduled() == []
    with pytest.raises(HeadraceError) as caught:
        broker.cancel(str(later.id))
    assert caught.value.code == "not_scheduled"


def test_idempotent_publishing(broker: Broker) -> None:
    """By a producer's sequence or by a key of one's own."""
    producer, epoch = broker.producer("importer")
    for _ in range(3):
        receipt = broker.publish("orders", b"x", producer=(producer, epoch, 0))
    assert receipt.duplicate
    for _ in range(3):
        receipt = broker.publish("orders", b"y", idempotency_key="order 17")
    assert receipt.duplicate
    assert broker.fetch_values("orders") == [b"x", b"y"]
    with pytest.raises(InvalidArgument):
        broker.publish("orders", b"z", idempotency_key="")
    with pytest.raises(InvalidArgument):
        broker.publish("orders", b"z", idempotency_key="a", producer=(1, 0, 0))


def test_options_of_the_broker(tmp_path: Path) -> None:
    """Some are the broker's, the rest are defaults of topics; an unknown one is refused."""
    before = threading.active_count()
    with Broker(auto_create_topics=False, max_message_size=10, partitions=4) as broker:
        with pytest.raises(TopicNotFound):
            broker.publish("orders", b"x")
        broker.create_topic("orders")
        assert len(broker.topic_stats("orders")["partitions"]) == 4
        with pytest.raises(InvalidArgument) as caught:
            broker.publish("orders", b"x" * 11)
        assert caught.value.code == "message_too_large"
    for bad in (
        {"colour": 1},
        {"max_message_size": 0},
        {"max_message_size": "1"},
        {"partitions": 0},
    ):
        with pytest.raises(InvalidArgument):
            Broker(**bad)
    assert threading.active_count() < before + 20


def test_two_brokers_on_one_directory(tmp_path: Path) -> None:
    """The second is refused and leaves no thread behind; after ``close`` it may."""
    with Broker.open(tmp_path):
        before = threading.active_count()
        with pytest.raises(DirectoryLocked):
            Broker.open(tmp_path)
        assert threading.active_count() == before
    Broker.open(tmp_path).close()


# --- the end ------------------------------------------------------------------------------------------
def test_after_close_everything_says_so(tmp_path: Path) -> None:
    """Twice is no mistake; any other call is ``Closed``; a held message cannot be settled."""
    broker = Broker.open(tmp_path)
    consumer, channel = broker.subscription("group", "work"), broker.subscribe("work")
    broker.publish("work", b"x")
    message = consumer.get(WAIT)
    broker.close()
    broker.close()
    calls: list[Callable[[], Any]] = [
        lambda: broker.publish("work", b"y"),
        lambda: broker.publish_many("work", [b"y"]),
        lambda: broker.subscribe("work"),
        lambda: broker.subscription("group", "work"),
        lambda: broker.fetch("work"),
        lambda: broker.topics(),
        lambda: broker.flush(),
        lambda: broker.producer(),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()
    with pytest.raises(StaleDelivery):
        message.ack()
    for closed in (consumer, channel):
        assert isinstance(closed, Channel)
        closed.close()


def test_not_from_its_own_thread(memory: Broker) -> None:
    """A call that would wait for the thread it runs in is refused instead of standing still."""
    answers: list[Any] = []

    def call() -> None:
        for work in (lambda: memory.publish("work", b"x"), lambda: memory.topics()):
            try:
                work()
            except InvalidArgument as error:
                answers.append(error)

    memory._call(call)
    until(lambda: len(answers) == 2)


def test_a_full_queue_is_told_to_the_publisher(memory: Broker) -> None:
    """Past the bound of a topic in memory a publish is refused, retryable."""
    memory.publish_many("work", [b"x"] * 10_000)
    with pytest.raises(QueueFull) as caught:
        memory.publish("work", b"x")
    assert caught.value.retryable


def test_a_failed_sync_reaches_every_thread(tmp_path: Path) -> None:
    """Publishers get an unknown outcome, readers hear that it is over, ``close`` still works."""
    files = FaultyFiles()
    broker = Broker.open(tmp_path, files=files)
    broker.publish("work", b"first")
    consumer, channel = broker.subscription("group", "work"), broker.subscribe("work")
    consumer.get(WAIT)
    waiter, results = in_thread(channel.get)
    until(lambda: channel._sleepers == 1)
    files.fail("sync", 1, name=".log")
    with pytest.raises(OutcomeUnknown):
        broker.publish("work", b"second")
    joined(waiter)
    assert isinstance(results[0], BrokerFailed)
    with pytest.raises(BrokerFailed):
        consumer.get(WAIT)
    with pytest.raises(BrokerFailed):
        broker.publish("work", b"third")
    broker.close()
    with Broker.open(tmp_path) as again:
        assert again.fetch_values("work")[0] == b"first"


def test_a_program_that_ends_without_closing_keeps_its_acks(tmp_path: Path) -> None:
    """They are written a moment later, and that moment it gets."""
    script = """
import sys
from headrace import Broker
broker = Broker(sys.argv[1])
broker.publish_many("orders", [b"%d" % number for number in range(100)])
member = broker.subscription("billing", "orders")
for _ in range(100):
    member.get(10).ack()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    with Broker(tmp_path) as broker:
        assert broker.subscription_stats("billing", "orders")["lag"] == 0
