"""What an idle connection costs the server: resident memory before and after, by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks._loopback import (
    Load,
    allow_open_files,
    broker,
    handshake,
    http_of,
    kilobytes_each,
    loading,
    ws_subscribe,
)
from benchmarks.harness import Benchmark, Case


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    many = min(1_000 if quick else 10_000, allow_open_files() - 500)
    with loading() as load:
        if load is None:
            yield None
            return
        yield Benchmark(
            "net_connections",
            f"{many:,} connections held",
            [
                Case("text, after one PING", lambda: _text(load, many), "KB each", 10, smaller=True),
                Case("HTTP, after one request", lambda: _http(load, many), "KB each", smaller=True),
                Case("WebSocket, subscribed", lambda: _websocket(load, many), "KB each", smaller=True),
            ],
            repeat=3,
        )  # fmt: skip


def _text(load: Load, many: int) -> float:
    with broker() as process:
        before = process.rss_bytes()
        with load.listening(process.address, "lines", many, b"PING\r\n") as listeners:
            assert listeners.counts()["open"] == many
            return kilobytes_each(before, process.rss_bytes(), many)


def _http(load: Load, many: int) -> float:
    """Of the answer, the head is awaited, as that of a handshake is; its body has no line end."""
    with broker() as process:
        before = process.rss_bytes()
        request = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        with load.listening(http_of(process), "lines", many, request, 0) as listeners:
            assert listeners.counts()["open"] == many
            return kilobytes_each(before, process.rss_bytes(), many)


def _websocket(load: Load, many: int) -> float:
    with broker() as process:
        address = http_of(process)
        before = process.rss_bytes()
        greeting = handshake(address) + ws_subscribe()
        with load.listening(address, "frames", many, greeting) as listeners:
            assert listeners.counts()["open"] == many
            return kilobytes_each(before, process.rss_bytes(), many)
