"""From decoded answers to values.

Law: every function raises ValueError for an answer without its shape, and never looks at members it does not know.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar, cast

from forestage_client._codec import decode_keys, decode_slots
from forestage_client._types import (
    Component,
    Evicted,
    Filled,
    Hashed,
    Hinted,
    HintedAction,
    Info,
    Lease,
    Leased,
    Lengths,
    Lookup,
    LookupLengths,
    Model,
    Moment,
    Pinned,
    Pool,
    Prefetch,
    Region,
    Timeline,
    Write,
    WriteStatus,
)

__all__ = [
    "read_evicted",
    "read_filled",
    "read_hashed",
    "read_hinted",
    "read_info",
    "read_leased",
    "read_lookup",
    "read_models",
    "read_object",
    "read_pinned",
    "read_pool",
    "read_prefetch",
    "read_renewed",
    "read_timeline",
    "read_write",
    "read_write_status",
]

T = TypeVar("T")


def read_prefetch(answer: object) -> Prefetch:
    job = _members(answer)
    lease = job.get("lease")
    outcome = job.get("outcome")
    return Prefetch(
        request_id=_text(job, "request_id"),
        model=_text(job, "model"),
        state=_text(job, "state"),
        outcome=None if outcome is None else str(outcome),
        page_tokens=_number(job, "page_tokens"),
        pages=_lengths(_get(job, "pages")),
        tokens=_lengths(_get(job, "tokens")),
        loaded=_number(job, "loaded"),
        joined=_number(job, "joined"),
        shortfall=_each(job.get("shortfall"), _as_number),
        lease=None if lease is None else _lease(lease),
        slots=_each(job.get("slots"), decode_slots),
        timing_ms=_each(job.get("timing_ms"), _as_float),
        keys=_keys(job),
    )


def read_lookup(answer: object) -> Lookup:
    found = _members(answer)
    boundaries = found.get("boundaries")
    return Lookup(
        pages=_lookup_lengths(_get(found, "pages")),
        tokens=_lookup_lengths(_get(found, "tokens")),
        keys=_keys(found),
        boundaries=None if boundaries is None else tuple(_as_number(length) for length in boundaries),
    )


def read_hashed(answer: object) -> Hashed:
    hashed = _members(answer)
    return Hashed(
        model=_text(hashed, "model"),
        scheme=_text(hashed, "scheme"),
        page_tokens=_number(hashed, "page_tokens"),
        keys=tuple(decode_keys(hashed)),
    )


def read_filled(answer: object) -> Filled:
    done = _members(answer)
    return Filled(
        pages=_lengths(_get(done, "pages")),
        filled=_each(_get(done, "filled"), _as_pages),
        outcome=_text(done, "outcome"),
        shortfall=_each(done.get("shortfall"), _as_number),
    )


def _as_pages(pages: object) -> range:
    there = _members(pages)
    first = _number(there, "first")
    return range(first, first + _number(there, "pages"))


def read_leased(answer: object, device_pages: int) -> Leased:
    taken = _members(answer)
    lease = taken.get("lease")
    return Leased(
        pages=_lengths(_get(taken, "pages"), otherwise=device_pages),
        lease=None if lease is None else _lease(lease),
        slots=_each(taken.get("slots"), decode_slots),
        keys=_keys(taken),
    )


def read_renewed(answer: object) -> Lease:
    """Read a renewed lease, bare or under the name `lease`."""
    renewed = _members(answer)
    return _lease(renewed.get("lease", renewed))


def read_write(
    answer: object, model: str, num_pages: int, tails: Mapping[str, tuple[int, ...]], asked_s: float
) -> Write:
    """Read a write that was asked for at `asked_s` (monotonic seconds): its slots must be as many as that needs."""
    write = _members(answer)
    slots = _each(_get(write, "slots"), _slots_or_none)
    for component, given in slots.items():
        # A tail component that was not named has none.
        if len(given) not in ({len(tails[component])} if component in tails else {0, num_pages}):
            raise ValueError(f"{len(given)} slots of {component} for {num_pages} pages")
    stored, reason = _get(write, "stored"), write.get("reason")
    if not isinstance(stored, list):
        raise ValueError("stored must be a list")
    expires_in_ms = _number(write, "expires_in_ms")
    return Write(
        id=_text(write, "id"),
        model=model,
        tails=tails,
        stored=tuple(map(_as_number, stored)),
        granted=_number(write, "granted"),
        reason=None if reason is None else str(reason),
        slots=slots,
        instance=_text(write, "instance"),
        generation=_number(write, "generation"),
        expires_in_ms=expires_in_ms,
        expires_at_s=asked_s + expires_in_ms / 1000,
    )


def read_write_status(answer: object) -> WriteStatus:
    status = _members(answer)
    return WriteStatus(
        committed=_number(status, "committed"),
        durable=_number(status, "durable"),
        failed=_number(status, "failed"),
        duplicate=_number(status, "duplicate", 0),
        parts_left=_number(status, "parts_left", 0),
    )


def read_pinned(answer: object) -> Pinned:
    pinned = _members(answer)
    return Pinned(
        id=None if pinned.get("id") is None else _text(pinned, "id"),
        pages=_lengths(_get(pinned, "pages")),
        expires_in_ms=_number(pinned, "expires_in_ms"),
    )


def read_evicted(answer: object) -> Evicted:
    counts = _members(answer)
    return Evicted(evicted=_number(counts, "evicted"), kept=_number(counts, "kept"))


def read_hinted(answer: object) -> Hinted:
    envelope = _members(answer)
    actions = _get(envelope, "actions")
    if not isinstance(actions, list):
        raise ValueError("actions must be a list")
    return Hinted(_text(envelope, "message_id"), tuple(_hinted(_members(action)) for action in actions))


def _hinted(action: Mapping[str, Any]) -> HintedAction:
    pages = action.get("pages")
    return HintedAction(
        action_id=_text(action, "action_id"),
        action_type=_text(action, "action_type"),
        outcome=_text(action, "outcome"),
        reason=_text_or_none(action, "reason"),
        detail=_text_or_none(action, "detail"),
        request_id=_text_or_none(action, "request_id"),
        state=_text_or_none(action, "state"),
        shortfall=_each(action.get("shortfall"), _as_number),
        pages=None if pages is None else _lengths(pages),
        pin_id=_text_or_none(action, "pin_id"),
        expect_id=_text_or_none(action, "expect_id"),
        expires_in_ms=_number_or_none(action, "expires_in_ms"),
        marked=_number_or_none(action, "marked"),
        demoted=_number_or_none(action, "demoted"),
        kept=_number_or_none(action, "kept"),
        keys=_keys(action),
    )


def read_timeline(answer: object) -> Timeline:
    told = _members(answer)
    moments = _get(told, "moments")
    if not isinstance(moments, list):
        raise ValueError("moments must be a list")
    return Timeline(
        request_id=_text(told, "request_id"),
        model=_text(told, "model"),
        state=_text(told, "state"),
        outcome=_text_or_none(told, "outcome"),
        trace_id=_text_or_none(told, "trace_id"),
        cuts=_number(told, "cuts"),
        moments=tuple(_moment(_members(moment)) for moment in moments),
    )


def _moment(moment: Mapping[str, Any]) -> Moment:
    at_ms = _as_float(_get(moment, "at_ms"))
    return Moment(at_ms, _text(moment, "event"), _number(moment, "pages"), _text_or_none(moment, "reason"))


def read_pool(answer: object) -> Pool:
    pool = _members(answer)
    return Pool(
        path=_text(pool, "path"),
        bytes=_number(pool, "bytes"),
        instance=str(_get(pool, "instance")),
        generation=_number(pool, "generation"),
        regions=_each(_get(pool, "regions"), lambda regions: _each(regions, _region)),
    )


def read_models(answer: object) -> tuple[Model, ...]:
    """Read the configured models: a list, bare or under the name `models`."""
    listed = answer.get("models") if isinstance(answer, dict) else answer
    if not isinstance(listed, list):
        raise ValueError("models must be a list")
    return tuple(_model(_members(model)) for model in listed)


def read_object(answer: object) -> Mapping[str, Any]:
    return _members(answer)


def read_info(answer: object) -> Info:
    info = _members(answer)
    return Info(
        version=_text(info, "version"),
        storage=_text(info, "storage"),
        pinned=_text(info, "pinned"),
        uptime_s=_as_float(_get(info, "uptime_s")),
        fields=info,
    )


def _model(model: Mapping[str, Any]) -> Model:
    components = _get(model, "components")
    if not isinstance(components, list):
        raise ValueError("components must be a list")
    return Model(
        name=_text(model, "name"),
        page_tokens=_number(model, "page_tokens"),
        components=tuple(_component(_members(component)) for component in components),
        shards=_number(model, "shards"),
        dtype=_text(model, "dtype"),
        layout=_text(model, "layout"),
        fingerprint=_text(model, "fingerprint"),
        hash=None if model.get("hash") is None else _text(model, "hash"),
    )


def _component(component: Mapping[str, Any]) -> Component:
    slots = component.get("slots")
    return Component(
        name=_text(component, "name"),
        bytes=_number(component, "bytes"),
        covers=_text(component, "covers"),
        window=_as_number(component.get("window") or 0),
        shards=_number(component, "shards"),
        slots=None if slots is None else _as_number(slots),
    )


def _region(region: object) -> Region:
    members = _members(region)
    return Region(
        offset=_number(members, "offset"),
        slot_bytes=_number(members, "slot_bytes"),
        slots=_number(members, "slots"),
        shards=_number(members, "shards"),
        shard_bytes=_number(members, "shard_bytes"),
    )


def _lease(lease: object) -> Lease:
    members = _members(lease)
    return Lease(id=_text(members, "id"), expires_in_ms=_number(members, "expires_in_ms"))


def _lengths(lengths: object, otherwise: int | None = None) -> Lengths:
    members = _members(lengths)
    return Lengths(
        requested=_number(members, "requested"),
        host=_number(members, "host", otherwise),
        stored=_number(members, "stored", otherwise),
        restorable=_number(members, "restorable", otherwise),
        granted=_number(members, "granted", otherwise),
        ready=_number(members, "ready", otherwise),
    )


def _lookup_lengths(lengths: object) -> LookupLengths:
    members = _members(lengths)
    return LookupLengths(
        requested=_number(members, "requested"),
        host=_number(members, "host"),
        stored=_number(members, "stored"),
        restorable=_number(members, "restorable"),
        grantable=_number(members, "grantable"),
    )


def _slots_or_none(value: object) -> tuple[int | None, ...]:
    """Read a slot list with gaps; one without may be in the compact form."""
    if isinstance(value, list) and all(slot is None or isinstance(slot, int) for slot in value):
        return tuple(value)
    return decode_slots(value)


def _keys(members: Mapping[str, Any]) -> tuple[bytes, ...]:
    return tuple(decode_keys(members)) if "keys" in members else ()


def _members(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _get(members: Mapping[str, Any], name: str) -> object:
    if name not in members:
        raise ValueError(f"{name} is missing")
    value: object = members[name]
    return value


def _text(members: Mapping[str, Any], name: str) -> str:
    value = _get(members, name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value


def _text_or_none(members: Mapping[str, Any], name: str) -> str | None:
    return None if members.get(name) is None else _text(members, name)


def _number_or_none(members: Mapping[str, Any], name: str) -> int | None:
    return None if members.get(name) is None else _number(members, name)


def _number(members: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    if otherwise is not None and name not in members:
        return otherwise
    return _as_number(_get(members, name))


def _as_number(value: object) -> int:
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"expected a number, got {value!r}")
    return round(value)  # a service may well count milliseconds in fractions


def _as_float(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _each(value: object, read: Callable[[object], T]) -> dict[str, T]:
    return {} if value is None else {name: read(member) for name, member in _members(value).items()}
