"""The pieces of ``/openapi.json``: schemas, parameters, and the document made of the route table."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from headrace.server.routing import Parameter, Route

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
TOPIC: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,249}$"}
GROUP: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,200}$"}
DELIVERY: Schema = {"type": "string", "pattern": r"^[0-9]+\.[0-9]+$"}
UUID: Schema = {"type": "string", "format": "uuid"}
ANY: Schema = {}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def obj(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, **more}
    if required:
        schema["required"] = required
    return schema


RECEIPT = obj(
    {
        "id": UUID,
        "topic": STRING,
        "partition": WHOLE,
        "offset": WHOLE,
        "timestamp": {"type": "string", "format": "date-time"},
        "scheduled": {"type": "boolean"},
        "duplicate": {"type": "boolean"},
    },
    ["id", "topic", "timestamp"],
)
MESSAGE = obj(
    {
        "id": UUID,
        "topic": STRING,
        "partition": WHOLE,
        "offset": WHOLE,
        "data": {"description": "The JSON as published; else text, or base64."},
        "encoding": {"type": "string", "enum": ["base64"]},
        "headers": {"type": "object", "additionalProperties": STRING},
        "timestamp": {"type": "string", "format": "date-time"},
        "retryCount": WHOLE,
        "key": STRING,
        "key64": {"type": "string", "description": "A key that is no text, as base64."},
        "delivery": DELIVERY,
    },
    ["id", "topic", "partition", "offset", "data", "headers", "timestamp", "retryCount"],
)
ERROR = obj(
    {
        "error": obj(
            {"code": STRING, "message": STRING, "retryable": {"type": "boolean"}},
            ["code", "message", "retryable"],
        )
    },
    ["error"],
)
SCHEMAS: dict[str, Schema] = {
    "Receipt": RECEIPT,
    "Message": MESSAGE,
    "Error": ERROR,
    "TopicStats": obj(
        {"topic": STRING, "messages": WHOLE, "bytes": WHOLE, "backlog": WHOLE}, ["topic"]
    ),
    "SubscriptionStats": obj(
        {"name": STRING, "topic": STRING, "lag": WHOLE, "in_flight": WHOLE, "members": WHOLE},
        ["name", "topic", "lag"],
    ),
    "DeadLetter": obj(
        {
            "offset": WHOLE,
            "subscription": STRING,
            "reason": STRING,
            "attempts": WHOLE,
            "timestamp": {"type": "string", "format": "date-time"},
            "message": ref("Message"),
        },
        ["offset", "subscription", "reason", "attempts", "message"],
    ),
    "Scheduled": obj(
        {"id": UUID, "topic": STRING, "deliver_at": {"type": "string", "format": "date-time"}},
        ["id", "topic", "deliver_at"],
    ),
    "Settled": obj({"settled": WHOLE, "stale": array(DELIVERY)}, ["settled", "stale"]),
}


def answers(status: str, schema: Schema, text: str = "Done.") -> dict[str, dict[str, Any]]:
    return {status: {"description": text, "content": {"application/json": {"schema": schema}}}}


NOTHING = {"204": {"description": "Nothing there."}}


def json_body(schema: Schema, *, required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": {"application/json": {"schema": schema}}}


GROUP_PARAMETER = Parameter("group", "The subscription.", {**GROUP, "default": "default"})
LIMIT = Parameter(
    "limit", "How many at most.", {"type": "integer", "minimum": 1, "maximum": 10_000}
)
WAIT = Parameter(
    "wait",
    "Milliseconds to wait for the first.",
    {"type": "integer", "minimum": 0, "maximum": 60_000},
)
ACK = Parameter(
    "ack", "auto: acknowledged on delivery.", {"type": "string", "enum": ["auto", "manual"]}
)
PARTITION = Parameter("partition", "The partition.", {"type": "integer", "minimum": 0})
PUBLISH_PARAMETERS = (
    Parameter("key", "Decides the partition; the same key, the same order.", STRING),
    Parameter("key64", "A key that is no text, as base64.", STRING),
    PARTITION,
    Parameter("id", "The message's own id.", UUID),
    Parameter("to", "The one subscription it is meant for.", GROUP),
    Parameter("delay", "Seconds until it is published.", {"type": "number", "minimum": 0}),
    Parameter("timestamp", "Its own time, in ms since 1970, not in the future.", WHOLE),
    Parameter("deliver_at", "When it is published, in ms since 1970.", WHOLE),
    Parameter("ttl", "Seconds for which it is delivered.", {"type": "number", "minimum": 0}),
    Parameter(
        "Idempotency-Key", "A repeated key is answered with the first receipt.", STRING, "header"
    ),
)

_FAILURES = {
    "400": "It can never be accepted as it is.",
    "401": "The token is missing or wrong.",
    "403": "Not allowed.",
    "404": "It is not there.",
    "409": "It is in a state in which this cannot be done.",
    "413": "Too large.",
    "415": "A content type that is not understood here.",
    "429": "The queue is full; try again.",
    "500": "The broker failed, or the outcome is unknown.",
    "503": "Not now; try again.",
}


def document(routes: list[Route]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        parameters = [
            {
                "name": word[1:-1],
                "in": "path",
                "required": True,
                "schema": _path_schema(word[1:-1]),
            }
            for word in route.path.split("/")
            if word.startswith("{")
        ]
        parameters += [
            {"name": p.name, "in": p.place, "description": p.description, "schema": p.schema}
            for p in route.parameters
        ]
        responses = dict(route.answers)
        for status, text in _FAILURES.items():
            responses.setdefault(
                status,
                {
                    "description": text,
                    "content": {"application/json": {"schema": ref("Error")}},
                },
            )
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": route.handler.__name__.removeprefix("on_"),
            "tags": [route.tag],
            "parameters": parameters,
            "responses": responses,
        }
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
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _path_schema(name: str) -> Schema:
    return {"topic": TOPIC, "group": GROUP, "id": UUID, "offset": WHOLE}.get(name, STRING)
