"""From a probe to the names it asks for, block by block, and from flags back to masks."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from forestage.core.layout import ModelLayout
from forestage.storage.base import Probe
from forestage.storage.redis.names import ShardName

__all__ = ["ProbeBlock", "probe_blocks"]

# So many names a block: one round trip for nearly every probe, and no more than a few milliseconds on the event loop.
_BLOCK_NAMES = 8192


@dataclass(frozen=True, slots=True)
class ProbeBlock:
    """The names of some pages of a probe, in one list: span after span, each of one shard's pages."""

    names: list[bytes]
    spans: tuple[tuple[int, int], ...]  # component index, first page
    begin: int
    end: int

    def enter(self, masks: Sequence[bytearray], flags: bytes | bytearray) -> None:
        """Enter into the masks what was answered; `flags[i]` is 1 where `names[i]` exists."""
        at = 0
        for number, (component, first) in enumerate(self.spans):
            found = flags[at : at + self.end - first]
            at += len(found)
            if number and self.spans[number - 1][0] == component:
                found = _both(masks[component][first : self.end], found)
            masks[component][first : self.end] = found

    def asks_for(self, page: int, places: Iterable[int]) -> bool:
        """Say whether the name at any of these places belongs to a page."""
        starts = [0, *accumulate(self.end - first for _, first in self.spans)]
        for place in places:
            number = bisect_right(starts, place) - 1
            if self.spans[number][1] + place - starts[number] == page:
                return True
        return False

    def first_gap(self, model: ModelLayout, probe: Probe, masks: Sequence[bytearray]) -> int | None:
        """Return the first page of this block that ends the prefix: neither known nor whole."""
        first = max(self.begin, probe.first_page)
        if first >= self.end:
            return None
        whole = bytes(b"\1" * (self.end - first))
        for component in model.every_page:
            whole = _both(whole, masks[component][first : self.end])
        page = whole.find(0)
        while page >= 0 and probe.known[first + page]:
            page = whole.find(0, page + 1)
        return None if page < 0 else first + page


def probe_blocks(model: ModelLayout, probe: Probe, names: Sequence[Sequence[ShardName]]) -> Iterator[ProbeBlock]:
    """Yield what to ask, in prefix order; `names` are those of the model, by component."""
    per_page = sum(len(shards) for shards in names)
    step = max(1, _BLOCK_NAMES // per_page)
    for begin in range(min(probe.first_page, probe.first_tail), len(probe.keys), step):
        end = min(begin + step, len(probe.keys))
        asked: list[bytes] = []
        spans = []
        for index, component in enumerate(model.components):
            first = max(begin, probe.first_tail if component.is_tail else probe.first_page)
            keys = probe.keys[first:end]
            if not keys:
                continue
            for shard in names[index]:
                asked += shard.names_of(keys)
                spans.append((index, first))
        yield ProbeBlock(asked, tuple(spans), begin, end)


def _both(some: bytes | bytearray, others: bytes | bytearray) -> bytes:
    both = int.from_bytes(some, "big") & int.from_bytes(others, "big")
    return both.to_bytes(len(some), "big")
