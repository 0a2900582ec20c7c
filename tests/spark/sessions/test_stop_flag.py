"""The flag that a signal handler may set."""

import signal
import threading
import time
from types import FrameType, SimpleNamespace

import pytest

from headrace.spark.sessions import stop_flag
from headrace.spark.sessions.stop_flag import LOOK_S, StopFlag


def test_it_is_set_by_a_handler_wherever_the_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the midst of waiting for the flag itself, by the thread that waits."""
    stop = StopFlag()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        signal.raise_signal(signal.SIGUSR1)

    def hear(number: int, frame: FrameType | None) -> None:
        stop.set()

    # Not time.sleep itself: another thread that sleeps would raise the signal, also when nobody handles it any more.
    monkeypatch.setattr(stop_flag, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    before = signal.signal(signal.SIGUSR1, hear)
    try:
        assert stop.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert slept == [LOOK_S]


def test_another_thread_ends_the_wait() -> None:
    stop = StopFlag()
    other = threading.Timer(0.02, stop.set)
    other.start()
    began = time.monotonic()
    assert stop.wait(60)
    assert time.monotonic() - began < 30
    other.join()


def test_the_time_runs_out() -> None:
    stop = StopFlag()
    assert not stop.wait(0)
    assert not stop.wait(0.001)
    assert not stop.is_set()
    stop.set()
    assert stop.wait(0)
