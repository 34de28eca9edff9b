#!/usr/bin/env python3
"""Write docs/api-reference.md from the OpenAPI document of a running service: scripts/api_reference.py [FILE]

Starts the service over an empty directory, and takes its document as any caller would. The same source gives the same
file.
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["main", "render"]

_ROOT = Path(__file__).resolve().parents[1]
_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "1MiB"
pin = "none"
[storage]
kind = "file"
[storage.file]
root = "{folder}/l3"
[[models]]
name = "m"
page_tokens = 16
[[models.components]]
name = "kv"
bytes = 4096
"""
_HEAD = """# API reference

Every route with its parameters, fields, answers and an example. Made from `GET /openapi.json` by `make api-reference`:
change the code, not this file. [api.md](api.md) says what the lengths and reasons mean and how the routes are used
together, [errors.md](errors.md) what to do on each error.

Lengths count pages from page 0 of `keys` unless a field says otherwise; names that end in `_ms` are milliseconds.
Bodies are JSON, or MessagePack where `Content-Type` and `Accept` say so. Unknown fields of a request are refused;
answers may have more fields in a later version. Any route may also answer 500 `internal`.
"""
_HEX = "^([0-9a-fA-F]{2}){16,64}$"
_SHARED = """## Shapes

What the fields above consist of.
"""


def main(arguments: list[str]) -> int:
    """Write the reference to a file, by default the one in docs/."""
    target = Path(arguments[0]) if arguments else _ROOT / "docs" / "api-reference.md"
    target.write_text(render(_take_document()))
    return 0


def _take_document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "forestage.toml"
        config.write_text(_CONFIG.format(folder=folder))
        command = [sys.executable, "-m", "forestage", "serve", "--config", str(config), "--log-level", "warning"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            try:
                assert service.stdout is not None
                ready = service.stdout.readline().split()
                if ready[:2] != ["forestage", "ready"]:
                    raise SystemExit("api_reference: the service did not start")
                with urllib.request.urlopen(f"{ready[2]}/openapi.json", timeout=120) as answer:
                    document: dict[str, Any] = json.load(answer)
            finally:
                service.terminate()
    return document


def render(document: Mapping[str, Any]) -> str:
    """Return the reference as Markdown: routes in the order of the document, then the shapes they share."""
    return _Reference(document).render()


class _Reference:
    """Writes a document down once: a shape stands in full below the first route that takes or gives it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]
        self._routes = [
            (method.upper(), path, route)
            for path, methods in document["paths"].items()
            for method, route in methods.items()
        ]
        self._written: set[str] = set()
        self._mentioned: list[str] = []

    def render(self) -> str:
        parts = [_HEAD, "\n".join(self._contents()) + "\n"]
        for method, path, route in sorted(self._routes, key=lambda each: not each[1].startswith("/v1")):
            parts.append("\n".join(self._route(method, path, route)) + "\n")
        parts.append(_SHARED)
        while missing := [name for name in self._mentioned if name not in self._written]:
            parts.append("\n".join(self._shape(missing[0])) + "\n")
        return "\n".join(parts)

    def _contents(self) -> Iterator[str]:
        yield "| route | does |"
        yield "| --- | --- |"
        for method, path, route in sorted(self._routes, key=lambda each: not each[1].startswith("/v1")):
            yield f"| [`{method} {path}`](#{_anchor(f'{method} {path}')}) | {_lower(route['summary'])} |"

    def _route(self, method: str, path: str, route: Mapping[str, Any]) -> Iterator[str]:
        yield f"## {method} {path}"
        yield ""
        yield f"{route['summary']}."
        parameters = [_of_parameter(parameter) for parameter in route.get("parameters", ())]
        if parameters:
            yield ""
            yield from _table(("parameter", "in", "type", "default", "limits", "meaning"), parameters)
        body = route.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            yield ""
            yield from self._mention("Body", body["schema"])
        shapes: dict[str, list[str]] = {}
        problems = []
        for status, answer in sorted(route["responses"].items()):
            content = answer.get("content", {})
            if "application/problem+json" in content:
                problems += [(status, said) for said in re.split("; (?=`[a-z-]+`: )", answer["description"])]
            else:
                shapes.setdefault(json.dumps(content.get("application/json", {}).get("schema")), []).append(status)
        for shape, statuses in shapes.items():
            yield ""
            yield from self._answer(" or ".join(statuses), json.loads(shape), route, statuses)
        if problems:
            yield ""
            rows = [(status, *said.split(": ", 1)) for status, said in problems]
            yield from _table(("status", "error", "when"), rows)
        yield from _example(method, path, route)

    def _answer(
        self, status: str, schema: Mapping[str, Any] | None, route: Mapping[str, Any], statuses: list[str]
    ) -> Iterator[str]:
        if schema:
            yield from self._mention(f"Answer {status}", schema)
            return
        (media,) = route["responses"][statuses[0]].get("content", {"": None})
        yield f"Answer {status}: {'`' + media + '`' if media else 'no JSON' if status == '200' else 'empty'}."

    def _mention(self, what: str, schema: Mapping[str, Any]) -> Iterator[str]:
        name = _name(schema)
        if name in self._written:
            yield f"{what}: {self._link(name)}."
            return
        yield f"{what}:"
        yield ""
        yield from self._shape(name, level=4)

    def _shape(self, name: str, level: int = 3) -> Iterator[str]:
        schema = self._schemas[name]
        self._written.add(name)
        yield f"{'#' * level} {name}"
        yield ""
        if "enum" in schema:
            yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}."
            return
        yield schema["description"]
        yield ""
        required = schema.get("required", ())
        is_body = schema.get("additionalProperties") is False
        fields = schema["properties"].items()
        if is_body:
            fields = sorted(fields, key=lambda each: _rank(each[1], each[0] in required))
        rows = [
            (
                f"`{field}`",
                self._type(part),
                *((_default(part, field in required), _limits(part)) if is_body else ()),
                part.get("description", ""),
            )
            for field, part in fields
        ]
        yield from _table(("field", "type", *(("default", "limits") if is_body else ()), "meaning"), rows)

    def _type(self, schema: Mapping[str, Any]) -> str:
        if "$ref" in schema or "allOf" in schema:
            return self._link(_name(schema))
        if "anyOf" in schema:
            return " or ".join(self._type(part) for part in schema["anyOf"])
        if "enum" in schema:
            return ", ".join(f"`{value}`" for value in schema["enum"])
        match schema.get("type"):
            case "array":
                return f"list of {self._type(schema['items'])}"
            case "object" if isinstance(schema.get("additionalProperties"), dict):
                return f"map to {self._type(schema['additionalProperties'])}"
            case "string" if schema.get("pattern") == _HEX:
                return "hex"
            case str(kind):
                return kind
        raise ValueError(f"no type in {schema}")

    def _link(self, name: str) -> str:
        if name not in self._mentioned:
            self._mentioned.append(name)
        return f"[{name}](#{name.lower()})"


def _name(schema: Mapping[str, Any]) -> str:
    reference: str = schema["$ref"] if "$ref" in schema else schema["allOf"][0]["$ref"]
    return reference.rpartition("/")[2]


def _of_parameter(parameter: Mapping[str, Any]) -> tuple[str, ...]:
    schema = parameter["schema"]
    kinds = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    default = _default(schema, parameter["required"])
    name = parameter["name"]
    meaning = (
        parameter.get("description") or f"which {'prefetch' if name == 'request_id' else name.removesuffix('_id')}"
    )
    return f"`{name}`", parameter["in"], kinds[0]["type"], default, _limits(schema), meaning


def _rank(schema: Mapping[str, Any], required: bool) -> int:
    """Return where a field of a body stands: what is needed first, what needs another one last."""
    return 0 if required else 2 if "Only with" in schema.get("description", "") else 1


def _default(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _limits(schema: Mapping[str, Any]) -> str:
    """Say what a value must keep to; of a list also what each of its members must."""
    said = []
    for part in [schema, *schema.get("anyOf", ())]:
        low, high = part.get("minimum"), part.get("maximum")
        if low is not None or high is not None:
            said.append(f"{_number(low)} to {_number(high)}")
        if "maxLength" in part:
            said.append(f"{part.get('minLength', 0)} to {part['maxLength']} characters")
        if "maxItems" in part:
            said.append(f"at most {part['maxItems']}")
        if part.get("uniqueItems"):
            said.append("no duplicates")
        if "pattern" in part:
            said.append("16 to 64 bytes" if part["pattern"] == _HEX else f"`{part['pattern']}`")
    items = schema.get("items", {})
    if items and "$ref" not in items and _limits(items):
        said.append(f"each {_limits(items)}")
    return "; ".join(said)


def _number(value: float | None) -> str:
    """Write whole numbers near a power of two as such: nobody reads nineteen digits."""
    if value is None:
        return "any"
    number = int(value)
    for bits in (31, 63):
        if number in {2**bits - 1, -(2**bits)}:
            return f"2^{bits} - 1" if number > 0 else f"-2^{bits}"
    return str(number)


def _example(method: str, path: str, route: Mapping[str, Any]) -> Iterator[str]:
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
    answers = [
        (status, content["example"])
        for status, answer in route["responses"].items()
        for content in answer.get("content", {}).values()
        if "example" in content
    ]
    if body is None and not answers:
        return
    yield ""
    yield "```text"
    yield f"{method} {path}"
    if body is not None:
        yield _compact(body)
    for status, answer in answers:
        yield ""
        yield status
        yield _compact(answer) if not isinstance(answer, str) else answer
    yield "```"


def _compact(value: Any, indent: int = 0, width: int = 118) -> str:
    """Return JSON that breaks only the lists and maps that are too long for a line."""
    flat = json.dumps(value)
    if len(flat) + indent <= width or not value or not isinstance(value, dict | list):
        return flat
    lead = " " * (indent + 2)
    if isinstance(value, dict):
        rows = [f"{lead}{json.dumps(key)}: {_compact(part, indent + 2)}" for key, part in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(lead + _compact(part, indent + 2) for part in value) + "\n" + " " * indent + "]"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _anchor(title: str) -> str:
    """Return what GitHub makes of a heading."""
    return "".join(c for c in title.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def _lower(text: str) -> str:
    return text if text.startswith("Prometheus") else text[0].lower() + text[1:]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
