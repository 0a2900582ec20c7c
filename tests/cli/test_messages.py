"""``headrace publish``, ``fetch``, ``tail``, ``subscribe``, ``join-subscription``."""

import os
import subprocess
import threading
import uuid
from pathlib import Path

import pytest

from headrace.client.threads import BrokerClient
from headrace.testing import RunningServer, wait_until
from tests.cli.rig import SCRIPT, Command, clean_environment, is_followed
from tests.server.http_rig import http_of


# --- publish --------------------------------------------------------------------------------------
def test_a_message_is_published(headrace: Command, client: BrokerClient) -> None:
    """The sentence says where it is."""
    ran = headrace("publish", "events", "Hello World")
    assert (ran.code, ran.lines) == (0, ["Published to events/0 at offset 0."])
    assert client.fetch("events")[0].value == b"Hello World"


def test_a_published_message_in_json(headrace: Command) -> None:
    """The receipt, in the shape of HTTP."""
    receipt = headrace("publish", "receipts", "one", "--json").json
    assert set(receipt) == {"id", "topic", "partition", "offset", "timestamp"}
    assert receipt["timestamp"].endswith("Z")
    assert (receipt["topic"], receipt["partition"], receipt["offset"]) == ("receipts", 0, 0)


def test_key_headers_and_partition(headrace: Command, client: BrokerClient) -> None:
    """Options set the key, the headers and the partition."""
    client.create_topic("parted", 3)
    ran = headrace(
        "publish", "parted", "one", "--key", "k", "-H", "source=cli", "--header", "a=b=c",
        "--partition", "2",
    )  # fmt: skip
    assert ran.code == 0
    [message] = client.fetch("parted", partition=2)
    assert message.key == b"k"
    assert message.headers == {"source": "cli", "a": "b=c"}


def test_a_message_for_one_subscription(headrace: Command, client: BrokerClient) -> None:
    """--to is delivered there and nowhere else."""
    for name in ("email", "audit"):
        client.create_subscription(name, "directed")
    headrace("publish", "directed", "for email", "--to", "email")
    headrace("publish", "directed", "for all")
    assert headrace("join-subscription", "audit", "--topic", "directed", "-n", "1").lines == [
        "directed/0@1  for all"
    ]
    assert headrace("join-subscription", "email", "--topic", "directed", "-n", "2").lines == [
        "directed/0@0  for email",
        "directed/0@1  for all",
    ]


def test_a_delayed_message(headrace: Command, client: BrokerClient) -> None:
    """It is not there yet, and the id that is printed is the one that cancels it."""
    ran = headrace("publish", "delayed", "later", "--delay", "3600")
    assert ran.code == 0
    message_id = uuid.UUID(ran.out.strip().removeprefix("Scheduled message ").removesuffix("."))
    assert message_id in [waiting.id for waiting in client.scheduled("delayed")]
    assert "delayed" not in client.topics()
    document = headrace("publish", "delayed", "later", "--delay", "3600", "--json").json
    assert document["scheduled"] is True
    assert "offset" not in document


def test_every_line_of_standard_input(headrace: Command, client: BrokerClient) -> None:
    """Line ends are not part of a message, and an empty line is a message."""
    ran = headrace("publish", "lines", "-", input=b"one\r\n\nthree \xff\nlast")
    assert (ran.code, ran.lines) == (0, ["Published 4 messages to lines."])
    assert client.fetch_values("lines") == [b"one", b"", b"three \xff", b"last"]


def test_a_hundred_thousand_lines(headrace: Command, client: BrokerClient) -> None:
    """Many lines arrive, each once and in order."""
    lines = [b"line %d" % number for number in range(100_000)]
    ran = headrace("publish", "many", "-", "--json", input=b"\n".join(lines) + b"\n")
    assert (ran.code, ran.json) == (0, {"published": 100_000})
    found: list[bytes] = []
    while len(found) < len(lines) and (part := client.fetch_values("many", len(found))):
        found += part
    assert found == lines


def test_no_lines_at_all(headrace: Command, client: BrokerClient) -> None:
    """An empty standard input publishes nothing, and is no error."""
    ran = headrace("publish", "no-lines", "-", input="")
    assert (ran.code, ran.lines) == (0, ["Published 0 messages to no-lines."])


# --- fetch ----------------------------------------------------------------------------------------
def test_messages_are_fetched(headrace: Command, client: BrokerClient) -> None:
    """From an offset on, as many as were asked for, and the same again the next time."""
    client.publish_many("fetched", [b"%d" % n for n in range(20)])
    for _ in range(2):
        assert headrace("fetch", "fetched", "3", "-n", "2").lines == [
            "fetched/0@3  3",
            "fetched/0@4  4",
        ]
    assert len(headrace("fetch", "fetched").lines) == 10
    assert len(headrace("fetch", "fetched", "-n", "100").lines) == 20


def test_more_messages_than_one_fetch_brings(headrace: Command, client: BrokerClient) -> None:
    """The command goes on until it has what it was asked for."""
    client.publish_many("deep", [b"x"] * 5_000)
    assert len(headrace("fetch", "deep", "-n", "4321").lines) == 4_321


def test_messages_are_fetched_by_time(headrace: Command, client: BrokerClient) -> None:
    """A position may be a time, earliest, or latest."""
    client.publish_many("timed", [b"old", b"new"], timestamps=[1_000, 1_700_000_000_000])
    assert headrace("fetch", "timed", "2020-01-01T00:00:00Z").lines == ["timed/0@1  new"]
    assert headrace("fetch", "timed", "@1600000000000").lines == ["timed/0@1  new"]
    assert headrace("fetch", "timed", "earliest", "-n", "1").lines == ["timed/0@0  old"]
    assert headrace("fetch", "timed", "latest").lines == []


def test_all_partitions_are_fetched(headrace: Command, client: BrokerClient) -> None:
    """In the order of time; a number is an offset in the partition that is named."""
    client.create_topic("parts", 2)
    for number in range(6):
        client.publish("parts", str(number), timestamp=1000 + number, partition=number % 2)
    lines = [f"parts/{number % 2}@{number // 2}  {number}" for number in range(6)]
    assert headrace("fetch", "parts").lines == lines
    assert headrace("fetch", "parts", "-n", "5").lines == lines[:5]
    assert headrace("fetch", "parts", "1", "--partition", "1").lines == [lines[3], lines[5]]
    refused = headrace("fetch", "parts", "1")
    assert refused.code == 2
    assert "has 2 partitions" in refused.err


def test_fetched_messages_in_json(
    headrace: Command, client: BrokerClient, server: RunningServer
) -> None:
    """One object a line, in the shape of HTTP: JSON as it is, text as text, other bytes as base64."""
    client.publish("shapes", b"text", {"a": "b"}, key="k")
    client.publish("shapes", b"\xff\x00", key=b"\xff")
    client.publish("shapes", b'{"a":\t[1,\r\n 1.10, 12345678901234567890123, "\xe2\x80\xae"]}')
    ran = headrace("fetch", "shapes", "--json")
    text, binary, document = ran.json_lines
    assert (text["data"], text["key"], text["headers"]) == ("text", "k", {"a": "b"})
    assert (text["attempt"], text["retryCount"], text["timestamp"][-1]) == (1, 0, "Z")
    assert (binary["data"], binary["encoding"], binary["key64"]) == ("/wA=", "base64", "/w==")
    assert document["data"]["a"][1:] == [1.1, 12345678901234567890123, "\u202e"]
    assert '{"a": [1,   1.10, 12345678901234567890123, "\\u202e"]}' in ran.lines[2]
    http = http_of(server)
    assert http.ok("GET", "/topics/shapes/messages") == [text, binary, document]
    http.close()


def test_a_message_cannot_steer_the_terminal(headrace: Command, client: BrokerClient) -> None:
    """Unprintable characters are escaped, and every message stays on its line."""
    client.publish("hostile", b"\x1b[2J[red]two\nlines\ttab")
    assert headrace("fetch", "hostile").lines == ["hostile/0@0  \\x1b[2J[red]two\\nlines\ttab"]


def test_waiting_for_a_message(headrace: Command, client: BrokerClient) -> None:
    """--wait ends as soon as there is one."""
    client.create_topic("awaited")

    def publish() -> None:
        client.publish("awaited", b"here")

    thread = threading.Thread(target=publish)
    thread.start()
    ran = headrace("fetch", "awaited", "0", "--wait", "30")
    thread.join()
    assert ran.lines == ["awaited/0@0  here"]


# --- tail -----------------------------------------------------------------------------------------
def test_the_last_messages(headrace: Command, client: BrokerClient) -> None:
    """Of each partition, the last few."""
    client.create_topic("tailed", 2)
    for partition in (0, 1):
        times = [1000 + 10 * number + partition for number in range(3)]
        client.publish_many("tailed", ["a", "b", "c"], partition=partition, timestamps=times)
    assert headrace("tail", "tailed", "-n", "3").lines == [
        "tailed/1@1  b",
        "tailed/0@2  c",
        "tailed/1@2  c",
    ]
    assert len(headrace("tail", "tailed", "-n", "100").lines) == 6
    assert headrace("tail", "tailed", "-n", "0").lines == []


def test_a_wildcard_can_only_be_followed(headrace: Command) -> None:
    """Rather than nothing, a sentence."""
    ran = headrace("tail", "orders.*")
    assert ran.code == 2
    assert "add -f" in ran.err


# --- subscribe ------------------------------------------------------------------------------------
def test_everything_from_now_on(
    headrace: Command, server: RunningServer, client: BrokerClient
) -> None:
    """A plain subscribe, also by a wildcard, sees what comes and not what was."""
    client.publish("orders.eu", b"old")

    def publish() -> None:
        wait_until(lambda: is_followed(server, "orders.*"))
        client.publish("orders.eu", b"new")

    thread = threading.Thread(target=publish)
    thread.start()
    ran = headrace("subscribe", "orders.*", "-n", "1")
    thread.join()
    assert (ran.code, ran.lines) == (0, ["orders.eu/0@1  new"])


def test_subscribing_from_an_offset(headrace: Command, client: BrokerClient) -> None:
    """A subscription is made for it, and is gone afterwards."""
    client.publish_many("replayed", [b"0", b"1", b"2"])
    ran = headrace("subscribe", "replayed", "--offset", "1", "-n", "2")
    assert (ran.code, ran.lines) == (0, ["replayed/0@1  1", "replayed/0@2  2"])
    assert client.subscriptions("replayed") == []


def test_subscribing_with_a_group(headrace: Command, client: BrokerClient) -> None:
    """A named one stays, and goes on where it stopped."""
    client.publish_many("grouped", [b"0", b"1"])
    assert headrace("subscribe", "grouped", "--group", "g", "-n", "1").lines == ["grouped/0@0  0"]
    assert headrace("subscribe", "grouped", "--group", "g", "-n", "1").lines == ["grouped/0@1  1"]


def test_nothing_comes(headrace: Command) -> None:
    """--timeout ends the wait, and that is no error."""
    ran = headrace("subscribe", "quiet", "--timeout", "0.05")
    assert (ran.code, ran.out) == (0, "")


# --- join-subscription ------------------------------------------------------------------------------
def test_joining_a_subscription(headrace: Command, client: BrokerClient) -> None:
    """Messages are printed and acknowledged: they do not come again."""
    client.publish_many("joined", [b"0", b"1", b"2"])
    client.create_subscription("reader", "joined")
    ran = headrace("join-subscription", "reader", "-n", "2", "--json")
    assert [message["data"] for message in ran.json_lines] == [0, 1]
    assert [message["attempt"] for message in ran.json_lines] == [1, 1]
    assert headrace("join-subscription", "reader", "-n", "1").lines == ["joined/0@2  2"]
    assert client.subscription_stats("reader")["lag"] == 0
    assert headrace("join-subscription", "reader", "--timeout", "0.05").lines == []


# --- keys, headers, times and bytes ---------------------------------------------------------------
def test_key_headers_and_time_are_shown(headrace: Command, client: BrokerClient) -> None:
    """On one line, before the value; words with blanks have quotes."""
    client.publish("shown", b"one", {"source": "the cli"}, key="k", timestamp=1_769_860_800_123)
    client.publish("shown", b"two")
    ran = headrace("fetch", "shown", "--time", "--keys", "--headers")
    first, second = ran.lines
    assert first == '2026-01-31T12:00:00.123Z  shown/0@0  key=k  source="the cli"  one'
    assert second.endswith("shown/0@1  key=-  two")
    assert headrace("tail", "shown", "--keys").lines[0] == "shown/0@0  key=k  one"


def test_a_file_is_one_message(headrace: Command, client: BrokerClient, tmp_path: Path) -> None:
    """Byte for byte, there and back."""
    content = bytes(range(256)) + b"\r\n"
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    assert headrace("publish", "files", "--file", path, "--key", "k").code == 0
    assert headrace("publish", "files", "--file", "-", input=content[:9]).code == 0
    assert [message.value for message in client.fetch("files")] == [content, content[:9]]
    fetched = subprocess.run(
        [SCRIPT, "fetch", "files", "0", "-n", "1", "--raw"],
        capture_output=True,
        env=clean_environment() | {"HEADRACE_SERVER": os.environ["HEADRACE_SERVER"]},
        timeout=60,
    )
    assert (fetched.stdout, fetched.returncode) == (content, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish", "t"),
        ("publish", "t", "text", "--file", "x"),
        ("publish", "t", "--file", "no-such-file"),
        ("publish", "t", "--file", "/dev/zero"),
        ("fetch", "t", "--raw", "--json"),
    ],
)
def test_what_does_not_go_together(headrace: Command, arguments: tuple[str, ...]) -> None:
    """One sentence, and nothing is published."""
    ran = headrace(*arguments)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1


def test_bytes_do_not_go_to_a_terminal(headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might take them for commands."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    ran = headrace("fetch", "t", "--raw")
    assert (ran.code, "terminal" in ran.err) == (2, True)


def test_times_have_units(headrace: Command, client: BrokerClient) -> None:
    """A duration as in settings, a position as long ago."""
    assert (
        headrace("publish", "in-units", "later", "--delay", "1h").lines[0].startswith("Scheduled")
    )
    client.publish_text("in-units", "now")
    assert headrace("fetch", "in-units", "1h").lines == ["in-units/0@0  now"]
    ran = headrace("publish", "in-units", "x", "--ttl", "soon")
    assert ran.code == 2
    assert "90s" in ran.err
