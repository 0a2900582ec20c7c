"""The pieces of ``/openapi.json``: schemas, parameters, and the document made of the route table."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, get_args

from headrace import limits
from headrace.broker import pipelines
from headrace.broker.delivery import Tally
from headrace.model import Compression, Durability, Ordering
from headrace.server.routing import Parameter, Route

Schema = dict[str, Any]
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/openapi.json")
"""Whoever watches over the broker has no token."""
TAKE_PATTERNS = ("consume", "ack", "nack", "extend", "subscribe", "stream")
"""First words of paths whose topic may be a pattern."""
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer", "minimum": 0}
OFFSET: Schema = {"type": "integer", "minimum": 0, "maximum": limits.OFFSET_MAX}
TIME: Schema = {"type": "string", "format": "date-time"}
TIME_MS: Schema = {"type": "integer", "minimum": 0, "maximum": limits.TIMESTAMP_MS_MAX}
_OWN: Schema = {"type": "string", "pattern": r"^(__|\.{1,2}$)"}
TOPIC: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,249}$", "not": _OWN}
"""What a topic may be called; names with two underscores in front are the broker's."""
GROUP: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]{1,200}$", "not": _OWN}
PATTERN: Schema = {
    "type": "string",
    "description": "A topic, or a pattern: * for one word, > at the end for the rest.",
    "maxLength": limits.TOPIC_NAME_CHARS_MAX,
    "pattern": r"^([A-Za-z0-9._-]+|>|(\*|[A-Za-z0-9_-]+)(\.(\*|[A-Za-z0-9_-]+))*(\.>)?)$",
    "not": _OWN,
}
DELIVERY: Schema = {"type": "string", "pattern": r"^[0-9]{1,20}\.[0-9]{1,20}$"}
UUID: Schema = {"type": "string", "format": "uuid"}
PLACE: Schema = {
    "description": "earliest, latest, an offset, a time, or @ and milliseconds since 1970.",
    "anyOf": [
        {"type": "string", "enum": ["earliest", "latest"]},
        {"type": "string", "pattern": "^@?[0-9]{1,12}$"},
        TIME,
    ],
}
POSITION: Schema = {**PLACE, "anyOf": [OFFSET, *PLACE["anyOf"]]}
"""Also as a number, where it is JSON."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def maybe(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def body(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """What a client sends: nothing that is not known."""
    return obj(properties, required, additionalProperties=False)


def obj(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, **more}
    if required:
        schema["required"] = required
    return schema


TOPIC_SETTINGS: dict[str, Schema] = {
    "partitions": whole(1, limits.PARTITIONS_PER_TOPIC_MAX),
    "durable": FLAG,
    "durability": {"type": "string", "enum": list(get_args(Durability))},
    "sync_interval_ms": whole(1, 60_000),
    "compression": {"type": "string", "enum": list(get_args(Compression))},
    "segment_bytes": whole(4096, 1 << 31),
    "segment_hours": number(0.001, 24 * 366),
    "retention_hours": maybe(number(0, 24 * 366_000)),
    "retention_bytes": maybe(whole(0, 1 << 60)),
    "retain_unread": FLAG,
    "max_queue_size": maybe(whole(1, limits.OFFSET_MAX)),
    "message_ttl_ms": maybe(whole(1, limits.TIMESTAMP_MS_MAX)),
}
SUBSCRIPTION_SETTINGS: dict[str, Schema] = {
    "ack_timeout": number(0.001, limits.ACK_TIMEOUT_S_MAX),
    "max_deliveries": whole(0, limits.MAX_DELIVERIES_MAX),
    "ordering": {"type": "string", "enum": list(get_args(Ordering))},
    "backoff": number(0, 86_400),
    "backoff_max": number(0, 86_400),
    "dead_letter_topic": maybe(TOPIC),
}
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
            {"code": STRING, "message": STRING, "retryable": FLAG}, ["code", "message", "retryable"]
        )
    },
    ["error"],
)
_PARTITION_STATS = {
    "partition": WHOLE,
    "start_offset": OFFSET,
    "end_offset": OFFSET,
    "bytes": WHOLE,
    "read_only": maybe(STRING),
}
_TOPIC_STATS = {
    "topic": STRING,
    "partitions": array(obj(_PARTITION_STATS, list(_PARTITION_STATS))),
    "messages": WHOLE,
    "bytes": WHOLE,
    "backlog": WHOLE,
    "subscriptions": array(STRING),
    "durability": {"type": "string", "enum": [*get_args(Durability), "memory"]},
    "created": TIME_MS,
    "settings": obj(TOPIC_SETTINGS, list(TOPIC_SETTINGS)),
}
_CURSOR_STATS = {
    "topic": STRING,
    "partition": WHOLE,
    "position": OFFSET,
    "end_offset": OFFSET,
    "lag": WHOLE,
    "blocked": maybe(STRING),
}
_SUBSCRIPTION_STATS = {
    "name": STRING,
    "topic": STRING,
    "members": WHOLE,
    "lag": WHOLE,
    "in_flight": WHOLE,
    "waiting_for_retry": WHOLE,
    "created": TIME_MS,
    "settings": obj(SUBSCRIPTION_SETTINGS, list(SUBSCRIPTION_SETTINGS)),
    "partitions": array(obj(_CURSOR_STATS, list(_CURSOR_STATS))),
    **dict.fromkeys(Tally.__slots__, WHOLE),
}
_LETTER = {
    "offset": OFFSET,
    "subscription": STRING,
    "reason": STRING,
    "attempts": WHOLE,
    "timestamp": TIME,
    "message": ref("Message"),
}
_SCHEDULED = {"id": UUID, "topic": STRING, "deliver_at": TIME}
_QUERY = {
    "name": STRING,
    **{name: maybe(whole(*bounds)) for name, bounds in pipelines.NUMBERS.items()},
    **dict.fromkeys(pipelines.MEASURES, maybe({"type": "number", "minimum": 0})),
    **dict.fromkeys(pipelines.TEXTS, maybe(STRING)),
    "sources": maybe({"type": "array"}),
    "last_progress_at": maybe(TIME_MS),
}
_PIPELINE = {
    "name": STRING,
    "state": {"type": "string", "enum": list(pipelines.STATES)},
    "run_id": STRING,
    "started_at": TIME_MS,
    "reported_at": TIME_MS,
    "stale": FLAG,
    "stopping": FLAG,
    "queries": array(
        obj(_QUERY, ["name", "batches_total", "input_rows_total", "last_progress_at"])
    ),
}
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
    "TopicStats": obj(_TOPIC_STATS, list(_TOPIC_STATS)),
    "SubscriptionStats": obj(_SUBSCRIPTION_STATS, list(_SUBSCRIPTION_STATS)),
    "DeadLetter": obj(_LETTER, list(_LETTER)),
    "Scheduled": obj(_SCHEDULED, list(_SCHEDULED)),
    "Settled": obj({"settled": WHOLE, "stale": array(DELIVERY)}, ["settled", "stale"]),
    "Pipeline": obj(_PIPELINE, list(_PIPELINE)),
    "Health": obj(_HEALTH, ["status"]),
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
PARTITION = Parameter("partition", "The partition.", OFFSET)
PUBLISH_PARAMETERS = (
    Parameter("key", "Decides the partition; the same key, the same order.", STRING),
    Parameter("key64", "A key that is no text, as base64.", {**STRING, "format": "byte"}),
    PARTITION,
    Parameter("id", "The message's own id.", UUID),
    Parameter("to", "The one subscription it is meant for.", GROUP),
    Parameter("delay", "Seconds until it is published.", number(0, limits.DELAY_S_MAX)),
    Parameter("deliver_at", "When it is published, in ms since 1970; not with delay.", TIME_MS),
    Parameter("ttl", "Seconds for which it is delivered.", number(0, limits.DELAY_S_MAX)),
    Parameter("timestamp", "Its own time, in ms since 1970, not in the future.", TIME_MS),
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
        "401": route.path not in OPEN_PATHS,
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


def _path_schema(route: Route, name: str) -> Schema:
    if name == "topic" and route.path.split("/")[1] in TAKE_PATTERNS:
        return PATTERN
    return {"topic": TOPIC, "group": GROUP, "name": GROUP, "id": UUID, "offset": OFFSET}[name]
