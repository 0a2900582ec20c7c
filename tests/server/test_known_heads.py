"""A head that was admitted before is admitted again; another one is judged anew."""

import http.client
import json
from contextlib import closing

from headrace.testing import RunningServer, running_server


def post(
    connection: http.client.HTTPConnection, topic: str, **headers: str
) -> tuple[int, dict[str, object]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", f"/publish/{topic}", b'{"a": 1}', named)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def connect(server: RunningServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*server.server.addresses["http"], timeout=10)


def post_alone(server: RunningServer, **headers: str) -> tuple[int, dict[str, object]]:
    """On a connection of its own."""
    with closing(connect(server)) as connection:
        return post(connection, "orders", **headers)


def test_a_token_is_asked_for_on_every_connection() -> None:
    """Who says the right one is let in again and again; nobody else is, because of that."""
    with running_server(memory=True, token="secret") as server:
        for _ in range(3):
            assert post_alone(server, Authorization="Bearer secret")[0] == 200
            status, answer = post_alone(server, Authorization="Bearer Secret")
            assert (status, answer["error"]["code"]) == (401, "unauthenticated")  # type: ignore[index]
            assert post_alone(server)[0] == 401


def test_the_same_head_with_another_body() -> None:
    """Each body is checked and stored, and each offset is its own."""
    with running_server(memory=True) as server:
        connection = connect(server)
        offsets = []
        for body in (b'{"a": 1}', b'{"b": 2}', b"not json", b'{"c": 3}'):
            connection.request(
                "POST", "/publish/orders", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            document = json.loads(answer.read())
            offsets.append(document.get("offset", answer.status))
        connection.close()
        assert offsets == [0, 1, 400, 2]
        with server.client() as client:
            values = [message.value for message in client.fetch("orders")]
        assert values == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


def test_a_topic_that_was_deleted_meanwhile_is_made_anew() -> None:
    """What is remembered of a head is the way to go, not what is found there."""
    with running_server(memory=True) as server, server.client() as client:
        connection = connect(server)
        assert [post(connection, "orders")[1]["offset"] for _ in range(2)] == [0, 1]
        client.delete_topic("orders")
        assert post(connection, "orders")[1]["offset"] == 0
        connection.close()
