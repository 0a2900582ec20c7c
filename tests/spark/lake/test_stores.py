"""Tables in an object store hold what tables on a disk hold, whatever the store does meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from headrace.errors import Conflict, HeadraceError, InvalidArgument
from headrace.spark import lake
from headrace.spark.lake import Span, stores
from headrace.spark.lake.table import Table
from headrace.spark.lake.tables import find_table
from tests.fakes.tcp_proxy import ProxyProcess
from tests.fixtures.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.spark.lake.rig import SCHEMA, add, rows, table_at, written

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.slow, pytest.mark.timeout(1200)]
IMPATIENT = {"storage.max_retries": "1", "storage.retry_timeout": "3s", "storage.timeout": "3s"}
MakeTable = Callable[..., Table]


@pytest.fixture(params=lake.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def table_in(s3: str, kind: str, tmp_path: Path) -> MakeTable:
    """``table_in()``: another object for the same table, as another process has it."""

    def make(**options: Any) -> Table:
        more = {} if kind == "delta" else {"catalog.uri": f"sqlite:///{tmp_path}/catalog.db"}
        return table_at(f"{s3}/lake/orders", kind, **more, **options)  # type: ignore[arg-type]

    return make


def offsets_in_store(table: Table) -> list[int]:
    """The offsets of all rows, sorted; twice what is there twice."""
    store = table.store()
    found: list[int] = []
    for name, _ in table.sizes():
        with store.filesystem.open_input_file(store.path(name)) as file:
            found += parquet.read_table(file, columns=["offset"])["offset"].to_pylist()
    return sorted(found)


def test_a_whole_life(table_in: MakeTable, kind: str) -> None:
    """Created, written, repeated, refused, joined and vacuumed, as on a disk."""
    table = table_in()
    assert not table.exists()
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10), rows(0, 5, partition=1))
    assert add(table_in(), 1, rows(10, 30), rows(0, 2, topic="other topic:x"))
    assert not add(table_in(), 1, rows(10, 30)), "this number was committed"
    with pytest.raises(Conflict, match="holds orders/0@5-9 already"):
        add(table_in(), 0, rows(5, 10), app="another query")
    found = table_in().describe()
    assert (found.kind, found.rows, found.files) == (kind, 37, 3)
    assert list(found.offsets) == [
        Span("orders", 0, 0, 30),
        Span("orders", 1, 0, 5),
        Span("other topic:x", 0, 0, 2),
    ]
    assert found.schema == SCHEMA
    lost, kept = written(table, rows(30, 35)), written(table, rows(35, 40))
    table.commit("query", 2, [kept])
    table.forget([lost, kept])
    store = table.store()
    names = {name for name, _ in store.files()}
    assert {name for name, _ in table.sizes()} == {store.name(path) for path in table.paths()}
    assert kept.files[0].path in names
    assert lost.files[0].path not in names
    assert table.compact(1 << 27).added == 1
    assert table.vacuum(keep_s=0) >= 3
    assert len(offsets_in_store(table_in())) == 42


def test_a_prefix_with_other_files_is_left_alone(table_in: MakeTable) -> None:
    """A vacuum would delete files that are not the table's."""
    table = table_in()
    store = table._store_at(table.path)
    parquet.write_table(
        pa.table({"x": [1]}), store.path("mine.parquet"), filesystem=store.filesystem
    )
    with pytest.raises(InvalidArgument, match=r"not empty \(mine.parquet\)"):
        table.prepare(SCHEMA)


def test_two_drivers_of_one_query(table_in: MakeTable, kind: str) -> None:
    """A store has no locks: the one that comes second finds its number committed, or its offsets."""
    table_in().prepare(SCHEMA)
    step = "_load" if kind == "delta" else "_opened"

    def overtake(table: Any, number: int, app: str, batch: Any) -> None:
        """Another process commits after this one has looked at the table."""
        original = getattr(table, step)

        def look() -> Any:
            delattr(table, step)
            if kind == "iceberg":
                return meanwhile(original(), number, app, batch)
            found = original()
            assert add(table_in(), number, batch, app=app)
            return found

        setattr(table, step, look)

    class meanwhile:
        def __init__(self, inner: Any, *commit: Any):
            self.inner, self.commit = inner, commit

        def __enter__(self) -> Any:
            found = self.inner.__enter__()
            number, app, batch = self.commit
            assert add(table_in(), number, batch, app=app)
            return found

        def __exit__(self, *error: Any) -> Any:
            return self.inner.__exit__(*error)

    late = table_in()
    batch = written(late, rows(0, 10))
    overtake(late, 0, "query", rows(0, 10))
    assert not late.commit("query", 0, [batch])
    late = table_in()
    batch = written(late, rows(10, 20))
    overtake(late, 0, "other", rows(15, 25))
    with pytest.raises(Conflict, match="holds orders/0@15-19 already"):
        late.commit("query", 1, [batch])
    late = table_in()
    batch = written(late, rows(30, 40))
    overtake(late, 1, "other", rows(25, 30))
    assert late.commit("query", 1, [batch]), "they do not disturb each other"
    found = table_in()
    assert offsets_in_store(found) == [*range(10), *range(15, 40)]
    assert list(found.describe().offsets) == [Span("orders", 0, 0, 10), Span("orders", 0, 15, 40)]


def test_many_writers_at_once(table_in: MakeTable) -> None:
    """Each commit is there once, and the ranges are those of all."""
    table_in().prepare(SCHEMA)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(3):
                first = number * 100 + step * 10
                assert add(table_in(), step, rows(first, first + 10), app=f"query-{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    wanted = [n for base in (0, 100, 200) for n in range(base, base + 30)]
    assert offsets_in_store(table_in()) == wanted
    assert table_in().describe().offsets.count == 90


# --- errors ---------------------------------------------------------------------------------------
def refusal(make: Callable[[], Any]) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        make()
    told = str(caught.value)
    assert SECRET_KEY not in told
    assert ACCESS_KEY not in told
    assert "Traceback" not in told
    assert caught.value.__cause__ is None, "Spark prints causes, and theirs repeat what was sent"
    return caught.value


def test_errors_say_what_to_do(
    table_in: MakeTable, s3: str, s3_server: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bucket, a wrong key, no key, no store: each has its code and its advice, and tells no secret."""
    more = IMPATIENT if kind == "delta" else {}
    bucket = s3.removeprefix("s3://")
    missing = table_in(**more)
    monkeypatch.setattr(missing, "path", stores.StoreAddress("s3://no-such-bucket-here/x/y"))
    found = refusal(lambda: missing.prepare(SCHEMA))
    assert (found.code, found.retryable) == ("bucket_not_found", False)
    assert "create it, or correct the address" in str(found)
    for name, value in (("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "NOBODY")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            found = refusal(lambda: table_in(**more).prepare(SCHEMA))
            assert (found.code, found.retryable) == ("store_forbidden", False), found
            assert "AWS_SECRET_ACCESS_KEY" in str(found)
            assert bucket in str(found)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        found = refusal(lambda: table_in(**more).prepare(SCHEMA))
        assert (found.code, found.retryable) == ("store_unavailable", True), found
        assert "try again" in str(found)


def test_no_credentials(table_in: MakeTable, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is another sentence than wrong ones."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = refusal(lambda: table_in(**(IMPATIENT if kind == "delta" else {})).prepare(SCHEMA))
    assert found.code == "store_forbidden"


def test_settings_instead_of_the_environment(
    s3: str, s3_server: S3Server, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries take everything as options, under their own names."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION", "ENDPOINT_URL", "ALLOW_HTTP"):
        monkeypatch.delenv(f"AWS_{name}")
    given = {
        "storage.AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "storage.AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "storage.AWS_REGION": "us-east-1",
        "storage.AWS_ENDPOINT_URL": s3_server.endpoint,
        "storage.AWS_ALLOW_HTTP": "true",
    }
    if kind == "iceberg":
        given = {
            "catalog.uri": f"sqlite:///{tmp_path}/catalog.db",
            "catalog.s3.access-key-id": ACCESS_KEY,
            "catalog.s3.secret-access-key": SECRET_KEY,
            "catalog.s3.region": "us-east-1",
            "catalog.s3.endpoint": s3_server.endpoint,
        }
    table = table_at(f"{s3}/lake/orders", kind, **given)  # type: ignore[arg-type]
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10))
    assert find_table(f"{s3}/lake/orders", **given).describe().rows == 10


# --- faults ---------------------------------------------------------------------------------------
def test_a_store_that_is_slow_refuses_and_cuts(table_in: MakeTable, s3_proxy: ProxyProcess) -> None:
    """A commit waits, is repeated, or fails; repeated, it is there once."""
    table_in().prepare(SCHEMA)

    def commit(number: int) -> bool:
        first = number * 10
        try:
            return add(table_in(), number, rows(first, first + 10))
        except HeadraceError as error:
            if not error.retryable:
                raise
            return commit(number)

    with s3_proxy.slow(0.5):
        commit(0)
    with s3_proxy.cutting(after=3_000):
        s3_proxy.heal_in(1.0)
        commit(1)
    assert s3_proxy.cuts
    with s3_proxy.refusing():
        s3_proxy.heal_in(1.0)
        commit(2)
    assert s3_proxy.refused
    s3_proxy.go_away()
    s3_proxy.heal_in(1.0)
    commit(3)
    assert offsets_in_store(table_in()) == list(range(40))
    assert list(table_in().describe().offsets) == [Span("orders", 0, 0, 40)]


# --- catalogs -------------------------------------------------------------------------------------
def test_a_catalog_of_the_configuration(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option names it, pyiceberg's configuration describes it, and options win over that."""
    (tmp_path / ".pyiceberg.yaml").write_text(
        f"catalog:\n  prod:\n    type: sql\n    uri: sqlite:///{tmp_path}/prod.db\n"
    )
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    given = {"catalog": "prod", "table": "shop.orders"}
    table = table_at(f"{s3}/orders", "iceberg", **given)  # type: ignore[arg-type]
    table.prepare(SCHEMA)
    assert add(table, 0, rows(0, 10))
    assert find_table(f"{s3}/orders", **given).describe().rows == 10
    other = {**given, "catalog.uri": f"sqlite:///{tmp_path}/other.db"}
    with pytest.raises(HeadraceError, match="there is no table"):
        find_table(f"{s3}/orders", **other)
    monkeypatch.setenv("PYICEBERG_CATALOG__TEAM__URI", f"sqlite:///{tmp_path}/team.db")
    assert not table_at(f"{s3}/orders", "iceberg", catalog="team").exists()  # type: ignore[arg-type]
    assert (tmp_path / "team.db").exists()


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        ({"catalog.uri": "http://127.0.0.1:1"}, "catalog_unavailable"),
        ({"catalog.uri": "sqlite:////no/such/directory/c.db"}, "catalog_unavailable"),
        ({"catalog": "nobody-configured-this"}, "invalid_option"),
        ({"catalog.type": "filing-cabinet"}, "invalid_option"),
        ({"catalog.uri": "postgresql://user:very-secret@127.0.0.1:1/x"}, "invalid_option"),
    ],
)
def test_catalogs_that_cannot_be_opened(properties: dict[str, str], code: str) -> None:
    """Each has a code, and tells nothing that may be secret."""
    with pytest.raises(HeadraceError) as caught:
        table_at("s3://bucket/orders", "iceberg", **properties).exists()  # type: ignore[arg-type]
    assert caught.value.code == code, caught.value
    assert "very-secret" not in str(caught.value)
