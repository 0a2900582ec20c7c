"""docs/python.md: every program on the page runs, and prints what the page says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import RunningServer, running_server, wait_until
from tests.docs.blocks import Block, blocks, read

TEXT = read("docs/python.md")
BLOCKS = [block for block in blocks(TEXT) if block.language == "python"]
PLAIN = [block for block in BLOCKS if not block.words]


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def one(word: str) -> Block:
    [found] = [block for block in BLOCKS if block.words == [word]]
    return found


def program(block: Block, server: RunningServer) -> str:
    text = block.text.replace('"localhost", 9999', f'"{server.host}", {server.port}')
    return text.replace('"localhost:9999"', f'"{server.host}:{server.port}"')


def expected(block: Block) -> str:
    lines = [line[3:] for line in block.text.splitlines() if line.startswith("#: ")]
    return "".join(f"{line}\n" for line in lines)


def start(text: str, folder: Path) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", text],
        cwd=folder,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()


def test_every_block_is_run() -> None:
    """There is no block of another kind: each is run by a test of this file."""
    assert {block.language for block in blocks(TEXT)} == {"python"}
    words = sorted(word for block in BLOCKS for word in block.words)
    assert words == ["django", "fastapi", "test", "worker"]
    assert len(PLAIN) >= 8


@pytest.mark.parametrize("block", PLAIN, ids=[f"line {block.line}" for block in PLAIN])
def test_a_program_prints_what_the_page_says(
    block: Block, server: RunningServer, tmp_path: Path
) -> None:
    """As a reader would run it, in an empty folder."""
    process = start(program(block, server), tmp_path)
    out, err = finished(process)
    # The handler that fails on purpose is logged, with its traceback.
    assert process.returncode == 0, err
    assert out == expected(block)
    assert not err or "the handler failed" in err or "nobody waited for it" in err


def test_the_worker_ends_with_ctrl_c(server: RunningServer, tmp_path: Path) -> None:
    """It handles its message, is interrupted, and goes on after ``consume``."""
    process = start(program(one("worker"), server), tmp_path)
    with server.client() as client:
        wait_until(lambda: _is_done(client, "mailer"))
        process.send_signal(signal.SIGINT)
        assert finished(process) == (expected(one("worker")), "")
        assert process.returncode == 0


def _is_done(client: object, name: str) -> bool:
    return any(s["name"] == name and s["acked"] for s in client.subscriptions())  # type: ignore[attr-defined]


def test_the_tests_pass(tmp_path: Path) -> None:
    """With the fixtures, as the page says how to get them."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["headrace.testing.fixtures"]\n')
    (tmp_path / "test_orders.py").write_text(one("test").text)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr


FASTAPI = """
import asyncio

async def drive():
    events, sent = asyncio.Queue(), asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, sent.put))
    await events.put({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
             "path": "/orders/7", "raw_path": b"/orders/7", "root_path": "", "scheme": "http",
             "query_string": b"", "headers": [], "client": None, "server": None}
    answer = []
    async def body():
        return {"type": "http.request", "body": b"", "more_body": False}
    async def send(event):
        answer.append(event)
    await app(scope, body, send)
    print(answer[0]["status"], answer[1]["body"].decode())
    while not handled:
        await asyncio.sleep(0.01)
    print(handled)
    await events.put({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await life

asyncio.run(drive())
"""


def test_fastapi(server: RunningServer, tmp_path: Path) -> None:
    """The application starts, publishes for a request, handles the message and stops."""
    process = start(program(one("fastapi"), server) + FASTAPI, tmp_path)
    out, err = finished(process)
    assert (out, err) == ("200 {\"offset\":0}\n['order 7']\n", "")


DJANGO = """
import sys
from django.conf import settings

settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="__main__", ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
import django
django.setup()
"""
DJANGO_DRIVEN = """
from django.core.management import call_command
from django.test import Client
from django.urls import path

urlpatterns = [path("orders/<int:number>", order)]
print(Client().post("/orders/7").json())
call_command(Command())
broker().close()
print("ended")
"""


def test_django(server: RunningServer, tmp_path: Path) -> None:
    """The view publishes after the commit, and the command handles it until it is stopped."""
    text = DJANGO + program(one("django"), server) + DJANGO_DRIVEN
    process = start(text, tmp_path)
    with server.client() as client:
        wait_until(lambda: _is_done(client, "billing"))
        process.send_signal(signal.SIGTERM)
        out, err = finished(process)
    assert (out, err) == ("{'order': 7}\nbilled order 7\nended\n", "")
