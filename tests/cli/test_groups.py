"""``headrace groups``, ``create-subscription``, ``delete-subscription``, ``seek``."""

import pytest

from headrace.client.threads import BrokerClient
from tests.cli.rig import Command


def test_a_subscription_is_created(headrace: Command, client: BrokerClient) -> None:
    """The sentence says how much waits for it."""
    client.publish_many("events", [b"0", b"1"])
    ran = headrace("create-subscription", "my-group", "events", "--offset", "1")
    assert ran.lines == ["Created subscription my-group on events (1 unread)."]
    assert ran.code == 0


def test_a_topic_that_does_not_exist_is_told(headrace: Command) -> None:
    """A misspelt topic does not look like one without messages."""
    created = "Topic {} did not exist: it was created now, and is empty.\n"
    ran = headrace("create-subscription", "g", "mispelt")
    assert ran.lines == ["Created subscription g on mispelt (0 unread)."]
    assert ran.err == created.format("mispelt")
    assert headrace("create-subscription", "g2", "mispelt").err == ""
    joined = ("join-subscription", "g", "--topic", "mispelt2", "--timeout", "0.05")
    assert headrace(*joined).err == created.format("mispelt2")
    assert headrace(*joined).err == ""
    subscribed = ("subscribe", "mispelt3", "--offset", "0", "--timeout", "0.05")
    assert headrace(*subscribed).err == created.format("mispelt3")
    plain = ("subscribe", "mispelt4", "--timeout", "0.05")
    assert headrace(*plain).err == created.format("mispelt4")
    assert headrace(*plain).err == ""


def test_settings_of_a_subscription(headrace: Command, client: BrokerClient) -> None:
    """The common ones have options of their own; --set takes all."""
    ran = headrace(
        "create-subscription", "picky", "orders.>", "--ack-timeout", "60", "--max-deliveries", "2",
        "--ordering", "key", "--set", "backoff=0.5", "--set", "dead_letter_topic=graveyard",
    )  # fmt: skip
    assert ran.code == 0
    settings = client.subscription_stats("picky")["settings"]
    assert settings["ack_timeout"] == 60
    assert settings["max_deliveries"] == 2
    assert settings["ordering"] == "key"
    assert settings["backoff"] == 0.5
    assert settings["dead_letter_topic"] == "graveyard"


def test_creating_again_changes_settings(headrace: Command, client: BrokerClient) -> None:
    """Only what was given changes; the position stays."""
    client.publish_many("changed", [b"0", b"1"])
    headrace("create-subscription", "changing", "changed", "--max-deliveries", "2")
    ran = headrace("create-subscription", "changing", "changed", "--ack-timeout", "5")
    assert ran.lines == ["Updated subscription changing on changed (2 unread)."]
    settings = client.subscription_stats("changing")["settings"]
    assert (settings["max_deliveries"], settings["ack_timeout"]) == (2, 5)


def test_subscriptions_are_listed(headrace: Command, client: BrokerClient) -> None:
    """A row each; of one topic if it is named, wildcards over it included."""
    client.publish_text("listed.a", "one")
    client.create_subscription("plain", "listed.a")
    client.create_subscription("wide", "listed.*")
    ran = headrace("groups", "listed.a")
    assert ran.code == 0
    assert {(row[0], row[1], row[2]) for row in ran.rows[1:]} == {
        ("plain", "listed.a", "1"),
        ("wide", "listed.*", "1"),
    }
    assert "plain" in headrace("groups").out
    assert headrace("groups", "nobody").err.endswith("[topic_not_found]\n")
    client.create_topic("alone")
    assert headrace("groups", "alone").lines == ["No subscriptions on alone."]


def test_subscriptions_in_json(headrace: Command, client: BrokerClient) -> None:
    """A list of objects with positions and counters."""
    client.publish_text("counted", "one")
    client.create_subscription("counter", "counted")
    [group] = headrace("groups", "counted", "--json").json
    assert set(group) >= {
        "name", "topic", "members", "lag", "in_flight", "waiting_for_retry", "created", "settings",
        "partitions", "delivered", "redelivered", "acked", "nacked", "timeouts", "dead_lettered",
        "expired", "skipped", "lost",
    }  # fmt: skip
    [partition] = group["partitions"]
    assert (partition["position"], partition["end_offset"], partition["lag"]) == (0, 1, 1)


def test_a_subscription_is_replayed(headrace: Command, client: BrokerClient) -> None:
    """Seeking moves it, back or ahead."""
    client.publish_many("moved", [b"0", b"1", b"2"])
    client.create_subscription("mover", "moved")
    assert headrace("seek", "mover", "latest").lines == ["Moved subscription mover (0 unread)."]
    assert headrace("seek", "mover", "1").lines == ["Moved subscription mover (2 unread)."]
    assert headrace("join-subscription", "mover", "-n", "1").lines == ["moved/0@1  1"]


def test_one_partition_is_replayed(headrace: Command, client: BrokerClient) -> None:
    """The others stay where they are."""
    client.create_topic("split", 2)
    for partition in (0, 1):
        client.publish_many("split", [b"a", b"b"], partition=partition)
    client.create_subscription("half", "split", "latest")
    assert headrace("seek", "half", "earliest", "--partition", "1").code == 0
    places = client.subscription_stats("half")["partitions"]
    assert [place["position"] for place in places] == [2, 0]


def test_a_subscription_is_deleted(headrace: Command, client: BrokerClient) -> None:
    """It is gone with its position."""
    client.create_subscription("brief", "short")
    ran = headrace("delete-subscription", "brief", "--yes")
    assert (ran.code, ran.lines) == (0, ["Deleted subscription brief."])
    assert client.subscriptions("short") == []


def test_one_name_over_two_topics(headrace: Command, client: BrokerClient) -> None:
    """Where a name is not enough the command says so, and --topic settles it."""
    for topic in ("left", "right"):
        client.create_subscription("both", topic)
    ran = headrace("delete-subscription", "both")
    assert ran.code == 2
    assert "[ambiguous_subscription]" in ran.err
    assert headrace("delete-subscription", "both", "--topic", "left", "--yes").code == 0
    assert [group["name"] for group in client.subscriptions("right")] == ["both"]


def test_an_offset_of_one_that_exists_is_not_ignored_in_silence(
    headrace: Command, client: BrokerClient
) -> None:
    """Its position stays, a line says so and names the command that moves it, and scripts go on."""
    client.publish_many("twice-made", [b"1", b"2"])
    create = ("create-subscription", "placed", "twice-made", "--offset", "1")
    assert (headrace(*create).lines, headrace(*create[:3]).err) == (
        ["Created subscription placed on twice-made (1 unread)."],
        "",
    )
    ran = headrace(*create[:-1], "0")
    assert (ran.code, ran.lines) == (
        0,
        ["Subscription placed on twice-made already exists, unchanged (1 unread)."],
    )
    assert "headrace seek placed 0" in ran.err
    assert client.subscription_stats("placed")["lag"] == 1


def test_pausing_and_resuming(headrace: Command, client: BrokerClient) -> None:
    """A sentence each, and the list shows the state."""
    client.create_subscription("resting", "rest")
    client.publish_text("rest", "one")
    ran = headrace("pause", "resting")
    assert ran.lines == ["Paused subscription resting (1 unread, 0 in flight)."]
    assert headrace("groups", "rest").rows[1][-1] == "paused"
    told = "Subscription resting is paused: it delivers nothing until 'headrace resume resting'."
    for join in (["join-subscription", "resting"], ["subscribe", "rest", "--group", "resting"]):
        assert headrace(*join, "--timeout", "0.01").err.splitlines() == [told]
    assert headrace("resume", "resting").lines == ["Resumed subscription resting (1 unread)."]
    assert headrace("groups", "rest").rows[1][-2:] == ["no", "members"]
    assert "[subscription_not_found]" in headrace("pause", "nobody").err


@pytest.mark.parametrize("terminal", [True, False])
def test_deleting_asks_first(headrace: Command, client: BrokerClient, terminal: bool) -> None:
    """On a terminal; elsewhere it refuses, and says what to add."""
    client.create_subscription("asked", "asking")
    ran = headrace("delete-subscription", "asked", input="n\n", terminal=terminal)
    assert ran.code == (1 if terminal else 2)
    assert ("add --yes" in ran.err) == (not terminal)
    assert "Delete subscription asked and its position (0 unread)?" in ran.err
    assert client.subscription_stats("asked")["name"] == "asked"
    assert headrace("delete-subscription", "asked", "--yes").code == 0


def test_a_stuck_subscription_is_explained(headrace: Command, client: BrokerClient) -> None:
    """In words for people, as one document for programs."""
    client.create_subscription("stuck", "explained")
    client.publish("explained", b"x")
    ran = headrace("explain", "stuck")
    assert ran.code == 0
    assert ran.lines[:2] == [
        "stuck is stuck.",
        "warning: stuck has no members, and 1 message waits. Start a consumer.",
    ]
    assert "explained/0 offset 0" in ran.out
    assert headrace("explain", "stuck", "--json").json["state"] == "stuck"
