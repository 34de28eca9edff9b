"""The OpenAPI document: what FastAPI makes of the routes, mended where it says what is not so.

The routes read bodies and build answers themselves (JSON or MessagePack, keys by the thousand), so the framework knows
neither; their shapes are added here, and its own answers to bad parameters, which are problems like all others, go.
"""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from forestage.api.bodies import BODIES
from forestage.api.examples import Example, load_examples
from forestage.api.problem_types import Problem

__all__ = ["describe_app"]

_REFERENCE = "#/components/schemas/{model}"
_NEVER_ANSWERED = ("HTTPValidationError", "ValidationError")


def describe_app(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an app; the same for the same routes."""
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    shapes = [(shape, "validation" if shape in BODIES else "serialization") for shape in (*BODIES, Problem)]
    _, described = models_json_schema(shapes, ref_template=_REFERENCE)  # type: ignore[arg-type]
    schemas.update(_without_null_defaults(described["$defs"]))
    for name in _NEVER_ANSWERED:
        schemas.pop(name, None)
    routes = {(method.upper(), path): r for path, methods in document["paths"].items() for method, r in methods.items()}
    for route in routes.values():
        if "HTTPValidationError" in str(route["responses"].get("422")):
            del route["responses"]["422"]
    for example in load_examples():
        _add(routes[example.method, example.path], example)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return document


def _add(route: dict[str, Any], example: Example) -> None:
    if example.body is not None:
        route["requestBody"]["content"]["application/json"]["example"] = example.body
    if example.answer is not None:
        (content,) = route["responses"][str(example.status)]["content"].values()
        content["example"] = example.answer


def _without_null_defaults(schema: Any) -> Any:
    """Return a schema that leaves out the default None: what may be left out need not be null."""
    if isinstance(schema, list):
        return [_without_null_defaults(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if not (name == "default" and part is None)}
    return {name: _without_null_defaults(part) for name, part in kept.items()}
