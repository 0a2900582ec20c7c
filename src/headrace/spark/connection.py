"""How a broker is reached: the options for it, and a client that waits until the broker is up.

The options are a small value that is pickled to executors. What the driver's environment says
(``client/address.py``) and the
certificate's own text are put into it, so that an executor needs neither the environment nor the file.

An option is stronger than the environment, and a token than a user.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.client.address import BrokerAddress, find_brokers, find_login
from headrace.client.threads import BrokerClient
from headrace.errors import ConnectFailed, InvalidArgument
from headrace.spark.options import Given, Seconds, wrong

TIMEOUT_S_DEFAULT = 60.0
PAUSE_S = (0.02, 0.05, 0.1, 0.25, 0.5)
CONNECTION = ("servers", "token", "user", "password", "ca", "tls", "timeout")


@dataclass(frozen=True)
class ConnectionOptions:
    """Everything that is needed to reach a broker, on any machine."""

    addresses: tuple[tuple[str, int], ...]
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    """The text of the certificate to trust (PEM), not its path."""
    timeout: Seconds = TIMEOUT_S_DEFAULT

    @classmethod
    def of(cls, given: Given) -> ConnectionOptions:
        try:
            found = find_brokers(servers=given.text("servers"))
        except InvalidArgument as error:
            raise wrong("servers", error.message) from None
        values = given.read(cls)
        ca = values.pop("ca", None) or os.environ.get("HEADRACE_CA")
        if ca is not None:
            values |= {"tls": True, "ca": _certificate(ca)}
        if any(tls for _, _, tls in found):
            values["tls"] = True
        values |= _login(values)
        return cls(tuple((host, port) for host, port, _ in found), **values)

    def tls_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cadata=self.ca) if self.tls else None

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.addresses)


def _login(values: Mapping[str, str]) -> dict[str, str]:
    """The token, or the user and the password, of the options or else of the environment."""
    try:
        login = find_login(values.get("token"), values.get("user"), values.get("password"))
    except InvalidArgument as error:
        raise wrong("user", error.message) from None
    return {name: value for name, value in login._asdict().items() if value is not None}


def _certificate(ca: str) -> str:
    """The certificate's text, from a path or from the text itself."""
    if ca.lstrip().startswith("-----BEGIN"):
        return ca
    try:
        text = Path(ca).read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise wrong("ca", f"the certificate {ca} cannot be used: {error}") from None
    return text


def connect(connection: ConnectionOptions, *, patience: float | None = None) -> BrokerClient:
    """Connected, or :class:`ConnectFailed` after the connection's timeout.

    ``patience``: seconds for which staging, publishing and committing are tried, if not the timeout.
    """
    deadline = time.monotonic() + connection.timeout
    tls = connection.tls_context()
    tries = 0
    while True:
        client = BrokerClient(
            servers=[str(BrokerAddress(*each)) for each in connection.addresses],
            token=connection.token,
            user=connection.user,
            password=connection.password,
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
