"""What is configured for Azure and Google reaches their protocols: asked of a server on loopback that notes it."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

from tests.spark.lake.rig import table_at

IMPATIENT = {
    "storage.allow_http": "true",
    "storage.max_retries": "0",
    "storage.retry_timeout": "2s",
}
AZURE = "abfss://lake@shop.dfs.core.windows.net/orders"
KEY = base64.b64encode(b"k" * 32).decode()


class Noted(NamedTuple):
    path: str
    authorization: str


class EmptyStore(ThreadingHTTPServer):
    """Has no object, and says so in both protocols."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.noted: list[Noted] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: EmptyStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization") or ""
        self.server.noted.append(Noted(self.path, authorization))
        content = b""
        if "comp=list" in self.path:
            content = b"<EnumerationResults><Blobs></Blobs><NextMarker/></EnumerationResults>"
        elif "list-type=2" in self.path:
            content = b"<ListBucketResult></ListBucketResult>"
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def store() -> Iterator[EmptyStore]:
    server = EmptyStore()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(store: EmptyStore, path: str, **options: str) -> list[Noted]:
    """What the store was asked for a Delta table that does not exist."""
    table = table_at(path, "delta", **IMPATIENT, **options)  # type: ignore[arg-type]
    assert not table.exists()
    assert store.noted
    return store.noted


@pytest.mark.parametrize("way", ["options", "environment"])
def test_azure_with_an_account_and_a_key(
    store: EmptyStore, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests go to the container, signed with the key."""
    given = {"azure_storage_account_name": "shop", "azure_storage_account_key": KEY}
    options = {"storage.azure_storage_endpoint": f"{store.url}/shop"}
    if way == "options":
        options |= {f"storage.{name}": each for name, each in given.items()}
    else:
        for name, each in given.items():
            monkeypatch.setenv(name.upper(), each)
    for each in asked(store, AZURE, **options):
        assert each.path.startswith(("/shop/lake/orders/_delta_log/", "/shop/lake?"))
        assert each.authorization.startswith("SharedKey shop:")


def test_azure_with_a_sas_token(store: EmptyStore) -> None:
    """The token stands in each request."""
    options = {
        "storage.azure_storage_account_name": "shop",
        "storage.azure_storage_sas_token": "sv=2024-01-01&sig=abc",
        "storage.azure_storage_endpoint": f"{store.url}/shop",
    }
    for each in asked(store, AZURE, **options):
        assert "sig=abc" in each.path
        assert each.authorization == ""


def test_google_with_a_service_account(store: EmptyStore) -> None:
    """The key of a service account, as JSON; an emulator needs no login."""
    key = {"gcs_base_url": store.url, "disable_oauth": True, "client_email": "", "private_key": ""}
    options = {"storage.google_service_account_key": json.dumps({**key, "private_key_id": ""})}
    for each in asked(store, "gs://lake/orders", **options):
        assert each.path.startswith(("/lake/orders%2F", "/lake?"))
