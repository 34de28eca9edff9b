"""`make demo`: prefetch a real conversation into pools that are too small for it, and check every byte.

The directory was written by SGLang's own file backend; its manifest says what each prefetch must find. Each case gets a
model of its own, so that its slots are exactly the manifest's and empty at first; all of them read the same files.
"""

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from forestage_client import Client, Prefetch
from forestage_client.pool_view import PoolView

__all__ = ["SAMPLE", "Demo", "main", "scratch_folder"]

SAMPLE = Path(__file__).resolve().parents[2] / "tests" / "data" / "hicache-hybrid"
_START_S = 60.0
_WHY = {
    "host_capacity": "no room",
    "no_boundary": "no state there",
    "not_stored": "not in L3",
    "below_min_pages": "not worth it",
    "corrupt": "bad page",
    "vanished": "page gone",
}


def main() -> int:
    """Run the demo, or with --verify the second process that reads the pool; return the exit code."""
    parser = argparse.ArgumentParser(prog="forestage.demo", description="Prefetch a sample conversation.")
    parser.add_argument("--verify", metavar="POOL", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, default=SAMPLE, metavar="DIR", help="directory with l3/ and manifest.json")
    arguments = parser.parse_args()
    if arguments.verify:
        return _verify(arguments.verify)
    if not (arguments.data / "manifest.json").is_file():
        print(f"forestage: no sample at {arguments.data}: run from a checkout, or name it with --data", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="forestage-demo-", dir=scratch_folder()) as scratch:
        return Demo(arguments.data, Path(scratch)).run()


def scratch_folder() -> str | None:
    """Return where the demo's files go: in memory if there is room, else wherever temporary files go."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 64 << 20 else None


def _verify(pool: str) -> int:
    """Read slots named on stdin from the shared pool, and compare them with their SHA-256; answer on stdout."""
    with PoolView(pool) as view:
        for line in sys.stdin:
            wanted = json.loads(line)
            verified, bad = 0, []
            for component, slot, key, digests in wanted["slots"]:
                page = view.copy(wanted["model"], component, slot, key)
                size = len(page) // len(digests)
                shards = [page[at : at + size] for at in range(0, len(page), size)]
                if [hashlib.sha256(shard).hexdigest() for shard in shards] != digests:
                    bad.append(f"{component} slot {slot}")
                verified += len(page)
            print(json.dumps({"bytes": verified, "bad": bad}), flush=True)
    return 0


@dataclass
class Demo:
    """The cases of the sample's manifest, each against a service that reads a copy of the files as they are."""

    data: Path
    scratch: Path
    manifest: dict[str, Any] = field(init=False)
    digests: dict[tuple[str, str], list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = json.loads((self.data / "manifest.json").read_text())
        self.digests = {}
        for file in sorted(self.manifest["files"], key=lambda file: int(file["rank"])):
            self.digests.setdefault((file["component"], file["name"][:64]), []).append(file["sha256"])

    def run(self) -> int:
        """Run all cases and print them; return the exit code."""
        cases = [case for case in self.manifest["cases"] if case.get("change", {}).get("when", "before") == "before"]
        config = self.scratch / "forestage.toml"
        config.write_text(self._config(cases))
        self.prepare(config)
        log = self.scratch / "service.log"
        began = time.monotonic()
        command = [sys.executable, "-m", "forestage", "serve", "--config", str(config)]
        with log.open("w") as stderr:
            service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert service.stdout is not None
            ready = service.stdout.readline().split()
            if ready[:2] != ["forestage", "ready"]:
                print(f"the service did not start:\n{log.read_text()}", file=sys.stderr)
                return 1
            print(f"service ready in {time.monotonic() - began:.1f} s at {ready[2]}; one conversation of 48 pages,")
            print(f"{self.origin}; a page can be resumed from only where a Mamba state was stored:")
            print("after pages 16, 24, 40 and 48 (its branch: 16, 28, 36). Each row is a fresh pool.\n")
            failed = self._run_cases(ready[2], cases)
        finally:
            service.send_signal(signal.SIGTERM)
            code = service.wait(timeout=30)
        if code:
            print(f"the service ended with {code}:\n{log.read_text()}", file=sys.stderr)
        return 1 if failed or code else 0

    #: Where the pages come from, for the reader of the table.
    origin = "written by SGLang for 2 ranks"

    def prepare(self, config: Path) -> None:
        """Bring the sample to where the service will look for it; `config` is the service's."""
        shutil.copytree(self.data / "l3", self.scratch / "l3")

    def storage_lines(self) -> str:
        """Return the section of the configuration that says where the service looks."""
        return f'[storage]\nkind = "hicache-file"\n[storage.hicache-file]\nroot = "{self.scratch}/l3"'

    def exchange(
        self, model: str, file: dict[str, Any], value: Callable[[bytes], bytes | None]
    ) -> Callable[[], object]:
        """Replace the stored value of a file by what `value` makes of it, None: remove it; return what undoes that."""
        path = self.scratch / "l3" / file["name"]
        whole = path.read_bytes()
        changed = value(whole)
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        return lambda: path.write_bytes(whole)

    def _config(self, cases: list[dict[str, Any]]) -> str:
        model = self.manifest["model"]
        lines = [
            f'[server]\nport = 0\n[pool]\npath = "{self.scratch}/pool"\nbytes = "256MiB"\npin = "none"',
            self.storage_lines(),
            "[prefetch]\nmax_inflight_fraction = 1.0\nsettle_ms = 2000",
        ]
        for case in cases:
            lines.append(f'[[models]]\nname = "{case["id"]}"\npage_tokens = {model["page_tokens"]}')
            lines.append(f'shards = {model["shards"]}\ndtype = "{model["dtype"]}"\nlayout = "{model["layout"]}"')
            lines.append(f'hicache = {{ served_name = "{model["name"]}" }}')
            for component in model["components"]:
                lines.append(f'[[models.components]]\nname = "{component["name"]}"\nbytes = {component["bytes"]}')
                lines.append(f"slots = {case['pool_slots'][component['name']]}")
                if component["covers"] == "tail":
                    lines.append(f'covers = "tail"\nwindow = {component["window"]}')
        return "\n".join(lines) + "\n"

    def _run_cases(self, url: str, cases: list[dict[str, Any]]) -> int:
        columns = f"{'case':<27}{'slots':>8}{'asked':>7}{'stored':>8}{'granted':>9}{'ready':>7}"
        print(f"{columns}  {'why not more':<34}{'ms':>7}")
        failed = verified = 0
        with Client(url) as client, _Verifier(client.pool().path) as verifier:
            for case in cases:
                undo = self._change(case)
                job, wrong = self._run_case(client, case)
                undo()
                size, bad = verifier.check(case["id"], self._slots(case, job))
                wrong += bad
                verified += size
                failed += bool(wrong)
                self._print(case, job, wrong)
                if job.lease is not None:
                    client.release(job.lease.id)
        print(f"\n{len(cases) - failed} of {len(cases)} cases as the manifest says. A second process read {verified}")
        print("bytes through the shared pool, " + ("NOT ALL RIGHT." if failed else "each equal to what SGLang wrote."))
        return failed

    def _run_case(self, client: Client, case: dict[str, Any]) -> tuple[Prefetch, list[str]]:
        if "after" in case:
            earlier = next(other for other in self.manifest["cases"] if other["id"] == case["after"]["case"])
            before = self._prefetch(client, case["id"], earlier["request"])
            if case["after"]["lease"] == "released" and before.lease is not None:
                client.release(before.lease.id)
        job = self._prefetch(client, case["id"], case["request"])
        expect = case["expect"]
        slots = {name: len(slots) for name, slots in job.slots.items()} or None
        found = {"outcome": job.outcome, "shortfall": dict(job.shortfall), "slots": slots, "loaded": job.loaded}
        pages = {name: getattr(job.pages, name) for name in expect["pages"]}
        wrong = [f"{name} {found[name]}" for name in found if expect[name] is not None and found[name] != expect[name]]
        if expect["slots"] is None and slots is not None:
            wrong.append(f"slots {slots}")
        return job, wrong + ([] if pages == expect["pages"] else [f"pages {pages}"])

    def _prefetch(self, client: Client, model: str, request: dict[str, Any]) -> Prefetch:
        return client.prefetch(
            model,
            self._keys(request),
            device_pages=request["device_pages"],
            min_pages=request["min_pages"],
            wait_ms=30_000,
        )

    def _keys(self, request: dict[str, Any]) -> list[str]:
        keys: list[str] = self.manifest["chains"][request["chain"]]["keys"][: request["first_pages"]]
        unknown: list[str] = self.manifest["unknown_keys"][: request.get("then_unknown", 0)]
        return keys + unknown

    def _slots(self, case: dict[str, Any], job: Prefetch) -> list[tuple[str, int, str, list[str]]]:
        keys = self._keys(case["request"])
        named = []
        for component, slots in job.slots.items():
            for key, slot in zip(keys[job.pages.ready - len(slots) : job.pages.ready], slots, strict=True):
                named.append((component, slot, key, self.digests[component, key]))
        return named

    def _change(self, case: dict[str, Any]) -> Callable[[], object]:
        """Spoil a value as the manifest says; the returned function mends it."""
        change = case.get("change")
        if change is None:
            return lambda: None
        name = change.get("remove") or change.get("truncate") or change.get("append")
        file = next(file for file in self.manifest["files"] if file["name"] == name)

        def spoil(value: bytes) -> bytes | None:
            if "remove" in change:
                return None
            return value[: change["to"]] if "truncate" in change else value + bytes(change["bytes"])

        return self.exchange(case["id"], file, spoil)

    def _print(self, case: dict[str, Any], job: Prefetch, wrong: list[str]) -> None:
        slots = "/".join(str(number) for number in case["pool_slots"].values())
        why = ", ".join(f"{_WHY.get(reason, reason)} {pages}" for reason, pages in job.shortfall.items()) or "-"
        pages = job.pages
        row = f"{case['id']:<27}{slots:>8}{pages.requested:>7}{pages.stored:>8}{pages.granted:>9}{pages.ready:>7}"
        print(f"{row}  {why:<34}{job.timing_ms['total']:>7.1f}" + "".join(f"\n    WRONG: {one}" for one in wrong))


class _Verifier:
    """The second process."""

    def __init__(self, pool: str) -> None:
        command = [sys.executable, "-m", "forestage.demo", "--verify", pool]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def check(self, model: str, slots: list[tuple[str, int, str, list[str]]]) -> tuple[int, list[str]]:
        """Have slots read and compared; return how many bytes, and what was wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"model": model, "slots": slots}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["bytes"], answer["bad"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)


if __name__ == "__main__":
    sys.exit(main())
