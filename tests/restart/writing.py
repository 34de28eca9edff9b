"""Engines that write pages through the client, and the ledger of what they were told about each."""

import itertools
import random
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from forestage_client import Client, Gone
from forestage_client.page_writer import PageWriter
from forestage_client.pool_view import PoolView, Stale
from restart.pages import MODEL, STATE_EVERY, chain, page_bytes

__all__ = ["Ledger", "Place", "Writing"]

# A component, and a page key.
Place = tuple[str, bytes]


@dataclass
class Ledger:
    """What the service answered: a commit of these pages, and that L3 has these. `chains` are prefixes that were begun.

    `abandoned` and `dropped` count writes that were never committed.
    """

    committed: set[Place] = field(default_factory=set)
    durable: set[Place] = field(default_factory=set)
    chains: list[list[bytes]] = field(default_factory=list)
    abandoned: int = 0
    dropped: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def note(self, places: set[Place], *, durable: bool) -> None:
        with self.lock:
            self.committed |= places
            if durable:
                self.durable |= places

    def has_commits(self) -> bool:
        return bool(self.committed)

    def keys(self, rng: random.Random) -> list[bytes]:
        """Return a prefix to write: a new one, or one that was begun before."""
        length = rng.randint(1, 20)
        with self.lock:
            if self.chains and rng.random() < 0.3:
                return rng.choice(self.chains)
            keys = chain(f"written {next(self.numbers)}", length)
            self.chains.append(keys)
        return keys


@dataclass
class Writing:
    """An engine that reserves, fills and mostly commits, and that may still be filling when the service is gone."""

    ledger: Ledger
    view: PoolView

    def __call__(self, client: Client, rng: random.Random) -> None:
        with suppress(Gone, Stale):  # it was too slow for its reservation
            self._write(client, rng)

    def _write(self, client: Client, rng: random.Random) -> None:
        keys = self.ledger.keys(rng)
        write = client.begin_write(MODEL, keys, {"state": range(STATE_EVERY - 1, len(keys), STATE_EVERY)})
        writer = PageWriter(self.view, write)
        # Of a page that got only one of its parts the rest is stored already.
        places = {(component, keys[page]) for component, page in writer.untouched}
        if not places:
            time.sleep(0.002)
        self._fill(writer, keys, writer.untouched)
        end = rng.random()
        if end < 0.05:
            self.ledger.abandoned += 1
            return
        if end < 0.15:
            self.ledger.dropped += 1
            client.drop_write(write.id)
            return
        status = client.commit_write(write.id)
        self.ledger.note(places, durable=False)
        if rng.random() < 0.7:
            status = client.write_status(write.id, wait_ms=rng.choice([0, 20, 200]))
        assert status.failed == 0
        # Which of the pages a duplicate is, the answer does not say.
        self.ledger.note(places, durable=status.durable == status.committed and not status.duplicate)

    def _fill(self, writer: PageWriter, keys: list[bytes], places: Iterable[tuple[str, int]]) -> None:
        for component, page in places:
            (target,) = writer.views(component, page)
            data = page_bytes(keys[page], component)
            for at in range(0, len(data), 16 << 10):  # so that it may be caught between two
                target[at : at + (16 << 10)] = data[at : at + (16 << 10)]
        writer.check()
