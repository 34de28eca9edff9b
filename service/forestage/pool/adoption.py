"""Whether the file of an earlier life can be lived in again, or why not.

Law: a file is adopted only if it is, to the byte, what a new one would be, and nothing but this machine since its boot
has had it in hand. Checking changes nothing.
"""

import mmap
import os
import stat

from forestage.core.geometry import REGION_BYTES
from forestage.pool.blueprint import Blueprint
from forestage.pool.claim import Claim
from forestage.pool.limits import in_units
from forestage.pool.table import RegionTable

__all__ = ["NotAdoptableError", "check_file", "check_tables", "set_mode"]


class NotAdoptableError(Exception):
    """The file at the path has to be replaced; the text says why."""


def check_file(claim: Claim, blueprint: Blueprint) -> None:
    """Raise NotAdoptableError unless header, size, layout and origin of a claimed file are those of the blueprint."""
    header = claim.header
    if header is None:
        raise NotAdoptableError(claim.damage)
    if claim.size != header.file_bytes:
        raise NotAdoptableError(f"it has {claim.size} bytes, its header says {header.file_bytes}")
    if header.regions * REGION_BYTES != len(blueprint.records) or claim.records != blueprint.records:
        raise NotAdoptableError(_difference(claim, blueprint))
    if claim.size != blueprint.size:
        raise NotAdoptableError(f"it has {in_units(claim.size)}, this configuration wants {in_units(blueprint.size)}")
    wanted, made = blueprint.origin(claim.fd), header.origin
    if made.inode != wanted.inode:
        raise NotAdoptableError("it is a copy of a pool")
    if blueprint.on_disk and (made.boot != wanted.boot or not any(wanted.boot)):
        raise NotAdoptableError("its file system is on a disk, and the machine may have been restarted since")
    if wanted.numa_node >= 0 and made.numa_node != wanted.numa_node:
        raise NotAdoptableError(f"its memory was not bound to NUMA node {wanted.numa_node}")


def check_tables(mapping: mmap.mmap, blueprint: Blueprint) -> None:
    """Raise NotAdoptableError when a slot table of a mapped file cannot be one."""
    with memoryview(mapping) as memory:
        for region in blueprint.geometry.regions:
            table = RegionTable(region, memory)
            plausible = table.is_plausible()
            table.release()
            if not plausible:
                raise NotAdoptableError(f"the slot table of {region.model.name}/{region.component.name} is damaged")


def set_mode(claim: Claim, blueprint: Blueprint) -> None:
    """Give a claimed file the permissions of the settings; raise NotAdoptableError when it is not ours to give them."""
    mode = blueprint.settings.mode
    if stat.S_IMODE(os.fstat(claim.fd).st_mode) != mode:
        try:
            os.fchmod(claim.fd, mode)
        except OSError as error:
            raise NotAdoptableError(f"its mode cannot be changed to {mode:04o}: {error.strerror}") from error


def _difference(claim: Claim, blueprint: Blueprint) -> str:
    for index, region in enumerate(blueprint.geometry.regions):
        record = slice(index * REGION_BYTES, (index + 1) * REGION_BYTES)
        if claim.records[record] != blueprint.records[record]:
            return f"it was made for another layout, from {region.model.name}/{region.component.name} on"
    return "it was made for more models or components"
