"""Clients that are turned away at the door: the log says so, with the setting that would change it.

Wrong tokens and passwords, pages of other sites, failed TLS handshakes: whoever set up the client sees only
that it does not work, so the log must say why. But a program with an old token tries again for ever, and
nobody may fill the log. So:

- The first refusal of an address for a reason is logged at once. Those that follow are counted, and one of
  them is logged after ``AGAIN_S``, with their number.
- The table is bounded; so are the lines of a minute, whatever the number of addresses. What was left out is
  counted, and the next line says how many that were.
- ``counts`` has them all, by cause, for the metrics.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable

from headrace.access.guessing import network
from headrace.broker.audit import Source

logger = logging.getLogger("headrace.server")
AGAIN_S = 600.0
ENTRIES_MAX = 1000
LINES_PER_MINUTE_MAX = 20
CAUSES = ("origin", "host", "login", "tls")


class Refusals:
    def __init__(self, time: Callable[[], float]):
        self._time = time
        self._known: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        """(reason, network) -> (when it was logged, how many came since)"""
        self._minute, self._lines = 0, 0
        self._unlogged = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))

    def note(self, cause: str, source: Source, text: str, reason: str = "") -> None:
        """Log that a client was refused, unless that was said lately. ``text`` says what would change it;
        it is also the reason, unless another is given."""
        self.counts[cause] += 1
        now, key = self._time(), (reason or text[:200], network(source.address))
        logged_at, more = self._known.pop(key, (None, 0))
        if logged_at is not None and now - logged_at < AGAIN_S:
            self._known[key] = (logged_at, more + 1)
            return
        if now // 60 != self._minute:
            self._minute, self._lines = int(now // 60), 0
        if self._lines >= LINES_PER_MINUTE_MAX:
            self._unlogged += 1
            return
        self._lines += 1
        if len(self._known) >= ENTRIES_MAX:
            self._known.popitem(last=False)
        self._known[key] = (now, 0)
        counted = f" ({more} times more since it was logged last)" if more else ""
        others = f" (and {self._unlogged} others, which were not logged)" if self._unlogged else ""
        self._unlogged = 0
        fields = {**source.fields(), "cause": cause}
        logger.warning("%s is refused: %s%s%s", source.peer, text, counted, others, extra=fields)


def tls_failure(error: OSError, handshake_s: float) -> str | None:
    """What went wrong in a handshake, and what would change it; None if the peer only went away, as
    the health check of a load balancer does."""
    reason = str(getattr(error, "reason", "") or "")
    if isinstance(error, ssl.SSLCertVerificationError) or "VERIFY_FAILED" in reason:
        return (
            f"its certificate is not valid: {getattr(error, 'verify_message', '') or reason}; "
            "tls_client_ca has the authority that must have signed it"
        )
    if reason in (
        "HTTP_REQUEST",
        "WRONG_VERSION_NUMBER",
        "UNKNOWN_PROTOCOL",
        "HTTPS_PROXY_REQUEST",
    ):
        return (
            "it speaks no TLS: connect with tls:// or https://, or leave out tls_cert and tls_key "
            "for a broker without TLS"
        )
    if "ALERT" in reason and ("UNKNOWN_CA" in reason or "CERTIFICATE" in reason):
        return (
            f"it does not trust our certificate ({reason}): give it the authority (--ca, ca=), or set "
            "tls_cert to a certificate that it trusts and that has the name it connects to"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "NO_SHARED_CIPHER", "VERSION_TOO_LOW"):
        return f"it has no TLS 1.2 or newer ({reason}), which is the oldest that is accepted"
    if isinstance(error, (ConnectionAbortedError, TimeoutError)):
        return f"its TLS handshake took more than {handshake_s:g} s (handshake_timeout)"
    if isinstance(error, ssl.SSLEOFError) or not isinstance(error, ssl.SSLError):
        return None
    return f"its TLS handshake failed: {reason or error}; see tls_cert, tls_key and tls_client_ca"
