"""The examples in examples/pipelines: each can be planned, and does what it says."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.spark import lake
from headrace.testing import RunningServer
from tests.spark.pipelines.rig import Bench, as_bytes

pytestmark = pytest.mark.xdist_group("spark")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "pipelines"


@pytest.fixture
def bench(spark: Any, server: RunningServer, tmp_path: Path) -> Bench:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    return Bench(spark, server, tmp_path)


def order(number: int, customer: str, amount: float, at: str) -> dict[str, Any]:
    return {"id": str(number), "customer": customer, "amount": amount, "at": f"2026-01-01T{at}Z"}


def test_every_example_says_how_it_is_run() -> None:
    for path in [*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.py")]:
        assert f"headrace pipeline run examples/pipelines/{path.name}" in path.read_text()


@pytest.mark.parametrize("name", ["orders.toml", "reviews.py", "shipped.toml"])
def test_every_example_can_be_run(bench: Bench, name: str) -> None:
    """As far as can be told without running it; that they do what they say, is told by the slow ones."""
    assert len(list(EXAMPLES.glob("*.toml")) + list(EXAMPLES.glob("*.py"))) == 3
    assert bench.plans(bench.folder / name)


@pytest.mark.slow
def test_orders(bench: Bench) -> None:
    """An hour's revenue without the order that came twice; a table; letters for what is no order."""
    first, bad = order(1, "ann", 5, "08:00:00"), order(2, "bob", -7, "08:30:00")
    bench.publish("orders", first, first, bad, order(3, "ann", 1, "10:00:00"))
    bench.publish("orders", b"rubbish")
    bench.run_once(bench.folder / "orders.toml")
    assert bench.objects("revenue") == [
        {"customer": "ann", "hour": "2026-01-01T08:00:00.000Z", "revenue": 5.0, "orders": 1}
    ]
    assert sorted(bench.values("revenue.dlq")) == sorted([b"rubbish", as_bytes(bad)])
    rows = lake.read(bench.spark, str(bench.folder / "lake" / "orders")).collect()
    assert sorted(row.id for row in rows) == ["1", "1", "2", "3"]
    assert set(rows[0].asDict()) == {"id", "customer", "amount", "at", "day", "arrived_at"}
    assert bench.values("orders-table.dlq") == [b"rubbish"]


@pytest.mark.slow
def test_shipped(bench: Bench) -> None:
    """Two topics and a file."""
    bench.publish("orders", order(1, "ann", 5, "08:00:00"), order(2, "eve", 5, "08:00:00"))
    bench.publish("shipments.eu", {"order_id": "1", "at": "2026-01-01T09:30:00Z"})
    bench.run_once(bench.folder / "shipped.toml")
    assert bench.objects("shipped") == [
        {
            "id": "1",
            "customer": "ann",
            "country": "SE",
            "shipped_at": "2026-01-01T09:30:00.000Z",
            "minutes": 90,
        }
    ]


@pytest.mark.slow
def test_reviews(bench: Bench) -> None:
    """A function for each row; what it raises is a reason. And a table that is whole every time."""
    bench.publish("reviews", b"lamp: **** bright", b"chair: ******", b"bed: *")
    bench.run_once(bench.folder / "reviews.py")
    assert bench.objects("stars") == [
        {"product": "bed", "stars": 1},
        {"product": "lamp", "stars": 4},
    ]
    with bench.server.client() as client:
        (letter,) = client.dead_letters("stars")
    assert letter.reason == "ValueError: it has no product, or not one to five stars"
    assert sum(each["count"] for each in bench.objects("reviews-by-minute")) == 3
