"""Run as a script by root: give up root, then probe and read pages; prints what came as JSON."""

import asyncio
import json
import os
import sys

from contract.storage_contract import Landing, hybrid, keys
from forestage.storage.base import Probe
from forestage.storage.files import FileStorage

__all__: list[str] = []


async def _ask(root: str) -> None:
    storage = FileStorage(root)
    model, pages = hybrid(shards=1), keys(3)
    presence = await storage.probe(model, Probe(pages, 0, 0, bytes(3)))
    outcomes = await Landing(model, 0, pages).read(storage)
    await storage.aclose()
    print(json.dumps({"present": list(presence.masks[0]), "outcomes": outcomes}))


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    asyncio.run(_ask(sys.argv[1]))
