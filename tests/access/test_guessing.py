"""Guessing: a few failures are free, then it gets slow, for one address and for one user."""

import pytest

from headrace.access import guessing
from headrace.access.guessing import FREE, WAIT_S_MAX, Guesses, network
from headrace.errors import QueueFull


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def guesses(time: Time) -> Guesses:
    return Guesses(time)


def guess(guesses: Guesses, time: Time, address: str, user: str | None, seconds: float) -> int:
    """How many wrong guesses one gets in, that waits each time as it is told."""
    end, count = time.now + seconds, 0
    while time.now < end:
        try:
            time.now += guesses.turn(address, user)
        except QueueFull:
            time.now += 1.0
            continue
        guesses.failed(address, user)
        count += 1
    return count


def test_the_first_failures_are_free(guesses: Guesses) -> None:
    """People mistype."""
    for _ in range(FREE - 1):
        assert guesses.turn("10.0.0.1") == 0
        guesses.failed("10.0.0.1")
    assert guesses.is_free("10.0.0.1")


def test_an_hour_of_guessing_is_a_thousand_guesses(guesses: Guesses, time: Time) -> None:
    """Not a hundred million."""
    assert guess(guesses, time, "10.0.0.1", None, 3600) < 1000


def test_many_addresses_guess_one_user_no_faster(guesses: Guesses, time: Time) -> None:
    """The user's own turns hold for all."""
    count = 0
    start = time.now
    for number in range(3000):
        try:
            time.now += guesses.turn(f"10.0.{number // 250}.{number % 250}", "alice")
        except QueueFull:
            time.now += 1.0
            continue
        guesses.failed(f"10.0.{number // 250}.{number % 250}", "alice")
        count += 1
    assert count < FREE + 20 + 2 * (time.now - start)


def test_many_at_once_take_turns(guesses: Guesses) -> None:
    """The pause is between two logins, however many wait; too many are refused."""
    for _ in range(FREE + 8):
        guesses.failed("10.0.0.1")
    waits: list[float] = []

    def flood() -> None:
        while True:
            waits.append(guesses.turn("10.0.0.1"))

    with pytest.raises(QueueFull) as caught:
        flood()
    assert caught.value.code == "too_many_attempts"
    assert caught.value.retryable
    assert waits == sorted(waits)
    assert waits[-1] <= WAIT_S_MAX


def test_others_do_not_wait(guesses: Guesses) -> None:
    """Another address, another user."""
    for _ in range(100):
        guesses.failed("10.0.0.1", "alice")
    assert guesses.is_free("10.0.0.2", "bob")
    assert not guesses.is_free("10.0.0.2", "alice")
    assert not guesses.is_free("10.0.0.1")


def test_failures_fade(guesses: Guesses, time: Time) -> None:
    """A quarter of an hour later nobody remembers."""
    for _ in range(30):
        guesses.failed("10.0.0.1")
    time.now += 900
    assert guesses.turn("10.0.0.1") == 0
    guesses.failed("10.0.0.1")
    assert guesses.turn("10.0.0.1") == 0


def test_the_tables_are_bounded(guesses: Guesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has many addresses or names does not fill our memory."""
    monkeypatch.setattr(guessing, "ENTRIES_MAX", 50)
    for number in range(1000):
        guesses.failed(f"10.0.{number // 250}.{number % 250}", f"user{number}")
    assert len(guesses) == 100


def test_a_network_counts_as_one_address() -> None:
    """Of IPv6 a client has many."""
    assert network("2001:db8::1") == network("2001:db8::ffff:1")
    assert network("2001:db8::1") != network("2001:db8:0:1::1")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"
    assert network("") == ""
