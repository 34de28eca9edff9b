"""`forestage l3`: look after what lies in L3."""

import asyncio
import sys
import time
from collections.abc import Iterator

from forestage.assembly import build_storage
from forestage.cli.exits import Exit
from forestage.cli.serve import load_or_complain
from forestage.core.errors import ForestageError
from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, ReadOutcome, Storage
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage

__all__ = ["put"]

_SOURCES: dict[str, type[DirectoryStorage]] = {"hicache-file": HicacheFileStorage, "file": FileStorage}


def put(config_path: str, model: str, source: str) -> int:
    """Copy every whole page of a model from a directory into the configured storage; return the exit code."""
    config = load_or_complain(config_path)
    if config is None:
        return Exit.USAGE
    layout = next((layout for layout in config.layouts() if layout.name == model), None)
    kind, _, directory = source.partition(":")
    if layout is None:
        print(f"forestage: no model {model!r} in {config_path}", file=sys.stderr)
        return Exit.USAGE
    if kind not in _SOURCES or not directory:
        print(f"forestage: --from: {source!r} is not KIND:DIR with KIND one of {', '.join(_SOURCES)}", file=sys.stderr)
        return Exit.USAGE
    try:
        return asyncio.run(_put(_SOURCES[kind](directory), build_storage(config), layout))
    except (ForestageError, OSError) as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.FAILED


async def _put(source: DirectoryStorage, target: Storage, layout: ModelLayout) -> int:
    await target.open()
    copied = skipped = size = 0
    progress = _Progress()
    try:
        pages = source.iter_pages(layout)
        while (page := await asyncio.to_thread(_next, pages)) is not None:
            shards = await _read(source, layout, *page)
            if shards is None:
                skipped += 1
                continue
            await target.write(layout, page[0], page[1], shards)
            copied += 1
            size += sum(map(len, shards))
            progress.show(f"{copied} pages, {size / 1e6:.1f} MB")
    finally:
        progress.end()
        await source.aclose()
        await target.aclose()
    print(f"copied {copied} pages, {size} bytes; skipped {skipped} that were not whole")
    return Exit.OK


def _next(pages: Iterator[tuple[int, bytes]]) -> tuple[int, bytes] | None:
    return next(pages, None)


async def _read(source: Storage, layout: ModelLayout, component_index: int, key: bytes) -> list[bytearray] | None:
    component = layout.components[component_index]
    shards = [bytearray(component.bytes) for _ in range(component.shards)]
    outcomes: list[ReadOutcome] = []
    read = PageRead(component_index, key, tuple(map(memoryview, shards)))
    await source.read_into(layout, [read], lambda _, outcome: outcomes.append(outcome))
    return shards if outcomes == [ReadOutcome.LOADED] else None


class _Progress:
    """One line that is rewritten, on a terminal and only when the work takes longer than a second."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()
        self._open = False

    def show(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._started > 1.0 and now - self._shown > 0.1:
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
            self._shown, self._open = now, True

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr)
