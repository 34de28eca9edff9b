"""SGLang's dynamic storage backend over a Forestage service: `--hicache-storage-backend dynamic`, see docs/sglang.md.

Law: no method raises into the engine. What cannot be had in time, or at all, is a miss; once the service is back, so
are its pages. (Settings that cannot be meant refuse the start, in the constructor.)
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from forestage_client import Component, Stale
from forestage_client._errors import ForestageError
from forestage_client.integrations._chains import Chains
from forestage_client.integrations._host_pages import BytesPage, HostPage, pages_of, tensor_page
from forestage_client.integrations._host_room import HostRoom
from forestage_client.integrations._outages import Away, Mismatch
from forestage_client.integrations._quiet_log import QuietLog
from forestage_client.integrations._sglang_settings import Settings
from forestage_client.integrations._shared_store import SharedStore
from forestage_client.integrations._staged_pages import StagedPages

if TYPE_CHECKING:
    import torch

__all__ = ["ForestageStorage"]

P = ParamSpec("P")
S = TypeVar("S", bound="ForestageStorage")
T = TypeVar("T")

KV = "kv"
#: SGLang asks for at most so many pages at once; a shorter read is the last of its prefix.
_BATCH_PAGES = 128

_log = QuietLog(logging.getLogger(__name__))


def _or_miss(
    miss: Callable[..., T],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Let a method answer `miss(its arguments)` in place of any exception, and log that now and then."""

    def around(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def answer(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except (Away, ForestageError, Stale) as error:
                _log.tell(f"Forestage: {method.__name__} is a miss: {error}", time.monotonic())
            except (Mismatch, OSError, ValueError) as error:
                _log.tell(f"Forestage: {method.__name__} cannot be: {error}", time.monotonic())
            except Exception as error:
                _log.tell(f"Forestage: {method.__name__} failed", time.monotonic(), error)
            return miss(*args, **kwargs)

        return answer

    return around


def _none_of(keys: Sequence[str], *_: object, **__: object) -> list[bool]:
    return [False] * len(keys)


def _none_in(transfers: Sequence[Any], *_: object, **__: object) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _no_tensors(keys: Sequence[str], *_: object, **__: object) -> "list[torch.Tensor | None]":
    return [None] * len(keys)


def _result(hit: int, by_pool: Mapping[str, int], lengths: Sequence[int]) -> Any:
    result = PoolTransferResult(hit, dict(by_pool))
    if hasattr(result, "restorable_prefix_pages"):  # not in SGLang 0.5.13
        result.restorable_prefix_pages = list(lengths)
    return result


class ForestageStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of one model for one rank. SGLang calls it from three threads: one asks, one reads, one writes."""

    def __init__(self, storage_config: Any, _kwargs: object = None) -> None:
        """Read SGLang's HiCacheStorageConfig, whose `extra_config` holds our keys, and attach the pool if it is there.

        Raises ValueError for settings that cannot be meant. A service that is away is no error.
        """
        self._settings = Settings.read(storage_config)
        self._store = SharedStore(self._settings)
        self._chains = Chains()
        self._staged = StagedPages(self._settings.staging_bytes)
        self._room = HostRoom(self._settings.host_room)
        self._pools: dict[str, Any] = {}
        self._attach_first()

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool that KV pages are read into and written from."""
        self.mem_pool_host = mem_pool_host
        self._pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take the pool of another component, or that of KV again."""
        self._pools[str(host_pool_name)] = host_pool

    # ---- what is stored

    @_or_miss(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Say whether a page, or with `key` = "hash.pool" a page of a side pool, is stored."""
        key, _, pool = key.partition(".")
        found = self._store.find([key])
        if pool and self._component(pool).is_tail:
            return bool(found.boundaries)
        return found.pages.stored == 1

    @_or_miss(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages from the first one can be had."""
        if not keys:
            return 0
        found = self._store.find(keys)
        if found.boundaries is None:
            return found.pages.stored
        lengths = self._learn(keys, found.boundaries)
        return lengths[-1] if lengths else 0

    @_or_miss(lambda *_, **__: _result(0, {}, ()))
    def batch_exists_v2(self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None) -> Any:
        """Return at which lengths a prefix can be resumed, that of KV and of each pool, all in pages."""
        if not keys:
            return _result(0, {}, ())
        found = self._store.find(keys)
        stored = found.pages.stored
        if found.boundaries is None:
            boundaries = lengths = tuple(range(1, stored + 1))
        else:
            boundaries, lengths = found.boundaries, self._learn(keys, found.boundaries)
        by_pool = {KV: stored} if stored else {}
        for transfer in pool_transfers or ():
            if transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue  # another form of the same pages; it does not bound the prefix
            component = self._components().get(str(transfer.name))
            if component is None:
                raise Mismatch(f"the model has no component {str(transfer.name)!r}, which SGLang restores")
            reach = max(boundaries, default=0) if component.is_tail else stored
            if reach:
                by_pool[transfer.name] = reach
        return _result(lengths[-1] if lengths else 0, by_pool, lengths)

    # ---- read

    @_or_miss(lambda *_, **__: None)
    def get(
        self, key: str, target_location: "torch.Tensor | None" = None, target_sizes: Any = None
    ) -> "torch.Tensor | None":
        """Fill `target_location` with a page and return it, None when it cannot be had."""
        return self.batch_get([key], [target_location])[0]

    @_or_miss(_no_tensors)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> "list[torch.Tensor | None]":
        """Fill a flat page for each key; None from the first one on that cannot be had."""
        hashes, pool = _split(keys)
        done = self._read(pool, hashes, [tensor_page(target) for target in target_locations or ()])
        return [target if ok else None for target, ok in zip(target_locations, done, strict=True)]

    @_or_miss(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: "torch.Tensor", extra_info: Any = None) -> list[bool]:
        """Fill SGLang's own slots with KV pages; True from the first one on to the last that came."""
        return self._read(KV, keys, pages_of(self._pools[KV], host_indices, len(keys)))

    @_or_miss(_none_in)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill slots of any pools; each pool by itself."""
        return {transfer.name: self._get_transfer(transfer) for transfer in transfers}

    @_or_miss(lambda transfer: [False] * len(transfer.keys or ()))
    def _get_transfer(self, transfer: Any) -> list[bool]:
        name, keys = str(transfer.name), transfer.keys or []
        return self._read(name, keys, pages_of(self._pools[name], transfer.host_indices, len(keys)))

    def _read(self, pool: str, keys: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        if not keys:
            return []
        component = self._component(pool)
        asked, usable = keys, len(keys)
        if self._store.attach().has_tails and not component.is_tail:
            stretch = self._chains.stretch(keys, may_go_on=len(keys) >= _BATCH_PAGES)
            if stretch.cut_at is not None:
                self._room.was_cut(stretch.cut_at, time.monotonic())
            elif stretch.made_room:
                self._room.was_made(time.monotonic())
            asked, usable = stretch.keys, stretch.usable
        if not usable:
            return [False] * len(keys)
        host_pool = self._pools.get(pool)
        if component.is_tail:
            # A window may be shorter than what SGLang keeps; of its first pages there is nothing then.
            ready, done = self._store.bring(asked, component, pages, host_pool)
            return done if ready == len(keys) else [False] * len(keys)
        _, done = self._store.bring(asked, component, pages[:usable], host_pool)
        came = done.index(False) if False in done else len(done)
        return [page < came for page in range(len(keys))]

    # ---- write

    @_or_miss(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Put one flat page into the pool, from where it goes on to L3; say whether it is there."""
        return self.batch_set([key], [value])

    @_or_miss(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Put flat pages into the pool; say whether all are there."""
        hashes, pool = _split(keys)
        return all(self._put(pool, hashes, [tensor_page(value) for value in values]))

    @_or_miss(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: "torch.Tensor", extra_info: Any = None) -> list[bool]:
        """Put KV pages from SGLang's slots into the pool, with what was set of other pools for them before."""
        return self._put(KV, keys, pages_of(self._pools[KV], host_indices, len(keys)))

    @_or_miss(_none_in)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Take pages of other pools. They are stored with the KV pages of the same keys, which SGLang sets next."""
        done: dict[str, list[bool]] = {}
        # KV last, whatever the order: it takes the others along.
        for transfer in sorted(transfers, key=lambda transfer: str(transfer.name) == KV):
            done[transfer.name] = self._set_transfer(transfer)
        return done

    @_or_miss(lambda transfer: [False] * len(transfer.keys or ()))
    def _set_transfer(self, transfer: Any) -> list[bool]:
        name, keys = str(transfer.name), transfer.keys or []
        return self._put(name, keys, pages_of(self._pools[name], transfer.host_indices, len(keys)))

    def _put(self, pool: str, keys: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        if len(pages) != len(keys):
            raise ValueError(f"{len(keys)} keys, but {len(pages)} pages of {pool}")
        self._component(pool)
        components = self._components()
        if pool != KV:
            return [self._stage(pool, key, page) for key, page in zip(keys, pages, strict=True)]
        sides = [name for name in components if name != KV]
        staged: dict[str, dict[int, HostPage]] = {KV: dict(enumerate(pages))}
        for name in sides:
            copies = ((page, self._staged.get(name, key)) for page, key in enumerate(keys))
            staged[name] = {page: BytesPage(copy) for page, copy in copies if copy is not None}
        # A page without one that every page needs would be no page.
        whole = len(keys)
        for name in sides:
            if not components[name].is_tail:
                whole = min(whole, next((page for page in range(whole) if page not in staged[name]), whole))
        if not whole:
            return [False] * len(keys)
        inside = {name: {page: copy for page, copy in some.items() if page < whole} for name, some in staged.items()}
        tails = {name: sorted(inside[name]) for name in sides if components[name].is_tail and inside[name]}
        stored = min(whole, self._store.write(keys[:whole], inside, tails))
        for name in sides:
            for page in inside[name]:
                self._staged.drop(name, keys[page])
        return [page < stored for page in range(len(keys))]

    def _stage(self, pool: str, key: str, page: HostPage) -> bool:
        copy = BytesPage(bytearray(page.num_bytes))
        page.drain(copy.address())
        return self._staged.put(pool, key, copy.data)

    # ---- the rest

    def clear(self) -> None:
        """Forget what was learned of prefixes. The shared pages stay: they are not this engine's alone."""
        self._chains.forget()
        self._staged.clear()

    def close(self) -> None:
        """Close the connections and let go of the pool. Idempotent."""
        self.clear()
        self._store.close()

    def get_stats(self) -> None:
        """Return nothing: the service has metrics of its own."""

    @_or_miss(lambda: None)
    def _attach_first(self) -> None:
        self._store.attach(populate=True)
        for component in self._components().values():
            self._store.shard(component)

    def _components(self) -> Mapping[str, Component]:
        return self._store.attach().components

    def _component(self, pool: str) -> Component:
        try:
            return self._components()[pool]
        except KeyError:
            raise Mismatch(f"the model has no component {pool!r}") from None

    def _learn(self, keys: Sequence[str], boundaries: tuple[int, ...]) -> tuple[int, ...]:
        """Remember a prefix, and return those of its boundaries for which SGLang has room."""
        pool = self._pools.get(KV)
        if pool is None or not boundaries:
            return boundaries
        free = pool.available_size() // pool.page_size
        self._chains.remember(keys, boundaries, free)
        limit = self._room.limit(free, boundaries, time.monotonic())
        return tuple(length for length in boundaries if limit is None or length <= limit)


def _split(keys: Sequence[str]) -> tuple[list[str], str]:
    """Take keys of the form "hash" or "hash.pool" apart. Raises ValueError when they are of several pools."""
    parts = [key.partition(".") for key in keys]
    pools = {pool for _, _, pool in parts} or {""}
    if len(pools) > 1:
        raise ValueError(f"keys of several pools in one call: {', '.join(sorted(pools))}")
    return [key for key, _, _ in parts], pools.pop() or KV
