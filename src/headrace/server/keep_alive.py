"""TCP keep-alive: it finds a peer that is gone without a word, within half a minute."""

from __future__ import annotations

import logging
import socket

logger = logging.getLogger("headrace.server")
KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 30_000),
)


def keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            option = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError as error:  # a Unix socket, or gone already
        logger.debug("keep-alive could not be set: %s", error)
