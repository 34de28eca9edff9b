"""Memory of this process that the service writes pages to: its registration, and one fill at a time of it.

Law: after `fill` has returned or raised, the service writes nothing of it any more. It waits for the answer however
long that takes, since only the answer, or the end of the service's process, says so; a service that is stopped in the
middle keeps it waiting.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forestage_client import _calls
from forestage_client._codec import Keys
from forestage_client._errors import BadRequest, ServerFault, Unreachable
from forestage_client._http import Link, Wire, open_transport
from forestage_client._types import Filled

__all__ = ["MemoryRegion", "RegionTarget"]

_MAX_ANSWER_BYTES = 65536


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """Where pages of one component go, one shard of each: runs of `run_bytes` bytes each, page after page.

    `first` is the page that the first `offsets` are for; they count from the start of the region.
    """

    run_bytes: Sequence[int]
    offsets: Sequence[int]
    shard: int = 0
    first: int = 0


class MemoryRegion:
    """Files of shared memory, one behind another. For threads; lives until `close`, and no longer than the service."""

    def __init__(
        self, url: str, path: str, fds: Sequence[int], *, token: str | None = None, timeout_s: float = 5.0
    ) -> None:
        """Register descriptors of memory files at the unix socket `path`; they may be closed afterwards.

        `url` must be a unix socket: a proxy in between might answer before the service has stopped writing. Raises
        BadRequest for what the service does not take, Unreachable, ServerFault, and ValueError for a malformed URL.
        """
        self._wire = Wire(url, token, timeout_s, "msgpack")
        if self._wire.unix_socket is None:
            raise ValueError(f"a region is filled over a unix socket only, not {url!r}")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(timeout_s)
            self._id, self.size = self._register(path, fds)
        except OSError as error:
            self._connection.close()
            raise Unreachable(f"cannot register memory at {path}: {error}") from error
        except BaseException:
            self._connection.close()
            raise
        self._link = Link(self._wire, lambda: open_transport(self._wire.unix_socket))

    def fill(
        self,
        model: str,
        keys: Keys,
        targets: Mapping[str, RegionTarget],
        *,
        device_pages: int = 0,
        deadline_ms: int | None = None,
        tenant: str | None = None,
    ) -> Filled:
        """Bring a prefix within the deadline, and have the service copy what has come to the targets, by component.

        Raises what `Client.prefetch` does, and Gone when the region has ended, as with a restart of the service.
        """
        wanted: dict[str, Any] = {
            name: {
                "shard": target.shard,
                "first": target.first,
                "run_bytes": list(target.run_bytes),
                "offsets": list(target.offsets),
            }
            for name, target in targets.items()
        }
        return self._link.send(_calls.fill(model, keys, self._id, wanted, device_pages, deadline_ms, tenant))

    def close(self) -> None:
        """Have the service let go of the memory; no fill may run. Idempotent."""
        self._connection.close()
        self._link.close()

    def _register(self, path: str, fds: Sequence[int]) -> tuple[str, int]:
        self._connection.connect(path)
        header = json.dumps({"version": 1, "files": len(fds)}).encode()
        socket.send_fds(self._connection, [len(header).to_bytes(4, "little") + header], list(fds))
        size = int.from_bytes(self._read(4), "little")
        answer: Any = None
        if size <= _MAX_ANSWER_BYTES:
            with suppress(ValueError):
                answer = json.loads(self._read(size))
        if isinstance(answer, dict) and isinstance(answer.get("error"), str):
            raise BadRequest(str(answer.get("detail")), slug=answer["error"])
        try:
            return str(answer["region"]), int(answer["bytes"])
        except (TypeError, KeyError, ValueError) as error:
            raise ServerFault(f"{path} answered something else than a region", slug="unreadable-answer") from error

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._connection.recv(size - len(data))
            if not chunk:
                raise ConnectionResetError("the service has closed the connection")
            data += chunk
        return bytes(data)
