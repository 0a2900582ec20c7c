"""Paths to handlers: one table that routes requests and describes itself as OpenAPI.

A path is words and ``{parameters}``, and begins with a word. The table is a dict by that word and the
number of words, so finding a route takes a few comparisons, however many routes exist. ``/openapi.json``
is made from the same table, so every route is described.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidArgument, NotFound
from headrace.wire.http import Answer

Handler = Callable[..., Any]
NO_BODY_BYTES_MAX = 16 << 10
"""For a request that needs no body; some clients send an empty object."""
JSON_BYTES_MAX = 2 << 20
"""Arguments as JSON: the longest are lists of 100,000 offsets. Parsing more would hold up everybody."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    description: str
    schema: dict[str, Any]
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    parameters: tuple[Parameter, ...] = ()
    body: dict[str, Any] | None = None
    """OpenAPI ``requestBody``."""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Status -> OpenAPI response."""
    safe: bool = True
    """A GET that takes no messages away: ``HEAD`` is allowed too."""
    path_schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the parameters in the path."""
    errors: tuple[str, ...] = ()
    """Error codes of its own."""
    body_bytes_max: Callable[[int], int] | None = None
    """How large a body may be, given the limit of a message; None: ``JSON_BYTES_MAX``, or next to nothing."""

    def body_limit(self, message_bytes_max: int) -> int:
        if self.body_bytes_max is not None:
            return self.body_bytes_max(message_bytes_max)
        return NO_BODY_BYTES_MAX if self.body is None else JSON_BYTES_MAX


class RouteTable:
    def __init__(self, routes: list[Route]):
        self.routes = routes
        paths: dict[str, dict[str, Handler]] = {}
        self._by_handler = {route.handler: route for route in routes}
        for route in routes:
            methods = paths.setdefault(route.path, {})
            methods[route.method] = route.handler
            if route.method == "GET" and route.safe:
                methods["HEAD"] = route.handler
        self._table: dict[tuple[str, int], list[tuple[list[str], dict[str, Handler]]]] = {}
        for path, methods in paths.items():
            words = path[1:].split("/")
            self._table.setdefault((words[0], len(words)), []).append((words, methods))
        for candidates in self._table.values():  # fixed words before parameters
            candidates.sort(key=lambda item: [word.startswith("{") for word in item[0]])

    def find(self, method: str, words: list[str]) -> tuple[Handler, list[str]]:
        methods, parameters = self._match(words)
        handler = methods.get(method)
        if handler is not None:
            return handler, parameters
        path = "/" + "/".join(words)[:80]
        if not methods:
            raise NotFound(f"there is no route {path}; see /openapi.json", code="no_route")
        allowed = ", ".join(self.methods(words))
        if method == "OPTIONS":
            return _options, [allowed]
        raise InvalidArgument(
            f"{path} does not allow {method}; it allows {allowed}", code="method_not_allowed"
        )

    def body_limit(self, method: str, words: list[str], message_bytes_max: int) -> int:
        """The most bytes of a request's body; an error if there is no such route."""
        handler, _ = self.find(method, words)
        route = self._by_handler.get(handler)
        return NO_BODY_BYTES_MAX if route is None else route.body_limit(message_bytes_max)

    def _match(self, words: list[str]) -> tuple[dict[str, Handler], list[str]]:
        """The methods of the path, and the values of its parameters."""
        for pattern, methods in self._table.get((words[0], len(words)), ()):
            parameters = []
            for want, word in zip(pattern, words, strict=True):
                if want[:1] == "{" and word:
                    parameters.append(word)
                elif want != word:
                    break
            else:
                return methods, parameters
        return {}, []

    def methods(self, words: list[str]) -> list[str]:
        found, _ = self._match(words)
        return [m for m in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE") if m in found]


def _options(session: Any, request: Any, allowed: str) -> Answer:
    return Answer(204, headers={"Allow": allowed})
