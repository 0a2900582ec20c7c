"""The text protocol's verbs, and which mistakes end the conversation."""

import json

import pytest

from headrace.errors import Closed, HeadraceError
from headrace.testing import RunningServer, running_server
from tests.contract.raw_text import TextSocket


def is_open(text: TextSocket) -> bool:
    try:
        return text.ask("PING") == ["PONG"]
    except (Closed, OSError):
        return False


# --- mistakes -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("MAKE coffee", "unknown_command"),
        ("FETCH", "bad_command"),
        ("FETCH orders", "bad_command"),
        ("FETCH orders 0 1", "bad_command"),
        ("FETCH orders -1", "invalid_offset"),
        ("FETCH orders soon", "invalid_offset"),
        ("FETCH orders @99999999999999999999", "invalid_offset"),
        ("FETCH nowhere 0", "topic_not_found"),
        ("FETCH orders 99", "offset_out_of_range"),
        ("FETCH orders 99999999999999999999", "offset_out_of_range"),
        ("FETCH orders 0 partition=7", "invalid_partition"),
        ("FETCH orders 0 partition=x", "bad_command"),
        ("FETCH orders 0 count=x", "bad_command"),
        ("FETCH orders 0 wait=-5", "bad_command"),
        ("SUB", "bad_command"),
        ("SUB a b", "bad_command"),
        ("SUB a/b", "invalid_topic"),
        ("SUB orders group=a/b", "invalid_subscription"),
        ("SUB orders group=billing prefetch=0", "invalid_argument"),
        ("SUB orders group=billing prefetch=many", "bad_command"),
        ("SUB orders group=billing start=soon", "invalid_offset"),
        ("SUB orders group=billing start=99", "offset_out_of_range"),
        ("UNSUB orders", "not_subscribed"),
        ("UNSUB orders group=billing", "not_subscribed"),
        ("ACK", "bad_command"),
        ("ACK 5", "bad_command"),
        ("ACK x.y", "bad_command"),
        ("ACK 5.5", "stale_delivery"),
        ("NACK 5.5", "stale_delivery"),
        ("NACK 5.5 delay=-1", "invalid_argument"),
        ("NACK 5.5 delay=nan", "invalid_argument"),
        ("EXTEND 5.5", "stale_delivery"),
        ("EXTEND 5.5 seconds=long", "invalid_argument"),
        ("CREATE", "bad_command"),
        ("CREATE a/b", "invalid_topic"),
        ("CREATE other partitions=0", "invalid_setting"),
        ("CREATE other colour=red", "unknown_setting"),
        ("CREATE other name=red", "unknown_setting"),
        ("CREATE other self=red", "unknown_setting"),
        ("CREATE orders partitions=9", "topic_exists"),
        ("DELETE nowhere", "topic_not_found"),
        ("DELETE __scheduled", "invalid_topic"),
        ("STATS nowhere", "topic_not_found"),
        ("STATS", "bad_command"),
        ("AUTH", "bad_command"),
    ],
)
def test_a_mistake_is_answered_and_the_conversation_goes_on(
    text: TextSocket, command: str, code: str
) -> None:
    """Nobody is cut off for a typing error: ERR, a stable code, a sentence, and the next command."""
    text.ask("PUB orders 2", b"hi")
    with pytest.raises(HeadraceError) as caught:
        text.ask(command)
    assert caught.value.code == code
    assert len(caught.value.message) > 10
    assert is_open(text)


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (b"PUB orders\r\n", "bad_command"),
        (b"PUB orders ten\r\n", "bad_command"),
        (b"PUB orders -1\r\n", "bad_command"),
        (b"PUB orders 1048577\r\n", "message_too_large"),
        (b"PUB orders 18446744073709551615\r\n", "message_too_large"),
        (b"PUB orders 1 2 3\r\n", "bad_command"),
        (b"X" * (90 << 10), "line_too_long"),
        (b"FETCH \xff\xfe\r\n", "bad_command"),
    ],
)
def test_after_a_size_that_makes_no_sense_the_connection_closes(
    text: TextSocket, stream: bytes, code: str
) -> None:
    """Nobody knows where the next command begins; what was before it is answered."""
    text.send(b"PUB orders 2\r\nhi" + stream)
    assert text.line() == ["OK", "0"]
    assert text.line()[:2] == ["ERR", code]
    with pytest.raises(Closed):
        text.line()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("id=5", "invalid_id"),
        ("delay=soon", "invalid_argument"),
        ("delay=-1", "invalid_argument"),
        ("ttl=forever", "invalid_argument"),
        ("deliver_at=x", "bad_command"),
        ("delay=1 deliver_at=5", "invalid_delay"),
        ("partition=9", "invalid_partition"),
        ("partition=-1", "bad_command"),
        ("to=a/b", "invalid_subscription"),
        ("timestamp=x", "bad_command"),
        ("timestamp=99999999999999999999", "invalid_time"),
        ("producer_id=x", "bad_command"),
        ("producer_id=5 producer_sequence=7", "sequence_gap"),
        ("h.=x", "invalid_headers"),
    ],
)
def test_a_publish_with_a_wrong_option_is_refused_alone(
    text: TextSocket, options: str, code: str
) -> None:
    """Its payload is skipped, the next command is understood, nothing is stored."""
    text.send(f"PUB orders 4 {options}\r\nPINGPUB orders 2\r\nhiPING\r\n".encode())
    assert text.line()[:2] == ["ERR", code]
    assert text.line() == ["OK", "0"]
    assert text.line() == ["PONG"]


def test_numbers_too_large_for_their_field_are_refused(text: TextSocket) -> None:
    """A producer id has 64 bits, an epoch and a sequence 32; more is a mistake, not a crash."""
    for options in (
        "producer_id=18446744073709551616",
        "producer_id=5 producer_epoch=4294967296",
        "producer_id=5 producer_sequence=4294967296",
    ):
        with pytest.raises(HeadraceError):
            text.ask(f"PUB orders 2 {options}", b"hi")
        assert is_open(text)
    assert text.ask("PUB orders 2", b"hi")[0] == "OK"


def test_every_message_of_a_refused_run_is_answered(text: TextSocket) -> None:
    """One ERR for each publish, so that a client that counts does not lose its place."""
    text.send(b"PUB a/b 1\r\nx" * 3 + b"PING\r\n")
    assert [text.line()[:2] for _ in range(3)] == [["ERR", "invalid_topic"]] * 3
    assert text.line() == ["PONG"]


# --- verbs ----------------------------------------------------------------------------------------
def test_help_lists_every_verb(text: TextSocket) -> None:
    """So that somebody with netcat finds the way."""
    count = int(text.ask("HELP")[1])
    lines = " ".join(" ".join(text.line()) for _ in range(count))
    for verb in ("PUB", "FETCH", "SUB", "UNSUB", "ACK", "NACK", "EXTEND", "CREATE", "DELETE",
                 "TOPICS", "GROUPS", "STATS", "INFO", "PING", "AUTH", "HELP", "QUIT"):  # fmt: skip
        assert verb in lines


def test_topics_and_groups_are_listed(text: TextSocket, server: RunningServer) -> None:
    """With what one wants to know at a glance."""
    text.ask("CREATE orders partitions=2")
    text.ask("PUB orders 2", b"hi")
    text.ask("PUB users 2", b"hi")
    assert text.ask("TOPICS") == ["LIST", "2"]
    assert text.line() == ["orders", "partitions=2", "messages=1"]
    assert text.line() == ["users", "partitions=1", "messages=1"]
    member = TextSocket(server.address)
    assert member.ask("SUB orders group=billing") == ["OK"]
    assert text.ask("GROUPS") == ["LIST", "1"]
    name, topic, _lag, members = text.line()
    assert (name, topic, members) == ("billing", "topic=orders", "members=1")
    assert text.ask("GROUPS users") == ["LIST", "0"]
    member.close()


@pytest.mark.parametrize("command", ["STATS orders", "INFO"])
def test_statistics_are_json_of_a_known_length(text: TextSocket, command: str) -> None:
    """JSON <size>, the document, a line end."""
    text.ask("PUB orders 2", b"hi")
    word, size = text.ask(command)
    assert word == "JSON"
    document = json.loads(text.payload(int(size)))
    assert document["topic" if command != "INFO" else "server"] in ("orders", "headrace")
    assert text.payload(2) == b"\r\n"
    assert is_open(text)


def test_a_fetch_of_several_ends_with_the_next_offset(text: TextSocket) -> None:
    """count= gives MSG after MSG, then END."""
    text.send(b"".join(b"PUB orders 1\r\n%d" % number for number in range(5)))
    assert [text.line() for _ in range(5)][4] == ["OK", "4"]
    text.send(b"FETCH orders 1 count=3\r\n")
    for number in (1, 2, 3):
        assert text.line() == ["MSG", str(number), "1"]
        assert text.payload(1) == b"%d" % number
    assert text.line() == ["END", "4"]
    assert text.ask("FETCH orders 5 count=3") == ["END", "5"]
    assert text.ask("FETCH orders latest count=3") == ["END", "5"]
    assert text.ask("FETCH orders 0 count=0") == ["END", "0"]


def test_a_fetch_of_another_partition(text: TextSocket) -> None:
    """partition= chooses where."""
    text.ask("CREATE orders partitions=2")
    assert text.ask("PUB orders 2 partition=1", b"hi") == ["OK", "0"]
    assert text.ask("FETCH orders 0 partition=1") == ["MSG", "0", "2"]
    assert text.payload(2) == b"hi"


def test_a_fetch_reads_all_partitions_in_the_order_of_time(text: TextSocket) -> None:
    """Unless one is named. END has a position for each, with which the next fetch continues."""
    text.ask("CREATE orders partitions=3")
    for number, partition in enumerate((2, 0, 2, 1)):
        text.ask(f"PUB orders 1 partition={partition} timestamp={1000 + number}", b"%d" % number)
    text.send(b"FETCH orders earliest count=3\r\n")
    for number, (offset, partition) in enumerate(((0, 2), (0, 0), (1, 2))):
        assert text.line() == ["MSG", str(offset), "1", "orders", str(partition)]
        assert text.payload(1) == b"%d" % number
    assert text.line() == ["END", "0:1,1:0,2:2"]
    text.send(b"FETCH orders 0:1,1:0,2:2 count=3\r\n")
    assert text.line() == ["MSG", "0", "1", "orders", "1"]
    assert text.payload(1) == b"3"
    assert text.line() == ["END", "0:1,1:1,2:2"]
    assert text.ask("FETCH orders @1003") == ["MSG", "0", "1", "orders", "1"]
    assert text.payload(1) == b"3"
    assert text.ask("FETCH orders 2:1 partition=2") == ["MSG", "1", "1"]
    assert text.payload(1) == b"2"
    assert text.ask("FETCH orders latest count=3") == ["END", "0:1,1:1,2:2"]
    assert text.ask("FETCH orders latest count=0") == ["END", "0:1,1:1,2:2"]
    for command, code in (
        ("FETCH orders 0", "partition_needed"),
        ("FETCH orders latest", "offset_out_of_range"),
        ("FETCH orders 0:7", "offset_out_of_range"),
        ("FETCH orders 9:0", "invalid_partition"),
        ("FETCH orders 0:x", "invalid_cursor"),
    ):
        with pytest.raises(HeadraceError) as caught:
            text.ask(command)
        assert caught.value.code == code, command
    assert is_open(text)


def test_a_fetch_of_all_partitions_waits_for_a_message(
    text: TextSocket, server: RunningServer
) -> None:
    """In any of them, and holds nothing up but this connection."""
    text.ask("CREATE orders partitions=2")
    text.send(b"FETCH orders latest count=1 wait=20000\r\n")
    with server.client() as client:
        client.publish("orders", b"hi", partition=1)
    assert text.line() == ["MSG", "0", "2", "orders", "1"]
    assert text.payload(2) == b"hi"
    assert text.line() == ["END", "0:0,1:1"]


def test_a_subscriber_hears_with_the_topic_and_what_to_acknowledge(text: TextSocket) -> None:
    """A plain one has nothing to acknowledge: the delivery is a dash."""
    assert text.ask("SUB orders")[0] == "OK"
    assert text.ask("PUB orders 2", b"hi") == ["OK", "0"]
    got = text.delivery(10)
    assert (got.value, got.topic, got.partition, got.handle) == (b"hi", "orders", 0, "-")


def test_a_topic_that_does_not_exist_is_told(text: TextSocket) -> None:
    """Subscribing creates it, empty, and the answer says so."""
    assert text.ask("SUB mispelt") == ["OK", "topic_created"]
    assert text.ask("SUB mispelt group=g") == ["OK"]
    assert text.ask("SUB mispelt2 group=g") == ["OK", "topic_created"]
    assert text.ask("SUB mispelt2") == ["OK"]
    assert text.ask("SUB other.*") == ["OK"]


def test_automatic_acknowledgement(text: TextSocket, server: RunningServer) -> None:
    """ack=auto: what was sent is done."""
    assert text.ask("SUB orders group=billing ack=auto")[0] == "OK"
    text.ask("PUB orders 2", b"hi")
    assert text.delivery(10).handle == "-"
    with server.client() as client:
        assert client.subscription_stats("billing", "orders")["lag"] == 0


def test_the_same_subscription_twice_on_one_connection_is_refused(text: TextSocket) -> None:
    """A MSG would not say for which of the two it is."""
    text.ask("SUB orders")
    text.ask("SUB orders group=billing")
    for command in ("SUB orders", "SUB orders group=billing"):
        with pytest.raises(HeadraceError) as caught:
            text.ask(command)
        assert caught.value.code == "subscribed"


def test_extending_says_what_was_granted(text: TextSocket) -> None:
    """In seconds."""
    text.ask("SUB orders group=billing")
    text.ask("PUB orders 2", b"hi")
    got = text.delivery(10)
    assert text.ask(f"EXTEND {got.handle} seconds=90") == ["OK", "90"]
    assert text.ask(f"EXTEND {got.handle}") == ["OK", "30"]


def test_quit_is_answered_and_ends_it(text: TextSocket) -> None:
    """What comes behind it is not looked at."""
    text.send(b"PUB orders 2\r\nhiQUIT\r\nPUB orders 2\r\nho")
    assert text.line() == ["OK", "0"]
    assert text.line() == ["OK", "bye"]
    with pytest.raises(Closed):
        text.line()


def test_a_publish_behind_the_making_of_its_topic_waits_for_it(text: TextSocket) -> None:
    """All in one write: the topic has the partitions that were asked for, not the default."""
    text.send(b"CREATE orders partitions=3\r\nPUB orders 2 partition=2\r\nhi")
    assert text.line() == ["OK"]
    assert text.line() == ["OK", "0"]


def test_a_publish_behind_the_deletion_of_its_topic_is_not_deleted(text: TextSocket) -> None:
    """All in one write: what was acknowledged after the deletion is there."""
    text.ask("PUB orders 2", b"hi")
    text.send(b"DELETE orders\r\nPUB orders 2\r\nho")
    assert text.line() == ["OK"]
    assert text.line() == ["OK", "0"]
    assert text.ask("FETCH orders 0") == ["MSG", "0", "2"]
    assert text.payload(2) == b"ho"


def test_topics_are_not_made_where_that_is_off() -> None:
    """auto_create_topics=false: a publish and a subscription need a topic that is there."""
    with running_server(memory=True, auto_create_topics=False) as server:
        text = TextSocket(server.address)
        for command, payload in (("PUB orders 2", b"hi"), ("SUB orders", b"")):
            with pytest.raises(HeadraceError) as caught:
                text.ask(command, payload)
            assert caught.value.code == "topic_not_found"
        text.ask("CREATE orders")
        assert text.ask("PUB orders 2", b"hi") == ["OK", "0"]
        text.close()


def test_the_end_of_a_subscription_is_an_err_line(text: TextSocket, server: RunningServer) -> None:
    """The topic is deleted: the member hears why there is nothing more, and stays connected."""
    text.ask("SUB orders group=billing")
    with server.client() as client:
        client.delete_topic("orders")
    words = text.line()
    assert words[:2] == ["ERR", "topic_not_found"]
    assert is_open(text)


def test_a_mistake_of_ours_is_answered(
    text: TextSocket, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits gets an answer, the log gets the traceback, the next command works."""

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headrace.broker.administration.Administration.delete_topic", broken)
    text.ask("PUB orders 2", b"hi")
    with pytest.raises(HeadraceError) as caught:
        text.ask("DELETE orders")
    assert caught.value.code == "bug"
    assert is_open(text)


def test_good_messages_before_damage_are_delivered_and_then_the_error() -> None:
    """``FETCH count=`` throws nothing away; the error stands where END would, and is all there is behind it."""
    with running_server() as server:
        with server.client() as client:
            for number in range(3):
                client.publish("orders", str(number).encode() * 600)
        server.stop()
        [path] = (server.data_dir / "orders" / "0").glob("*.log")
        raw = bytearray(path.read_bytes())
        raw[raw.index(b"1" * 600)] ^= 1
        path.write_bytes(raw)
        server.start()
        text = TextSocket(server.address)
        try:
            text.send(b"FETCH orders 0 count=3\r\n")
            assert text.line() == ["MSG", "0", "600"]
            assert text.payload(600) == b"0" * 600
            assert text.line()[:2] == ["ERR", "data_corrupt"]
            text.send(b"FETCH orders 1 count=3\r\n")
            assert text.line()[:2] == ["ERR", "data_corrupt"]
            text.send(b"FETCH orders 2 count=3\r\n")
            assert text.line() == ["MSG", "2", "600"]
        finally:
            text.close()
