"""Mistakes of users: one sentence that says what to do, exit code 2, never a traceback."""

import socket
import threading

import pytest

from headrace import BrokerClient
from headrace.cli import connecting
from headrace.testing import RunningServer, running_server
from tests.cli.rig import Command, run_script

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["publish", "bad topic", "x"], "invalid_topic"),
        (["publish", "..", "x"], "invalid_topic"),
        (["publish", "a/b", "x"], "invalid_topic"),
        (["publish", "__mine", "x"], "invalid_topic"),
        (["publish", "x" * 250, "x"], "invalid_topic"),
        (["publish", "t", "x", "--header", "no-equals-sign"], "invalid_argument"),
        (["publish", "t", "x", "--header", "=x"], "invalid_headers"),
        (["publish", "t", "x", "--partition", "7"], "invalid_partition"),
        (["publish", "t", "x", "--to", "no name"], "invalid_subscription"),
        (["publish", "t", "-", "--delay", "1"], "invalid_argument"),
        (["fetch", "nowhere"], "topic_not_found"),
        (["fetch", "there", "99"], "offset_out_of_range"),
        (["fetch", "there", "soon"], "invalid_offset"),
        (["fetch", "there", "²"], "invalid_offset"),
        (["fetch", "there", "--partition", "1"], "invalid_partition"),
        (["tail", "nowhere"], "topic_not_found"),
        (["describe", "nowhere"], "topic_not_found"),
        (["create-topic", "t2", "--partitions", "0"], "invalid_setting"),
        (["create-topic", "t2", "--set", "colour=blue"], "unknown_setting"),
        (["create-topic", "t2", "--set", "durability"], "invalid_argument"),
        (["create-topic", "t2", "--set", "durability=maybe"], "invalid_setting"),
        (["alter-topic", "there"], "invalid_argument"),
        (["publish", "there"], "invalid_argument"),
        (["publish", "there", "x", "--file", "y"], "invalid_argument"),
        (["export", "there", "/no/directory/at/all.jsonl"], "invalid_argument"),
        (["alter-topic", "there", "--set", "durable=false"], "topic_settings_fixed"),
        (["alter-topic", "nowhere", "--set", "partitions=2"], "topic_not_found"),
        (["delete-topic", "nowhere", "--yes"], "topic_not_found"),
        (["create-subscription", "no name", "there"], "invalid_subscription"),
        (["create-subscription", "g", "a.*b"], "invalid_topic"),
        (["create-subscription", "g", "there", "--offset", "99"], "offset_out_of_range"),
        (["create-subscription", "g", "there", "--ordering", "random"], "invalid_setting"),
        (["delete-subscription", "nobody"], "subscription_not_found"),
        (["join-subscription", "nobody"], "subscription_not_found"),
        (["seek", "nobody", "earliest"], "subscription_not_found"),
        (["subscribe", "bad topic"], "invalid_topic"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_the_broker_says_no(headrace: Command, arguments: list[str], code: str) -> None:
    """The broker's own sentence and its code, on standard error."""
    headrace("publish", "there", "one")
    ran = headrace(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("headrace: ")
    assert ran.err.endswith(f" [{code}]\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "t", "x"],
        ["fetch", "t"],
        ["tail", "-f", "t"],
        ["subscribe", "t"],
        ["join-subscription", "g"],
        ["topics"],
        ["describe", "t"],
        ["create-topic", "t"],
        ["alter-topic", "t", "--set", "partitions=2"],
        ["delete-topic", "t"],
        ["groups"],
        ["create-subscription", "g", "t"],
        ["delete-subscription", "g"],
        ["seek", "g", "earliest"],
        ["dlq", "list"],
        ["dlq", "show", "g", "0"],
        ["dlq", "redrive", "g"],
        ["dlq", "edit", "g", "0", "--value", "x"],
        ["dlq", "purge", "g", "--yes"],
        ["scheduled", "list"],
        ["scheduled", "cancel", "00000000-0000-0000-0000-000000000000"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_there_is_no_broker(command: Command, arguments: list[str]) -> None:
    """Every command says where it looked, and asks the obvious question."""
    ran = command(*arguments, "--server", NOWHERE)
    assert (ran.code, ran.out) == (2, "")
    assert f"no broker answers at {NOWHERE}" in ran.err
    assert "is it running?" in ran.err
    assert "[connect_failed]" in ran.err


@pytest.mark.parametrize(
    "server", ["localhost:seven", "localhost:0", "localhost:65536", "localhost:٣", ":", "a:b:c"]
)
def test_that_is_no_address(command: Command, server: str) -> None:
    """The option says what it takes."""
    ran = command("topics", "--server", server)
    assert ran.code == 2
    assert "write host:port, or tls://host:port for TLS" in ran.err


def test_that_is_no_scheme(command: Command) -> None:
    """The commands do not speak HTTP."""
    ran = command("topics", "--server", "http://localhost:9999")
    assert ran.code == 2
    assert "do not speak HTTP, but use the broker's other port; write host:port" in ran.err


def test_that_is_no_broker(command: Command) -> None:
    """Something listens there, but it hangs up at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        ran = command("topics", "--server", f"{host}:{port}")
        thread.join()
    assert ran.code == 2
    assert "closed the connection at once; if it wants TLS, write tls://" in ran.err
    assert "[connect_failed]" in ran.err


def test_that_is_the_other_port(command: Command, server: RunningServer) -> None:
    """Of HTTP: one line that says so."""
    ran = command("topics", "--server", "{}:{}".format(*server.server.addresses["http"]))
    assert ran.code == 2
    assert "speaks HTTP; give the broker's other port" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_there_is_no_token(command: Command) -> None:
    """The sentence says what a person can do, not what the protocol needs."""
    with running_server(memory=True, token="secret") as server:
        where = f"{server.host}:{server.port}"
        ran = command("topics", "--server", where)
        assert ran.code == 2
        assert (
            "wants a login: give a token (--token, in Python token=, or HEADRACE_TOKEN)" in ran.err
        )
        assert command("topics", "--server", where, "--token", "secret").code == 0


def test_a_full_queue_is_told_soon(
    headrace: Command, client: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "PUBLISH_S", 0.3)
    client.create_topic("small", max_queue_size=1)
    client.create_subscription("reader", "small")
    assert headrace("publish", "small", "one").code == 0
    ran = headrace("publish", "small", "two")
    assert ran.code == 2
    assert "[queue_full]" in ran.err


def test_that_is_no_certificate(command: Command) -> None:
    """A file that cannot be used is named."""
    ran = command("topics", "--ca", "nothing.pem")
    assert ran.code == 2
    assert "nothing.pem cannot be used" in ran.err


def test_a_token_is_needed(command: Command) -> None:
    """Without it, and with a wrong one, nothing is done; with the right one it is."""
    with running_server(token="secret") as server:
        where = ("--server", f"{server.host}:{server.port}")
        for wrong in ([], ["--token", "guess"]):
            ran = command("topics", *where, *wrong)
            assert ran.code == 2
            assert "[unauthenticated]" in ran.err
        assert command("publish", "t", "x", *where, "--token", "secret").code == 0


def test_the_environment_names_the_broker(
    headrace: Command, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEADRACE_SERVER, HEADRACE_HOST and HEADRACE_PORT, QB_SERVER_HOST and QB_SERVER_PORT."""
    address = server.address
    monkeypatch.delenv("HEADRACE_SERVER")
    for host, port in (("HEADRACE_HOST", "HEADRACE_PORT"), ("QB_SERVER_HOST", "QB_SERVER_PORT")):
        monkeypatch.setenv(host, address.host)
        monkeypatch.setenv(port, str(address.port))
        assert headrace("topics").code == 0
        monkeypatch.delenv(host)
        monkeypatch.delenv(port)
    assert headrace("topics", "-s", f"tcp://{address.host}:{address.port}").code == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["topics", "--frobnicate"], "No such option: --frobnicate"),
        (["fetch", "t", "0", "-n", "0"], "-n"),
        (["publish", "t", "x", "--delay", "soon"], "--delay"),
        (["dlq"], "Usage: headrace dlq"),
        ([], "Usage: headrace"),
    ],
)
def test_that_is_no_command(command: Command, arguments: list[str], complaint: str) -> None:
    """Exit code 2, and what there is instead."""
    ran = command(*arguments)
    assert ran.code == 2
    assert complaint in ran.err


def test_arguments_are_text(command: Command) -> None:
    """Bytes that are no UTF-8 are refused before anything is done."""
    ran = command("describe", "caf\udce9")
    assert ran.code == 2
    assert "is not valid UTF-8" in ran.err


def test_as_a_process_it_is_the_same() -> None:
    """The installed command, too, ends with a sentence and exit code 2."""
    ran = run_script("topics", "--server", NOWHERE)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"headrace: no broker answers at {NOWHERE}")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["topics", "--port", "9998"], "write the whole address of the broker: --server HOST:PORT"),
        (["publish", "t", "x", "--host", "there"], "--server HOST:PORT"),
        (["-s", "there:9998", "topics"], "write --server after the command"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_that_is_not_where_the_address_goes(
    command: Command, arguments: list[str], told: str
) -> None:
    """``serve`` has a port and a host, and other programs take an address before the command."""
    ran = command(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err
    assert len(ran.err.splitlines()) == 1
    assert "--port" not in command("topics", "--help").out
