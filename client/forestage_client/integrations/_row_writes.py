"""Rows of an engine's host memory on their way into the pool, through the service's `/v1/writes`.

Law: a page is published only with all components that every page needs, each filled while its write was open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forestage_client._memory import copy
from forestage_client.client import Client
from forestage_client.integrations._outages import Outages
from forestage_client.integrations._pool_rows import Attachment

__all__ = ["RowToWrite", "RowWriter"]


@dataclass(frozen=True, slots=True)
class RowToWrite:
    """The page `key` of group `group`, in memory that does not change until it is written."""

    group: int
    key: bytes
    memory: memoryview


class RowWriter:
    """Writes for one model, from one thread."""

    def __init__(self, client: Client, model: str, tenant: str | None) -> None:
        self._client = client
        self._model = model
        self._tenant = tenant
        self._outages = Outages()

    def write(self, attachment: Attachment, rows: Sequence[RowToWrite]) -> int:
        """Put rows into the pool, and so into L3, in the order of their prefix; return how many are there then.

        Raises Away, Stale when the write came too late or the pool was replaced, PermissionError when the pool may not
        be written to, and the client's errors.
        """
        if not attachment.view.writable:
            raise PermissionError(
                f"the pool at {attachment.view.path} may not be written to by this user: see pool.mode"
            )
        pages: dict[bytes, dict[str, memoryview]] = {}
        for row in rows:
            pages.setdefault(row.key, {})[attachment.regions[row.group].component] = row.memory
        needed = {region.component: (group, region.covers == "tail") for group, region in enumerate(attachment.regions)}

        def is_page(key: bytes, parts: Mapping[str, memoryview]) -> bool:
            # What the engine does not bring must be there already; if it goes meanwhile, the write is dropped.
            return all(
                is_tail or name in parts or attachment.find(group, key) is not None
                for name, (group, is_tail) in needed.items()
            )

        whole = {key: parts for key, parts in pages.items() if is_page(key, parts)}
        if not whole:
            return 0
        keys = list(whole)
        tails = {
            name: [index for index, key in enumerate(keys) if name in whole[key]]
            for name, (_, is_tail) in needed.items()
            if is_tail
        }
        with (
            self._outages.noted(),
            self._client.write(attachment.view, self._model, keys, tails, tenant=self._tenant) as writer,
        ):
            for index, key in enumerate(keys):
                for name, memory in whole[key].items():
                    if writer.wants(name, index):
                        _scatter(writer.views(name, index), memory)
                        writer.check()
        return sum(len(whole[key]) for key in keys[: writer.write.granted])


def _scatter(shards: Sequence[memoryview], memory: memoryview) -> None:
    at = 0
    for shard in shards:
        copy(shard, memory[at : at + len(shard)])
        at += len(shard)
