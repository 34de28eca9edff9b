"""Where everything lies in the pool file: header, region records, slot tables, page data.

Law: regions do not overlap, each starts on a 4 KiB boundary, and the last byte lies below `pool_bytes`.
The byte form of the header and the tables is in docs/pool-format.md.
"""

from dataclasses import dataclass

from forestage.core.layout import PAGE_ALIGN, Component, ModelLayout

__all__ = ["HEADER_BYTES", "REGION_BYTES", "SLOT_ENTRY_BYTES", "Geometry", "GeometryError", "Region", "lay_out"]

HEADER_BYTES = 4096
REGION_BYTES = 256  # one record a region, behind the header
SLOT_ENTRY_BYTES = 128  # one entry a slot: generation, state, key, lengths


class GeometryError(ValueError):
    """The configured slots do not fit: says what is needed, what there is, and which setting to change."""


@dataclass(frozen=True, slots=True)
class Region:
    """The slots of one component of one model. Offsets are bytes from the start of the pool file."""

    model: ModelLayout
    component: Component
    component_index: int
    slots: int
    table_offset: int
    offset: int

    @property
    def data_bytes(self) -> int:
        return self.slots * self.component.slot_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The whole file. `used_bytes` is its size, at most the configured `pool.bytes`."""

    regions: tuple[Region, ...]
    used_bytes: int

    def region(self, model: str, component: str) -> Region:
        """Return the region of a component; KeyError if there is none."""
        for region in self.regions:
            if region.model.name == model and region.component.name == component:
                return region
        raise KeyError((model, component))


def _align(value: int) -> int:
    return -(-value // PAGE_ALIGN) * PAGE_ALIGN


def _fixed_bytes(num_regions: int) -> int:
    # Each region's table and data may lose up to a page to alignment.
    return _align(HEADER_BYTES + num_regions * REGION_BYTES)


def _region_bytes(component: Component, slots: int) -> int:
    return _align(slots * SLOT_ENTRY_BYTES) + _align(slots * component.slot_bytes)


def lay_out(models: tuple[ModelLayout, ...], pool_bytes: int) -> Geometry:
    """Divide `pool_bytes` among the components of all models.

    Components with `slots` get exactly those; the others share the rest in proportion to the bytes of their
    slots, which gives each the same number. Raises GeometryError when a component would get no slot.
    """
    wanted = [(model, index, component) for model in models for index, component in enumerate(model.components)]
    fixed = _fixed_bytes(len(wanted))
    fixed += sum(_region_bytes(c, c.slots) for _, _, c in wanted if c.slots is not None)
    open_ended = [c for _, _, c in wanted if c.slots is None]
    rest = pool_bytes - fixed
    shared_slots = 0
    if open_ended:
        per_slot = sum(c.slot_bytes + SLOT_ENTRY_BYTES for c in open_ended)
        shared_slots = max(0, rest // per_slot)
        while shared_slots > 0 and sum(_region_bytes(c, shared_slots) for c in open_ended) > rest:
            shared_slots -= 1
        if shared_slots < 1:
            need = fixed + sum(_region_bytes(c, 1) for c in open_ended)
            raise GeometryError(f"need at least {need} bytes for one slot of every component, have {pool_bytes}")
    elif rest < 0:
        raise GeometryError(f"the configured slots need {fixed} bytes, have {pool_bytes}")

    table_offset = _fixed_bytes(len(wanted))
    counted = [(m, i, c, shared_slots if c.slots is None else c.slots) for m, i, c in wanted]
    offset = table_offset + sum(_align(slots * SLOT_ENTRY_BYTES) for _, _, _, slots in counted)
    regions = []
    for model, index, component, slots in counted:
        regions.append(Region(model, component, index, slots, table_offset, offset))
        table_offset += _align(slots * SLOT_ENTRY_BYTES)
        offset += _align(slots * component.slot_bytes)
    return Geometry(tuple(regions), offset)
