"""Sentinels: they say which server is the primary now."""

import threading
from collections.abc import Sequence

from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis.door import Address, Door
from forestage.storage.redis.errors import LinkError

__all__ = ["Sentinels"]


class Sentinels:
    """Asked anew for every connection that is made, so that a failover needs no news to be followed."""

    def __init__(self, addresses: Sequence[Address], service: str, door: Door) -> None:
        """Ask nothing yet.

        Args:
            addresses: of the sentinels.
            service: what they call the primary.
            door: opens connections to them.
        """
        self._addresses = list(addresses)
        self._service = service
        self._door = door
        self._lock = threading.Lock()

    def locate(self) -> Address:
        """Return the primary's address, asking one sentinel after another. Blocking; from any thread.

        Raises StorageUnavailableError when no sentinel knows it.
        """
        failure: LinkError | None = None
        for address in tuple(self._addresses):
            try:
                with self._door.session(address) as session:
                    found = session.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            except LinkError as error:
                failure = error
                continue
            if found:
                self._prefer(address)
                return found[0].decode(), int(found[1])
        raise StorageUnavailableError(f"no sentinel knows {self._service!r}: {failure or 'unknown name'}")

    def _prefer(self, address: Address) -> None:
        """Ask this one first from now on: those that do not answer cost their time only once."""
        with self._lock:
            if self._addresses[0] != address:
                self._addresses.remove(address)
                self._addresses.insert(0, address)
