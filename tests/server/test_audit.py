"""The audit: who changed what, and what failed, at a bounded rate."""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest

from headrace import AsyncClient
from headrace.broker.audit import TOPIC as AUDIT
from headrace.broker.audit import Source
from headrace.errors import (
    Forbidden,
    Unauthenticated,
)
from headrace.testing import running_server, wait_until
from tests.contract.raw_text import TextSocket
from tests.server.access_rig import PASSWORD, ROOT, quick_passwords, text_as, token  # noqa: F401
from tests.server.http_rig import Http


def test_the_audit_says_who_changed_what(tmp_path: Path) -> None:
    """Changes and refused changes, failed logins; never a secret; read with an explicit right."""
    with running_server(tmp_path / "data", token=ROOT) as server, server.client() as root:
        root.create_user("alice", password=PASSWORD, grants=["manage:orders"])
        root.create_user("auditor", grants=[f"browse:{AUDIT}"])
        secret = root.create_token("a", user="auditor")["secret"]
        with server.client(token=None, user="alice", password=PASSWORD) as alice:
            alice.create_topic("orders", partitions=2)
            with pytest.raises(Forbidden):
                alice.delete_topic("users")
        with pytest.raises(Unauthenticated):
            server.client(token=None, user="alice", password="hunter2hunter2").connect()
        server.call(server.engine.audit.close)
        server.wait_until(lambda: server.engine.partition(AUDIT).log.end_offset >= 6)
        with server.client(token=secret) as auditor:
            messages = auditor.fetch(AUDIT)
        records = [json.loads(message.value) for message in messages]
        found = [(r["who"], r["action"], r.get("target"), r["outcome"]) for r in records]
        assert found == [
            ("token", "create_user", "alice", "ok"),
            ("token", "create_user", "auditor", "ok"),
            ("token", "create_token", "a", "ok"),
            ("user:alice", "create_topic", "orders", "ok"),
            ("user:alice", "delete_topic", "users", "forbidden"),
            ("user:alice", "login", None, "unauthenticated"),
        ]
        assert records[0]["arguments"]["grants"] == ["manage:orders"]
        assert records[3]["arguments"] == {"settings": {"partitions": 2}}
        assert all(r["from"].startswith("127.0.0.1:") and r["time"] > 0 for r in records)
        whole = b"".join(message.value for message in messages)
        for hidden in (PASSWORD, "argon2", "hunter2", secret):
            assert hidden.encode() not in whole


def test_the_audit_has_what_moves_a_subscription(tmp_path: Path) -> None:
    """It is created, sought, redriven, purged, deleted; that a member joins it is no change."""
    with running_server(tmp_path / "data", token=ROOT) as server, server.client() as root:
        secret = token(root, "ci", "publish,consume,browse,manage:orders,>:>")
        with server.client(token=secret) as client:
            client.publish("orders", b"x")
            for _ in range(3):
                client.create_subscription("s", "orders", max_deliveries=1)
            for _ in range(3):
                client.create_subscription("s", "orders")
            text = text_as(server, secret)
            text.ask("SUB orders group=s")
            text.close()
            client.seek("s", "earliest")
            with client.subscription("s") as consumer:
                consumer.nack(consumer.get(timeout=10))
                server.wait_until(lambda: any(server.engine.dead_letters.topics()))
            client.redrive("s")
            client.purge_dead_letters("s")
            client.delete_subscription("s")
        for user in ("alice", "bob"):
            with pytest.raises(Unauthenticated):
                server.client(token=None, user=user, password="x").connect()
        server.call(server.engine.audit.close)
        server.wait_until(lambda: server.engine.partition(AUDIT).log.end_offset >= 11)
        records = [json.loads(message.value) for message in root.fetch(AUDIT)]
        found = [(r["action"], r.get("target"), r["outcome"]) for r in records]
        # Settings that are given are recorded, though they may be the same.
        assert [each for each in found if each[0] == "create_subscription"] == [
            ("create_subscription", "s", "ok")
        ] * 3
        assert found[5:] == [
            ("seek", "s", "ok"),
            ("redrive", "s", "ok"),
            ("purge_dead_letters", "s", "ok"),
            ("delete_subscription", "s", "ok"),
            ("login", None, "unauthenticated"),
            ("login", None, "unauthenticated"),
        ]


def test_the_audit_says_that_a_caller_was_gone_before_the_end(tmp_path: Path) -> None:
    """Ctrl-C during a redrive is no bug of the broker."""
    with running_server(tmp_path / "data", token=ROOT) as server, server.client() as root:
        root.publish_many("orders", [b"x", b"y"])
        with root.subscription("s", "orders", max_deliveries=1) as consumer:
            for _ in range(2):
                consumer.nack(consumer.get(timeout=10))
        wait_until(lambda: root.subscription_stats("s")["dead_lettered"] == 2)

        async def leave() -> None:
            async with AsyncClient(*server.address, token=ROOT) as client:
                redrive = asyncio.create_task(client.redrive("s", rate=1))
                while (await client.topic_stats("orders"))["messages"] < 3:
                    pass
                redrive.cancel()

        asyncio.run(leave())
        counts = server.engine.audit.counts
        server.wait_until(lambda: counts["redrive", "interrupted"])
        assert not counts["redrive", "bug"]


def test_the_audit_has_topics_that_are_created_by_using_them(tmp_path: Path) -> None:
    """Once for each, with who did it, whatever the protocol and the rights."""
    with running_server(tmp_path / "data", token=ROOT) as server, server.client() as root:
        root.create_user("alice", password=PASSWORD, grants=["publish:>", "consume:>"])
        with closing(TextSocket(server.address)) as text:
            text.ask(f"AUTH {ROOT}")
            for topic in ("text", "text", "both"):
                text.ask(f"PUB {topic} 2", b"hi")
            text.ask("SUB plain")
        with closing(Http(server.http_address, ROOT)) as http:
            assert http.ask("POST", "/publish/http", 1).status == 200
        root.publish("binary", b"hi")
        root.create_subscription("g", "followed")
        with server.client(token=None, user="alice", password=PASSWORD) as alice:
            alice.publish("both", b"hi")
            alice.publish("hers", b"hi")
        server.call(server.engine.audit.close)
        server.wait_until(lambda: server.engine.partition(AUDIT).log.end_offset >= 9)
        records = [message.json() for message in root.fetch(AUDIT)]
        made = [record for record in records if record["action"] == "create_topic"]
        assert [(record["who"], record["target"]) for record in made] == [
            *[
                ("token", topic)
                for topic in ("text", "both", "plain", "http", "binary", "followed")
            ],
            ("user:alice", "hers"),
        ]
        for record in made:
            assert record["arguments"] == {"automatic": True}
            assert record["from"].startswith("127.0.0.1:")


def test_failures_do_not_hide_a_change(tmp_path: Path) -> None:
    """Whoever guesses, or makes topics by publishing, leaves room in the audit for what succeeds."""
    with running_server(tmp_path / "data", token=ROOT) as server:

        def flood() -> bool:
            audit = server.engine.audit
            topic = server.engine.create_topic("orders")
            for _ in range(1000):
                audit.record("x", Source("y"), "login", "unauthenticated")
                audit.created(topic)
            before = audit.recorded
            audit.record("user:alice", Source("y"), "delete_topic", "ok")
            return audit.recorded == before + 1

        assert server.call(flood)


def test_the_audit_has_a_bounded_rate(tmp_path: Path) -> None:
    """What is left out is counted."""
    with running_server(tmp_path / "data", token=ROOT) as server:

        def flood() -> int:
            for _ in range(1000):
                server.engine.audit.record("x", Source("y"), "login", "unauthenticated")
            return server.engine.audit.recorded

        assert server.call(flood) <= 200
