"""The binary form of the pool file: header, region records and slot tables (docs/pool-format.md).

Law of a slot entry: its generation only grows; it is odd from before the first byte of the slot may be written until
the content is stable, and even otherwise; each refill and each eviction changes it. While it is even and the state is
RESIDENT, the slot holds the whole bytes of the key in the entry.
"""

import platform
import struct
import threading
import zlib
from dataclasses import dataclass

from forestage.core.geometry import HEADER_BYTES, REGION_BYTES, SLOT_ENTRY_BYTES, Geometry, Region

__all__ = [
    "FILLING",
    "FORMAT_VERSION",
    "FREE",
    "MAGIC",
    "READY",
    "RESIDENT",
    "STARTING",
    "STATE_OFFSET",
    "STOPPED",
    "Header",
    "HeaderError",
    "RegionTable",
    "encode_header",
    "read_header",
    "set_state",
]

MAGIC = b"FRSTPOOL"
FORMAT_VERSION = 1

# Header states. They inform; what a reader may trust is said by the slot entries alone.
STARTING, READY, STOPPED = 1, 2, 3

# Slot states.
FREE, FILLING, RESIDENT = 0, 1, 2

# magic, version, header size, instance, generation, file size, regions, record size, entry size
_HEADER = struct.Struct("<8sII16sQQIII")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_OFFSET = 60
_STATE = struct.Struct("<I")
STATE_OFFSET = 64

# model, component, fingerprint, table offset, offset, slot_bytes, slots, shard_bytes, bytes, shards, page_tokens,
# covers, window
_RECORD = struct.Struct("<128s32s32sQQQQQQIIB3xI")

_GENERATION = struct.Struct("<Q")
_ENTRY_HEAD = struct.Struct(f"<Q{SLOT_ENTRY_BYTES - 8}x")
_GENERATION_AND_STATE = struct.Struct("<QB")
# state, key_len, length, key; behind the generation. The reserved fields between them are written as zeros.
_CONTENT = struct.Struct("<BB6xQ8x64s")
_CONTENT_OFFSET = 8

assert _HEADER.size == _CHECKSUM_OFFSET
assert _RECORD.size == REGION_BYTES
assert _CONTENT_OFFSET + _CONTENT.size <= SLOT_ENTRY_BYTES

# x86 keeps the stores of one core in order for every observer, so the order of the calls below is the order a reader
# sees. Others need a fence; a release followed by an acquire is one, and two passes through a lock contain that.
_STORES_IN_ORDER = platform.machine() in {"x86_64", "AMD64", "i686", "i386"}
_fence_lock = threading.Lock()


def _fence() -> None:
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class HeaderError(ValueError):
    """The bytes are not a header of this format version, or are damaged; `foreign` says that they never were one."""

    def __init__(self, detail: str, *, foreign: bool = False) -> None:
        super().__init__(detail)
        self.foreign = foreign


@dataclass(frozen=True, slots=True)
class Header:
    """What a valid header says about its file. `file_bytes` is the size of the file; `state` may change at any time."""

    instance: bytes
    generation: int
    file_bytes: int
    regions: int
    state: int


def encode_header(geometry: Geometry, *, instance: bytes, generation: int, file_bytes: int, state: int) -> bytes:
    """Return header and region records as they stand at the start of the file.

    Raises ValueError when a name is too long for its field (128 bytes a model, 32 a component).
    """
    records = b"".join(_encode_record(region) for region in geometry.regions)
    fixed = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        instance,
        generation,
        file_bytes,
        len(geometry.regions),
        REGION_BYTES,
        SLOT_ENTRY_BYTES,
    )
    head = fixed + _CHECKSUM.pack(zlib.crc32(records, zlib.crc32(fixed))) + _STATE.pack(state)
    return head.ljust(HEADER_BYTES, b"\0") + records


def _encode_record(region: Region) -> bytes:
    model, component = region.model, region.component
    names = [model.name.encode(), component.name.encode()]
    for what, name, room in (("model", names[0], 128), ("component", names[1], 32)):
        if len(name) > room:
            raise ValueError(f"the {what} name {name.decode()!r} has {len(name)} bytes, the pool file holds {room}")
    return _RECORD.pack(
        *names,
        model.fingerprint.encode(),
        region.table_offset,
        region.offset,
        component.slot_bytes,
        region.slots,
        component.shard_bytes,
        component.bytes,
        component.shards,
        model.page_tokens,
        int(component.is_tail),
        component.window,
    )


def read_header(head: bytes | bytearray | memoryview) -> Header:
    """Read header and records from the first bytes of a file; raise HeaderError when they cannot be trusted."""
    if bytes(head[: len(MAGIC)]) != MAGIC:
        raise HeaderError("not a Forestage pool", foreign=True)
    if len(head) < HEADER_BYTES:
        raise HeaderError("the header is cut short")
    fields = _HEADER.unpack_from(head)
    _, version, header_bytes, instance, generation, file_bytes, regions, record_bytes, entry_bytes = fields
    if version != FORMAT_VERSION:
        raise HeaderError(f"format version {version}, this service writes {FORMAT_VERSION}")
    end = HEADER_BYTES + regions * REGION_BYTES
    if (header_bytes, record_bytes, entry_bytes) != (HEADER_BYTES, REGION_BYTES, SLOT_ENTRY_BYTES) or len(head) < end:
        raise HeaderError("the header is damaged: impossible sizes")
    (checksum,) = _CHECKSUM.unpack_from(head, _CHECKSUM_OFFSET)
    if checksum != zlib.crc32(head[HEADER_BYTES:end], zlib.crc32(head[:_CHECKSUM_OFFSET])):
        raise HeaderError("the header is damaged: its checksum does not agree")
    (state,) = _STATE.unpack_from(head, STATE_OFFSET)
    return Header(instance, generation, file_bytes, regions, state)


def set_state(memory: memoryview, state: int) -> None:
    """Change the state word of a mapped header in one store; the checksum does not cover it."""
    _STATE.pack_into(memory, STATE_OFFSET, state)


class RegionTable:
    """The slot entries of one region. Called on the event loop, by one owner; each call is a few stores.

    `memory` is the whole mapped pool file. Once `release` was called no other method may be.
    """

    __slots__ = ("_entries", "_generations", "_length", "region")

    def __init__(self, region: Region, memory: memoryview) -> None:
        self.region = region
        self._entries = memory[region.table_offset : region.table_offset + region.slots * SLOT_ENTRY_BYTES]
        self._length = region.component.shards * region.component.bytes
        self._generations: list[int] = [generation for (generation,) in _ENTRY_HEAD.iter_unpack(self._entries)]

    def begin_fill(self, slot: int) -> None:
        """Announce that the bytes of the slot are about to change: readers that come now or are copying find out."""
        # The next odd number, so that beginning again without an end still shows.
        generation = (self._generations[slot] + 1) | 1
        self._generations[slot] = generation
        _GENERATION_AND_STATE.pack_into(self._entries, slot * SLOT_ENTRY_BYTES, generation, FILLING)
        if not _STORES_IN_ORDER:
            _fence()

    def publish(self, slot: int, key: bytes) -> None:
        """Declare that the slot holds the whole bytes of `key` (1 to 64 bytes) and that nobody writes to it.

        Raises ValueError, and changes nothing, when no fill was begun or the key does not fit.
        """
        generation = self._generations[slot] + 1
        key_len = len(key)
        if generation & 1 or not 0 < key_len <= 64:
            raise ValueError(f"publish of slot {slot} without begin_fill, or with a key of {key_len} bytes")
        offset = slot * SLOT_ENTRY_BYTES
        entries = self._entries
        _CONTENT.pack_into(entries, offset + _CONTENT_OFFSET, RESIDENT, key_len, self._length, key)
        if not _STORES_IN_ORDER:
            _fence()
        _GENERATION.pack_into(entries, offset, generation)
        self._generations[slot] = generation

    def clear(self, slot: int) -> None:
        """Make the slot free: its page was evicted, or its fill ended and is not wanted. Nobody writes to it."""
        generation = (self._generations[slot] + 1) | 1
        offset = slot * SLOT_ENTRY_BYTES
        entries = self._entries
        _GENERATION.pack_into(entries, offset, generation)
        if not _STORES_IN_ORDER:
            _fence()
        _CONTENT.pack_into(entries, offset + _CONTENT_OFFSET, FREE, 0, 0, b"")
        if not _STORES_IN_ORDER:
            _fence()
        _GENERATION.pack_into(entries, offset, generation + 1)
        self._generations[slot] = generation + 1

    def generation(self, slot: int) -> int:
        """Return the generation of a slot as it stands in the table."""
        return self._generations[slot]

    def release(self) -> None:
        """Let go of the mapped memory."""
        self._entries.release()
