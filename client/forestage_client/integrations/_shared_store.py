"""A model's pages in the service and its shared pool, as one rank of an engine reads and writes them.

Law: bytes are handed to the engine only as `PoolView` promises them, those of the key that was asked for; a page is
published only when all of its components were filled while the write was open.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from forestage_client import Client, Component, Lookup, Model, PoolView, Prefetch, Write, WritePart
from forestage_client._errors import ForestageError
from forestage_client._memory import address_of
from forestage_client._pool_format import PoolFormatError
from forestage_client.integrations._host_pages import HostPage
from forestage_client.integrations._outages import Away, Mismatch, Outages
from forestage_client.integrations._region_fills import RegionFills
from forestage_client.integrations._sglang_settings import Settings

__all__ = ["Attachment", "Fetched", "SharedStore"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attachment:
    """The pool as it was attached, and the model in it. `file` tells it from a pool that replaces it.

    `first_slots` are the first slots of each component, which keep the memory where it is, and their addresses.
    """

    view: PoolView
    model: Model
    file: tuple[int, int]
    components: Mapping[str, Component]
    has_tails: bool
    first_slots: Mapping[str, tuple[memoryview, int]]

    @classmethod
    def of(cls, view: PoolView, model: Model, file: tuple[int, int]) -> "Attachment":
        """Take note of where the model's slots are in the pool. Raises KeyError when they are not there."""
        components = {component.name: component for component in model.components}
        firsts = {name: view.view(model.name, name, 0) for name in components}
        addressed = {name: (first, address_of(first)) for name, first in firsts.items()}
        return cls(view, model, file, components, any(c.is_tail for c in components.values()), addressed)

    def address(self, component: str, shard: int) -> int:
        """Return where a shard of the component's first slot begins."""
        return self.first_slots[component][1] + shard * self.view.regions[self.model.name][component].shard_bytes

    def is_current(self) -> bool:
        """Say whether the pool's path still names the file that is attached."""
        return _file_at(self.view.path) == self.file


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages that a job has brought: the first `ready` of those asked for, leased while the `with` block lasts."""

    attachment: Attachment
    job: Prefetch
    keys: Sequence[str]

    @property
    def ready(self) -> int:
        return self.job.pages.ready

    def copy(self, component: Component, shard: int, targets: Sequence[HostPage]) -> list[bool]:
        """Copy one shard of each page, from the first one on, into the engine's memory; say which are there in whole.

        Of a tail component those of the window that ends at `ready`. What a target has where the answer is False is
        undefined. Raises Mismatch when the engine's pages have another size.
        """
        model, name = self.job.model, component.name
        slots = self.job.slots.get(name, ())
        first = self.ready - len(slots) if component.is_tail else 0
        wanted = targets[first : first + len(slots)]
        slots = slots[: len(wanted)]
        other = next((target.num_bytes for target in wanted if target.num_bytes != component.bytes), None)
        if other is not None:
            raise Mismatch(f"a page of {name} has {component.bytes} bytes, SGLang's {other}")
        view, keys = self.attachment.view, self.keys[first : first + len(slots)]
        stamps = view.stamp_all(model, name, slots, keys)
        start, step = self.attachment.address(name, shard), view.regions[model][name].slot_bytes
        for generation, slot, target in zip(stamps.generations, slots, wanted, strict=True):
            if generation is not None:
                target.fill(start + slot * step)
        held = view.held(stamps)
        return [False] * min(first, len(targets)) + held + [False] * (len(targets) - first - len(held))


class SharedStore:
    """Finds, fetches and writes pages of one model, for several threads. Raises Away, Mismatch and client errors."""

    def __init__(self, settings: Settings) -> None:
        """Connect to nothing yet. Raises ValueError for a malformed URL."""
        self.settings = settings
        self._client = Client(settings.url, token=settings.token, timeout_s=settings.query_ms / 1000)
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._outages = Outages()
        self._fills = RegionFills(settings, self._client, self._outages)

    def close(self) -> None:
        """Close the connections and let go of the pool. Idempotent."""
        self._fills.close()
        self._client.close()
        self._attachment = None

    def attach(self, *, populate: bool = False) -> Attachment:
        """Return the pool as it is now, attaching it where it is new; with `populate`, page it in (0.12 s a GiB)."""
        with self._lock:
            attachment = self._attachment
            if attachment is None or not attachment.is_current():
                # Whoever still copies from an earlier one holds a view of it, and that keeps the memory.
                self._attachment = None
                self._attachment = attachment = self._attach(populate)
            return attachment

    def find(self, keys: Sequence[str]) -> Lookup:
        """Say what is stored of a prefix."""
        return self._ask(lambda client: client.lookup(self.settings.model, keys, tenant=self.settings.tenant))

    @contextmanager
    def fetch(self, keys: Sequence[str]) -> Iterator[Fetched]:
        """Bring a prefix into the pool within the deadline, and lease what has come for the `with` block."""
        attachment = self.attach()
        tokens = len(keys) * attachment.model.page_tokens
        wait_ms = self.settings.read_deadline_ms(tokens)
        job = self._ask(
            lambda client: client.prefetch(
                self.settings.model, keys, deadline_ms=wait_ms, wait_ms=wait_ms, tenant=self.settings.tenant
            )
        )
        try:
            # Slots are those of the pool that the service has now.
            if not attachment.is_current():
                raise Away("the pool was replaced")
            yield Fetched(attachment, job, keys)
        finally:
            with suppress(ForestageError):
                self._client.cancel(job.request_id)

    def bring(
        self, keys: Sequence[str], component: Component, targets: Sequence[HostPage], pool: Any = None
    ) -> tuple[int, list[bool]]:
        """Bring a prefix within the deadline, and one component's pages of it into the engine's memory.

        The service puts them there itself where `pool`, SGLang's host pool that they lie in, is memory that it can
        fill; else they are copied. Returns how much of the prefix is there, and which pages are in whole, from the
        first one on.
        """
        shard = self.shard(component)
        deadline_ms = self.settings.read_deadline_ms(len(keys) * self.attach().model.page_tokens)
        filled = self._fills.fill(pool, keys, component, shard, targets, deadline_ms)
        if filled is not None:
            return filled
        with self.fetch(keys) as fetched:
            return fetched.ready, fetched.copy(component, shard, targets)

    def shard(self, component: Component) -> int:
        """Return which of a component's shards is this rank's. Raises Mismatch for a model laid out otherwise."""
        rank = self.settings.rank
        shard = rank.shard_of(component.shards)
        if shard is None:
            raise Mismatch(
                f"{component.name} has {component.shards} shards in the service's model, but SGLang {rank.count} ranks"
            )
        return shard

    def write(
        self, keys: Sequence[str], pages: Mapping[str, Mapping[int, HostPage]], tails: Mapping[str, Sequence[int]]
    ) -> int:
        """Put this rank's shard of pages into the pool, and so into L3; return how many are there, from the first one.

        They are published when all ranks have put theirs. While L3 is behind, wait for it
        until the deadline of a write. `pages[component][i]` is page i. Raises Mismatch when a page has another size
        than the model's, or the model's shards are not what the ranks write.
        """
        attachment = self.attach()
        if not attachment.view.writable:
            raise Mismatch(f"the pool at {attachment.view.path} may not be written to by this user: see pool.mode")
        components = attachment.components
        for name, some in pages.items():
            component = components[name]
            if any(page.num_bytes != component.bytes for page in some.values()):
                raise Mismatch(f"a page of {name} has {component.bytes} bytes, SGLang's has not")
        shards = {name: self.shard(component) for name, component in components.items()}
        writers = self.settings.rank.writers
        if any(component.shards != writers for component in components.values()):
            # Of some models the other ranks have nothing but states to write, and no page to bring them with.
            raise Mismatch(f"SGLang lets {writers} ranks write KV pages, so each component has to have as many shards")
        deadline_s = time.monotonic() + self.settings.write_ms / 1000
        stored = 0
        while True:
            with self._outages.noted():
                part = self._part_of(keys[stored:], writers)
                write = self._write_from(stored, attachment.view, keys, pages, tails, shards, part)
            stored += write.granted
            left_ms = int(1000 * (deadline_s - time.monotonic()))
            if stored >= len(keys) or write.reason != "back_pressure" or left_ms <= 0:
                return min(stored, len(keys))
            # L3 is behind. Where some got in the rest may once it has those, else once it has others' pages.
            if write.granted > len(write.stored):
                self._ask(partial(Client.write_status, write_id=write.id, wait_ms=min(left_ms, 1000)))
            else:
                time.sleep(min(left_ms, 50) / 1000)

    def _write_from(
        self,
        first: int,
        view: PoolView,
        keys: Sequence[str],
        pages: Mapping[str, Mapping[int, HostPage]],
        tails: Mapping[str, Sequence[int]],
        shards: Mapping[str, int],
        part: WritePart | None,
    ) -> Write:
        left = {name: [index - first for index in indexes if index >= first] for name, indexes in tails.items()}
        left = {name: indexes for name, indexes in left.items() if indexes}
        model, tenant = self.settings.model, self.settings.tenant
        with self._client.write(view, model, keys[first:], left, tenant=tenant, part=part) as writer:
            for name, some in pages.items():
                for index, page in some.items():
                    if writer.wants(name, index - first):
                        page.drain(address_of(writer.views(name, index - first)[shards[name]]))
                        writer.check()
        return writer.write

    def _part_of(self, keys: Sequence[str], shards: int) -> WritePart | None:
        """Return this rank's part of a write, None where there is one shard.

        All ranks are given the same pages, and so find the same name for it.
        """
        if shards == 1:
            return None
        name = hashlib.sha256("".join(keys).encode()).hexdigest()
        return WritePart(f"sglang:{name}", self.settings.rank.shard_of(shards) or 0, shards)

    def _attach(self, populate: bool) -> Attachment:
        settings = self.settings
        pool = self._ask(lambda client: client.pool())
        models = {model.name: model for model in self._ask(lambda client: client.models())}
        if settings.model not in models:
            raise Mismatch(f"the service has no model {settings.model!r}, but {', '.join(sorted(models)) or 'none'}")
        path = settings.pool_path or pool.path
        before = _file_at(path)
        try:
            view = PoolView(path, writable=True)
        except PermissionError:
            view = PoolView(path)
        except PoolFormatError as error:
            raise Away(f"{path}: {error}") from error
        if before is None or _file_at(path) != before or not view.belongs_to(pool.instance, pool.generation):
            raise Away("the service is starting anew, or the pool at this path is another service's")
        if populate:
            view.populate()
        return Attachment.of(view, models[settings.model], before)

    def _ask(self, question: Callable[[Client], T]) -> T:
        with self._outages.noted():
            return question(self._client)


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
