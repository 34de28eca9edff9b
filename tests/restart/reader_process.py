"""A reader that attaches once and stays for all lives of the service: `python -m restart.reader_process POOL`.

Copies whatever is resident, over and over until stdin ends, then prints how often it had the right bytes ("accepted"),
found out that it came too late ("stale") or was handed wrong ones ("wrong"), and how many starts it has seen.
"""

import json
import select
import sys
from collections import Counter

from forestage_client.pool_view import PoolView, Stale
from restart.pages import COMPONENTS, MODEL, page_bytes


def read(path: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    expected: dict[tuple[str, bytes], bytes] = {}
    with PoolView(path) as view:
        print("attached", flush=True)
        generation = view.generation
        while not select.select([sys.stdin], [], [], 0.003)[0]:
            if view.refresh():
                assert view.generation > generation
                generation = view.generation
                seen["starts"] += 1
            for component in COMPONENTS:
                for entry in view.slots(MODEL, component):
                    if entry.state != "resident":
                        continue
                    try:
                        data = view.copy(MODEL, component, entry.slot, entry.key)
                    except Stale:
                        seen["stale"] += 1
                        continue
                    if (component, entry.key) not in expected:
                        expected[component, entry.key] = page_bytes(entry.key, component)
                    seen["accepted" if data == expected[component, entry.key] else "wrong"] += 1
    return seen


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1])), flush=True)
