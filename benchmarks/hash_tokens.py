"""Measure how long page keys of a long prompt take, by scheme, page size and kind of token ids.

    python benchmarks/hash_tokens.py [--tokens 131072] [--repeat 15] [--json FILE]

Prints milliseconds of CPU time, which others on the machine change little, for the whole prompt (medians, and the
fastest and slowest of the repetitions, which are interleaved), with token ids as a list and as an `array("I")`; and for
the turn of a conversation that adds 512 tokens to it. Beside them SGLang's own function with the same, if sglang can be
imported here. The vocabulary has 152k.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forestage_client.hashing import HashScheme

__all__: list[str] = []

VOCABULARY = 152_000
TURN_TOKENS = 512
SCHEMES = [
    *(HashScheme("sglang", page_tokens) for page_tokens in (1, 16, 64)),
    HashScheme("sglang", 64, bigram=True),
    *(HashScheme("vllm-sha256-cbor", page_tokens) for page_tokens in (16, 64)),
    *(HashScheme("vllm-xxhash-cbor", page_tokens, seed="0") for page_tokens in (16, 64)),
]


def sglang_function() -> Callable[[Sequence[int], int], Sequence[str]] | None:
    """Return SGLang's page hash of a prompt, None where sglang is not installed."""
    try:
        from sglang.srt.mem_cache.utils import get_hash_str
    except ImportError:
        return None

    def keys_of(tokens: Sequence[int], page_tokens: int) -> Sequence[str]:
        keys: Sequence[str] = get_hash_str(tokens, None, page_tokens)
        return keys

    return keys_of


def measure(works: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Return CPU milliseconds of each call, `repeat` times, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            begin = time.process_time()
            work()
            times[name].append((time.process_time() - begin) * 1e3)
    return times


def shown(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


def works_of(scheme: HashScheme, tokens: list[int]) -> dict[str, Callable[[], object]]:
    """Return what is measured of a scheme."""
    packed, begun = array("I", tokens), scheme.hasher()
    begun.extend(packed)
    turn = tokens[:TURN_TOKENS]
    works: dict[str, Callable[[], object]] = {
        "list ms": lambda: scheme.keys_of(tokens),
        "array ms": lambda: scheme.keys_of(packed),
        "turn ms": lambda: begun.copy().extend(turn),
    }
    return works


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=128 << 10)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    draw = random.Random(1)
    tokens = [draw.randrange(VOCABULARY) for _ in range(arguments.tokens)]
    sglang = sglang_function()

    rows: list[dict[str, Any]] = []
    print(f"{arguments.tokens} tokens; a turn adds {TURN_TOKENS}; median (fastest-slowest) of {arguments.repeat}")
    for scheme in SCHEMES:
        works = works_of(scheme, tokens)
        if sglang is not None and scheme.name == "sglang" and not scheme.bigram:
            theirs, page_tokens = sglang, scheme.page_tokens
            assert [key.hex() for key in scheme.keys_of(tokens)] == list(theirs(tokens, page_tokens))
            packed = array("I", tokens)
            works["sglang's own, list ms"] = partial(theirs, tokens, page_tokens)
            works["sglang's own, array ms"] = partial(theirs, packed, page_tokens)
        times = measure(works, arguments.repeat)
        name = f"{scheme.name}{' bigram' if scheme.bigram else ''}, pages of {scheme.page_tokens}"
        print(f"{name:<34}" + "".join(f"  {what} {shown(values)}" for what, values in times.items()), flush=True)
        rows.append({"scheme": name, **times})
    if sglang is None:
        print("sglang is not installed here: its own function was not measured")
    if arguments.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
        figures = {"benchmark": "hash_tokens", "tokens": arguments.tokens, "machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
