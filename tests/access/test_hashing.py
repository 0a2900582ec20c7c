"""Secrets: what is stored of them, and what is not."""

import pytest
from argon2 import PasswordHasher

from headrace.access import hashing
from headrace.errors import InvalidArgument


def test_a_password_has_a_slow_hash_with_a_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2id, as its library recommends; two hashes of one password differ."""
    monkeypatch.undo()
    assert isinstance(hashing._hasher, PasswordHasher)
    one, two = hashing.hash_password("correct horse"), hashing.hash_password("correct horse")
    assert one.startswith("$argon2id$v=19$m=65536")
    assert one != two
    assert hashing.is_password(one, "correct horse")
    assert not hashing.is_password(one, "correct horsf")


def test_a_user_that_does_not_exist_has_no_password() -> None:
    """Whatever is tried; and a broken hash is no password, either."""
    assert not hashing.is_password(None, "")
    assert not hashing.is_password(None, "correct horse")
    assert not hashing.is_password("not a hash", "correct horse")
    assert not hashing.is_password(None, "x" * 10_000)


@pytest.mark.parametrize("password", ["", "short", "x" * 2000, None])
def test_a_bad_password_is_refused_and_not_shown(password: str | None) -> None:
    """It may be a good one with a slip of the finger."""
    with pytest.raises(InvalidArgument) as caught:
        hashing.check_password(password)
    assert caught.value.code == "invalid_password"
    assert "short" not in caught.value.message or password != "short"


def test_tokens_are_random_and_recognizable() -> None:
    """256 bits, with a prefix that scanners for leaked secrets can look for."""
    tokens = {hashing.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith("hr_") and len(token) >= 46 for token in tokens)
    assert len(hashing.token_hash("x")) == 64
