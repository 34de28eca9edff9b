"""What the routes need of the running service, handed in once."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from forestage.config import Config
from forestage.core.geometry import Geometry
from forestage.observe.history import History
from forestage.prefetch.service import PrefetchService
from forestage_client.hashing import HashScheme

__all__ = ["Context", "PoolFacts"]


class PoolFacts(Protocol):
    """What the API tells about the pool file."""

    path: str
    size: int
    instance: str
    generation: int
    pinned: str
    hugepages: str
    geometry: Geometry

    def is_linked(self) -> bool:
        """Say whether the file is still at its path, where readers look for it."""


@dataclass(slots=True)
class Context:
    """`storage_up` says whether L3 answers; `exposition` renders the metrics for an Accept header.

    `hash_schemes` are those of the models whose configuration names one.
    """

    config: Config
    service: PrefetchService
    pool: PoolFacts
    storage_up: Callable[[], bool]
    exposition: Callable[[str], tuple[bytes, str]]
    version: str
    history: History
    started: float = field(default_factory=time.monotonic)
    stopping: bool = False
    hash_schemes: Mapping[str, HashScheme] = field(init=False)

    def __post_init__(self) -> None:
        schemes = {model.name: model.hash_scheme() for model in self.config.models}
        self.hash_schemes = {name: scheme for name, scheme in schemes.items() if scheme is not None}

    @property
    def storage_state(self) -> str:
        return "up" if self.storage_up() else "degraded"
