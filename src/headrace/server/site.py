"""All routes of the HTTP port, put together."""

from __future__ import annotations

from headrace.server import health_routes, operation_routes, routes, stream, websocket
from headrace.server.http import Site
from headrace.server.origins import Origins
from headrace.server.routing import Route, RouteTable

ALL_ROUTES: list[Route] = [
    *routes.ROUTES,
    *stream.ROUTES,
    *websocket.ROUTES,
    *operation_routes.ROUTES,
    *health_routes.ROUTES,
]


def make_site(allowed_origins: list[str] | None, *, local_only: bool = False) -> Site:
    return Site(RouteTable(ALL_ROUTES), Origins(allowed_origins, local_only=local_only))
