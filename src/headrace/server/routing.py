"""Paths to handlers: one table that routes requests and describes itself as OpenAPI.

A path is words and ``{parameters}``; the table is a dict by method and number of words, so finding a
route costs a few comparisons whatever their number. What is not in the table does not exist, and what
is in it is described: ``/openapi.json`` is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidArgument, NotFound

Handler = Callable[..., Any]


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


class RouteTable:
    def __init__(self, routes: list[Route]):
        self.routes = routes
        self._table: dict[tuple[str, int], list[tuple[list[str], Route]]] = {}
        for route in routes:
            words = route.path.strip("/").split("/")
            self._table.setdefault((route.method, len(words)), []).append((words, route))
        for candidates in self._table.values():  # fixed words before parameters
            candidates.sort(key=lambda item: [word.startswith("{") for word in item[0]])

    def find(self, method: str, path: str) -> tuple[Handler, list[str]]:
        wanted = "GET" if method == "HEAD" else method
        words = path.strip("/").split("/")
        found = self._match(wanted, words)
        if found is not None:
            return found
        if method == "OPTIONS":
            return _options, []
        allowed = self.methods(path)
        if allowed:
            raise InvalidArgument(
                f"{path} does not take {method}; it takes {', '.join(allowed)}",
                code="method_not_allowed",
            )
        raise NotFound(f"there is nothing at {path}; see /openapi.json", code="no_route")

    def _match(self, method: str, words: list[str]) -> tuple[Handler, list[str]] | None:
        for pattern, route in self._table.get((method, len(words)), ()):
            parameters = []
            for want, word in zip(pattern, words, strict=True):
                if want[:1] == "{" and word:
                    parameters.append(word)
                elif want != word:
                    break
            else:
                return route.handler, parameters
        return None

    def methods(self, path: str) -> list[str]:
        words = path.strip("/").split("/")
        return sorted(
            method
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
            if self._match(method, words) is not None
        )


def _options(connection: Any, request: Any) -> bytes:
    from headrace.wire import http

    return http.answer(204, keep_alive=request.keep_alive)
