"""Every operation, for everybody, over every protocol: refused without the right, and it reveals nothing.

The cases come from the catalog: an operation that is added later is tested as soon as it is declared. If
it takes an argument of a new kind, ``SAMPLES`` needs a line for it.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.access.rights import RIGHTS
from headrace.broker.permissions import Permissions
from headrace.errors import HeadraceError, by_kind
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.operations.catalog import OPERATIONS
from headrace.operations.declaring import SETTINGS, Http, Operation
from tests.contract.raw_binary import ADMIN, FrameSocket
from tests.contract.raw_binary import AUTH as AUTH_FRAME
from tests.contract.raw_text import TextSocket
from tests.server.access_rig import NOTHING, REFUSED, ROOT, Teams, teams
from tests.server.http_rig import Http as HttpClient
from tests.server.http_rig import target
from tests.server.http_websocket import WebSocket

EVERYBODY = (*RIGHTS, NOTHING)
REPORT = {"state": "finished", "run_id": "1", "started_at": 1, "queries": []}


def samples(team: str, ids: dict[str, Any], operation: Operation) -> dict[str, Any]:
    """The arguments of a call that is about one team."""
    known: dict[str, Any] = {
        "topic": f"{team}.a",
        "topics": [f"{team}.a"],
        "subscription": f"{team}.s",
        "pipeline": f"{team}.p",
        "user": f"{team}.u",
        "token": f"{team}.t",
        "at": "earliest",
        "to": ids["message"] if operation.name == "reply" else "earliest",
        "positions": {f"{team}.a": {"0": 0}},
        "wait": 0,
        "id": ids["later"] if operation.name in ("cancel", "publish_now") else ids["message"],
        "name": f"{team}.n",
        "number": 1,
        "pieces": [ids["piece"]],
        "report": REPORT,
        "offset": 0,
        "value": {"data": "edited"},
        "backup": "1",
        "node": "node1:9999",
        "wanted": "payload",
        "partition": 0,
    }
    if operation.name == "create_token":
        known["user"] = None
        known["grants"] = [f"publish:{team}.a:{team}.x"]
    given = {}
    for name, argument in operation.arguments.items():
        if name in known and known[name] is not None:
            if argument.is_required or name in ("topic", "topics", "name", "grants", "value"):
                given[name] = known[name]
        elif argument.is_required:
            pytest.fail(f"{operation.name} takes {name}: add a sample for it")
    return given


@pytest.fixture(scope="module")
def house() -> Iterator[Teams]:
    with teams() as found:
        yield found


# --- over the binary protocol, and HTTP -------------------------------------------------------------
class Frames:
    """``ADMIN`` frames."""

    def __init__(self, house: Teams, right: str):
        self._socket = FrameSocket(house.server.address)
        self._socket.ask(AUTH_FRAME, {"token": house.secrets[right]})

    def call(self, operation: Operation, given: dict[str, Any]) -> str:
        body = json.dumps({"op": operation.name, **given}).encode()
        return self._socket.ask(ADMIN, {}, body).body.decode()

    def close(self) -> None:
        self._socket.close()


class Routes:
    """HTTP, where an operation has a route."""

    def __init__(self, house: Teams, right: str):
        self._http = HttpClient(house.server.http_address, house.secrets[right])

    def call(self, operation: Operation, given: dict[str, Any]) -> str | None:
        if not operation.http:
            return None
        return self._call(operation.http[0], dict(given))

    def _call(self, route: Http, given: dict[str, Any]) -> str:
        words = [
            str(given.pop(route.path_arguments[word[1:-1]])) if word.startswith("{") else word
            for word in route.path[1:].split("/")
        ]
        names = {argument: field for field, argument in route.rename.items()}
        given = {names.get(name, name): value for name, value in given.items()}
        if "value" in given:
            given["data"] = given.pop("value")["data"]
        has_body = route.method in ("POST", "PUT", "PATCH")
        path = target(*words) if has_body else target(*words, **given)
        answer = self._http.ask(route.method, path, given if has_body else None)
        if answer.status >= 400:
            error = answer.json["error"]
            raise by_kind(error["code"])(error["message"], code=error["code"])
        return answer.body.decode()

    def close(self) -> None:
        self._http.close()


PROTOCOLS = {"binary": Frames, "http": Routes}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("right", EVERYBODY)
def test_nothing_of_another_team_can_be_done_or_seen(
    house: Teams, right: str, protocol: str
) -> None:
    """Whatever right somebody has over its own team, and whatever the operation."""
    session = PROTOCOLS[protocol](house, right)
    with closing(session):
        for operation in OPERATIONS.values():
            given = samples("secret", house.ids["secret"], operation)
            quoted = json.dumps(given)
            try:
                answer, code = session.call(operation, given), None
            except HeadraceError as error:
                answer, code = None, error.code
            assert code is None or code in REFUSED, (operation.name, code)
            if answer is None:
                continue
            assert not operation.about or operation.permission == "see", operation.name
            assert "secret" not in answer or "secret" in quoted, (operation.name, answer)
            assert "payload of secret" not in answer


def test_the_other_team_is_untouched(house: Teams) -> None:
    """After all of the above: what it had, it has."""
    with house.server.client(token=ROOT) as root:
        assert root.fetch("secret.a")[0].value == b"payload of secret"
        assert root.topic_stats("secret.a")["messages"] == 1
        assert root.subscription_stats("secret.s")["topic"] == "secret.a"
        assert len(root.dead_letters("secret.s")) == 1
        assert [each.topic for each in root.scheduled("secret.a")] == ["secret.a"]
        assert root.pipeline_stats("secret.p")["state"] == "finished"
        assert [u["user"] for u in root.users() if u["user"].startswith("secret")] == ["secret.u"]
        assert "secret.t" in [token["token"] for token in root.tokens()]
        assert not [name for name in root.topics() if name not in ("mine.a", "secret.a",
                    "mine.s.dlq", "secret.s.dlq")]  # fmt: skip


@pytest.mark.parametrize("right", EVERYBODY)
def test_every_operation_needs_the_right_that_it_declares(house: Teams, right: str) -> None:
    """Over its own team: exactly those with the right, or with ``admin``, get past the check."""
    engine = house.server.engine
    caller = engine.access.by_token(house.secrets[right])
    assert caller is not None
    for operation in OPERATIONS.values():
        given = operation.check(samples("mine", house.ids["mine"], operation))

        def is_allowed(operation: Operation = operation, given: Any = given) -> bool:
            try:
                Permissions(engine, caller).check(operation, given)
            except HeadraceError:
                return False
            return True

        has = operation.permission in (right, "none") or right == "admin"
        if operation.permission == "see":
            has = right != NOTHING or operation.about is None
        assert house.server.call(is_allowed) == has, (operation.name, operation.permission)


# --- publishing, reading and consuming --------------------------------------------------------------
def over_text(house: Teams, right: str, team: str, what: str) -> None:
    text = TextSocket(house.server.address)
    try:
        text.ask(f"AUTH {house.secrets[right]}")
        if what == "publish":
            text.ask(f"PUB {team}.a 2", b"hi")
        elif what == "publish options":
            text.ask(f"PUB {team}.a 2 key=k", b"hi")
        elif what == "fetch":
            text.ask(f"FETCH {team}.a earliest count=1")
        elif what == "follow":
            text.ask(f"SUB {team}.a")
        elif what == "consume":
            text.ask(f"SUB {team}.a group={team}.s")
        elif what == "consume new":
            text.ask(f"SUB {team}.a group={team}.text")
    finally:
        text.close()


def over_http(house: Teams, right: str, team: str, what: str) -> None:
    http = HttpClient(house.server.http_address, house.secrets[right])
    paths = {
        "publish": ("POST", f"/publish/{team}.a", {}),
        "publish options": ("POST", f"/publish/batch/{team}.a", [1, 2]),
        "fetch": ("GET", f"/topics/{team}.a/messages", None),
        "follow": ("GET", f"/stream/{team}.a", None),
        "consume": ("GET", f"/consume/{team}.a?group={team}.s", None),
        "consume new": ("GET", f"/consume/{team}.a?group={team}.http", None),
        "settle": ("POST", f"/ack/{team}.a?group={team}.s", {"delivery": "1.1"}),
    }
    try:
        method, path, body = paths[what]
        if what == "follow":
            raw = http._connection
            raw.request(method, path, headers={"Authorization": f"Bearer {house.secrets[right]}"})
            response = raw.getresponse()
            if response.status >= 400:
                code = json.loads(response.read())["error"]["code"]
                raise HeadraceError("refused", code=code)
            response.close()
            return
        answer = http.ask(method, path, body)
        if answer.status >= 400 and answer.code != "stale_delivery":
            raise HeadraceError("refused", code=answer.code)
    finally:
        http.close()


def over_websocket(house: Teams, right: str, team: str, what: str) -> None:
    fields: dict[str, Any] = {"topic": f"{team}.a"}
    if what.startswith("publish"):
        fields |= {"data": 1} | ({"key": "k"} if what == "publish options" else {})
    elif what.startswith("consume"):
        fields["group"] = f"{team}.s" if what == "consume" else f"{team}.ws"
    address = house.server.http_address
    with WebSocket(address, f"/ws?token={house.secrets[right]}") as websocket:
        type_ = "publish" if what.startswith("publish") else "subscribe"
        answer = websocket.ask(type_, **fields)
        if answer["type"] == "error":
            raise HeadraceError(answer["message"], code=answer["code"])


def over_client(house: Teams, right: str, team: str, what: str) -> None:
    with house.client(right) as client:
        if what == "publish":
            client.publish(f"{team}.a", b"x")
        elif what == "publish options":
            client.publish_many(f"{team}.a", [b"x", b"y"])
        elif what == "fetch":
            client.fetch(f"{team}.a")
        elif what == "follow":
            client.subscribe(f"{team}.a").close()
        elif what == "consume":
            client.subscription(f"{team}.s").close()
        elif what == "consume new":
            client.create_subscription(f"{team}.client", f"{team}.a")
        elif what == "stage":
            client.stage(f"{team}.a", encode(Columns([b"x"])))


DATA = {
    "publish": "publish",
    "publish options": "publish",
    "stage": "publish",
    "fetch": "browse",
    "follow": "consume",
    "consume": "consume",
    "consume new": "consume",
    "settle": "consume",
}
WAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "text": (
        over_text,
        ("publish", "publish options", "fetch", "follow", "consume", "consume new"),
    ),
    "http": (over_http, tuple(what for what in DATA if what != "stage")),
    "websocket": (
        over_websocket,
        ("publish", "publish options", "follow", "consume", "consume new"),
    ),
    "client": (over_client, tuple(what for what in DATA if what != "settle")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", EVERYBODY)
def test_messages_need_the_right(house: Teams, right: str, way: str) -> None:
    """To publish, to read, to follow and to consume; of another team, never."""
    call, abilities = WAYS[way]
    for what in abilities:
        with pytest.raises(HeadraceError) as caught:
            call(house, right, "secret", what)
        assert caught.value.code in REFUSED, what
        if right in (DATA[what], "admin"):
            call(house, right, "mine", what)
        else:
            with pytest.raises(HeadraceError) as caught:
                call(house, right, "mine", what)
            assert caught.value.code in REFUSED, what


def test_settings_are_not_an_argument_of_the_samples() -> None:
    """So that a test which forgets them is noticed: they are always optional."""
    assert all(SETTINGS not in operation.arguments for operation in OPERATIONS.values())
