"""Tables, explanations and previews: each says what is the case, to those who may know."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.errors import InvalidArgument, MessageNotFound, OffsetOutOfRange
from headrace.testing import RunningServer, running_server, wait_until


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with server.client(client_id="watcher") as found:
        yield found


def codes(found: Any) -> list[str]:
    return [finding["code"] for finding in found["findings"]]


# --- tables -----------------------------------------------------------------------------------------
def test_the_table_of_topics_is_filtered_sorted_and_cut(client: Any) -> None:
    """The total is that of all that match."""
    for number in range(5):
        client.publish_many(f"shop.{number}", [b"x"] * (number + 1))
    client.publish("other", b"x")
    found = client.topic_table(match="SHOP", sort="messages", descending=True, limit=2)
    assert found["total"] == 5
    assert [row["topic"] for row in found["rows"]] == ["shop.4", "shop.3"]
    assert [row["topic"] for row in client.topic_table(skip=4, limit=10)["rows"]] == [
        "shop.3",
        "shop.4",
    ]


def test_the_table_of_subscriptions_has_those_of_wildcards(client: Any) -> None:
    """With a topic, all that get its messages."""
    client.create_subscription("one", "shop.a")
    client.create_subscription("all", "shop.>")
    client.create_subscription("other", "else")
    client.publish_many("shop.a", [b"x"] * 3)
    found = client.subscription_table(topic="shop.a", sort="lag", descending=True)
    assert {row["subscription"]: row["lag"] for row in found["rows"]} == {"all": 3, "one": 3}


# --- why is it stuck? -------------------------------------------------------------------------------
def test_a_subscription_without_work_is_idle(client: Any) -> None:
    """And says so."""
    client.create_subscription("email", "orders")
    found = client.explain_subscription("email")
    assert (found["state"], codes(found), found["oldest"]) == ("idle", ["idle"], None)


def test_a_subscription_whose_last_member_has_left_is_stuck(
    server: RunningServer, client: Any
) -> None:
    """Also while its rate of the last seconds is not zero yet."""
    client.publish_many("orders", [b"x"] * 10)
    with client.subscription("email", "orders", prefetch=1) as messages:
        server.call(list, server.engine.history._round())
        server.call(list, server.engine.history._round())
        for _ in range(5):
            messages.get(timeout=10).ack()
        wait_until(lambda: client.subscription_stats("email")["acked"] == 5)
        server.call(list, server.engine.history._round())
        server.call(list, server.engine.history._round())
    wait_until(lambda: client.subscription_stats("email")["members"] == 0)
    [row] = client.subscription_table()["rows"]
    assert row["rate"] > 0
    assert client.explain_subscription("email")["state"] == "stuck"


def test_a_subscription_without_members_is_stuck(client: Any) -> None:
    """The oldest message is named."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    found = client.explain_subscription("email")
    assert (found["state"], codes(found)) == ("stuck", ["no_members"])
    assert found["oldest"]["state"] == "not delivered yet"
    assert (found["oldest"]["partition"], found["oldest"]["offset"]) == (0, 0)


def test_a_paused_subscription_says_so(client: Any) -> None:
    """Whether or not it has members."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    client.pause_subscription("email")
    assert codes(client.explain_subscription("email")) == ["paused"]


def test_full_members_are_named_with_what_they_hold(client: Any, server: RunningServer) -> None:
    """Who, how many, since when, and until when."""
    client.create_subscription("email", "orders")
    client.publish_many("orders", [b"x"] * 5)
    with closing(client.subscription("email", "orders", prefetch=2)) as messages:
        messages.get(timeout=10)
        found = client.explain_subscription("email")
        assert "prefetch_full" in codes(found)
        [member] = found["members"]
        assert (member["name"], member["in_flight"], member["prefetch"]) == ("watcher", 2, 2)
        assert member["address"].startswith("127.0.0.1:")
        assert member["joined"] <= member["oldest"]["since"] < member["oldest"]["deadline"]
        assert member["oldest"]["attempt"] == 1
        assert [(each["partition"], each["offset"]) for each in member["held"]] == [(0, 0), (0, 1)]
        assert found["oldest"]["state"] == "in flight"


def test_retries_are_listed_with_their_times(client: Any) -> None:
    """A message that failed and waits is not lost."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        message = messages.get(timeout=10)
        message.nack(delay=500)
        client.flush()
        found = client.explain_subscription("email")
        assert codes(found) == ["retrying"]
        [retry] = found["retries"]
        assert (retry["offset"], retry["attempts"]) == (0, 1)
        assert 400_000 < retry["due"] - client.info()["time"] <= 500_000
        [state] = client.message_life(message.id)["subscriptions"]
        assert (state["state"], state["due"]) == (
            "waiting for a retry",
            pytest.approx(retry["due"], abs=50),
        )


def test_a_busy_key_is_explained(client: Any) -> None:
    """Messages behind it wait, and their life says why."""
    client.create_subscription("email", "orders", ordering="key")
    receipts = [client.publish("orders", b"x", key="k") for _ in range(3)]
    with closing(client.subscription("email", "orders", prefetch=10)) as messages:
        messages.get(timeout=10)
        found = client.explain_subscription("email")
        assert "key_busy" in codes(found)
        states = [client.message_life(r.id)["subscriptions"][0]["state"] for r in receipts]
        assert states == ["in flight", "waiting for its key", "waiting for its key"]


def test_a_member_that_let_its_deadline_pass_is_named(client: Any, server: RunningServer) -> None:
    """It may hang."""
    client.create_subscription("email", "orders", ack_timeout=0.05, backoff=100, max_deliveries=9)
    client.publish_many("orders", [b"x"] * 3)
    with closing(client.subscription("email", "orders", prefetch=3)):
        wait_until(lambda: "stalled" in codes(client.explain_subscription("email")))


def test_attention_has_the_worst_first(client: Any, server: RunningServer) -> None:
    """Dead letters, pauses, nobody who works; nothing of what is well."""
    assert client.attention() == []
    client.create_subscription("fine", "orders")
    client.create_subscription("email", "orders", max_deliveries=1)
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        messages.get(timeout=10).nack()
    wait_until(lambda: client.dead_letters("email"))
    found = client.attention()
    assert {finding["code"] for finding in found} == {"dead_letters", "no_members"}
    log = server.engine.topics.find("orders").partitions[0].log
    server.call(lambda: setattr(log, "read_only", "a test says so"))
    try:
        assert client.attention()[0]["code"] == "read_only"
    finally:
        server.call(lambda: setattr(log, "read_only", None))


def test_much_of_one_kind_hides_nothing_else(client: Any, server: RunningServer) -> None:
    """Damage and dead letters are named, however many subscriptions have no members."""
    client.create_subscription("email", "orders", max_deliveries=1)
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        messages.get(timeout=10).nack()
    wait_until(lambda: client.dead_letters("email"))
    for number in range(25):
        client.create_subscription(f"idle-{number}", "orders")
    [cursor] = server.engine.subscription("idle-24", "orders").cursors.values()
    server.call(lambda: setattr(cursor, "blocked", "a test says so"))
    found = client.attention(limit=2)
    assert [finding["code"] for finding in found] == ["damaged", "no_members"]
    found = client.attention(limit=3)
    assert {finding["code"] for finding in found} == {"damaged", "no_members", "dead_letters"}


# --- previews ---------------------------------------------------------------------------------------
def test_a_preview_of_a_seek_is_what_the_seek_does(client: Any) -> None:
    """Messages that are done are delivered again, others are skipped; out of order, too."""
    client.create_subscription("email", "orders")
    client.publish_many("orders", [b"x"] * 10)
    with closing(client.subscription("email", "orders", prefetch=10)) as messages:
        got = [messages.get(timeout=10) for _ in range(10)]
        for number in (0, 1, 2, 5):
            got[number].ack()
        client.flush()
        assert client.subscription_stats("email")["lag"] == 6
        for to in ("earliest", "latest", 2, 5, 6):
            found = client.preview_seek("email", to)
            target = found["partitions"][0]["target"]
            assert found["lag_after"] == 10 - target
            assert found["again"] == sum(number >= target for number in (0, 1, 2, 5))
            assert found["skipped"] == sum(n < target for n in (3, 4, 6, 7, 8, 9))
            assert found["in_flight"] == 6
    with pytest.raises(OffsetOutOfRange):
        client.preview_seek("email", 11)
    client.seek("email", 2)
    assert client.subscription_stats("email")["lag"] == 8


@pytest.fixture
def letters(client: Any, server: RunningServer) -> list[int]:
    """Three dead letters: two are JSON, one is not."""
    client.create_subscription("email", "orders", max_deliveries=1)
    for value in (b'{"n": 1}', b'{"n": 2}', b"no json"):
        client.publish("orders", value)
    with closing(client.subscription("email", "orders")) as messages:
        for number in range(3):
            messages.get(timeout=10).nack(reason="odd" if number == 1 else "refused")
    wait_until(lambda: len(client.dead_letters("email")) == 3)
    return [letter.offset for letter in client.dead_letters("email")]


def test_dead_letters_are_filtered(client: Any, letters: list[int]) -> None:
    """By a part of the reason, and by the topic that they come from."""
    assert [letter.offset for letter in client.dead_letters("email", reason="REFU")] == [0, 2]
    assert client.dead_letters("email", topic="other") == []
    assert len(client.dead_letters("email", topic="orders")) == 3


def test_a_redrive_with_a_transform_does_what_its_preview_says(
    client: Any, letters: list[int]
) -> None:
    """What does not fit is skipped and stays."""
    patch = {"currency": "EUR"}
    preview = client.preview_redrive("email", transform=patch)
    assert (preview["matching"], preview["failing"], preview["complete"]) == (3, 1, True)
    assert json.loads(preview["samples"][0]["after"]) == {"n": 1, "currency": "EUR"}
    assert "not JSON" in preview["samples"][2]["error"]
    assert len(client.dead_letters("email")) == 3, "a preview changes nothing"
    result = client.redrive("email", transform=patch)
    assert (result["redriven"], result["skipped"]) == (2, 1)
    assert "not JSON" in result["reason"]
    again = [json.loads(message.value) for message in list(client.fetch("orders", "earliest"))[3:]]
    assert again == [{"n": 1, "currency": "EUR"}, {"n": 2, "currency": "EUR"}]
    assert [letter.offset for letter in client.dead_letters("email")] == [2]


def test_dead_letters_go_elsewhere(client: Any, letters: list[int]) -> None:
    """To another topic, where all its subscriptions get them."""
    client.create_subscription("second", "repair")
    assert client.redrive("email", offsets=[0], destination="repair")["redriven"] == 1
    with closing(client.subscription("second", "repair")) as messages:
        assert messages.get(timeout=10).value == b'{"n": 1}'


def test_a_transform_that_is_no_patch_is_refused(client: Any, letters: list[int]) -> None:
    """Before anything is published."""
    with pytest.raises(InvalidArgument) as caught:
        client.redrive("email", transform=[{"op": "explode", "path": "/a"}])
    assert caught.value.code == "invalid_transform"
    assert len(client.dead_letters("email")) == 3


# --- delayed ----------------------------------------------------------------------------------------
def test_a_delayed_message_is_published_now(client: Any, server: RunningServer) -> None:
    """Once: at its own time nothing happens any more."""
    client.create_topic("orders")
    receipt = client.publish("orders", b"early", delay=1000)
    client.publish_now(receipt.id)
    wait_until(lambda: [m.value for m in client.fetch("orders", "earliest")] == [b"early"])
    wait_until(lambda: client.scheduled() == [])
    with pytest.raises(MessageNotFound) as caught:
        client.publish_now(receipt.id)
    assert caught.value.code == "not_scheduled"


# --- rights -----------------------------------------------------------------------------------------
def test_a_caller_learns_nothing_about_others() -> None:
    """Neither from tables, nor from what needs attention, nor from a member that holds something else."""
    with running_server(token="x" * 20) as server, server.client() as root:
        for team in ("red", "blue"):
            root.create_subscription(f"{team}.s", f"{team}.a")
            root.publish(f"{team}.a", b"x")
        secret = root.create_token("red", grants=["browse,consume:red.>:red.>"])["secret"]
        with server.client(token=secret) as red:
            assert [row["topic"] for row in red.topic_table()["rows"]] == ["red.a"]
            assert [row["subscription"] for row in red.subscription_table()["rows"]] == ["red.s"]
            assert "blue" not in json.dumps(red.attention())
