"""What strangers write stays text on every page, and other pages cannot act for a user: in a real browser."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.testing import RunningServer, running_server, wait_until
from tests.console.browser import Browser
from tests.console.shop import SCRIPT
from tests.console.test_pages import base_of

pytestmark = pytest.mark.xdist_group("browser")
TOKEN = "a-token-that-fits-into-a-form="


# --- markup -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hostile() -> Iterator[RunningServer]:
    """A broker whose clients put markup into everything that they may choose."""
    with running_server() as server, server.client(client_id=SCRIPT) as client:
        client.create_subscription("kept", "hostile")
        for _ in range(2):
            client.publish("hostile", SCRIPT, {"note": SCRIPT, "content-type": SCRIPT}, key=SCRIPT)
        with client.subscription("victim", "hostile", max_deliveries=1, prefetch=1) as messages:
            messages.get(timeout=10).nack(reason=SCRIPT)
            wait_until(lambda: client.dead_letters("victim"))
            messages.get(timeout=10)
            query = {"name": SCRIPT, "sink": SCRIPT, "error": SCRIPT}
            run = {"state": "failed", "run_id": SCRIPT, "started_at": 1, "queries": [query]}
            client.report_pipeline("hostile", run)
            yield server


@pytest.mark.parametrize(
    ("address", "where"),
    [
        ("#/topics/hostile", "#messages"),
        ("#/topics/hostile/details", "#publishers"),
        ("#/topics/hostile/messages/0/0", "#life"),
        ("#/subscriptions/victim", "#members"),
        ("#/dead-letters/victim?letter=0", "#letters"),
        ("#/pipelines", "#list"),
        ("#/access", "#clients"),
        ("#/topics/%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D'owned'%22%3E", ".problem"),
        ("#/topics/hostile?find=%3Cimg%20src%3Dx%20onerror%3D1%3E&kind=header", "main"),
    ],
)
def test_markup_is_shown_and_never_parsed(
    look: Browser, hostile: RunningServer, address: str, where: str
) -> None:
    """Client ids, keys, headers, reasons, errors of pipelines, and the address itself."""
    look.errors()
    base = base_of(hostile)
    if look.driver.current_url.startswith(base):
        look.go(address)
    else:
        look.open(base, address)
    look.find("main h1")
    if where == "main":
        look.until(
            lambda: "onerror" in (look.find("#find").get_attribute("value") or ""), "not kept"
        )
    else:
        look.says("onerror", where)
    look.driver.execute_script(
        "document.querySelectorAll('details').forEach((each) => (each.open = true))"
    )
    made = look.driver.execute_script(
        "return document.querySelectorAll('#app img, #app script, #app iframe, #toasts img').length"
    )
    assert made == 0
    assert look.driver.title != "owned"
    errors = look.errors()
    assert all("404" in error or "400" in error for error in errors), errors


def test_an_address_that_was_cut_is_no_page(look: Browser, hostile: RunningServer) -> None:
    """Half an escape is no escape; the menu goes on."""
    look.open(base_of(hostile), "#/topics/%E0%A4%A")
    look.says("There is no such page", "main")
    look.click("#menu a[href='#/topics']")
    look.says("hostile", "#list")
    assert look.errors() == []


# --- other pages ------------------------------------------------------------------------------------
@pytest.fixture
def foreign() -> Iterator[str]:
    """The address of a page of another port, with a form for each attack."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<form method='post' enctype='text/plain'><input></form>")

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.block_on_close = False  # the browser keeps connections open
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def send_form(look: Browser, page: str, action: str, name: str, value: str) -> str:
    """Submit a form of the foreign page; returns what the browser shows then."""
    look.driver.get(page)
    look.driver.execute_script(
        "const [form] = document.forms; form.action = arguments[0]; form[0].name = arguments[1];"
        "form[0].value = arguments[2]; form.submit()",
        action, name, value,
    )  # fmt: skip
    look.until(lambda: look.driver.current_url == action, "not sent")
    return str(look.driver.execute_script("return document.body.innerText"))


def test_a_form_of_another_page_does_nothing(look: Browser, foreign: str) -> None:
    """It cannot publish for a user who is signed in, nor sign a user in or out; its scripts read nothing."""
    with (
        running_server(token=TOKEN, memory=True, allowed_origins=["*"]) as server,
        server.client(token=TOKEN) as root,
    ):
        base = base_of(server)
        root.create_topic("orders")
        answer = send_form(
            look, foreign, f"{base}/console/session", '{"token":"' + TOKEN[:-1], '"}'
        )
        assert "not_the_console" in answer
        assert look.driver.get_cookies() == []
        look.open(base)
        look.type("#token", TOKEN)
        look.button("Sign in")
        look.says("Overview", "h1")
        answer = send_form(look, foreign, f"{base}/publish/orders", "x", "y")
        assert "not_the_console" in answer
        assert root.topic_stats("orders")["messages"] == 0
        look.driver.get(foreign)
        read = look.driver.execute_async_script(
            "const [address, done] = arguments; fetch(address, {credentials: 'include'})"
            ".then((answer) => done(answer.status), () => done('refused'))",
            f"{base}/access/whoami",
        )
        assert read in (401, "refused")
        look.open(base)
        look.says("Overview", "h1")
        look.driver.delete_all_cookies()
    look.errors()
