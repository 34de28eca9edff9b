"""Where the pages of a fill go: bytes of another process's memory, by page and component.

Law: the runs of all pages of one fill lie inside its region and nowhere overlap; those of a page are as many bytes as
its component has for one shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forestage.core.errors import BadRequestError, TooLargeError
from forestage.core.layout import ModelLayout

__all__ = ["MAX_RUNS", "FillTarget", "check_target", "check_targets"]

#: Of one fill; a page of a layer-first pool has two for each layer.
MAX_RUNS = 65536


@dataclass(frozen=True, slots=True)
class FillTarget:
    """Pages `first` to `first + pages` of one component, one shard of each. `component` is its index in the model.

    Each page is cut into runs of `run_bytes` bytes, in order; `offsets` say where each of them goes, page after page.
    """

    component: int
    shard: int
    first: int
    run_bytes: tuple[int, ...]
    offsets: Sequence[int]

    @property
    def pages(self) -> int:
        return len(self.offsets) // len(self.run_bytes)

    @property
    def last(self) -> int:
        """One behind the last page."""
        return self.first + self.pages

    def offsets_of(self, page: int) -> Sequence[int]:
        """Return where the runs of a page go."""
        runs = len(self.run_bytes)
        return self.offsets[(page - self.first) * runs : (page - self.first + 1) * runs]


def check_target(
    layout: ModelLayout, name: str, shard: int, first: int, run_bytes: Sequence[int], offsets: Sequence[int]
) -> FillTarget:
    """Return where pages of the component called `name` go. Raises BadRequestError when a page is not all there."""
    where = f"targets.{name[:64]}"
    index = next((c for c, component in enumerate(layout.components) if component.name == name), None)
    if index is None:
        raise BadRequestError(f"{where}: is no component of this model")
    component = layout.components[index]
    if shard >= component.shards:
        raise BadRequestError(f"{where}.shard: {shard}, but there are {component.shards}")
    if sum(run_bytes) != component.bytes:
        raise BadRequestError(f"{where}.run_bytes: are {sum(run_bytes)} in all, but a page has {component.bytes} bytes")
    if len(offsets) % len(run_bytes):
        raise BadRequestError(f"{where}.offsets: {len(offsets)} are no whole pages of {len(run_bytes)} runs")
    return FillTarget(index, shard, first, tuple(run_bytes), offsets)


def check_targets(targets: Sequence[FillTarget], num_pages: int, ends: Sequence[int]) -> None:
    """Check that the pages of a fill are among `num_pages`, and their runs inside the region and apart.

    `ends[i]` is one behind the last byte of the region's file i, which are one behind another; no run crosses from
    one to the next. Raises BadRequestError, and TooLargeError for more than `MAX_RUNS` runs.
    """
    runs = sum(len(target.offsets) for target in targets)
    if runs > MAX_RUNS:
        raise TooLargeError(f"targets: {runs} runs asked, at most {MAX_RUNS}")
    spans: list[tuple[int, int]] = []
    for target in targets:
        if target.last > num_pages:
            raise BadRequestError(f"targets: pages up to {target.last}, but only {num_pages} keys")
        sizes = target.run_bytes * target.pages
        spans += zip(target.offsets, sizes, strict=True)
    spans.sort()
    free_from, file = 0, 0
    for offset, size in spans:
        if offset < free_from:
            raise BadRequestError("targets: two runs overlap")
        free_from = offset + size
        while file < len(ends) and offset >= ends[file]:
            file += 1
        if file == len(ends) or free_from > ends[file]:
            raise BadRequestError(f"targets: a run of {size} bytes at {offset} leaves the region, or one of its files")
