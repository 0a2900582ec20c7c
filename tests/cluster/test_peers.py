"""The connections to other nodes end with the node."""

import asyncio

from headrace.cluster.peers import Peers


def test_a_node_that_has_stopped_connects_to_nobody() -> None:
    """A subscription that looks for owners at the last moment opens no connection that nobody would close."""

    async def run() -> tuple[int, int]:
        connected = 0
        arrived = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connected
            connected += 1
            arrived.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        peers = Peers("127.0.0.1:1", None, 5.0)
        peers.get(f"{host}:{port}")
        await asyncio.wait_for(arrived.wait(), 10)
        await peers.close()
        peers.forget(f"{host}:{port}")
        late = peers.get(f"{host}:{port}")
        await peers.close()
        assert late.link.is_closed
        started = late.link._keeper is not None
        server.close()
        return connected, started

    assert asyncio.run(run()) == (1, False)
