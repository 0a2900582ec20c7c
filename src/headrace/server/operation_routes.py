"""The HTTP routes of all operations, made from their declarations (``operations/catalog.py``).

Arguments come from the path, the query and a JSON body, each from one of them. Settings are fields of the
body itself. A result is JSON as HTTP shows it: messages with their data, times as text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from headrace.broker.administration import New
from headrace.checking import given_schema
from headrace.errors import InvalidArgument
from headrace.operations import exact_json, views
from headrace.operations.catalog import OPERATIONS
from headrace.operations.declaring import SETTINGS, Argument, Http, Operation
from headrace.server import schemas
from headrace.server.http import HttpSession
from headrace.server.routes import BODY_BYTES_SPARE, CURSOR, check_query, read_object
from headrace.server.routing import JSON_BYTES_MAX, Parameter, Route
from headrace.server.views import value_of
from headrace.wire.http import Answer, Request

Reader = Callable[[HttpSession, Request, dict[str, Any]], Awaitable[dict[str, Any]]]
BODY_METHODS = ("POST", "PUT", "PATCH")


def _handler(operation: Operation, route: Http) -> Callable[..., Any]:
    """What answers a request of this route."""
    read = READERS.get(operation.name, _read)
    in_query = [a.name for a in _beside_the_path(operation, route) if _fits_a_query(a)]
    if SETTINGS in in_query:
        in_query.remove(SETTINGS)

    async def handle(session: HttpSession, request: Request, *words: str) -> Answer:
        given: dict[str, Any] = dict(zip(route.path_arguments.values(), words, strict=True))
        given |= check_query(request, *in_query)
        if CURSOR.lower() in request.headers and "cursor" in in_query:
            given.setdefault("cursor", request.headers[CURSOR.lower()])
        if request.method in BODY_METHODS:
            body = await read(session, request, given)
            _merge(operation, route, given, body)
        for name, value in route.defaults.items():
            given.setdefault(name, value)
        result = await session.connection.run(operation, given)
        status = 201 if isinstance(result, New) else 200
        document = operation.document(given, result)
        content, *more = await session.hub.operations.encoded(document, views.dumps)
        return Answer(status, content, more=more)

    handle.__name__ = f"on_{_operation_id(operation, route)}"
    return handle


async def _read(session: HttpSession, request: Request, given: dict[str, Any]) -> dict[str, Any]:
    return read_object(request.body)


async def _read_edited_letter(
    session: HttpSession, request: Request, given: dict[str, Any]
) -> dict[str, Any]:
    """``{"data": ..., "encoding": ..., "headers": {...}}``; data as HTTP shows it."""
    body = exact_json.loads(request.body)
    if not isinstance(body, dict):
        raise InvalidArgument("the body is a JSON object", code="invalid_json")
    if "data" in body:
        operation = OPERATIONS["dead_letter"]
        where = {name: given[name] for name in ("subscription", "offset")}
        letter = await session.connection.run(operation, where)
        headers = body.get("headers", letter.message.headers)
        operation = OPERATIONS["edit_dead_letter"]
        headers = operation.arguments["headers"].read(headers)
        body["value"] = value_of(body.pop("data"), body.pop("encoding", None), headers)
    return body


READERS: dict[str, Reader] = {"edit_dead_letter": _read_edited_letter}
"""Operations whose body says something else than their arguments."""
BODY_LIMITS: dict[str, Callable[[int], int]] = {
    # A message as JSON: escapes make text longer, and base64 makes bytes longer.
    "edit_dead_letter": lambda message: max(2 * message + BODY_BYTES_SPARE, JSON_BYTES_MAX),
}


def _merge(operation: Operation, route: Http, given: dict[str, Any], body: dict[str, Any]) -> None:
    """Add the fields of a body to the arguments; fields that are no arguments are settings."""
    settings = {}
    for field, value in body.items():
        name = route.rename.get(field, field)
        if operation.settings is not None and (name in given or name not in operation.arguments):
            settings[field] = value
        elif name in given:
            raise InvalidArgument(
                f"{name} stands in the address; leave it out of the body", code="unknown_argument"
            )
        elif name in route.rename.values() and field not in route.rename:
            raise InvalidArgument(f"unknown field {field[:40]!r}", code="unknown_argument")
        else:
            given[name] = value
    if settings:
        given[SETTINGS] = settings


# --- the description ----------------------------------------------------------------------------------
def _beside_the_path(operation: Operation, route: Http) -> list[Argument]:
    inside = route.path_arguments.values()
    return [a for a in operation.arguments.values() if a.name not in inside]


def _fits_a_query(argument: Argument) -> bool:
    schema = argument.schema
    return schema.get("type") not in ("object", None) or "anyOf" in schema or "enum" in schema


def _operation_id(operation: Operation, route: Http) -> str:
    """The operation's name; a second route is told apart by its last word."""
    if route is operation.http[0]:
        return operation.name
    return f"{operation.name}_{route.path.split('/')[-1].strip('{}')}"


def _one_of(schema: schemas.Schema) -> schemas.Schema:
    """A path names one item of a list."""
    return schema["items"] if schema.get("type") == "array" else schema


def route_of(operation: Operation, route: Http) -> Route:
    arguments = _beside_the_path(operation, route)
    body = None
    parameters: tuple[Parameter, ...] = ()
    if route.method in BODY_METHODS:
        names = {argument: field for field, argument in route.rename.items()}
        fields = {names.get(a.name, a.name): a.schema for a in arguments}
        if operation.settings is not None:
            fields |= operation.settings.schemas(given_schema)
        if operation.name in schemas.BODIES:
            fields = schemas.BODIES[operation.name]
        required = [a.name for a in arguments if a.is_required and a.name not in route.defaults]
        if fields:
            body = schemas.json_body(schemas.body(fields, required), required=bool(required))
    else:
        parameters = tuple(
            Parameter(a.name, schemas.DESCRIPTIONS.get(a.name, ""), a.schema) for a in arguments
        )
    result = schemas.of_result(operation)
    answers = schemas.answers("200", result)
    if operation.name.startswith("create_"):
        answers |= schemas.answers("201", result, "Created.")
    return Route(
        route.method,
        route.path,
        _handler(operation, route),
        route.summary,
        route.tag or route.path.split("/")[1].replace("-", " "),
        parameters,
        body,
        answers,
        path_schemas={
            word: _one_of(operation.arguments[name].schema)
            for word, name in route.path_arguments.items()
        },
        errors=operation.errors,
        body_bytes_max=BODY_LIMITS.get(operation.name) if body is not None else None,
    )


ROUTES = [
    route_of(operation, route) for operation in OPERATIONS.values() for route in operation.http
]
