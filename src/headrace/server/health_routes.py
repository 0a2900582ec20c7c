"""Health, metrics and the description of the API over HTTP."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.access.rights import EVERYTHING
from headrace.server import schemas
from headrace.server.http import HttpSession
from headrace.server.routing import Route
from headrace.wire.http import Answer, Request


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value))


def on_live(session: HttpSession, request: Request) -> Answer:
    """The process runs and its loop turns: it answered."""
    return _json({"status": "ok"})


def on_ready(session: HttpSession, request: Request) -> Answer:
    """Whether publishes would be taken now, as promised, and if not, why."""
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
    if engine.access.problem is not None:
        reasons.append(
            "the access file cannot be used, and the last good rules are in force; the broker's log "
            "says more"
        )
    if engine.cluster is not None:
        reasons += engine.cluster.reasons()
    refusal = engine.guard.refusal()
    if refusal is not None:
        reasons.append(refusal.message)
    caller = session.connection.caller
    sees, hidden = caller.sees, 0
    if engine.staging.trouble is not None:
        reasons.append(
            engine.staging.trouble
            if caller.unlimited
            else "a commit of staged batches cannot go on; the broker's log says which"
        )
    adopted = 0
    for topic in engine.topics:
        if topic.record.adopted and sees(topic.name):
            reasons.append(
                f"{topic.name} has lost its settings and keeps all messages; set them again ('headrace alter-topic')"
            )
        elif topic.record.adopted:
            adopted += 1
        for partition in topic.partitions:
            if partition.log.read_only and sees(topic.name):
                reasons.append(
                    f"{topic.name}/{partition.number} is read-only: {partition.log.read_only}"
                )
            elif partition.log.read_only:  # health is asked without a login
                hidden += 1
    if adopted:
        reasons.append(f"{adopted} topics have lost their settings; the broker's log says which")
    if hidden:
        reasons.append(f"{hidden} partitions are read-only; the broker's log says which")
    return reasons


async def on_metrics(session: HttpSession, request: Request) -> Answer:
    caller = session.connection.caller
    if not caller.may_all("metrics", EVERYTHING, EVERYTHING):  # they name every topic
        raise caller.refusal("metrics", EVERYTHING)
    content, content_type = await session.hub.metrics()
    return Answer(200, content, content_type)


def on_openapi(session: HttpSession, request: Request) -> Answer:
    if not _OPENAPI:
        _OPENAPI.append(orjson.dumps(schemas.document(session.hub.routes.routes)))
    return Answer(200, _OPENAPI[0])


_OPENAPI: list[bytes] = []


_HEALTH = {
    **schemas.answers("200", schemas.ref("Health")),
    **schemas.answers("503", schemas.ref("Health"), "Not ready; the reasons are given."),
}
ROUTES = [
    Route("GET", "/health", on_health, "Health", "operations", (), None, _HEALTH),
    Route("GET", "/health/live", on_live, "Does the process live?", "operations", (), None,
          schemas.answers("200", schemas.ref("Health"))),
    Route("GET", "/health/ready", on_ready, "Does it take publishes?", "operations", (), None,
          _HEALTH),
    Route("GET", "/metrics", on_metrics, "Prometheus metrics", "operations", (), None,
          {"200": {"description": "Metrics.", "content": {"text/plain": {"schema": schemas.STRING}}}}),
    Route("GET", "/openapi.json", on_openapi, "This description", "operations", (), None,
          schemas.answers("200", {"type": "object"})),
]  # fmt: skip
