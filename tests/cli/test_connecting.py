"""The options that commands share: they reach typer, and their value is closed at the end."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.connecting import given_as, named_values, with_options
from headrace.errors import InvalidArgument
from headrace.testing import running_server
from tests.cli.rig import run_script

COLOUR = {"colour": Annotated[str | None, typer.Option("--colour")]}


def test_the_options_are_added_to_the_signature() -> None:
    """The command's own options come first, and the argument that they replace is gone."""

    @with_options("paint", COLOUR, given_as(dict))
    def draw(paint: dict[str, str], name: str, width: int = 3) -> None:
        print(name, width, paint["colour"])

    assert list(inspect.signature(draw).parameters) == ["name", "width", "colour"]
    app = typer.Typer()
    app.command()(draw)
    ran = CliRunner().invoke(app, ["line", "--colour", "red"])
    assert (ran.exit_code, ran.output) == (0, "line 3 red\n")


def test_the_value_is_closed_when_the_command_fails() -> None:
    """The context that makes the value ends with the command, whatever happens."""
    seen = []

    @contextmanager
    def opened(colour: str | None) -> Iterator[str]:
        seen.append("open")
        try:
            yield colour or "none"
        finally:
            seen.append("closed")

    @with_options("paint", COLOUR, opened)
    def fail(paint: str) -> None:
        seen.append(paint)
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument):
        fail(colour="red")
    assert seen == ["open", "red", "closed"]


@pytest.mark.parametrize("pair", ["spark.x", "x=1", "=1", ""])
def test_a_pair_that_is_not_name_and_value(pair: str) -> None:
    """The sentence says what the option takes."""
    with pytest.raises(InvalidArgument, match=r"--conf takes spark\.NAME=VALUE"):
        named_values("--conf", ["spark.a=b=c", pair], prefix="spark.")


def test_the_address_is_not_that_of_a_kubernetes_service() -> None:
    """HEADRACE_PORT=tcp://… is a variable of Kubernetes and says nothing; a number is ours."""
    link = {"HEADRACE_SERVICE_HOST": "10.0.0.11", "HEADRACE_PORT": "tcp://10.0.0.11:9999"}
    with running_server(memory=True) as server:
        for given in (
            link | {"QB_SERVER_PORT": str(server.port)},
            {"HEADRACE_PORT": str(server.port)},
        ):
            ran = run_script("topics", **given)
            assert (ran.code, ran.err) == (0, "")
