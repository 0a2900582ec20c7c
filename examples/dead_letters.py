"""Dead letters: correct messages that no worker could handle, and deliver them again.

    headrace serve                      in another terminal
    python examples/dead_letters.py

`headrace dlq` does the same from the command line.
"""

import json
import os
import time

from headrace import BrokerClient, Message

HOST, _, PORT = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999").partition(":")


def handle(message: Message) -> None:
    invoice = json.loads(message.value)
    print(f"paid: {invoice['amount']}")


def main() -> None:
    with BrokerClient(HOST, int(PORT)) as client:
        # After two failed deliveries, 0.1 seconds apart, a message becomes a dead letter.
        invoices = client.subscription("accounts", "invoices", max_deliveries=2, backoff=0.1)
        client.publish("invoices", b'{"amount": 42}')
        client.publish("invoices", b'{"amuont": 43}')

        for _ in range(3):
            message = invoices.get(timeout=10)
            try:
                handle(message)
            except KeyError as error:
                message.nack(reason=f"no {error}")
            else:
                message.ack()
        client.flush()

        # Read the dead letter, correct it, and deliver it again to the subscription that failed.
        deadline = time.monotonic() + 10
        while client.subscription_stats("accounts")["dead_lettered"] == 0:
            if time.monotonic() > deadline:
                raise SystemExit("no dead letter came")
            time.sleep(0.02)
        [letter] = client.dead_letters("accounts")
        print(f"given up after {letter.attempts} deliveries: {letter.reason}")
        corrected = letter.message.value.replace(b"amuont", b"amount")
        client.edit_dead_letter("accounts", letter.offset, value=corrected)
        print(f"redriven: {client.redrive('accounts')['redriven']}")

        message = invoices.get(timeout=10)
        handle(message)
        message.ack()


if __name__ == "__main__":
    main()
