"""Section `[pool]` of the configuration, as the pool wants it."""

from dataclasses import dataclass

from forestage.core.errors import StartError

__all__ = ["PoolSettings"]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Section `[pool]` of the configuration.

    `bytes` is an upper bound for the file; `pin`: auto, cuda, mlock or none; `hugepages`: auto, on or off;
    `numa_node`: -1 leaves the choice to the kernel; `mode`: permissions of the file, whatever the umask.
    """

    path: str
    bytes: int
    pin: str = "auto"
    hugepages: str = "auto"
    numa_node: int = -1
    mode: int = 0o660

    def check_words(self) -> None:
        """Raise StartError for a word that is none of the known ones."""
        if self.pin not in {"auto", "cuda", "mlock", "none"}:
            raise StartError(f"pool.pin: {self.pin!r} is none of auto, cuda, mlock, none")
        if self.hugepages not in {"auto", "on", "off"}:
            raise StartError(f"pool.hugepages: {self.hugepages!r} is none of auto, on, off")
