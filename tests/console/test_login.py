"""Signing in, rights, and a broker that goes away: in a real browser."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.testing import RunningServer, running_server, wait_until
from tests.console.browser import Browser
from tests.console.test_pages import base_of

pytestmark = pytest.mark.xdist_group("browser")
TOKEN = "a-token-for-the-tests-of-the-console"
PASSWORD = "a password, not a secret"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """A broker with users: root by its token, and Ann, who may browse and publish orders only."""
    with running_server(token=TOKEN) as server, server.client(token=TOKEN) as root:
        root.create_user("ann", password=PASSWORD, grants=["browse,publish:orders"])
        root.create_topic("orders")
        root.create_topic("salaries")
        root.create_subscription("billing", "orders", max_deliveries=1)
        root.publish("orders", b"hello")
        yield server


def sign_in(look: Browser, server: Any, **secrets: str) -> None:
    look.open(base_of(server))
    if "user" in secrets:
        look.click("#other-login")
    for name, value in secrets.items():
        look.type(f"#{name}", value)
    look.button("Sign in")


@pytest.fixture
def visitor(look: Browser, guarded: RunningServer) -> Iterator[Browser]:
    """Nobody is signed in."""
    look.driver.get(base_of(guarded))
    look.driver.delete_all_cookies()
    yield look
    look.driver.delete_all_cookies()
    look.errors()


def test_a_token_signs_in_and_out(visitor: Browser, guarded: RunningServer) -> None:
    """A wrong one is refused with a sentence; the right one leaves no trace that a script could read."""
    sign_in(visitor, guarded, token="wrong")
    visitor.says("Wrong token", "#login .problem")
    visitor.type("#token", TOKEN)
    visitor.button("Sign in")
    visitor.says("Overview", "h1")
    seen = visitor.driver.execute_script(
        "return document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage) + location.href"
    )
    assert TOKEN not in seen
    assert "headrace-" not in seen.replace("headrace-theme", "")
    [cookie] = visitor.driver.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    visitor.driver.refresh()
    visitor.says("Overview", "h1")
    visitor.button("Sign out")
    visitor.find("#token")
    assert visitor.driver.get_cookies() == []
    guarded.wait_until(lambda: len(guarded.server.hub.sessions) == 0)


def test_what_is_not_permitted_is_not_offered(visitor: Browser, guarded: RunningServer) -> None:
    """Ann sees her topic and its messages, and no button that the broker would refuse."""
    sign_in(visitor, guarded, user="ann", password=PASSWORD)
    visitor.says("The plots of the whole broker need the right metrics", "main")
    visitor.go("#/topics")
    visitor.says("orders", "#list")
    assert "salaries" not in visitor.text("#list")
    assert not visitor.has("#create-topic")
    visitor.go("#/topics/orders")
    visitor.says("hello", "#messages")
    visitor.go("#/topics/orders/details")
    visitor.says("Settings", "main")
    assert not visitor.has("#delete-topic")
    visitor.go("#/subscriptions/billing")
    visitor.says("billing", "h1")
    visitor.says("Positions", "main")
    assert not visitor.has("#pause")
    assert not visitor.has("#seek")
    visitor.go("#/topics/salaries")
    visitor.says("Not found", "h1")
    visitor.go("#/access")
    visitor.says("user:ann", "main")
    visitor.says("browse", "main")
    assert not visitor.has("#audit")


def test_payloads_need_a_right_of_their_own(visitor: Browser, guarded: RunningServer) -> None:
    """Who may publish and consume sees sizes and positions, and no contents."""
    with guarded.client(token=TOKEN) as root:
        root.create_user("bob", password=PASSWORD, grants=["publish,consume,manage:orders"])
    sign_in(visitor, guarded, user="bob", password=PASSWORD)
    visitor.says("Overview", "h1")
    visitor.go("#/topics/orders")
    visitor.says("you need the right browse", "main")
    assert not visitor.has("#messages")
    visitor.go("#/topics/orders/messages/0/0")
    visitor.says("You may not see this", "h1")
    assert "hello" not in visitor.text("main")
    visitor.go("#/subscriptions/billing")
    visitor.find("#pause")
    assert "Dead letters" not in visitor.text("#actions")


def test_a_right_over_another_topic_offers_nothing(
    visitor: Browser, guarded: RunningServer
) -> None:
    """To manage a subscription takes the right over its topics, not only over its name."""
    with guarded.client(token=TOKEN) as root:
        root.create_user("eve", password=PASSWORD, grants=["manage,consume:salaries", "browse:>"])
        with root.subscription("billing", "orders") as messages:
            messages.get(timeout=10).nack(reason="no")
        wait_until(lambda: root.dead_letters("billing"))
    sign_in(visitor, guarded, user="eve", password=PASSWORD)
    visitor.says("Overview", "h1")
    visitor.go("#/subscriptions/billing")
    visitor.says("Dead letters", "#actions")
    assert not visitor.has("#pause")
    assert not visitor.has("#seek")
    visitor.go("#/dead-letters/billing?letter=0")
    visitor.says("hello", "#letters")
    assert visitor.text("#tools").split("\n") == ["1 letter", "Export"]
    assert not visitor.has("#letters button[data-focus^=edit]")


def test_the_next_user_finds_nothing_of_the_last(visitor: Browser, guarded: RunningServer) -> None:
    """Neither after signing out, nor when the session has ended and somebody else signs in."""
    sign_in(visitor, guarded, user="ann", password=PASSWORD)
    visitor.says("Overview", "h1")
    visitor.go("#/topics/orders/publish")
    visitor.choose("#payload", '"a draft of Ann"')
    visitor.driver.delete_all_cookies()
    visitor.go("#/topics/orders")
    visitor.type("#token", TOKEN)
    visitor.button("Sign in")
    visitor.says("Overview", "h1")
    visitor.go("#/topics/orders/publish")
    assert "Ann" not in visitor.find("#payload").get_attribute("value")


def test_the_audit_is_shown_to_an_administrator(visitor: Browser, guarded: RunningServer) -> None:
    """Who created what, and who failed to log in."""
    sign_in(visitor, guarded, token=TOKEN)
    visitor.says("Overview", "h1")
    visitor.go("#/access")
    visitor.says("create_user", "#audit")
    visitor.says("ann", "main")


def test_a_revoked_login_ends_the_page(visitor: Browser, guarded: RunningServer) -> None:
    """The page asks to sign in again, and goes on where it was."""
    sign_in(visitor, guarded, user="ann", password=PASSWORD)
    visitor.says("Overview", "h1")
    visitor.go("#/topics")
    visitor.says("orders", "#list")
    with guarded.client(token=TOKEN) as root:
        root.change_user("ann", password="another password")
        visitor.find("#token")
        root.change_user("ann", password=PASSWORD)
    visitor.click("#other-login")
    visitor.type("#user", "ann")
    visitor.type("#password", PASSWORD)
    visitor.button("Sign in")
    visitor.says("Topics", "h1")


def test_the_broker_restarts_under_the_page(look: Browser) -> None:
    """A banner says so, and the page goes on by itself."""
    with running_server() as server:
        with server.client() as client:
            client.publish("orders", b"kept")
        look.open(base_of(server), "#/topics")
        look.says("orders", "#list")
        port = server.http_address[1]
        server.stop()
        look.says("The broker does not answer", ".banner")
        server.restart(http_port=port)
        look.says("The broker answers again", "#toasts")
        with server.client() as client:
            client.publish("after-the-restart", b"new")
        look.says("after-the-restart", "#list")
    look.errors()
