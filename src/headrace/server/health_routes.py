"""Health, metrics and the description of the API over HTTP."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.server import schemas
from headrace.server.http import HttpConnection
from headrace.server.routing import Route
from headrace.wire import http
from headrace.wire.http import Request


def _json(request: Request, value: Any, status: int = 200) -> bytes:
    return http.json_answer(status, orjson.dumps(value), request.keep_alive)


def on_live(connection: HttpConnection, request: Request) -> bytes:
    """The process runs and its loop turns: it answered."""
    return _json(request, {"status": "ok"})


def on_ready(connection: HttpConnection, request: Request) -> bytes:
    """Whether publishes would be taken now, and if not, why."""
    reasons = readiness(connection)
    status = "ok" if not reasons else "not ready"
    return _json(request, {"status": status, "reasons": reasons}, 503 if reasons else 200)


def on_health(connection: HttpConnection, request: Request) -> bytes:
    reasons = readiness(connection)
    document = {
        "status": "ok" if not reasons else "degraded",
        "reasons": reasons,
        "topics": len(connection.hub.engine.topics),
        "connections": len(connection.hub.connections),
    }
    return _json(request, document, 503 if reasons else 200)


def readiness(connection: HttpConnection) -> list[str]:
    engine = connection.hub.engine
    reasons = []
    if engine.failed is not None:
        reasons.append(engine.failed.message)
    if connection.hub.draining or engine.closing:
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


def on_metrics(connection: HttpConnection, request: Request) -> bytes:
    content, content_type = connection.hub.metrics()
    return http.answer(200, content, content_type, keep_alive=request.keep_alive)


def on_openapi(connection: HttpConnection, request: Request) -> bytes:
    return http.json_answer(200, _openapi(), request.keep_alive)


_OPENAPI: list[bytes] = []


def _openapi() -> bytes:
    if not _OPENAPI:
        from headrace.server.site import ALL_ROUTES

        _OPENAPI.append(orjson.dumps(schemas.document(ALL_ROUTES)))
    return _OPENAPI[0]


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
