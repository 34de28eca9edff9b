"""Writes that several processes fill together, each its own part of every page: the ranks of an engine their shards.

Law: by tenant and request id, the open writes of several parts that have slots. Each part is filled by one process, who
asked for it first; a write is published when all of its parts are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forestage.core.errors import ConflictError
from forestage.core.layout import ModelLayout
from forestage.core.write import Write, WriteState

__all__ = ["Share", "SharedWrites"]


@dataclass(frozen=True, slots=True)
class Share:
    """That a process fills part `part` of `parts`; those that fill the others ask with the same `request_id`."""

    request_id: str
    part: int
    parts: int


class SharedWrites:
    """The open writes of several parts. Changes of a write only what concerns its parts."""

    def __init__(self) -> None:
        self._by_request: dict[tuple[int, str], Write] = {}

    def join(
        self, layout: ModelLayout, keys: Sequence[bytes], tails: Mapping[int, Sequence[int]], share: Share, tenant: int
    ) -> Write | None:
        """Give a part of an open write to who asks for it; None when there is no such write.

        Raises ConflictError when it is a write of other pages, or has this part been given away.
        """
        write = self._by_request.get((tenant, share.request_id))
        if write is None:
            return None
        asked = (layout.name, tuple(keys), dict(tails), share.parts)
        if asked != (write.layout.name, write.keys, dict(write.tails), write.num_parts):
            raise ConflictError("request_id belongs to an open write of other pages")
        if share.part in write.begun:
            raise ConflictError(f"part {share.part} of this write is being filled by another", slug="part-taken")
        write.begun.add(share.part)
        return write

    def add(self, write: Write, share: Share) -> None:
        """Let others join a write that was begun for a part."""
        write.num_parts = share.parts
        write.begun.add(share.part)
        write.request_id = share.request_id
        self._by_request[write.tenant, share.request_id] = write

    def close(self, write: Write) -> None:
        """Let nobody join any more. Idempotent."""
        if self._by_request.get((write.tenant, write.request_id)) is write:
            del self._by_request[write.tenant, write.request_id]

    def check_integrity(self) -> None:
        """Raise RuntimeError with the write if the law is broken."""
        for (tenant, request_id), write in self._by_request.items():
            is_open = write.state is WriteState.OPEN and write.reserved and write.parts_left
            parts = set(range(write.num_parts))
            if not is_open or (tenant, request_id) != (write.tenant, write.request_id):
                raise RuntimeError(f"write {write.id} can be joined, though it is {write.state}")
            if not write.there <= write.begun <= parts or not write.begun:
                raise RuntimeError(f"write {write.id}: parts {write.there} of {write.begun} of {parts}")
