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
    safe: bool = True
    """A GET that takes nothing away: ``HEAD`` may stand for it."""


class RouteTable:
    def __init__(self, routes: list[Route]):
        self.routes = routes
        self._table: dict[tuple[str, int], list[tuple[list[str], Route]]] = {}
        for route in routes:
            words = route.path[1:].split("/")
            self._table.setdefault((route.method, len(words)), []).append((words, route))
            if route.method == "GET" and route.safe:
                self._table.setdefault(("HEAD", len(words)), []).append((words, route))
        for candidates in self._table.values():  # fixed words before parameters
            candidates.sort(key=lambda item: [word.startswith("{") for word in item[0]])

    def find(self, method: str, words: list[str]) -> tuple[Handler, list[str]]:
        found = self._match(method, words)
        if found is not None:
            return found
        path = "/" + "/".join(words)
        allowed = self.methods(words)
        if not allowed:
            raise NotFound(f"there is nothing at {path[:80]}; see /openapi.json", code="no_route")
        if method == "OPTIONS":
            return _options, [", ".join(allowed)]
        raise InvalidArgument(
            f"{path[:80]} does not take {method}; it takes {', '.join(allowed)}",
            code="method_not_allowed",
        )

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

    def methods(self, words: list[str]) -> list[str]:
        return [
            method
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
            if self._match(method, words) is not None
        ]


def _options(connection: Any, request: Any, allowed: str) -> bytes:
    from headrace.wire import http

    return http.answer(204, headers={"Allow": allowed}, keep_alive=request.keep_alive)
