"""Reads what a request of the binary protocol has in its properties and its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.errors import InvalidArgument
from headrace.model import parse_position
from headrace.operations import exact_json
from headrace.paging import parse_from
from headrace.server.arguments import number_of
from headrace.wire import binary
from headrace.wire.binary import Frame


def object_in(frame: Frame, name: str) -> dict[str, Any]:
    exact_json.check_cost(frame.body)
    try:
        value = orjson.loads(frame.body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{name} is not JSON: {error}", code="bad_frame") from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{name} is not a JSON object", code="bad_frame")
    return value


def settings_in(frame: Frame) -> dict[str, Any]:
    """Settings travel as a JSON object in the body."""
    return object_in(frame, "the body with the settings") if frame.body else {}


def start_in(frame: Frame) -> Any:
    """Where a fetch begins: the body has an offset for each partition, or a property says it."""
    if frame.body:
        return parse_from(dict(binary.decode_places(frame.body)))
    return parse_position(frame.properties.get("offset", "earliest"))


def need(properties: Mapping[str, str], name: str) -> str:
    value = properties.get(name)
    if not value:
        raise InvalidArgument(f"the property {name!r} is missing", code="missing_property")
    return value


def number_in(properties: Mapping[str, str], name: str) -> int | None:
    return number_of(properties[name], name) if name in properties else None


def delivery_in(properties: Mapping[str, str]) -> tuple[int, int]:
    return (
        number_of(need(properties, "lease"), "lease"),
        number_of(need(properties, "offset"), "offset"),
    )
