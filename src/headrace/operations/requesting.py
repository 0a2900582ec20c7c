"""The operations of request and reply; ``broker/requests.py`` says how they work."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace import limits
from headrace.model import Message
from headrace.operations.arguments import AliasOf, Headers, MessageId, Payload, TopicName
from headrace.operations.declaring import operation

RequestSeconds = Annotated[float, Meta(ge=0, le=limits.REQUEST_S_MAX)]


class Requesting:
    @operation(
        name="request",
        permission="publish",
        about="topic",
        errors=("no_reply", "too_many_requests", "request_exists", "queue_full"),
    )
    async def send_request(
        self,
        topic: TopicName,
        value: Payload,
        *,
        headers: Headers | None = None,
        key: Payload | None = None,
        id: MessageId | None = None,
        timeout: Annotated[RequestSeconds, AliasOf("wait")] = 30.0,
    ) -> Message:
        """Publish a request and wait for its reply; ``request`` does the same with less to write.

        ``id`` is the reply address: a new random UUID. To send the same ``id`` again continues to wait,
        and publishes nothing.
        """
        raise NotImplementedError

    @operation(name="reply", permission="none", runs="every node", answer="delivered")
    async def send_reply(
        self, to: MessageId, value: Payload, *, headers: Headers | None = None
    ) -> bool:
        """Answer the request whose header ``headrace-reply-to`` is ``to``. False: nobody waits for it."""
        raise NotImplementedError
