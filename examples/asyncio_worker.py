"""A worker with asyncio: publish many messages, handle several at a time, stop when all are done.

    headrace serve                      in another terminal
    python examples/asyncio_worker.py

`consume` runs until it is cancelled. Here it is cancelled when every message has been handled.
"""

import asyncio
import os

from headrace import AsyncClient, Message

HOST, _, PORT = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999").partition(":")
COUNT = 1000


async def main() -> None:
    handled = 0
    everything = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == COUNT:
            everything.set()

    async with AsyncClient(HOST, int(PORT)) as client:
        # Do not await them one by one: the client sends concurrent publishes together.
        receipts = await asyncio.gather(
            *(client.publish("jobs", f"job {number}") for number in range(COUNT))
        )
        print(f"published {len(receipts)}, the last at offset {receipts[-1].offset}")

        work = asyncio.create_task(client.consume("workers", handle, "jobs", concurrency=10))
        await everything.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await client.flush()
        lag = (await client.subscription_stats("workers"))["lag"]
        print(f"handled {handled}, {lag} left")


if __name__ == "__main__":
    asyncio.run(main())
