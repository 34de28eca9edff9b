"""Requests as a service sees them: read from a public trace, or made up with a like shape."""

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Request", "add_trace_options", "load_trace", "unique_pages"]


@dataclass(frozen=True, slots=True)
class Request:
    """When a prompt arrives, in milliseconds, and the keys of its pages."""

    at_ms: float
    keys: tuple[bytes, ...]


def add_trace_options(parser: argparse.ArgumentParser, requests: int) -> None:
    """Add the options that say what is played."""
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines with timestamp and hash_ids; else made up"
    )
    parser.add_argument("--requests", type=int, default=requests, help="so many of the first ones")
    parser.add_argument("--seed", type=int, default=1, help="of what is made up")


def load_trace(args: argparse.Namespace) -> list[Request]:
    """Read or make what the options say."""
    if args.trace is None:
        return _made_up(args.requests, args.seed)
    with args.trace.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(args.requests), lines, strict=False)]
    # Equal block ids mean equal prefixes there, as page keys must.
    return [_request(row["timestamp"], list(dict.fromkeys(row["hash_ids"]))) for row in rows]


def _made_up(count: int, seed: int) -> list[Request]:
    """Make three requests a second: new conversations under one system prompt, and turns that come back to old ones.

    As in the public trace, most turns come back within some hundred requests, and grow by a few pages each.
    """
    dice = random.Random(seed)
    due: list[tuple[int, list[int]]] = []
    next_block, requests = 1, []
    for number in range(count):
        ready = [entry for entry in due if entry[0] <= number]
        if ready and dice.random() < 0.6:
            entry = min(ready)
            due.remove(entry)
            blocks = entry[1]
            new = 1 + int(dice.expovariate(1 / 5))
        else:
            blocks = [0]
            new = min(230, 1 + int(dice.lognormvariate(2.5, 1.1)))
        blocks = [*blocks, *range(next_block, next_block + new)]
        next_block += new
        if dice.random() < 0.65:
            due.append((number + 5 + int(dice.lognormvariate(5.0, 0.8)), blocks))
        requests.append(_request(number * 1000 / 3, blocks))
    return requests


def _request(at_ms: float, blocks: Sequence[int]) -> Request:
    return Request(at_ms, tuple(hashlib.blake2b(b"block %d" % block, digest_size=16).digest() for block in blocks))


def unique_pages(requests: Sequence[Request]) -> int:
    """Count the pages that are named at all."""
    return len({key for request in requests for key in request.keys})
