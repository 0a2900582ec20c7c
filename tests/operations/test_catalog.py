"""An operation is declared once, and everything else follows: shown for all of them, and for a new one."""

import asyncio
import inspect
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, get_type_hints

import orjson
import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient
from headrace.broker.administration import Administration
from headrace.broker.aio import ENGINE_OPTIONS, BrokerOptions
from headrace.errors import InvalidArgument
from headrace.model import SubscriptionOptions, SubscriptionSettings, TopicOptions, TopicSettings
from headrace.operations import catalog
from headrace.operations.blocking import BlockingOperations
from headrace.operations.catalog import OPERATIONS, Operations
from headrace.operations.declaring import operation, route, table_of
from headrace.server import operation_routes
from headrace.server.routing import RouteTable
from headrace.shell import Shell, blocking
from headrace.testing import running_server
from tests.docs.blocks import read, table
from tests.server.http_rig import http_of

FOUR = (Broker, AsyncBroker, BrokerClient, AsyncClient)
ONLY_EMBEDDED = {"engine", "open", "start", "around"}
ONLY_REMOTE = {
    *(
        "connect",
        "disconnect",
        "is_connected",
        "anew",
        "link",
        "owners",
        "patience",
        "producing",
        "produce",
    ),
    *("follow", "unfollow", "join", "leave", "publish_alone"),
}
ONLY_BLOCKING = {"forked", "stage_nowait", "publish_batch_nowait"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


# --- the declarations -------------------------------------------------------------------------------
@pytest.mark.parametrize("declared", OPERATIONS.values(), ids=list(OPERATIONS))
def test_every_operation_is_whole(declared: Any) -> None:
    """It has a sentence, an implementation that takes its arguments, and routes that name them."""
    assert getattr(AsyncBroker, declared.method).__doc__
    assert declared.about is None or declared.about in declared.arguments
    implementation = inspect.signature(getattr(Administration, declared.method))
    taken = set(declared.arguments) | ({"settings"} if declared.settings else set())
    assert set(implementation.parameters) - {"self"} == taken
    for each in declared.http:
        assert set(each.path_arguments.values()) <= set(declared.arguments)


def test_the_kind_of_an_argument_brings_error_codes() -> None:
    """They come before those that only this operation has."""
    assert OPERATIONS["seek"].errors == (
        "subscription_not_found", "ambiguous_subscription", "offset_out_of_range",
    )  # fmt: skip


def test_blocking_methods_are_those_of_the_catalog() -> None:
    """Every operation, and nothing else."""
    assert public(BlockingOperations) - public(Shell) == public(Operations)


@pytest.mark.parametrize(
    ("settings", "options"),
    [(TopicSettings, TopicOptions), (SubscriptionSettings, SubscriptionOptions)],
)
def test_options_are_the_settings(settings: Any, options: Any) -> None:
    """What mypy checks is what the broker takes; partitions is an argument of its own."""
    assert set(get_type_hints(options)) == set(settings.schemas()) - {"partitions"}


def test_options_of_a_broker_are_all_that_it_takes() -> None:
    """Its own, and the defaults of topics."""
    assert set(get_type_hints(BrokerOptions)) == {*ENGINE_OPTIONS, *TopicSettings.schemas()}


# --- the same everywhere ----------------------------------------------------------------------------
def test_all_four_have_the_same_methods() -> None:
    """In process and over the network, with threads and with asyncio."""
    shared = public(AsyncBroker) - ONLY_EMBEDDED
    assert public(AsyncClient) - ONLY_REMOTE - {"client_id"} == shared
    assert public(Broker) - ONLY_EMBEDDED - ONLY_BLOCKING == shared
    assert public(BrokerClient) - ONLY_REMOTE - ONLY_BLOCKING == shared


def shared_methods() -> Iterator[str]:
    for name in sorted(public(AsyncBroker) - ONLY_EMBEDDED):
        if callable(getattr(AsyncBroker, name)):
            yield name


def shape(kind: type, name: str) -> tuple[list[tuple[str, Any, Any, str]], str]:
    """(name, kind, default, annotation) of each parameter, and the result."""
    signature = inspect.signature(getattr(kind, name))
    parameters = [
        (p.name, p.kind, p.default, without_prefix(p.annotation))
        for p in signature.parameters.values()
    ]
    result = without_prefix(signature.return_annotation)
    result = re.sub(r"Opening\[(.*)\]", r"\1", result)  # of asyncio: it is still to be awaited
    return parameters, result.replace("asyncio.Future[Receipt]", "Publication")


def without_prefix(annotation: object) -> str:
    """The name of a type, the same for threads and asyncio, embedded and remote."""
    return re.sub(r"\b(Async)?(Embedded)?(?=[A-Z])", "", str(annotation))


@pytest.mark.parametrize("name", list(shared_methods()))
def test_a_method_takes_and_returns_the_same_in_all_four(name: str) -> None:
    """The same parameters in the same order with the same defaults and types, and the same result."""
    shapes = [shape(kind, name) for kind in FOUR]
    assert shapes == [shapes[0]] * 4


def test_the_table_of_methods_is_true() -> None:
    """docs/python.md lists every method that all four have."""
    rows = table(read("docs/python.md"), "method", "what it does")
    assert {row[0].strip("`") for row in rows} == set(shared_methods()) - {"close"}


# --- a new one --------------------------------------------------------------------------------------
class MoreOperations(Operations):
    @operation(
        name="echo_topic",
        permission="browse",
        about="topic",
        runs="leader",
        answer="echoed",
    )
    @route("GET", "/topics/{topic}/echo", "Repeat a number")
    async def echo_topic(self, topic: catalog.TopicName, *, times: catalog.Limit = 1) -> list[str]:
        """The topic's name, a few times."""
        raise NotImplementedError


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One declaration, and its implementation."""

    async def echo_topic(self: Administration, topic: str, times: int) -> list[str]:
        return [topic] * times

    [declared] = table_of(MoreOperations).values()
    monkeypatch.setattr(Administration, "echo_topic", echo_topic, raising=False)
    monkeypatch.setitem(OPERATIONS, "echo_topic", declared)
    return declared


def test_a_declaration_and_an_implementation_are_enough(
    echo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is a method in process and over the wire, blocking too, a verb, and a route with a schema."""
    monkeypatch.setattr(AsyncBroker, "echo_topic", MoreOperations.echo_topic, raising=False)
    monkeypatch.setattr(AsyncClient, "echo_topic", MoreOperations.echo_topic, raising=False)
    for shell in (Broker, BrokerClient):
        monkeypatch.setattr(shell, "echo_topic", blocking(MoreOperations.echo_topic), raising=False)
    route = operation_routes.route_of(echo, echo.http[0])
    assert (route.method, route.path) == ("GET", "/topics/{topic}/echo")
    assert [p.name for p in route.parameters] == ["times"]
    with running_server() as server:
        hub = server.server.hub
        monkeypatch.setattr(hub, "routes", RouteTable([*hub.routes.routes, route]))
        with server.client() as client, closing(http_of(server)) as http:
            assert client.echo_topic("orders", times=2) == ["orders", "orders"]  # type: ignore[attr-defined]
            assert http.ok("GET", "/topics/orders/echo?times=3") == {"echoed": ["orders"] * 3}
            answer = http.ask("GET", "/topics/orders/echo?times=0")
            assert (answer.status, answer.code) == (400, "invalid_argument")
            with pytest.raises(InvalidArgument, match="times must be a whole number from 1 to"):
                client.echo_topic("orders", times=0)  # type: ignore[attr-defined]
    with Broker() as broker:
        assert broker.echo_topic("orders") == ["orders"]  # type: ignore[attr-defined]

    async def over_asyncio() -> list[str]:
        async with AsyncBroker() as broker:
            found: list[str] = await broker.echo_topic("users")  # type: ignore[attr-defined]
            return found

    assert asyncio.run(over_asyncio()) == ["users"]


# --- refusals ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "given", "code", "sentence"),
    [
        ("topic", {}, "missing_argument", "topic needs topic"),
        ("topics", {"x": 1}, "unknown_argument", "topics does not take x; it takes no arguments"),
        (
            "topic",
            {"topic": "a", "create": 1},
            "invalid_argument",
            "create must be true or false, not 1",
        ),
        (
            "dead_letters",
            {"subscription": "a", "limit": 0},
            "invalid_argument",
            "limit must be a whole number from 1 to 10000, not 0",
        ),
        (
            "redrive",
            {"subscription": "a", "to": "x"},
            "invalid_argument",
            "to must be one of subscription, topic, not 'x'",
        ),
        ("seek", {"subscription": "a", "to": []}, "invalid_offset", "a position is"),
        ("create_topic", {"topic": "a b"}, "invalid_topic", "is not a valid name"),
        (
            "create_topic",
            {"topic": "a", "settings": {"partitions": "many"}},
            "invalid_setting",
            "partitions must be a whole number from 1 to 4096, not 'many'",
        ),
        ("create_topic", {"topic": "a", "settings": {"colour": 1}}, "unknown_setting", "unknown"),
        (
            "purge_dead_letters",
            {"subscription": "a", "offsets": [-1]},
            "invalid_argument",
            r"offsets\[0\]",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong(
    name: str, given: dict[str, Any], code: str, sentence: str
) -> None:
    """With a stable code, and a sentence that names the argument and what it must be."""
    with pytest.raises(InvalidArgument, match=sentence) as caught:
        OPERATIONS[name].check(given)
    assert caught.value.code == code


def test_arguments_travel_as_they_are_declared() -> None:
    """Keyword arguments are settings, an alias has one name on the wire, and None is left out."""
    create = OPERATIONS["create_subscription"]
    given = create.bind(("email", "orders"), {"start_offset": 5, "ack_timeout": 60})
    assert orjson.loads(create.encode(given)) == {
        "op": "create_subscription",
        "subscription": "email",
        "topic": "orders",
        "start": 5,
        "settings": {"ack_timeout": 60},
    }
    seek = OPERATIONS["seek"]
    assert seek.bind(("email", "latest"), {"topic": None}) == {
        "subscription": "email",
        "to": "latest",
    }
