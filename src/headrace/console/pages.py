"""The files of the console, read once when the broker starts, and the headers they are sent with.

All files share one hash, which is a word of their address. Scripts name each other by relative addresses, so
a browser that has one file of a version has all others of the same version. The files never change under
their address and are cached for ever; only ``/`` is asked for each time, and is 304 if it has not changed.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from headrace.errors import NotFound
from headrace.wire.http import Answer, Request

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_STRICT = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Pages:
    def __init__(self, contents: dict[str, bytes]):
        """``contents``: the files by their names. ``VERSION`` in the index stands for their hash."""
        digest = hashlib.sha256()
        for name in sorted(contents):
            digest.update(b"%s\0%d\0%s" % (name.encode(), len(contents[name]), contents[name]))
        self.version = digest.hexdigest()[:16]
        self._files = {
            name: (content, _TYPES[name.rpartition(".")[2]])
            for name, content in contents.items()
            if name != INDEX
        }
        self._index = contents[INDEX].replace(b"VERSION", self.version.encode())
        self._tag = f'"{self.version}"'

    def index(self, request: Request) -> Answer:
        headers = {**_STRICT, "Cache-Control": "no-cache", "ETag": self._tag}
        if self._tag in request.headers.get("if-none-match", ""):
            return Answer(304, b"", _TYPES["html"], headers)
        return Answer(200, self._index, _TYPES["html"], headers)

    def file(self, version: str, name: str) -> Answer:
        found = self._files.get(name)
        if found is None or version != self.version:
            raise NotFound(
                "the console has no such file in this version of the broker; load / again",
                code="no_route",
            )
        headers = {**_STRICT, "Cache-Control": "public, max-age=31536000, immutable"}
        return Answer(200, *found, headers)


@cache
def pages() -> Pages:
    """Those of this installation."""
    static = files("headrace.console") / "static"
    found = {each.name: each.read_bytes() for each in static.iterdir() if each.is_file()}
    return Pages({name: content for name, content in found.items() if not name.startswith(".")})
