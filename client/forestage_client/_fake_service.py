"""The routes of the fake service, on decoded bodies: jobs, leases, pins, writes, refusals. No I/O, no clock of its own.

Law: a lease that is listed owns one hold on each of its slots; an ended one owns none and is not listed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forestage_client._codec import decode_keys
from forestage_client._errors import BadRequest, Conflict, Gone, NotFound, QueueFull, Stopping
from forestage_client._fake_events import FakeEvents
from forestage_client._fake_hashing import show_keys, take_prompt
from forestage_client._fake_hints import FakeHints
from forestage_client._fake_pool import FakePool, Grant, Hold, Plan
from forestage_client._fake_writes import FakeWrites
from forestage_client._types import Model

__all__ = ["FakeJob", "FakeService", "Reply"]

_JOB_NUMBERS = ("device_pages", "min_pages", "priority", "deadline_ms", "wait_ms", "lease_ms")
_NUMBERS = (*_JOB_NUMBERS, "ttl_ms")
_PREFIX = {"model", "keys", "key_bytes", "device_pages", "tenant"}
_PREFETCH = {*_PREFIX, *_JOB_NUMBERS, "request_id"}
_WRITE = {"model", "keys", "key_bytes", "tails", "tenant"}
_OWNER = {"instance": "fake", "generation": 1}


@dataclass(slots=True, eq=False)
class FakeLease:
    """Holds of one pool until `expires_s`, and the slots they are shown as."""

    id: str
    pool: FakePool
    holds: list[Hold]
    slots: Mapping[str, list[int]]
    expires_s: float


@dataclass(slots=True, eq=False)
class FakeJob:
    """A prefetch; `asked` tells another request under the same id."""

    request_id: str
    asked: object
    pool: FakePool
    grant: Grant
    lease_ms: int
    done: bool = False
    outcome: str | None = None
    ready: int = 0
    shortfall: dict[str, int] = field(default_factory=dict)
    lease: FakeLease | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer: `value` now, or `job` once it is done or `wait_ms` have passed; with it `keys` if asked for."""

    status: int
    value: object = None
    keys: Sequence[bytes] | None = None
    job: FakeJob | None = None
    wait_ms: int = 0


class FakeService:
    """Everything behind the fake's HTTP surface. Not thread-safe; raises ForestageErrors as refusals."""

    def __init__(self, models: Iterable[Model], pool_pages: int, queue_limit: int, default_lease_ms: int) -> None:
        self.now_s = 0.0
        self.holding = False
        self.stopping = False
        self.pools = {model.name: FakePool(model, pool_pages) for model in models}
        self.leases: dict[str, FakeLease] = {}
        self.writes = FakeWrites()
        self.pins: dict[str, FakeLease] = {}
        self.events = FakeEvents(self.pools)
        self._hints = FakeHints(self._ask)
        self._jobs: dict[str, FakeJob] = {}
        self._queue_limit = queue_limit
        self._default_lease_ms = default_lease_ms
        self._issued = 0

    def handle(self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, Any]) -> Reply:
        """Answer one request, its path split at the slashes."""
        self.expire()
        try:
            return self._answer(method, path, query, body)
        finally:
            self.events.look()

    def _answer(self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, Any]) -> Reply:
        if self.stopping or "writes" in path:
            return self._handle(method, path, query, body)
        models = {name: pool.model for name, pool in self.pools.items()}
        if (method, *path) == ("POST", "v1", "hash"):
            return Reply(200, *show_keys(body, models))
        body, keys = take_prompt(body, models)
        return replace(self._handle(method, path, query, body), keys=keys)

    def _ask(self, method: str, path: Sequence[str], body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that a hint stands for; says of what is deleted whether it was known."""
        if method == "DELETE":
            known = path[-1] in (self.pins if path[1] == "pins" else self._jobs)
            self._handle(method, path, {}, body)
            return {"known": known}
        reply = self._answer(method, path, {}, body)
        value = self.describe(reply.job) if reply.job is not None else reply.value
        assert isinstance(value, dict)
        return value if reply.keys is None else {**value, "keys": reply.keys}

    def _handle(self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, Any]) -> Reply:
        match (method, *path):
            case ("GET", "healthz"):
                return Reply(200, {"status": "ok"})
            case ("GET", "metrics"):
                return Reply(200, f"# TYPE forestage_leases gauge\nforestage_leases {len(self.leases)}\n")
            case _ if self.stopping:
                raise Stopping("the fake was told to stop")
            case ("GET", "readyz"):
                return Reply(200, {"status": "ready", "storage": "up"})
            case ("POST", "v1", "prefetch"):
                job = self._prefetch(body)
                return Reply(202, job=job, wait_ms=body.get("wait_ms", 0))
            case ("GET", "v1", "prefetch", request_id):
                if not (wait_ms := query.get("wait_ms", "0")).isdecimal():
                    raise BadRequest("wait_ms must be a number of at least 0")
                return Reply(200, job=self._job(request_id), wait_ms=int(wait_ms))
            case ("POST", "v1", "prefetch", request_id, "finish"):
                job = self._job(request_id)
                self._end(job, "finished")
                return Reply(200, job=job)
            case ("GET", "v1", "prefetch", request_id, "timeline"):
                return Reply(200, self._timeline(self._job(request_id)))
            case ("POST", "v1", "hints"):
                return Reply(200, self._hints.take(body))
            case ("GET", "v1", "status"):
                return Reply(200, self._status())
            case ("DELETE", "v1", "prefetch", request_id):
                self._cancel(request_id)
                return Reply(204)
            case ("POST", "v1", "lookup"):
                return Reply(200, self._lookup(body))
            case ("POST", "v1", "leases"):
                return Reply(200, self._take_lease(body))
            case ("POST", "v1", "leases", lease_id, "renew"):
                return Reply(200, self._renew(lease_id, body))
            case ("DELETE", "v1", "leases", lease_id):
                self._end_lease(lease_id)
                return Reply(204)
            case ("POST", "v1", "writes"):
                return Reply(201, self._begin_write(body))
            case ("POST", "v1", "writes", write_id, "commit"):
                return Reply(200, dict(self.writes.commit(write_id)))
            case ("DELETE", "v1", "writes", write_id):
                self.writes.drop(write_id)
                return Reply(204)
            case ("GET", "v1", "writes", write_id):
                return Reply(200, dict(self.writes.status(write_id)))
            case ("POST", "v1", "pins"):
                return self._pin(body)
            case ("DELETE", "v1", "pins", pin_id):
                self._end_lease(pin_id, self.pins)
                return Reply(204)
            case ("POST", "v1", "evict"):
                pool, keys, device_pages = self._prefix(body, _PREFIX)
                evicted, kept = pool.demote(keys, device_pages)
                return Reply(200, {"model": pool.model.name, "evicted": evicted, "kept": kept})
            case ("GET", "v1", "pool"):
                return Reply(200, self._describe_pool())
            case ("GET", "v1", "models"):
                return Reply(200, {"models": [asdict(pool.model) for pool in self.pools.values()]})
            case ("GET", "v1", "info"):
                return Reply(200, {"version": "fake", "storage": "fake", "pinned": "none", "uptime_s": self.now_s})
        raise NotFound(f"no route {method} /{'/'.join(path)}")

    @property
    def jobs(self) -> list[FakeJob]:
        return list(self._jobs.values())

    def describe(self, job: FakeJob) -> dict[str, object]:
        """Return a job as the service answers it."""
        plan, tokens = job.grant.plan, job.pool.model.page_tokens
        lengths = {
            "requested": len(job.grant.keys),
            "host": plan.host,
            "stored": plan.stored,
            "restorable": plan.restorable,
            "granted": plan.granted,
            "ready": job.ready,
        }
        alive = job.lease is not None and job.lease.id in self.leases
        return {
            "request_id": job.request_id,
            "model": job.pool.model.name,
            "state": "done" if job.done else "loading",
            "outcome": job.outcome,
            "page_tokens": tokens,
            "pages": lengths,
            "tokens": {name: pages * tokens for name, pages in lengths.items()},
            "loaded": job.grant.num_loaded(job.ready) if job.done else 0,
            "joined": 0,
            "shortfall": job.shortfall,
            "timing_ms": {"queued": 0.0, "probe": 0.0, "load": 0.0, "total": 0.0},
            **(self._describe_lease(job.lease) if alive and job.lease is not None else {}),
        }

    def resume(self) -> None:
        """Let every job be done."""
        self.holding = False
        for job in self.jobs:
            self._end(job)
        self.events.look()

    def _timeline(self, job: FakeJob) -> dict[str, object]:
        plan = job.grant.plan
        passed = [("arrived", len(job.grant.keys)), ("admitted", plan.host), ("probe", plan.host)]
        passed += [("grant", plan.granted), *([("done", job.ready)] if job.done else [])]
        return {
            "request_id": job.request_id,
            "model": job.pool.model.name,
            "state": "done" if job.done else "loading",
            "outcome": job.outcome,
            "trace_id": None,
            "cuts": 0,
            "moments": [{"at_ms": 0.0, "event": event, "pages": pages} for event, pages in passed],
        }

    def _status(self) -> dict[str, object]:
        running = [job for job in self.jobs if not job.done]
        return {
            "version": "fake",
            "state": "ready",
            "jobs": {"queued": 0, "probing": 0, "loading": len(running)},
            "running": [{"request_id": job.request_id, "model": job.pool.model.name} for job in running],
            "finished": [
                {"request_id": job.request_id, "model": job.pool.model.name, "outcome": job.outcome}
                for job in reversed(self.jobs)
                if job.done
            ],
        }

    def expire(self) -> None:
        """End the leases, pins and writes whose time is over."""
        self.writes.expire(self.now_s)
        for table in (self.leases, self.pins):
            for lease in [lease for lease in table.values() if lease.expires_s <= self.now_s]:
                self._end_lease(lease.id, table)

    # ---- jobs

    def _prefetch(self, body: Mapping[str, Any]) -> FakeJob:
        pool, keys, device_pages = self._prefix(body, _PREFETCH)
        self._issued += 1
        request_id = body.get("request_id", f"fake-{self._issued}")
        if not isinstance(request_id, str) or not re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", request_id):
            raise BadRequest("request_id must be 1 to 128 of A-Z a-z 0-9 . _ : -")
        others = {name: value for name, value in body.items() if name not in ("keys", "key_bytes", "wait_ms")}
        asked = (keys, others)
        if (known := self._jobs.get(request_id)) is not None:
            if known.asked != asked:
                raise Conflict(f"request id {request_id} was used for another request")
            return known
        if sum(not job.done for job in self.jobs) >= self._queue_limit:
            raise QueueFull("the queue is full", retry_after_s=1)
        grant = pool.grant(keys, device_pages, body.get("min_pages", 1))
        lease_ms = body.get("lease_ms", self._default_lease_ms)
        job = FakeJob(request_id, asked, pool, grant, lease_ms, ready=grant.usable)
        self._jobs[request_id] = job
        if not (self.holding and grant.reads):
            self._end(job)
        return job

    def _job(self, request_id: str) -> FakeJob:
        if request_id not in self._jobs:
            raise NotFound(f"no job {request_id}")
        return self._jobs[request_id]

    def _end(self, job: FakeJob, reason: str | None = None) -> None:
        """Leave, whatever the reason; a done job stays as it is."""
        if job.done:
            return
        grant, plan, requested = job.grant, job.grant.plan, len(job.grant.keys)
        ready, holds = job.pool.settle(grant, whole=grant.reads and reason is None)
        if reason == "cancelled":
            job.pool.let_go(holds)
        elif ready > grant.device_pages:
            job.ready = ready
            job.lease = self._new_lease(job.pool, holds, job.lease_ms)
        lost = {
            "not_stored": requested - plan.stored,
            "no_boundary": plan.stored - plan.restorable,
            "host_capacity": plan.restorable - plan.granted,
            reason or "below_min_pages": plan.granted - job.ready,
        }
        job.shortfall = {name: pages for name, pages in lost.items() if pages}
        if reason == "cancelled":
            job.outcome = "cancelled"
        elif job.ready == requested:
            job.outcome = "complete"
        elif job.ready > grant.device_pages:
            job.outcome = "partial"
        else:
            job.outcome = "declined" if "below_min_pages" in job.shortfall else "miss"
        job.done = True

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.pop(request_id, None)
        if job is not None:
            self._end(job, "cancelled")
            if job.lease is not None:
                self._end_lease(job.lease.id)

    # ---- looking and leasing

    def _lookup(self, body: Mapping[str, Any]) -> dict[str, object]:
        pool, keys, device_pages = self._prefix(body, _PREFIX)
        plan = pool.measure(keys, device_pages)
        pages = {"requested": len(keys), "host": plan.host, "stored": plan.stored}
        pages |= {"restorable": plan.restorable, "grantable": plan.granted}
        answer: dict[str, object] = {
            "pages": pages,
            "tokens": {name: n * pool.model.page_tokens for name, n in pages.items()},
        }
        if not any(component.is_tail for component in pool.model.components):
            return answer
        return {**answer, "boundaries": pool.boundaries(keys, device_pages, plan.stored)}

    def _resident(self, pool: FakePool, keys: list[bytes], device_pages: int) -> tuple[Plan, dict[str, int]]:
        plan = pool.measure(keys, device_pages, storage=False)
        pages = {"requested": len(keys), "host": plan.host, "stored": plan.stored, "restorable": plan.restorable}
        return plan, pages | {"granted": plan.usable, "ready": plan.usable}

    def _pin(self, body: Mapping[str, Any]) -> Reply:
        pool, keys, device_pages = self._prefix(body, {*_PREFIX, "ttl_ms"})
        if not body.get("ttl_ms"):
            raise BadRequest("ttl_ms must be a number of at least 1")
        plan, pages = self._resident(pool, keys, device_pages)
        tokens = {name: number * pool.model.page_tokens for name, number in pages.items()}
        answer = {"model": pool.model.name, "pages": pages, "tokens": tokens}
        if plan.usable == device_pages:
            return Reply(200, {**answer, "expires_in_ms": 0})
        pin = self._new_lease(pool, pool.lease(keys, device_pages, plan.usable), body["ttl_ms"], self.pins)
        return Reply(201, {"id": pin.id, **answer, "expires_in_ms": body["ttl_ms"]})

    def _take_lease(self, body: Mapping[str, Any]) -> dict[str, object]:
        pool, keys, device_pages = self._prefix(body, {*_PREFIX, "lease_ms"})
        plan, pages = self._resident(pool, keys, device_pages)
        if plan.usable == device_pages:
            return {"pages": pages}
        holds = pool.lease(keys, device_pages, plan.usable)
        lease = self._new_lease(pool, holds, body.get("lease_ms", self._default_lease_ms))
        return {"pages": pages, **self._describe_lease(lease)}

    def _new_lease(
        self, pool: FakePool, holds: list[Hold], lease_ms: int, table: dict[str, FakeLease] | None = None
    ) -> FakeLease:
        self._issued += 1
        slots: dict[str, list[int]] = {shelf.component.name: [] for shelf in pool.shelves}
        for shelf, key in holds:
            slots[shelf.component.name].append(shelf.resident[key])
        lease = FakeLease(f"lease-{self._issued}", pool, holds, slots, self.now_s + lease_ms / 1000)
        (self.leases if table is None else table)[lease.id] = lease
        return lease

    def _describe_lease(self, lease: FakeLease) -> dict[str, object]:
        left_ms = round((lease.expires_s - self.now_s) * 1000)
        return {"lease": {"id": lease.id, "expires_in_ms": left_ms}, "slots": lease.slots}

    def _renew(self, lease_id: str, body: Mapping[str, Any]) -> dict[str, object]:
        _check(body, {"lease_ms"})
        if lease_id not in self.leases:
            raise Gone("this lease has expired or never existed")
        lease = self.leases[lease_id]
        lease.expires_s = self.now_s + body.get("lease_ms", self._default_lease_ms) / 1000
        return {"lease": self._describe_lease(lease)["lease"]}

    def _end_lease(self, lease_id: str, table: dict[str, FakeLease] | None = None) -> None:
        if (lease := (self.leases if table is None else table).pop(lease_id, None)) is not None:
            lease.pool.let_go(lease.holds)

    # ---- the rest

    def _begin_write(self, body: Mapping[str, Any]) -> dict[str, object]:
        pool, keys, _ = self._prefix(body, _WRITE)
        return self.writes.begin(pool, keys, body.get("tails") or {}, self.now_s) | _OWNER

    def _prefix(self, body: Mapping[str, Any], allowed: set[str]) -> tuple[FakePool, list[bytes], int]:
        _check(body, allowed)
        try:
            keys = decode_keys(body)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if len(set(keys)) < len(keys) or not all(16 <= len(key) <= 64 for key in keys):
            raise BadRequest("keys must be distinct and of 16 to 64 bytes")
        device_pages: int = body.get("device_pages", 0)
        if device_pages > len(keys):
            raise BadRequest("device_pages exceeds the number of keys")
        if body.get("model") not in self.pools:
            raise NotFound(f"no model {body.get('model')!r}")
        return self.pools[body["model"]], keys, device_pages

    def _describe_pool(self) -> dict[str, object]:
        regions: dict[str, dict[str, object]] = {}
        offset = 4096
        for name, pool in self.pools.items():
            regions[name] = {}
            for shelf in pool.shelves:
                size, shards = shelf.component.bytes, shelf.component.shards
                region = {"offset": offset, "slot_bytes": size * shards, "slots": shelf.slots}
                regions[name][shelf.component.name] = region | {"shards": shards, "shard_bytes": size}
                offset += size * shards * shelf.slots
        return {"path": "/nonexistent", "bytes": offset, "regions": regions} | _OWNER


def _check(body: Mapping[str, Any], allowed: set[str]) -> None:
    if unknown := sorted(set(body) - allowed):
        raise BadRequest(f"unknown fields: {', '.join(unknown)}")
    for name in _NUMBERS:
        value = body.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and name != "priority"):
            raise BadRequest(f"{name} must be a number of at least 0")
