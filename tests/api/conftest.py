"""One live service for each test of the API."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.live import Live, kv_only, live


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(64), server={"max_body_bytes": 65536}, prefetch={"max_pages": 256}) as running:
        yield running
