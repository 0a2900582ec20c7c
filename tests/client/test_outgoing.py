"""Plain publishes: gathered in bundles, and each with a result of its own."""

import threading
from typing import Any

import pytest

from headrace.client import outgoing as outgoing_module
from headrace.client.outgoing import Bundle, BundledPublication, PublishQueue
from headrace.errors import Closed, Conflict, InvalidArgument, QueueFull, RequestTimeout
from headrace.model import Receipt
from headrace.partitioning import partition_of_key
from headrace.publication import Failures, Publication
from tests.client.rig import Request, Rig, run


class Client:
    """A rig's producer with bundles in front of it."""

    def __init__(self, rig: Rig | None = None, *, may_wait: Any = lambda: False):
        self.rig = rig
        self.woken = 0
        self.failures = Failures()
        self.outgoing: PublishQueue[Publication] = PublishQueue(
            self._wake, BundledPublication, self.failures, 1000, may_wait
        )

    def _wake(self) -> None:
        self.woken += 1

    def publish(self, value: object, key: object = None, topic: str = "orders") -> Publication:
        return self.outgoing.add(topic, value, key, 1 << 20)

    def hand_over(self) -> None:
        assert self.rig is not None
        self.outgoing.hand_over(self.rig.producer.publish)


def values(requests: list[Request]) -> list[list[bytes]]:
    return [request.values for request in requests]


# --- gathering ------------------------------------------------------------------------------------
@run
async def test_a_plain_loop_is_one_batch_and_each_message_has_its_receipt() -> None:
    """The loop is woken once; text and JSON are taken as by any publish."""
    rig = Rig()
    client = Client(rig)
    publications = [client.publish(value) for value in (b"a", "b", {"c": 1})]
    assert client.woken == 1
    client.hand_over()
    request = await rig.one()
    assert request.values == [b"a", b"b", b'{"c":1}']
    assert not any(each.done() for each in publications)
    request.store(7)
    assert [each.offset for each in publications] == [7, 8, 9]
    assert [each.result().count for each in publications] == [1, 1, 1]
    client.publish(b"d")
    assert client.woken == 2


@run
async def test_a_bundle_ends_where_a_batch_does() -> None:
    """And one message for each topic is no other bundle's."""
    rig = Rig()
    client = Client(rig)
    for number in range(4):
        client.publish(b"%d" % number + bytes(499))
        client.publish(b"x", topic="users")
    client.hand_over()
    found = sorted((each.topic, len(each.values)) for each in await rig.sent())
    assert found == [("orders", 2), ("orders", 2), ("users", 4)]


@run
async def test_publications_do_not_keep_the_values() -> None:
    """A program that keeps a million publications keeps no messages."""
    rig = Rig()
    client = Client(rig)
    publication: Any = client.publish(b"a" * 900)
    client.hand_over()
    assert publication._bundle.rows == []


@run
async def test_a_callback_that_raises_concerns_no_other_message() -> None:
    """It is called where the answers of all come in."""
    rig = Rig()
    client = Client(rig)
    publications = [client.publish(b"%d" % number) for number in range(3)]
    for each in publications[:2]:
        each.add_done_callback(lambda each: 1 // 0)
    client.hand_over()
    (await rig.one()).store(10)
    assert [each.offset for each in publications] == [10, 11, 12]
    assert client.outgoing.is_idle
    assert rig.producer.is_idle
    publications[2].add_done_callback(lambda each: 1 // 0)


@run
async def test_other_publishes_keep_their_place() -> None:
    """A publish with options comes after the plain ones before it and before those after it."""
    rig = Rig()
    client = Client(rig)
    told: list[str] = []
    client.publish(b"a")
    client.outgoing.put("orders", lambda: told.append("between"), lambda *_: None)
    client.publish(b"b")
    order: list[Any] = []
    client.outgoing.hand_over(
        lambda topic, columns, partition, done: order.append((list(columns.values), list(told)))
    )
    assert order == [([b"a"], []), ([b"b"], ["between"])]


@run
async def test_the_handler_of_a_signal_may_publish() -> None:
    """Also when it interrupts a publish: nothing hangs, and each has its own receipt."""
    rig = Rig()
    client = Client(rig)
    inner: list[Publication] = []

    def handle(bundle: Bundle, number: int) -> Publication:
        if not inner:
            inner.append(None)  # type: ignore[arg-type]
            inner[0] = client.publish(b"inner")
        return BundledPublication(bundle, number)

    client.outgoing._handle = handle
    outer = client.publish(b"outer")
    client.hand_over()
    for _ in range(2):
        for request in await rig.sent():
            request.store(10 if request.values == [b"outer"] else 20)
    assert (outer.offset, inner[0].offset) == (10, 20)


@run
async def test_an_interrupt_before_the_loop_is_woken_is_made_up_for() -> None:
    """The publish after it wakes the loop; else nothing would ever leave again."""
    for is_plain in (True, False):
        client = Client()
        wake, interrupts = client._wake, [KeyboardInterrupt()]

        def interrupted(wake: Any = wake, interrupts: list[BaseException] = interrupts) -> None:
            if interrupts:
                raise interrupts.pop()
            wake()

        client.outgoing._wake = interrupted

        def publish(client: Client = client, is_plain: bool = is_plain) -> None:
            if is_plain:
                client.publish(b"x")
            else:
                client.outgoing.put("orders", lambda: None, lambda *_: None)

        with pytest.raises(KeyboardInterrupt):
            publish()
        publish()
        publish()
        assert client.woken == 1


# --- keys -----------------------------------------------------------------------------------------
@run
async def test_a_bundle_with_keys_is_cut_by_partition() -> None:
    """Each message gets the receipt of its own partition, in the order of its key."""
    rig = Rig()
    rig.partitions["orders"] = 3
    client = Client(rig)
    keys = [b"k%d" % (number % 5) for number in range(12)]
    publications = [client.publish(b"%d" % n, key) for n, key in enumerate(keys)]
    client.hand_over()
    for request in await rig.sent():
        assert [int(value) for value in request.values] == sorted(map(int, request.values))
        assert all(partition_of_key(keys[int(v)], 3) == request.partition for v in request.values)
        request.store(100 * request.partition)
    seen: dict[int, int] = {}
    for key, publication in zip(keys, publications, strict=True):
        partition = partition_of_key(key, 3)
        place = seen[partition] = seen.get(partition, -1) + 1
        assert (publication.partition, publication.offset) == (partition, 100 * partition + place)


@run
async def test_after_partitions_were_added_a_bundle_is_cut_again() -> None:
    """By the new number; nothing is stored twice, and no result is lost."""
    rig = Rig()
    client = Client(rig)
    publications = [client.publish(b"%d" % n, b"k%d" % n) for n in range(6)]
    client.hand_over()
    first = await rig.one()
    rig.partitions["orders"] = 4
    first.refuse(Conflict("there are 4 partitions now", code="partitions_changed"))
    requests = await rig.sent()
    assert sorted(value for each in requests for value in each.values) == first.values
    for request in requests:
        assert request.planned_on == 4
        request.store(0)
    assert [each.partition for each in publications] == [
        partition_of_key(b"k%d" % n, 4) for n in range(6)
    ]


# --- errors ---------------------------------------------------------------------------------------
@run
async def test_one_invalid_message_does_not_fail_the_others() -> None:
    """A refused bundle is cut into halves until the invalid message is alone."""
    rig = Rig()
    client = Client(rig)
    publications = [client.publish(b"bad" if n == 5 else b"%d" % n) for n in range(9)]
    client.hand_over()
    offset = 0
    for _ in range(20):
        for request in await rig.sent():
            if b"bad" in request.values:
                request.refuse(InvalidArgument("not this one"))
            else:
                request.store(offset)
                offset += len(request.values)
    with pytest.raises(InvalidArgument, match="not this one"):
        publications[5].result()
    good = [each for number, each in enumerate(publications) if number != 5]
    assert [each.offset for each in good] == list(range(8))


@run
async def test_errors_that_nobody_asks_for_are_kept_each_by_itself() -> None:
    """``flush`` and ``close`` raise them; one that was asked for is not among them."""
    rig = Rig()
    client = Client(rig)
    publications = [client.publish(b"%d" % n) for n in range(3)]
    client.hand_over()
    heard: list[Any] = []
    publications[0].add_done_callback(heard.append)
    with pytest.raises(RequestTimeout):
        publications[1].result(timeout=0)
    (await rig.one()).refuse(Conflict("no"))
    publications[2].add_done_callback(heard.append)
    assert heard == [publications[0], publications[2]]
    with pytest.raises(Conflict):
        publications[1].result()
    error = client.failures.take()
    assert error is not None
    assert error.__notes__ == ["nobody waited for it (and 1 more failed)"]


def test_a_wrong_argument_is_refused_at_once() -> None:
    """Before anything is gathered; the next message is taken."""
    client = Client()
    for topic in (b"orders", "a/b", ["orders"]):
        with pytest.raises(InvalidArgument):
            client.publish(b"x", topic=topic)  # type: ignore[arg-type]
    for value in (7, bytes((1 << 20) + 1)):
        with pytest.raises(InvalidArgument):
            client.publish(value)
    with pytest.raises(InvalidArgument):
        client.publish(b"x", key=7)
    client.publish(b"x")


def test_what_is_left_when_a_client_closes_fails() -> None:
    """And what comes later is refused."""
    client = Client()
    publication = client.publish(b"x")
    told: list[Any] = []
    client.outgoing.put("orders", lambda: None, lambda *answer: told.append(answer[1]))
    client.outgoing.close()
    with pytest.raises(Closed):
        publication.result()
    assert isinstance(told[0], Closed)
    with pytest.raises(Closed):
        client.publish(b"y")


# --- bounds ---------------------------------------------------------------------------------------
@run
async def test_where_nobody_may_wait_too_much_is_refused() -> None:
    """As a result, like every error that comes later; there is room again when something is stored."""
    rig = Rig()
    client = Client(rig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgoing_module, "BUFFER_BYTES_MAX", 1000)
        first, second = client.publish(bytes(900)), client.publish(bytes(900))
        client.hand_over()
        with pytest.raises(QueueFull) as caught:
            second.result(1)
        assert caught.value.code == "client_buffer_full"
        (await rig.one()).store(0)
        assert first.offset == 0
        third = client.publish(bytes(900))
        client.hand_over()
        (await rig.one()).store(1)
        assert third.offset == 1


def test_a_thread_waits_until_half_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop that is faster than the broker is slowed down, and nothing fails."""
    monkeypatch.setattr(outgoing_module, "BUFFER_BYTES_MAX", 1000)
    asked = threading.Event()

    def may_wait() -> bool:
        asked.set()
        return True

    client = Client(may_wait=may_wait)
    client.publish(bytes(900))
    handed: list[Any] = []
    client.outgoing.hand_over(lambda topic, columns, partition, done: handed.append(done))
    waiting = threading.Thread(target=client.publish, args=(bytes(901),))
    waiting.start()
    assert asked.wait(10)
    handed[0](Receipt("orders", 0, 0, 0), None)
    waiting.join(10)
    assert not waiting.is_alive()
    client.outgoing.hand_over(lambda topic, columns, partition, done: handed.append(columns))
    assert len(handed[1].values[0]) == 901
