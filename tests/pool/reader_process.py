"""A reader in a process of its own: `python -m pool.reader_process PATH HOW`."""

import json
import select
import sys
from collections import Counter

from forestage_client.pool_view import PoolView, Stale
from pool.pages import key_of, payload


def recycle(path: str) -> None:
    """Read whatever is resident, in every way there is, until stdin ends; print how often each came out."""
    seen: Counter[str] = Counter()
    with PoolView(path) as view:
        region = view.regions["demo"]["kv"]
        expected = {key_of(number): payload(key_of(number), region.bytes) for number in range(64)}
        buffer = bytearray(region.bytes)
        print("attached", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            for entry in view.slots("demo", "kv"):
                if entry.state != "resident":
                    continue
                for way in ("copy", "read_into", "view"):
                    try:
                        if way == "copy":
                            data = view.copy("demo", "kv", entry.slot, entry.key)
                        elif way == "read_into":
                            view.read_into("demo", "kv", entry.slot, entry.key, buffer)
                            data = bytes(buffer)
                        else:
                            stamp = view.stamp("demo", "kv", entry.slot, entry.key)
                            data = bytes(view.view("demo", "kv", entry.slot))
                            view.check(stamp)
                    except Stale:
                        seen["stale"] += 1
                    else:
                        seen["accepted" if data == expected[entry.key] else "wrong"] += 1
    print(json.dumps(seen), flush=True)


def hold(path: str, how: str) -> None:
    """Attach, read a page, and leave in the way that is asked for."""
    with PoolView(path) as view:
        live = view.view("demo", "kv", 0)
        view.copy("demo", "kv", 0, key_of(0))
        print("attached", flush=True)
        if how == "error":
            raise LookupError("the reader's own error")
        if how == "wait":
            sys.stdin.read()
    print(len(live), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "recycle":
        recycle(sys.argv[1])
    else:
        hold(sys.argv[1], sys.argv[2])
