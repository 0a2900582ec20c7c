"""Workers: concurrency, leases, stopping, errors and timeouts of handlers; in threads and with asyncio."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncBroker, AsyncClient, Broker, BrokerClient
from headrace.errors import InvalidArgument, NotFound, RequestTimeout
from headrace.model import Message
from headrace.testing import RunningServer, running_server, wait_until

WAIT_S = 20
Api = Broker | BrokerClient
AsyncApi = AsyncBroker | AsyncClient


@pytest.fixture(params=["embedded", "network"])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    """A broker in this process, or a client of a server."""
    if request.param == "embedded":
        with Broker.open() as broker:
            yield broker
    else:
        with running_server() as server, server.client(request_timeout=10) as client:
            yield client


@pytest.fixture(params=["embedded", "network"])
def run_async(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Runs a test with an ``AsyncBroker`` or an ``AsyncClient``."""

    def run_with(make: Callable[[], AsyncApi], test: Callable[[Any], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with make() as api:
                return await asyncio.wait_for(test(api), WAIT_S)

        return asyncio.run(main())

    if request.param == "embedded":
        yield lambda test: run_with(AsyncBroker, test)
    else:
        with running_server() as server:
            yield lambda test: run_with(
                lambda: AsyncClient(server.host, server.port, request_timeout=10), test
            )


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


class Working:
    """``consume`` in a thread, and what it raised."""

    def __init__(self, api: Api, handler: Callable[[Message], object], **options: Any):
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(api, handler, options))
        self._thread.start()

    def _run(self, api: Api, handler: Callable[[Message], object], options: Any) -> None:
        try:
            api.consume("email", handler, "orders", **options)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


# --- threads --------------------------------------------------------------------------------------
def test_as_many_messages_as_asked_for_are_handled_at_once(api: Api) -> None:
    """Four handlers meet at a barrier; with fewer nobody would pass."""
    barrier = threading.Barrier(4)
    api.publish_many("orders", [b"%d" % number for number in range(8)])
    working = Working(api, lambda message: barrier.wait(WAIT_S), concurrency=4)
    wait_until(lambda: _stats(api)["acked"] == 8)
    api.unsubscribe_from_subscription("email")
    working.join()
    assert working.error is None
    assert _stats(api)["nacked"] == 0


def test_a_lease_is_extended_while_the_handler_runs(api: Api) -> None:
    """The handler takes four times the ack timeout, and the message is delivered once."""
    seen: list[bytes] = []
    later = threading.Event()

    def handle(message: Message) -> None:
        seen.append(message.value)
        if message.value == b"long":
            assert later.wait(WAIT_S)
        else:
            later.set()

    api.publish("orders", b"long")
    api.publish("orders", b"later", delay=0.8)
    working = Working(api, handle, concurrency=2, ack_timeout=0.2)
    wait_until(lambda: len(seen) == 2 and _stats(api)["acked"] == 2)
    api.unsubscribe_from_subscription("email")
    working.join()
    assert seen == [b"long", b"later"]
    assert (_stats(api)["timeouts"], _stats(api)["redelivered"]) == (0, 0)


def test_a_stop_lets_handlers_finish_and_gives_back_the_rest(api: Api) -> None:
    """While the handler still runs, another member gets what was prefetched, as a first attempt."""
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)

    api.publish_many("orders", [b"%d" % number for number in range(5)])
    working = Working(api, handle)
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=api.unsubscribe_from_subscription, args=("email",))
    stopping.start()
    wait_until(lambda: _stats(api)["in_flight"] == 1)
    go_on.set()
    stopping.join(WAIT_S)
    working.join()
    assert working.error is None
    assert (_stats(api)["acked"], _stats(api)["members"]) == (1, 0)
    with api.subscription("email") as rest:
        messages = [rest.get(WAIT_S) for _ in range(4)]
    assert sorted(message.value for message in messages) == [b"1", b"2", b"3", b"4"]
    assert {message.attempt for message in messages} == {1}


def test_closing_stops_the_workers(server: RunningServer) -> None:
    """The message that is being handled is acknowledged before the connection ends."""
    client, begun = server.client().connect(), threading.Event()

    def handle(message: Message) -> None:
        closing.start()
        begun.set()
        wait_until(lambda: _stats(other)["in_flight"] == 1)  # the second message has gone back

    closing = threading.Thread(target=client.close)
    with server.client() as other:
        client.publish_many("orders", [b"one", b"two"])
        client.subscribe_to_subscription("email", handle, "orders")
        assert begun.wait(WAIT_S)
        closing.join(WAIT_S)
        assert (_stats(other)["acked"], _stats(other)["lag"], _stats(other)["members"]) == (1, 1, 0)


def test_an_exception_gives_the_message_back(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, delivered again, and in the end becomes a dead letter with the reason."""
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("no address")

    api.publish("orders", b"x")
    working = Working(api, handle, max_deliveries=2, backoff=0.0)
    wait_until(lambda: _stats(api)["dead_lettered"] == 1)
    api.unsubscribe_from_subscription("email")
    working.join()
    assert attempts == [1, 2]
    [letter] = api.dead_letters("email")
    assert letter.reason == "ValueError: no address"
    assert "the handler failed for <Message orders/0@0 b'x'>, attempt 2" in caplog.text


def test_an_exit_in_a_handler_ends_the_worker(api: Api) -> None:
    """``consume`` raises it, and the message goes back."""

    def handle(message: Message) -> None:
        raise SystemExit(3)

    api.publish("orders", b"x")
    working = Working(api, handle, concurrency=2)
    working.join()
    assert isinstance(working.error, SystemExit)
    assert (_stats(api)["nacked"], _stats(api)["members"]) == (1, 0)


def test_a_subscription_that_is_deleted_ends_the_worker(api: Api) -> None:
    """``consume`` says so."""
    begun = threading.Event()
    api.publish("orders", b"x")
    working = Working(api, lambda message: begun.set())
    assert begun.wait(WAIT_S)
    api.delete_subscription("email")
    working.join()
    assert isinstance(working.error, NotFound)


def test_a_handler_that_takes_too_long(api: Api) -> None:
    """Its message goes back at once, and its place is taken; what it returns later is ignored."""
    go_on, seen = threading.Event(), []

    def handle(message: Message) -> None:
        seen.append((message.value, message.attempt))
        if message.attempt == 1 and message.value == b"slow":
            assert go_on.wait(WAIT_S)

    api.publish_many("orders", [b"slow", b"quick"])
    working = Working(api, handle, timeout=0.1, backoff=0.0)
    wait_until(
        lambda: len(seen) == 3 and _stats(api)["acked"] == 2
    )  # consume makes the subscription
    go_on.set()
    api.unsubscribe_from_subscription("email")
    working.join()
    assert sorted(seen) == [(b"quick", 1), (b"slow", 1), (b"slow", 2)]
    assert _stats(api)["nacked"] == 1


def test_handlers_that_all_hang_end_the_worker() -> None:
    """Threads cannot be interrupted, and a worker does not collect them."""
    go_on = threading.Event()
    with Broker.open() as broker:
        broker.publish_many("orders", [b"x"] * 10)
        working = Working(broker, lambda message: go_on.wait(WAIT_S), concurrency=2, timeout=0.05)
        working.join()
        assert isinstance(working.error, RequestTimeout)
        assert working.error.code == "handler_timeout"
        go_on.set()


def test_the_order_of_a_key_is_kept(api: Api) -> None:
    """Eight at once, and for each key one after the other."""
    order: dict[bytes | None, list[int]] = {}
    busy: set[bytes | None] = set()

    def handle(message: Message) -> None:
        assert message.key not in busy
        busy.add(message.key)
        order.setdefault(message.key, []).append(int(message.value))
        busy.discard(message.key)

    keys = [f"key-{number % 5}" for number in range(200)]
    api.publish_many("orders", [b"%d" % number for number in range(200)], keys=keys)
    working = Working(api, handle, concurrency=8, ordering="key")
    wait_until(lambda: _stats(api)["acked"] == 200)
    api.unsubscribe_from_subscription("email")
    working.join()
    assert working.error is None
    assert len(order) == 5
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_wrong_options_are_refused_before_joining(api: Api) -> None:
    """No member joins, and nothing is created."""
    wrong: list[dict[str, Any]] = [{"concurrency": 0}, {"concurrency": 1.5}, {"timeout": -1}]
    for options in wrong:
        with pytest.raises(InvalidArgument):
            api.consume("email", print, "orders", **options)
    assert api.subscriptions() == []


# --- asyncio --------------------------------------------------------------------------------------
def test_tasks_handle_messages_at_the_same_time(run_async: Callable[..., Any]) -> None:
    """Four handlers wait for each other; a stop from another task ends ``consume``."""

    async def check(api: AsyncApi) -> None:
        barrier = asyncio.Barrier(4)
        done = asyncio.Semaphore(0)

        async def handle(message: Message) -> None:
            await barrier.wait()
            done.release()

        await api.publish_many("orders", [b"x"] * 8)
        task = asyncio.create_task(api.consume("email", handle, "orders", concurrency=4))
        for _ in range(8):
            await done.acquire()
        await api.unsubscribe_from_subscription("email")
        await task
        stats = await api.subscription_stats("email")
        assert (stats["acked"], stats["nacked"], stats["members"]) == (8, 0, 0)

    run_async(check)


def test_a_task_is_stopped_gracefully(run_async: Callable[..., Any]) -> None:
    """The handler finishes its message; the rest is delivered to the next member as a first attempt."""

    async def check(api: AsyncApi) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            begun.set()
            await go_on.wait()

        await api.publish_many("orders", [b"%d" % number for number in range(4)])
        await api.subscribe_to_subscription("email", handle, "orders")
        await begun.wait()
        stopping = asyncio.create_task(api.unsubscribe_from_subscription("email"))
        while (await api.subscription_stats("email"))["in_flight"] > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        go_on.set()
        await stopping
        assert (await api.subscription_stats("email"))["acked"] == 1
        rest = await api.subscription("email")
        found = [await rest.get(WAIT_S) for _ in range(3)]
        assert [message.attempt for message in found] == [1, 1, 1]
        rest.close()

    run_async(check)


def test_a_cancelled_worker_cancels_its_handlers(run_async: Callable[..., Any]) -> None:
    """Their messages go back at once."""

    async def check(api: AsyncApi) -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        await api.publish("orders", b"x")
        task = asyncio.create_task(api.consume("email", handle, "orders", backoff=0.0))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()
        again = await api.subscription("email")
        assert (await again.get(WAIT_S)).attempt == 2
        again.close()

    run_async(check)


def test_a_coroutine_that_takes_too_long_is_cancelled(run_async: Callable[..., Any]) -> None:
    """Its message goes back with the reason; a handler that is no coroutine function works, too."""

    async def check(api: AsyncApi) -> None:
        handled = asyncio.Event()

        async def handle(message: Message) -> None:
            if message.attempt == 1:
                await asyncio.Event().wait()
            handled.set()

        await api.publish("orders", b"x")
        await api.subscribe_to_subscription("email", handle, "orders", timeout=0.05, backoff=0.0)
        await handled.wait()
        await api.unsubscribe_from_subscription("email")
        stats = await api.subscription_stats("email")
        assert (stats["acked"], stats["nacked"], stats["timeouts"]) == (1, 1, 0)

    run_async(check)


def test_an_async_lease_is_extended(run_async: Callable[..., Any]) -> None:
    """The handler takes four times the ack timeout, and the message is delivered once."""

    async def check(api: AsyncApi) -> None:
        later = asyncio.Event()
        seen: list[bytes] = []

        async def handle(message: Message) -> None:
            seen.append(message.value)
            if message.value == b"long":
                await later.wait()
            else:
                later.set()

        await api.publish("orders", b"long")
        await api.publish("orders", b"later", delay=0.8)
        await api.subscribe_to_subscription(
            "email", handle, "orders", concurrency=2, ack_timeout=0.2
        )
        await later.wait()
        await api.unsubscribe_from_subscription("email")
        assert seen == [b"long", b"later"]
        assert (await api.subscription_stats("email"))["timeouts"] == 0

    run_async(check)


# --- signals --------------------------------------------------------------------------------------
THREADS = """
import sys
from headrace import BrokerClient

def handle(message):
    print("begun", flush=True)
    sys.stdin.readline()
    print("handled", flush=True)

with BrokerClient(sys.argv[1], int(sys.argv[2])) as client:
    client.consume("email", handle, "orders")
print("ended", flush=True)
"""
TASKS = """
import asyncio, sys
from headrace import AsyncClient

async def handle(message):
    print("begun", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("handled", flush=True)

async def main():
    async with AsyncClient(sys.argv[1], int(sys.argv[2])) as client:
        await client.consume("email", handle, "orders")
    print("ended", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [THREADS, TASKS], ids=["threads", "tasks"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_script(server: RunningServer, program: str, number: int) -> None:
    """The handler finishes, its message is acknowledged, the script goes on after ``consume``, exit code 0."""
    with server.client() as client:
        client.publish_many("orders", [b"one", b"two"])
        process = start(program, server)
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            wait_until(lambda: client.subscription_stats("email")["in_flight"] == 1)
            process.stdin.write("\n")
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.wait()
        assert (out, err, process.returncode) == ("handled\nended\n", "", 0)
        stats = client.subscription_stats("email")
        assert (stats["acked"], stats["lag"], stats["members"]) == (1, 1, 0)


def test_a_second_ctrl_c_does_not_wait(server: RunningServer) -> None:
    """It interrupts the script, as it would without a worker; the message is delivered again."""
    with server.client() as client:
        client.publish("orders", b"one")
        program = THREADS.replace("sys.stdin.readline()", "__import__('time').sleep(60)")
        process = start(program, server)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            wait_until(lambda: not _catches(process.pid, signal.SIGTERM))
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)
            _, err = process.communicate()
        finally:
            process.kill()
            process.wait()
        assert "KeyboardInterrupt" in err
        assert process.returncode != 0
        assert client.subscription_stats("email")["lag"] == 1


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    [line] = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    ]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_program_keeps_its_own_handlers(api: Api) -> None:
    """A handler that the program has set is not replaced, and the default ones are back afterwards."""
    before = signal.signal(signal.SIGTERM, own := lambda number, frame: None)
    interrupt = signal.default_int_handler  # a program in the background may begin without it
    ignored = signal.signal(signal.SIGINT, interrupt)
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.extend([signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)])
        threading.Thread(target=api.unsubscribe_from_subscription, args=["email"]).start()

    try:
        api.publish("orders", b"x")
        api.consume("email", handle, "orders")
        assert seen[0] is own
        assert seen[1] is not interrupt
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)


def start(program: str, server: RunningServer) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, server.host, str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _stats(api: Api) -> Any:
    return api.subscription_stats("email")
