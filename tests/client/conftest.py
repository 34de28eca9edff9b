from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from client.both_clients import Clients, Kind


@pytest.fixture(params=["sync", "async"])
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(cast("Kind", request.param), stack)
