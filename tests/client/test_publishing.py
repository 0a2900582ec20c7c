"""Publishing with real clients against a real server."""

import asyncio
import gc
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.client import outgoing
from headrace.errors import (
    Closed,
    HeadraceError,
    InvalidArgument,
    QueueFull,
    RequestTimeout,
    TooLarge,
    TopicNotFound,
)
from headrace.testing import RunningServer, running_server, wait_until


def stored_batches(client: BrokerClient, topic: str = "orders") -> list[int]:
    """How many messages each batch of the log has."""
    counts: list[int] = []
    while found := client.fetch_batches(topic, sum(counts), max_bytes=1):
        counts += [batch.count for batch in found]
    return counts


def test_many_publishes_become_few_batches(client: BrokerClient) -> None:
    """Without anybody asking for it: what is published while a batch is under way joins the next."""
    publications = [client.publish_nowait("orders", b"%d" % number) for number in range(5000)]
    assert [p.result(10).offset for p in publications] == list(range(5000))
    counts = stored_batches(client)
    assert sum(counts) == 5000
    assert len(counts) < 250, f"{len(counts)} batches"


def test_publishes_that_run_at_once_become_few_batches(server: RunningServer) -> None:
    """The same with asyncio, where each publish is awaited."""

    async def main() -> list[int]:
        async with AsyncClient(*server.address) as client:
            receipts = await asyncio.gather(
                *(client.publish_nowait("orders", b"%d" % number) for number in range(3000))
            )
            assert [receipt.offset for receipt in receipts] == list(range(3000))
            return [
                batch.count for batch in await client.fetch_batches("orders", max_bytes=64 << 20)
            ]

    counts = asyncio.run(main())
    assert sum(counts) == 3000
    assert len(counts) < 150


def test_linger_gathers_what_comes_one_by_one(server: RunningServer) -> None:
    """Publishes that are made one after the other travel together, if they are given the time."""
    with server.client(linger=0.3) as client:
        client.publish("orders", b"first")  # the number of partitions is known now
        publications = [client.publish_nowait("orders", b"%d" % number) for number in range(50)]
        for publication in publications:
            publication.result(10)
        assert stored_batches(client) == [1, 50]


def test_a_flush_does_not_wait_for_linger(server: RunningServer) -> None:
    """Somebody wants to know now."""
    with server.client(linger=60) as client:
        publication = client.publish_nowait("orders", b"x")
        client.flush()
        assert publication.done()
        assert publication.result(0).offset == 0


def test_many_at_once_keep_their_order(client: BrokerClient) -> None:
    """publish_many of more than one batch, more than one piece."""
    values = [b"%d" % number for number in range(25_000)]
    receipts = client.publish_many("orders", values)
    assert sum(receipt.count for receipt in receipts) == 25_000
    assert client.fetch_values("orders", max_bytes=64 << 20) == values


def test_many_at_once_go_to_the_partitions_of_their_keys(client: BrokerClient) -> None:
    """As single ones would."""
    client.create_topic("orders", partitions=4)
    keys = [f"customer-{number % 10}" for number in range(1000)]
    receipts = client.publish_many("orders", keys, keys=keys)
    assert sum(receipt.count for receipt in receipts) == 1000
    single = {key: client.publish("orders", b"x", key=key).partition for key in set(keys)}
    for partition in range(4):
        for message in client.fetch("orders", partition=partition, limit=2000):
            assert message.key is not None
            assert single[message.key.decode()] == partition


def test_large_messages_travel(client: BrokerClient) -> None:
    """As large as the broker takes them, one behind the other."""
    values = [bytes([number]) * (1 << 20) for number in range(8)]
    publications = [client.publish_nowait("orders", value) for value in values]
    assert [p.result(20).offset for p in publications] == list(range(8))
    assert client.fetch("orders", 7)[0].value == values[7]


# --- errors ---------------------------------------------------------------------------------------
def test_a_flush_raises_what_nobody_waited_for(client: BrokerClient) -> None:
    """Once; an error that somebody has seen is not raised again."""
    client.publish_nowait("orders", b"fine")
    client.publish_nowait("orders", b"x", partition=7)
    with pytest.raises(InvalidArgument, match="no partition 7"):
        client.flush()
    client.flush()
    seen = client.publish_nowait("orders", b"x", partition=7)
    with pytest.raises(InvalidArgument):
        seen.result(10)
    client.flush()
    late = client.publish_nowait("orders", b"x", partition=7)
    wait_until(late.done)
    with pytest.raises(InvalidArgument):
        late.result(10)
    client.flush()


def test_a_flush_raises_also_what_went_by_itself(client: BrokerClient) -> None:
    """Delayed ones and those with an idempotency key do not travel in batches."""
    client.publish_nowait("orders", b"x", delay=5, partition=7)
    with pytest.raises(HeadraceError, match="no partition 7"):
        client.flush()


def test_a_callback_hears_of_success_and_of_failure(client: BrokerClient) -> None:
    """In the client's thread, once each; also when it comes late."""
    heard: list[tuple[bytes, bool]] = []

    def hear(value: bytes) -> None:
        publication = client.publish_nowait("orders", value, partition=0 if value == b"good" else 7)
        publication.add_done_callback(lambda p: heard.append((value, p._error is None)))

    hear(b"good")
    hear(b"bad")
    wait_until(lambda: len(heard) == 2)
    assert sorted(heard) == [(b"bad", False), (b"good", True)]
    done = client.publish_nowait("orders", b"x")
    done.result(10)
    done.add_done_callback(lambda p: heard.append((b"late", True)))
    assert heard[-1] == (b"late", True)
    with pytest.raises(HeadraceError):
        client.flush()


def test_one_message_too_large_does_not_take_the_others_along() -> None:
    """They were gathered with it, and are stored all the same, in order."""
    with running_server(max_message_size="1KB") as server, server.client(linger=0.2) as client:
        client.publish("orders", b"first")
        client._core.max_message_size = 1 << 20  # the broker's limit was higher a moment ago
        publications = {
            value: client.publish_nowait("orders", value)
            for value in (b"a", b"b", bytes(2000), b"c", bytes(3000), b"d")
        }
        for value, publication in publications.items():
            if len(value) > 1024:
                with pytest.raises(TooLarge) as caught:
                    publication.result(10)
                assert caught.value.code == "message_too_large"
            else:
                publication.result(10)
        values = [message.value for message in client.fetch("orders")]
        assert values == [b"first", b"a", b"b", b"c", b"d"]


def test_a_client_that_knows_the_limit_refuses_at_once(server: RunningServer) -> None:
    """max_message_size on the client's side: no way to the broker for nothing."""
    with server.client(max_message_size=100) as client, pytest.raises(TooLarge):
        client.publish_nowait("orders", bytes(101))


def test_a_full_queue_is_tried_again_until_there_is_room(client: BrokerClient) -> None:
    """A refusal that may pass is not the caller's trouble as long as it passes in time."""
    client.create_topic("orders", max_queue_size=3)
    member = client.subscription("billing", "orders")
    for _ in range(3):
        client.publish("orders", b"x")
    waiting = client.publish_nowait("orders", b"fourth")
    client.topics()
    assert not waiting.done()
    member.get(10).ack()
    assert waiting.result(10).offset == 3


def test_a_full_queue_that_stays_full_is_told(server: RunningServer) -> None:
    """After the delivery timeout, as what it is."""
    with server.client(delivery_timeout=3.0) as client:
        client.create_topic("orders", max_queue_size=1)
        client.create_subscription("billing", "orders")
        client.publish("orders", b"x")
        with pytest.raises(QueueFull) as caught:
            client.publish("orders", b"y")
        assert caught.value.code == "queue_full"
        client.publish("users", b"elsewhere")


def test_when_too_much_waits_it_is_refused_at_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer of a client has a bound; what fits is stored when the broker is back."""
    monkeypatch.setattr(outgoing, "BUFFER_BYTES_MAX", 100_000)
    with server.client() as client:
        client.publish("orders", b"first")
        server.stop()
        publications = [client.publish_nowait("orders", bytes(10_000)) for _ in range(20)]
        with pytest.raises(QueueFull) as caught:
            publications[-1].result(10)
        assert caught.value.code == "client_buffer_full"
        server.start()
        offsets = []
        for publication in publications:
            try:
                offsets.append(publication.result(10).offset)
            except QueueFull:
                continue
        assert offsets == list(range(1, len(offsets) + 1))
        assert len(offsets) == 9


def test_a_publish_ends_after_the_delivery_timeout(server: RunningServer) -> None:
    """Whether the topic is known already or not; the broker is away all the time."""
    with server.client(delivery_timeout=0.5, request_timeout=30) as client:
        client.publish("known", b"x")
        server.stop()
        for topic in ("known", "unknown"):
            with pytest.raises(RequestTimeout):
                client.publish(topic, b"x")


def test_waiting_for_a_publish_ends_when_one_wants(server: RunningServer) -> None:
    """The publish itself goes on."""
    with server.client() as client:
        client.publish("orders", b"x")
        server.stop()
        publication = client.publish_nowait("orders", b"y")
        with pytest.raises(RequestTimeout):
            publication.result(0.05)
        server.start()
        assert publication.result(10).offset == 1


# --- closing ----------------------------------------------------------------------------------------
def test_closing_sends_what_nobody_waited_for(server: RunningServer, client: BrokerClient) -> None:
    """Also what goes by itself, and what waits for others to go with it."""
    with server.client(linger=30) as other:
        for number in range(100):
            other.publish_nowait("orders", b"%d" % number)
        other.publish_nowait("orders", b"later", delay=3600)
        other.publish_nowait("orders", b"once", idempotency_key="k")
    assert sorted(client.fetch_values("orders")) == sorted(
        [b"%d" % n for n in range(100)] + [b"once"]
    )
    assert [each.topic for each in client.scheduled()] == ["orders"]


def test_closing_waits_for_a_broker_that_is_away_for_a_moment(
    server: RunningServer, client: BrokerClient
) -> None:
    """It has until the request timeout."""
    other = server.client().connect()
    other.publish("orders", b"before")
    server.stop()
    publication = other.publish_nowait("orders", b"while it was away")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(other.close)
        server.start()
        closing.result(20)
    assert publication.result(0).offset == 1
    wait_until(lambda: client.is_connected)
    assert client.fetch_values("orders") == [b"before", b"while it was away"]


def test_closing_says_what_it_could_not_send(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises the error, the publication has it, and there is a line in the log."""
    other = server.client(request_timeout=0.2).connect()
    other.publish("orders", b"before")
    server.stop()
    publication = other.publish_nowait("orders", b"lost")
    with pytest.raises(Closed, match="before the message was sent"):
        other.close()
    with pytest.raises(Closed):
        publication.result(0)
    assert "nobody waited for it: the client was closed before the message was sent" in caplog.text


def test_a_program_that_ends_without_closing_loses_nothing(
    server: RunningServer, client: BrokerClient
) -> None:
    """However it ends, short of being killed."""
    script = """
import sys
from headrace import BrokerClient
def work():
    client = BrokerClient(sys.argv[1], int(sys.argv[2])).connect()
    for number in range(500):
        client.publish_nowait("orders", b"%d" % number)
work()
sys.exit(int(sys.argv[3]))
"""
    for code in (0, 3):
        ended = subprocess.run(
            [sys.executable, "-c", script, server.host, str(server.port), str(code)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ended.returncode, ended.stderr) == (code, "")
    assert client.fetch_values("orders") == [b"%d" % number for number in range(500)] * 2


def test_a_topic_that_may_not_be_made_is_told() -> None:
    """auto_create_topics is off: NotFound, and after it was made publishing works."""
    with (
        running_server(memory=True, auto_create_topics=False) as server,
        server.client() as client,
    ):
        with pytest.raises(TopicNotFound):
            client.publish("orders", b"x")
        client.create_topic("orders")
        assert client.publish("orders", b"x").offset == 0


def test_wrong_arguments_are_refused_where_they_are_given(client: BrokerClient) -> None:
    """Before anything is sent, with the sentences of the embedded broker."""
    with pytest.raises(InvalidArgument, match="bytes, str, or a dict or list"):
        client.publish_nowait("orders", 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="UUID"):
        client.publish_nowait("orders", b"x", id="five")
    with pytest.raises(InvalidArgument, match="str to str"):
        client.publish_nowait("orders", b"x", {"a": 5})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="empty"):
        client.publish_many("orders", [])
    with pytest.raises(InvalidArgument, match="whole number above 0"):
        client.fetch("orders", limit=0)
    with pytest.raises(InvalidArgument, match="whole number above 0"):
        client.subscribe("orders", capacity=0)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(InvalidArgument):
            client.fetch(name)


def test_a_topic_that_is_no_text_is_refused_at_once(server: RunningServer) -> None:
    """And does not stand in the way of what follows."""
    with server.client() as client:
        for options in ({}, {"delay": 5.0}):
            with pytest.raises(InvalidArgument, match="name is a str, not bytes"):
                client.publish_nowait(b"orders", b"x", **options)  # type: ignore[arg-type]
        for call in (client.create_topic, lambda topic: client.publish_many(topic, [b"x"])):
            with pytest.raises(InvalidArgument, match="name is a str, not bytes"):
                call(b"orders")  # type: ignore[no-untyped-call]
        client.flush()

    async def publish() -> None:
        async with AsyncClient(*server.address) as client:
            for options in ({}, {"delay": 5.0}):
                with pytest.raises(InvalidArgument, match="name is a str, not bytes"):
                    await client.publish(b"orders", b"x", **options)  # type: ignore[arg-type]
            await client.flush()

    asyncio.run(publish())


def test_ids_lead_back_to_their_message(client: BrokerClient) -> None:
    """A derived one; one of the client's own is carried but not looked up."""
    receipt = client.publish("orders", b"x")
    assert client.find(receipt.id).value == b"x"
    own = uuid.uuid4()
    assert client.publish("orders", b"y", id=own).id == own


def test_a_value_of_none_is_a_tombstone(client: BrokerClient, server: RunningServer) -> None:
    """On every way to publish; readers get None, old ones an empty value and a header."""
    client.publish("orders", None, key="a")
    client.publish_nowait("orders", None, key="b").result(10)
    client.publish("orders", None, {"x": "y"}, key="c", idempotency_key="once")
    client.publish_many("orders", [b"v", None, {"n": 1}, None], keys=["d", "e", "f", "g"])
    client.publish("orders", b"", key="h")

    async def through_asyncio() -> None:
        async with AsyncClient(server.host, server.port) as other:
            await other.publish("orders", None, key="i")

    asyncio.run(through_asyncio())
    found = client.fetch("orders")
    assert {message.key: message.value for message in found} == {
        **dict.fromkeys((b"a", b"b", b"c", b"e", b"g", b"i")),
        b"d": b"v",
        b"f": b'{"n":1}',
        b"h": b"",
    }
    assert found[0].payload is found[0].body is found[0].json() is None
    assert found[0].text() == ""
    assert found[0].headers == {"kafka-tombstone": "true"}
    assert found[2].headers == {"kafka-tombstone": "true", "x": "y"}
    assert client.fetch_values("orders")[0] == b""
    for message in found:  # what was read can be published again
        client.publish("again", message.value, message.headers, key=message.key)
    assert [message.value for message in client.fetch("again")] == [m.value for m in found]


def test_a_tombstone_needs_a_key(client: BrokerClient) -> None:
    """A None without one is more likely a mistake, and is not stored."""
    for publish in (
        lambda: client.publish("orders", None),
        lambda: client.publish("orders", None, {"x": "y"}),
        lambda: client.publish_nowait("orders", None),
        lambda: client.publish_many("orders", [b"x", None]),
        lambda: client.publish_many("orders", [b"x", None], keys=["a", None]),
    ):
        with pytest.raises(InvalidArgument, match="tombstone, which needs a key") as refused:
            publish()
        assert refused.value.code == "invalid_value"
    assert "orders" not in client.topics()


def test_a_tombstone_that_fails_is_a_dead_letter_and_comes_back(client: BrokerClient) -> None:
    """Dead letters and delays keep it as it is."""
    client.create_subscription("billing", "orders", max_deliveries=1)
    client.publish("orders", None, key="a", delay=0.01)
    with client.subscription("billing", "orders") as inbox:
        message = inbox.get(timeout=10)
        assert message.value is None
        message.nack(reason="later")
        wait_until(lambda: client.dead_letters("billing"))
        [letter] = client.dead_letters("billing")
        assert letter.message.value is None
        client.redrive("billing")
        assert inbox.get(timeout=10).value is None


def test_calls_without_keys_fill_all_partitions(
    client: BrokerClient, server: RunningServer
) -> None:
    """Whether they run at the same time, or come from programs that publish once."""
    client.create_topic("orders", partitions=3)
    client.create_topic("visits", partitions=3)

    async def at_once() -> None:
        async with AsyncClient(server.host, server.port) as other:
            await asyncio.gather(
                *[other.publish_many("orders", [b"x" * 100] * 1_000) for _ in range(60)]
            )

    asyncio.run(at_once())
    for _ in range(6):
        with server.client() as program:
            program.publish_many("visits", [b"x" * 100] * 1_000)
    for topic, least in (("orders", 13_000), ("visits", 2_000)):
        ends = [place["end"] for place in client.positions(topic)[topic]]
        assert min(ends) >= least, ends


def test_a_refusal_shows_no_other_error_before_it(client: BrokerClient) -> None:
    """A traceback begins with the sentence, not with the KeyError of a look-up."""
    for topic in ("my topic", None, []):
        with pytest.raises(InvalidArgument) as caught:
            client.publish(topic, b"x")  # type: ignore[arg-type]
        assert caught.value.__context__ is None


def test_publish_many_names_itself_in_its_refusals(client: BrokerClient) -> None:
    """A generator has no length, and ``key`` is an option of ``publish``."""
    with pytest.raises(InvalidArgument, match="takes a list of messages, not generator"):
        client.publish_many("orders", (b"x" for _ in range(3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^publish_many got an unexpected keyword argument 'key'"):
        client.publish_many("orders", [b"x"], key="k")  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_of_an_event_loop_that_has_ended_says_so(server: RunningServer) -> None:
    """A second ``asyncio.run`` cannot use the connection of the first. When it is closed, it can connect again."""
    client = AsyncClient(*server.address)
    asyncio.run(client.connect())

    async def again() -> int | None:
        for call in (client.connect(), client.publish("orders", b"x"), client.topics()):
            with pytest.raises(Closed, match="event loop") as caught:
                await call
            assert caught.value.code == "not_connected"
        await client.close()
        async with client:
            return (await client.publish("orders", b"x")).offset

    assert asyncio.run(again()) == 0
    gc.collect()  # Python warns of the socket that nobody could close
