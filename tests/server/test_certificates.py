"""Client certificates: a name in one is a user, on every port."""

import http.client
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.errors import InvalidArgument, Unauthenticated
from headrace.server.logins import certificate_names
from headrace.server.server import make_tls
from headrace.settings import load
from headrace.testing import RunningServer, running_server


class Pair(NamedTuple):
    certificate: str
    key: str


def make(directory: Path, name: str, alternative: str) -> Pair:
    """A certificate that signs itself, and its key."""
    found = Pair(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}",
         "-keyout", found.key, "-out", found.certificate],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directory = tmp_path_factory.mktemp("tls")
    return {
        "server": make(directory, "localhost", "DNS:localhost,IP:127.0.0.1"),
        "billing": make(directory, "billing", "DNS:billing.example.org"),
        "stranger": make(directory, "stranger", "DNS:billing.example.org"),
    }


@pytest.fixture
def server(pairs: dict[str, Pair]) -> Iterator[RunningServer]:
    with running_server(
        memory=True,
        token="root-token",
        tls_cert=pairs["server"].certificate,
        tls_key=pairs["server"].key,
        tls_client_ca=pairs["billing"].certificate,
    ) as running:
        ca = pairs["server"].certificate
        with running.client(tls=True, ca=ca) as root:
            root.create_user(
                "billing", certificates=["billing.example.org"], grants=["publish:orders"]
            )
        yield running


class Https:
    """A kept connection, with or without a certificate."""

    def __init__(self, server: RunningServer, ca: str, pair: Pair | None):
        context = ssl.create_default_context(cafile=ca)
        if pair is not None:
            context.load_cert_chain(*pair)
        host, port = server.http_address
        self._connection = http.client.HTTPSConnection(host, port, context=context, timeout=15)

    def whoami(self) -> tuple[int, str]:
        self._connection.request("GET", "/access/whoami", headers={"Host": "localhost"})
        answer = self._connection.getresponse()
        document = json.loads(answer.read())
        return answer.status, document.get("name") or document["error"]["code"]

    def close(self) -> None:
        self._connection.close()


def test_a_certificate_is_a_login(server: RunningServer, pairs: dict[str, Pair]) -> None:
    """On both ports; a request with the same head and no certificate is nobody's."""
    ca = pairs["server"].certificate
    with server.client(token=None, ca=ca, certificate=pairs["billing"]) as client:
        assert client.whoami()["name"] == "user:billing"
        client.publish("orders", b"x")
    known, unknown = Https(server, ca, pairs["billing"]), Https(server, ca, None)
    for _ in range(3):
        assert known.whoami() == (200, "user:billing")
        assert unknown.whoami() == (401, "unauthenticated")
    with server.client(ca=ca) as root:
        root.change_user("billing", certificates=[])
    assert known.whoami() == (401, "unauthenticated")
    known.close()
    unknown.close()


def test_a_certificate_of_another_authority_is_none(
    server: RunningServer, pairs: dict[str, Pair]
) -> None:
    """Whatever name it has."""
    with pytest.raises(OSError):  # noqa: PT011
        Https(server, pairs["server"].certificate, pairs["stranger"]).whoami()


def test_without_a_certificate_a_token_is_needed(
    server: RunningServer, pairs: dict[str, Pair]
) -> None:
    """As without client certificates."""
    ca = pairs["server"].certificate
    with pytest.raises(Unauthenticated), server.client(token=None, ca=ca) as client:
        client.topics()
    with server.client(ca=ca) as client:
        assert client.whoami()["administrator"]


def test_the_authority_is_checked_at_the_start(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """A file that is none, and one without TLS."""
    with pytest.raises(InvalidArgument, match="needs TLS"):
        make_tls(load({"tls_client_ca": "x.pem"}))
    both = {"tls_cert": pairs["server"].certificate, "tls_key": pairs["server"].key}
    with pytest.raises(InvalidArgument, match="cannot be used"):
        make_tls(load({**both, "tls_client_ca": str(tmp_path / "none.pem")}))


def test_names_of_a_certificate() -> None:
    """The alternative names before the common name; addresses are no names."""
    certificate = {
        "subject": ((("countryName", "CH"),), (("commonName", "alice"),)),
        "subjectAltName": (("DNS", "a.example"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://a")),
    }
    assert certificate_names(certificate) == ["a.example", "spiffe://a", "alice"]
    assert certificate_names(None) == []
    assert certificate_names({}) == []
