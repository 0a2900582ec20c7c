"""A broker inside this process: no server, no network, the same guarantees.

    python examples/embedded.py [DATA_DIR]

Without a directory everything is kept in memory. With a directory, run it twice: the count continues.
"""

import sys

from headrace import Broker


def main(data_dir: str | None = None) -> None:
    with Broker.open(data_dir) as broker:
        # A plain subscription: every message from now on, nothing to acknowledge.
        news = broker.subscribe("orders")

        # A durable subscription: the broker keeps its position, and messages must be acknowledged.
        email = broker.subscription("email", "orders")

        receipt = broker.publish("orders", b'{"order": 101}', {"source": "shop"}, key="customer-7")
        print(f"stored at offset {receipt.offset}, id {receipt.id}")

        message = news.get(timeout=5)
        print(f"seen: {message.payload.decode()} from {message.headers['source']}")

        message = email.get(timeout=5)
        print(f"mailed: {message.text()}, attempt {message.attempt}")
        message.ack()

        [partition] = broker.topic_stats("orders")["partitions"]
        print(f"{partition['end_offset']} published so far")


if __name__ == "__main__":
    main(*sys.argv[1:2])
