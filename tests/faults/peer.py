"""A client in a process of its own, so that it can be stopped, frozen or cut off: ``python -m tests.faults.peer``.

    publish HOST PORT NAME    publishes ``NAME-0``, ``NAME-1`` … to ``orders``, and tells each that was answered
    consume HOST PORT NAME    a member of the group ``workers``: tells and acknowledges what it gets
    drip    HOST PORT COUNT   opens sockets and sends the beginning of an HTTP request, a byte at a time
    mumble  HOST PORT COUNT   the same with the beginning of a text command
    hold    HOST PORT COUNT   opens sockets and stays silent

It tells on stdout, a line at a time, and ends when its stdin ends.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time

from headrace import BrokerClient, HeadraceError, limits
from headrace.errors import Closed, RequestTimeout

ACK_TIMEOUT_S = 2.0
MAX_DELIVERIES = 8
HEAD = b"POST /publish/orders HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nX-Slow: " + b"x" * 4000
COMMAND = b"PUB orders " + b"x" * 4000
DRIP_S = 2.0


def tell(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def ended() -> threading.Event:
    """Set when the parent closes our stdin."""
    event = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        event.set()

    threading.Thread(target=watch, daemon=True).start()
    return event


def publish(host: str, port: int, name: str) -> None:
    end = ended()
    with BrokerClient(host, port) as client:
        tell("ready")
        number = 0
        while not end.is_set():
            values = [f"{name}-{number + index}" for index in range(10)]
            number += 10
            for value in values:
                tell(f"sent {value}")
            try:
                client.publish_many("orders", values)
            except HeadraceError as error:
                tell(f"unknown {values[0]} {error.code}")
                continue
            for value in values:
                tell(f"ok {value}")
            time.sleep(0.01)


def consume(host: str, port: int, name: str) -> None:
    end = ended()
    with (
        BrokerClient(host, port) as client,
        client.subscription(
            "workers",
            "orders",
            prefetch=50,
            ack_timeout=ACK_TIMEOUT_S,
            max_deliveries=MAX_DELIVERIES,
            backoff=0.05,
        ) as consumer,
    ):
        tell("ready")
        while not end.is_set():
            try:
                message = consumer.get(0.1)
            except RequestTimeout:
                continue
            except Closed:
                break
            tell(f"got {message.text()} {message.attempt}")
            try:
                message.ack()
            except HeadraceError as error:
                tell(f"stale {message.text()} {error.code}")


def open_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    limits.allow_open_files(count + 200)
    found = []
    for _ in range(count):
        found.append(socket.create_connection((host, port), timeout=30))
        found[-1].setblocking(False)
    return found


def drip(host: str, port: int, count: int, content: bytes) -> None:
    """Tells every second how many sockets the server has not closed."""
    end = ended()
    sockets = open_sockets(host, port, count)
    selector = selectors.DefaultSelector()
    for each in sockets:
        selector.register(each, selectors.EVENT_READ)
    at, next_byte = 0, 0.0
    tell("ready")
    while not end.is_set():
        if content and time.monotonic() >= next_byte:
            next_byte = time.monotonic() + DRIP_S
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                try:
                    key.fileobj.send(content[at : at + 1])
                except OSError:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
            at += 1
        for key, _ in selector.select(1.0):
            assert isinstance(key.fileobj, socket.socket)
            try:
                gone = not key.fileobj.recv(65536)
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                selector.unregister(key.fileobj)
                key.fileobj.close()
        tell(f"open {len(selector.get_map())}")


def main() -> None:
    what, host, port, argument = sys.argv[1:]
    if what == "publish":
        publish(host, int(port), argument)
    elif what == "consume":
        consume(host, int(port), argument)
    else:
        content = {"drip": HEAD, "mumble": COMMAND, "hold": b""}[what]
        drip(host, int(port), int(argument), content)


if __name__ == "__main__":
    main()
