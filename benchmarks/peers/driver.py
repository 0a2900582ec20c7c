"""What a Python client does for each work. A peer's module has a subclass; methods that it lacks are not measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

Seen = Callable[[bytes], object]


class Driver:
    """``topic`` is new for each work."""

    def __init__(self, address: str, mode: str, topic: str):
        self.host, _, port = address.partition(":")
        self.port = int(port)
        self.address = address
        self.mode = mode
        self.topic = topic

    def close(self) -> None:
        pass

    # --- publishing -------------------------------------------------------------------------
    def put(self, value: bytes) -> None:
        """Publish one message and wait for its answer."""
        raise NotImplementedError

    def send_all(self, values: Iterable[bytes]) -> None:
        """Publish in a plain loop, as a user would write it, then wait for all answers."""
        raise NotImplementedError

    def send_batch(self, values: Sequence[bytes]) -> None:
        """Publish together what belongs together, and wait for the answer."""
        raise NotImplementedError

    def send_paced(self, values: Iterable[bytes]) -> None:
        """Publish each value when the iterator has it, without waiting for answers; then wait for all."""
        self.send_all(values)

    # --- reading ----------------------------------------------------------------------------
    def read(self, count: int) -> int:
        """Read the topic from its beginning, as objects of the client; returns how many were read."""
        raise NotImplementedError

    def values(self, count: int) -> int:
        """The same, as plain values; by default as objects."""
        return self.read(count)

    def take(
        self, count: int, seen: Seen | None = None, ready: Callable[[], object] | None = None
    ) -> None:
        """Consume as a queue from the beginning, with an ack for each message. ``ready`` is called when it has
        begun, ``seen`` for each value."""
        raise NotImplementedError

    def fan_out(self, subscribers: int, values: Sequence[bytes]) -> float:
        """Publish to so many subscribers, each with a connection; returns the seconds until all have all."""
        raise NotImplementedError


def paced(count: int, rate: int, size: int) -> Iterable[bytes]:
    """Values that are due at a fixed rate. Each begins with the time at which it was due, in nanoseconds: a
    publisher that falls behind is not forgiven."""
    began = time.monotonic_ns() + 50_000_000
    pad = bytes(size - 8)
    for number in range(count):
        due = began + number * 1_000_000_000 // rate
        while (left := due - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9 if left > 200_000 else 0)
        yield due.to_bytes(8, "little") + pad
