"""The binary form of the pool file as a reader sees it (docs/pool-format.md). Standard library only."""

import math
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "ENTRY",
    "ENTRY_BYTES",
    "GENERATION",
    "HEADER_BYTES",
    "LENT",
    "RESIDENT",
    "START",
    "START_OFFSET",
    "STATE_NAMES",
    "PoolFormatError",
    "PoolHeader",
    "RegionInfo",
    "head_bytes",
    "pin_chunks",
    "read_head",
]

_MAGIC = b"FRSTPOOL"
_VERSION = 3
HEADER_BYTES = 4096
_RECORD_BYTES = 256
ENTRY_BYTES = 128

# magic, version, header size, file size, regions, record size, entry size, (NUMA node, inode, boot,) checksum
_HEADER = struct.Struct("<8sIIQIII4x8x16xI")
_CHECKED_BYTES = 64
# generation, instance, generation again
START = struct.Struct("<Q16sQ")
START_OFFSET = 128
_STATE = struct.Struct("<I")
_STATE_OFFSET = 160
_RECORD = struct.Struct("<128s32s32sQQQQQQIIB3xI")

# generation, state, key_len, flags, checksum, length, page index, key
ENTRY = struct.Struct("<QBBHIQI4x64s")
GENERATION = struct.Struct("<Q")

_PAGE = 4096
_STARTING = 1
RESIDENT = 2
LENT = 3  # filling too: by an engine
STATE_NAMES = {0: "free", 1: "filling", RESIDENT: "resident", LENT: "filling"}


class PoolFormatError(ValueError):
    """The file is no Forestage pool, not (yet) a whole one, or of a version that this client cannot read."""


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """Where the slots of one component of one model lie; offsets in bytes from the start of the file.

    Shard s of slot i starts at `offset + i * slot_bytes + s * shard_bytes` and has `bytes` bytes of payload.
    `covers` is "every_page" or "tail"; `window` in pages.
    """

    model: str
    component: str
    fingerprint: str
    table_offset: int
    offset: int
    slot_bytes: int
    slots: int
    shard_bytes: int
    bytes: int
    shards: int
    page_tokens: int
    covers: str
    window: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of a whole page: the payload of all shards, without padding."""
        return self.shards * self.bytes


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """What the header says. `instance` (32 hex digits) and `generation` are new at every start of the service."""

    instance: str
    generation: int
    file_bytes: int
    regions: tuple[RegionInfo, ...]


def head_bytes(head: bytes) -> int:
    """Return how many bytes header and region records take; raise PoolFormatError when this is no pool."""
    if head[: len(_MAGIC)] != _MAGIC:
        raise PoolFormatError("not a Forestage pool, or not one yet")
    if len(head) < HEADER_BYTES:
        raise PoolFormatError("the header is cut short")
    fields = _HEADER.unpack_from(head)
    _, version, header_bytes, _, regions, record_bytes, entry_bytes, _ = fields
    if version != _VERSION:
        raise PoolFormatError(f"pool format version {version}, this client reads {_VERSION}")
    if (header_bytes, record_bytes, entry_bytes) != (HEADER_BYTES, _RECORD_BYTES, ENTRY_BYTES):
        raise PoolFormatError("the header is damaged: impossible sizes")
    return HEADER_BYTES + int(regions) * _RECORD_BYTES


def read_head(head: bytes) -> PoolHeader:
    """Read header and region records; raise PoolFormatError when they cannot be trusted or the pool is being made."""
    end = head_bytes(head)
    if len(head) < end:
        raise PoolFormatError("the header is cut short")
    _, _, _, file_bytes, regions, _, _, checksum = _HEADER.unpack_from(head)
    if checksum != zlib.crc32(head[HEADER_BYTES:end], zlib.crc32(head[:_CHECKED_BYTES])):
        raise PoolFormatError("the header is damaged: its checksum does not agree")
    generation, instance, again = START.unpack_from(head, START_OFFSET)
    if _STATE.unpack_from(head, _STATE_OFFSET)[0] == _STARTING or generation != again:
        raise PoolFormatError("the service is still preparing this pool")
    records = tuple(_read_record(head, HEADER_BYTES + index * _RECORD_BYTES) for index in range(regions))
    return PoolHeader(instance.hex(), generation, file_bytes, records)


def _read_record(head: bytes, at: int) -> RegionInfo:
    model, component, fingerprint, *numbers, covers, window = _RECORD.unpack_from(head, at)
    table_offset, offset, slot_bytes, slots, shard_bytes, payload, shards, page_tokens = numbers
    return RegionInfo(
        model=model.rstrip(b"\0").decode(),
        component=component.rstrip(b"\0").decode(),
        fingerprint=fingerprint.decode(),
        table_offset=table_offset,
        offset=offset,
        slot_bytes=slot_bytes,
        slots=slots,
        shard_bytes=shard_bytes,
        bytes=payload,
        shards=shards,
        page_tokens=page_tokens,
        covers="tail" if covers else "every_page",
        window=window,
    )


def pin_chunks(regions: Iterable[RegionInfo], size: int, limit: int = 16 << 30) -> list[tuple[int, int]]:
    """Cut the file into (offset, length) pieces of at most `limit` bytes, none of them through a slot.

    For registration with CUDA: one of 512 GiB or more is refused, thousands of small ones are too, a copy may not span
    two of them, and two may not share a page. A slot larger than `limit` is a piece of its own.
    """
    cuts = [0]
    for region in sorted(regions, key=lambda region: region.offset):
        end = region.offset + region.slots * region.slot_bytes
        if end - cuts[-1] > limit:
            unit = math.lcm(region.slot_bytes, _PAGE)
            cuts.extend(range(region.offset, end, max(1, limit // unit) * unit))
    return [(start, end - start) for start, end in zip(cuts, [*cuts[1:], size], strict=True)]
