"""The light client of Forestage: ask for pages, read them from shared memory, put new ones there.

Importing it loads neither torch nor an HTTP library; the first client made loads the latter.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from forestage_client._errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    ForestageError,
    Gone,
    NotFound,
    QueueFull,
    ServerFault,
    Stopping,
    TooLarge,
    Unauthorized,
    Unreachable,
)
from forestage_client._types import (
    Component,
    Evicted,
    Hashed,
    Hinted,
    HintedAction,
    Info,
    Lease,
    Leased,
    Lengths,
    Lookup,
    LookupLengths,
    Model,
    Moment,
    Pinned,
    Pool,
    PoolEvent,
    Prefetch,
    Readiness,
    Region,
    Timeline,
    Write,
    WritePart,
    WriteStatus,
)

if TYPE_CHECKING:
    from forestage_client._codec import Encoding, Key, Keys
    from forestage_client.aclient import AsyncClient
    from forestage_client.client import Client
    from forestage_client.hashing.prompt import Prompt
    from forestage_client.hint import Hint
    from forestage_client.page_writer import PageWriter
    from forestage_client.pool_view import PoolView, Stale

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "Component",
    "Conflict",
    "DeadlineExceeded",
    "Encoding",
    "Evicted",
    "ForestageError",
    "Gone",
    "Hashed",
    "Hint",
    "Hinted",
    "HintedAction",
    "Info",
    "Key",
    "Keys",
    "Lease",
    "Leased",
    "Lengths",
    "Lookup",
    "LookupLengths",
    "Model",
    "Moment",
    "NotFound",
    "PageWriter",
    "Pinned",
    "Pool",
    "PoolEvent",
    "PoolView",
    "Prefetch",
    "Prompt",
    "QueueFull",
    "Readiness",
    "Region",
    "ServerFault",
    "Stale",
    "Stopping",
    "Timeline",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "Write",
    "WritePart",
    "WriteStatus",
]


# A worker that only reads pages loads no client, a router that only prefetches never maps the pool.
_LOADED_WHEN_USED = {
    "AsyncClient": "aclient",
    "Client": "client",
    "Encoding": "_codec",
    "Hint": "hint",
    "Key": "_codec",
    "Keys": "_codec",
    "PageWriter": "page_writer",
    "PoolView": "pool_view",
    "Prompt": "hashing.prompt",
    "Stale": "pool_view",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_LOADED_WHEN_USED[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
