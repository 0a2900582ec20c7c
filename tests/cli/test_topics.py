"""``headrace topics``, ``describe``, ``create-topic``, ``alter-topic``, ``delete-topic``."""

import pytest

from headrace.client.threads import BrokerClient
from tests.cli.rig import Command


def test_a_topic_is_created(headrace: Command, client: BrokerClient) -> None:
    """The sentence says what there is now, and so does the broker."""
    ran = headrace("create-topic", "events", "--partitions", "3")
    assert (ran.code, ran.lines) == (0, ["Created topic events (3 partitions)."])
    assert len(client.topic_stats("events")["partitions"]) == 3


def test_a_topic_may_be_created_twice(headrace: Command) -> None:
    """With the same settings that is no error; with others it is, and it names the reason."""
    assert headrace("create-topic", "twice").lines == ["Created topic twice (1 partition)."]
    ran = headrace("create-topic", "twice")
    assert (ran.code, ran.lines) == (0, ["Topic twice already exists, unchanged (1 partition)."])
    ran = headrace("create-topic", "twice", "--partitions", "2")
    assert ran.code == 2
    assert "[topic_exists]" in ran.err


def test_settings_are_given_by_name(headrace: Command, client: BrokerClient) -> None:
    """Values are numbers, true, false, none or text, as they look."""
    ran = headrace(
        "create-topic", "logs", "--set", "durability=interval", "--set", "retention_hours=none",
        "--set", "retain_unread=false", "--set", "max_queue_size=7",
    )  # fmt: skip
    assert ran.code == 0
    settings = client.topic_stats("logs")["settings"]
    assert settings["durability"] == "interval"
    assert settings["retention_hours"] is None
    assert settings["retain_unread"] is False
    assert settings["max_queue_size"] == 7


def test_a_topic_in_memory(headrace: Command, client: BrokerClient) -> None:
    """--memory is the short form of a setting."""
    assert headrace("create-topic", "flash", "--memory").code == 0
    assert client.topic_stats("flash")["durability"] == "memory"


def test_a_topic_is_altered(headrace: Command, client: BrokerClient) -> None:
    """Partitions can be added, and the sentence names what changed."""
    client.create_topic("growing")
    ran = headrace("alter-topic", "growing", "--set", "partitions=4", "--set", "compression=zstd")
    assert (ran.code, ran.lines) == (0, ["Updated topic growing: partitions, compression."])
    assert len(client.topic_stats("growing")["partitions"]) == 4


def test_topics_are_listed(headrace: Command, client: BrokerClient) -> None:
    """A row each, with what matters; who subscribes stands at its end."""
    client.publish_many("listed", [b"one", b"two"])
    client.create_subscription("email", "listed")
    ran = headrace("topics")
    assert ran.code == 0
    assert ran.rows[0] == ["topic", "partitions", "messages", "size", "durability", "subscriptions"]
    [row] = [row for row in ran.rows if row[0] == "listed"]
    assert row[:3] == ["listed", "1", "2"]
    assert row[-2:] == ["always", "email"]


def test_topics_in_json(headrace: Command, client: BrokerClient) -> None:
    """A list of objects, as the broker gives them."""
    client.publish_text("in-json", "one")
    [topic] = [topic for topic in headrace("topics", "--json").json if topic["topic"] == "in-json"]
    assert set(topic) == {
        "topic", "partitions", "messages", "bytes", "backlog", "subscriptions", "durability",
        "created", "settings",
    }  # fmt: skip
    [partition] = topic["partitions"]
    assert (partition["start_offset"], partition["end_offset"]) == (0, 1)


def test_a_long_name_stays_on_its_line(headrace: Command, client: BrokerClient) -> None:
    """Into a pipe a table is as wide as it needs to be: a row is a line."""
    name = "x" * 249
    client.create_topic(name)
    assert name in [row[0] for row in headrace("topics").rows]
    assert headrace("create-topic", name).lines == [
        f"Topic {name} already exists, unchanged (1 partition)."
    ]


def test_a_topic_is_described(headrace: Command, client: BrokerClient) -> None:
    """Partitions, subscriptions with their lag, and settings."""
    client.publish_text("described", "one")
    client.create_subscription("audit", "described")
    ran = headrace("describe", "described")
    assert ran.code == 0
    assert ran.lines[0].startswith("described: 1 message, ")
    assert ran.lines[0].endswith(", durability always")
    assert ran.lines[1].startswith("created 2")  # on one line, they are wider than 80 characters
    assert ["audit", "1", "0", "0"] in ran.rows
    assert ["retain_unread", "yes"] in ran.rows


def test_a_described_topic_in_json(headrace: Command, client: BrokerClient) -> None:
    """One object; the subscriptions in it are whole ones."""
    client.publish_text("described-json", "one")
    client.create_subscription("audit", "described-json")
    topic = headrace("describe", "described-json", "--json").json
    assert topic["messages"] == 1
    [subscription] = topic["subscriptions"]
    assert (subscription["name"], subscription["lag"]) == ("audit", 1)
    assert subscription["settings"]["max_deliveries"] == 5


def test_deleting_asks_first(headrace: Command, client: BrokerClient) -> None:
    """Yes deletes; the question says how much would be gone."""
    client.publish_text("doomed", "one")
    ran = headrace("delete-topic", "doomed", input="y\n", terminal=True)
    assert ran.code == 0
    assert "Delete topic doomed and its 1 message?" in ran.err
    assert "Deleted topic doomed." in ran.out
    assert "doomed" not in client.topics()


@pytest.mark.parametrize("answer", ["n\n", ""], ids=["no", "nobody there"])
def test_without_a_yes_nothing_is_deleted(
    headrace: Command, client: BrokerClient, answer: str
) -> None:
    """Exit code 1, and the topic is still there."""
    client.publish_text("spared", "one")
    assert headrace("delete-topic", "spared", input=answer, terminal=True).code == 1
    assert "spared" in client.topics()


def test_yes_can_be_said_beforehand(headrace: Command, client: BrokerClient) -> None:
    """For scripts."""
    client.create_topic("doomed-too")
    ran = headrace("delete-topic", "doomed-too", "--yes")
    assert (ran.code, ran.lines) == (0, ["Deleted topic doomed-too."])
