"""A client for a Spark task or for the driver, which waits for a broker that is not up yet."""

from __future__ import annotations

import time

from headrace.client.link import ConnectFailed
from headrace.client.threads import BrokerClient
from headrace.spark.options import Connection

PAUSE_S = (0.02, 0.05, 0.1, 0.25, 0.5)


def connect(connection: Connection, *, patience: float | None = None) -> BrokerClient:
    """Connected, or :class:`ConnectFailed` after the connection's timeout.

    ``patience``: seconds for which staging, publishing and committing are tried, if not the timeout.
    """
    deadline = time.monotonic() + connection.timeout
    tls = connection.tls_context()
    tries = 0
    while True:
        for host, port in connection.addresses:
            client = BrokerClient(
                host,
                port,
                token=connection.token,
                tls=tls or False,
                request_timeout=connection.timeout,
                delivery_timeout=patience or connection.timeout,
            )
            try:
                return client.connect()
            except ConnectFailed as error:
                last = error
        pause = PAUSE_S[min(tries, len(PAUSE_S) - 1)]
        if time.monotonic() + pause > deadline:
            raise last
        tries += 1
        time.sleep(pause)
