"""How often a tenant finds its pages in the pool while another one floods it, with and without a promised share.

Runs in the engine alone, without time or I/O: the figures are the same everywhere.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.tenant_flood import Flood, hit_rate

POOL_PAGES = 1000
PREFIXES = 20
SHARE = 0.3
NO_FLOOD = Flood(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of the quiet tenant")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = {"requests": args.requests, "seed": args.seed}
    alone = hit_rate(int(POOL_PAGES * SHARE), PREFIXES, NO_FLOOD, 0, **options)
    print(f"quiet tenant: {PREFIXES} prefixes of 25 pages, pool of {POOL_PAGES} pages; hit rates in %")
    print(f"alone in a pool of {int(POOL_PAGES * SHARE)} pages: {alone:.1%}")
    print(f"{'new pages between two requests':<44} {'no tenants':>10} {f'min_share {SHARE}':>14}")
    for jobs in (0, 1, 5, 20):
        for keeps_leases in (False, True):
            flood = Flood(jobs, keeps_leases)
            name = f"{40 * jobs}" + (", leases never released" if keeps_leases else "")
            rates = [hit_rate(POOL_PAGES, PREFIXES, flood, share, **options) for share in (0, SHARE)]
            print(f"{name:<44} {rates[0]:>10.1%} {rates[1]:>14.1%}")


if __name__ == "__main__":
    main()
