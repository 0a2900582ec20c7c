"""Clients that are refused: the log says it once, with the setting that would change it."""

import socket
import ssl
from contextlib import closing, suppress
from pathlib import Path

import pytest

from headrace.broker.audit import Source
from headrace.server import refusals
from headrace.server.refusals import Refusals
from headrace.testing import RunningServer, running_server
from tests.server.http_rig import Http
from tests.server.test_certificates import Pair, make

Lines = pytest.LogCaptureFixture


def lines(caplog: Lines) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is refused" in r.getMessage()]


# --- how often --------------------------------------------------------------------------------------
class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def source(address: str = "10.0.0.7") -> Source:
    return Source(f"{address}:1", address, 5)


def test_it_is_said_once_and_then_counted(caplog: Lines) -> None:
    """An address hears each reason once; after a while, one line says how many there were."""
    time = Time()
    found = Refusals(time)
    for _ in range(1000):
        found.note("login", source(), "wrong token")
    found.note("tls", source(), "no TLS")
    found.note("login", source("10.0.0.8"), "wrong token")
    found.note("login", source("2001:db8::1"), "wrong token")
    found.note("login", source("2001:db8::2"), "wrong token")  # the same network
    assert [line.split(" is")[0] for line in lines(caplog)] == [
        "10.0.0.7:1", "10.0.0.7:1", "10.0.0.8:1", "2001:db8::1:1",
    ]  # fmt: skip
    assert found.counts == {"login": 1003, "tls": 1, "origin": 0, "host": 0}
    time.now = refusals.AGAIN_S
    caplog.clear()
    for _ in range(2):
        found.note("login", source(), "wrong token")
    [line] = lines(caplog)
    assert line.endswith("wrong token (999 times more since it was logged last)")
    assert (caplog.records[0].connection, caplog.records[0].cause) == (5, "login")  # type: ignore[attr-defined]


def test_many_addresses_do_not_fill_the_log(caplog: Lines) -> None:
    """The lines of a minute and the table are bounded; what was left out is counted."""
    time = Time()
    found = Refusals(time)
    for number in range(5000):
        found.note("login", source(f"10.0.{number >> 8}.{number & 255}"), "wrong token")
    assert len(lines(caplog)) == refusals.LINES_PER_MINUTE_MAX
    time.now = 60
    caplog.clear()
    found.note("login", source("10.1.0.0"), "wrong token")
    [line] = lines(caplog)
    left_out = 5000 - refusals.LINES_PER_MINUTE_MAX
    assert line.endswith(f"(and {left_out} others, which were not logged)")
    for minute in range(2, 100):
        time.now = 60 * minute
        for number in range(refusals.LINES_PER_MINUTE_MAX):
            found.note("login", source(f"10.{minute}.0.{number}"), "wrong token")
    assert len(found._known) == refusals.ENTRIES_MAX


# --- who is refused ---------------------------------------------------------------------------------
def test_pages_and_names_are_logged_with_their_setting(caplog: Lines) -> None:
    """Each other site, and each name that is not this machine's, and counted in the metrics."""
    with running_server(memory=True) as server, closing(Http(server.http_address)) as http:
        for _ in range(3):
            for origin in ("https://a.example", "https://b.example"):
                assert http.get("/topics", {"Origin": origin}).status == 403
            assert http.get("/topics", {"Host": "evil.example"}).status == 403
        metrics = http.get("/metrics").body
    found = lines(caplog)
    assert len(found) == 3
    assert ["allowed_origins" in line for line in found] == [True] * 3
    for name, line in zip(("a.example", "b.example", "evil.example"), found, strict=True):
        assert name in line
    assert b'message_broker_clients_refused_total{cause="origin"} 6.0' in metrics
    assert b'message_broker_clients_refused_total{cause="host"} 3.0' in metrics


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory.mktemp("tls"), "localhost", "DNS:localhost,IP:127.0.0.1")


def hello(server: RunningServer, context: ssl.SSLContext, name: str = "localhost") -> None:
    with (
        socket.create_connection(server.http_address, 10) as raw,
        suppress(ssl.SSLError, OSError),
        context.wrap_socket(raw, server_hostname=name) as tls,
    ):
        tls.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        tls.recv(100)


def test_tls_failures_are_logged_with_their_setting(
    pair: Pair, tmp_path: Path, caplog: Lines
) -> None:
    """A client without TLS, one that does not trust us, one whose certificate nobody knows, a slow one."""
    other = make(tmp_path, "other", "DNS:other")
    trusting = ssl.create_default_context(cafile=pair.certificate)
    foreign = ssl.create_default_context(cafile=pair.certificate)
    foreign.load_cert_chain(*other)
    with running_server(
        memory=True,
        tls_cert=pair.certificate,
        tls_key=pair.key,
        tls_client_ca=pair.certificate,
        handshake_timeout=0.2,
    ) as server:
        count = server.server.hub.refusals.counts
        with socket.create_connection(server.http_address, 10) as raw:
            raw.send(b"GET /health HTTP/1.1\r\n\r\n")
            server.wait_until(lambda: count["tls"] == 1)
        hello(server, ssl.create_default_context())
        server.wait_until(lambda: count["tls"] == 2)
        hello(server, foreign)
        server.wait_until(lambda: count["tls"] == 3)
        with socket.create_connection(server.http_address, 10):
            server.wait_until(lambda: count["tls"] == 4)
        before = server.call(lambda: server.server.hub.failed_handshakes)
        with socket.create_connection(server.http_address, 10):
            pass  # as the health check of a load balancer does
        server.wait_until(lambda: server.server.hub.failed_handshakes > before)
        hello(server, trusting)
        assert count["tls"] == 4
    found = lines(caplog)
    words = ["tls_cert", "--ca", "tls_client_ca", "handshake_timeout"]
    assert len(found) == len(words)
    for word, line in zip(words, found, strict=True):
        assert word in line


@pytest.mark.parametrize("port", ["http_address", "address"])
def test_tls_on_a_plain_port_is_logged(port: str, caplog: Lines) -> None:
    """The client only sees that the handshake fails."""
    with running_server(memory=True) as server:
        with (
            socket.create_connection(getattr(server, port), 10) as raw,
            suppress(OSError),
        ):
            ssl.create_default_context().wrap_socket(raw, server_hostname="localhost")
        server.wait_until(lambda: server.server.hub.refusals.counts["tls"] == 1)
    [line] = lines(caplog)
    assert "set tls_cert and tls_key" in line
