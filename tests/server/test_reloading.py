"""SIGHUP: certificates, log level and access rules are read again; what is bad changes nothing."""

import asyncio
import json
import shutil
import signal
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.server.reloading import Reloading
from headrace.settings import load
from headrace.testing import (
    RunningServer,
    ServerProcess,
    running_server,
    server_process,
    wait_until,
)
from tests.server.http_rig import Http, RawHttp, raw_request
from tests.server.test_certificates import Pair, make

NAMES = "DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    directory = tmp_path_factory.mktemp("tls")
    return [make(directory, name, NAMES) for name in ("first", "second")]


def put(pair: Pair, directory: Path) -> Pair:
    """The files that the settings name are replaced, as certbot does it."""
    there = Pair(str(directory / "cert.pem"), str(directory / "key.pem"))
    shutil.copy(pair.certificate, there.certificate)
    shutil.copy(pair.key, there.key)
    return there


def served(address: tuple[str, int]) -> str:
    return ssl.get_server_certificate(address, timeout=10).strip()


def hup(server: ServerProcess, sentence: str) -> None:
    """Send SIGHUP, and wait until the log has answered."""
    before = server.errors.count(sentence)
    server.signal(signal.SIGHUP)
    wait_until(lambda: server.errors.count(sentence) > before, what=sentence)


def test_a_signal_reloads_everything_and_ends_nothing(tmp_path: Path, pairs: list[Pair]) -> None:
    """New certificate, level, format and users; an open connection goes on, and so does the broker."""
    files = put(pairs[0], tmp_path)
    config = tmp_path / "headrace.json"

    def configure(**log: str) -> None:
        tls = {"tls_cert": files.certificate, "tls_key": files.key, "token": "root-token-of-16"}
        config.write_text(json.dumps({"server": tls, "log": log}))

    configure(level="info")
    with server_process(arguments=("--config", str(config))) as server:
        ca = tmp_path / "ca.pem"
        ca.write_text("".join(Path(pair.certificate).read_text() for pair in pairs))
        first, second = (Path(pair.certificate).read_text().strip() for pair in pairs)
        options: dict[str, Any] = {"token": "root-token-of-16", "ca": str(ca), "tls": True}
        with server.client(**options) as client:
            client.publish("orders", "before")
            assert served(server.address) == first
            put(pairs[1], tmp_path)
            hup(server, "reloaded:")
            assert served(server.address) == served(server.http_address) == second
            client.publish("orders", "after")

            shutil.copy(pairs[0].key, files.key)  # not the key of this certificate
            hup(server, "nothing was reloaded")
            assert "key values mismatch" in server.errors.lower()
            assert served(server.address) == second
            put(pairs[1], tmp_path)

            config.write_text("{")
            hup(server, "is not JSON")
            configure(level="loud")
            hup(server, "log_level")
            assert server.errors.count("headrace.audit") == 1, "of the topic that was created"
            configure(level="info", format="json")
            hup(server, "log_format")
            client.create_topic("payments")
            wait_until(lambda: "create_topic" in server.errors)
            assert json.loads(server.errors.splitlines()[-1])["action"] == "create_topic"
            configure(level="warning", format="json")
            server.signal(signal.SIGHUP)
            wait_until(lambda: _is_silent(server, client))
            assert client.topic_stats("orders")["messages"] == 2
        assert server.terminate() == 0


def _is_silent(server: ServerProcess, client: Any) -> bool:
    """Whether a change is not logged any more."""
    before = len(server.errors)
    client.change_topic("payments", retention_hours=1)
    return len(server.errors) == before


def reload(server: RunningServer, **settings: Any) -> None:
    """As the signal does it, with other settings."""
    core = server.server
    known = {name: value for name, value in server._settings.items() if value is not None}
    config = server._directory / "config.json"
    new = load({**known, "port": 0, "http_port": 0, **settings}, {}, config)
    reloading = Reloading(core, lambda: new)
    asyncio.run_coroutine_threadsafe(reloading.reload(), core.engine.loop).result(10)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of the tests stays as it is."""
    monkeypatch.setattr("headrace.server.logs.set_up", lambda level, log_format: None)


def test_a_new_token_ends_the_logins_of_the_old_one(caplog: pytest.LogCaptureFixture) -> None:
    """So a token can be changed without a restart."""
    with running_server(memory=True, token="first-token-of-16") as server:
        with closing(Http(server.http_address, "first-token-of-16")) as http:
            assert http.get("/topics").status == 200
            reload(server, token="second-token-of-16")
            assert http.get("/topics").status == 401
        with closing(Http(server.http_address, "second-token-of-16")) as http:
            assert http.get("/topics").status == 200
        assert "second-token" not in caplog.text


def test_origins_are_taken_over_also_by_connections_that_are_known() -> None:
    """A head that was admitted before is looked at again."""
    request = raw_request("POST", "/publish/orders", b"{}", origin="https://a.example")
    with running_server(memory=True, allowed_origins="https://a.example") as server:
        with RawHttp(server.http_address) as http:
            for _ in range(3):
                http.send(request)  # in one piece, so that its head is known the next time
                assert http.answer().status == 200
            reload(server, allowed_origins="https://b.example")
            http.send(request)
            assert http.answer().status == 403
        reload(server, allowed_origins="https://a.example")
        with RawHttp(server.http_address) as http:
            http.send(request)
            assert http.answer().status == 200


def test_what_needs_a_restart_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It stays as it was, and the next reload names it again."""
    caplog.set_level("INFO")
    with running_server(memory=True) as server:
        for _ in range(2):
            caplog.clear()
            reload(server, max_connections=7, log_level="debug")
            assert "changed, but needs a restart: max_connections" in caplog.text
        assert server.server.settings.max_connections == 15_000
        assert server.server.settings.log_level == "debug"


def test_bad_settings_change_nothing(tmp_path: Path, pairs: list[Pair]) -> None:
    """Not one of them is taken over: TLS cannot begin here, and an open door is refused."""
    pair = pairs[0]
    with running_server(memory=True, token="first-token-of-16") as server:
        for bad in (
            {"tls_cert": pair.certificate, "tls_key": pair.key},
            {"host": "0.0.0.0", "token": "short"},
        ):
            with pytest.raises(HeadraceError):
                reload(server, **{"token": "second-token-of-16", **bad})
            with closing(Http(server.http_address, "first-token-of-16")) as http:
                assert http.get("/topics").status == 200


def test_a_broken_access_file_leaves_the_rules_in_force(tmp_path: Path) -> None:
    """The signal looks at once; so it does when the file is good again."""
    with server_process(tmp_path / "data", token="root-token-of-16") as server:
        with server.client() as client:
            secret = client.create_token("ci", grants=["browse:>"])["secret"]
        file = tmp_path / "data" / "@access.json"
        good = file.read_bytes()
        file.write_bytes(good.replace(b"ci", b"ic"))
        hup(server, "the last good rules stay in force")
        with closing(Http(server.http_address, secret)) as http:
            assert http.get("/topics").status == 200
            assert http.get("/health/ready").status == 503
            file.write_bytes(good)
            wait_until(lambda: http.get("/health/ready").status == 200)
