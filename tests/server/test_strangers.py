"""The TCP port and peers that speak another language: browsers above all."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from headrace.errors import Closed, HeadraceError
from headrace.testing import RunningServer, running_server
from tests.contract.raw_binary import HEARTBEAT, FrameSocket, frame
from tests.contract.raw_text import TextSocket

COMMANDS = b"DELETE orders\r\nPUB stolen 2\r\nhi"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def request(line: bytes, body: bytes = COMMANDS) -> bytes:
    """What a browser sends for ``fetch(..., {method: ..., mode: "no-cors", body: ...})``."""
    return (
        line + b"\r\nHost: 127.0.0.1:9999\r\nConnection: keep-alive\r\nContent-Length: %d\r\n"
        b"sec-ch-ua-platform: Linux\r\nUser-Agent: Mozilla/5.0\r\nContent-Type: text/plain;charset=UTF-8\r\n"
        b"Accept: */*\r\nOrigin: http://evil.example\r\nSec-Fetch-Mode: no-cors\r\n\r\n%b"
        % (len(body), body)
    )


def rest(address: tuple[str, int], *pieces: bytes) -> bytes:
    """All that the broker says until it closes the connection."""
    with socket.create_connection(address, 10) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = b""
        try:
            for piece in pieces:
                plain.sendall(piece)
            while data := plain.recv(1 << 16):
                said += data
        except (ConnectionResetError, BrokenPipeError):
            pass
        return said


def topics(server: RunningServer) -> list[str]:
    return server.call(lambda: sorted(t.name for t in server.engine.topics if t.name[:2] != "__"))


@pytest.mark.parametrize(
    "line",
    [
        b"POST / HTTP/1.1",
        b"GET /?a=b HTTP/1.1",
        b"POST /x=y HTTP/1.0",
        b"OPTIONS * HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"DELETE orders HTTP/1.1",  # a verb of ours, too
        b"PING / http/1.1",
        b"BREW pot HTTP/1.1",
        b"\r\nPOST / HTTP/1.1",
    ],
)
@pytest.mark.parametrize("token", [None, "correct horse battery staple"])
def test_http_on_the_tcp_port_is_closed_and_nothing_in_it_is_carried_out(
    line: bytes, token: str | None
) -> None:
    """In one piece, and byte by byte at the beginning; whatever the method, with a token or without."""
    with running_server(memory=True, token=token) as server:
        with server.client() as client:
            client.publish("orders", b"kept")
        whole = request(line)
        for pieces in ([whole], [whole[:3], whole[3:20], whole[20:]]):
            said = rest(server.address, *pieces)
            assert b"OK" not in said.split(b"\r\n\r\n")[-1]
            assert said.startswith(b"HTTP/1.1 400 "), said
            assert b"not_http" in said
            assert b"http_port" in said
        assert topics(server) == ["orders"]


def test_the_first_command_must_be_known(server: RunningServer) -> None:
    """A header line, or a greeting of some other protocol: the connection ends, in text and in frames."""
    for greeting in (b"Host: x\r\n", b"EHLO example.org\r\n", b"GET /\r\n"):
        said = rest(server.address, greeting + COMMANDS)
        assert said.startswith(b"ERR unknown_command ")
        assert said.count(b"\r\n") == 1
    frames = FrameSocket(server.address)
    frames.send(frame(77, 5) + frame(HEARTBEAT, 6))
    assert frames.read().properties["code"] == "unknown_command"
    with pytest.raises((Closed, OSError)):
        frames.read()
    frames.close()
    assert topics(server) == []


def test_a_mistake_after_the_first_command_is_only_answered(server: RunningServer) -> None:
    """Nobody is cut off for a typing error, also one that looks like HTTP."""
    text, frames = TextSocket(server.address), FrameSocket(server.address)
    assert text.ask("PING") == ["PONG"]
    for mistake in ("MAKE coffee", "POST / HTTP/1.1"):
        with pytest.raises(HeadraceError, match="there is no command"):
            text.ask(mistake)
    assert text.ask("PING") == ["PONG"]
    frames.ask(HEARTBEAT)
    with pytest.raises(HeadraceError, match="no request of type"):
        frames.ask(77)
    frames.ask(HEARTBEAT)
    text.close()
    frames.close()


def test_a_page_in_a_browser_cannot_command_the_broker(tmp_path: Path) -> None:
    """The real thing: a page posts commands to the TCP port."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed; the bytes that it sends are tested above")
    with running_server(memory=True) as server:
        with server.client() as client:
            client.publish("orders", b"kept")
        page = tmp_path / "page.html"
        script = (
            "fetch('http://127.0.0.1:PORT/', {method: 'POST', mode: 'no-cors', "
            "body: 'DELETE orders\\r\\nPUB stolen 2\\r\\nhi'})"
        )
        page.write_text(f"<script>{script.replace('PORT', str(server.port))}</script>")
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--timeout=5000",
             f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        assert server.call(lambda: server.server.hub.accepted) >= 2
        assert topics(server) == ["orders"]
