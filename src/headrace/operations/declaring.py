"""An operation is data: it is declared once, and everything else is derived from the declaration.

::

    class Operations:
        @operation(permission="manage", about="topic", repeatable=False, answer="deleted")
        @route("DELETE", "/topics/{topic}", "Delete a topic")
        async def delete_topic(self, topic: TopicName) -> None:
            \"\"\"Delete a topic with its messages and its subscriptions.\"\"\"

The signature gives the arguments, their kinds (``arguments.py``), and the result. These are derived from
the declaration:

- the method of ``AsyncClient`` and ``AsyncBroker``, with these types (the decorated function calls
  ``self._operate``), and those of ``BrokerClient`` and ``Broker`` (``blocking.py``);
- the verb of the binary protocol's ``ADMIN`` frame, its arguments and its answer;
- the HTTP route, its parameters and body, and its part of ``/openapi.json``;
- the checks of all arguments, and their error messages;
- the error codes that come with the kinds of its arguments (``arguments.Raises``).

Rules:
- A declaration has no body. The implementation is the method of the same name in
  ``broker/administration.py``.
- Keyword arguments (``**settings``) travel as one argument, ``settings``. A parameter whose name is a
  setting travels with them.
- On the wire a result is a JSON object or list. With ``answer``, the result is the value of that name; an
  operation that returns nothing repeats its first argument there.

Rejected: a table of dicts, from which neither mypy nor an editor learns the types; generated source files,
which must be kept current; one class for each operation's arguments, which needs ten lines for the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson
from msgspec import UNSET

from headrace.checking import check, given_schema
from headrace.errors import InvalidArgument
from headrace.notation import Unit, read, unit_of
from headrace.operations import documents
from headrace.operations.arguments import AliasOf, Code, Raises, Reader, Schema

Permission = Literal["publish", "consume", "browse", "manage", "admin", "metrics", "see", "none"]
"""The permission that a client needs. ``see``: any right over what it is about; a list has only items over
which the client has a right. ``none``: every client that has logged in may call it, and the answer says
nothing about anybody's topics."""
Runs = Literal[
    "any node", "leader", "owner of letters", "owner of message", "named node", "every node"
]
"""Where it runs if there are several nodes: on the node that gets the request (all of them know the topics and read all messages),
on the one that has the broker's own topics, on the owner of the topic of dead letters or of the message's partition,
on the node that it names, or on all of them, whose answers become one (``cluster/routing.py``)."""
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
SETTINGS = "settings"


@dataclass(frozen=True, slots=True)
class Http:
    """The route of an operation. Names in braces are arguments."""

    method: str
    path: str
    summary: str
    tag: str = ""
    """The heading in the API's description; the first part of the path if empty."""
    rename: dict[str, str] = field(default_factory=dict)
    """Name of an argument in HTTP -> the argument."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """For arguments that only HTTP may leave out."""

    @property
    def path_arguments(self) -> dict[str, str]:
        """Name in the path -> argument."""
        words = [word[1:-1] for word in self.path.split("/") if word.startswith("{")]
        return {word: self.rename.get(word, word) for word in words}


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    annotation: Any
    """The annotation without ``None``."""
    default: Any = UNSET
    """``UNSET``: it is required."""
    code: str = "invalid_argument"
    """The error code if the type or a bound is wrong."""
    reader: Reader | None = None
    nullable: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is UNSET

    def read(self, value: object, *, strict: bool = True) -> Any:
        """The checked value. ``strict=False`` also accepts numbers as text."""
        if self.reader is not None:
            return self.reader.read(value)
        if not strict and isinstance(value, str) and self.schema.get("type") == "array":
            value = [value]
        return check(self.name, value, self.annotation, code=self.code, strict=strict)

    @property
    def schema(self) -> Schema:
        return given_schema(self.annotation) if self.reader is None else self.reader.schema


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    """On the wire."""
    method: str
    """In Python."""
    arguments: dict[str, Argument]
    """By their names on the wire."""
    aliases: dict[str, str]
    """Python name -> name on the wire, for arguments where they differ."""
    settings: Any
    """The dataclass that checks ``settings``; None if the operation has no settings."""
    result: Any
    answer: str | None
    permission: Permission
    about: str | None
    """The argument that names the topic or subscription for which the permission is needed."""
    runs: Runs
    repeatable: bool
    """A client may send it again after a broken connection: a repetition changes nothing."""
    patient: bool
    """A client retries it while the broker is unavailable, for as long as it would retry a publish."""
    errors: tuple[str, ...]
    """Error codes of the operation, besides those of invalid arguments and those of every request."""
    http: tuple[Http, ...]
    signature: inspect.Signature

    @property
    def letters(self) -> bool:
        """It is about dead letters: each letter is also checked by the topic that it comes from."""
        return self.runs == "owner of letters"

    # --- arguments --------------------------------------------------------------------------
    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call in Python, by name, without those that the caller did not give."""
        try:
            bound = self.signature.bind(None, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.method}: {error}") from None
        given: dict[str, Any] = {}
        settings: dict[str, Any] = bound.pop(SETTINGS, {})
        for name, value in list(bound.items())[1:]:
            if value is None and not self._takes_none(name):
                continue
            if self.settings is not None and name in self.settings.__dataclass_fields__:
                settings[name] = value
                continue
            name = self.aliases.get(name, name)
            given[name] = _number(value, unit_of(self.arguments[name].annotation))
        if settings:
            units = self.settings.units()
            given[SETTINGS] = {n: _number(value, units.get(n)) for n, value in settings.items()}
        return given

    def _takes_none(self, name: str) -> bool:
        argument = self.arguments.get(self.aliases.get(name, name))
        return argument is not None and argument.is_required

    def check(self, given: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Check the arguments and add the defaults of missing ones. Raises an error for an invalid one."""
        checked: dict[str, Any] = {}
        for name, argument in self.arguments.items():
            value = given.get(name, UNSET)
            if value is UNSET or (value is None and argument.nullable):
                if argument.is_required:
                    raise InvalidArgument(f"{self.name} needs {name}", code="missing_argument")
                checked[name] = argument.default
            else:
                checked[name] = argument.read(value, strict=strict)
        if self.settings is not None:
            settings = given.get(SETTINGS, {})
            if not isinstance(settings, dict):
                raise InvalidArgument(f"settings must be an object, not {settings!r:.60}")
            self.settings.of(settings)
            checked[SETTINGS] = settings
        unknown = given.keys() - checked.keys()
        if unknown:
            raise InvalidArgument(
                f"{self.name} does not take {', '.join(sorted(map(str, unknown)))}; it takes "
                f"{', '.join(checked) or 'no arguments'}",
                code="unknown_argument",
            )
        return checked

    def encode(self, given: dict[str, Any]) -> bytes:
        """A call as the body of an ``ADMIN`` frame."""
        try:
            return documents.dumps({"op": self.name, **given})
        except TypeError as error:
            raise InvalidArgument(f"{self.name} takes strings and numbers: {error}") from None

    # --- results ----------------------------------------------------------------------------
    def document(self, given: dict[str, Any], result: Any) -> Any:
        """The result as it is sent, ready for :func:`documents.dumps`."""
        if self.answer is None:
            return {} if result is None else result
        return {self.answer: next(iter(given.values())) if self.result is None else result}

    def decode(self, body: bytes) -> Any:
        """The result of an answer's body."""
        document = orjson.loads(body)
        if self.result is None:
            return None
        if self.answer is not None:
            document = document[self.answer]
        return documents.load(document, self.result)


def _number(value: Any, unit: Unit | None) -> Any:
    """A timedelta as a number of its unit: JSON has none."""
    return read(value, unit) if unit is not None and isinstance(value, timedelta) else value


def operation(
    *,
    permission: Permission,
    runs: Runs = "any node",
    about: str | None = None,
    name: str | None = None,
    settings: Any = None,
    answer: str | None = None,
    repeatable: bool = True,
    patient: bool = False,
    errors: tuple[str, ...] = (),
) -> Callable[[Method], Method]:
    """Declare an operation; see the head of this file."""

    def declare(function: Method) -> Method:
        hints = get_type_hints(function, include_extras=True)
        result = hints.pop("return")
        arguments = dict(_arguments(function, hints, settings))
        declared = Operation(
            name=name or function.__name__,
            method=function.__name__,
            arguments={  # if an alias and its argument are both declared, use the argument's declaration
                argument.name: arguments.get(argument.name, argument)
                for argument in arguments.values()
            },
            aliases={name: a.name for name, a in arguments.items() if a.name != name},
            settings=settings,
            result=None if result is type(None) else result,
            answer=answer,
            permission=permission,
            about=about,
            runs=runs,
            repeatable=repeatable,
            patient=patient,
            errors=(*_raised_for(hints.values()), *errors),
            http=getattr(function, "routes", ()),
            signature=inspect.signature(function),
        )

        @functools.wraps(function)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await self._operate(declared, declared.bind(args, kwargs))

        call.operation = declared  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return declare


deletion = functools.partial(operation, repeatable=False, answer="deleted")
"""Declare an operation that removes something: to send it again would find nothing, or something new."""

on_letters = functools.partial(operation, about="subscription", runs="owner of letters")
"""Declare an operation on the dead letters of a subscription."""


def route(
    method: str,
    path: str,
    summary: str,
    *,
    tag: str = "",
    rename: dict[str, str] | None = None,
    defaults: dict[str, Any] | None = None,
) -> Callable[[Method], Method]:
    """Declare the HTTP route of an operation, below ``@operation``; of several, the main one first."""
    declared = Http(method, path, summary, tag, rename or {}, defaults or {})

    def declare(function: Method) -> Method:
        function.routes = (declared, *getattr(function, "routes", ()))  # type: ignore[attr-defined]
        return function

    return declare


def table_of(owner: type) -> dict[str, Operation]:
    """The operations that a class declares, by their names on the wire."""
    found = (getattr(value, "operation", None) for value in vars(owner).values())
    return {declared.name: declared for declared in found if declared is not None}


def _arguments(
    function: Callable[..., Any], hints: dict[str, Any], settings: Any
) -> Iterator[tuple[str, Argument]]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if settings is not None and parameter.name in settings.__dataclass_fields__:
            continue
        annotation, nullable = _without_none(hints[parameter.name])
        notes = getattr(annotation, "__metadata__", ())
        travels_as = [note.name for note in notes if isinstance(note, AliasOf)]
        yield (
            parameter.name,
            Argument(
                travels_as[0] if travels_as else parameter.name,
                annotation,
                UNSET if parameter.default is parameter.empty else parameter.default,
                next((note.code for note in notes if isinstance(note, Code)), "invalid_argument"),
                next((note for note in notes if isinstance(note, Reader)), None),
                nullable,
            ),
        )


def _raised_for(annotations: Iterable[Any]) -> Iterator[str]:
    """The error codes that kinds of arguments bring with them."""
    for annotation in annotations:
        for note in getattr(_without_none(annotation)[0], "__metadata__", ()):
            if isinstance(note, Raises):
                yield from note.codes


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """``X`` and True for ``X | None``. Metadata of the whole annotation stays on ``X``."""
    if get_origin(annotation) is Annotated:
        inner, nullable = _without_none(annotation.__origin__)
        notes = (*getattr(inner, "__metadata__", ()), *annotation.__metadata__)
        base = inner.__origin__ if get_origin(inner) is Annotated else inner
        return Annotated[(base, *notes)], nullable
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if len(parts) < len(get_args(annotation)):
            return functools.reduce(lambda left, right: left | right, parts), True
    return annotation, False
