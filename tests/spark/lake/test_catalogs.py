"""Iceberg catalogs that are services: what is configured reaches them, and tables hold what they should."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Conflict, HeadraceError
from headrace.spark.lake import iceberg
from headrace.spark.lake.table import Table
from tests.fixtures.rest_catalog import CREDENTIAL, TOKEN, RestCatalogServer, rest_catalog
from tests.spark.lake.rig import SCHEMA, add, rows, table_at

MakeTable = Callable[..., Table]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestCatalogServer]:
    with rest_catalog(tmp_path) as found:
        yield found


@pytest.fixture
def table_in(server: RestCatalogServer, tmp_path: Path) -> MakeTable:
    """``table_in()``: another object for the same table, as another process has it."""

    def make(**more: str) -> Table:
        given = {
            "catalog": "prod",
            "table": "shop.orders",
            "catalog.type": "rest",
            "catalog.uri": server.uri,
            "catalog.warehouse": "lake",
            "catalog.credential": CREDENTIAL,
            "catalog.oauth2-server-uri": f"{server.uri}/v1/oauth/tokens",
            **more,
        }
        given = {name: each for name, each in given.items() if each}
        return table_at(tmp_path / "orders", "iceberg", **given)

    return make


# --- REST -------------------------------------------------------------------------------------------
def test_a_table_in_a_rest_catalog(table_in: MakeTable, server: RestCatalogServer) -> None:
    """Created, written, repeated, refused, joined: all of it through the catalog, with its login."""
    table = table_in()
    assert not table.exists()
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10))
    assert add(table_in(), 1, rows(10, 30))
    assert not add(table_in(), 1, rows(10, 30)), "this number was committed"
    with pytest.raises(Conflict, match="holds orders/0@5-9 already"):
        add(table_in(), 2, rows(5, 10))
    assert table_in().exists()
    kept = server.catalog.load_table("shop.orders")
    assert kept.scan().to_arrow()["offset"].to_pylist() == list(range(30)) or sorted(
        kept.scan().to_arrow()["offset"].to_pylist()
    ) == list(range(30))
    [config, *_] = [each for each in server.noted if each.path.endswith("/config")]
    assert config.query["warehouse"] == ["lake"]
    asked = [each for each in server.noted if not each.path.endswith("/oauth/tokens")]
    assert {each.headers["Authorization"] for each in asked} == {f"Bearer {TOKEN}"}
    assert all("/v1/lake/namespaces" in e.path for e in asked if not e.path.endswith("/config"))


def test_a_token_headers_and_properties_of_a_table(
    table_in: MakeTable, server: RestCatalogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Databricks' Unity Catalog takes them; what the catalog says about a table's files is what reads them."""
    server.config = {"s3.endpoint": "http://127.0.0.1:1", "s3.session-token": "of the table"}
    more = {"catalog.credential": "", "catalog.token": TOKEN, "catalog.header.X-Team": "shop"}
    table_in(**more).prepare(SCHEMA)
    assert not [each for each in server.noted if each.path.endswith("/oauth/tokens")]
    assert {each.headers.get("X-Team") for each in server.noted} == {"shop"}
    made: Any = table_in(**more)
    with made._opened() as table:
        assert table.io.properties["s3.session-token"] == "of the table"
        assert table.io.properties["s3.request-timeout"] == iceberg.PATIENCE["s3.request-timeout"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"catalog.credential": "reader:wrong"}, "catalog_forbidden"),
        ({"catalog.credential": "", "catalog.token": "wrong"}, "catalog_forbidden"),
        ({"catalog.uri": "http://127.0.0.1:1/api/catalog"}, "catalog_unavailable"),
        ({"catalog.type": "rust"}, "invalid_option"),
    ],
    ids=str,
)
def test_what_is_configured_wrong(table_in: MakeTable, more: dict[str, str], code: str) -> None:
    """One sentence, and none of the secrets."""
    with pytest.raises(HeadraceError) as caught:
        table_in(**more).exists()
    assert caught.value.code == code
    assert "wrong" not in caught.value.message


# --- what is passed on ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "properties",
    [
        {"type": "glue", "glue.region": "eu-central-1", "glue.id": "123", "s3.region": "eu-central-1"},
        {"type": "rest", "uri": "https://x/api/2.1/unity-catalog/iceberg-rest", "token": "T", "warehouse": "main"},
        {"type": "sql", "uri": "postgresql+psycopg2://u@db/iceberg", "adls.account-name": "a", "adls.account-key": "k"},
        {"type": "rest", "uri": "https://x", "gcs.project-id": "p", "gcs.oauth2.token": "t"},
    ],
    ids=["glue", "unity", "azure", "google"],
)  # fmt: skip
@pytest.mark.parametrize("way", ["options", "environment"])
def test_every_property_reaches_pyiceberg(
    properties: dict[str, str], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name, from options and from the environment; ours are only added."""
    found: dict[str, Any] = {}

    def load(name: str, **given: Any) -> Any:
        found.update(given, name=name)
        raise ValueError("enough")

    monkeypatch.setattr(iceberg, "load_catalog", load)
    options = {"catalog": "prod", "table": "shop.orders"}
    if way == "options":
        options |= {f"catalog.{name}": each for name, each in properties.items()}
    else:
        for name, each in properties.items():
            words = name.upper().replace("-", "_").replace(".", "__")
            monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{words}", each)
    with pytest.raises(HeadraceError):
        table_at("s3://lake/orders", "iceberg", **options).exists()  # type: ignore[arg-type]
    assert properties.items() <= found.items()
    assert found["name"] == "prod"
    ours = set(found) - set(properties) - {"name"}
    assert ours <= set(iceberg.PATIENCE) | {"s3.region"}
