"""`forestage l3 ls|put|verify|rm`: look after what lies in L3."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forestage.assembly import build_storage
from forestage.cli.exits import Exit
from forestage.cli.l3_reading import ReadPage, read_pages
from forestage.cli.progress import Progress
from forestage.cli.settings import load_or_complain
from forestage.config import Config
from forestage.core.errors import ForestageError
from forestage.core.layout import ModelLayout
from forestage.storage.base import ReadOutcome, Storage
from forestage.storage.listing import StoredPage, list_pages

__all__ = ["ls", "rm", "verify", "work"]

_BAD_WORDS = {
    ReadOutcome.MISSING: "missing",
    ReadOutcome.CORRUPT: "corrupt",
}


class UsageError(Exception):
    """The command line asks for something that cannot be."""


@dataclass(frozen=True, slots=True)
class L3:
    """A configured storage, opened, and the models that a command is about."""

    config: Config
    storage: Storage
    models: tuple[ModelLayout, ...]


def ls(arguments: argparse.Namespace) -> int:
    """Print what is stored, by model and component; return the exit code."""
    return work(arguments, _ls)


def verify(arguments: argparse.Namespace) -> int:
    """Read every page and check it; return the exit code."""
    return work(arguments, _verify)


def rm(arguments: argparse.Namespace) -> int:
    """Remove pages; return the exit code."""
    return work(arguments, _rm)


def work(arguments: argparse.Namespace, command: Callable[[L3, argparse.Namespace], Awaitable[int]]) -> int:
    """Open the configured L3, run a command on it, and turn what goes wrong into a line and an exit code."""
    config = load_or_complain(arguments.config)
    if config is None:
        return Exit.USAGE
    layouts = config.layouts()
    models = tuple(layout for layout in layouts if arguments.model in {None, layout.name})
    if not models:
        known = ", ".join(layout.name for layout in layouts)
        print(f"forestage: no model {arguments.model!r} in {arguments.config}; there is {known}", file=sys.stderr)
        return Exit.USAGE

    async def run() -> int:
        storage = build_storage(config)
        try:
            await storage.open()
            return await command(L3(config, storage, models), arguments)
        finally:
            await storage.aclose()

    try:
        return asyncio.run(run())
    except UsageError as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.USAGE
    except (ForestageError, OSError) as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.FAILED


# ---- ls


async def _ls(l3: L3, arguments: argparse.Namespace) -> int:
    found = {model: await list_pages(l3.storage, model) for model in l3.models}
    if arguments.json:
        models = {model.name: _described(model, pages, arguments.summary) for model, pages in found.items()}
        print(json.dumps({"storage": l3.storage.kind, "models": models}))
        return Exit.OK
    for model, pages in found.items():
        if not arguments.summary:
            for page in pages:
                name = model.components[page.component_index].name
                print(f"{model.name}  {name:<10}  {page.key.hex()}  {page.stored_bytes:>12}  {_state(page)}")
        for line in _totals(model, pages):
            print(f"{model.name}  {line}")
    return Exit.OK


def _described(model: ModelLayout, pages: Sequence[StoredPage], summary: bool) -> dict[str, Any]:
    components = {}
    for index, component in enumerate(model.components):
        mine = [page for page in pages if page.component_index == index]
        whole = sum(page.is_whole for page in mine)
        components[component.name] = {
            "pages": len(mine),
            "whole": whole,
            "bytes": sum(page.stored_bytes for page in mine),
        }
    described = {"fingerprint": model.fingerprint, "components": components}
    if summary:
        return described
    listed = [
        {
            "component": model.components[page.component_index].name,
            "key": page.key.hex(),
            "shard_bytes": list(page.shard_bytes),
            "whole": page.is_whole,
        }
        for page in pages
    ]
    return {**described, "pages": listed}


def _state(page: StoredPage) -> str:
    parts = []
    if page.missing:
        parts.append(f"shards missing: {', '.join(map(str, page.missing))}")
    if page.odd:
        parts.append(f"shards of a wrong size: {', '.join(map(str, page.odd))}")
    return "; ".join(parts) or "whole"


def _totals(model: ModelLayout, pages: Sequence[StoredPage]) -> list[str]:
    lines = []
    for index, component in enumerate(model.components):
        mine = [page for page in pages if page.component_index == index]
        size = sum(page.stored_bytes for page in mine)
        broken = sum(not page.is_whole for page in mine)
        line = f"{component.name:<10}  {_count(len(mine), 'page')}, {size} bytes"
        lines.append(line + (f"; {broken} not whole" if broken else ""))
    return lines


# ---- verify


async def _verify(l3: L3, arguments: argparse.Namespace) -> int:
    verdicts: dict[str, dict[str, Any]] = {}
    all_good = True
    for model in l3.models:
        pages = await list_pages(l3.storage, model)
        counts, bad = await _check(l3.storage, model, pages)
        good = not bad
        all_good &= good
        verdicts[model.name] = {**counts, "bad": bad}
        if not arguments.json:
            for one in bad:
                print(f"{model.name}  {one['component']:<10}  {one['key']}  {one['verdict']}")
            words = ", ".join(f"{number} {word}" for word, number in counts.items())
            print(f"{model.name}  {words}")
    if arguments.json:
        print(json.dumps({"storage": l3.storage.kind, "models": verdicts}))
    return Exit.OK if all_good else Exit.PARTIAL


async def _check(
    storage: Storage, model: ModelLayout, pages: Sequence[StoredPage]
) -> tuple[dict[str, int], list[dict[str, str]]]:
    tally: Counter[str] = Counter()
    bad: list[dict[str, str]] = []

    with Progress("verifying", len(pages)) as progress:

        async def judge(batch: list[ReadPage]) -> None:
            for page in batch:
                verdict = "ok" if page.outcome is ReadOutcome.LOADED else _BAD_WORDS.get(page.outcome, "unreadable")
                tally[verdict] += 1
                if verdict != "ok":
                    name = model.components[page.component_index].name
                    bad.append({"component": name, "key": page.key.hex(), "verdict": verdict})
            progress.add(len(batch), sum(page.payload_bytes for page in batch))

        await read_pages(storage, model, [(page.component_index, page.key) for page in pages], judge)
    bad.sort(key=lambda one: (one["component"], one["key"]))
    return {word: tally[word] for word in ("ok", "corrupt", "missing", "unreadable")}, bad


# ---- rm


async def _rm(l3: L3, arguments: argparse.Namespace) -> int:
    (model,) = l3.models
    keys = [_key(text) for text in arguments.key]
    if bool(keys) == arguments.all:
        raise UsageError("name page keys, or give --all")
    if not arguments.all:
        return await _remove_keys(l3.storage, model, keys)
    pages = await list_pages(l3.storage, model)
    size = sum(page.stored_bytes for page in pages)
    what = f"{_count(len(pages), 'page')} ({size} bytes) of model {model.name} in the {l3.storage.kind} storage"
    if not arguments.yes and not _agrees(f"remove all {what}?"):
        raise UsageError(f"this would remove all {what}; say --yes")
    removed = 0
    with Progress("removing", len(pages)) as progress:
        for page in pages:
            removed += await l3.storage.delete(model, page.component_index, page.key)
            progress.add(1, page.stored_bytes)
    print(f"removed {_count(removed, 'page')}")
    return Exit.OK


async def _remove_keys(storage: Storage, model: ModelLayout, keys: Sequence[bytes]) -> int:
    removed, absent = 0, 0
    for key in keys:
        there = [await storage.delete(model, index, key) for index in range(len(model.components))]
        removed += sum(there)
        if not any(there):
            absent += 1
            print(f"forestage: {key.hex()}: not there", file=sys.stderr)
    print(f"removed {_count(removed, 'page')}")
    return Exit.FAILED if absent else Exit.OK


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not 16 <= len(key) <= 64:
        raise UsageError(f"{text!r} is no page key: 32 to 128 hex digits")
    return key


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
