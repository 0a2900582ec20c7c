"""The console over HTTP: its files, and logging in with a cookie (``console/``)."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.access.caller import Caller
from headrace.console.pages import pages
from headrace.errors import InvalidArgument
from headrace.operations.catalog import OPERATIONS
from headrace.server import schemas
from headrace.server.http import HttpSession
from headrace.server.logins import Credentials
from headrace.server.routes import check_query, read_object
from headrace.server.routing import Route
from headrace.wire.http import Answer, Request

_SECRETS: dict[str, Any] = {
    "token": {"type": "string", "minLength": 1, "maxLength": 4096},
    "user": {"type": "string", "minLength": 1, "maxLength": 200},
    "password": {"type": "string", "maxLength": 4096},
}


def on_console(session: HttpSession, request: Request) -> Answer:
    check_query(request)
    return pages().index(request)


def on_console_file(session: HttpSession, request: Request, version: str, file: str) -> Answer:
    check_query(request)
    return pages().file(version, file)


async def on_log_in(session: HttpSession, request: Request) -> Answer:
    """Check the secret as every login does, and begin a session."""
    check_query(request)
    session.hub.sessions.check_origin(request)
    given = _credentials(read_object(request.body))
    connection, hub, access = session.connection, session.hub, session.engine.access
    headers = {}
    caller: Caller | None = access.anyone
    if access.is_on:
        caller = hub.logins.at_once(connection.source, given)
        if caller is None:
            caller = await hub.logins.check(connection.source, given)
        secret = hub.sessions.begin(caller, request)
        headers["Set-Cookie"] = hub.sessions.header(secret, request)
    assert caller is not None
    whoami: Any = await hub.operations.run(OPERATIONS["whoami"], {}, caller, connection.source)
    return Answer(200, orjson.dumps(whoami), headers=headers)


def _credentials(body: dict[str, Any]) -> Credentials:
    for name, value in body.items():
        if name not in _SECRETS:
            raise InvalidArgument(f"unknown field {name[:40]!r}", code="unknown_argument")
        if not isinstance(value, str) or len(value) > _SECRETS[name]["maxLength"]:
            raise InvalidArgument(f"{name} must be a string that is not too long")
    if body.get("token") and len(body) == 1:
        return Credentials(body["token"])
    if body.get("user") and "password" in body and len(body) == 2:
        return Credentials(user=body["user"], password=body["password"])
    raise InvalidArgument("log in with token, or with user and password", code="missing_argument")


def on_log_out(session: HttpSession, request: Request) -> Answer:
    check_query(request)
    sessions = session.hub.sessions
    sessions.check_origin(request)
    sessions.end(request)
    headers = {"Set-Cookie": sessions.header("", request)}
    return Answer(200, b"{}", headers=headers)


def _content(text: str, *kinds: str) -> dict[str, dict[str, Any]]:
    content = {kind: {"schema": schemas.STRING} for kind in kinds}
    return {"200": {"description": text, "content": content}}


ROUTES = [
    Route("GET", "/", on_console, "The console", "console", (), None,
          {**_content("The page.", "text/html"), "304": {"description": "It has not changed."}}),
    Route("GET", "/console/{version}/{file}", on_console_file, "A file of the console", "console",
          (), None, _content("The file.", "text/javascript", "text/css", "image/svg+xml"),
          path_schemas={"version": schemas.STRING, "file": schemas.STRING}),
    Route("POST", "/console/session", on_log_in, "Log in with a cookie", "console", (),
          schemas.json_body({"oneOf": [
              schemas.body({"token": _SECRETS["token"]}, ["token"]),
              schemas.body({n: _SECRETS[n] for n in ("user", "password")}, ["user", "password"])]}),
          schemas.answers("200", schemas.ref("CallerInfo"))),
    Route("DELETE", "/console/session", on_log_out, "Log out", "console", (), None,
          schemas.answers("200", {"type": "object"})),
]  # fmt: skip
