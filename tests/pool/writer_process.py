"""An engine in a process of its own that fills lent slots: `python -m pool.writer_process PATH`.

Takes lines `HOW SLOT NUMBER`, and answers each with `done`: `whole` copies the page of a number into a slot, `half` its
first half, `scribble` noise. It asks nobody whether it may.
"""

import sys

from forestage_client.pool_view import PoolView
from pool.pages import key_of, payload


def main(path: str) -> None:
    with PoolView(path, writable=True) as view:
        size = view.regions["demo"]["kv"].bytes
        pages = [payload(key_of(number), size) for number in range(64)]
        print("attached", flush=True)
        for line in sys.stdin:
            how, slot, number = line.split()
            content = pages[int(number) % 64]
            if how == "whole":
                view.copy_in("demo", "kv", int(slot), content)
            else:
                shard = view.shard_views("demo", "kv", int(slot))[0]
                shard[: size // 2] = content[: size // 2] if how == "half" else b"\xee" * (size // 2)
            print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
