"""A paused subscription: nothing is delivered, whoever asks, until it is resumed."""

from contextlib import closing

import pytest

from headrace.errors import Forbidden, RequestTimeout
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.access_rig import ROOT
from tests.server.http_rig import http_of
from tests.server.test_metrics import Metrics


def test_nothing_is_delivered_until_it_is_resumed(server: RunningServer) -> None:
    """Messages that are out may be settled meanwhile; a retry waits, too."""
    with server.client() as client:
        client.create_subscription("email", "orders", backoff=0)
        for value in ("one", "two", "three"):
            client.publish_text("orders", value)
        with client.subscription("email", prefetch=2) as consumer:
            first, second = consumer.get(timeout=10), consumer.get(timeout=10)
            assert client.pause_subscription("email")["paused"] is True
            first.ack()
            second.nack()
            client.flush()
            wait_until(lambda: client.subscription_stats("email")["in_flight"] == 0)
            with pytest.raises(RequestTimeout):
                consumer.get(timeout=0.2)
            stats = client.subscription_stats("email")
            assert (stats["lag"], stats["acked"], stats["paused"]) == (2, 1, True)
            assert client.resume_subscription("email")["paused"] is False
            got = {consumer.get(timeout=10).text() for _ in range(2)}
            assert got == {"two", "three"}


def test_it_stays_paused_over_a_kill() -> None:
    """Also if the journal was written anew, and a second time changes nothing."""
    with running_server() as server:
        with server.client() as client:
            client.create_subscription("email", "orders")
            client.publish_text("orders", "one")
            client.pause_subscription("email")
            client.pause_subscription("email")
        for end in (server.kill, server.stop):
            end()
            server.start()
            with server.client() as client:
                assert client.subscription_stats("email")["paused"] is True
        with server.client() as client:
            client.resume_subscription("email")
        server.kill()
        server.start()
        with server.client() as client, client.subscription("email") as consumer:
            assert consumer.get(timeout=10).text() == "one"


def test_http_says_so(server: RunningServer) -> None:
    """A consume is refused with a code that says what to do; one that waits hears it at the end."""
    with server.client() as client, closing(http_of(server)) as http:
        client.publish_text("orders", "one")
        client.create_subscription("email", "orders")
        paused = http.ask("POST", "/subscriptions/email/pause")
        assert (paused.status, paused.json["paused"]) == (200, True)
        for path in ("/consume/orders", "/consume/orders/batch"):
            answer = http.ask("GET", f"{path}?group=email&wait=20s")
            assert (answer.status, answer.code) == (409, "subscription_paused")
            assert answer.json["error"]["retryable"] is True
        metrics = Metrics(http)
        assert metrics.value("group_paused", topic="orders", group="email") == 1
        assert http.ask("POST", "/subscriptions/email/resume").json["paused"] is False
        assert http.ask("GET", "/consume/orders?group=email").status == 200


def test_it_takes_the_right_to_manage() -> None:
    """A member cannot stop the others."""
    with running_server(memory=True, token=ROOT) as server, server.client(token=ROOT) as root:
        root.create_subscription("mine.s", "mine.a")
        secrets = {
            right: root.create_token(right, grants=[f"{right}:mine.>:mine.>"])["secret"]
            for right in ("consume", "manage")
        }
        with server.client(token=secrets["consume"]) as member, pytest.raises(Forbidden):
            member.pause_subscription("mine.s")
        with server.client(token=secrets["manage"]) as operator:
            assert operator.pause_subscription("mine.s")["paused"] is True
