"""What all nodes agree on, folded from the definitions: topics, subscriptions, named producers, access rules, and a secret.

Entries are JSON. A topic is what ``topic.json`` holds on disk; ``{"deleted", "incarnation"}`` ends it. The others have a ``kind``.
Each user and each token is an entry. The rest of the access rules is one entry (``access``): it is the last of each change of the
rules, and puts the change in force.
The secret is how nodes know each other: who can read the cluster's topics in Kafka can read all messages anyway.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.access.rules import AccessRules, AccessToken, User
from headrace.broker.state import remember
from headrace.broker.subscription import Subscription
from headrace.log.interface import TopicRecord
from headrace.log.storage import parse_settings, settings_content

Key = tuple[str, str]
"""(pattern, name) of a subscription."""


class Agreed:
    def __init__(self) -> None:
        self.topics: dict[str, TopicRecord] = {}
        self.subscriptions: dict[Key, dict[str, Any]] = {}
        self.producers: dict[str, tuple[int, int]] = {}
        self.secret = ""
        self.users: dict[str, User] = {}
        self.tokens: dict[str, AccessToken] = {}
        self.rules: AccessRules | None = None
        """Those in force; None: the cluster has none."""

    def fold(self, payload: bytes) -> dict[str, Any]:
        """Apply an entry; returns it."""
        item: dict[str, Any] = orjson.loads(payload)
        kind = item.get("kind")
        if kind == "subscription":
            self.subscriptions[item["topic"], item["name"]] = item
        elif kind == "unsubscribed":
            self.subscriptions.pop((item["topic"], item["name"]), None)
        elif kind == "producer":
            remember(self.producers, item["name"], (item["id"], item["epoch"]))
        elif kind == "secret":
            self.secret = self.secret or item["secret"]
        elif kind == "user":
            self.users[item["name"]] = msgspec.convert(item["user"], User)
        elif kind == "token":
            self.tokens[item["name"]] = msgspec.convert(item["token"], AccessToken)
        elif kind == "user deleted":
            self.users.pop(item["name"], None)
        elif kind == "token revoked":
            self.tokens.pop(item["name"], None)
        elif kind == "access":
            rest = msgspec.convert(item["rules"], AccessRules)
            users, tokens = tuple(self.users.values()), tuple(self.tokens.values())
            self.rules = msgspec.structs.replace(rest, users=users, tokens=tokens)
        elif "deleted" in item:
            known = self.topics.get(item["deleted"])
            if known is not None and known.incarnation == item["incarnation"]:
                del self.topics[known.name]
                for key in [key for key in self.subscriptions if key[0] == known.name]:
                    del self.subscriptions[key]
        else:
            self.topics[item["name"]] = parse_settings(item["name"], payload)
        return item

    def snapshot(self) -> list[bytes]:
        return [
            entry(kind="secret", secret=self.secret),
            *map(settings_content, self.topics.values()),
            *map(orjson.dumps, self.subscriptions.values()),
            *[
                entry(kind="producer", name=name, id=producer, epoch=epoch)
                for name, (producer, epoch) in self.producers.items()
            ],
            *([] if self.rules is None else changed_rules(None, self.rules)),
        ]


def entry(**item: Any) -> bytes:
    return orjson.dumps(item)


def changed_rules(before: AccessRules | None, after: AccessRules) -> list[bytes]:
    """The entries that make these rules of those."""
    if before == after:
        return []
    old = before or AccessRules()
    rest = msgspec.structs.replace(after, users=(), tokens=())
    found: list[bytes] = []
    for kind, end, known, wanted in (
        ("user", "user deleted", old.users, after.users),
        ("token", "token revoked", old.tokens, after.tokens),
    ):
        same = set(known)
        names = {each.name for each in wanted}
        found += [entry(kind=end, name=each.name) for each in known if each.name not in names]
        for each in wanted:
            if each not in same:
                content = {"kind": kind, "name": each.name, kind: msgspec.to_builtins(each)}
                found.append(entry(**content))
    return [*found, entry(kind="access", rules=msgspec.to_builtins(rest))]


def deleted(topic: TopicRecord) -> bytes:
    return entry(deleted=topic.name, incarnation=topic.incarnation)


def subscribed(subscription: Subscription) -> bytes:
    """Its definition, with where it was to begin."""
    return entry(
        kind="subscription",
        name=subscription.name,
        topic=subscription.pattern,
        settings=subscription.settings.as_dict(),
        created_ms=subscription.created_ms,
        owner=subscription.owner,
        paused=subscription.paused,
        starts=[[*place, offset] for place, offset in subscription.starts.items()],
    )
