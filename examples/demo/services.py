"""The four services of the demo: each is a process of its own, and knows the broker but no other service.

    python examples/demo/services.py SERVICE [SPEED]     SERVICE: orders, payment, inventory or email

::

    orders ──▶ orders ──┬──▶ payment ────▶ payments ──▶ email ──▶ mails
                        └──▶ inventory ──▶ reservations

A handler may be called twice for one message: a worker can die after its work and before its acknowledgement.
So each result is published with an idempotency key, and the broker stores it once.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from datetime import UTC, datetime

from headrace import BrokerClient, Message

RATE = 20
"""Orders per second, times the speed."""
MAIL_S = 0.02
"""How long the mail server takes for an e-mail."""
POISON = 150
"""The number of the order that has a bad address."""
PRICES = {"lamp": 30.0, "chair": 85.0, "table": 240.0, "shelf": 120.0}
CUSTOMERS = ("ann", "bob", "cleo", "dan", "eve", "finn", "gina")


def orders(client: BrokerClient, speed: float) -> None:
    """Publish orders until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    dice = random.Random(7)
    number = 0
    while not stop.wait(1 / (RATE * speed)):
        number += 1
        customer, product = dice.choice(CUSTOMERS), dice.choice(list(PRICES))
        pieces = dice.randint(1, 3)
        order = {
            "order": number,
            "customer": customer,
            "email": f"{customer}@example.org" if number != POISON else customer,
            "product": product,
            "pieces": pieces,
            "amount": pieces * PRICES[product],
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        client.publish("orders", order, {"source": "web"}, key=customer)


def payment(client: BrokerClient, speed: float) -> None:
    """Take the money for each order."""

    def pay(message: Message) -> None:
        order = message.json()
        key = f"payment-{order['order']}"
        client.publish("payments", {**order, "paid": True}, key=message.key, idempotency_key=key)

    client.consume("payment", pay, "orders", concurrency=4)


def inventory(client: BrokerClient, speed: float) -> None:
    """Reserve the pieces of each order; the orders of one customer stay in their order."""

    def reserve(message: Message) -> None:
        order = message.json()
        reserved = {"order": order["order"], order["product"]: order["pieces"]}
        key = f"reservation-{order['order']}"
        client.publish("reservations", reserved, key=message.key, idempotency_key=key)

    client.consume("inventory", reserve, "orders", concurrency=4, ordering="key")


def email(client: BrokerClient, speed: float) -> None:
    """Confirm each payment by e-mail. A message that fails three times becomes a dead letter."""

    def send(message: Message) -> None:
        order = message.json()
        if "@" not in order["email"]:
            raise ValueError(f"no such address: {order['email']!r}")
        time.sleep(MAIL_S / speed)
        mail = {"to": order["email"], "order": order["order"], "text": f"Your {order['product']}"}
        client.publish("mails", mail, key=message.key, idempotency_key=f"mail-{order['order']}")

    client.consume("email", send, "payments", concurrency=4, max_deliveries=3, backoff=0.3)


SERVICES = {"orders": orders, "payment": payment, "inventory": inventory, "email": email}


def main(name: str, speed: str = "1") -> None:
    with BrokerClient(client_id=f"{name}-service") as client:
        SERVICES[name](client, float(speed))


if __name__ == "__main__":
    main(*sys.argv[1:])
