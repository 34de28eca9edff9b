"""`forestage l3 put`: copy the pages of a model into the configured L3."""

import argparse
import asyncio
import os
from collections.abc import Callable

from forestage.assembly import build_storage
from forestage.cli.exits import Exit
from forestage.cli.l3 import L3, UsageError, work
from forestage.cli.l3_reading import ReadPage, read_pages
from forestage.cli.progress import Progress
from forestage.config import ConfigError, load
from forestage.core.layout import ModelLayout
from forestage.storage.base import ReadOutcome, Storage
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.listing import list_pages
from forestage.storage.lmcache import LmcacheFileStorage
from forestage.storage.vllm import VllmFileStorage

__all__ = ["copy_pages", "put"]

_FILE_KINDS: dict[str, Callable[[str], DirectoryStorage]] = {
    "hicache-file": HicacheFileStorage,
    "vllm-file": VllmFileStorage,
    "lmcache-file": LmcacheFileStorage,
    "file": FileStorage,
}
_KINDS = f"{':DIR, '.join(_FILE_KINDS)}:DIR or config:FILE"


def put(arguments: argparse.Namespace) -> int:
    """Copy every whole page of a model into the configured storage; return the exit code."""
    return work(arguments, _put)


async def _put(l3: L3, arguments: argparse.Namespace) -> int:
    (model,) = l3.models
    source, source_model = _source(arguments.source, model)
    try:
        await source.open()
        copied, skipped, size = await copy_pages(source, source_model, l3.storage, model)
    finally:
        await source.aclose()
    print(f"copied {copied} pages, {size} bytes; skipped {skipped} that were not whole")
    return Exit.OK


async def copy_pages(
    source: Storage, source_model: ModelLayout, target: Storage, target_model: ModelLayout
) -> tuple[int, int, int]:
    """Copy every page that can be read whole; return pages copied, pages passed over, and payload bytes copied.

    Raises StorageUnavailableError or OSError at the first page that cannot be written, or when the source is gone.
    """
    pages = await list_pages(source, source_model)
    copied = size = 0
    with Progress("copying", len(pages)) as progress:

        async def write(batch: list[ReadPage]) -> None:
            nonlocal copied, size
            whole = [page for page in batch if page.outcome is ReadOutcome.LOADED]
            # A group: when one write fails, none of the others may go on with memory that is used again.
            async with asyncio.TaskGroup() as writes:
                for page in whole:
                    writes.create_task(target.write(target_model, page.component_index, page.key, page.views))
            copied += len(whole)
            written = sum(page.payload_bytes for page in whole)
            size += written
            progress.add(len(batch), written)

        await read_pages(source, source_model, [(page.component_index, page.key) for page in pages], write)
    return copied, len(pages) - copied, size


def _source(text: str, model: ModelLayout) -> tuple[Storage, ModelLayout]:
    kind, _, where = text.partition(":")
    if not where or kind not in {*_FILE_KINDS, "config"}:
        raise UsageError(f"--from: {text!r} is none of {_KINDS}")
    if kind == "config":
        return _configured_source(where, model)
    if not os.path.isdir(where):
        raise UsageError(f"--from: {where} is no directory")
    source = _FILE_KINDS[kind](where)
    try:
        source.shelves(model)
    except ValueError as error:
        raise UsageError(f"--from: {error}") from error
    return source, model


def _configured_source(path: str, model: ModelLayout) -> tuple[Storage, ModelLayout]:
    """Return the storage of another configuration, which the environment does not change, and its model."""
    try:
        config = load(path, {})
    except ConfigError as error:
        raise UsageError("--from: " + "; ".join(error.mistakes)) from error
    theirs = next((layout for layout in config.layouts() if layout.name == model.name), None)
    if theirs is None:
        raise UsageError(f"--from: no model {model.name!r} in {path}")
    if _payloads(theirs) != _payloads(model):
        raise UsageError(f"--from: model {model.name!r} in {path} has other pages")
    return build_storage(config), theirs


def _payloads(model: ModelLayout) -> tuple[object, ...]:
    """Return what must agree for a page of one to be a page of the other."""
    components = [(c.name, c.bytes, c.shards, c.covers, c.window) for c in model.components]
    return model.page_tokens, model.dtype, model.layout, components
