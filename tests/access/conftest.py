"""Passwords that are hashed quickly: the real parameters take a tenth of a second each."""

import pytest
from argon2 import PasswordHasher

from headrace.access import hashing


@pytest.fixture(autouse=True)
def _quick_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hashing, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    )
    hashing._of_nobody.cache_clear()
