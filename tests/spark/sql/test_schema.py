"""What a topic looks like, going by some of its records."""

import orjson
import pytest

from headrace import BrokerClient
from headrace.spark.source.options import SourceOptions
from headrace.spark.source.stores import open_store
from headrace.spark.sql.catalog import Catalog
from headrace.spark.sql.schema import (
    FIELDS_MAX,
    INNER_FIELDS_MAX,
    Sample,
    columns,
    infer,
    take_sample,
)
from headrace.spark.sql.text import Schemas
from headrace.testing import RunningServer


def shape_of(*documents: object) -> str:
    values = [orjson.dumps(document) for document in documents]
    return str(infer(Sample(values, [], len(values))))


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([1, -5], "bigint"),
        ([1, None], "bigint"),
        ([1, 2.5], "double"),
        ([2**63], "decimal(20,0)"),
        ([2**63, 1], "decimal(20,0)"),
        ([2**63, 1.5], "double"),
        ([True, False], "boolean"),
        (["a"], "string"),
        (["2026-01-31T12:00:00Z"], "string"),
        ([1, "a"], "string"),
        ([True, 1], "string"),
        ([None], "string"),
        ([[1], [2.5]], "array<double>"),
        ([[]], "array<string>"),
        ([[1], 1], "string"),
        ([{"b": 1}, {"c": "x"}], "struct<b:bigint,c:string>"),
        ([{"b": 1}, {"b": "x"}], "struct<b:string>"),
        ([{"b": 1}, 7], "string"),
        ([{}], "map<string,string>"),
        ([[{"x": [1]}]], "array<struct<x:array<bigint>>>"),
        ([{"b": 1, "B": 2}], "struct<b:bigint>"),
    ],
)
def test_a_field_is_what_its_values_are(values: list[object], type_: str) -> None:
    """And where they differ, a text, which takes them all."""
    assert shape_of(*({"a": value} for value in values)) == f"a {type_}"


def test_fields_come_as_they_are_seen() -> None:
    """A field that only some have is a field."""
    assert shape_of({"id": "a"}, {"n": 1, "id": "b"}) == "id string, n bigint"


def test_an_object_with_many_fields_is_a_map() -> None:
    """Its keys are data."""
    wide = {f"user{number}": number for number in range(INNER_FIELDS_MAX + 1)}
    assert shape_of({"a": wide}) == "a map<string,bigint>"
    deep = {f"user{number}": {"n": number} for number in range(INNER_FIELDS_MAX + 1)}
    assert shape_of({"a": deep}) == "a map<string,struct<n:bigint>>"


def test_depth_has_an_end() -> None:
    """Beyond it, what is there is text."""
    deep: object = 1
    for _ in range(60):
        deep = {"a": deep}
    assert "string" in shape_of(deep)


def test_values_that_are_no_objects_are_text_or_bytes() -> None:
    """Going by most of them; one bad record makes no topic text."""
    assert str(infer(Sample([b"hello", b"{}"[:1]], [], 2))) == "value string"
    assert str(infer(Sample([b"1", b"2"], [], 2))) == "value string"
    assert str(infer(Sample([b"hello", b"\xff"], [], 2))) == "value binary"
    assert str(infer(Sample())) == "value string"
    mostly = infer(Sample([b'{"a": 1}', b'{"a": 2}', b"oops"], [], 3))
    assert str(mostly) == "a bigint"
    assert mostly.notes == ("1 of 3 records are no JSON objects; see the column _corrupt",)


def test_what_cannot_be_a_column_is_said() -> None:
    """Names that differ in case alone, names that are taken, and too many."""
    values = [b'{"id": 1, "ID": 2, "_offset": 3, "_Corrupt": 4, "": 5, "_mine": 6}']
    shape = infer(Sample(values, [], 1))
    assert str(shape) == "id bigint, _mine bigint"
    assert [note.split(" is ")[0] for note in shape.notes] == [
        "field 'ID'",
        "field '_offset'",
        "field '_Corrupt'",
        "field ''",
    ]
    wide = orjson.dumps({f"f{number}": number for number in range(FIELDS_MAX + 5)})
    shape = infer(Sample([wide], [], 1))
    assert len(shape.fields) == FIELDS_MAX
    assert "too many" in shape.notes[0]


def test_keys_are_text_if_all_are() -> None:
    """Else they are bytes."""
    assert infer(Sample([b"x"], [b"a"], 1)).key_is_text
    assert not infer(Sample([b"x"], [b"a", b"\xff"], 1)).key_is_text


def test_the_columns_of_a_view() -> None:
    """The fields or the value first, then what every record has."""
    own = ["_key", "_topic", "_partition", "_offset", "_timestamp", "_headers", "_id"]
    assert columns(infer(Sample([b'{"a": 1}'], [], 1))).names == ["a", "_corrupt", *own]
    found = columns(infer(Sample([b"\xff"], [b"\xff"], 1)))
    assert found.names == ["value", *own]
    assert [found["value"].dataType.simpleString(), found["_key"].dataType.simpleString()] == [
        "binary",
        "binary",
    ]


# --- over a broker --------------------------------------------------------------------------------
def where(server: RunningServer) -> dict[str, str]:
    return {"servers": f"{server.host}:{server.port}", "timeout": "10"}


def test_the_first_and_the_last_records_are_looked_at(
    server: RunningServer, client: BrokerClient
) -> None:
    """Of every partition, and not what lies between."""
    client.create_topic("orders", 2)
    for number in range(2):
        values = [f"{number}-{n}".encode() for n in range(500)]
        client.publish_many("orders", values, partition=number, keys=["k"] * 500)
    store = open_store(SourceOptions.of({**where(server), "topic": "orders"}))
    try:
        sample = take_sample(store, store.topics(["orders"]), 40)
        assert (len(sample.values), sample.total) == (40, 1000)
        assert set(sample.values) == {
            f"{number}-{n}".encode() for number in range(2) for n in (*range(10), *range(490, 500))
        }
        assert sample.keys == [b"k"] * 40
        everything = take_sample(store, store.topics(["orders"]), 5000)
        assert len(everything.values) == everything.total
        assert len(everything.values) == 1000
    finally:
        store.close()


class TestCatalog:
    @pytest.fixture
    def catalog(self, server: RunningServer) -> object:
        catalog = Catalog(where(server), Schemas({"declared": "text"}))
        yield catalog
        catalog.close()

    def test_names_and_sizes(self, catalog: Catalog, client: BrokerClient) -> None:
        """All topics, with what is in them."""
        assert catalog.listing() == []
        client.create_topic("orders", 2)
        client.publish_many("orders", [b"x"] * 10)
        client.publish_many("logs.eu", [b"x"])
        assert catalog.names() == ["logs.eu", "orders"]
        assert [each[:3] for each in catalog.listing()] == [("logs.eu", 1, 1), ("orders", 2, 10)]

    def test_a_name_is_found_in_any_case(self, catalog: Catalog, client: BrokerClient) -> None:
        """Unless there are two; a wildcard if it fits anything."""
        client.publish_many("Orders", [b"x"])
        assert catalog.find("ORDERS") == "Orders"
        client.publish_many("orders", [b"x"])
        assert catalog.find("ORDERS") is None
        assert catalog.find("orders") == "orders"
        assert catalog.find("or*") is None
        assert catalog.find("*") == "*"
        assert catalog.find("nothing.*") is None
        assert catalog.find("not a topic") is None

    def test_a_name_that_is_none(self, catalog: Catalog, client: BrokerClient) -> None:
        """The error says which are close, or which there are."""
        assert "no topics at all" in catalog.no_such("x").message
        client.publish_many("orders", [b"x"])
        client.publish_many("payments", [b"x"])
        assert "is it orders?" in catalog.no_such("ordres").message
        assert "there are orders, payments" in catalog.no_such("zzz").message
        assert catalog.no_such("x").code == "topic_not_found"

    def test_a_shape_is_found_out_once(self, catalog: Catalog, client: BrokerClient) -> None:
        """And again when there is more to look at, or another topic of the name."""

        def look(name: str) -> tuple[str, bool]:
            shape, is_news = catalog.shape(name, catalog.known(name))
            return str(shape), is_news

        client.create_topic("orders")
        assert look("orders") == ("value string", True)
        client.publish_many("orders", [b'{"a": 1}'])
        assert look("orders") == ("a bigint", True)
        assert look("orders") == ("a bigint", False)
        client.publish_many("orders", [b'{"b": 1}'] * 2000)
        assert look("orders") == ("b bigint, a bigint", True)
        client.publish_many("orders", [b'{"c": 1}'] * 2000)
        assert look("orders") == ("b bigint, a bigint", False)
        client.delete_topic("orders")
        client.publish_many("orders", [b"text"])
        assert look("orders") == ("value string", True)
        client.publish_many("declared", [b'{"a": 1}'])
        assert look("declared") == ("value string", False)
