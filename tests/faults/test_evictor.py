"""Somebody removes files of L3 while they are asked for and read: prefixes get shorter, nothing else happens."""

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forestage.storage.files import FileStorage
from support.live import PAGE_BYTES, content, kv_only, live, make_keys


@contextmanager
def _evicting(root: Path) -> Iterator[None]:
    randomness, stop = random.Random(3), threading.Event()

    def evict() -> None:
        while not stop.is_set():
            files = list(root.rglob("*.page"))
            for file in randomness.sample(files, min(3, len(files))):
                file.unlink()
            stop.wait(0.005)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_files_that_go_while_they_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    storage = FileStorage(tmp_path / "l3")
    chains = [make_keys(12, f"chain {i}") for i in range(10)]
    outcomes = set()
    async with live(tmp_path, kv_only(24), inner=storage) as service:
        layout = service.engine.pools["m"].layout
        with _evicting(tmp_path / "l3"):
            for turn in range(40):
                keys = chains[turn % 10]
                for key in keys:
                    await storage.write(layout, 0, key, [content(key, "kv", PAGE_BYTES)])
                job = await service.client.prefetch("m", keys, request_id="r", wait_ms=20_000)
                assert set(job.shortfall) <= {"not_stored", "vanished"}
                assert job.pages.ready == len(job.slots.get("kv", ()))
                outcomes.add(job.outcome)
                await service.client.cancel("r")
        await service.idle()
        assert "partial" in outcomes
        for key in chains[0]:
            await storage.write(layout, 0, key, [content(key, "kv", PAGE_BYTES)])
        assert (await service.client.prefetch("m", chains[0], wait_ms=20_000)).outcome == "complete"
        await service.idle()
    assert not caplog.records
