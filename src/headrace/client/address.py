"""Where brokers are and who logs in: from arguments or the environment, the same for clients, CLI and Spark.

An address is ``host:port``, ``host``, ``tcp://host:port`` or ``tls://host:port``; an IPv6 address has brackets
if a port follows. Several are separated by commas. An argument is stronger than the environment:

- ``HEADRACE_SERVERS`` or ``HEADRACE_SERVER``, else ``HEADRACE_HOST`` and ``HEADRACE_PORT``, else this machine;
- ``HEADRACE_TOKEN``, else ``HEADRACE_USER`` and ``HEADRACE_PASSWORD``;
- ``HEADRACE_CA``: the certificate to trust. It turns TLS on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address
from typing import Annotated, NamedTuple

from msgspec import Meta

from headrace.checking import check
from headrace.errors import InvalidArgument
from headrace.settings import BY_NAME, without_service_links

HOST_DEFAULT = "127.0.0.1"
PORT_DEFAULT = int(BY_NAME["port"].default)


class BrokerAddress(NamedTuple):
    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def parse_address(text: object, port: int = PORT_DEFAULT) -> BrokerAddress:
    """``port`` is for an address that has none."""
    if not isinstance(text, str):
        raise _bad(text)
    scheme, separator, place = text.strip().rpartition("://")
    if separator and scheme not in ("tcp", "tls"):
        http = ": the clients do not speak HTTP, but use the broker's other port"
        raise _bad(text, http if scheme.startswith("http") else "")
    host, colon, given = place.rpartition(":")
    if not colon or place.endswith("]") or _is_ipv6(place):
        host, given = place, str(port)
    if colon and not host:
        host = HOST_DEFAULT
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or any(each in host for each in " /@[]?#") or (":" in host and not _is_ipv6(host)):
        raise _bad(text)
    if not given.isascii() or not given.isdigit() or len(given) > 5 or not 0 < int(given) < 65536:
        raise _bad(text, f": {given!r} is not a port")
    return BrokerAddress(host, int(given), scheme == "tls")


def _is_ipv6(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False


def _bad(text: object, why: str = "") -> InvalidArgument:
    return InvalidArgument(
        f"{text!r} is not the address of a broker{why}; write host:port, or tls://host:port for TLS"
    )


def parse_addresses(texts: object) -> list[BrokerAddress]:
    """At least one, of a list or of a text with commas."""
    if isinstance(texts, str):
        texts = texts.split(",")
    if not isinstance(texts, Sequence):
        raise _bad(texts)
    found = [parse_address(each) for each in texts]
    if not found:
        raise InvalidArgument("servers is empty: give the address of at least one broker")
    return found


def find_brokers(
    host: str | None = None,
    port: int | None = None,
    servers: str | Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[BrokerAddress]:
    """The brokers of a client's arguments, else those of the environment, else the one on this machine."""
    if servers is not None:
        if host is not None or port is not None:
            raise InvalidArgument("give host and port, or servers, not both")
        return parse_addresses(servers)
    if port is not None:
        check("port", port, Annotated[int, Meta(ge=1, le=65535)])
        one = parse_address(HOST_DEFAULT if host is None else host, port)
        if one.port != port:
            raise InvalidArgument(f"{host!r} has a port, and port is {port}: give one of them")
        return [one]
    if host is not None:
        return parse_addresses(host)
    given = environment.get("HEADRACE_SERVERS") or environment.get("HEADRACE_SERVER")
    return parse_addresses(given) if given else [_listening(environment)]


def _listening(environment: Mapping[str, str]) -> BrokerAddress:
    """Where a broker with this environment listens."""
    environment = without_service_links(environment)
    host = environment.get("HEADRACE_HOST") or environment.get("QB_SERVER_HOST") or HOST_DEFAULT
    port = environment.get("HEADRACE_PORT") or environment.get("QB_SERVER_PORT") or PORT_DEFAULT
    host = HOST_DEFAULT if host in ("0.0.0.0", "::") else host  # it listens everywhere
    return parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class Login(NamedTuple):
    """A token, or a user and a password, or nothing."""

    token: str | None = None
    user: str | None = None
    password: str | None = None


def find_login(
    token: str | None = None,
    user: str | None = None,
    password: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Login:
    """The login of the arguments, else of the environment. A token is stronger than a user."""
    if token is not None and user is not None:
        raise InvalidArgument("give a token, or a user and a password, not both")
    if token is not None:
        return Login(token)
    if user is None:
        if password is not None:
            raise InvalidArgument("a password goes with a user: give user, too")
        token = environment.get("HEADRACE_TOKEN")
        if token:
            return Login(token)
        user = environment.get("HEADRACE_USER")
        if not user:
            return Login()
    password = environment.get("HEADRACE_PASSWORD") if password is None else password
    if password is None:
        raise InvalidArgument(
            f"the password of {user} is missing: give it, or set HEADRACE_PASSWORD"
        )
    return Login(None, user, password)
