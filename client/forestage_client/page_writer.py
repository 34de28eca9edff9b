"""The slots of one write, to be filled by an engine through a pool that it has attached writable.

Law: memory is handed out or written to only while the write lasts by this machine's monotonic clock, while the pool
belongs to the start of the service that granted it, and while the slot is marked as lent.
"""

import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from forestage_client._types import Write, WriteStatus
from forestage_client.pool_view import PoolView, Stale

if TYPE_CHECKING:
    import torch

__all__ = ["PageWriter"]


class PageWriter:
    """Where the pages of a write go: by component, and by index of the page in the keys of the write.

    What was put is not read by anybody before the write is committed, and must not change from then on. Work that a
    device does on these bytes (a copy from the GPU) must have ended before: nothing here waits for it. For one thread.
    """

    def __init__(self, view: PoolView, write: Write) -> None:
        """Take the slots that `write` grants in `view`.

        Raises ValueError for a view that is not writable, Stale when the pool is not the one of the write any more.
        """
        if not view.writable:
            raise ValueError("to write pages, attach the pool with PoolView(path, writable=True)")
        self.write = write
        #: What became of it, once the `with` block of `Client.write` has ended well.
        self.result: WriteStatus | None = None
        self._view = view
        self._slots = {
            (component, page): slot
            for component, slots in write.slots.items()
            for page, slot in zip(write.tails.get(component, range(len(slots))), slots, strict=True)
            if slot is not None
        }
        self._asked: dict[str, Container[int]] = {
            component: write.tails.get(component, range(len(slots))) for component, slots in write.slots.items()
        }
        self._untouched = dict.fromkeys(self._slots)
        self.check()

    @property
    def untouched(self) -> tuple[tuple[str, int], ...]:
        """The (component, page) that have a slot and of which nothing was put or handed out yet."""
        return tuple(self._untouched)

    def wants(self, component: str, page: int) -> bool:
        """Say whether a page has a slot here; it has none where it is stored already or was not granted."""
        return (component, page) in self._slots

    def put(self, component: str, page: int, data: "bytes | bytearray | memoryview | Sequence[memoryview]") -> bool:
        """Copy a page in if it is wanted, as `copy_in` does; say whether it was.

        Raises ValueError for a page that was not asked for: another component, or a state that `tails` did not name.
        """
        wanted = self.wants(component, page)
        if not wanted and page not in self._asked.get(component, ()):
            raise ValueError(f"page {page} of {component} is not among those that write {self.write.id} asked for")
        if wanted:
            self.copy_in(component, page, data)
        return wanted

    def copy_in(self, component: str, page: int, data: "bytes | bytearray | memoryview | Sequence[memoryview]") -> None:
        """Copy a page into its slot, without the GIL: the payload of all shards one after another, or one buffer each.

        Raises KeyError for a page without a slot, ValueError for another size than the component's, and Stale when
        the write has ended; after Stale the write must not be committed.
        """
        slot = self._slot(component, page)
        self._view.copy_in(self.write.model, component, slot, data)
        self.check()  # a process may be stopped while it copies
        self._untouched.pop((component, page), None)

    def views(self, component: str, page: int) -> tuple[memoryview, ...]:
        """Return writable views of a slot, one a shard and each of exactly `RegionInfo.bytes` bytes.

        They can be written to after the write has ended, and must not be: the bytes are another page's then. Call
        `check` after the last byte. Raises KeyError and Stale as `copy_in` does.
        """
        slot = self._slot(component, page)
        self._untouched.pop((component, page), None)
        return self._view.shard_views(self.write.model, component, slot)

    def tensor(self, component: str, page: int, dtype: "torch.dtype", shape: tuple[int, ...]) -> "torch.Tensor":
        """Return a torch tensor over a slot, from its first byte on, without a copy; otherwise as `views`."""
        slot = self._slot(component, page)
        tensor = self._view.tensor(self.write.model, component, slot, dtype, shape)
        self._untouched.pop((component, page), None)
        return tensor

    def check(self) -> None:
        """Confirm that the slots are still those of this write. Raises Stale when they are not."""
        write = self.write
        if time.monotonic() >= write.expires_at_s:
            raise Stale(f"write {write.id} has expired after {write.expires_in_ms} ms: its slots may be reused")
        if not self._view.belongs_to(write.instance, write.generation):
            raise Stale(f"write {write.id} was granted by another start of the service, or in another pool file")

    def require_whole(self) -> None:
        """Raise ValueError when a page that has a slot was never put: it would be committed with what lies there."""
        if self._untouched:
            some = ", ".join(f"{component} {page}" for component, page in self.untouched[:5])
            raise ValueError(f"{len(self._untouched)} pages of write {self.write.id} were never put: {some}")

    def _slot(self, component: str, page: int) -> int:
        self.check()
        try:
            slot = self._slots[component, page]
        except KeyError:
            raise KeyError(f"write {self.write.id} has no slot for page {page} of {component}") from None
        if not self._view.is_lent(self.write.model, component, slot):
            raise Stale(f"slot {slot} of {self.write.model}/{component} is not lent any more")
        return slot
