"""TLS of clients: what they trust, and which of the brokers they use it with."""

from __future__ import annotations

import os
import ssl

from headrace.client.address import BrokerAddress
from headrace.errors import InvalidArgument


def make_tls(
    tls: bool | ssl.SSLContext, ca: str | None, certificate: tuple[str, str] | None = None
) -> ssl.SSLContext | None:
    """``certificate``: the files of our own certificate and of its key, where the broker asks for one."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not tls and ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise InvalidArgument(f"the certificate {ca} cannot be used: {error}") from None
    if certificate is not None:
        try:
            context.load_cert_chain(*certificate)
        except OSError as error:
            names = " and ".join(certificate)
            raise InvalidArgument(f"the certificate {names} cannot be used: {error}") from None
    return context


def brokers_of(
    addresses: list[BrokerAddress],
    tls: bool | ssl.SSLContext,
    ca: str | None,
    certificate: tuple[str, str] | None,
) -> list[tuple[str, int, ssl.SSLContext | None]]:
    """The addresses, each with TLS if it or an option asks for it."""
    if ca is None and not isinstance(tls, ssl.SSLContext):
        ca = os.environ.get("HEADRACE_CA") or None
    context = make_tls(tls, ca, certificate)
    wanted = context or (make_tls(True, None) if any(each.tls for each in addresses) else None)
    return [(host, port, wanted if is_tls else context) for host, port, is_tls in addresses]
