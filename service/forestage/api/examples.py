"""Examples of requests and their answers, for the OpenAPI document. A test sends each of them, in this order."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

__all__ = ["Example", "load_examples"]


class Example(NamedTuple):
    """A request and what it was answered; `path` is that of the route, without values."""

    method: str
    path: str
    query: str
    body: dict[str, Any] | None
    status: int
    answer: Any


@cache
def load_examples() -> tuple[Example, ...]:
    """Return one example for each route, in the order in which they can be sent to a fresh service."""
    text = files("forestage.api").joinpath("assets", "examples.json").read_text()
    examples = []
    for raw in json.loads(text):
        method, _, target = raw["request"].partition(" ")
        path, _, query = target.partition("?")
        examples.append(Example(method, path, query, raw.get("body"), raw["status"], raw.get("answer")))
    return tuple(examples)
