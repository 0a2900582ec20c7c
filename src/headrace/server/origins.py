"""Which web pages may use the broker.

A browser lets any page send requests to any address, including this machine. A broker without a token is
protected because it can see where a request comes from:

- ``Origin`` names the page's site. The broker's own is allowed, others must be in ``allowed_origins``.
- Without ``Origin``, ``Sec-Fetch-Site`` marks what a page of another site loads (an image, a script) or
  links to; another port of this machine counts as another site. Links are allowed, except to paths that
  take messages away.
- A foreign name that resolves to this machine makes a foreign page look like our own (DNS rebinding).
  So a broker that listens only on this machine and has no token accepts as ``Host`` only a name of this
  machine, an address, or a listed name.

Programs other than browsers send none of these headers, and are not affected.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from headrace.errors import Forbidden
from headrace.wire.http import Request

TAKING = ("consume", "stream")
"""First words of the paths whose GET takes messages away, or holds the connection."""


class Origins:
    def __init__(self, allowed: list[str] | None, *, local_only: bool = False):
        self._allowed = allowed
        self._all = allowed is not None and "*" in allowed
        self._local_only = local_only and not self._all
        self._hosts = {origin.partition("://")[2] for origin in allowed or ()}

    def admit(self, request: Request) -> dict[str, str]:
        """Headers for the answer (CORS), or :class:`Forbidden`."""
        headers = request.headers
        if self._local_only and not self._is_known(headers.get("host", "")):
            raise Forbidden(
                f"this broker does not answer to {headers['host']!r}: use localhost, or list "
                "http://<name>:<port> in allowed_origins, or set a token",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and (
                headers.get("sec-fetch-mode") != "navigate" or request.words[0] in TAKING
            ):
                raise _foreign("other sites")
            return {}
        if not self._is_allowed(origin, headers.get("host", "")):
            raise _foreign(origin)
        if self._allowed is None:
            return {}
        answer = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if request.method == "OPTIONS":
            answer["Access-Control-Allow-Methods"] = "GET, POST, PUT, PATCH, DELETE"
            answer["Access-Control-Allow-Headers"] = headers.get(
                "access-control-request-headers", "Content-Type"
            )
            answer["Access-Control-Max-Age"] = "600"
        else:
            answer["Access-Control-Expose-Headers"] = "Retry-After, Headrace-Created, X-Cursor"
        return answer

    def _is_allowed(self, origin: str, host: str) -> bool:
        if self._all or (self._allowed is not None and origin in self._allowed):
            return True
        return origin.partition("://")[2] == host and host != ""

    def _is_known(self, host: str) -> bool:
        return _is_local(host) or host in self._hosts


def _foreign(origin: str) -> Forbidden:
    return Forbidden(
        f"pages of {origin[:200]} may not use this broker; see allowed_origins",
        code="origin_not_allowed",
    )


@lru_cache(maxsize=256)
def _is_local(host: str) -> bool:
    """Whether only this machine can have given itself this name."""
    name = host.lower().removesuffix(".")
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif ":" in name:
        name = name.partition(":")[0].removesuffix(".")
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
