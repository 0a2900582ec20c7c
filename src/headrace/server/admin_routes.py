"""Topics, subscriptions, dead letters, delayed messages, health and metrics over HTTP."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.errors import InvalidArgument
from headrace.model import check_headers
from headrace.server import exact_json, schemas
from headrace.server.http import HttpSession
from headrace.server.routes import check_query, read_object, refuse_the_rest, whole_in
from headrace.server.routing import Parameter, Route
from headrace.server.views import iso, message_view, value_of
from headrace.wire import documents
from headrace.wire.http import Answer, Request

_TOPIC_PARAMETER = Parameter("topic", "The topic, if the name is not unique.", schemas.STRING)


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value))


async def _operate(
    session: HttpSession, operation: str, body: dict[str, Any] | None = None, **own: Any
) -> Any:
    """Call an operation with what the path says, and with the fields of a body beside that."""
    for name in own:
        if body is not None and name in body:
            raise InvalidArgument(
                f"{name} is said by the path, not by the body", code="unknown_argument"
            )
    given = {key: value for key, value in {**(body or {}), **own}.items() if value is not None}
    return await session.connection.call(operation, given)


# --- topics -------------------------------------------------------------------------------------
async def on_topics(session: HttpSession, request: Request) -> Answer:
    check_query(request)
    return _json(await _operate(session, "topics"))


async def on_topic(session: HttpSession, request: Request, topic: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "topic", topic=topic))


async def on_topic_stats(session: HttpSession, request: Request, topic: str) -> Answer:
    return await on_topic(session, request, topic)


async def on_create_topic(session: HttpSession, request: Request, topic: str) -> Answer:
    check_query(request)
    is_new = session.hub.engine.topics.get(topic) is None
    settings = read_object(request.body)
    stats = await _operate(session, "create_topic", topic=topic, settings=settings)
    return _json(stats, 201 if is_new else 200)


async def on_change_topic(session: HttpSession, request: Request, topic: str) -> Answer:
    check_query(request)
    changes = read_object(request.body)
    return _json(await _operate(session, "change_topic", topic=topic, settings=changes))


async def on_delete_topic(session: HttpSession, request: Request, topic: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "delete_topic", topic=topic))


# --- subscriptions --------------------------------------------------------------------------------
async def on_subscribe(session: HttpSession, request: Request, topic: str) -> Answer:
    """Make a group over the topic: ``{"group": ..., "start": ..., <setting>: ...}``."""
    check_query(request)
    body = read_object(request.body)
    group = body.pop("group", "default")
    start = body.pop("start", "earliest")
    if not isinstance(group, str) or isinstance(start, bool) or not isinstance(start, (str, int)):
        raise InvalidArgument("group is a text, start a text or an offset")
    is_new = session.hub.engine.subscription_or_none(group, topic) is None
    stats = await _operate(
        session,
        "create_subscription",
        subscription=group,
        topic=topic,
        start=start,
        settings=body,
    )
    return _json(stats, 201 if is_new else 200)


async def on_subscriptions(session: HttpSession, request: Request) -> Answer:
    query = check_query(request, "topic")
    return _json(await _operate(session, "subscriptions", topic=query.get("topic")))


async def on_subscription(session: HttpSession, request: Request, group: str) -> Answer:
    query = check_query(request, "topic")
    return _json(
        await _operate(session, "subscription", subscription=group, topic=query.get("topic")),
    )


async def on_delete_subscription(session: HttpSession, request: Request, group: str) -> Answer:
    query = check_query(request, "topic")
    return _json(
        await _operate(
            session, "delete_subscription", subscription=group, topic=query.get("topic")
        ),
    )


async def on_seek(session: HttpSession, request: Request, group: str) -> Answer:
    query = check_query(request, "topic")
    body = read_object(request.body) | query
    return _json(await _operate(session, "seek", body, subscription=group))


# --- dead letters ---------------------------------------------------------------------------------
def _letter(document: dict[str, Any]) -> dict[str, Any]:
    letter = documents.to_letter(document)
    return {
        "offset": letter.offset,
        "subscription": letter.subscription,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "timestamp": iso(letter.timestamp),
        "message": message_view(letter.message),
    }


async def on_dead_letter_topics(session: HttpSession, request: Request) -> Answer:
    check_query(request)
    return _json(await _operate(session, "dead_letter_topics"))


async def on_dead_letters(session: HttpSession, request: Request, group: str) -> Answer:
    query = check_query(request, "after", "limit")
    after = whole_in(query, "after", -1)
    limit = whole_in(query, "limit", 100, 1, 10_000)
    found = await _operate(session, "dead_letters", subscription=group, after=after, limit=limit)
    return _json([_letter(document) for document in found])


async def on_dead_letter(session: HttpSession, request: Request, group: str, offset: str) -> Answer:
    check_query(request)
    found = await _operate(session, "dead_letter", subscription=group, offset=_offset(offset))
    return _json(_letter(found))


def _offset(text: str) -> int:
    return whole_in({"offset": text}, "offset")


async def on_edit_dead_letter(
    session: HttpSession, request: Request, group: str, offset: str
) -> Answer:
    """Replace what is given: ``{"data": ..., "encoding": ..., "headers": {...}}``."""
    check_query(request)
    number = _offset(offset)
    body = exact_json.loads(request.body)
    if not isinstance(body, dict):
        raise InvalidArgument("the body is a JSON object", code="invalid_json")
    headers = body.pop("headers", None)
    if headers is not None:
        check_headers(headers)
    value = None
    if "data" in body:
        letter = session.hub.engine.dead_letters.show(group, number)
        kept = letter.message.headers if headers is None else headers
        value = value_of(body.pop("data"), body.pop("encoding", None), kept)
    refuse_the_rest(body)
    new = await session.hub.operations.broker.edit_dead_letter(
        group, number, value=value, headers=headers
    )
    return _json({"offset": new})


async def on_redrive(session: HttpSession, request: Request, group: str) -> Answer:
    check_query(request)
    body = read_object(request.body)
    return _json(await _operate(session, "redrive", body, subscription=group))


async def on_purge_dead_letters(session: HttpSession, request: Request, group: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "purge_dead_letters", subscription=group))


async def on_purge_dead_letter(
    session: HttpSession, request: Request, group: str, offset: str
) -> Answer:
    check_query(request)
    number = _offset(offset)
    session.hub.engine.dead_letters.show(group, number)
    return _json(
        await _operate(session, "purge_dead_letters", subscription=group, offsets=[number]),
    )


# --- delayed messages -----------------------------------------------------------------------------
async def on_scheduled(session: HttpSession, request: Request) -> Answer:
    query = check_query(request, "topic", "limit")
    limit = whole_in(query, "limit", 1_000, 1, 10_000)
    found = await _operate(session, "scheduled", topic=query.get("topic"), limit=limit)
    return _json([{**item, "deliver_at": iso(item["deliver_at"])} for item in found])


async def on_cancel(session: HttpSession, request: Request, message_id: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "cancel", id=message_id))


# --- pipelines ------------------------------------------------------------------------------------
async def on_pipelines(session: HttpSession, request: Request) -> Answer:
    check_query(request)
    return _json(await _operate(session, "pipelines"))


async def on_pipeline(session: HttpSession, request: Request, name: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "pipeline", pipeline=name))


async def on_stop_pipeline(session: HttpSession, request: Request, name: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "stop_pipeline", pipeline=name))


async def on_forget_pipeline(session: HttpSession, request: Request, name: str) -> Answer:
    check_query(request)
    return _json(await _operate(session, "forget_pipeline", pipeline=name))


# --- health, metrics, description -----------------------------------------------------------------
def on_live(session: HttpSession, request: Request) -> Answer:
    """The process runs and its loop turns: it answered."""
    return _json({"status": "ok"})


def on_ready(session: HttpSession, request: Request) -> Answer:
    """Whether publishes would be taken now, and if not, why."""
    reasons = readiness(session)
    status = "ok" if not reasons else "not ready"
    return _json({"status": status, "reasons": reasons}, 503 if reasons else 200)


def on_health(session: HttpSession, request: Request) -> Answer:
    reasons = readiness(session)
    document = {
        "status": "ok" if not reasons else "degraded",
        "reasons": reasons,
        "topics": len(session.hub.engine.topics),
        "connections": len(session.hub.connections),
    }
    return _json(document, 503 if reasons else 200)


def readiness(session: HttpSession) -> list[str]:
    engine = session.hub.engine
    reasons = []
    if engine.failed is not None:
        reasons.append(engine.failed.message)
    if session.hub.draining or engine.closing:
        reasons.append("the broker is stopping")
    refusal = engine.guard.refusal()
    if refusal is not None:
        reasons.append(refusal.message)
    for topic in engine.topics:
        for partition in topic.partitions:
            if partition.log.read_only:
                reasons.append(
                    f"{topic.name}/{partition.number} is read-only: {partition.log.read_only}"
                )
    return reasons


def on_metrics(session: HttpSession, request: Request) -> Answer:
    content, content_type = session.hub.metrics()
    return Answer(200, content, content_type)


def on_openapi(session: HttpSession, request: Request) -> Answer:
    if not _OPENAPI:
        _OPENAPI.append(orjson.dumps(schemas.document(session.hub.routes.routes)))
    return Answer(200, _OPENAPI[0])


_OPENAPI: list[bytes] = []


_OBJECT: dict[str, Any] = {"type": "object"}
_DELETED = schemas.answers("200", schemas.obj({"deleted": schemas.STRING}, ["deleted"]))
_PURGED = schemas.answers("200", schemas.obj({"purged": schemas.WHOLE}, ["purged"]))
_HEALTH = {
    **schemas.answers("200", schemas.ref("Health")),
    **schemas.answers("503", schemas.ref("Health"), "Not ready; the reasons are given."),
}
_REDRIVE = {
    "offsets": schemas.array(schemas.OFFSET),
    "limit": schemas.WHOLE,
    "rate": schemas.number(0.001, 1e6),
    "to": {"type": "string", "enum": ["subscription", "topic"]},
    "reason": schemas.STRING,
    "topic": schemas.STRING,
}
_EDIT: dict[str, schemas.Schema] = {
    "data": {"description": "Any JSON; text or base64 for what is no JSON."},
    "encoding": {"type": "string", "enum": ["base64"]},
    "headers": {"type": "object", "additionalProperties": schemas.STRING},
}
_TOPIC_STATS = schemas.answers("200", schemas.ref("TopicStats"))
_GROUP_STATS = schemas.answers("200", schemas.ref("SubscriptionStats"))
_PIPELINE = schemas.answers("200", schemas.ref("Pipeline"))
_DONE = schemas.answers("200", _OBJECT)
_CREATED_TOPIC = schemas.answers("201", schemas.ref("TopicStats"), "Created.")
_CREATED_GROUP = schemas.answers("201", schemas.ref("SubscriptionStats"), "Created.")
_SETTINGS = schemas.body(schemas.TOPIC_SETTINGS)

ROUTES = [
    Route("GET", "/topics", on_topics, "List topics", "topics", (), None,
          schemas.answers("200", schemas.array(schemas.ref("TopicStats")))),
    Route("GET", "/topics/{topic}", on_topic, "Describe a topic", "topics", (), None, _TOPIC_STATS),
    Route("GET", "/topics/{topic}/stats", on_topic_stats, "Statistics of a topic", "topics", (),
          None, _TOPIC_STATS),
    Route("PUT", "/topics/{topic}", on_create_topic, "Create a topic with settings", "topics", (),
          schemas.json_body(_SETTINGS, required=False), {**_TOPIC_STATS, **_CREATED_TOPIC}),
    Route("PATCH", "/topics/{topic}", on_change_topic, "Change settings", "topics", (),
          schemas.json_body(_SETTINGS, required=False), _TOPIC_STATS),
    Route("DELETE", "/topics/{topic}", on_delete_topic, "Delete a topic", "topics", (), None,
          _DELETED),
    Route("POST", "/subscribe/{topic}", on_subscribe, "Create a subscription", "subscriptions", (),
          schemas.json_body(
              schemas.body({"group": schemas.GROUP, "start": schemas.POSITION,
                            **schemas.SUBSCRIPTION_SETTINGS}), required=False),
          {**_GROUP_STATS, **_CREATED_GROUP}),
    Route("GET", "/subscriptions", on_subscriptions, "List subscriptions", "subscriptions",
          (_TOPIC_PARAMETER,), None,
          schemas.answers("200", schemas.array(schemas.ref("SubscriptionStats")))),
    Route("GET", "/subscriptions/{group}", on_subscription, "Describe a subscription",
          "subscriptions", (_TOPIC_PARAMETER,), None, _GROUP_STATS),
    Route("DELETE", "/subscriptions/{group}", on_delete_subscription, "Delete a subscription",
          "subscriptions", (_TOPIC_PARAMETER,), None, _DELETED),
    Route("POST", "/subscriptions/{group}/seek", on_seek, "Replay, or skip", "subscriptions",
          (_TOPIC_PARAMETER,),
          schemas.json_body(
              schemas.body({"to": schemas.POSITION, "partition": schemas.WHOLE,
                            "topic": schemas.STRING}, ["to"])),
          _GROUP_STATS),
    Route("GET", "/dead-letters", on_dead_letter_topics, "Count dead letters", "dead letters", (),
          None, schemas.answers("200", schemas.array(schemas.obj(
              {"topic": schemas.STRING, "letters": schemas.WHOLE}, ["topic", "letters"])))),
    Route("GET", "/dead-letters/{group}", on_dead_letters, "List dead letters", "dead letters",
          (schemas.LIMIT, Parameter("after", "Behind this letter.", schemas.OFFSET)), None,
          schemas.answers("200", schemas.array(schemas.ref("DeadLetter")))),
    Route("DELETE", "/dead-letters/{group}", on_purge_dead_letters, "Give all letters up",
          "dead letters", (), None, _PURGED),
    Route("POST", "/dead-letters/{group}/redrive", on_redrive, "Publish letters back",
          "dead letters", (), schemas.json_body(schemas.body(_REDRIVE), required=False),
          schemas.answers("200", schemas.obj({"redriven": schemas.WHOLE}, ["redriven"]))),
    Route("GET", "/dead-letters/{group}/{offset}", on_dead_letter, "Show a letter",
          "dead letters", (), None, schemas.answers("200", schemas.ref("DeadLetter"))),
    Route("PUT", "/dead-letters/{group}/{offset}", on_edit_dead_letter, "Correct a letter",
          "dead letters", (), schemas.json_body(schemas.body(_EDIT)),
          schemas.answers("200", schemas.obj({"offset": schemas.OFFSET}, ["offset"]))),
    Route("DELETE", "/dead-letters/{group}/{offset}", on_purge_dead_letter, "Give a letter up",
          "dead letters", (), None, _PURGED),
    Route("GET", "/scheduled", on_scheduled, "List delayed messages", "delayed messages",
          (schemas.LIMIT, _TOPIC_PARAMETER), None,
          schemas.answers("200", schemas.array(schemas.ref("Scheduled")))),
    Route("DELETE", "/scheduled/{id}", on_cancel, "Cancel a delayed message", "delayed messages",
          (), None, schemas.answers("200", schemas.obj({"cancelled": schemas.UUID}, ["cancelled"]))),
    Route("GET", "/pipelines", on_pipelines, "List pipelines", "pipelines", (), None,
          schemas.answers("200", schemas.array(schemas.ref("Pipeline")))),
    Route("GET", "/pipelines/{name}", on_pipeline, "Describe a pipeline", "pipelines", (), None,
          _PIPELINE),
    Route("POST", "/pipelines/{name}/stop", on_stop_pipeline, "Ask a pipeline to stop",
          "pipelines", (), None, _PIPELINE),
    Route("DELETE", "/pipelines/{name}", on_forget_pipeline, "Forget a pipeline that has ended",
          "pipelines", (), None, _DELETED),
    Route("GET", "/health", on_health, "Health", "operations", (), None, _HEALTH),
    Route("GET", "/health/live", on_live, "Does the process live?", "operations", (), None,
          schemas.answers("200", schemas.ref("Health"))),
    Route("GET", "/health/ready", on_ready, "Does it take publishes?", "operations", (), None,
          _HEALTH),
    Route("GET", "/metrics", on_metrics, "Prometheus metrics", "operations", (), None,
          {"200": {"description": "Metrics.", "content": {"text/plain": {"schema": schemas.STRING}}}}),
    Route("GET", "/openapi.json", on_openapi, "This description", "operations", (), None, _DONE),
]  # fmt: skip
