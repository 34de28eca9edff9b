"""How long writes may take: by their bytes, and by those of the writes before them that are not overdue."""

import asyncio

import pytest

from contract.polling import until
from forestage.core.errors import StorageUnavailableError
from forestage.storage.write_time import WriteTime

KIB = 1 << 10


async def hang(limit: WriteTime, num_bytes: int, begun: list[int], release: asyncio.Event | None = None) -> None:
    async with limit.limit("a write", num_bytes):
        begun.append(num_bytes)
        try:
            await asyncio.Event().wait()
        finally:
            if release is not None:
                await release.wait()


async def allowed_of(write: "asyncio.Task[None]") -> float:
    with pytest.raises(StorageUnavailableError) as raised:
        await write
    return float(str(raised.value).split()[-2])


async def test_time_goes_by_bytes_and_by_those_that_are_ahead() -> None:
    limit, begun = WriteTime(0.3), list[int]()
    writes = [asyncio.create_task(hang(limit, size, begun)) for size in (0, 103 * KIB, 205 * KIB)]
    assert [await allowed_of(write) for write in writes] == [0.3, 0.4, 0.6]
    assert begun == [0, 103 * KIB, 205 * KIB]
    again = asyncio.create_task(hang(limit, 103 * KIB, begun))
    assert await allowed_of(again) == 0.4


async def test_one_that_hangs_for_good_is_not_waited_for() -> None:
    limit, begun, release = WriteTime(0.3), list[int](), asyncio.Event()
    hung = asyncio.create_task(hang(limit, 103 * KIB, begun, release))
    await until(lambda: begun == [103 * KIB])
    overdue = asyncio.get_running_loop().time() + 0.45
    await until(lambda: asyncio.get_running_loop().time() > overdue)
    assert not hung.done()
    assert await allowed_of(asyncio.create_task(hang(limit, 0, begun))) == 0.3
    release.set()
    assert await allowed_of(hung) == 0.4


async def test_a_write_that_ends_in_time_is_left_alone() -> None:
    limit = WriteTime(5)
    for _ in range(3):
        async with limit.limit("a write", 1 << 20):
            await asyncio.sleep(0)
