"""The pieces of ``/openapi.json``: schemas, parameters, and the document made of the route table."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta

from headrace import limits
from headrace.checking import given_schema
from headrace.model import DeadLetter, Message, Scheduled
from headrace.notation import MILLISECONDS, SECONDS, Unit
from headrace.operations.arguments import OFFSET, PATTERN, SUBSCRIPTION, TOPIC
from headrace.operations.catalog import OPERATIONS
from headrace.operations.declaring import Operation
from headrace.server.routing import Parameter, Route

Schema = dict[str, Any]
OPEN_PATHS = (
    "/health", "/health/live", "/health/ready", "/openapi.json",
    "/", "/console/{version}/{file}", "/console/session",
)  # fmt: skip
"""Whoever watches over the broker has no token, and the console is where one logs in."""
OPEN_WORDS = ("", "console")
"""First words of paths that are all open."""
TAKE_PATTERNS = ("consume", "ack", "nack", "extend", "subscribe", "stream")
"""First words of paths whose topic may be a pattern."""
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "string", "format": "date-time"}
TIME_MS: Schema = {"type": "integer", "minimum": 0, "maximum": limits.TIMESTAMP_MS_MAX}
MOMENT: Schema = {"anyOf": [TIME_MS, TIME]}
GROUP: Schema = SUBSCRIPTION
DELIVERY: Schema = {"type": "string", "pattern": r"^[0-9]{1,20}\.[0-9]{1,20}$"}
UUID: Schema = {"type": "string", "format": "uuid"}


REF = "#/components/schemas/{name}"


def ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def duration(unit: Unit, high: float) -> Schema:
    kind = float if unit is SECONDS else int
    return given_schema(Annotated[kind, Meta(ge=0, le=int(high)), unit])


def body(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """What a client sends: nothing that is not known."""
    return obj(properties, required, additionalProperties=False)


def obj(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, **more}
    if required:
        schema["required"] = required
    return schema


RECEIPT = obj(
    {
        "id": UUID,
        "topic": TOPIC,
        "partition": WHOLE,
        "offset": OFFSET,
        "timestamp": TIME,
        "scheduled": FLAG,
        "duplicate": FLAG,
        "count": {"type": "integer", "minimum": 1},
    },
    ["id", "topic"],
)
MESSAGE = obj(
    {
        "id": UUID,
        "topic": STRING,
        "partition": WHOLE,
        "offset": OFFSET,
        "data": {"description": "The JSON as published; else text, or base64."},
        "encoding": {"type": "string", "enum": ["base64"]},
        "headers": {"type": "object", "additionalProperties": STRING},
        "timestamp": TIME,
        "attempt": {"type": "integer", "minimum": 1},
        "retryCount": WHOLE,
        "key": STRING,
        "key64": {"type": "string", "description": "A key that is no text, as base64."},
        "delivery": DELIVERY,
    },
    ["id", "topic", "partition", "offset", "data", "headers", "timestamp", "attempt", "retryCount"],
)
ERROR = obj(
    {
        "error": obj(
            {"code": STRING, "message": STRING, "retryable": FLAG}, ["code", "message", "retryable"]
        )
    },
    ["error"],
)
_LETTER = {
    "offset": OFFSET,
    "subscription": STRING,
    "reason": STRING,
    "attempts": WHOLE,
    "timestamp": TIME,
    "message": ref("Message"),
}
_SCHEDULED = {"id": UUID, "topic": STRING, "deliver_at": TIME}
_HEALTH = {
    "status": {"type": "string", "enum": ["ok", "not ready", "degraded"]},
    "reasons": array(STRING),
    "topics": WHOLE,
    "connections": WHOLE,
}
SCHEMAS: dict[str, Schema] = {
    "Receipt": RECEIPT,
    "Message": MESSAGE,
    "Error": ERROR,
    "DeadLetter": obj(_LETTER, list(_LETTER)),
    "Scheduled": obj(_SCHEDULED, list(_SCHEDULED)),
    "Settled": obj({"settled": WHOLE, "stale": array(DELIVERY)}, ["settled", "stale"]),
    "Health": obj(_HEALTH, ["status"]),
}


# --- operations -------------------------------------------------------------------------------------
_RESULTS = [o.result for o in OPERATIONS.values() if o.http and o.result is not None]
_SHOWN = {Message: "Message", DeadLetter: "DeadLetter", Scheduled: "Scheduled"}
"""Results that HTTP shows in its own way."""


BODIES: dict[str, dict[str, Schema]] = {
    "edit_dead_letter": {
        "data": {"description": "Any JSON; other data as text or base64."},
        "encoding": {"type": "string", "enum": ["base64"]},
        "headers": {"type": "object", "additionalProperties": STRING},
    }
}
"""Of operations whose body says something else than their arguments."""
DESCRIPTIONS = {
    "topic": "The topic, if the name is not unique.",
    "limit": "How many at most.",
    "after": "List what follows this offset.",
}


def of_result(operation: Operation) -> Schema:
    """The schema of an operation's answer."""
    kind = operation.result
    if kind is None:
        first = next(iter(operation.arguments.values()))
        return obj({str(operation.answer): first.schema}, [str(operation.answer)])
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    if inner in _SHOWN:
        schema = ref(_SHOWN[inner])
        schema = array(schema) if get_origin(kind) is list else schema
    else:
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return (
        schema if operation.answer is None else obj({operation.answer: schema}, [operation.answer])
    )


def _components() -> dict[str, Schema]:
    kinds = [k for k in _RESULTS if (get_args(k)[0] if get_origin(k) is list else k) not in _SHOWN]
    return SCHEMAS | msgspec.json.schema_components(kinds, ref_template=REF)[1]


def answers(status: str, schema: Schema, text: str = "Done.") -> dict[str, dict[str, Any]]:
    return {status: {"description": text, "content": {"application/json": {"schema": schema}}}}


NOTHING = {"204": {"description": "Nothing there."}}


def json_body(schema: Schema, *, required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


GROUP_PARAMETER = Parameter("group", "The subscription.", {**GROUP, "default": "default"})
SETTLED_GROUP = Parameter("group", "The subscription. The delivery says it, too.", GROUP)
LIMIT = Parameter(
    "limit", "How many at most.", {"type": "integer", "minimum": 1, "maximum": 10_000}
)
CLIENT_ID = Parameter(
    "client_id", "A name for this client, shown to operators.", {**STRING, "maxLength": 200}
)
WAIT = Parameter(
    "wait",
    "How long to wait for the first: milliseconds, or 30s.",
    duration(MILLISECONDS, 60_000),
)
REQUEST_WAIT = Parameter(
    "wait",
    "How long to wait for the reply: milliseconds, or 30s.",
    duration(MILLISECONDS, limits.REQUEST_S_MAX * 1000),
)
ACK = Parameter(
    "ack", "auto: acknowledged on delivery.", {"type": "string", "enum": ["auto", "manual"]}
)
PARTITION = Parameter("partition", "The partition.", OFFSET)
ONE_PARTITION = Parameter("partition", "Read this partition only; default: all, by time.", OFFSET)
CURSOR = Parameter(
    "cursor",
    "Continue after a page: the X-Cursor of its answer, also accepted as a header.",
    {"type": "string", "pattern": r"^([0-9]{1,4}:[0-9]{1,12}(,[0-9]{1,4}:[0-9]{1,12})*)?$"},
)
PUBLISH_PARAMETERS = (
    Parameter("key", "Decides the partition; the same key, the same order.", STRING),
    Parameter("key64", "A key that is no text, as base64.", {**STRING, "format": "byte"}),
    PARTITION,
    Parameter("id", "The message's own id.", UUID),
    Parameter("to", "The one subscription it is meant for.", GROUP),
    Parameter(
        "delay",
        "When it is published: in so many seconds, or 1h.",
        duration(SECONDS, limits.DELAY_S_MAX),
    ),
    Parameter(
        "deliver_at", "When it is published: a time, or ms since 1970; not with delay.", MOMENT
    ),
    Parameter(
        "ttl", "How long it is delivered: seconds, or 1h.", duration(SECONDS, limits.DELAY_S_MAX)
    ),
    Parameter("timestamp", "Its own time, or ms since 1970, not in the future.", MOMENT),
    Parameter(
        "Idempotency-Key",
        "A repeated key is answered with the first receipt.",
        {**STRING, "minLength": 1},
        "header",
    ),
)

_FAILURES = {
    "400": "It can never be accepted as it is.",
    "401": "The token is missing or wrong.",
    "403": "A web page of another site, or a name that is not this machine's.",
    "404": "It is not there.",
    "409": "It is in a state in which this cannot be done.",
    "413": "Too large.",
    "414": "The address is too long.",
    "415": "A content type or encoding that is not understood here.",
    "429": "The queue is full; try again.",
    "431": "The headers are too large.",
    "500": "The broker failed, or the outcome is unknown.",
    "503": "Not now; try again if it is said to be retryable.",
}


def _failures(route: Route) -> dict[str, str]:
    """Those that the route can have."""
    unless = {
        "404": "{" in route.path,
        "409": route.method != "GET" or route.tag in ("consuming", "subscriptions"),
        "413": route.body is not None,
        "429": route.method == "POST" and route.tag in ("publishing", "dead letters"),
        "401": route.path not in OPEN_PATHS or route.path == "/console/session",
    }
    return {status: text for status, text in _FAILURES.items() if unless.get(status, True)}


def document(routes: list[Route]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        parameters = [
            {
                "name": word[1:-1],
                "in": "path",
                "required": True,
                "schema": _path_schema(route, word[1:-1]),
            }
            for word in route.path.split("/")
            if word.startswith("{")
        ]
        parameters += [
            {"name": p.name, "in": p.place, "description": p.description, "schema": p.schema}
            for p in route.parameters
        ]
        responses = dict(route.answers)
        for status, text in _failures(route).items():
            responses.setdefault(
                status,
                {
                    "description": text,
                    "content": {"application/json": {"schema": ref("Error")}},
                },
            )
        operation: dict[str, Any] = {
            **({"security": []} if route.path in OPEN_PATHS else {}),
            "summary": route.summary,
            "operationId": route.handler.__name__.removeprefix("on_"),
            "tags": [route.tag],
            "parameters": parameters,
            "responses": responses,
        }
        if route.errors:
            operation["description"] = f"Error codes of its own: {', '.join(route.errors)}."
            operation["x-error-codes"] = list(route.errors)
        if route.body is not None:
            operation["requestBody"] = route.body
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version("headrace"),
            "description": "A message broker: publish, consume, replay.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": _components(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _path_schema(route: Route, name: str) -> Schema:
    if name in route.path_schemas:
        return route.path_schemas[name]
    if name == "topic" and route.path.split("/")[1] in TAKE_PATTERNS:
        return PATTERN
    return {"topic": TOPIC, "group": GROUP, "name": GROUP, "id": UUID, "offset": OFFSET}[name]
