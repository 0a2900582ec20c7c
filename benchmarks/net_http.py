"""HTTP: one JSON message a ``POST`` and a batch a ``POST``, by wrk, beside an echo."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._loopback import JSON_VALUE, TOPIC, Latest, bare, broker, http_of, missing
from benchmarks.harness import Benchmark, Case
from headrace.testing import Address

BATCH = 1000
_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local one = '%s'
local parts = {}
for number = 1, %d do parts[number] = one end
wrk.body = %s
"""


@contextmanager
def prepared(*, quick: bool) -> Iterator[Benchmark | None]:
    if missing("wrk"):
        yield None
        return
    seconds = 1 if quick else 5
    with bare("http") as nothing, broker() as process, tempfile.TemporaryDirectory() as scripts:
        one = _script(Path(scripts) / "one.lua", "one")
        many = _script(Path(scripts) / "many.lua", '"[" .. table.concat(parts, ",") .. "]"')
        here = http_of(process)
        path = f"/publish/{TOPIC}"

        single = Latest(lambda: _wrk(one, here, path, 50, seconds))
        reference = "httptools and uvloop, an echo (reference)"
        yield Benchmark(
            "net_http",
            "POST over loopback, 100-byte JSON messages, fdatasync before each answer, wrk -c50",
            [
                Case(reference, lambda: _wrk(one, nothing, path, 50, seconds), "requests/s"),
                Case("POST /publish", single.take, "messages/s", 30_000),
                Case("POST /publish, the same, to the reference", single.again, "messages/s", 0.6, is_repeated=True,
                     reference=reference, relative=True),
                Case(f"POST /publish/batch, {BATCH:,} each",
                     lambda: BATCH * _wrk(many, here, f"/publish/batch/{TOPIC}", 10, seconds),
                     "messages/s", 300_000),
            ],
        )  # fmt: skip


def _script(path: Path, body: str) -> Path:
    path.write_text(_SCRIPT % (JSON_VALUE.decode(), BATCH, body))
    return path


def _wrk(script: Path, address: Address, path: str, connections: int, seconds: int) -> float:
    """Requests a second; an answer that is not 2xx is an error."""
    url = f"http://{address.host}:{address.port}{path}"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in text, text
    assert "Socket errors" not in text, text
    found = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert found, text
    return float(found[1])
