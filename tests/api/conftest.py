"""One live service for each test of the API."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, cast

import pytest

from api.wire import Wire
from support.live import Live, kv_only, live


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(64)) as running:
        yield running


@pytest.fixture(params=["json", "msgpack"])
def wire(service: Live, request: pytest.FixtureRequest) -> Wire:
    return Wire(service, cast('Literal["json", "msgpack"]', request.param))
