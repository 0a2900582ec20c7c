"""A link and its wires: in which order requests leave."""

import asyncio

from headrace.client.link import Link, Wire
from headrace.wire import binary
from headrace.wire.binary import BinaryParser, Type
from tests.client.rig import run, until


class Broker(asyncio.Protocol):
    """It says hello, and answers requests of its second connection."""

    def __init__(self, connections: list["Broker"], heard: list[bytes]):
        self._connections, self._heard = connections, heard
        self._parser = BinaryParser()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._connections.append(self)

    def data_received(self, data: bytes) -> None:
        for frame in self._parser.feed(data):
            if frame.type == Type.HEARTBEAT:
                self.transport.write(binary.encode(Type.HEARTBEAT, frame.sequence, {}))
                continue
            self._heard.append(frame.body)
            if len(self._connections) > 1:
                answer = {"status": "success"}
                self.transport.write(binary.encode(Type.ACK, frame.sequence, answer))


@run
async def test_what_was_asked_before_a_break_is_asked_again_first() -> None:
    """A later request finds the new connection earlier, while subscriptions are asked for, and waits all the same."""
    connections: list[Broker] = []
    heard: list[bytes] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Broker(connections, heard), "127.0.0.1", 0)
    link = Link([("127.0.0.1", server.sockets[0].getsockname()[1], None)], client_id="test")
    await link.open()

    def ask(body: bytes) -> "asyncio.Task[object]":
        return asyncio.create_task(link.ask(Type.PUBLISH_BATCH, {}, body, again=True))

    asked = [ask(b"first"), ask(b"second")]
    await until(lambda: len(heard) == 2)
    is_up, go_on = asyncio.Event(), asyncio.Event()

    async def up(wire: Wire) -> None:
        is_up.set()
        await go_on.wait()

    link.on_up = up
    connections[0].transport.abort()
    await is_up.wait()
    asked.append(ask(b"third"))
    for _ in range(5):
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*asked)
    await link.close()
    server.close()
    assert heard[2:] == [b"first", b"second", b"third"]


@run
async def test_whoever_waits_for_room_first_writes_first() -> None:
    """Also before one that comes in the turn in which there is room again."""
    wire = Wire(lambda frame: None, lambda wire, error: None)
    order: list[str] = []

    async def write(name: str) -> None:
        await wire.writable()
        order.append(name)

    wire.pause_writing()
    first = asyncio.create_task(write("first"))
    await asyncio.sleep(0)
    second = asyncio.create_task(write("second"))
    wire.resume_writing()
    await asyncio.gather(first, second)
    assert order == ["first", "second"]
