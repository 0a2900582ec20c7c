"""Every public method of Python says in its docstring what it does, and shows it."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient, Message, Publication
from headrace.broker.channel import AsyncEmbeddedConsumer, EmbeddedConsumer
from headrace.channels import AsyncChannel, Channel
from headrace.client.consumer import AsyncRemoteConsumer, RemoteConsumer

CLASSES = (
    *(Broker, AsyncBroker, BrokerClient, AsyncClient, Message, Publication, Channel, AsyncChannel),
    *(EmbeddedConsumer, AsyncEmbeddedConsumer, RemoteConsumer, AsyncRemoteConsumer),
)
INSIDE = {
    *("around", "engine", "forked", "anew", "link", "producing", "produce", "publish_alone"),
    *("follow", "unfollow", "join", "leave", "patience", "settle", "carry_out", "deliver", "put"),
    *("room", "want_refill", "drain", "clear", "give_back", "halt", "closed", "send_reply"),
    *("send_request", "on_failure", "retire"),
}
"""Called by Headrace itself, not by users."""


def methods() -> Iterator[Any]:
    for kind in CLASSES:
        for name in dir(kind):
            if not name.startswith("_") and name not in INSIDE and callable(getattr(kind, name)):
                yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "name"), list(methods()))
def test_a_method_has_a_sentence_and_an_example(kind: type, name: str) -> None:
    """The example is Python, it calls the method, and awaits only where there is something to await."""
    method = getattr(kind, name)
    text = inspect.getdoc(method) or ""
    assert re.match(r"[A-Z`].*[.:]", text), "it says what it does"
    _, found, example = text.partition("Example::\n\n")
    assert found, "it has an example"
    code = textwrap.dedent(example.split("\n\n\n")[0])
    ast.parse(f"async def example():\n{textwrap.indent(code, '    ')}")
    assert re.search(rf"\b{name}\b", code)
    if inspect.iscoroutinefunction(method):
        assert "await" in code
    if not kind.__name__.startswith("Async"):
        assert "await" not in code
        assert "async" not in code
