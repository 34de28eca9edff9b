"""Commands that talk to a running service: prefetch, lookup, hash, status, pool."""

import argparse
import dataclasses
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forestage.cli.exits import Exit
from forestage_client import BadRequest, Client, ForestageError, Lengths, Lookup, LookupLengths, Prefetch, TooLarge
from forestage_client.hashing import LoraAdapter, Prompt
from forestage_client.pool_view import PoolView

__all__ = ["hash_prompt", "lookup", "pool", "prefetch", "status", "with_client"]

_POLL_MS = 500


class _UsageError(Exception):
    """The command line asks for something that cannot be."""


def prefetch(arguments: argparse.Namespace) -> int:
    """Start a prefetch, show its progress while it takes longer than a moment, and print how it ended."""
    return with_client(arguments, _prefetch)


def lookup(arguments: argparse.Namespace) -> int:
    """Print what a prefetch would find."""
    return with_client(arguments, _lookup)


def hash_prompt(arguments: argparse.Namespace) -> int:
    """Print the page keys of a prompt, one a line."""
    return with_client(arguments, _hash_prompt)


def status(arguments: argparse.Namespace) -> int:
    """Print how the service is doing."""
    return with_client(arguments, _status)


def pool(arguments: argparse.Namespace) -> int:
    """Print the pool's regions; with the file at hand, their slots by state."""
    return with_client(arguments, _pool)


def with_client(arguments: argparse.Namespace, command: Callable[[Client, argparse.Namespace], int]) -> int:
    """Run a command with a client for the service that the arguments name; say what went wrong, if anything did."""
    try:
        token = Path(arguments.token_file).read_text().strip() if arguments.token_file else None
        with Client(arguments.url, token=token) as client:
            return command(client, arguments)
    except (BadRequest, TooLarge) as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.USAGE
    except ForestageError as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.FAILED
    except BrokenPipeError:
        raise  # about our own output: `main` knows what to do
    except OSError as error:
        print(f"forestage: {error.filename}: {error.strerror}", file=sys.stderr)
        return Exit.USAGE
    except (_UsageError, ValueError) as error:
        print(f"forestage: {error}", file=sys.stderr)
        return Exit.USAGE


def _keys(arguments: argparse.Namespace) -> list[str]:
    keys = list(arguments.key)
    if arguments.keys:
        text = sys.stdin.read() if arguments.keys == "-" else Path(arguments.keys).read_text()
        keys += text.replace(",", " ").replace('"', " ").strip().strip("[]").split()
    if not keys:
        raise _UsageError("no page keys: give them as arguments or with --keys FILE")
    return keys


def _prefix(arguments: argparse.Namespace) -> list[str] | Prompt:
    """Return the page keys, or the prompt that they come from."""
    if arguments.tokens is None:
        if any(given is not None for given in (arguments.extra_key, arguments.cache_salt, arguments.lora)):
            raise _UsageError("--extra-key, --cache-salt and --lora belong to --tokens FILE")
        return _keys(arguments)
    if arguments.key or arguments.keys:
        raise _UsageError("either page keys or --tokens FILE")
    return _prompt(arguments)


def _prompt(arguments: argparse.Namespace) -> Prompt:
    if arguments.tokens is None:
        raise _UsageError("no token ids: give them with --tokens FILE")
    text = sys.stdin.read() if arguments.tokens == "-" else Path(arguments.tokens).read_text()
    words = text.replace(",", " ").strip().strip("[]").split()
    try:
        token_ids = list(map(int, words))
    except ValueError:
        raise _UsageError(f"{arguments.tokens}: holds something that is no token id") from None
    lora = arguments.lora
    if arguments.lora_path is not None:
        if lora is None:
            raise _UsageError("--lora-path belongs to --lora")
        lora = LoraAdapter(lora, arguments.lora_path)
    return Prompt(token_ids, arguments.extra_key, arguments.cache_salt, lora)


def _hash_prompt(client: Client, arguments: argparse.Namespace) -> int:
    hashed = client.hash(arguments.model, _prompt(arguments))
    keys = [key.hex() for key in hashed.keys]
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(hashed), "keys": keys}))
    else:
        print("".join(f"{key}\n" for key in keys), end="")
    return Exit.OK


def _prefetch(client: Client, arguments: argparse.Namespace) -> int:
    request_id = arguments.request_id or uuid.uuid4().hex
    keys = _prefix(arguments)
    started = time.monotonic()
    try:
        job = client.prefetch(
            arguments.model,
            keys,
            request_id=request_id,
            device_pages=arguments.device_pages,
            min_pages=arguments.min_pages,
            priority=arguments.priority,
            deadline_ms=arguments.deadline_ms,
            lease_ms=arguments.lease_ms,
        )
        while not job.done:
            job = client.get_prefetch(request_id, wait_ms=_POLL_MS)
            if time.monotonic() - started > 1.0 and sys.stderr.isatty() and not job.done:
                progress = f"{job.state} {job.pages.ready} of {job.pages.granted or job.pages.requested} pages"
                print(f"\r{progress:<60}", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        client.cancel(request_id)
        raise
    if arguments.json:
        print(json.dumps(_without_keys(job)))
    else:
        _print_job(job)
    if job.outcome == "complete":
        return Exit.OK
    return Exit.PARTIAL if job.outcome == "partial" else Exit.MISS


def _without_keys(answer: Prefetch | Lookup) -> dict[str, Any]:
    """Return an answer to be printed; its keys, which nobody asked for here, are bytes."""
    return {name: value for name, value in dataclasses.asdict(answer).items() if name != "keys"}


def _print_job(job: Prefetch) -> None:
    print(f"{job.request_id}  {job.outcome}: {job.pages.ready} of {job.pages.requested} pages ready")
    _print_lengths(job.pages, job.page_tokens)
    for reason, pages in job.shortfall.items():
        print(f"  short by {pages:>8}  {reason}")
    print(f"  read {job.loaded}, joined {job.joined}, {job.timing_ms.get('total', 0.0):.1f} ms in all")
    if job.lease is not None:
        slots = ", ".join(f"{len(slots)} {name}" for name, slots in job.slots.items())
        print(f"  slots: {slots}; lease {job.lease.id} for {job.lease.expires_in_ms} ms")


def _print_lengths(lengths: Lengths | LookupLengths, page_tokens: int) -> None:
    for name, pages in dataclasses.asdict(lengths).items():
        print(f"  {name:<11}{pages:>8} pages {pages * page_tokens:>10} tokens")


def _lookup(client: Client, arguments: argparse.Namespace) -> int:
    found = client.lookup(arguments.model, _prefix(arguments), arguments.device_pages)
    if arguments.json:
        print(json.dumps(_without_keys(found)))
        return Exit.OK
    page_tokens = found.tokens.requested // found.pages.requested if found.pages.requested else 0
    _print_lengths(found.pages, page_tokens)
    return Exit.OK


def _status(client: Client, arguments: argparse.Namespace) -> int:
    info, ready = client.info(), client.ready()
    degraded = ready.storage == "degraded"
    code = Exit.FAILED if not ready else Exit.PARTIAL if degraded else Exit.OK
    if arguments.json:
        print(json.dumps({"ready": bool(ready), "storage": ready.storage, **_plain(info.fields)}))
        return code
    print(f"forestage {info.version}, up {info.uptime_s:.0f} s, {'ready' if ready else 'not ready'}")
    print(f"  storage   {info.storage}: {ready.storage or 'unknown'}")
    print(f"  pinned    {info.pinned}")
    for model in client.models():
        parts = ", ".join(f"{c.slots} {c.name} of {c.shards} x {c.bytes} bytes" for c in model.components)
        print(f"  model     {model.name}: pages of {model.page_tokens} tokens; slots: {parts}")
    return code


def _plain(fields: Mapping[str, object]) -> dict[str, Any]:
    return dict(fields)


def _pool(client: Client, arguments: argparse.Namespace) -> int:
    shown = client.pool()
    states = _slot_states(shown.path) if os.access(shown.path, os.R_OK) else {}
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(shown), "states": states}))
        return Exit.OK
    print(f"{shown.path}  {shown.bytes} bytes, generation {shown.generation}")
    for model, components in shown.regions.items():
        for component, region in components.items():
            counts = states.get(model, {}).get(component, {})
            by_state = ", ".join(f"{number} {state}" for state, number in counts.items()) or "states not readable here"
            print(f"  {model} {component}: {region.slots} slots of {region.slot_bytes} bytes; {by_state}")
    return Exit.OK


def _slot_states(path: str) -> dict[str, dict[str, dict[str, int]]]:
    with PoolView(path) as view:
        return {
            model: {
                component: dict(Counter(entry.state for entry in view.slots(model, component)))
                for component in components
            }
            for model, components in view.regions.items()
        }
