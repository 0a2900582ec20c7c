"""What became of messages lately: each delivery, and redrives; in bounded memory."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.broker import lives
from headrace.broker.lives import Lives
from headrace.errors import MessageNotFound, NotFound
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Http, target


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(memory=True) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with server.client(client_id="worker") as found:
        found.create_subscription("keeper", "orders")  # what all have finished is gone
        yield found


def life(client: Any, place: tuple[str, int, int] = ("orders", 0, 0)) -> Any:
    """Of a message, in the subscription ``email``."""
    states = client.life_at(*place)["subscriptions"]
    return next(state for state in states if state["subscription"] == "email")


def outcomes(state: Any) -> list[tuple[int, str, str]]:
    return [(each["attempt"], each["member"], each["outcome"]) for each in state["deliveries"]]


def test_each_delivery_is_named_with_its_outcome(client: Any) -> None:
    """While it is out, after it failed, and when it was acknowledged."""
    client.create_subscription("email", "orders", backoff=0)
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        message = messages.get(timeout=10)
        assert outcomes(life(client)) == [(1, "worker", "in flight")]
        message.nack(reason="no stock")
        messages.get(timeout=10).ack()
        client.flush()
        wait_until(lambda: life(client)["state"] == "done")
        state = life(client)
    assert outcomes(state) == [(1, "worker", "failed"), (2, "worker", "acknowledged")]
    first, second = state["deliveries"]
    assert first["since"] <= first["until"] <= second["since"] <= second["until"]
    assert [failure["reason"] for failure in state["failures"]] == ["no stock"]


def test_a_message_that_was_given_back_was_not_acknowledged(client: Any) -> None:
    """A member that leaves in good order has begun nothing, also if the subscription then skips the message."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")):
        wait_until(lambda: outcomes(life(client)) == [(1, "worker", "in flight")])
    wait_until(lambda: outcomes(life(client)) == [(1, "worker", "given back")])
    client.seek("email", "latest")
    assert life(client)["state"] == "done"
    assert outcomes(life(client)) == [(1, "worker", "given back")]


def test_a_seek_back_changes_no_past(client: Any) -> None:
    """What was acknowledged before it stays so; what was out at the time of a seek has come back."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        messages.get(timeout=10).ack()
        client.flush()
        client.seek("email", "earliest")
        messages.get(timeout=10)
        client.seek("email", "latest")
        found = outcomes(life(client))
    assert found == [(1, "worker", "acknowledged"), (1, "worker", "given back")]


def test_a_client_over_http_is_named(client: Any, server: RunningServer) -> None:
    """As it names itself, also when its messages are acknowledged at once."""
    client.create_subscription("email", "orders")
    client.publish("orders", b"x")
    with closing(Http(server.http_address)) as http:
        path = target("consume", "orders", group="email")
        assert http.get(path, {"X-Client-Id": "web"}).status == 200
    assert outcomes(life(client)) == [(1, "web", "acknowledged")]


def test_a_redriven_message_and_its_copy_lead_to_each_other(client: Any) -> None:
    """They have the same id, so the copy is found by its place."""
    client.create_subscription("email", "orders", max_deliveries=1)
    first = client.publish("orders", b"x")
    with closing(client.subscription("email", "orders")) as messages:
        messages.get(timeout=10).nack(reason="no")
        wait_until(lambda: client.dead_letters("email"))
    state = life(client)
    assert (state["state"], state["dead_letter"], state["redriven"]) == ("dead letter", 0, None)
    assert state["dead_lettered"] == client.dead_letters("email")[0].timestamp
    client.redrive("email")
    state = life(client)
    place = {name: state["redriven"][name] for name in ("topic", "partition", "offset")}
    assert place == {"topic": "orders", "partition": 0, "offset": 1}
    assert state["redriven"]["dead_lettered"] <= state["redriven"]["time"]
    copy = client.life_at("orders", 0, 1)
    assert copy["origin"] == {"topic": "orders", "partition": 0, "offset": 0}
    assert copy["id"] == str(first.id)
    assert copy["first_published"] == first.timestamp
    assert life(client, ("orders", 0, 1))["state"] == "not delivered yet"
    assert client.message_life(first.id)["origin"] is None


def test_a_place_without_a_message_is_an_error(client: Any) -> None:
    """Of a topic, and of a topic that does not exist."""
    client.publish("orders", b"x")
    with pytest.raises(MessageNotFound):
        client.life_at("orders", 0, 7)
    with pytest.raises(NotFound):
        client.life_at("nothing", 0, 0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of deliveries, and by that of the offsets that stand in lists."""
    found = Lives()
    for number in range(lives.DELIVERIES_MAX + 1):
        found.note((1, 1, range(number, number + 1), 1, 0, "m", 0.0, 0.0))
    assert found.deliveries_of(1, 1, 0) == []
    assert len(found.deliveries_of(1, 1, 1)) == 1
    monkeypatch.setattr(lives, "LISTED_MAX", 5)
    found.note((1, 1, [20_001, 20_005, 20_007], [1, 2, 3], 0, "m", 0.0, 0.0))
    found.note((1, 1, [30_001, 30_002], 1, 0, "m", 0.0, 0.0))
    [(_, index)] = found.deliveries_of(1, 1, 20_005)
    assert index == 1
    found.note((1, 1, [40_001], 1, 0, "m", 0.0, 0.0))
    assert found.deliveries_of(1, 1, 20_005) == []
    assert len(found.deliveries_of(1, 1, 30_002)) == 1
