"""From a probe to the names it asks for, and from flags back to masks."""

from collections.abc import Sequence
from dataclasses import dataclass

from forestage.core.layout import ModelLayout
from forestage.storage.base import Presence, Probe
from forestage.storage.redis.names import ShardName

__all__ = ["ProbePlan", "plan_probe"]


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """All names of a probe, in one list: span after span, each of one shard's pages from `first` to the last."""

    names: list[bytes]
    spans: tuple[tuple[int, int], ...]  # component index, first page

    def presence(self, model: ModelLayout, probe: Probe, flags: bytes | bytearray) -> Presence:
        """Return the answer; `flags[i]` is 1 where `names[i]` exists."""
        num_pages = len(probe.keys)
        masks = [bytearray(num_pages) for _ in model.components]
        at = 0
        for number, (component, first) in enumerate(self.spans):
            found = flags[at : at + num_pages - first]
            at += len(found)
            mask = masks[component]
            if number and self.spans[number - 1][0] == component:
                found = _both(mask[first:], found)
            mask[first:] = found
        end = _first_gap(probe, [masks[component] for component in model.every_page])
        for mask in masks:
            mask[end:] = bytes(num_pages - end)
        return Presence(tuple(masks))


def plan_probe(model: ModelLayout, probe: Probe, names: Sequence[Sequence[ShardName]]) -> ProbePlan:
    """Return what to ask; `names` are those of the model, by component."""
    asked: list[bytes] = []
    spans = []
    for index, component in enumerate(model.components):
        first = probe.first_tail if component.is_tail else probe.first_page
        keys = probe.keys[first:]
        if not keys:
            continue
        for shard in names[index]:
            head = shard.head
            asked += [head + key for key in keys]
            spans.append((index, first))
    return ProbePlan(asked, tuple(spans))


def _both(some: bytes | bytearray, others: bytes | bytearray) -> bytes:
    both = int.from_bytes(some, "big") & int.from_bytes(others, "big")
    return both.to_bytes(len(some), "big")


def _first_gap(probe: Probe, masks: Sequence[bytearray]) -> int:
    """Return the first page that ends the prefix: neither known nor whole."""
    first = probe.first_page
    end = len(probe.keys)
    whole = bytes(end - first) if not masks else bytes(masks[0][first:])
    for mask in masks[1:]:
        whole = _both(whole, mask[first:])
    gone = first
    while (gap := whole.find(0, gone - first)) >= 0:
        gone = first + gap
        if not probe.known[gone]:
            return gone
        gone += 1
    return end
