"""The service's side of writes over a real pool file: slots lent, published or taken back as a test decides."""

import json
from typing import Any

import httpx2

from forestage.core.layout import ModelLayout
from forestage.pool.file import PoolFile, PoolSettings
from forestage_client._codec import JSON_TYPE, decode_body, decode_keys

__all__ = ["WritingService"]


class WritingService:
    """Answers `/v1/writes` for one model, whose slots it gives out in order; `answer` goes to a StubServer.

    `stored` and `granted` are what it claims of pages, `expires_in_ms` how long writes last; it refuses everything with
    503 while `stopping`.
    """

    def __init__(self, settings: PoolSettings, layout: ModelLayout) -> None:
        self.settings = settings
        self.layout = layout
        self.pool = PoolFile.create(settings, (layout,))
        self.stored: set[int] = set()
        self.granted: int | None = None
        self.expires_in_ms = 60_000
        self.stopping = False
        self.calls: list[str] = []
        self.published: dict[tuple[str, int], int] = {}  # (component, page) -> slot
        self._next = [0] * len(layout.components)
        self._keys: list[bytes] = []
        self.lent: list[tuple[int, int, int]] = []  # region, page, slot

    def restart(self) -> None:
        """Go away and come back: the pool is adopted, and writes are forgotten."""
        self.pool.close()
        self.pool = PoolFile.create(self.settings, (self.layout,))

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        action = f"{request.method} {request.url.path.rpartition('/')[2]}"
        self.calls.append(action)
        if self.stopping:
            return httpx2.Response(503, content=b"")
        match action:
            case "POST writes":
                return _json(201, self._begin(decode_body(request.content, request.headers["content-type"])))
            case "POST commit":
                return _json(200, self._commit())
            case "DELETE w":
                for region, _, slot in self.lent:
                    self.pool.tables[region].clear(slot)
                self.lent.clear()
                return httpx2.Response(204)
        return httpx2.Response(404, content=b"")

    def _begin(self, body: Any) -> dict[str, object]:
        self._keys = decode_keys(body)
        granted = len(self._keys) if self.granted is None else self.granted
        slots: dict[str, list[int | None]] = {}
        for region, component in enumerate(self.layout.components):
            pages = body["tails"].get(component.name, []) if component.is_tail else range(len(self._keys))
            slots[component.name] = []
            for page in pages:
                if page in self.stored or page >= granted:
                    slots[component.name].append(None)
                    continue
                slot = self._next[region]
                self._next[region] += 1
                self.pool.tables[region].begin_fill(slot, lent=True)
                self.lent.append((region, page, slot))
                slots[component.name].append(slot)
        return {
            "id": "w",
            "stored": sorted(self.stored),
            "granted": granted,
            "reason": None if granted == len(self._keys) else "back_pressure",
            "slots": slots,
            "instance": self.pool.instance,
            "generation": self.pool.generation,
            "expires_in_ms": self.expires_in_ms,
        }

    def _commit(self) -> dict[str, int]:
        pages = {page for _, page, _ in self.lent}
        for region, page, slot in self.lent:
            self.pool.tables[region].publish(slot, self._keys[page], page, dirty=True)
            self.published[self.layout.components[region].name, page] = slot
        self.lent.clear()
        return {"committed": len(pages), "durable": 0, "failed": 0, "duplicate": 0}


def _json(status: int, value: object) -> httpx2.Response:
    return httpx2.Response(status, content=json.dumps(value).encode(), headers={"content-type": JSON_TYPE})
