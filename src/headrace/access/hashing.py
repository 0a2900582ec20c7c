"""Secrets and their hashes.

A *password* is chosen by a person, so it can be guessed from a list. Its hash is slow on purpose
(argon2id, with the parameters of ``argon2-cffi``): about 50 ms and 64 MiB each. It is computed in one of
a few threads (``control.py``): the memory is bounded, and the loop goes on.

A *token* is 256 random bits, which nobody can guess however fast the hash is. So a token is stored as
a plain SHA-256: looking it up costs a microsecond on every request, and the file does not reveal the
token. A slow hash would only let strangers keep the broker busy.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from headrace.errors import InvalidArgument

TOKEN_PREFIX = "hr_"
"""So that scanners for leaked secrets recognize a token."""
PASSWORD_CHARS_MIN = 8
PASSWORD_BYTES_MAX = 1_024
_hasher = PasswordHasher()


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def check_password(password: object) -> str:
    """A password that may be set, or :class:`InvalidArgument`; the sentence never shows it."""
    if not isinstance(password, str) or len(password) < PASSWORD_CHARS_MIN:
        raise InvalidArgument(
            f"a password has at least {PASSWORD_CHARS_MIN} characters", code="invalid_password"
        )
    if len(password.encode()) > PASSWORD_BYTES_MAX:
        raise InvalidArgument(
            f"a password has at most {PASSWORD_BYTES_MAX} bytes", code="invalid_password"
        )
    return password


def hash_password(password: str) -> str:
    """Slow: call it in a thread."""
    return _hasher.hash(check_password(password))


def is_password(hashed: str | None, password: str) -> bool:
    """Slow: call it in a thread.

    None: the user does not exist, or has no password. That takes as long as a wrong password, so that the
    time of the answer does not tell who exists.
    """
    if len(password.encode()) > PASSWORD_BYTES_MAX:
        return False
    try:
        _hasher.verify(hashed or _of_nobody(), password)
    except (VerificationError, InvalidHashError):
        return False
    return hashed is not None


@cache
def _of_nobody() -> str:
    return _hasher.hash(secrets.token_hex())
