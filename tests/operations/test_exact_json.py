"""JSON from outside: exact, and bounded before it costs anything."""

import json

import pytest

from headrace.errors import InvalidArgument, TooLarge
from headrace.operations import exact_json

ITEMS_MAX = 1000


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1}',
        "12345678901234567890123",
        "[1.5e10,[]]",
        '"é\\ud83d\\ude00"',
        "1" * 200,
        " [ 1 ] ",
    ],
)
def test_a_value_goes_through_unchanged(text: str) -> None:
    """Also a number that no machine word can hold."""
    raw = text.encode()
    exact_json.check(raw)
    assert json.loads(exact_json.dumps(exact_json.loads(raw))) == json.loads(text)
    assert exact_json.split(b"[ %b , %b]" % (raw, raw), ITEMS_MAX) == [raw.strip()] * 2


LARGE = b'"' + b"x" * exact_json.DECODED_BYTES_MAX + b'",'


@pytest.mark.parametrize(
    "item",
    [b"", b"{", b"01", b"nul", b'"\xff"', b'"\x01"', b"1e999", b"9" * 5000, b"1 2", b"[" * 2000 + b"]" * 2000,
     b'{"a":1,}', b'"\\x"', b"NaN", b'{"\xff":1}', b"-1E+400"],
)  # fmt: skip
def test_what_is_no_json_is_refused(item: bytes) -> None:
    """By itself, and as an item of an array; as a small document and as a large one."""
    for call in (
        lambda: exact_json.loads(item),
        lambda: exact_json.check(item),
        lambda: exact_json.split(b"[1,%b]" % item, ITEMS_MAX),
        lambda: exact_json.split(b"[%b%b]" % (LARGE, item), ITEMS_MAX),
    ):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("pad", [b"", LARGE], ids=["small", "large"])
def test_nesting_has_a_limit_of_its_own(pad: bytes) -> None:
    """The same in each decoder and on each Python. Brackets in strings do not count."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth, is_fine in ((exact_json.NESTED_MAX - 1, True), (exact_json.NESTED_MAX, False)):
            document = b"[%b%b]" % (pad, opening * depth + b"1" + closing * depth)
            for call in (exact_json.loads, exact_json.check):
                if is_fine:
                    call(document)
                else:
                    with pytest.raises(InvalidArgument, match="inside of each other"):
                        call(document)
    wide = b"[%b%b]" % (pad, b",".join([b'{"a":[{"b":[[1]]}]}'] * 900))
    quoted = b'[%b"%b\\"[[["]' % (pad, b"[" * 5000)
    for document in (wide, quoted):
        exact_json.check(document)
        assert exact_json.split(document, ITEMS_MAX)


def test_a_large_document_is_checked_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made of its values."""
    monkeypatch.setattr(exact_json.orjson, "loads", None)
    exact_json.check(b"[%b%b]" % (LARGE, b"[]," * 1000 + b"1"))
    for wrong in (b"1,", b'"\xff"', b"01", b'"\x01"'):
        with pytest.raises(InvalidArgument):
            exact_json.check(b"[%b%b]" % (LARGE, wrong))


def test_too_many_values_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commas and brackets are counted; nothing is decoded."""
    most = exact_json.VALUES_MAX
    for part in (b"[],", b"1,", b'{"a":1},'):
        content = b"[" + part * most + b"1]"
        with monkeypatch.context() as patch:
            patch.setattr(exact_json.orjson, "loads", None)
            patch.setattr(exact_json, "_many", None)
            with pytest.raises(TooLarge) as caught:
                exact_json.loads(content)
            assert caught.value.code == "json_too_large"
            with pytest.raises(TooLarge):
                exact_json.split(b"[" + part * exact_json.CARRIED_VALUES_MAX + b"1]", ITEMS_MAX)
    assert len(exact_json.loads(b"[" + b"1," * (most - 2) + b"1]")) == most - 1


def test_commas_in_strings_are_no_values() -> None:
    """A table of numbers as text is one value; escaped quotes do not end a string."""
    table = "1,2,3,\n" * 100_000 + '\\"' + "[{," * 10_000
    assert exact_json.loads(json.dumps({"data": table}).encode()) == {"data": table}


def test_a_document_with_long_numbers_has_fewer_values() -> None:
    """The standard library decodes it, which takes ten times as long."""
    most = exact_json.EXACT_VALUES_MAX
    number = b"12345678901234567890123"
    assert len(exact_json.loads(b"[" + b"1," * (most - 2) + number + b"]")) == most - 1
    with pytest.raises(TooLarge) as caught:
        exact_json.loads(b"[" + b"1," * most + number + b"]")
    assert caught.value.code == "json_too_large"


def test_an_array_may_have_so_many_items() -> None:
    """The one too many is refused with the limit in the sentence."""
    assert len(exact_json.split(b"[" + b"1," * 9 + b"1]", 10)) == 10
    with pytest.raises(TooLarge, match="10 messages") as caught:
        exact_json.split(b"[" + b"1," * 10 + b"1]", 10)
    assert caught.value.code == "batch_too_large"
    with pytest.raises(InvalidArgument, match="array"):
        exact_json.split(b'{"a":1}', 10)
