"""The description of the HTTP interface is valid, and it is true."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from headrace.operations.catalog import OPERATIONS as DECLARED
from headrace.server import schemas
from headrace.server.server import ALL_ROUTES
from headrace.testing import RunningServer, running_server, wait_until
from tests.server.http_rig import Http, http_of

DOCUMENT = schemas.document(ALL_ROUTES)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
ENDLESS = "/stream/{topic}"
OPERATIONS = [
    operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
    if operation.path != ENDLESS
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    allow_header_conformance,
    negative_data_rejection,
]
WAIT_MS = 20


# --- valid ----------------------------------------------------------------------------------------
def test_it_is_a_valid_openapi_3_1_document(http: Http) -> None:
    """And it is what is served, to anybody."""
    SCHEMA.validate()
    assert DOCUMENT["openapi"].startswith("3.1")
    assert http.ok("GET", "/openapi.json") == DOCUMENT


def test_the_error_codes_of_an_operation_are_described() -> None:
    """As its declaration has them: for people as a sentence, for programs as a list."""
    created = DOCUMENT["paths"]["/topics/{topic}"]["put"]
    assert created["x-error-codes"] == list(DECLARED["create_topic"].errors)
    for code in created["x-error-codes"]:
        assert code in created["description"]


def test_every_route_is_described_once() -> None:
    """With a name of its own, a sentence, and an answer that is a success."""
    described = [
        (method.upper(), path, operation)
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]
    assert {(m, p) for m, p, _ in described} == {(r.method, r.path) for r in ALL_ROUTES}
    names = [operation["operationId"] for _, _, operation in described]
    assert len(set(names)) == len(names)
    for _, path, operation in described:
        assert operation["summary"]
        assert operation["tags"]
        assert any(status.startswith(("1", "2")) for status in operation["responses"]), path
        inside = re.findall(r"{(\w+)}", path)
        assert [p["name"] for p in operation["parameters"] if p["in"] == "path"] == inside


def test_every_reference_leads_somewhere() -> None:
    """And no schema is there for nothing."""
    found = set(re.findall(r"#/components/schemas/(\w+)", repr(DOCUMENT)))
    assert found == set(DOCUMENT["components"]["schemas"])


@pytest.mark.parametrize("route", ALL_ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_parameter_that_is_described_is_known(http: Http, route: Any) -> None:
    """Whatever is wrong with a request, its parameters are not unknown."""
    if route.path in (ENDLESS, "/ws"):
        pytest.skip("these take the connection over")
    path = re.sub(r"{\w+}", "x", route.path)
    query = "&".join(f"{p.name}=" for p in route.parameters if p.place == "query")
    answer = http.ask(route.method, f"{path}?{query}", {})
    assert b"unknown_parameter" not in answer.body


def _parameter(path: str, name: str) -> Any:
    given = DOCUMENT["paths"][path]["post"]["parameters"]
    return next(p["schema"] for p in given if p["name"] == name)


def _fields(path: str, method: str = "post") -> dict[str, Any]:
    schema = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, Any] = schema.get("oneOf", [schema])[0]["properties"]
    return fields


def test_sizes_and_durations_are_numbers_or_text_with_a_unit(http: Http) -> None:
    """The description allows what the broker takes, and neither allows anything else."""
    settings = {"retention_bytes": "1GB", "segment_bytes": "64MiB", "retention_hours": "1h30m",
                "sync_interval_ms": "1s", "message_ttl_ms": "2d"}  # fmt: skip
    for name, text in settings.items():
        schema = _fields("/topics/{topic}", "put")[name]
        for value, is_valid in ((text, True), (5_000, True), ("1 parsec", False), ("", False)):
            assert Draft202012Validator(schema).is_valid(value) == is_valid, (name, value)
    assert http.ask("PUT", "/topics/sized", settings).status == 201
    assert http.ask("PUT", "/topics/x", {"retention_hours": "1 parsec"}).status == 400
    of_group = {"ack_timeout": "1m", "backoff": "500ms", "backoff_max": "1h"}
    for name, text in of_group.items():
        assert Draft202012Validator(_fields("/subscribe/{topic}")[name]).is_valid(text)
    assert http.ask("POST", "/subscribe/sized", {"group": "g", **of_group}).status == 201
    for name, text in (("delay", "1h"), ("ttl", "90s"), ("deliver_at", "2020-01-01T00:00:00Z")):
        assert Draft202012Validator(_parameter("/publish/{topic}", name)).is_valid(text)
        assert http.ask("POST", f"/publish/sized?{name}={text}", {}).status in (200, 202)
    for path, name in (("/nack", "delay"), ("/extend", "seconds")):
        assert Draft202012Validator(_fields(path)[name]).is_valid("5s")
        assert http.ask("POST", path, {"delivery": "1.1", name: "5s"}).status == 409  # stale


# --- true -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def full_server() -> Iterator[RunningServer]:
    """One in which there is something of everything."""
    with running_server(memory=True) as server:
        http = http_of(server)
        http.ok("POST", "/subscribe/orders", {"group": "billing", "max_deliveries": 1})
        http.ok("POST", "/subscribe/orders", {"group": "mail"})
        for number in range(40):
            http.publish("orders", {"number": number}, key=f"k{number % 3}")
        http.publish("orders", "later", delay=900)
        for message in http.consume_batch("orders", group="billing", limit=20, ack="manual"):
            body = {"delivery": message["delivery"], "group": "billing"}
            http.ask("POST", "/nack/orders", body)
        wait_until(lambda: http.get("/dead-letters/billing").status == 200)
        wait_until(lambda: len(http.ok("GET", "/dead-letters/billing")) == 20)
        query = {"name": "q", "batch_id": 1, "input_rows": 5, "trigger_ms": 1.5, "sources": [{}]}
        run = {"run_id": "r", "started_at": 1, "queries": [query, {"name": "idle", "sink": None}]}
        with server.client() as client:
            client.report_pipeline("daily", {"state": "running", **run})
            client.report_pipeline("billing", {"state": "failed", **run})
        yield server
        http.close()


KNOWN = {"topic": "orders", "group": "billing", "name": "daily", "offset": 3}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_the_server_does_what_the_description_says(
    full_server: RunningServer, operation: Any
) -> None:
    """Whatever is sent, right or wrong, about things that are there or not: no other answers."""
    base = "http://{}:{}".format(*full_server.http_address)
    names = re.findall(r"{(\w+)}", operation.path)
    known = {name: KNOWN[name] for name in names if name in KNOWN}
    ways: list[dict[str, Any]] = [{"generation_mode": GenerationMode.POSITIVE}]
    if len(known) == len(names) > 0:
        ways.append({"generation_mode": GenerationMode.POSITIVE, "path_parameters": known})
    ways.append({"generation_mode": GenerationMode.NEGATIVE})
    with requests.Session() as session:
        for way in ways:
            _ask(operation, way, base, session)


def _ask(operation: Any, way: dict[str, Any], base: str, session: requests.Session) -> None:
    @given(case=operation.as_strategy(**way))
    @settings(
        max_examples=max(3, settings.default.max_examples // 20),  # more with HYPOTHESIS_PROFILE
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        if case.path.startswith("/request/"):
            case.query = {"wait": 30_000, **(case.query or {})}
        wait = (case.query or {}).get("wait")
        if isinstance(wait, int) and not isinstance(wait, bool) and WAIT_MS < wait <= 3_600_000:
            case.query["wait"] = WAIT_MS
        response = case.call(base, session=session)
        if response.status_code == 426:
            return  # a WebSocket is not opened by HTTP alone, and that is described
        if response.status_code == 504:
            return  # nobody replies here, and that is described, too
        if response.status_code == 414:
            return  # an argument that is too long may make the address too long
        case.validate_response(response, checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:  # nothing of this request can be wrong
        assert way["generation_mode"] is GenerationMode.NEGATIVE
