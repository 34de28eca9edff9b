"""The storage seam: what every L3 offers, and what it promises about the slots it is handed.

A storage never owns a slot. It is lent writable views for the time of one `read_into` and must not touch them
after that call has returned. It knows nothing of jobs, leases or the pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forestage.core.layout import ModelLayout

__all__ = ["Buffer", "PageRead", "Presence", "Probe", "ReadOutcome", "Report", "Storage"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to L3: how far does this prefix go, and where are tail states?

    `keys`: page keys in prefix order. Pages below `first_page` are not asked for `every_page` components, pages below
    `first_tail` not for tail components. `known[i]` is 1 where page i need not be in L3 for the prefix to go on
    (it is resident or on its way).
    """

    keys: Sequence[bytes]
    first_page: int
    first_tail: int
    known: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Presence:
    """The answer: one mask a component, in the model's order; `masks[c][i]` is 1 where all shards of page i are there.

    A storage may stop at the first page that is neither `known` nor whole in every `every_page` component; masks are
    0 from there on, tails included. They are 0 below `first_page` (`first_tail` for tail components) too.
    `unasked_from` is that first page if it is unknown whether it is there: the part of L3 that has it did not answer.
    """

    masks: tuple[bytes | bytearray, ...]
    unasked_from: int | None = None


class ReadOutcome(StrEnum):
    """How one page read ended. The value of the failing ones is the word for the error metric."""

    LOADED = "loaded"  # whole and verified
    MISSING = "missing"  # not there (any more)
    CORRUPT = "corrupt"  # wrong size, checksum, key or envelope
    ERROR = "error"  # this page is unreadable
    UNREACHABLE = "unreachable"  # the storage as a whole did not answer
    STALLED = "stalled"  # no progress for the stall timeout: given up, but its buffers are still in use
    STOPPED = "stopped"  # not begun or not finished, because `PageRead.stopped` was set or the call cancelled


@dataclass(slots=True, eq=False)
class PageRead:
    """One page of one component to be read: `views[s]` takes shard s and has exactly `Component.bytes` bytes.

    `stopped` may be set by the event loop at any time: a read that has not begun then ends as STOPPED, and so may one
    between two shards or chunks. `progress` is raised by the storage when it begins the page and with every chunk
    that arrives; only its changes mean something: a read whose `progress` stands still is stalled, not slow.
    """

    component_index: int
    key: bytes
    views: tuple[memoryview, ...]
    stopped: bool = False
    progress: int = 0


Report = Callable[[int, ReadOutcome], None]


class Storage(ABC):
    """An L3. All methods are called on the event loop; none may block it.

    `batch_bytes` and `batches_in_flight` say how it likes to be read: so many bytes a `read_into`, so many of
    those at once; `batch_bytes` may change as a storage learns, so look at it for every batch. Values are whole or
    absent; a missing key is an outcome, not an error.
    """

    kind: str
    batch_bytes: int = 2 << 20
    batches_in_flight: int = 4

    async def open(self) -> None:  # noqa: B027  (optional: most storages need nothing)
        """Make ready before the first call. Raises StartError for what only an operator can change.

        An L3 that is merely unreachable is no such thing: it may come later.
        """

    @abstractmethod
    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        """Ask what is there, in as few round trips as possible.

        May be cancelled at any await. Raises StorageUnavailableError when L3 cannot be asked.
        """

    @abstractmethod
    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        """Read pages in order into their views; call `report(index, outcome)` exactly once for each.

        `report` may be called from any thread, soon after each page and not only at the end. Returns only when
        nothing writes to any view any more; a cancelled call keeps that promise (it ends its reads first) and
        reports what it did not read as STOPPED. Trouble with a page or with L3 is an outcome, never raised.
        """

    def stalled(self, reads: Sequence[PageRead]) -> None:  # noqa: B027  (optional)
        """Learn that the batch `reads` shows no progress: free what it blocks for others, end it if that is possible.

        Called by the wrapper with the very sequence `read_into` was given, while that call is still running.
        """

    @abstractmethod
    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        """Store one page, whole or not at all; `shards[s]` has exactly `Component.bytes` bytes.

        Replaces what was there. The buffers are in use until the call returns, cancelled or not: a cancelled call
        ends as soon as they are free, which may be late for a thread that hangs in the kernel, and the page is then
        stored whole or not at all. Raises StorageUnavailableError or OSError.
        """

    @abstractmethod
    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        """Remove all shards of a page; say whether there was anything.

        Raises StorageUnavailableError or OSError.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Give back connections, threads and descriptors. Idempotent; waits for no read that hangs."""
