"""The rest of what an operator does in the console, in a real browser; test_pages.py has the usual ways."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import running_server, wait_until
from tests.console.browser import Browser
from tests.console.test_pages import base_of

pytestmark = pytest.mark.xdist_group("browser")


def give_up(client: Any, name: str, topic: str, count: int, reason: str = "no") -> None:
    """Dead letters of a subscription."""
    with client.subscription(name, topic, max_deliveries=1, prefetch=count) as messages:
        client.publish_many(topic, [b"%d" % number for number in range(count)])
        for _ in range(count):
            messages.get(timeout=10).nack(reason=reason)
    wait_until(lambda: len(client.dead_letters(name, limit=1000)) == count)


# --- topics -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_topic_and_a_subscription_are_made_and_deleted(page: Browser, client: Any) -> None:
    """By buttons, each with a question before anything is lost."""
    page.go("#/topics")
    page.click("#create-topic")
    page.type("#new-topic", "brief")
    page.button("Create", "dialog")
    page.says("Created topic brief", "#toasts")
    page.go("#/subscriptions")
    page.click("#create-subscription")
    page.type("#new-subscription", "reader-of-brief")
    page.type("#new-pattern", "brief")
    page.button("Create", "dialog")
    page.says("reader-of-brief", "#list")
    page.go("#/subscriptions/reader-of-brief")
    page.button("Delete", "#actions")
    page.button("Close", "dialog")
    assert client.subscription_stats("reader-of-brief")["topic"] == "brief"
    page.button("Delete", "#actions")
    page.button("Delete the subscription", "dialog")
    page.says("Subscriptions", "h1")
    assert "reader-of-brief" not in {each["name"] for each in client.subscriptions()}
    page.go("#/topics/brief/details")
    page.click("#delete-topic")
    page.button("Delete the topic", "dialog")
    page.says("Topics", "h1")
    assert "brief" not in client.topics()


@pytest.mark.slow
def test_a_message_is_published_to_one_subscription(page: Browser, client: Any) -> None:
    """The others pass it over."""
    for name in ("one", "other"):
        client.create_subscription(name, "direct")
    page.go("#/topics/direct/publish")
    page.choose("#payload", '"for one"')
    page.choose("#to", "one")
    page.click("#publish")
    page.says("Published at", ".good")
    with client.subscription("one", "direct") as messages:
        assert messages.get(timeout=10).value == b'"for one"'
    client.publish("direct", b"for all")
    with client.subscription("other", "direct") as messages:
        assert messages.get(timeout=10).value == b"for all"


@pytest.mark.slow
def test_the_live_tail_of_a_fast_topic_stays_at_its_end(page: Browser, client: Any) -> None:
    """What comes faster than anybody reads is left out, and the page says how much."""
    client.publish("fast", b"the first")
    page.go("#/topics/fast")
    page.says("the first", "#messages")
    page.click("#live")
    page.says("Live: 1 message", ".status")
    page.click("#live")
    page.says("paused", ".status")
    for part in range(4):
        client.publish_many("fast", [b"%d" % (1000 * part + number) for number in range(1000)])
    page.click("#live")
    page.says("came too fast and are left out", ".status")
    page.says("3999", "#messages")
    client.publish("fast", b"the very last")
    page.says("the very last", "#messages")


@pytest.mark.slow
def test_the_live_tail_goes_on_after_its_messages_are_gone(page: Browser, client: Any) -> None:
    """The topic was created anew during the pause, so its offsets begin again."""
    client.publish_many("anew", [b"old"] * 5)
    page.go("#/topics/anew")
    page.says("5 messages", ".status")
    page.click("#live")
    page.says("Live:", ".status")
    page.click("#live")
    page.says("paused", ".status")
    client.delete_topic("anew")
    client.publish("anew", b"new")
    page.click("#live")
    page.says("new", "#messages")
    client.publish("anew", b"newer")
    page.says("newer", "#messages")
    page.errors()  # the browser notes each answer that is no success


@pytest.mark.slow
def test_a_topic_of_a_thousand_partitions_is_browsed_and_searched(look: Browser) -> None:
    """Its cursors are longer than an address may be."""
    with running_server(memory=True) as server, server.client() as client:
        client.create_topic("wide", partitions=1000)
        for number in (1, 500, 999):
            client.publish("wide", b"in partition %d" % number, partition=number)
        look.errors()
        look.open(base_of(server), "#/topics/wide")
        look.says("3 messages, the newest first", ".status")
        look.click("#live")
        look.says("Live: 3 messages", ".status")
        client.publish("wide", b"one more", partition=3)
        look.says("one more", "#messages")
        look.go("#/topics/wide?find=partition%20999")
        look.says("1 message found in 4 of 4", ".status")
        assert look.errors() == []


@pytest.mark.slow
def test_a_null_value_is_called_so(page: Browser, client: Any) -> None:
    """It is not the JSON null."""
    client.publish("states", None, key="k")
    client.publish("states", b"null", key="k")
    page.go("#/topics/states?from=earliest")
    page.says("no value (a tombstone)", ".message:first-child")
    page.says("null", ".message:last-child")
    page.click(".message:first-child summary")
    page.says("What its key stood for is gone", "#messages")


# --- a message's life -------------------------------------------------------------------------------
def test_the_life_of_a_message_has_each_delivery(page: Browser, client: Any, server: Any) -> None:
    """Who got it, what became of it, and where it was redriven to; the copy leads back."""
    client.create_subscription("witness", "lived")
    client.publish("lived", b"x")
    with (
        server.client(client_id="life-worker") as worker,
        worker.subscription("worker", "lived", max_deliveries=2, backoff=0) as messages,
    ):
        messages.get(timeout=10).nack(reason="too early")
        messages.get(timeout=10).nack(reason="too late")
        wait_until(lambda: client.dead_letters("worker"))
        page.go("#/topics/lived/messages/0/0")
        page.says("worker: attempt 1 went to life-worker", "#life")
        page.says("worker: attempt 1 failed with life-worker: too early", "#life")
        page.says("worker: given up, and kept as dead letter 0", "#life")
        client.redrive("worker")
        page.says("worker: redriven as lived 0/1", "#life")
        messages.get(timeout=10).ack()
    page.button("lived 0/1", "#life ol")
    page.says("0/1", "h1")
    page.says("First published as lived 0/0", "#life")
    page.says("worker: acknowledged by life-worker", "#life")


@pytest.mark.slow
def test_a_client_behind_a_wildcard_is_named(page: Browser, client: Any, server: Any) -> None:
    """It reads the topic as well."""
    client.create_topic("wild.life")
    with server.client(client_id="wild-one") as other, other.subscription("all", "wild.*"):
        page.go("#/topics/wild.life/details")
        page.says("wild-one", "section[aria-label=Clients]")


def test_a_dialog_closes_with_its_page(page: Browser, client: Any) -> None:
    """Whoever goes back is not locked behind it."""
    page.go("#/subscriptions")
    page.click("#create-subscription")
    page.find("#new-subscription")
    page.go("#/topics")
    page.says("Topics", "h1")
    assert not page.has("dialog")


# --- dead letters -----------------------------------------------------------------------------------
def test_many_dead_letters_are_shown_in_pages_and_linked(
    page: Browser, client: Any, tmp_path: Path
) -> None:
    """The page says that there are more; a link to one behind the first page opens it; all are exported."""
    give_up(client, "many", "heap", 120)
    page.go("#/dead-letters/many")
    page.says("100 letters shown, there are more", "#tools")
    page.click("#more")
    page.says("120 letters", "#tools")
    allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    page.button("Export", "#tools")
    path = tmp_path / "many.dlq.jsonl"
    wait_until(path.exists)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 120
    page.go("#/dead-letters/many?letter=110")
    page.says("given up by many", "#letters")
    page.says("heap 0/110", "#letters")


@pytest.mark.slow
def test_one_letter_and_some_letters_are_purged(page: Browser, client: Any) -> None:
    """After a question; the others stay."""
    give_up(client, "tidy", "litter", 4)
    page.go("#/dead-letters/tidy?letter=0")
    page.button("Purge", "#letters")
    page.button("Purge", "dialog")
    page.says("3 letters", "#tools")
    for number in (1, 2):
        page.click(f"#letters .chosen:nth-child({number}) input")
    page.button("Purge selected", "#tools")
    page.button("Purge", "dialog")
    page.says("1 letter", "#tools")
    assert [letter.offset for letter in client.dead_letters("tidy")] == [3]
