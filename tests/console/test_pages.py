"""The console in a real browser, over data that real clients made.

The tests marked slow are for `make slow`; the others, with those of test_login.py, are the short version.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from axe_core_python import selenium as axe_selenium
from selenium.webdriver.common.keys import Keys

from headrace.broker import searching
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import running_server, wait_until
from tests.console.browser import Browser
from tests.console.pictures import PAGES
from tests.console.shop import COUNT, SCRIPT

pytestmark = pytest.mark.xdist_group("browser")
AXE = Path(axe_selenium.__file__).with_name("axe.min.js").read_text()


def base_of(server: Any) -> str:
    host, port = server.http_address
    return f"http://{host}:{port}"


SMALL_TARGETS = """
const size = (node) => node.type === "checkbox" ? 24 : 32;
return [...document.querySelectorAll("button, .button, select, input, summary, #menu a, .tabs a")]
  .filter((node) => node.checkVisibility() && node.getBoundingClientRect().height < size(node))
  .map((node) => node.outerHTML.slice(0, 120));
"""
"""What a finger misses."""


# --- every page -------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_any_page(page: Browser, theme: str) -> None:
    """Names, contrasts, headings and roles are right, in both themes."""
    for name, address in PAGES.items():
        page.go(address)
        page.until(
            lambda: page.driver.execute_script("return !document.querySelector('main[aria-busy]')"),
            name,
        )
        page.find("main h1")
        assert serious(page, theme) == [], name


def serious(page: Browser, theme: str) -> Any:
    """What axe finds, of what matters."""
    page.theme(theme)
    page.driver.execute_script(AXE)
    return page.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document).then((result) => done(result.violations"
        ".filter((each) => ['serious', 'critical'].includes(each.impact))"
        ".map((each) => [each.id, each.nodes.slice(0, 3).map((node) => node.html + ' ' + node.failureSummary)])))"
    )


DIALOGS = {
    "create a topic": ("#/topics", "#create-topic"),
    "create a subscription": ("#/subscriptions", "#create-subscription"),
    "seek": ("#/subscriptions/billing", "#seek"),
    "redrive": ("#/dead-letters/email", "#redrive"),
    "edit": ("#/dead-letters/email?letter=1", "[data-focus=edit-1]"),
    "purge": ("#/dead-letters/email", "#purge"),
    "delete": ("#/topics/orders/details", "#delete-topic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_dialogs(page: Browser, theme: str) -> None:
    """Each has a name, and so have its fields."""
    for name, (address, opens) in DIALOGS.items():
        page.go(address)
        page.click(opens)
        page.find("dialog[open]")
        assert serious(page, theme) == [], name
        page.button("Close", "dialog")


@pytest.mark.slow
def test_no_page_is_wider_than_a_phone(page: Browser) -> None:
    """Nothing has to be moved sideways to be read."""
    page.driver.set_window_size(400, 800)
    try:
        for name, address in PAGES.items():
            page.go(address)
            page.find("main h1")
            wide = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert page.driver.execute_script(wide) <= 0, name
            assert page.driver.execute_script(SMALL_TARGETS) == [], name
    finally:
        page.driver.set_window_size(1280, 900)


# --- overview ---------------------------------------------------------------------------------------
def test_the_overview_says_what_needs_attention(page: Browser, server: Any) -> None:
    """Dead letters, a pause, a subscription that nobody reads; and plots when there are measurements."""
    page.says("email.dlq has 8 dead letters", "#attention")
    page.says("reports is paused", "#attention")
    page.says("warehouse has no members", "#attention")
    page.says("The pipeline copies has failed", "#attention")
    page.until(
        lambda: page.driver.execute_script(
            "return document.querySelectorAll('.plot .line').length >= 10"
        ),
        "no plots",
    )


@pytest.mark.slow
def test_the_theme_can_be_switched(page: Browser) -> None:
    """Auto, light, dark; it stays after a reload."""
    for wanted in ("light", "dark"):
        page.click("#theme")
        assert page.driver.execute_script("return document.documentElement.dataset.theme") == wanted
    page.driver.refresh()
    page.says("Dark", "#theme")
    page.click("#theme")


@pytest.mark.slow
def test_keys_open_pages(page: Browser) -> None:
    """g t opens the topics, / goes to the filter, ? lists the keys."""
    body = page.find("main")
    body.send_keys("g")
    page.find("main").send_keys("t")
    page.says("Topics", "h1")
    page.find("main").send_keys("/")
    page.until(
        lambda: page.driver.switch_to.active_element.get_attribute("id") == "filter", "no focus"
    )
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.find("main h1").click()
    page.find("main").send_keys("?")
    page.says("Go to the filter", "dialog")
    page.button("Close", "dialog")


# --- topics -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_topics_are_filtered_and_sorted(page: Browser) -> None:
    """By the broker, and the address keeps it."""
    page.go("#/topics")
    page.says("orders", "#list")
    page.type("#filter", "pay")
    page.until(lambda: "orders" not in page.text("#list"), "not filtered")
    assert "match=pay" in page.driver.current_url
    page.type("#filter", "")
    page.says("orders", "#list")
    page.button("Messages", "#list")
    page.until(lambda: page.text("#list tbody tr").startswith("orders"), "not sorted")


def test_a_topic_is_created_and_deleted(page: Browser, client: Any) -> None:
    """And its page says that it is gone when somebody else deletes it."""
    page.go("#/topics")
    page.click("#create-topic")
    page.type("#new-topic", "temporary")
    page.button("Create", "dialog")
    page.says("temporary", "#list")
    page.go("#/topics/temporary/details")
    page.says("Nobody has subscribed", "main")
    client.delete_topic("temporary")
    page.says("Not found", "main")
    page.says("temporary", ".problem")
    page.errors()  # the browser notes each answer that is no success


def test_messages_are_browsed_without_consuming(page: Browser, client: Any) -> None:
    """The newest, the oldest, by offset; opened, indented, and linked."""
    before = client.subscription_stats("warehouse")["lag"]
    page.go("#/topics/orders")
    page.says("50 messages, the newest first", ".status")
    page.choose("#from", "earliest")
    page.click("#show")
    page.says('"order":0', "#messages")
    page.click("#more")
    page.says(f"{COUNT} messages", ".status")
    page.choose("#from", "offset")
    page.type("#place", "3")
    page.click("#show")
    page.until(lambda: page.text(".message .place") == "0/3", "not at the offset")
    page.click(".message summary")
    page.says('  "customer": {', ".payload")
    page.button("Link, and its life")
    page.says("0/3", "h1")
    page.says("Its life", "#life")
    assert client.subscription_stats("warehouse")["lag"] == before


def test_a_message_with_markup_stays_text(page: Browser, client: Any) -> None:
    """Whatever a payload says, it is shown and not run; bytes become hex, and large numbers stay exact."""
    page.go("#/topics/payments?from=earliest")
    page.says("onerror", "#messages")
    for number in range(3):
        page.driver.execute_script(f"document.querySelectorAll('.message')[{number}].open = true")
    page.says(SCRIPT, "#messages")
    page.says("00000000  00 01 02 03", "#messages")
    page.says("90071992547409931234", "#messages")
    page.go("#/dead-letters/email")
    page.says(SCRIPT, "#letters")
    assert (
        page.driver.execute_script(
            "return document.querySelectorAll('main img, main script').length"
        )
        == 0
    )
    assert "owned" not in page.driver.title


@pytest.mark.parametrize(
    ("kind", "wanted", "found"),
    [("text", '"order":41', 1), ("key", "c3", 9), ("header", "source=web", 30), ("json", "customer.id=c5", 8), ("json", "nothing.here", 0)],
)  # fmt: skip
def test_a_search_finds_messages(page: Browser, kind: str, wanted: str, found: int) -> None:
    """In the text, the key, a header or a JSON path; the address keeps it."""
    page.go("#/topics/orders")
    page.says("50 messages", ".status")
    page.choose("#kind", kind)
    page.type("#find", wanted)
    page.click("#show")
    page.says(f"{found} message{'' if found == 1 else 's'} found in {COUNT} of {COUNT}", ".status")


def test_a_long_search_shows_its_progress_and_can_be_stopped(
    page: Browser, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is many requests, so stopping costs nothing."""
    monkeypatch.setattr(searching, "STRETCH_BYTES", 1)
    monkeypatch.setattr(searching, "READ_BYTES", 1)
    for _ in range(40):
        client.publish_many("long", [b"x" * 4000] * 100)
    page.go("#/topics/long")
    page.find("#find").send_keys("nowhere")
    page.click("#show")
    page.click("#cancel-search")
    page.says("Stopped", ".status")
    page.says("0 messages found in", ".status")
    assert not page.has("progress")


@pytest.mark.slow
def test_messages_are_browsed_from_a_time_and_searched_up_to_one(
    page: Browser, client: Any
) -> None:
    """Both are times of the browser's own zone."""
    times = [1_700_000_000_000 + 60_000 * number for number in range(10)]
    batch = encode(Columns([b"minute %d" % n for n in range(10)], times=times))
    client.publish_batch("timed", batch)
    local = page.driver.execute_script(
        "return arguments[0].map((at) => new Date(at - new Date(at).getTimezoneOffset() * 60000)"
        ".toISOString().slice(0, 19))",
        times,
    )
    page.go("#/topics/timed")
    page.find(".message")
    page.choose("#from", "time")
    page.choose("#place", local[6])
    page.click("#show")
    page.says("4 messages", ".status")
    page.says("minute 6", "#messages")
    page.choose("#from", "earliest")
    page.find("#find").send_keys("minute")
    page.choose("#until", local[3])
    page.click("#show")
    page.says("3 messages found in 3 of 3", ".status")


@pytest.mark.slow
def test_what_is_shown_is_exported(page: Browser, tmp_path: Path) -> None:
    """As JSON lines, one for each message."""
    allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    page.go("#/topics/orders?kind=json&find=customer.id%3Dc5")
    page.says("8 messages found", ".status")
    page.click("#export")
    path = tmp_path / "orders.jsonl"
    wait_until(path.exists)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["data"]["customer"]["id"] for line in lines] == ["c5"] * 8


@pytest.mark.slow
def test_settings_of_a_topic_are_changed(page: Browser, client: Any) -> None:
    """Retention and partitions; what is refused says why."""
    client.create_topic("changing")
    page.go("#/topics/changing/details")
    page.button("Change settings", "main")
    fields = page.driver.find_elements("css selector", "dialog input")
    for field, text in zip(fields, ("72", "", "4"), strict=True):
        field.clear()
        field.send_keys(text)
    page.button("Change", "dialog")
    page.until(lambda: client.topic_stats("changing")["settings"]["partitions"] == 4, "no change")
    assert client.topic_stats("changing")["settings"]["retention_hours"] == 72


def test_the_live_tail_pauses_and_resumes(page: Browser, client: Any) -> None:
    """New messages appear on top; what came during the pause appears afterwards."""
    page.go("#/topics/payments")
    page.find(".message")
    page.click("#live")
    page.says("Live:", ".status")
    client.publish("payments", b"the first live one")
    page.says("the first live one", "#messages")
    page.click("#live")
    page.says("paused", ".status")
    client.publish("payments", b"the second live one")
    assert "second" not in page.text("#messages")
    page.click("#live")
    page.says("the second live one", "#messages")


def test_a_topic_and_a_message_name_their_publisher(page: Browser) -> None:
    """As the client has named itself."""
    page.go("#/topics/orders/details")
    page.says("shop", "#publishers")
    page.says("binary", "#publishers")
    page.go("#/topics/orders/messages/0/0")
    page.says("Published by shop (anyone, 127.0.0.1, binary)", "#life")


def test_the_life_of_a_message_says_where_it_was_archived(page: Browser, client: Any) -> None:
    """If the subscription is that of an archive or a pipeline, which reports its table."""
    client.publish("kept", b"one")
    with client.subscription("archive", "kept") as messages:
        messages.get(timeout=10).ack()
    query = {"name": "archive-lake", "sink": "table /lake/kept"}
    run = {"state": "running", "run_id": "r", "started_at": 1, "queries": [query]}
    client.report_pipeline("archive", run)
    page.go("#/topics/kept/messages/0/0")
    page.says("written to table /lake/kept", "#life")


def test_a_message_is_published_with_everything(page: Browser, client: Any) -> None:
    """Key, headers, one subscription; and the form keeps what was typed."""
    page.go("#/topics/payments/publish")
    page.choose("#payload", '{"amount": 12}')
    page.type("#key", "k1")
    page.type("#headers", "shop: north\ngreeting: Grüße, 日本")
    page.click("#publish")
    page.says("Published at", ".good")
    message = list(client.fetch("payments", "earliest", limit=1000))[-1]
    assert (message.key, json.loads(message.value), message.headers["shop"]) == (
        b"k1",
        {"amount": 12},
        "north",
    )
    assert message.headers["greeting"] == "Grüße, 日本"
    page.type("#delay", "900")
    page.click("#publish")
    page.says("Scheduled", ".good")
    page.go("#/topics")
    page.says("Topics", "h1")
    page.go("#/topics/payments/publish")
    assert page.find("#key").get_attribute("value") == "k1"
    page.choose("#payload", "{not json")
    page.click("#publish")
    page.says("not JSON", ".problem")


# --- subscriptions ----------------------------------------------------------------------------------
def test_a_stuck_subscription_is_explained(page: Browser) -> None:
    """In words, with the member that holds everything."""
    page.go("#/subscriptions/billing")
    page.says("hold as many messages as they may (prefetch 5)", "#why")
    page.says("The oldest message that is not done is", "#why")
    page.says("ledger-1", "#members")
    page.says("5 of 5", "#members")
    page.until(lambda: page.text(".held").count("attempt 1") == 5, "not all that it holds")


def test_a_subscription_is_paused_and_resumed(page: Browser, client: Any) -> None:
    """The button says what it will do next."""
    page.go("#/subscriptions/warehouse")
    page.button("Pause", "#actions")
    page.says("is paused", "#why")
    assert client.subscription_stats("warehouse")["paused"]
    page.button("Resume", "#actions")
    page.says("has no members", "#why")
    assert not client.subscription_stats("warehouse")["paused"]


def test_a_seek_shows_what_it_would_do(page: Browser, client: Any) -> None:
    """Before it does it."""
    client.create_subscription("seeker", "orders")
    page.go("#/subscriptions/seeker")
    page.button("Seek", "#actions")
    page.choose("#seek-to", "latest")
    page.says(f"{COUNT} messages would be skipped", "#seek-preview")
    page.says(f"0 instead of {COUNT}", "#seek-preview")
    page.button("Seek", "dialog")
    page.says("nothing to do", "#why")
    assert client.subscription_stats("seeker")["lag"] == 0
    client.delete_subscription("seeker")
    page.says("Not found", "main")
    page.errors()


@pytest.mark.slow
def test_a_seek_goes_to_an_offset_or_a_time(page: Browser, client: Any) -> None:
    """Each with its preview."""
    client.publish_many("journal", [b"x"] * 20)
    client.create_subscription("reader", "journal", "latest")
    page.go("#/subscriptions/reader")
    page.button("Seek", "#actions")
    page.choose("#seek-to", "offset")
    page.choose("#seek-place", "15")
    page.says("5 messages would be delivered again", "#seek-preview")
    page.choose("#seek-to", "time")
    page.choose("#seek-place", "2020-01-01T00:00:00")
    page.says("20 messages would be delivered again", "#seek-preview")
    page.button("Seek", "dialog")
    page.until(lambda: client.subscription_stats("reader")["lag"] == 20, "not moved")


# --- dead letters -----------------------------------------------------------------------------------
def test_dead_letters_are_filtered_edited_redriven_and_purged(page: Browser, client: Any) -> None:
    """One after the other, each with a preview or a question first."""
    page.go("#/dead-letters/email?letter=2")
    page.says("8 letters", "#tools")
    page.says("given up by email", "#letters")
    page.button("Edit", "#letters")
    page.choose("#edit-data", '{"order": 18, "corrected": true}')
    page.button("Save", "dialog")
    page.says('"corrected": true', "#letters")
    page.type("#reason", "REFUSED")
    page.button("Filter", "form")
    page.says("7 letters", "#tools")
    page.button("Redrive", "#tools")
    page.says("7 letters would be published", "#redrive-preview")
    page.choose("#transform", '[{"op": "remove", "path": "/customer"}]')
    page.says("1 letter cannot be", "#redrive-preview")
    page.choose("#transform", '{"currency": "EUR"}')
    page.says('"currency": "EUR"', "#redrive-preview")
    page.choose("#redrive-to", "elsewhere")
    page.type("#destination", "second-chance")
    page.says("to second-chance", "#redrive-preview")
    page.button("Redrive", "dialog")
    page.says("No dead letter matches", "#letters")
    sent = list(client.fetch("second-chance", "earliest"))
    assert [json.loads(message.value)["currency"] for message in sent] == ["EUR"] * 7
    page.go("#/dead-letters/email")
    page.says("1 letter", "#tools")
    page.button("Purge all", "#tools")
    page.button("Purge", "dialog")
    page.says("There are no dead letters", "#letters")
    assert client.dead_letters("email") == []


@pytest.mark.slow
def test_selected_letters_are_redriven_at_a_rate(page: Browser, client: Any) -> None:
    """To all subscriptions of their topic; the others stay."""
    with client.subscription("picky", "parcels", max_deliveries=1) as messages:
        client.publish_many("parcels", [b"%d" % number for number in range(4)])
        for _ in range(4):
            messages.get(timeout=10).nack(reason="no")
    wait_until(lambda: len(client.dead_letters("picky")) == 4)
    page.go("#/dead-letters/picky")
    page.says("4 letters", "#tools")
    for number in (1, 3):
        page.click(f"#letters .chosen:nth-child({number}) input")
    page.says("2 letters selected", "#tools")
    page.button("Redrive selected", "#tools")
    page.says("2 letters would be published", "#redrive-preview")
    page.choose("#redrive-to", "topic")
    page.type("#rate", "0.5")
    page.button("Redrive", "dialog")
    page.says("1 redriven, 1 letter left, at most 0.5 a second", "#redrives")
    page.says("Redriven: 2.", "#toasts")
    assert not page.has("#redrives .row")
    assert [letter.message.value for letter in client.dead_letters("picky")] == [b"1", b"3"]
    assert [m.value for m in client.fetch("parcels", 4)] == [b"0", b"2"]


def test_a_redrive_is_stopped(page: Browser, client: Any) -> None:
    """It runs when the page is left, and the page shows it again, with a button that stops it."""
    with client.subscription("halted", "halts", max_deliveries=1) as messages:
        client.publish_many("halts", [b"%d" % number for number in range(3)])
        for _ in range(3):
            messages.get(timeout=10).nack(reason="no")
    wait_until(lambda: len(client.dead_letters("halted")) == 3)
    client.redrive("halted", rate=0.01, wait=0)
    page.go("#/dead-letters/halted")
    page.says("1 redriven, 2 letters left", "#redrives")
    page.go("#/dead-letters")
    page.says("Kept in", "#list")
    page.go("#/dead-letters/halted")
    page.button("Stop", "#redrives")
    page.says("Redriven: 1. Stopped.", "#toasts")
    page.says("2 letters", "#tools")
    assert [each["state"] for each in client.redrives("halted")] == ["stopped"]


def test_binary_letters_are_edited_as_digits(page: Browser, client: Any) -> None:
    """Pairs of hexadecimal digits; anything else is refused, and nothing is lost."""
    with client.subscription("scanner", "scans", max_deliveries=1) as messages:
        client.publish("scans", bytes(range(250, 256)), {"kind": "raw"})
        messages.get(timeout=10).nack(reason="unreadable")
    wait_until(lambda: client.dead_letters("scanner"))
    page.go("#/dead-letters/scanner?letter=0")
    page.button("Edit", "#letters")
    assert page.find("#edit-data").get_attribute("value") == "fa fb fc fd fe ff"
    page.choose("#edit-data", "fa f")
    page.button("Save", "dialog")
    page.says("pairs of hexadecimal digits", "#toasts")
    page.choose("#edit-data", "00 FF\n10")
    page.button("Save", "dialog")
    page.says("00000000  00 ff 10", "#letters")
    [letter] = client.dead_letters("scanner")
    assert (letter.message.value, letter.message.headers["kind"]) == (b"\x00\xff\x10", "raw")


def test_a_large_number_survives_an_edit(page: Browser, client: Any) -> None:
    """It is larger than JavaScript can count, and stays what it is."""
    with client.subscription("accounts", "sums", max_deliveries=1) as messages:
        client.publish("sums", b'{"sum":90071992547409931234}')
        messages.get(timeout=10).nack(reason="too much")
    wait_until(lambda: client.dead_letters("accounts"))
    page.go("#/dead-letters/accounts?letter=0")
    page.button("Edit", "#letters")
    page.choose("#edit-data", '{"sum": 90071992547409931234, "checked": true}')
    page.button("Save", "dialog")
    page.says("checked", "#letters")
    [letter] = client.dead_letters("accounts")
    assert b"90071992547409931234" in letter.message.value


# --- the rest ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_delayed_messages_are_cancelled_or_published_now(page: Browser, client: Any) -> None:
    """Each with a button."""
    client.create_topic("soon")
    client.publish("soon", b"now, please", delay=600)
    client.publish("soon", b"never", delay=1200)
    page.go("#/scheduled?topic=soon")
    page.says("Publish now", "#list")
    page.button("Publish now", "#list")
    wait_until(lambda: [m.value for m in client.fetch("soon", "earliest")] == [b"now, please"])
    page.until(lambda: page.text("#list").count("Cancel") == 1, "still two")
    page.button("Cancel", "#list")
    page.button("Cancel the message", "dialog")
    page.says("No message waits", "#list")


@pytest.mark.slow
def test_pipelines_are_shown_and_stopped(page: Browser, client: Any) -> None:
    """With their rates and their last errors."""
    page.go("#/pipelines")
    page.says("the table was deleted", "#list")
    page.says("813", "#list")
    page.button("Stop", "#list")
    page.button("Stop the pipeline", "dialog")
    page.says("stopping", "#list")
    wait_until(lambda: client.pipeline_stats("totals")["stopping"])


@pytest.mark.slow
def test_access_shows_the_connections(page: Browser) -> None:
    """And that this broker has no access control."""
    page.go("#/access")
    page.says("no access control", "main")
    page.says("ledger-1", "#clients")


def test_a_broker_without_a_cluster_has_no_page_of_it(page: Browser) -> None:
    """It is not in the menu, and its address says why."""
    assert not page.has("#menu a[href='#/cluster']")
    page.go("#/cluster")
    page.says("not a node of a cluster", "main")
    page.errors()


@pytest.mark.slow
def test_five_thousand_topics_are_quick(look: Browser) -> None:
    """A page of them is there at once, also sorted and filtered."""
    with running_server(memory=True) as server:
        create = server.engine.create_topic
        server.call(lambda: [create(f"t{number:04}") for number in range(5_000)])
        look.open(base_of(server), "#/topics")
        look.says("of 5,000", "#list")
        begun = time.monotonic()
        look.type("#filter", "t49")
        look.says("1–50 of 100", "#list")
        assert time.monotonic() - begun < 5
