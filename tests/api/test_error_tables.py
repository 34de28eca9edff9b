"""docs/errors.md is what happens: its examples are sent, its lines are printed, nothing is left out."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from api.error_tables import is_line, table
from api.test_bad_requests import TABLE
from faults.bad_files import BAD_FILES
from forestage.api import problems
from forestage.cli.exits import Exit
from forestage.cli.main import main
from forestage.core.errors import ForestageError, StartError, StorageUnavailableError
from support.live import Live, kv_only, live, make_keys

one_service = pytest.mark.asyncio(loop_scope="module")

MEDIA = {"json": "application/json", "msgpack": "application/msgpack", "text/plain": "text/plain"}
#: Slugs that are not those of a class, and classes whose slug no caller sees.
FURTHER = {
    "unknown-model": 404,
    "unknown-job": 404,
    "unknown-write": 404,
    "part-taken": 409,
    "message-id-conflict": 409,
    "service-token-needed": 403,
    "role-needed": 403,
    "request-timeout": 408,
    "limit-reached": 429,
    "too-many-connections": 503,
    "too-many-listeners": 429,
    "region-gone": 410,
    "write-gone": 410,
    "duplicate-key": 422,
    "no-hash-scheme": 422,
    "pool-unlinked": 503,
}
UNSEEN = (StartError, StorageUnavailableError)


def _leaves(kind: type[ForestageError]) -> set[type[ForestageError]]:
    return {kind}.union(*(_leaves(inner) for inner in kind.__subclasses__()))


def _statuses() -> dict[str, int]:
    return {type_: int(status) for type_, status, *_ in table("Answers")}


def test_every_type_is_listed() -> None:
    known = {leaf.slug: leaf.status for leaf in _leaves(ForestageError) if not issubclass(leaf, UNSEEN)}
    known |= FURTHER | {slug: status for status, slug in problems._SLUGS.items()} | {"internal": 500}
    assert _statuses() == known


def test_every_bad_request_that_is_tested_is_of_a_listed_type() -> None:
    statuses = _statuses()
    for bad in TABLE:
        assert statuses[bad.slug] == bad.status, bad.name
    assert {bad.slug for bad in TABLE} <= {type_ for *_, type_ in table("Bad requests")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    hashed = {**kv_only(8, "h"), "hash": {"scheme": "sglang"}}
    async with live(tmp_path_factory.mktemp("errors"), kv_only(8), hashed, prefetch={"max_pages": 4}) as running:
        yield running


@one_service
@pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in table("Bad requests")])
async def test_an_example(service: Live, row: tuple[str, ...]) -> None:
    _, example, status, type_ = row
    method, path, *rest = example.split(" ", 2)
    text = rest[0] if rest else ""
    media, content = "json", text.encode()
    if text.startswith("msgpack "):
        media, content = "msgpack", bytes.fromhex(text.removeprefix("msgpack "))
    elif text in MEDIA:
        media, content = text, b""
    k, other = (key.hex().encode() for key in make_keys(2))
    content = content.replace(b'"K"', b'"' + k + b'"').replace(b'"L"', b'"' + other + b'"')
    answer = await service.http.request(method, path, content=content, headers={"Content-Type": MEDIA[media]})
    assert (answer.status_code, answer.json()["type"]) == (int(status), type_)
    assert answer.headers["content-type"] == "application/problem+json"
    assert k.decode() not in answer.text


@one_service
async def test_deletes_of_nothing(service: Live) -> None:
    for path in ("/v1/prefetch/nobody", "/v1/leases/nobody", "/v1/pins/nobody", "/v1/writes/nobody"):
        assert (await service.http.delete(path)).status_code == 204


def test_exit_codes() -> None:
    assert [int(code) for code, _ in table("Exit codes")] == [int(code) for code in Exit]


@pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in table("Bad configuration")])
def test_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: tuple[str, ...]) -> None:
    mistake, documented = row
    section, _, setting = mistake.partition("] ")
    model = {"name": "m", "page_tokens": 16}
    lines = [
        f"{section.rstrip(']')}{']' * section.count('[')}",
        setting,
        "[[models]]",
        *(f"{k} = {json.dumps(v)}" for k, v in model.items()),
    ]
    config = tmp_path / "forestage.toml"
    config.write_text("\n".join([*lines, "[[models.components]]", 'name = "kv"', "bytes = 4096", ""]))
    assert main(["config", "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert is_line(line, f"forestage: {documented}"), line


def test_bad_pages() -> None:
    rows = [(bad.name, *(bad.reasons.get(kind, "-") for kind in ("file", "hicache-file"))) for bad in BAD_FILES]
    assert table("Bad pages in L3") == rows
