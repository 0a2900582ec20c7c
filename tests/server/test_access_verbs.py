"""Every verb of every protocol, for everybody: refused without its right, and it reveals nothing.

The tables of the protocols say which verbs there are. A verb that is added later fails
``test_every_verb_says_which_right_it_takes`` until it has a line here, and then all other tests.

A verb takes a right; or ``see``: any right over the topic; or ``own``: it works on what this connection
itself holds, so that there is nothing else that it could reach; or ``none``.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.access.rights import RIGHTS
from headrace.errors import HeadraceError, by_kind
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.server import binary, health_routes, routes, stream, text, websocket
from headrace.server.schemas import OPEN_PATHS
from headrace.wire.binary import Type
from tests.contract.raw_binary import FrameSocket, frame
from tests.contract.raw_text import TextSocket
from tests.server.access_rig import NOTHING, REFUSED, ROOT, Teams, teams
from tests.server.http_rig import Events, Http
from tests.server.http_websocket import WebSocket

EVERYBODY = (*RIGHTS, NOTHING)
NOT_MINE = {"stale_delivery", "not_subscribed"}
BATCH = encode(Columns([b"x"])).raw()


class Lease:
    """A delivery of the other team, which a member of it holds."""

    def __init__(self, house: Teams):
        self.socket = TextSocket(house.server.address)
        self.socket.ask(f"AUTH {ROOT}")
        self.socket.ask("SUB secret.a group=secret.held")
        self.id, self.offset = str(self.socket.delivery(10).handle).split(".")


@pytest.fixture(scope="module")
def house() -> Iterator[Any]:
    with teams() as found:
        with found.server.client(token=ROOT) as root:
            root.create_topic("secret.d")
            root.create_subscription("secret.d", "secret.a")
        found.lease = Lease(found)  # type: ignore[attr-defined]
        yield found
        found.lease.socket.close()  # type: ignore[attr-defined]


# --- text -----------------------------------------------------------------------------------------
TEXT: dict[str, tuple[str, str]] = {
    "PUB": ("publish", "PUB {team}.a 2 key=k\r\nhi"),
    "FETCH": ("browse", "FETCH {team}.a earliest count=5"),
    "SUB": ("consume", "SUB {team}.a"),
    "UNSUB": ("own", "UNSUB {team}.a group={team}.s"),
    "ACK": ("own", "ACK {lease}.{offset}"),
    "NACK": ("own", "NACK {lease}.{offset}"),
    "EXTEND": ("own", "EXTEND {lease}.{offset}"),
    "CREATE": ("manage", "CREATE {team}.new"),
    "DELETE": ("manage", "DELETE {team}.d"),
    "TOPICS": ("see", "TOPICS"),
    "GROUPS": ("see", "GROUPS"),
    "STATS": ("see", "STATS {team}.a"),
    "INFO": ("none", "INFO"),
    "PING": ("none", "PING"),
    "HELLO": ("none", "HELLO me"),
    "HELP": ("none", "HELP"),
    "AUTH": ("none", "AUTH {secret}"),
    "QUIT": ("none", "HELP"),
}


def over_text(house: Any, right: str, verb: str, team: str) -> str:
    sample = TEXT[verb][1].format(
        team=team, lease=house.lease.id, offset=house.lease.offset, secret=house.secrets[right]
    )
    with closing(TextSocket(house.server.address)) as socket:
        socket.ask(f"AUTH {house.secrets[right]}")
        socket.send(sample.encode() + b"\r\nUNSUB the.end\r\n")
        received = b""
        while b"not_subscribed this connection" not in received.replace(b"UNSUB", b"", 1) or (
            verb == "UNSUB" and received.count(b"not_subscribed") < 2
        ):
            received += socket._socket.recv(1 << 16)
    first = received.split(b"\r\n")[0].decode().split(" ")
    if first[0] == "ERR":
        raise HeadraceError(" ".join(first[2:]), code=first[1])
    return received.decode()


# --- binary ---------------------------------------------------------------------------------------
BINARY: dict[str, tuple[str, dict[str, str], bytes]] = {
    "CREATE_TOPIC": ("manage", {"topic": "{team}.new"}, b""),
    "PUBLISH": ("publish", {"topic": "{team}.a"}, b"x"),
    "PUBLISH_BATCH": ("publish", {"topic": "{team}.a"}, BATCH),
    "STAGE": ("publish", {"topic": "{team}.a"}, BATCH),
    "CREATE_SUBSCRIPTION": ("consume", {"subscription": "{team}.c", "topic": "{team}.a"}, b""),
    "DELETE_SUBSCRIPTION": ("manage", {"subscription": "{team}.d", "topic": "{team}.a"}, b""),
    "SUBSCRIBE": ("consume", {"subscription": "{team}.s"}, b""),
    "UNSUBSCRIBE": ("own", {"subscription": "{team}.s"}, b""),
    "FETCH": ("browse", {"topic": "{team}.a"}, b""),
    "ACK": ("own", {"lease": "{lease}", "offset": "{offset}"}, b""),
    "NACK": ("own", {"lease": "{lease}", "offset": "{offset}"}, b""),
    "EXTEND": ("own", {"lease": "{lease}"}, b""),
    "SETTLE": ("own", {}, b""),
    "CREDIT": ("own", {"topic": "{team}.a", "count": "9"}, b""),
    "HEARTBEAT": ("none", {}, b""),
    "AUTH": ("none", {"token": "{secret}"}, b""),
    "ADMIN": ("none", {}, b'{"op": "info"}'),  # test_access_matrix.py has all operations
}


def over_binary(house: Any, right: str, verb: str, team: str) -> str:
    _, properties, body = BINARY[verb]
    lease, offset = int(house.lease.id), int(house.lease.offset)
    given = {
        name: value.format(team=team, lease=lease, offset=offset, secret=house.secrets[right])
        for name, value in properties.items()
    }
    if verb == "SETTLE":
        body = b"".join(number.to_bytes(8, "big") for number in (lease, offset, offset))
    with closing(FrameSocket(house.server.address)) as socket:
        socket.ask(Type.AUTH, {"token": house.secrets[right]})
        if verb == "CREDIT":  # it has no answer
            socket.send(frame(Type.CREDIT, 0, given))
            return repr(socket.ask(Type.HEARTBEAT))
        answer = socket.ask(Type[verb], given, body)
        if verb == "SETTLE":
            assert dict(answer.properties).get("stale") == "1"
            raise HeadraceError("it was stale", code="stale_delivery")
        return repr(answer)


# --- WebSocket ------------------------------------------------------------------------------------
WEBSOCKET: dict[str, tuple[str, dict[str, Any]]] = {
    "publish": ("publish", {"topic": "{team}.a", "data": "x"}),
    "subscribe": ("consume", {"topic": "{team}.a", "group": "{team}.s"}),
    "unsubscribe": ("own", {"topic": "{team}.a", "group": "{team}.s"}),
    "ack": ("own", {"delivery": "{lease}.{offset}"}),
    "nack": ("own", {"delivery": "{lease}.{offset}"}),
    "extend": ("own", {"delivery": "{lease}.{offset}"}),
    "ping": ("none", {}),
}


def over_websocket(house: Any, right: str, verb: str, team: str) -> str:
    given = {
        name: value.format(team=team, lease=house.lease.id, offset=house.lease.offset)
        for name, value in WEBSOCKET[verb][1].items()
    }
    with WebSocket(house.server.http_address, f"/ws?token={house.secrets[right]}") as socket:
        answer = socket.ask(verb, **given)
    if answer["type"] == "error":
        raise HeadraceError(answer["message"], code=answer["code"])
    return json.dumps(answer)


# --- HTTP and event streams -----------------------------------------------------------------------
SETTLE = {"delivery": "{lease}.{offset}", "group": "{team}.s"}
HTTP: dict[str, tuple[str, str, Any]] = {
    "POST /publish/{topic}": ("publish", "/publish/{team}.a", {}),
    "POST /publish/batch/{topic}": ("publish", "/publish/batch/{team}.a", [1]),
    "POST /request/{topic}": ("publish", "/request/{team}.a?wait=0", {}),
    "POST /reply/{id}": ("none", "/reply/00000000-0000-4000-8000-000000000000", {}),
    "GET /consume/{topic}": ("consume", "/consume/{team}.a?group={team}.s&wait=0", None),
    "GET /consume/{topic}/batch": (
        "consume", "/consume/{team}.a/batch?group={team}.s&wait=0", None,
    ),
    "POST /ack/{topic}": ("consume", "/ack/{team}.a", SETTLE),
    "POST /nack/{topic}": ("consume", "/nack/{team}.a", SETTLE),
    "POST /extend/{topic}": ("consume", "/extend/{team}.a", SETTLE),
    "POST /ack": ("own", "/ack", {"delivery": "{lease}.{offset}"}),
    "POST /nack": ("own", "/nack", {"delivery": "{lease}.{offset}"}),
    "POST /extend": ("own", "/extend", {"delivery": "{lease}.{offset}"}),
    "GET /topics/{topic}/messages": ("browse", "/topics/{team}.a/messages", None),
    "GET /messages/{id}": ("browse", "/messages/{id}", None),
    "GET /stream/{topic}": ("consume", "/stream/{team}.a", None),
    "GET /metrics": ("never", "/metrics", None),  # it takes metrics over everything
    "GET /openapi.json": ("none", "/openapi.json", None),
    "GET /ws": ("none", "/openapi.json", None),  # each of its commands is above
}  # fmt: skip


def over_http(house: Any, right: str, verb: str, team: str) -> str:
    method = verb.split(" ")[0]
    _, path, body = HTTP[verb]
    known = {
        "team": team, "lease": house.lease.id, "offset": house.lease.offset,
        "id": house.ids[team]["message"],
    }  # fmt: skip
    path = path.format(**known)
    if isinstance(body, dict):
        body = {name: value.format(**known) for name, value in body.items()}
    if path.startswith("/stream"):
        with Events(
            house.server.http_address, path, Authorization=f"Bearer {house.secrets[right]}"
        ) as events:
            if events.head.status == 200:
                return ""
            error = json.loads(events.raw.exactly(int(events.head.headers["content-length"])))
            raise HeadraceError("refused", code=error["error"]["code"])
    with closing(Http(house.server.http_address, house.secrets[right])) as http:
        answer = http.ask(method, path, body)
    if answer.status >= 400:
        if answer.code in ("stale_delivery", "no_reply") and team == "mine":
            return ""  # it got past the check
        raise by_kind(answer.code)(answer.json["error"]["message"], code=answer.code)
    return answer.body.decode()


PROTOCOLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (over_text, TEXT),
    "binary": (over_binary, BINARY),
    "websocket": (over_websocket, WEBSOCKET),
    "http": (over_http, HTTP),
}
OWN_ROUTES = [*routes.ROUTES, *stream.ROUTES, *websocket.ROUTES, *health_routes.ROUTES]


# --- the tests ------------------------------------------------------------------------------------
def test_every_verb_says_which_right_it_takes() -> None:
    """One that nobody thought about is found here."""
    assert set(TEXT) == set(text.VERBS)
    assert {Type[name] for name in BINARY} == set(binary.TYPES)
    assert set(WEBSOCKET) == set(websocket.TYPES)
    paths = {f"{r.method} {r.path}" for r in OWN_ROUTES if r.path not in OPEN_PATHS}
    assert set(HTTP) - {"GET /openapi.json"} == paths - {"GET /openapi.json"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("right", EVERYBODY)
def test_nothing_of_another_team_is_reached(house: Any, right: str, protocol: str) -> None:
    """Whatever right somebody has over its own team."""
    call, table = PROTOCOLS[protocol]
    for verb, (takes, *_) in table.items():
        try:
            answer, code = call(house, right, verb, "secret"), None
        except HeadraceError as error:
            answer, code = "", error.code
        if takes in RIGHTS:
            assert code in REFUSED, (verb, code, answer)
        elif takes == "own":
            assert code in NOT_MINE or verb == "CREDIT", (verb, code)
        assert code is None or code in REFUSED | NOT_MINE, (verb, code)
        assert "payload of secret" not in answer
        if takes == "see":
            assert "secret" not in answer, (verb, answer)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("right", EVERYBODY)
def test_every_verb_takes_its_right(house: Any, right: str, protocol: str) -> None:
    """Over its own team: those who have it, and administrators of the team; nobody else."""
    call, table = PROTOCOLS[protocol]
    for verb, (takes, *_) in table.items():
        if takes == "own":
            continue
        if takes == "manage":
            with house.server.client(token=ROOT) as root:
                root.create_topic("mine.d")
                root.create_subscription("mine.d", "mine.a")
        try:
            call(house, right, verb, "mine")
            code = None
        except HeadraceError as error:
            code = error.code
        has = takes == "none" or (right in (takes, "admin") and takes != "never")
        if takes == "see":
            has = right != NOTHING or verb != "STATS"
        assert (code is None) == has, (verb, code)
        assert code is None or code in REFUSED, (verb, code)


def test_the_other_team_is_untouched(house: Any) -> None:
    """After all of the above: topics, messages and the delivery that its member holds."""
    with house.server.client(token=ROOT) as root:
        assert {name for name in root.topics() if name.startswith("secret")} == {
            "secret.a", "secret.d", "secret.s.dlq"
        }  # fmt: skip
        assert root.topic_stats("secret.a")["messages"] == 1
        assert {s["name"] for s in root.subscriptions("secret.a")} == {
            "secret.s", "secret.d", "secret.held"
        }  # fmt: skip
        assert root.subscription_stats("secret.held")["in_flight"] == 1
    house.lease.socket.ask(f"ACK {house.lease.id}.{house.lease.offset}")
