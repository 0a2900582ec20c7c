"""Who may talk to a broker: tokens, addresses, TLS."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import BrokerClient
from headrace.errors import Closed, ConnectFailed, HeadraceError, InvalidArgument, Unauthenticated
from headrace.server import connection as connections
from headrace.server.server import check_exposure
from headrace.settings import load
from headrace.testing import DidNotStart, RunningServer, running_server, server_process
from tests.contract.raw_binary import AUTH, FETCH, HEARTBEAT, PUBLISH, FrameSocket, frame
from tests.contract.raw_text import TextSocket

TOKEN = "correct horse"


@pytest.fixture
def guarded() -> Iterator[RunningServer]:
    """A server that wants a token."""
    with running_server(memory=True, token=TOKEN.replace(" ", "-")) as server:
        yield server


WORD = TOKEN.replace(" ", "-")


def test_who_does_not_say_who_he_is_is_not_kept(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a token costs a file; it ends by itself. One that has said it stays."""
    monkeypatch.setattr(connections, "UNAUTHENTICATED_S", 0.2)
    silent, known = TextSocket(guarded.address), TextSocket(guarded.address)
    known.ask(f"AUTH {WORD}")
    with pytest.raises(Closed):
        silent.line()
    assert known.ask("PING") is not None
    silent.close()
    known.close()


# --- text -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "command", ["FETCH orders 0", "TOPICS", "SUB orders", "CREATE a", "STATS a", "INFO", "MAKE tea"]
)
def test_without_a_token_nothing_is_done(guarded: RunningServer, command: str) -> None:
    """Unauthenticated, and the connection closes: nobody tries many things on one."""
    text = TextSocket(guarded.address)
    with pytest.raises(HeadraceError) as caught:
        text.ask(command)
    assert caught.value.code == "unauthenticated"
    with pytest.raises(Closed):
        text.line()
    text.close()


def test_without_a_token_nothing_is_stored(guarded: RunningServer) -> None:
    """The topic is not even made."""
    text = TextSocket(guarded.address)
    with pytest.raises(HeadraceError) as caught:
        text.ask("PUB orders 2", b"hi")
    assert caught.value.code == "unauthenticated"
    text.close()
    with guarded.client() as client:
        assert client.topics() == []


def test_a_few_words_are_free(guarded: RunningServer) -> None:
    """PING for the load balancer, HELP for the lost."""
    text = TextSocket(guarded.address)
    assert text.ask("PING") == ["PONG"]
    count = int(text.ask("HELP")[1])
    for _ in range(count):
        text.line()
    assert text.ask(f"AUTH {WORD}") == ["OK"]
    assert text.ask("PUB orders 2", b"hi") == ["OK", "0"]
    text.close()


@pytest.mark.parametrize("token", ["wrong", WORD[:-1], WORD + "x", WORD.upper(), "Ärger"])
def test_a_wrong_token_ends_the_conversation(guarded: RunningServer, token: str) -> None:
    """One try for each connection."""
    text = TextSocket(guarded.address)
    with pytest.raises(HeadraceError) as caught:
        text.ask(f"AUTH {token}")
    assert caught.value.code == "unauthenticated"
    with pytest.raises(Closed):
        text.line()
    text.close()


def test_the_token_and_the_first_commands_may_come_in_one_write(guarded: RunningServer) -> None:
    """Also a large one behind it."""
    text = TextSocket(guarded.address)
    size = 500_000
    text.send(b"AUTH %b\r\nPUB orders %d\r\n%b" % (WORD.encode(), size, bytes(size)))
    assert text.line() == ["OK"]
    assert text.line() == ["OK", "0"]
    text.close()


# --- binary ---------------------------------------------------------------------------------------
def test_frames_without_a_token_are_refused(guarded: RunningServer) -> None:
    """As in text; a heartbeat is free."""
    frames = FrameSocket(guarded.address)
    assert frames.ask(HEARTBEAT).type == HEARTBEAT
    with pytest.raises(Unauthenticated):
        frames.ask(PUBLISH, {"topic": "orders"}, b"x")
    with pytest.raises(Closed):
        frames.read()
    frames.close()


def test_a_wrong_token_in_a_frame_ends_the_conversation(guarded: RunningServer) -> None:
    """One try for each connection."""
    frames = FrameSocket(guarded.address)
    with pytest.raises(Unauthenticated):
        frames.ask(AUTH, {"token": "wrong"})
    with pytest.raises(Closed):
        frames.read()
    frames.close()


def test_the_right_token_in_a_frame_opens_the_door(guarded: RunningServer) -> None:
    """Also when everything comes in one write."""
    frames = FrameSocket(guarded.address)
    frames.send(
        frame(AUTH, 1, {"token": WORD})
        + frame(PUBLISH, 2, {"topic": "orders"}, bytes(300_000))
        + frame(FETCH, 3, {"topic": "orders", "offset": 0})
    )
    assert [frames.read().sequence for _ in range(3)] == [1, 2, 3]
    frames.close()


@pytest.mark.parametrize(
    "opening", [b"PUB orders 1000000\r\n", frame(PUBLISH, 1, {}, bytes(1_000_000))[:100]]
)
def test_a_stranger_cannot_make_the_broker_keep_much(
    guarded: RunningServer, opening: bytes
) -> None:
    """A large command is refused when 64 KiB of it have come, not when all of it has."""
    with socket.create_connection(guarded.address, 10) as plain:
        plain.sendall(opening)
        heard = b""
        sent = 0
        try:
            while sent < 900_000:
                sent += plain.send(bytes(10_000))
                guarded.call(lambda: None)  # the broker has read what was there
        except OSError:
            pass
        try:
            while data := plain.recv(4096):
                heard += data
        except OSError:
            pass
        assert b"unauthenticated" in heard
        assert sent < 900_000


# --- clients --------------------------------------------------------------------------------------
def test_a_client_with_the_token_works_and_one_without_hears_why(guarded: RunningServer) -> None:
    """At once, when it connects or asks for the first thing."""
    with guarded.client() as client:
        assert client.publish("orders", b"x").offset == 0
    with pytest.raises(Unauthenticated):
        guarded.client(token="wrong").connect()
    with (
        pytest.raises(Unauthenticated),
        guarded.client(token=None, request_timeout=5) as client,
    ):
        client.topics()


def test_a_client_whose_token_is_no_longer_right_stops_trying(guarded: RunningServer) -> None:
    """After a restart with another token, it says so instead of knocking for ever."""
    with guarded.client(request_timeout=10) as client:
        assert client.topics() == []
        guarded.restart(token="another")
        with pytest.raises(Unauthenticated):
            client.topics()


def test_whoever_waits_for_messages_hears_that_the_token_is_no_longer_right(
    guarded: RunningServer,
) -> None:
    """They would wait for ever: the client does not knock again."""
    with guarded.client(request_timeout=10) as client:
        plain, member = client.subscribe("orders"), client.subscription("billing", "orders")
        guarded.restart(token="another")
        for channel in (plain, member):
            with pytest.raises(Unauthenticated):
                channel.get(10)


# --- addresses ------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_this_machine_only_with_a_token(host: str) -> None:
    """Or when told that this is meant."""
    with pytest.raises(InvalidArgument) as caught:
        check_exposure(load({"host": host}))
    assert caught.value.code == "authentication_required"
    assert "--insecure" in caught.value.message
    check_exposure(load({"host": host, "token": "a" * 16}))
    check_exposure(load({"host": host, "insecure": True}))


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("token", ["a", "secret", "x" * 15])
def test_beyond_this_machine_a_token_must_be_hard_to_guess(token: str, insecure: bool) -> None:
    """The sentence says how to make a good one; on this machine any token will do."""
    with pytest.raises(InvalidArgument) as caught:
        check_exposure(load({"host": "0.0.0.0", "token": token, "insecure": insecure}))
    assert caught.value.code == "weak_token"
    assert "openssl rand" in caught.value.message
    check_exposure(load({"host": "127.0.0.1", "token": token}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_this_machine_nothing_is_needed(host: str) -> None:
    """The first minute should not be about tokens."""
    check_exposure(load({"host": host}))


def test_a_host_that_is_none_is_named() -> None:
    """Not a traceback from the resolver."""
    with pytest.raises(InvalidArgument, match="no-such-host"):
        check_exposure(load({"host": "no-such-host.invalid"}))


def test_a_server_without_a_token_does_not_start_on_every_address() -> None:
    """It exits before it has opened anything."""
    with pytest.raises(DidNotStart) as caught, server_process(host="0.0.0.0"):
        pass
    assert caught.value.code == 2
    assert "set a token" in caught.value.errors
    assert "Traceback" not in caught.value.errors


# --- TLS ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def encrypted(certificate: tuple[Path, Path]) -> Iterator[RunningServer]:
    """A server that speaks TLS."""
    cert, key = certificate
    with running_server(tls_cert=str(cert), tls_key=str(key)) as server:
        yield server


def test_clients_over_tls(encrypted: RunningServer, certificate: tuple[Path, Path]) -> None:
    """Publishing and consuming as ever, over a connection that is checked; also after a restart."""
    with encrypted.client(tls=True, ca=str(certificate[0])) as client:
        member = client.subscription("billing", "orders")
        assert client.publish_many("orders", [bytes(1000)] * 2000)[0].offset == 0
        for _ in range(2000):
            member.get(10).ack()
        client.flush()
        encrypted.restart()
        client.publish("orders", b"after")
        assert member.get(10).value == b"after"


def test_text_over_tls(encrypted: RunningServer, certificate: tuple[Path, Path]) -> None:
    """The same port, the same words."""
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        socket.create_connection(encrypted.address, 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.sendall(b"PUB orders 2\r\nhiFETCH orders 0\r\nQUIT\r\n")
        heard = b""
        while b"bye\r\n" not in heard:
            heard += secured.recv(4096)
        assert heard == b"OK 0\r\nMSG 0 2\r\nhiOK bye\r\n"


def test_a_client_does_not_talk_to_whom_it_cannot_trust(encrypted: RunningServer) -> None:
    """Without the authority, and in plain text, there is no connection, and it says so."""
    with pytest.raises(
        ConnectFailed, match=r"certificate .* is not trusted .*\(--ca, in Python ca=,"
    ):
        encrypted.client(tls=True, request_timeout=5).connect()
    with pytest.raises(ConnectFailed, match="if it wants TLS, write tls://"):
        encrypted.client(request_timeout=5).connect()


def test_a_certificate_for_another_name_is_told(
    certificate: tuple[Path, Path],
) -> None:
    """It is trusted; what is wrong is the address."""
    cert, key = map(str, certificate)
    with running_server(memory=True, host="127.0.0.2", tls_cert=cert, tls_key=key) as server:
        client = BrokerClient(server.host, server.port, tls=True, ca=cert)
        with pytest.raises(ConnectFailed, match=r"is for another name .* connect by the name"):
            client.connect()


def test_who_wants_tls_of_a_broker_without_is_told(server: RunningServer) -> None:
    with pytest.raises(
        ConnectFailed, match=r"TLS failed at .* leave out tls:// \(in Python tls=True\)"
    ):
        server.client(tls=True, request_timeout=5).connect()


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """At the start, by its path."""
    with (
        pytest.raises(InvalidArgument, match="certificate"),
        running_server(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem")),
    ):
        pass
