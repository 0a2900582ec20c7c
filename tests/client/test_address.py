"""Where brokers are and who logs in: read in one place, for the clients, the commands and Spark."""

import asyncio
import inspect
import socket
from collections.abc import Iterator
from typing import get_type_hints

import pytest

from headrace import AsyncClient, BrokerClient
from headrace.client.address import BrokerAddress, Login, find_brokers, find_login
from headrace.client.aio import ClientOptions
from headrace.errors import ConnectFailed, InvalidArgument
from headrace.testing import running_server, wait_until


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests say what is in it."""
    for name in ("SERVER", "SERVERS", "HOST", "PORT", "TOKEN", "USER", "PASSWORD", "CA"):
        monkeypatch.delenv(f"HEADRACE_{name}", raising=False)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


# --- addresses --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("broker", ("broker", 9999, False)),
        ("broker:7777", ("broker", 7777, False)),
        ("tcp://broker:7777", ("broker", 7777, False)),
        ("tls://broker", ("broker", 9999, True)),
        (" tls://broker:7777 ", ("broker", 7777, True)),
        (":7777", ("127.0.0.1", 7777, False)),
        ("::1", ("::1", 9999, False)),
        ("[::1]", ("::1", 9999, False)),
        ("tls://[fe80::1]:7777", ("fe80::1", 7777, True)),
    ],
)
def test_an_address(text: str, found: tuple[str, int, bool]) -> None:
    """With and without a port and a scheme; what is printed is read back."""
    [address] = find_brokers(text)
    assert address == found
    assert find_brokers(str(address)) == [address]


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ":", "broker:", "broker:x", "broker:0", "broker:65536", "broker:٣", "a:b:c"),
        *("http://broker:8080", "tls:/broker", "broker:1/path", "user@broker:1", "[::1", "a,,b"),
        "a b:1",
    ],
)
def test_that_is_no_address(text: str) -> None:
    """Both clients say so at once, with a sentence that says what to write."""
    for client in (BrokerClient, AsyncClient):
        with pytest.raises(
            InvalidArgument, match=r"is not the address of a broker.*write host:port"
        ):
            client(text)


def test_arguments_that_contradict_each_other() -> None:
    """Each has its sentence."""
    with pytest.raises(InvalidArgument, match="'a:1' has a port, and port is 2"):
        BrokerClient("a:1", 2)
    with pytest.raises(InvalidArgument, match="5 is not the address of a broker"):
        BrokerClient(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="give host and port, or servers"):
        BrokerClient("a", servers=["b"])
    with pytest.raises(InvalidArgument, match="servers is empty"):
        BrokerClient(servers=[])
    with pytest.raises(InvalidArgument, match="port must be a whole number from 1 to 65535"):
        BrokerClient("a", 0)
    with pytest.raises(InvalidArgument, match="not both"):
        BrokerClient("a", token="t", user="u", password="p")
    with pytest.raises(InvalidArgument, match=r"missing\.pem cannot be used"):
        BrokerClient("a", ca="missing.pem")


def test_host_and_port_are_as_before() -> None:
    """As two arguments, also for IPv6."""
    assert find_brokers("localhost", 7777) == [("localhost", 7777, False)]
    assert find_brokers("::1", 7777) == [("::1", 7777, False)]
    assert find_brokers("tls://h", 7777) == [("h", 7777, True)]
    assert find_brokers(port=7777) == [("127.0.0.1", 7777, False)]


def test_the_environment_says_where_the_broker_is() -> None:
    """An argument is stronger. What Kubernetes puts there is not meant for us."""
    environment = {"HEADRACE_PORT": "7777", "HEADRACE_HOST": "0.0.0.0"}
    assert find_brokers(environment=environment) == [("127.0.0.1", 7777, False)]
    kubernetes = {"HEADRACE_PORT": "tcp://10.0.0.1:9999"}
    assert find_brokers(environment=kubernetes) == [("127.0.0.1", 9999, False)]
    environment["HEADRACE_SERVER"] = "tls://a:1,b"
    assert find_brokers(environment=environment) == [("a", 1, True), ("b", 9999, False)]
    assert find_brokers("c", environment=environment) == [BrokerAddress("c", 9999)]
    assert find_brokers(servers=["c", "d:1"], environment=environment) == [
        BrokerAddress("c", 9999),
        BrokerAddress("d", 1),
    ]


def test_the_environment_says_who_logs_in() -> None:
    """An argument is stronger than the environment, and a token than a user."""
    environment = {"HEADRACE_USER": "alice", "HEADRACE_PASSWORD": "secret"}
    assert find_login(environment={}) == Login()
    assert find_login(environment=environment) == Login(None, "alice", "secret")
    assert find_login(user="bob", environment=environment) == Login(None, "bob", "secret")
    environment["HEADRACE_TOKEN"] = "token"
    assert find_login(environment=environment) == Login("token")
    assert find_login("mine", environment=environment) == Login("mine")
    assert find_login(user="bob", environment=environment) == Login(None, "bob", "secret")
    with pytest.raises(InvalidArgument, match=r"password of bob is missing.*HEADRACE_PASSWORD"):
        find_login(user="bob", environment={})


def test_the_options_are_those_of_the_asyncio_client() -> None:
    """What mypy checks for BrokerClient is what AsyncClient takes."""
    parameters = inspect.signature(AsyncClient).parameters.values()
    keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set(get_type_hints(ClientOptions)) == keywords


# --- against a server -------------------------------------------------------------------------------
def test_the_clients_use_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address and token: a program needs neither."""
    with running_server(memory=True, token="secret") as server:
        monkeypatch.setenv("HEADRACE_SERVER", f"tcp://{server.host}:{server.port}")
        monkeypatch.setenv("HEADRACE_TOKEN", "secret")
        with BrokerClient() as client:
            assert client.publish("orders", b"x").offset == 0

        async def publish() -> int | None:
            async with AsyncClient() as client:
                return (await client.publish("orders", b"y")).offset

        assert asyncio.run(publish()) == 1


def test_servers_are_tried_in_turn(nowhere: str) -> None:
    """At first, and again when the connection is gone; publishes wait meanwhile."""
    with running_server(memory=True) as first, running_server(memory=True) as second:
        addresses = [nowhere, *(f"{each.host}:{each.port}" for each in (first, second))]
        with BrokerClient(servers=addresses, request_timeout=10) as client:
            client.publish("orders", b"one")
            assert first.call(lambda: len(first.server.engine.topics.get("orders").partitions)) == 1
            first.stop()
            # Not client.is_connected: it may not have noticed yet, and then the outcome is unknown.
            wait_until(lambda: second.call(lambda: len(second.server.hub.connections)) == 1)
            client.publish("orders", b"two")
            assert client.fetch_values("orders") == [b"two"]


def test_no_server_answers(nowhere: str) -> None:
    """The error names each of them."""
    with pytest.raises(ConnectFailed) as caught:
        BrokerClient(servers=[nowhere, "localhost:1"]).connect()
    assert nowhere in str(caught.value)
    assert "localhost:1" in str(caught.value)


def test_a_misspelt_option_is_told_all_that_exist() -> None:
    """Also the three that may be given by position."""
    misspelt: dict[str, str] = {"clint_id": "shop"}
    with pytest.raises(TypeError, match=r"'clint_id'; it takes .*client_id, .*host, .*port, "):
        BrokerClient(**misspelt)  # type: ignore[arg-type]
