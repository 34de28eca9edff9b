"""Hints to the fake service, each carried out by the route that does the same.

Law: an envelope under a message id is carried out once; prefetches of it are told as they stand now.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forestage_client._errors import BadRequest, Conflict, ForestageError, NotFound

__all__ = ["FakeHints"]

_ACTIONS = ("prefetch", "pin", "retain", "expect", "release", "demote")
_CLIPPING = ("no_boundary", "host_capacity", "finished", "cancelled")

#: Answers a method, a path and a body, as the service does.
Ask = Callable[[str, Sequence[str], dict[str, Any]], dict[str, Any]]


class FakeHints:
    """Envelopes by message id."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._expected: set[str] = set()
        self._done: dict[str, tuple[str, list[dict[str, Any]]]] = {}

    def take(self, body: Mapping[str, Any]) -> dict[str, object]:
        """Carry out an envelope, and return its answer. Raises BadRequest, Conflict."""
        actions, message_id = body.get("actions"), body.get("message_id", "")
        if not isinstance(actions, list) or set(body) - {"protocol_version", "message_id", "actions"}:
            raise BadRequest("actions: must be a list")
        if len({action["action_id"] for action in actions}) < len(actions):
            raise BadRequest("actions: an action_id occurs twice")
        content = json.dumps(actions, sort_keys=True, default=bytes.hex)
        known, done = self._done.get(message_id, (content, None))
        if known != content:
            raise Conflict("this message_id was used for different hints", slug="message-id-conflict")
        if done is None:
            done = [self._carry_out(action, message_id) for action in actions]
            if message_id:
                self._done[message_id] = content, done
        answers = [self._now(action) for action in done]
        return {"protocol_version": body.get("protocol_version"), "message_id": message_id, "actions": answers}

    def _carry_out(self, action: Mapping[str, Any], message_id: str) -> dict[str, Any]:
        named = {"action_id": action["action_id"], "action_type": action["action_type"]}
        try:
            return {**named, **self._result(action, message_id)}
        except ForestageError as error:
            return {**named, "outcome": "rejected", "reason": error.slug, "detail": error.detail}

    def _result(self, action: Mapping[str, Any], message_id: str) -> dict[str, Any]:
        kind, payload = action["action_type"], dict(action["payload"])
        if kind not in _ACTIONS:
            raise BadRequest("no action of this type is known", slug="unknown-action")
        if kind == "prefetch":
            if {"request_id", "wait_ms"} & set(payload):
                raise BadRequest("request_id, wait_ms: not in a hint")
            digest = hashlib.sha256(json.dumps([message_id, action["action_id"]]).encode()).hexdigest()[:32]
            name = {"request_id": f"hint-{digest}"} if message_id else {}
            job = self._ask("POST", ("v1", "prefetch"), {"priority": -1, **payload, **name})
            return {"request_id": job["request_id"], **_keys(job)}
        if kind in ("pin", "retain"):
            pin = self._ask("POST", ("v1", "pins"), payload)
            kept = {"pin_id": pin["id"], "expires_in_ms": pin["expires_in_ms"]} if "id" in pin else {}
            return {**_verdict_of_pin(pin["pages"]), **kept, "pages": pin["pages"], **_keys(pin)}
        if kind == "expect":
            return self._expect(payload)
        if kind == "demote":
            counts = self._ask("POST", ("v1", "evict"), payload)
            demoted, kept = counts["evicted"], counts["kept"]
            outcome = ("clipped", "held") if kept else ("accepted", None) if demoted else ("missing", "not_resident")
            return {**_verdict(*outcome), "demoted": demoted, "kept": kept, **_keys(counts)}
        if not payload or set(payload) - {"pin_id", "request_id", "expect_id"}:
            raise BadRequest("pin_id, request_id, expect_id: one of them is needed")
        expected = payload.pop("expect_id", None)
        known = [] if expected is None else [expected in self._expected]
        self._expected.discard(expected)
        known += [
            self._ask("DELETE", ("v1", "pins" if name == "pin_id" else "prefetch", value), {})["known"]
            for name, value in payload.items()
        ]
        return _verdict("accepted") if all(known) else _verdict("missing", "unknown")

    def _expect(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer as the service would; nothing is evicted here before its time, and no prefetch ends it."""
        asked = {name: value for name, value in payload.items() if name != "ttl_ms"}
        if not isinstance(payload.get("ttl_ms"), int):
            raise BadRequest("ttl_ms: Field required")
        found = self._ask("POST", ("v1", "lookup"), asked)
        first = payload.get("device_pages", 0)
        marked, wanted = found["pages"]["host"] - first, found["pages"]["requested"] - first
        if wanted <= 0:
            return {**_verdict("accepted"), "marked": 0, **_keys(found)}
        name = hashlib.sha256(f"expect {len(self._expected)} {found['pages']}".encode()).hexdigest()[:32]
        self._expected.add(name)
        verdict = _verdict("accepted") if marked >= wanted else _verdict("missing", "not_resident")
        return {**verdict, "expect_id": name, "expires_in_ms": payload["ttl_ms"], "marked": marked, **_keys(found)}

    def _now(self, action: dict[str, Any]) -> dict[str, Any]:
        if "outcome" in action:
            return action
        try:
            job = self._ask("GET", ("v1", "prefetch", action["request_id"]), {})
        except NotFound:
            return {**action, **_verdict("clipped", "cancelled"), "state": "done"}
        standing = {"state": job["state"], "shortfall": job["shortfall"], "pages": job["pages"]}
        return {**action, **_verdict_of_job(job), **standing}


def _verdict(outcome: str, reason: str | None = None) -> dict[str, Any]:
    return {"outcome": outcome, "reason": reason}


def _verdict_of_job(job: Mapping[str, Any]) -> dict[str, Any]:
    shortfall: Mapping[str, int] = job["shortfall"]
    if job["state"] != "done" or not shortfall:
        return _verdict("accepted")
    if "below_min_pages" in shortfall:
        return _verdict("rejected", "below_min_pages")
    clipping = {reason: pages for reason, pages in shortfall.items() if reason in _CLIPPING}
    decisive = clipping or shortfall
    return _verdict("clipped" if clipping else "missing", max(decisive, key=lambda reason: decisive[reason]))


def _verdict_of_pin(pages: Mapping[str, int]) -> dict[str, Any]:
    if pages["granted"] < pages["restorable"]:
        return _verdict("clipped", "host_capacity")
    if pages["restorable"] < pages["stored"]:
        return _verdict("clipped", "no_boundary")
    return _verdict("missing", "not_resident") if pages["stored"] < pages["requested"] else _verdict("accepted")


def _keys(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"keys": answer["keys"]} if "keys" in answer else {}
