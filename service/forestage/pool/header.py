"""The start of the pool file, header and region records, in binary form (docs/pool-format.md).

Law: what the file is (sizes, regions, where it was made) is written once and covered by a checksum. Which start owns
it changes in place, in an order that shows whether a start was killed while changing it.
"""

import struct
import zlib
from dataclasses import dataclass

from forestage.core.geometry import HEADER_BYTES, REGION_BYTES, SLOT_ENTRY_BYTES, Geometry, Region
from forestage.pool.fence import STORES_IN_ORDER, fence

__all__ = [
    "FORMAT_VERSION",
    "MAGIC",
    "READY",
    "STARTING",
    "STATE_OFFSET",
    "STOPPED",
    "Header",
    "HeaderError",
    "Origin",
    "encode_header",
    "encode_records",
    "last_generation",
    "read_header",
    "set_start",
    "set_state",
]

MAGIC = b"FRSTPOOL"
FORMAT_VERSION = 3

# Header states. They inform; what a reader may trust is said by the slot entries alone.
STARTING, READY, STOPPED = 1, 2, 3

# magic, version, header size, file size, regions, record size, entry size, NUMA node, inode, boot
_FIXED = struct.Struct("<8sIIQIIIiQ16s")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_OFFSET = 64
# generation, instance, generation again
_START = struct.Struct("<Q16sQ")
_START_OFFSET = 128
_STATE = struct.Struct("<I")
STATE_OFFSET = 160
_MAX_GENERATION = 1 << 62

# model, component, fingerprint, table offset, offset, slot_bytes, slots, shard_bytes, bytes, shards, page_tokens,
# covers, window
_RECORD = struct.Struct("<128s32s32sQQQQQQIIB3xI")

assert _FIXED.size == _CHECKSUM_OFFSET
assert _START_OFFSET + _START.size == STATE_OFFSET
assert _RECORD.size == REGION_BYTES


class HeaderError(ValueError):
    """The bytes are not a header of this format version, or are damaged; `foreign` says that they never were one."""

    def __init__(self, detail: str, *, foreign: bool = False) -> None:
        super().__init__(detail)
        self.foreign = foreign


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the file was made: `numa_node` its memory was bound to (-1: none), `inode`, `boot` id of the machine."""

    numa_node: int = -1
    inode: int = 0
    boot: bytes = bytes(16)


@dataclass(frozen=True, slots=True)
class Header:
    """What a valid header says about its file. `file_bytes` is the size of the file; `state` may change at any time.

    `instance` and `generation` are those of the last start. One that was killed while it wrote them left the generation
    as it was before.
    """

    instance: bytes
    generation: int
    file_bytes: int
    regions: int
    state: int
    origin: Origin


def encode_header(
    geometry: Geometry, *, instance: bytes, generation: int, file_bytes: int, state: int, origin: Origin | None = None
) -> bytes:
    """Return header and region records as they stand at the start of the file.

    Raises ValueError when a name is too long for its field (128 bytes a model, 32 a component).
    """
    records, origin = encode_records(geometry), origin or Origin()
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        file_bytes,
        len(geometry.regions),
        REGION_BYTES,
        SLOT_ENTRY_BYTES,
        origin.numa_node,
        origin.inode,
        origin.boot,
    )
    head = bytearray(HEADER_BYTES)
    head[:_CHECKSUM_OFFSET] = fixed
    _CHECKSUM.pack_into(head, _CHECKSUM_OFFSET, zlib.crc32(records, zlib.crc32(fixed)))
    _START.pack_into(head, _START_OFFSET, generation, instance, generation)
    _STATE.pack_into(head, STATE_OFFSET, state)
    return bytes(head) + records


def encode_records(geometry: Geometry) -> bytes:
    """Return the region records; raises ValueError as `encode_header` does."""
    return b"".join(_encode_record(region) for region in geometry.regions)


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
    if not MAGIC.startswith(bytes(head[: len(MAGIC)])):
        raise HeaderError("not a Forestage pool", foreign=True)
    if len(head) < HEADER_BYTES:
        raise HeaderError("the header is cut short")
    fields = _FIXED.unpack_from(head)
    _, version, header_bytes, file_bytes, regions, record_bytes, entry_bytes, numa_node, inode, boot = fields
    if version != FORMAT_VERSION:
        raise HeaderError(f"format version {version}, this service writes {FORMAT_VERSION}")
    end = HEADER_BYTES + regions * REGION_BYTES
    if (header_bytes, record_bytes, entry_bytes) != (HEADER_BYTES, REGION_BYTES, SLOT_ENTRY_BYTES) or len(head) < end:
        raise HeaderError("the header is damaged: impossible sizes")
    (checksum,) = _CHECKSUM.unpack_from(head, _CHECKSUM_OFFSET)
    if checksum != zlib.crc32(head[HEADER_BYTES:end], zlib.crc32(head[:_CHECKSUM_OFFSET])):
        raise HeaderError("the header is damaged: its checksum does not agree")
    generation, instance, again = _START.unpack_from(head, _START_OFFSET)
    if generation - again not in {0, 1} or generation >= _MAX_GENERATION:
        raise HeaderError("the header is damaged: impossible generation")
    (state,) = _STATE.unpack_from(head, STATE_OFFSET)
    return Header(instance, again, file_bytes, regions, state, Origin(numa_node, inode, boot))


def last_generation(head: bytes | bytearray) -> int:
    """Return the generation that the start of a damaged file still names, 0 if it names none."""
    if len(head) < HEADER_BYTES:
        return 0
    generation, _, again = _START.unpack_from(head, _START_OFFSET)
    return int(again) if generation == again < _MAX_GENERATION else 0


def set_start(memory: memoryview, instance: bytes, generation: int) -> None:
    """Write who owns a mapped file from now on; `generation` must be one more than before.

    A kill in between leaves the two copies of the generation one apart, which tells it from damage.
    """
    words = memory[:HEADER_BYTES].cast("Q")
    first = _START_OFFSET // 8
    words[first] = generation
    if not STORES_IN_ORDER:
        fence()
    memory[_START_OFFSET + 8 : _START_OFFSET + 24] = instance
    if not STORES_IN_ORDER:
        fence()
    words[first + 3] = generation
    words.release()


def set_state(memory: memoryview, state: int) -> None:
    """Change the state word of a mapped header in one store; the checksum does not cover it."""
    words = memory[:HEADER_BYTES].cast("I")
    words[STATE_OFFSET // 4] = state
    words.release()
