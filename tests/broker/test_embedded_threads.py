"""``Broker`` used by many threads at once, also while it is closed. Every wait has a bound."""

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace import Broker
from headrace.broker.channel import EmbeddedConsumer
from headrace.errors import (
    Closed,
    RequestTimeout,
    StaleDelivery,
)
from tests.broker.test_embedded import WAIT, in_thread, joined, until


def test_many_threads_at_once(tmp_path: Path) -> None:
    """Eight publishers, four consumers and two followers: everything arrives, each once per group."""
    each, publishers = 300, 8
    total = each * publishers
    with Broker.open(tmp_path, durability="never") as broker:
        consumers = [broker.subscription("group", "work", prefetch=50) for _ in range(4)]
        followers = [broker.subscribe("work") for _ in range(2)]
        counted: list[Counter[bytes]] = [Counter() for _ in range(4)]
        followed: list[list[bytes]] = [[], []]
        done = threading.Event()

        def publish(number: int) -> None:
            for n in range(each):
                broker.publish("work", b"%d-%d" % (number, n))

        def consume(number: int) -> None:
            while not done.is_set():
                try:
                    message = consumers[number].get(timeout=0.05)
                except RequestTimeout:
                    continue
                counted[number][message.value] += 1
                message.ack()

        def follow(number: int) -> None:
            while len(followed[number]) < total:
                followed[number].append(followers[number].get(WAIT).value)

        with ThreadPoolExecutor(publishers + 6) as pool:
            tasks = [pool.submit(consume, number) for number in range(4)]
            readers = [pool.submit(follow, number) for number in range(2)]
            for task in [pool.submit(publish, number) for number in range(publishers)]:
                task.result(WAIT)
            for task in readers:
                task.result(WAIT)
            until(lambda: broker.subscription_stats("group")["lag"] == 0)
            done.set()
            for task in tasks:
                task.result(WAIT)
        assert sum(counted, Counter()) == Counter(
            b"%d-%d" % (p, n) for p in range(publishers) for n in range(each)
        )
        assert all(len(count) for count in counted)
        assert followed[0] == followed[1] == broker.fetch_values("work")


def test_closing_while_everybody_works(tmp_path: Path) -> None:
    """Every call in another thread ends: done, or ``Closed``; what was answered is stored."""
    for number in range(5):
        directory = tmp_path / str(number)
        broker = Broker.open(directory)
        stored: list[bytes] = []

        def publish(name: str, broker: Broker = broker, stored: list[bytes] = stored) -> None:
            n = 0
            while True:
                value = f"{name}-{n}".encode()
                broker.publish("work", value)
                stored.append(value)
                n += 1

        def consume(broker: Broker = broker) -> None:
            consumer = broker.subscription("group", "work")
            while True:
                consumer.get().ack()

        def ask(broker: Broker = broker) -> None:
            while True:
                broker.topics()
                broker.flush()
                broker.subscribe("work").close()

        running = [in_thread(lambda name=name: publish(name)) for name in "abc"]  # type: ignore[misc]
        running += [in_thread(work) for work in (consume, consume, ask)]
        until(lambda stored=stored: len(stored) > 20)  # type: ignore[misc]
        with contextlib.suppress(StaleDelivery):
            broker.close()  # it reports an ack that came too late, because nobody waited for it
        for thread, ends in running:
            joined(thread)
            assert isinstance(ends[0], (Closed, StaleDelivery)), ends
        with Broker.open(directory) as again:
            assert set(stored) <= set(again.fetch_values("work"))


def test_closing_a_consumer_while_it_is_read(tmp_path: Path) -> None:
    """A consumer closed under the hands of its reader: nothing raises there, nothing is lost. An ack that came too late is
    reported at the end, because nobody waited for it."""
    with (
        contextlib.suppress(StaleDelivery),
        Broker.open(tmp_path, durability="never") as broker,
    ):
        broker.publish_many("work", [b"%d" % n for n in range(2000)])
        seen: set[bytes] = set()
        while len(seen) < 2000:
            consumer = broker.subscription("group", "work", prefetch=300, backoff=0.0)

            def read(consumer: EmbeddedConsumer = consumer) -> None:
                for message in consumer:
                    try:
                        message.ack()
                    except StaleDelivery:
                        return
                    seen.add(message.value)

            thread, results = in_thread(read)
            before = len(seen)
            until(lambda before=before: len(seen) > before or len(seen) == 2000)  # type: ignore[misc]
            consumer.close()
            joined(thread)
            assert results == [None]
        until(lambda: broker.subscription_stats("group")["lag"] == 0)


def test_a_long_call_ends_with_the_broker(tmp_path: Path) -> None:
    """A redrive that would take an hour does not keep ``close``, nor its own caller, waiting."""
    broker = Broker.open(tmp_path)
    consumer = broker.subscription("group", "work", max_deliveries=1)
    broker.publish_many("work", [b"x"] * 20)
    for _ in range(20):
        consumer.get(WAIT).nack()
    until(lambda: broker.subscription_stats("group")["dead_lettered"] == 20)
    thread, results = in_thread(lambda: broker.redrive("group", rate=0.01))
    until(lambda: len(broker.dead_letters("group")) < 20)
    broker.close()
    joined(thread)
    assert isinstance(results[0], Closed)
