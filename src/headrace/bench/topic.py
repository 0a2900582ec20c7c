"""The topic that a load test publishes to: made for it, and removed with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import orjson

from headrace.bench.dialects import OVER_HTTP, HttpDialect, error_of
from headrace.bench.load import CONNECT_S, Target, no_broker
from headrace.client.aio import AsyncClient
from headrace.client.link import ConnectFailed
from headrace.errors import HeadraceError, TopicNotFound


class BenchTopic:
    """Over the same port as the test itself, so that nothing else has to be reachable."""

    def __init__(self, target: Target, name: str):
        self._target = target
        self.name = name
        self.is_ours = False
        """Whether it was not there before. What was there is never deleted."""
        self.durability = ""

    async def make(self) -> None:
        stats = await self._stats()
        if stats is None:
            await self._do("PUT", "create_topic")
            self.is_ours = True
            stats = await self._stats() or {}
        self.durability = str(stats.get("durability", "unknown"))

    async def remove(self) -> None:
        if self.is_ours:
            self.is_ours = False
            await self._do("DELETE", "delete_topic")

    async def _stats(self) -> dict[str, Any] | None:
        try:
            return await self._do("GET", "topic_stats")
        except HeadraceError as error:
            if error.code != TopicNotFound.code:
                raise
            return None

    async def _do(self, method: str, operation: str) -> dict[str, Any]:
        if self._target.protocol in OVER_HTTP:
            status, body = await ask_http(self._target, method, f"/topics/{quote(self.name)}")
            if not 200 <= status < 300:
                raise error_of(status, body)
            return orjson.loads(body) if body else {}
        target = self._target
        client = AsyncClient(target.host, target.port, token=target.token, tls=target.tls or False)
        try:
            async with client:
                return await getattr(client, operation)(self.name) or {}
        except ConnectFailed as error:
            raise no_broker(target, error) from None


async def ask_http(target: Target, method: str, path: str) -> tuple[int, bytes]:
    """One request over HTTP and its answer."""
    dialect = HttpDialect("", target.token, f"{target.host}:{target.port}")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
            try:
                writer.write(dialect.request(method, path))
                while data := await reader.read(1 << 16):
                    for answer in dialect.answers(data):
                        return answer
                raise ConnectionError("the connection was closed without an answer")
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        raise no_broker(target, error) from None
