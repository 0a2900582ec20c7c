"""JSON patches, as dead letters are changed by them."""

import json
from typing import Any

import pytest

from headrace.broker.transforming import check_transform, transformed
from headrace.errors import InvalidArgument

ORDER = {"id": 1, "items": [{"price": 2}, {"price": 3}], "a/b": {"c~d": 1}}


def patched(patch: Any, document: Any = ORDER) -> Any:
    check_transform(patch)
    return json.loads(transformed(json.dumps(document).encode(), patch))


@pytest.mark.parametrize(
    ("patch", "changes"),
    [
        ({"id": 2}, {"id": 2}),
        ({"id": None}, {"id": ...}),
        ({"new": {"deep": {"er": 1, "gone": None}}}, {"new": {"deep": {"er": 1}}}),
        ([{"op": "add", "path": "/items/1", "value": 0}], {"items": [{"price": 2}, 0, {"price": 3}]}),
        ([{"op": "add", "path": "/items/-", "value": 0}], {"items": [{"price": 2}, {"price": 3}, 0]}),
        ([{"op": "remove", "path": "/items/0"}], {"items": [{"price": 3}]}),
        ([{"op": "replace", "path": "/a~1b/c~0d", "value": 5}], {"a/b": {"c~d": 5}}),
        ([{"op": "move", "from": "/id", "path": "/number"}], {"id": ..., "number": 1}),
        ([{"op": "copy", "from": "/id", "path": "/items/0/price"}], {"items": [{"price": 1}, {"price": 3}]}),
        ([{"op": "test", "path": "/id", "value": 1}], {}),
    ],
)  # fmt: skip
def test_a_patch_changes_what_it_says(patch: Any, changes: dict[str, Any]) -> None:
    """The rest stays as it was."""
    wanted = {**ORDER, **changes}
    assert patched(patch) == {name: value for name, value in wanted.items() if value is not ...}


def test_the_whole_document_can_be_replaced() -> None:
    """The empty path is the document."""
    assert patched([{"op": "replace", "path": "", "value": [1]}]) == [1]


def test_numbers_that_are_not_touched_stay_exact() -> None:
    """Also those that no float can hold."""
    changed = transformed(b'{"big": 90071992547409931234, "x": 1}', {"x": 2})
    assert b"90071992547409931234" in changed


@pytest.mark.parametrize(
    "patch",
    [
        [{"op": "remove", "path": "/nothing"}],
        [{"op": "remove", "path": "/items/7"}],
        [{"op": "add", "path": "/items/x", "value": 1}],
        [{"op": "replace", "path": "/id/deeper", "value": 1}],
        [{"op": "test", "path": "/id", "value": 2}],
        [{"op": "move", "from": "/items", "path": "/items/0"}],
        [{"op": "remove", "path": ""}],
        [{"op": "remove", "path": "/items/0000000005"}],
        [{"op": "remove", "path": "/items/\u00b2"}],
    ],
)
def test_a_patch_that_does_not_fit_is_an_error(patch: Any) -> None:
    """With a code of its own, and nothing is changed."""
    with pytest.raises(InvalidArgument) as caught:
        patched(patch)
    assert caught.value.code == "transform_failed"


@pytest.mark.parametrize(
    "patch",
    [
        "text",
        [1],
        [{"op": "explode", "path": "/a"}],
        [{"op": "add", "path": "/a"}],
        [{"op": "remove", "path": "a"}],
        [{"op": "remove", "path": "/a"}] * 101,
    ],
)
def test_what_is_no_patch_is_refused_at_once(patch: Any) -> None:
    """Before any letter is looked at."""
    with pytest.raises(InvalidArgument) as caught:
        check_transform(patch)
    assert caught.value.code == "invalid_transform"


def test_a_payload_that_is_no_json_cannot_be_changed() -> None:
    """It is skipped, and the sentence says why."""
    with pytest.raises(InvalidArgument, match="not JSON"):
        transformed(b"\xff", {"a": 1})


@pytest.mark.parametrize(
    "step",
    [
        {"op": "copy", "from": "", "path": "/items/-"},
        {"op": "add", "path": "/a", "value": "x" * 50_000},
    ],
)
def test_a_patch_cannot_fill_the_memory(step: dict[str, Any]) -> None:
    """Each copy of the whole document doubles it: a hundred of them would be more than any machine has."""
    with pytest.raises(InvalidArgument, match="copies too much"):
        patched([step] * 100)


def test_a_document_that_is_nested_deeply_is_an_error() -> None:
    """And no crash."""
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    with pytest.raises(InvalidArgument) as caught:
        transformed(deep, [{"op": "copy", "from": "", "path": "/b"}])
    assert caught.value.code == "transform_failed"
