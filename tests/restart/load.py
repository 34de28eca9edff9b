"""What goes on in a service when it ends, and how it ends: engines in threads, kills at random or chosen moments."""

import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forestage_client import Client, ForestageError, Prefetch
from forestage_client.pool_view import PoolView
from restart.lives import Lives
from restart.pages import COMPONENTS, MODEL, Store, page_bytes

__all__ = ["Act", "Load", "Prefetching", "Resident", "check_bytes", "dropped", "end_life", "half_filled", "resident"]

_PATIENCE_S = 60.0
_ADOPTED = re.compile(r"adopted the pool at .*: \d+ pages kept, (\d+) dropped")

Act = Callable[[Client, random.Random], None]
# Per component: slot to key and generation.
Resident = dict[str, dict[int, tuple[bytes, int]]]


def resident(view: PoolView) -> Resident:
    """Return what a reader of the pool finds, having compared every byte of it."""
    found: Resident = {}
    for component in COMPONENTS:
        entries = [entry for entry in view.slots(MODEL, component) if entry.state == "resident"]
        found[component] = {entry.slot: (entry.key, entry.generation) for entry in entries}
        for entry in entries:
            assert view.copy(MODEL, component, entry.slot, entry.key) == page_bytes(entry.key, component)
    return found


def half_filled(view: PoolView) -> int:
    """Count the slots that the service was filling or clearing, those that engines write to apart."""
    return sum(
        entry.state == "filling" and not view.is_lent(MODEL, component, entry.slot)
        for component in COMPONENTS
        for entry in view.slots(MODEL, component)
    )


def dropped(lives: Lives, since: int) -> list[int]:
    """Return how many slots each adoption has dropped since the log had so many bytes."""
    found = (_ADOPTED.search(line) for line in lives.told("adopted the pool", since))
    return [int(words[1]) for words in found if words is not None]


def check_bytes(view: PoolView, job: Prefetch, keys: Sequence[bytes]) -> None:
    """Compare every page that a job hands out."""
    for key, slot in zip(keys, job.slots["kv"], strict=False):
        assert view.copy(MODEL, "kv", slot, key) == page_bytes(key, "kv")
    (state,) = job.slots["state"]
    assert view.copy(MODEL, "state", state, keys[job.pages.ready - 1]) == page_bytes(keys[job.pages.ready - 1], "state")


@dataclass
class Prefetching:
    """An engine that prefetches, reads, releases, cancels and leaves."""

    chains: Sequence[Sequence[bytes]]
    view: PoolView

    def __call__(self, client: Client, rng: random.Random) -> None:
        keys = rng.choice(self.chains)
        keys = keys[: rng.randint(min(4, len(keys)), len(keys))]
        wait_ms, deadline_ms = rng.choice([(1000, 0), (1000, 8), (2, 0), (0, 0)])
        job = client.prefetch(MODEL, keys, wait_ms=wait_ms, deadline_ms=deadline_ms, lease_ms=1000)
        if job.lease is not None:
            check_bytes(self.view, job, keys)
            client.release(job.lease.id)
        elif rng.random() < 0.5:
            client.cancel(job.request_id)


@dataclass
class Load:
    """Threads that do the same again and again, one each act, until the service is gone."""

    url: str
    acts: Sequence[Act]
    seed: int
    failures: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        for number, act in enumerate(self.acts):
            self.threads.append(threading.Thread(target=self._drive, args=(act, random.Random(self.seed + number))))
            self.threads[-1].start()

    def join(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        assert self.failures == []

    def _drive(self, act: Act, rng: random.Random) -> None:
        try:
            with Client(self.url) as client:
                while not self.over.is_set():
                    act(client, rng)
        except ForestageError:
            pass  # it was killed, or is stopping
        except BaseException as error:
            self.failures.append(error)


def end_life(how: str, lives: Lives, load: Load, store: Store, view: PoolView, rng: random.Random) -> None:
    """End the service: "idle" after the load, all others under it; "filling" while it fills a slot, "start" after the
    load and once more during the next start."""
    if how == "idle":
        load.join()
    elif how != "filling":
        time.sleep(rng.uniform(0.01, 0.2))  # the moment
    if how == "stop":
        assert lives.stop() == 0
    elif how == "filling":
        _freeze_while_filling(lives, view)
        lives.kill()
    else:
        if how == "shutdown":
            lives.signal(signal.SIGTERM)
            time.sleep(rng.uniform(0, 0.02))
        lives.kill()
    load.join()
    if how == "start":
        lives.begin(store.config)
        time.sleep(rng.uniform(0, 0.35))
        lives.kill()


def _freeze_while_filling(lives: Lives, view: PoolView) -> None:
    end = time.monotonic() + _PATIENCE_S
    while True:
        assert time.monotonic() < end
        if half_filled(view):
            lives.freeze()
            if half_filled(view):
                return
            lives.thaw()
