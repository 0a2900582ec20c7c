"""What tests of rights share: an administrator's token, tokens with grants, logins over text, quick
passwords, and a broker with two teams, ``mine`` and ``secret``, and clients that have one right over
the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from argon2 import PasswordHasher

from headrace import BrokerClient
from headrace.access import hashing
from headrace.access.rights import RIGHTS
from headrace.log.batch import encode
from headrace.log.columns import Columns
from headrace.testing import RunningServer, running_server
from tests.contract.raw_text import TextSocket

ROOT = "root-token"
PASSWORD = "correct horse"
NOTHING = "nothing"
REFUSED = {
    "forbidden",
    "grant_exceeded",
    "topic_not_found",
    "subscription_not_found",
    "message_not_found",
    "no_cluster",
}
"""Codes of an answer to somebody who lacks a right: it does not say whether the thing exists."""


@pytest.fixture(autouse=True)
def quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parameters take a tenth of a second for each hash."""
    monkeypatch.setattr(
        hashing, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    )


def token(root: BrokerClient, name: str, *grants: str, **more: Any) -> str:
    return root.create_token(name, grants=list(grants), **more)["secret"]


def text_as(server: RunningServer, secret: str) -> TextSocket:
    text = TextSocket(server.address)
    text.ask(f"AUTH {secret}")
    return text


class Teams:
    """The server, the tokens, and what exists of each team."""

    def __init__(self, server: RunningServer):
        self.server = server
        self.secrets: dict[str, str] = {}
        with server.client(token=ROOT) as root:
            for right in RIGHTS:
                made = root.create_token(right, grants=[f"{right}:mine.>:mine.>"])
                self.secrets[right] = made["secret"]
            self.secrets[NOTHING] = root.create_token(NOTHING)["secret"]
            self.ids = {team: self._fill(root, team) for team in ("mine", "secret")}

    def client(self, right: str) -> BrokerClient:
        return self.server.client(token=self.secrets[right])

    def _fill(self, root: BrokerClient, team: str) -> dict[str, Any]:
        """Messages, a subscription with a dead letter, a delayed message, a pipeline, a user, a token."""
        topic, subscription = f"{team}.a", f"{team}.s"
        root.publish(topic, "to be buried")
        root.create_subscription(subscription, topic, max_deliveries=1)
        with root.subscription(subscription) as consumer:
            consumer.nack(consumer.get(timeout=10))
            self.server.wait_until(
                lambda: dict(self.server.engine.dead_letters.topics()).get(f"{subscription}.dlq")
            )
        message = root.publish(topic, f"payload of {team}").id
        if team == "mine":  # a broker in memory drops messages that every subscription has finished
            root.create_subscription("mine.keeper", topic)
        later = root.publish(topic, "later", delay=3600).id
        report = {"state": "finished", "run_id": "1", "started_at": 1, "queries": []}
        root.report_pipeline(f"{team}.p", report)  # type: ignore[arg-type]
        root.create_user(f"{team}.u", grants=[f"publish:{team}.a:{team}.x"])
        root.create_token(f"{team}.t", grants=[f"publish:{team}.a:{team}.x"])
        piece = root.stage(topic, encode(Columns([b"staged"])))
        return {"message": str(message), "later": str(later), "piece": piece}


@contextmanager
def teams() -> Iterator[Teams]:
    with running_server(memory=True, token=ROOT) as server:
        yield Teams(server)
