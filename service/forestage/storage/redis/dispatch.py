"""Carries things out at the nodes that have them, wherever they are sent from there.

Law: when `carry` returns or raises, no thread uses what it was given; each thing was done, or is returned.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forestage.core.breaker import Ticket
from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis.directory import Detour, Directory
from forestage.storage.redis.errand import Errand, Run, outlast
from forestage.storage.redis.node import Node
from forestage.storage.threads import Threads

__all__ = ["Dispatch", "Kind"]

T = TypeVar("T", bound=Hashable)
E = TypeVar("E", bound=Errand[Any])

# Redirections that are followed for one thing, and how much longer each wait for a slot on the move is.
_MAX_ROUNDS = 5
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Kind(Generic[T, E]):
    """How one kind of things is carried out.

    `name_of` a thing is its key in Redis; `make(node, things, asking)` is the errand that does them at a node, in the
    `threads` of that node; a node that takes longer than `timeout_s` seconds has failed.
    """

    name_of: Callable[[T], bytes]
    make: Callable[[Node, Sequence[T], bool], E]
    threads: Callable[[Node], Threads]
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class Dispatch(Generic[T, E]):
    """One call's worth of things on their way."""

    directory: Directory
    kind: Kind[T, E]
    #: The errands that ended or run.
    errands: list[E] = field(default_factory=list)
    #: Why things were left over, if something failed.
    failure: StorageUnavailableError | None = None
    is_broken_off: bool = False
    _runs: list[Run] = field(default_factory=list)
    _detours: dict[T, Detour] = field(default_factory=dict)

    async def carry(self, things: Sequence[T]) -> list[T]:
        """Carry things out and return those that could not be. Raises StorageUnavailableError.

        A cancelled call ends what it began first.
        """
        left: list[T] = []
        for attempt in range(_MAX_ROUNDS):
            await self.directory.ready()
            if self.is_broken_off:
                break
            todo, things = things, []
            begun = self._begin(todo, left)
            try:
                await outlast(self._runs, self.kind.timeout_s)
            finally:
                for errand, ticket in begun:
                    self._judge(errand, ticket)
            things = await self._what_next(begun, left, attempt)
            if not things:
                break
        return [*left, *things]

    def break_off(self) -> None:
        """End as soon as possible: the servers do not answer."""
        self.is_broken_off = True
        for run in self._runs:
            run.break_off(blame=True)

    def _begin(self, things: Sequence[T], left: list[T]) -> list[tuple[E, Ticket]]:
        begun: list[tuple[E, Ticket]] = []
        self._runs = []
        for (node, asking), share in self._shares(things).items():
            ticket = self.directory.admit(node) if node is not None else Ticket(passed=False)
            if node is None or not ticket.passed:
                self.failure = self.failure or StorageUnavailableError("no node that answers has the key")
                left += share
                continue
            errand = self.kind.make(node, share, asking)
            try:
                self._runs.append(Run(self.kind.threads(node), errand))
            except StorageUnavailableError as error:
                self.directory.judge(node, ticket, is_well=None)
                self.failure = error
                left += share
                continue
            begun.append((errand, ticket))
        self.errands += [errand for errand, _ in begun]
        return begun

    def _shares(self, things: Sequence[T]) -> dict[tuple[Node | None, bool], Sequence[T]]:
        directory = self.directory
        if directory.only_node is not None:
            return {(directory.only_node, False): things}
        shares: dict[tuple[Node | None, bool], Sequence[T]] = {}
        if self._detours:
            for thing, detour in self._detours.items():
                shares[detour.node, detour.asking] = [*shares.get((detour.node, detour.asking), ()), thing]
            things = [thing for thing in things if thing not in self._detours]
            self._detours.clear()
        by_node: dict[Node | None, list[T]] = defaultdict(list)
        for thing, node in zip(things, self._nodes_of(things), strict=True):
            by_node[node].append(thing)
        return shares | {(node, False): share for node, share in by_node.items()}

    def _nodes_of(self, things: Sequence[T]) -> Sequence[Node | None]:
        return self.directory.nodes_of([self.kind.name_of(thing) for thing in things])

    def _judge(self, errand: E, ticket: Ticket) -> None:
        is_well: bool | None = errand.failure is None
        if errand.is_broken_off:
            is_well = False if errand.is_blamed and errand.todo else None
        self.directory.judge(errand.node, ticket, is_well=is_well)

    async def _what_next(self, begun: Sequence[tuple[E, Ticket]], left: list[T], attempt: int) -> list[T]:
        """Return what is worth another round; the rest that is not done goes to `left`."""
        if self.is_broken_off:
            for errand, _ in begun:
                left += [*errand.todo, *(thing for thing, _ in errand.redirected)]
            return []
        again: list[T] = []
        wants_a_pause = False
        for errand, _ in begun:
            for thing, error in errand.redirected:
                if not self.directory.follows or (error.code == "READONLY" and attempt):
                    self.failure = StorageUnavailableError(f"{errand.node.name}: {error}")
                    left.append(thing)
                    continue
                detour = self.directory.follow(error)
                if detour is not None:
                    self._detours[thing] = detour
                wants_a_pause = wants_a_pause or error.wants_a_pause
                again.append(thing)
            if errand.todo:
                self.failure = errand.failure or StorageUnavailableError(f"{errand.node.name} does not answer")
                await self.directory.look_again(errand.node)
                undone = list(errand.todo)
                for thing, node in zip(undone, self._nodes_of(undone), strict=True):
                    (left if node in (None, errand.node) else again).append(thing)
        if wants_a_pause:
            await asyncio.sleep(_PAUSE_S * (attempt + 1))
        return again
