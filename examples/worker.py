"""A worker: call a handler for each message, and retry when it fails.

    headrace serve                      in another terminal
    python examples/worker.py           Ctrl-C ends it

When the handler returns, the message is done. When it raises, the message is delivered again, after a longer
wait each time; after the fifth failure it becomes a dead letter. Start two workers, and they share the work.
"""

import os
import signal
import threading

from headrace import BrokerClient, Message

HOST, _, PORT = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999").partition(":")


def handle(message: Message) -> None:
    if message.attempt == 1 and b"flaky" in message.value:
        raise RuntimeError("the mail server is busy")
    print(f"done: {message.text()} (attempt {message.attempt})", flush=True)


def main() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with BrokerClient(HOST, int(PORT), client_id=f"worker-{os.getpid()}") as client:
        client.create_subscription("email", "orders")
        client.subscribe_to_subscription("email", handler=handle)
        print("waiting for orders", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
