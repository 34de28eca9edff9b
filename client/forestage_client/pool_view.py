"""A reader's map of the shared pool: whole bytes of the page that was asked for, or `Stale`, never anything else.

Law: bytes are handed out as those of a key only when the slot's generation was even and the same before and after they
were copied, with the slot resident and its key equal. A view without copy gives that promise only once `check` has
passed after the last use of its bytes.
"""

import ctypes
import math
import mmap
import os
import platform
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forestage_client._memory import address_of, copy
from forestage_client._pool_format import (
    ENTRY,
    ENTRY_BYTES,
    GENERATION,
    HEADER_BYTES,
    LENT,
    RESIDENT,
    START,
    START_OFFSET,
    STATE_NAMES,
    PoolFormatError,
    PoolHeader,
    RegionInfo,
    head_bytes,
    pin_chunks,
    read_head,
)
from forestage_client._slot_stamps import SlotStamps, still_held, take_stamps

if TYPE_CHECKING:
    import torch

__all__ = ["PoolFormatError", "PoolView", "RegionInfo", "SlotEntry", "SlotStamp", "SlotStamps", "Stale"]

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_STEP_BYTES = 64 << 20
_PAGE = 4096
_CUDA_PORTABLE, _CUDA_READ_ONLY = 1, 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# x86 never reorders the loads of one core. Others need a fence between generation and bytes; a release followed by an
# acquire is one, and two passes through a lock contain that.
_LOADS_IN_ORDER = platform.machine() in {"x86_64", "AMD64", "i686", "i386"}
_fence_lock = threading.Lock()


def _fence() -> None:
    if _LOADS_IN_ORDER:
        return
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class Stale(Exception):  # noqa: N818 - the name is part of the public contract
    """The slot does not hold that page (any more), or its bytes changed while they were read. Ask for it anew."""


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One line of a slot table: `state` is "free", "filling" or "resident", `key` is empty unless resident."""

    slot: int
    state: str
    key: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class SlotStamp:
    """That a slot held a page, and in which generation. `PoolView.check` says whether it still does."""

    region: RegionInfo
    slot: int
    key: bytes
    generation: int


class PoolView:
    """The pool file of a running or stopped service, mapped into this process.

    `path`, `instance` (32 hex digits), `generation` and `regions[model][component]` are those of the moment of
    attaching. A service that starts anew keeps the file where it can, and this view goes on with it: `refresh` takes
    over the new instance and generation. Else it replaces the file; the view stays valid and shows the old one. The
    file is never changed (but through `writable` views), shortened or removed from here. Reading methods may be called
    from several threads.
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = False) -> None:
        """Attach to the pool at `path`; `writable` maps it for writing too, which an engine that stores pages needs.

        Raises FileNotFoundError, PermissionError (naming user and mode) or PoolFormatError.
        """
        self.path = os.fspath(path)
        self.writable = writable
        fd = _open(self.path, writable)
        try:
            size = os.fstat(fd).st_size
            header = _read_header(fd)
            if header.file_bytes != size:
                raise PoolFormatError(f"the pool file has {size} bytes, its header says {header.file_bytes}")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        finally:
            os.close(fd)
        self._memory = memoryview(self._mapping)
        self.size = size
        self.instance = header.instance
        self.generation = header.generation
        self.regions: dict[str, dict[str, RegionInfo]] = {}
        for region in header.regions:
            self.regions.setdefault(region.model, {})[region.component] = region
        self._pinned: list[int] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unpin and unmap. Idempotent. Views that still live keep the mapping until they die; that is no error."""
        if self._closed:
            return
        self._closed = True
        self._unpin()
        with suppress(BufferError):
            self._memory.release()
            self._mapping.close()
        # If it could not be closed: now only the views hold it.
        del self._mapping

    @property
    def closed(self) -> bool:
        """Whether `close` was called; everything else but views handed out earlier raises ValueError then."""
        return self._closed

    def refresh(self) -> bool:
        """Take over instance and generation as the file names them now; say whether they changed.

        They do when a service was started on this very file since: its leases, and the slots it named, are void then.
        A file that was replaced never changes: attach anew when the instance in `/v1/pool` is still another one. While
        a start is changing them they count as unchanged.
        """
        owner = self._owner()
        if owner is None or owner == (self.instance, self.generation):
            return False
        self.instance, self.generation = owner
        return True

    def belongs_to(self, instance: str, generation: int) -> bool:
        """Say whether the pool is that of this start of the service now, whatever it was when it was attached."""
        return self._owner() == (instance, generation)

    def is_lent(self, model: str, component: str, slot: int) -> bool:
        """Say whether the service has given a slot to somebody who writes a page. Raises Stale for no such slot."""
        generation, state, _, _, _ = self._entry(self._region(model, component), slot)
        return generation & 1 == 1 and state == LENT

    def copy(self, model: str, component: str, slot: int, key: bytes | str) -> bytes:
        """Return the whole page `key` (bytes or hex) from a slot: the payload of all shards, one after another.

        Raises Stale when the slot holds no such page, or held it no longer when the copy was done; KeyError for a
        model or component that the pool does not have.
        """
        stamp = self.stamp(model, component, slot, key)
        views = self._payload(stamp.region, slot)
        data = bytes(views[0]) if len(views) == 1 else b"".join(views)
        self.check(stamp)
        return data

    def read_into(self, model: str, component: str, slot: int, key: bytes | str, buffer: bytearray | memoryview) -> int:
        """Copy a page as `copy` does into a writable, contiguous buffer, without the GIL; return its size in bytes.

        Raises ValueError when the buffer is too small, and Stale as `copy` does; then its content is undefined.
        """
        stamp = self.stamp(model, component, slot, key)
        size = stamp.region.payload_bytes
        target = memoryview(buffer).cast("B")
        if len(target) < size:
            raise ValueError(f"the page has {size} bytes, the buffer {len(target)}")
        at = ctypes.addressof(ctypes.c_char.from_buffer(target))
        for view in self._payload(stamp.region, slot):
            ctypes.memmove(at, address_of(view), len(view))
            at += len(view)
        self.check(stamp)
        return size

    def copy_in(
        self,
        model: str,
        component: str,
        slot: int,
        data: bytes | bytearray | memoryview | Sequence[memoryview],
    ) -> None:
        """Copy a page into a slot, without the GIL: the payload of all shards one after another, or one buffer each.

        Only for slots that a write was given: this asks nobody, `PageWriter` does. Needs a view that is `writable`.
        Raises ValueError, and copies nothing, when a size is not the component's.
        """
        region = self._region(model, component)
        targets = self._payload(region, slot)
        if isinstance(data, bytes | bytearray | memoryview):
            whole = memoryview(data).cast("B")
            if len(whole) != region.payload_bytes:
                raise ValueError(f"a page of {component} has {region.payload_bytes} bytes, not {len(whole)}")
            shards = [whole[at : at + region.bytes] for at in range(0, len(whole), region.bytes)]
        else:
            shards = [memoryview(shard).cast("B") for shard in data]
            if [len(shard) for shard in shards] != [region.bytes] * region.shards:
                raise ValueError(f"a page of {component} has {region.shards} shards of {region.bytes} bytes")
        for target, shard in zip(targets, shards, strict=True):
            copy(target, shard)

    def stamp(self, model: str, component: str, slot: int, key: bytes | str) -> SlotStamp:
        """Take note that the slot holds the page `key` now. Raises Stale when it does not."""
        region = self._region(model, component)
        wanted = bytes.fromhex(key) if isinstance(key, str) else key
        generation, state, key_len, length, found = self._entry(region, slot)
        if generation & 1 or state != RESIDENT or found[:key_len] != wanted or length != region.payload_bytes:
            raise Stale(f"slot {slot} of {model}/{component} does not hold page {wanted.hex()}")
        return SlotStamp(region, slot, wanted, generation)

    def check(self, stamp: SlotStamp) -> None:
        """Confirm that the slot has held the stamped page from `stamp` until now. Raises Stale when it has not."""
        _fence()
        at = stamp.region.table_offset + stamp.slot * ENTRY_BYTES
        if GENERATION.unpack_from(self._memory, at)[0] != stamp.generation:
            raise Stale(f"slot {stamp.slot} was reused while page {stamp.key.hex()} was read")

    def stamp_all(self, model: str, component: str, slots: Sequence[int], keys: Sequence[bytes | str]) -> SlotStamps:
        """Take note which of `slots` hold the page of `keys` at the same place now; for many, a tenth of the cost.

        A slot that does not is noted as such, and `held` says so; nothing is raised for it.
        """
        region = self._region(model, component)
        wanted = [bytes.fromhex(key) if isinstance(key, str) else key for key in keys]
        return take_stamps(self._memory, region, slots, wanted, _fence)

    def held(self, stamps: SlotStamps) -> list[bool]:
        """Say of each slot whether it has held its page from `stamp_all` until now: then its bytes were that page's."""
        return still_held(self._memory, stamps, _fence)

    def view(self, model: str, component: str, slot: int) -> memoryview:
        """Return the slot's bytes without a copy, from the first shard's first byte to the last shard's last.

        With several shards there may be padding between them: see `shard_views`. What the bytes are of is said only
        by a `stamp` taken before and a `check` passed after their use.
        """
        region = self._region(model, component)
        start = self._start(region, slot)
        return self._memory[start : start + (region.shards - 1) * region.shard_bytes + region.bytes]

    def shard_views(self, model: str, component: str, slot: int) -> tuple[memoryview, ...]:
        """Return one view a shard, each of exactly `RegionInfo.bytes` bytes; otherwise as `view`."""
        return self._payload(self._region(model, component), slot)

    def tensor(
        self, model: str, component: str, slot: int, dtype: "torch.dtype", shape: tuple[int, ...]
    ) -> "torch.Tensor":
        """Return a torch tensor over the shared memory of a slot, starting at its first byte, without a copy.

        Same promise as `view`; it keeps the mapping alive. Writing to it ends the process with SIGSEGV unless the
        pool was attached `writable`. Raises ValueError when the shape needs more bytes than `view` has.
        """
        import torch

        memory = self.view(model, component, slot)
        count = math.prod(shape)
        if count * dtype.itemsize > len(memory):
            raise ValueError(f"{shape} of {dtype} needs {count * dtype.itemsize} bytes, the slot has {len(memory)}")
        # torch warns about read-only buffers; this one does not say that it is, and keeps the view, hence the mapping.
        owner = (ctypes.c_ubyte * len(memory)).from_address(address_of(memory))
        owner.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(owner, dtype=dtype, count=count).view(shape)

    def slots(self, model: str, component: str) -> Iterator[SlotEntry]:
        """Yield the entries of a slot table as each stands when it is reached. An entry in change is "filling"."""
        region = self._region(model, component)
        for slot in range(region.slots):
            generation, state, key_len, _, key = self._entry(region, slot)
            _fence()
            at = region.table_offset + slot * ENTRY_BYTES
            if generation & 1 or GENERATION.unpack_from(self._memory, at)[0] != generation:
                yield SlotEntry(slot, "filling", b"", generation)
            else:
                yield SlotEntry(slot, STATE_NAMES.get(state, "filling"), key[:key_len], generation)

    def table(self, model: str, component: str) -> memoryview:
        """Return the entries of a slot table, 128 bytes a slot as docs/pool-format.md has them, without a copy.

        For who looks at many at once; they change at any time, and what one says of a slot is true only as `stamp` and
        `check` have it.
        """
        region = self._region(model, component)
        return self._memory[region.table_offset : region.table_offset + region.slots * ENTRY_BYTES].toreadonly()

    def populate(self) -> None:
        """Fill this process's page tables (0.12 s a GiB), so that first touches do not fault. Runs without the GIL."""
        memory = self._memory[:]
        address = address_of(memory)
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        for at in range(0, self.size, _STEP_BYTES):
            if _libc.madvise(address + at, min(_STEP_BYTES, self.size - at), advice):
                # Linux before 5.14: touch a byte of every page.
                bytes(memory[at : at + _STEP_BYTES : _PAGE])

    def pin(self) -> bool:
        """Register the mapping with CUDA in this process, so that copies to and from the GPU are asynchronous.

        Returns False when there is no CUDA (no torch, no GPU); raises RuntimeError, with nothing registered, when CUDA
        refuses. Undone by `close`.
        """
        try:
            import torch
        except ImportError:
            return False
        if not torch.cuda.is_available():
            return False
        if self._pinned:
            return True
        cudart: Any = torch.cuda.cudart()
        address = address_of(self._memory)
        flags = _CUDA_PORTABLE | (0 if self.writable else _CUDA_READ_ONLY)
        regions = [region for components in self.regions.values() for region in components.values()]
        for offset, length in pin_chunks(regions, self.size):
            code = cudart.cudaHostRegister(address + offset, length, flags)
            if int(code):
                _clear_cuda_error()
                self._unpin()
                hint = "" if self.writable else "; the device may want the pool attached writable"
                raise RuntimeError(f"cudaHostRegister of {length} bytes: {cudart.cudaGetErrorString(code)}{hint}")
            self._pinned.append(address + offset)
        return True

    def _unpin(self) -> None:
        if not self._pinned:
            return
        import torch

        cudart: Any = torch.cuda.cudart()
        while self._pinned:
            if int(cudart.cudaHostUnregister(self._pinned.pop())):
                _clear_cuda_error()

    def _owner(self) -> tuple[str, int] | None:
        """Return instance and generation as the file names them now, None while a start is changing them."""
        if self._closed:
            raise ValueError("the pool view is closed")
        # Against the order in which they are written.
        (again,) = GENERATION.unpack_from(self._memory, START_OFFSET + START.size - GENERATION.size)
        _fence()
        _, instance, _ = START.unpack_from(self._memory, START_OFFSET)
        _fence()
        (generation,) = GENERATION.unpack_from(self._memory, START_OFFSET)
        return (instance.hex(), generation) if generation == again else None

    def _region(self, model: str, component: str) -> RegionInfo:
        if self._closed:
            raise ValueError("the pool view is closed")
        try:
            return self.regions[model][component]
        except KeyError:
            raise KeyError(f"{model}/{component} is not in the pool at {self.path}") from None

    def _start(self, region: RegionInfo, slot: int) -> int:
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        if slot >= region.slots:
            # What a slot number of another instance of the pool looks like.
            raise Stale(f"slot {slot} is not in this pool: {region.model}/{region.component} has {region.slots}")
        return region.offset + slot * region.slot_bytes

    def _payload(self, region: RegionInfo, slot: int) -> tuple[memoryview, ...]:
        start = self._start(region, slot)
        ends = range(start, start + region.slot_bytes, region.shard_bytes)
        return tuple([self._memory[at : at + region.bytes] for at in ends])

    def _entry(self, region: RegionInfo, slot: int) -> tuple[int, int, int, int, bytes]:
        self._start(region, slot)
        at = region.table_offset + slot * ENTRY_BYTES
        # The generation first: what follows is trusted only if it is still the same later.
        (generation,) = GENERATION.unpack_from(self._memory, at)
        _fence()
        _, state, key_len, _, _, length, _, key = ENTRY.unpack_from(self._memory, at)
        return generation, state, key_len, length, key


def _open(path: str, writable: bool) -> int:
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        try:
            status = os.stat(path)
        except OSError:
            raise error from None
        mode = f"uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
        text = f"the pool belongs to {mode}; this process is uid {os.geteuid()}, gid {os.getegid()}"
        raise PermissionError(error.errno, text, path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PoolFormatError(f"{path} is not a regular file")
    return fd


def _read_header(fd: int) -> PoolHeader:
    head = os.pread(fd, head_bytes(os.pread(fd, HEADER_BYTES, 0)), 0)
    if os.pread(fd, HEADER_BYTES, 0) != head[:HEADER_BYTES]:
        raise PoolFormatError("the service is still preparing this pool")  # it changed while it was read
    return read_head(head)


def _clear_cuda_error() -> None:
    """Take the last error from the CUDA runtime that torch has loaded; the next unrelated call would report it."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loaded = re.search(r" (/\S*/libcudart[^/\s]*\.so\S*)$", maps.read(), re.MULTILINE)
    if loaded:
        ctypes.CDLL(loaded[1]).cudaGetLastError()
        return
    import torch

    # A runtime that is linked into torch: the check behind the next kernel launch takes the error, and raises it.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
