"""Servers that do as little as can be done, to be measured beside the broker: what the machine allows.

``python -m benchmarks._bare text``  answers ``OK <n>`` to each ``PUB`` of 100 bytes, and keeps nothing.
``python -m benchmarks._bare http``  answers each request with its body.
``python -m benchmarks._bare relay`` hands each ``PUB`` of 100 bytes on to all who have said ``SUB``.

All print their port and run until they are killed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar, cast

import httptools
import uvloop

COMMAND_BYTES = len(b"PUB t 100\r\n") + 100
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


class Text(asyncio.Protocol):
    def __init__(self) -> None:
        self._bytes = self._answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        first, self._answered = self._answered, self._bytes // COMMAND_BYTES
        self._transport.write(b"".join(map(b"OK %d\r\n".__mod__, range(first, self._answered))))


class Http(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        self._transport.write(ANSWER % (len(body), body))


class Relay(asyncio.Protocol):
    subscribers: ClassVar[set[asyncio.Transport]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"SUB"):
            Relay.subscribers.add(self._transport)
            self._transport.write(b"OK\r\n" * data.count(b"SUB"))
        else:
            many = data.count(b"PUB")  # small writes over loopback arrive whole
            self._transport.write(b"OK 1\r\n" * many)
            delivery = (b"MSG 1 100 t 0 - 1\r\n" + data[-100:]) * many
            for subscriber in Relay.subscribers:
                subscriber.write(delivery)

    def connection_lost(self, exc: Exception | None) -> None:
        Relay.subscribers.discard(self._transport)


async def main(what: str) -> None:
    protocol = {"text": Text, "http": Http, "relay": Relay}[what]
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
