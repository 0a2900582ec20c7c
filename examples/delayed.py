"""Delayed messages: publish them now, list and cancel them while they wait, receive them later.

    headrace serve                      in another terminal
    python examples/delayed.py [SECONDS]

SECONDS is how long they wait; 2 by default.
"""

import os
import sys

from headrace import BrokerClient

HOST, _, PORT = os.environ.get("HEADRACE_SERVER", "127.0.0.1:9999").partition(":")


def main(seconds: float = 2.0) -> None:
    with BrokerClient(HOST, int(PORT)) as client:
        channel = client.subscribe("reminders")
        client.publish("reminders", b"call the dentist", delay=seconds)
        mistake = client.publish("reminders", b"call the police", delay=seconds)

        for waiting in client.scheduled("reminders"):
            print(f"waits: {waiting.id} until {waiting.deliver_at}")
        client.cancel(mistake.id)
        print("one of them is cancelled")

        # A message with a time to live is not delivered after that time.
        client.publish("reminders", b"the bus leaves now", ttl=60)

        for _ in range(2):
            print(f"here it is: {channel.get(timeout=seconds + 30).text()}")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
