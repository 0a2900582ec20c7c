"""Plain blocking sockets, for threads that ask and wait without an event loop."""

from __future__ import annotations

import socket
import ssl
import struct

from headrace.client.link import connect_failed

_TIMEVAL = struct.Struct("@ll")


def dial(host: str, port: int, tls: ssl.SSLContext | None, seconds: float) -> socket.socket:
    """Connect, or say why not."""
    try:
        found = socket.create_connection((host, port), seconds)
        if found.getsockname() == found.getpeername():
            # Nobody listens there, and the system gave us the very port that we call.
            found.close()
            raise ConnectionRefusedError("nobody listens there")
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                found = tls.wrap_socket(found, server_hostname=host)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise connect_failed(host, port, error) from None
    return found


def wait_at_most(found: socket.socket, seconds: float) -> None:
    """Let the system itself end a wait: a timeout of Python's would make the socket non-blocking,
    and ``MSG_WAITALL`` of no use."""
    if isinstance(found, ssl.SSLSocket):
        found.settimeout(seconds)
        return
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) or 1)
    found.settimeout(None)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
