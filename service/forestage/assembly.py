"""Puts a service together from its configuration: storage, pools, engine, metrics."""

import time
from dataclasses import dataclass

from forestage import __version__
from forestage.config import Config, ModelConfig
from forestage.core.breaker import Breaker
from forestage.core.engine import Engine, EngineSettings
from forestage.core.hints import HintCounts
from forestage.core.kv_events import HashForm, KvForm
from forestage.core.model_pool import ModelPool
from forestage.core.residency import Residency
from forestage.core.tenants import Tenants
from forestage.core.write import WriteSettings
from forestage.observe.history import History
from forestage.observe.job_log import JobLog
from forestage.observe.metrics import Metrics
from forestage.observe.observers import JobObservers, StorageObservers
from forestage.observe.tracing import Tracing
from forestage.pool.file import PoolFile, PoolSettings
from forestage.prefetch.feed import ResidencyFeed
from forestage.prefetch.kv_publisher import KvPublisher, PublisherSettings
from forestage.prefetch.service import PrefetchService
from forestage.storage.base import Storage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.lmcache import LmcacheFileStorage
from forestage.storage.vllm import VllmFileStorage
from forestage.storage.wrap import GuardedStorage

#: Of the largest size, whose keys may be kept at once.
LIVE_REQUESTS = 64

__all__ = ["LIVE_REQUESTS", "Assembly", "assemble", "build_storage", "pool_settings"]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one running service. `storage` is the guarded one; `publisher` is to be opened before it runs."""

    config: Config
    pool: PoolFile
    storage: GuardedStorage
    metrics: Metrics
    history: History
    service: PrefetchService
    tracing: Tracing | None
    publisher: KvPublisher | None


def pool_settings(config: Config) -> PoolSettings:
    """Return section `[pool]` as the pool wants it."""
    pool = config.pool
    return PoolSettings(pool.path, pool.bytes, pool.pin, pool.hugepages, pool.numa_node, pool.mode)


def build_storage(config: Config) -> Storage:
    """Make the configured storage; it is not opened."""
    storage = config.storage
    match storage.kind:
        case "file":
            return FileStorage(storage.file.root, direct=storage.file.direct, readers=storage.readers)
        case "hicache-file":
            return HicacheFileStorage(storage.hicache_file.root, readers=storage.readers)
        case "vllm-file":
            return VllmFileStorage(storage.vllm_file.root, readers=storage.readers)
        case "lmcache-file":
            return LmcacheFileStorage(storage.lmcache_file.root, readers=storage.readers)
        case "lmcache-redis":
            from forestage.storage.redis import LmcacheRedisStorage, useful_connections

            return LmcacheRedisStorage(
                storage.lmcache_redis.url,
                connections=useful_connections(storage.lmcache_redis.connections),
                ttl_s=storage.lmcache_redis.ttl_s,
                probe_timeout_s=storage.probe_timeout_ms / 1e3,
                stall_timeout_s=storage.stall_timeout_ms / 1e3,
            )
        case _:
            # The others need not wait for its client's import.
            from forestage.storage.redis import RedisStorage, useful_connections

            return RedisStorage(
                storage.redis.url,
                prefix=storage.redis.prefix,
                connections=useful_connections(storage.redis.connections),
                ttl_s=storage.redis.ttl_s,
                probe_timeout_s=storage.probe_timeout_ms / 1e3,
                stall_timeout_s=storage.stall_timeout_ms / 1e3,
            )


def assemble(config: Config, pool: PoolFile, storage: Storage, tracing: Tracing | None = None) -> Assembly:
    """Connect pool and storage. Must be called on the event loop that will run the service."""
    metrics, history = Metrics(storage.kind, __version__), History()
    guarded = GuardedStorage(
        storage,
        probe_timeout_s=config.storage.probe_timeout_ms / 1e3,
        stall_timeout_s=config.storage.stall_timeout_ms / 1e3,
        breaker=Breaker(),
        observe=StorageObservers((metrics, history)),
    )
    regions = pool.geometry.regions
    index_of = {(region.model.name, region.component_index): i for i, region in enumerate(regions)}
    shares = Tenants(config.shares()).shares
    pools = {}
    dirty: dict[str, list[list[tuple[int, int, bytes]]]] = {}
    for layout in config.layouts():
        mine = [index_of[layout.name, c] for c in range(len(layout.components))]
        capacities = [regions[i].slots for i in mine]
        events = [pool.tables[i] for i in mine]
        pools[layout.name] = ModelPool(
            layout, capacities, events, config.lease.max_pinned_fraction, config.pool.write_reserve, shares
        )
        dirty[layout.name] = []
        for c, i in enumerate(mine):
            # How recently they were used is not known any more; what leads to a page must outlast it.
            adopted, pool.adopted[i] = pool.adopted[i], []
            adopted.sort(key=lambda page: page.page, reverse=True)
            pools[layout.name].adopt(c, [(page.slot, page.key) for page in adopted])
            dirty[layout.name].append([(page.page, page.slot, page.key) for page in adopted if page.dirty])
    settings = EngineSettings(
        budget_bytes=int(sum(region.data_bytes for region in regions) * config.prefetch.max_inflight_fraction),
        queue_limit=config.prefetch.queue_limit,
        settle_s=config.prefetch.settle_ms / 1e3,
        keep_done_s=config.prefetch.keep_done_ms / 1e3,
        max_lease_s=config.lease.max_ms / 1e3,
        writes=WriteSettings(
            max_dirty_fraction=config.writes.max_dirty_fraction,
            expire_s=config.writes.expire_ms / 1e3,
            keep_done_s=config.writes.keep_done_ms / 1e3,
            max_attempts=config.writes.max_attempts,
            max_writes=config.writes.max_writes,
        ),
        max_pin_s=config.lease.max_pin_ms / 1e3,
        tenants=config.shares(),
        max_jobs=config.prefetch.max_jobs,
        max_live_pages=LIVE_REQUESTS * config.prefetch.max_pages,
        max_leases=config.lease.max_leases,
        max_pins=config.lease.max_pins,
    )
    engine = Engine(pools, settings)
    lent, pool.lent = pool.lent, []
    now = time.monotonic()
    for layout in config.layouts():
        mine = [index_of[layout.name, c] for c in range(len(layout.components))]
        engine.writes.adopt(pools[layout.name], dirty[layout.name], now)
        slots = [[slot for region, slot in lent if region == i] for i in mine]
        engine.writes.quarantine(pools[layout.name], slots, now)
    traced = [] if tracing is None else [tracing.spans]
    told = JobObservers((metrics, history, JobLog(), *traced))
    feed = ResidencyFeed(Residency(pools, config.events.buffer), config.events.max_listeners)
    publisher = KvPublisher(feed, config.layouts(), _publisher_settings(config)) if config.events.publish else None
    hints = HintCounts()
    metrics.watch(engine, feed, hints, pool.path, pool.pinned, pool.generation)
    service = PrefetchService(
        engine,
        pool,
        lambda model, c: index_of[model, c],
        guarded,
        told,
        residency=feed,
        companions=[] if publisher is None else [publisher.run],
        hints=hints,
    )
    return Assembly(config, pool, guarded, metrics, history, service, tracing, publisher)


def _publisher_settings(config: Config) -> PublisherSettings:
    events = config.events
    return PublisherSettings(
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        form=KvForm(events.form),
        hash_forms={model.name: _hash_form(events.hashes, model) for model in config.models},
        buffer_steps=events.buffer_steps,
        data_parallel_rank=events.data_parallel_rank,
        clear=events.clear,
    )


def _hash_form(word: str, model: ModelConfig) -> HashForm:
    """Return how block hashes of a model are written; "auto" goes by the engine whose page keys it has."""
    if word != "auto":
        return HashForm(word)
    scheme = "" if model.hash is None else model.hash.scheme
    return next((form for form in (HashForm.VLLM, HashForm.SGLANG) if scheme.startswith(form)), HashForm.BYTES)
