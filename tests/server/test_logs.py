"""The log: text, or a JSON object on each line, and lines that say who did what."""

import json
import logging
import sys
from contextlib import closing
from typing import Any

import pytest

from headrace.server import connection as connections
from headrace.server.logs import FIELDS, JsonLines
from headrace.testing import running_server, server_process, wait_until
from tests.server.http_rig import Http, http_of


def formatted(message: str, *args: object, error: Any = None, **extra: object) -> Any:
    logger = logging.getLogger("headrace.test")
    record = logger.makeRecord(
        logger.name, logging.WARNING, "x.py", 1, message, args, error, extra=extra
    )
    text = JsonLines().format(record)
    assert "\n" not in text
    return json.loads(text)


def test_a_line_is_one_object() -> None:
    """Time, level, logger, message, and the fields that the line has."""
    line = formatted("it is %s", "so\n", topic="orders", connection=7, client="", user=None)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning", "logger": "headrace.test", "message": "it is so\n", "connection": 7,
        "topic": "orders",
    }  # fmt: skip
    whole = formatted("x", **dict.fromkeys(FIELDS, "y"))
    assert [name for name in whole if name in FIELDS] == list(FIELDS)


def test_whatever_is_logged_can_be_written() -> None:
    """Tracebacks, names of files that are not text, and values that JSON does not know."""
    try:
        raise ValueError("bad")
    except ValueError:
        line = formatted("x", error=sys.exc_info())
    assert line["error"].endswith("ValueError: bad")
    assert formatted("%s", "\udc80")["message"] == "\udc80"
    assert formatted("x", arguments={1: {2}})["arguments"] == {"1": "{2}"}


def test_a_bug_is_logged_with_its_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the connection, the client, the user and the topic."""
    with running_server(memory=True) as server, server.client(client_id="worker-3") as client:
        client.publish("orders", "x")

        def broken(*arguments: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(server.engine, "publish", broken)
        with closing(http_of(server)) as http:
            assert http.ask("POST", "/publish/orders", {}).code == "bug"
        [line] = [r for r in caplog.records if "a command of" in r.getMessage()]
        assert (line.topic, line.user) == ("orders", "anyone")  # type: ignore[attr-defined]
        assert line.connection > 1  # type: ignore[attr-defined]
        monkeypatch.setattr(connections.Connection, "call", broken)
        with pytest.raises(Exception, match="bug"):
            client.create_topic("payments")
        line = [r for r in caplog.records if "a command of" in r.getMessage()][-1]
        assert line.client == "worker-3"  # type: ignore[attr-defined]


def test_json_and_the_audit_of_a_real_broker() -> None:
    """Every line is JSON; changes and refused ones say who did what, and metrics count them."""
    with server_process(token="root-token-of-16", log_format="json") as server:
        with server.client(client_id="admin-1") as client:
            client.create_topic("orders", 2)
            client.create_subscription("g", "orders")
            client.seek("g", "earliest")
            client.create_token("ci", grants=["publish:orders"])
            client.delete_subscription("g")
            client.delete_topic("orders")
            with pytest.raises(Exception, match="no topic"):
                client.delete_topic("orders")
        for _ in range(5):
            with closing(Http(server.http_address, "wrong")) as http:
                assert http.get("/topics").status == 401
        with closing(Http(server.http_address, "root-token-of-16")) as http:
            metrics = http.get("/metrics").body.decode()
        server.terminate()
        found = [json.loads(line) for line in server.errors.splitlines()]
    audit = [line for line in found if line["logger"] == "headrace.audit"]
    assert [(line["action"], line["target"], line["outcome"]) for line in audit] == [
        ("create_topic", "orders", "ok"),
        ("create_subscription", "g", "ok"),
        ("seek", "g", "ok"),
        ("create_token", "ci", "ok"),
        ("delete_subscription", "g", "ok"),
        ("delete_topic", "orders", "ok"),
        ("delete_topic", "orders", "topic_not_found"),
    ]
    assert {(line["user"], line["client"]) for line in audit} == {("token", "admin-1")}
    assert [line.get("topic") for line in audit[:2]] == ["orders", "orders"]
    assert audit[2]["subscription"] == "g"
    assert audit[0]["message"].endswith(': create_topic orders {"settings":{"partitions":2}}: ok')
    assert "hr_" not in json.dumps(audit)
    failed = [line for line in found if line.get("cause") == "login"]
    assert len(failed) == 1
    assert "failed login with a token" in failed[0]["message"]
    for sample in (
        'audit_total{action="create_topic",outcome="ok"} 1.0',
        'audit_total{action="delete_topic",outcome="topic_not_found"} 1.0',
        'audit_total{action="login",outcome="unauthenticated"} 5.0',
    ):
        assert f"message_broker_{sample}" in metrics


def test_text_is_the_default_and_has_the_audit_without_access_control() -> None:
    """Nobody logs in here; a change is logged all the same, but there is no topic for it."""
    with server_process(memory=True) as server:
        with server.client() as client:
            client.create_topic("orders")
            client.delete_topic("orders")
        wait_until(lambda: "delete_topic" in server.errors)
        [line] = [line for line in server.errors.splitlines() if "create_topic" in line]
    assert " INFO     headrace.audit: anyone from 127.0.0.1:" in line
    assert line.endswith(": create_topic orders: ok")
