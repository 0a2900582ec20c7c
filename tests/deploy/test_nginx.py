"""``deploy/nginx.conf``, tried with a real nginx: HTTP, long polls, event streams, WebSockets and the TCP port.

nginx comes from the machine, or else from Debian's packages, which are unpacked into a temporary folder:
nothing is installed and no service starts. Where neither is possible, the tests are not tried, and the end
of the run says so; on a build server (``CI`` is set) they fail.
"""

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headrace import BrokerClient
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.test_certificates import make

CONFIG = Path(__file__).resolve().parents[2] / "deploy/nginx.conf"
TOKEN = "root-token-of-16"
PACKAGES = ("nginx", "libnginx-mod-stream")
MODULE = "usr/lib/nginx/modules/ngx_stream_module.so"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nginx(NamedTuple):
    program: Path
    module: Path


def find(root: Path) -> Nginx | None:
    program = next(
        (p for p in (root / "usr/sbin/nginx", root / "usr/bin/nginx") if p.exists()), None
    )
    return (
        None if program is None or not (root / MODULE).exists() else Nginx(program, root / MODULE)
    )


def unpacked(folder: Path) -> Nginx:
    """The packages of Debian, downloaded and unpacked."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise RuntimeError("nginx is not installed, and there is no apt-get to get it with")
    download = ["apt-get", "download", "-q", *PACKAGES]
    ran = subprocess.run(download, cwd=folder, capture_output=True, text=True, timeout=300)
    if ran.returncode and os.geteuid() == 0:  # no lists of packages yet
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, timeout=300)
        ran = subprocess.run(download, cwd=folder, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        raise RuntimeError(f"nginx is not installed and cannot be downloaded: {ran.stderr.strip()}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True, timeout=60)
    found = find(folder / "root")
    if found is None:
        raise RuntimeError(f"the packages {PACKAGES} have no nginx with {MODULE}")
    return found


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Nginx:
    try:
        return find(Path("/")) or unpacked(tmp_path_factory.mktemp("nginx"))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(f"NOT TRIED: deploy/nginx.conf: {error}")


class Proxy(NamedTuple):
    server: RunningServer
    port: int
    tcp_port: int
    ca: str

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    @contextmanager
    def open(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, not read yet."""
        connection = http.client.HTTPSConnection(
            "localhost", self.port, timeout=20, context=self.context
        )
        headers.setdefault("Authorization", f"Bearer {TOKEN}")
        with closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as answer:
                yield answer

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        with self.open(method, path, body, **headers) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content[:1] in (b"{", b"[") else content


def written(text: str, nginx: Nginx, folder: Path, places: dict[str, str]) -> Path:
    """The file that is shipped, with the ports, files and folders of this test. Each must be in it."""
    for old, new in places.items():
        assert old in text, f"deploy/nginx.conf has no {old!r}"
        text = text.replace(old, new)
    temporary = "".join(
        f"    {kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    text = user + text.replace("http {\n", "http {\n" + temporary, 1)
    path = folder / "nginx.conf"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def proxy(nginx: Nginx, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    pair = make(folder, "localhost", "DNS:localhost,IP:127.0.0.1")
    with running_server(token=TOKEN) as server:
        port, tcp_port = free_port(), free_port()
        places = {
            "include /etc/nginx/modules-enabled/*.conf;": f"load_module {nginx.module};",
            "/var/log/nginx/headrace.log": f"{folder}/access.log",
            "127.0.0.1:8080": f"127.0.0.1:{server.http_address.port}",
            "127.0.0.1:9999": f"127.0.0.1:{server.port}",
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "listen 9998 ssl": f"listen 127.0.0.1:{tcp_port} ssl",
            "/etc/ssl/certs/mill.pem": pair.certificate,
            "/etc/ssl/private/mill.key": pair.key,
            "worker_processes auto": "worker_processes 1",
            "worker_connections 16384": "worker_connections 512",
            "worker_rlimit_nofile 65536;": "",
        }
        config = written(CONFIG.read_text(), nginx, folder, places)
        settings = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
        command = [nginx.program, "-p", folder, "-c", config, "-g", settings]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            found = Proxy(server, port, tcp_port, pair.certificate)
            wait_until(lambda: _answers(found, process), 20, "nginx answers")
            yield found
        finally:
            process.terminate()
            process.communicate(timeout=20)


def _answers(proxy: Proxy, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, process.communicate()[1].decode()
    try:
        return proxy.ask("GET", "/health/ready")[0] == 200
    except OSError:
        return False


def test_requests_and_errors_pass(proxy: Proxy) -> None:
    """Publish, consume, settle; errors are the broker's own, and a message of a megabyte passes."""
    assert proxy.ask("POST", "/publish/orders", {"a": 1})[0] == 200
    status, message = proxy.ask("GET", "/consume/orders?ack=manual")
    assert (status, message["data"]) == (200, {"a": 1})
    assert proxy.ask("POST", "/ack", {"delivery": message["delivery"]})[0] == 200
    assert proxy.ask("POST", "/publish/large", "x" * 1_000_000)[0] == 200
    status, error = proxy.ask("POST", "/publish/large", "x" * 3_000_000)
    assert (status, error["error"]["code"]) == (413, "body_too_large")
    assert proxy.ask("GET", "/topics", Authorization="Bearer wrong")[0] == 401


def test_a_long_poll_waits(proxy: Proxy) -> None:
    """Its answer comes when the message does."""
    proxy.ask("GET", "/consume/later")
    with BrokerClient("127.0.0.1", proxy.server.port, token=TOKEN) as client:
        client.publish("later", "x", delay=0.5)
        began = time.monotonic()
        with proxy.open("GET", "/consume/later?wait=15000") as answer:
            assert (answer.status, json.loads(answer.read())["data"]) == (200, "x")
        assert time.monotonic() - began < 14


def test_an_event_leaves_at_once(proxy: Proxy) -> None:
    """nginx does not keep events in a buffer: each arrives while the stream is open."""
    with proxy.open("GET", "/stream/news") as events:
        assert events.headers["content-type"] == "text/event-stream"
        for number in range(3):
            proxy.ask("POST", "/publish/news", number)
            while not (line := events.readline()).startswith(b"data: "):
                assert line
            assert json.loads(line[6:])["data"] == number


def test_a_websocket_passes_and_its_origin_is_checked(proxy: Proxy) -> None:
    """The broker sees the name that the browser used, so its own pages are allowed and others are not."""
    url = f"wss://localhost:{proxy.port}/ws?token={TOKEN}"
    with connect(url, ssl=proxy.context, origin=f"https://localhost:{proxy.port}") as ws:  # type: ignore[arg-type]
        ws.send('{"type": "subscribe", "topic": "chat", "messageId": 1}')
        assert json.loads(ws.recv(10))["topic_created"] is True
        proxy.ask("POST", "/publish/chat", "hi")
        assert json.loads(ws.recv(10))["data"] == "hi"
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(url, ssl=proxy.context, origin="https://evil.example"),  # type: ignore[arg-type]
    ):
        pass
    assert refused.value.response.status_code == 403


def test_the_tcp_port_passes(proxy: Proxy) -> None:
    """A Python client publishes and consumes over TLS that ends in nginx."""
    with BrokerClient("localhost", proxy.tcp_port, token=TOKEN, ca=proxy.ca) as client:
        client.publish("parcels", b"x")
        with client.subscription("g", "parcels") as consumer:
            message = consumer.get(timeout=10)
            message.ack()
        assert message.value == b"x"


def test_metrics_are_for_this_network_and_tokens_are_not_logged(proxy: Proxy) -> None:
    """This machine may read them; the log of nginx has paths, and no queries."""
    assert proxy.ask("GET", "/metrics")[0] == 200
    with proxy.open("GET", f"/stream/news?token={TOKEN}"):
        pass
    log = Path(proxy.ca).parent / "access.log"
    wait_until(lambda: "/metrics" in log.read_text())
    assert TOKEN not in log.read_text()
