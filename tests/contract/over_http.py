"""HTTP, as any program would use it: a request for everything, and an event stream to listen.

There is no connection that could be a member, so who has joined asks again and again. What it holds when
it leaves it gives back by hand.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import quote
from uuid import UUID

from headrace.errors import Closed, HeadraceError, RequestTimeout, StaleDelivery
from headrace.model import DeadLetter, Message, Scheduled
from headrace.testing import RunningServer
from tests.contract.clients import ServerFrontEnd
from tests.contract.front_end import (
    CAPITALS,
    CLASSES,
    JOBS,
    MEMBERSHIP,
    STAY,
    WAIT_S,
    Got,
    Inbox,
    Session,
    Stored,
)
from tests.server.http_rig import Answer, Events, Http, http_of, target

OWN_TYPE = "application/octet-stream"


def value_in(view: dict[str, Any]) -> bytes | None:
    """The bytes behind ``data``."""
    data = view["data"]
    if data is None:
        return None
    if view.get("encoding") == "base64":
        return base64.b64decode(data)
    return data.encode() if isinstance(data, str) else json.dumps(data).encode()


def key_in(view: dict[str, Any]) -> bytes | None:
    if "key64" in view:
        return base64.b64decode(view["key64"])
    return view["key"].encode() if "key" in view else None


def headers_in(view: dict[str, Any]) -> dict[str, str]:
    """Without the content type, which is how this adapter says that it sends bytes."""
    return {
        n: text for n, text in view["headers"].items() if (n, text) != ("content-type", OWN_TYPE)
    }


def ms_of(time: str) -> int:
    return round(datetime.fromisoformat(time).timestamp() * 1000)


def got_of(view: dict[str, Any]) -> Got:
    return Got(
        value_in(view),
        view["offset"],
        view["topic"],
        view["partition"],
        view["retryCount"] + 1,
        key_in(view),
        headers_in(view),
        UUID(view["id"]),
        ms_of(view["timestamp"]),
        view.get("delivery"),
    )


def stored_of(receipt: dict[str, Any]) -> Stored:
    return Stored(receipt.get("offset"), UUID(receipt["id"]), receipt.get("duplicate", False))


def error_in(error: dict[str, Any]) -> HeadraceError:
    cls = StaleDelivery if error["code"] == "stale_delivery" else HeadraceError
    return cls(error["message"], code=error["code"], retryable=error["retryable"])


class EventInbox(Inbox):
    """A plain subscription as an event stream."""

    def __init__(self, server: RunningServer, topic: str):
        self._events = Events(server.http_address, target("stream", topic))
        if self._events.head.status != 200:
            self._events.head.body = self._events.raw.exactly(
                int(self._events.head.headers["content-length"])
            )
            self.close()
            raise error_in(self._events.head.json["error"])
        self._events.begin()

    def get(self, timeout: float = WAIT_S) -> Got:
        try:
            event = self._events.next(timeout)
        except TimeoutError:
            raise RequestTimeout("no event in time") from None
        except EOFError:
            raise Closed("the stream has ended") from None
        if event.name == "error":
            raise error_in(event.json["error"])
        return got_of(event.json)

    def ack(self, got: Got) -> None:
        raise Closed("there is nothing to acknowledge", code="not_a_delivery")

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        raise Closed("there is nothing to acknowledge", code="not_a_delivery")

    def extend(self, got: Got, seconds: float | None = None) -> None:
        raise Closed("there is nothing to acknowledge", code="not_a_delivery")

    def close(self) -> None:
        self._events.close()


class PollingInbox(Inbox):
    """A member that asks for one message at a time."""

    def __init__(self, server: RunningServer, group: str, topic: str):
        self._http = http_of(server)
        self._group, self._topic = group, topic
        self._held: dict[str, Got] = {}

    def get(self, timeout: float = WAIT_S) -> Got:
        wait = min(int(timeout * 1000), 10_000)
        answer = self._http.get(
            target("consume", self._topic, group=self._group, ack="manual", wait=wait)
        )
        if answer.status == 204:
            raise RequestTimeout("no message in time")
        got = got_of(checked(answer))
        self._held[got.handle] = got
        return got

    def _settle(self, verb: str, got: Got, **fields: object) -> None:
        body = {"delivery": got.handle, "group": self._group, **fields}
        checked(self._http.ask("POST", target(verb, self._topic), body))

    def ack(self, got: Got) -> None:
        self._settle("ack", got)
        del self._held[got.handle]

    def nack(self, got: Got, delay: float | None = None, reason: str = "nack") -> None:
        self._settle("nack", got, reason=reason, **({} if delay is None else {"delay": delay}))
        del self._held[got.handle]

    def extend(self, got: Got, seconds: float | None = None) -> None:
        self._settle("extend", got, **({} if seconds is None else {"seconds": seconds}))

    def close(self) -> None:
        for got in list(self._held.values()):
            self.nack(got, delay=0)
        self._http.close()


def checked(answer: Answer) -> Any:
    if answer.status >= 400:
        answer.code  # noqa: B018  it is whole
        raise error_in(answer.json["error"])
    return answer.json


class HttpSession(Session):
    def __init__(self, server: RunningServer):
        self._server = server
        self._http = http_of(server)
        self._inboxes: list[EventInbox | PollingInbox] = []

    def _ask(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        return checked(self._http.ask(method, path, body, headers))

    def create_topic(self, name: str, **settings: Any) -> None:
        self._ask("PUT", target("topics", name), settings)

    def delete_topic(self, name: str) -> None:
        self._ask("DELETE", target("topics", name))

    def publish(
        self, topic: str, value: bytes, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Stored:
        sent = {f"X-Header-{name}": text for name, text in (headers or {}).items()}
        if "idempotency_key" in options:
            sent["Idempotency-Key"] = options.pop("idempotency_key")
        if isinstance(options.get("key"), bytes):
            options["key64"] = base64.b64encode(options.pop("key")).decode()
        sent["Content-Type"] = OWN_TYPE
        answer = self._http.ask("POST", target("publish", topic, **options), value, sent)
        return stored_of(checked(answer))

    def fetch(self, topic: str, where: Any = "earliest", limit: int = 1000) -> list[Got]:
        if isinstance(where, datetime):
            where = where.isoformat()
        path = target("topics", topic, "messages", limit=limit) + f"&from={quote(str(where))}"
        return [got_of(view) for view in self._ask("GET", path)]

    def subscribe(self, topic: str) -> Inbox:
        inbox = EventInbox(self._server, topic)
        self._inboxes.append(inbox)
        return inbox

    def create_subscription(self, name: str, topic: str, **settings: Any) -> None:
        self._ask("POST", target("subscribe", topic), {"group": name, **settings})

    def delete_subscription(self, name: str, topic: str) -> None:
        self._ask("DELETE", target("subscriptions", name, topic=topic))

    def join(self, name: str, topic: str, *, prefetch: int = 100) -> Inbox:
        self.create_subscription(name, topic)
        inbox = PollingInbox(self._server, name, topic)
        self._inboxes.append(inbox)
        return inbox

    def stats(self, name: str, topic: str) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", target("subscriptions", name, topic=topic))
        return found

    def seek(self, name: str, topic: str, to: Any) -> None:
        self._ask("POST", target("subscriptions", name, "seek", topic=topic), {"to": to})

    def dead_letters(self, name: str) -> list[DeadLetter]:
        return [letter_of(view) for view in self._ask("GET", target("dead-letters", name))]

    def redrive(self, name: str) -> int:
        count: int = self._ask("POST", target("dead-letters", name, "redrive"))["redriven"]
        return count

    def scheduled(self, topic: str) -> list[Scheduled]:
        found = self._ask("GET", target("scheduled", topic=topic))
        return [Scheduled(UUID(i["id"]), i["topic"], ms_of(i["deliver_at"])) for i in found]

    def cancel(self, id: UUID) -> None:
        self._ask("DELETE", target("scheduled", str(id)))

    def close(self) -> None:
        for inbox in self._inboxes:
            if isinstance(inbox, EventInbox):
                inbox.close()
            else:
                inbox._http.close()
        self._http.close()


def letter_of(view: dict[str, Any]) -> DeadLetter:
    got = got_of(view["message"])
    message = Message(
        got.topic,
        got.partition,
        got.offset,
        got.timestamp,
        got.key,
        got.value,
        got.headers,
        None if got.id is None else got.id.bytes,
    )
    return DeadLetter(
        view["offset"],
        message,
        view["subscription"],
        view["reason"],
        view["attempts"],
        ms_of(view["timestamp"]),
    )


class HttpInterface(ServerFrontEnd):
    name = "HTTP"
    cannot: ClassVar = {
        CAPITALS: "names of HTTP headers know no case",
        CLASSES: "an error carries its code and a sentence",
        MEMBERSHIP: "there is no connection that could be a member",
        STAY: "who uses a bare socket connects again",
        JOBS: "jobs use the binary protocol",
    }

    def make_session(self) -> Session:
        return HttpSession(self.server)


__all__ = ["Http", "HttpInterface"]
