"""Channels, apart from the brokers and clients that fill them."""

import signal
import threading
from types import FrameType

import pytest

from headrace import channels
from headrace.channels import Channel
from headrace.errors import Closed
from headrace.testing import wait_until


def test_a_signal_is_heard_that_does_not_wake_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs handlers in the main thread, which the system may not have woken for it.

    It is so when the signal came just before the thread went to sleep. Here another thread gets it.
    """
    monkeypatch.setattr(channels, "LOOK_S", 0.01)
    channel = Channel("events", 10, lambda callback, *args: None)
    heard = threading.Event()
    while_asleep: list[bool] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.set()

    def send() -> None:
        wait_until(lambda: channel._sleepers)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        while_asleep.append(heard.wait(10))
        channel.closed(None)

    before = signal.signal(signal.SIGUSR1, hear)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(Closed):
            channel.get()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert while_asleep == [True]
