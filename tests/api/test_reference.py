"""docs/api-reference.md and the OpenAPI document it is made from: complete, and what really happens."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api.error_tables import table
from api.test_bad_requests import TABLE
from forestage.api.examples import load_examples
from forestage.api.problem_types import PROBLEM_TYPES
from support.live import PAGE_BYTES, Live, hybrid, live
from support.region_memory import Memory, register

ROOT = Path(__file__).resolve().parents[2]
#: What differs from run to run, or between this service and one that users have.
VOLATILE = {
    "ago_ms",
    "at_ms",
    "expires_in_ms",
    "id",
    "instance",
    "path",
    "pool_path",
    "regions_uds",
    "since_ms",
    "timing_ms",
    "total_ms",
    "uptime_s",
    "version",
}
#: Routes whose answer is no JSON.
WITHOUT_EXAMPLE = {("GET", "/metrics"), ("GET", "/v1/events")}
#: Answered for what no route is asked, by the frame around the routes.
#: Answered before a route is looked for, or by any.
OF_NO_ROUTE = {"not-found", "method-not-allowed", "internal", "request-timeout", "too-many-connections"}


def _routes(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield method.upper(), path, route


def test_the_committed_reference_is_what_the_routes_say(tmp_path: Path) -> None:
    made = tmp_path / "made.md"
    command = [sys.executable, str(ROOT / "scripts" / "api_reference.py"), str(made)]
    subprocess.run(command, check=True, timeout=110)
    committed = (ROOT / "docs" / "api-reference.md").read_text()
    assert committed == made.read_text(), "run make api-reference"
    anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", committed, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", committed)) <= anchors


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_every_field_and_parameter_is_explained(service: Live) -> None:
    document = service.app.openapi()
    assert "HTTPValidationError" not in str(document)
    for name, schema in document["components"]["schemas"].items():
        assert "enum" in schema or schema["description"], name
        for field, part in schema.get("properties", {}).items():
            assert part.get("description"), f"{name}.{field}"
    for method, path, route in _routes(document):
        assert route["summary"], path
        for parameter in route.get("parameters", ()):
            assert parameter["in"] == "path" or parameter["description"], f"{method} {path}: {parameter['name']}"


def test_problem_types_are_those_of_the_documented_errors(service: Live) -> None:
    assert {slug: str(kind.status) for slug, kind in PROBLEM_TYPES.items()} == {
        slug: status for slug, status, *_ in table("Answers")
    }
    said = {
        slug
        for _, _, route in _routes(service.app.openapi())
        for answer in route["responses"].values()
        for slug in re.findall(r"`([a-z-]+)`: ", answer["description"])
    }
    assert said == set(PROBLEM_TYPES) - OF_NO_ROUTE


def test_each_route_names_the_problems_it_was_seen_to_answer(service: Live) -> None:
    routes = {(method, path): route for method, path, route in _routes(service.app.openapi())}
    seen = 0
    for bad in TABLE:
        for (method, path), route in routes.items():
            shape = re.sub(r"\{\w+\}", "[^/]+", path)
            if method == bad.method and re.fullmatch(shape, bad.path.partition("?")[0]):
                assert f"`{bad.slug}`: " in route["responses"][str(bad.status)]["description"], bad.name
                seen += 1
    assert seen > len(TABLE) / 2


def _stable(value: Any) -> Any:
    if isinstance(value, list):
        return [_stable(part) for part in value]
    if isinstance(value, dict):
        return {name: "..." if name in VOLATILE else _stable(part) for name, part in value.items()}
    return value


async def test_every_example_is_answered_as_it_says(tmp_path: Path) -> None:
    examples = load_examples()
    keys = [bytes.fromhex(key) for key in (examples[0].body or {})["keys"]]
    ids = {"request_id": "turn-17"}
    regions = f"{tmp_path}/r"
    hashing = {**hybrid(8, 4), "hash": {"scheme": "sglang"}}
    async with live(tmp_path, hashing, server={"regions_uds": regions}) as service:
        service.store(keys[:3], [2])
        named = {(example.method, example.path) for example in examples}
        document = service.app.openapi()
        assert named == {(method, path) for method, path, _ in _routes(document)} - WITHOUT_EXAMPLE
        memory = Memory(5 * PAGE_BYTES)
        connection, region = await asyncio.to_thread(register, regions, memory)
        for example in examples:
            target = example.path.format(**ids) + (f"?{example.query}" if example.query else "")
            body = {**(example.body or {}), "region": region} if example.path == "/v1/fills" else example.body
            answer = await service.http.request(example.method, target, json=body)
            assert answer.status_code == example.status, target
            got: Any = answer.json() if answer.content else None
            if example.path == "/v1/status":
                del got["recent"]["buckets"][:-1]  # the example shows the last one
            assert _stable(got) == _stable(example.answer), target
            if example.path == "/v1/leases":
                ids["lease_id"] = got["lease"]["id"]
            elif example.path == "/v1/writes":
                ids["write_id"] = got["id"]
            elif example.path == "/v1/pins":
                ids["pin_id"] = got["id"]
        connection.close()
        memory.close()
