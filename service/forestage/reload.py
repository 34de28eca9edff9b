"""Takes tokens anew while the service runs (SIGHUP): all of them or, if anything is wrong, none.

Law: what callers may do is at every moment what one whole, sound configuration says; a reload never opens a service
that wanted tokens, and binds no token to a tenant that this start does not know.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator

from pydantic import BaseModel

from forestage.api.keyring import Keyring
from forestage.config import Config, ConfigError, read_grants
from forestage.core.roles import Grant
from forestage.storage.threads import Threads

__all__ = ["Reload"]

log = logging.getLogger("forestage.reload")


class Reload:
    """Reads the configuration again whenever it is asked to; what needs a restart is named and left as it is."""

    def __init__(self, started_with: Config, keyring: Keyring, reread: Callable[[], Config]) -> None:
        """Read nothing yet.

        Args:
            started_with: the configuration in effect.
            keyring: whose tokens are exchanged.
            reread: loads the configuration from where it came from; may block, raises ConfigError.
        """
        self._config = started_with
        self._keyring = keyring
        self._reread = reread
        # A thread of its own kind: one that hangs in a file system holds up neither the loop nor the end.
        self._threads = Threads("forestage-reload", 1, spares=0)

    async def run(self, asked: asyncio.Event) -> None:
        """Reload each time `asked` is set, until cancelled. What is asked meanwhile is done once, afterwards."""
        try:
            while True:
                await asked.wait()
                asked.clear()
                await self._reload()
        finally:
            self._threads.close()

    async def _reload(self) -> None:
        try:
            config, grants = await self._threads.submit(self._read).wait()
        except ConfigError as error:
            log.error("the configuration was not taken anew, tokens stay as they were: %s", "; ".join(error.mistakes))
            return
        except Exception as error:
            log.error("the configuration was not taken anew, tokens stay as they were: %s", type(error).__name__)
            return
        self._keyring.replace(grants)
        log.info("took the tokens of the configuration anew: %d", len(grants))
        waiting = sorted(changed_keys(self._config, config))
        if waiting:
            log.warning("changed in the configuration, and taken only by a restart: %s", ", ".join(waiting))

    def _read(self) -> tuple[Config, tuple[Grant, ...]]:
        config = self._reread()
        known = {None, *(tenant.name for tenant in self._config.tenants)}
        grants = tuple(grant for grant in read_grants(config) if grant.caller.tenant in known)
        if not grants and not self._keyring.is_open:
            raise ConfigError(["it names no token, and only a restart opens the service to everybody"])
        return config, grants


def changed_keys(old: Config, new: Config) -> Iterator[str]:
    """Yield the keys that differ, without what says who may call; never a value, which may be a secret."""
    for name in Config.model_fields:
        if name == "tenants":
            if old.shares() != new.shares():
                yield name
        elif name != "tokens":
            yield from _changed(getattr(old, name), getattr(new, name), name)


def _changed(old: object, new: object, key: str) -> Iterator[str]:
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        for name, field in type(old).model_fields.items():
            yield from _changed(getattr(old, name), getattr(new, name), f"{key}.{field.alias or name}")
    elif old != new and key != "server.token_file":
        yield key
