"""A read that was given up must not reach into what is asked for next (FAULTS S17, S1)."""

import asyncio
import random
from pathlib import Path
from typing import Literal

import pytest

from api.raw import leave, send_request
from support.live import kv_only, live, make_keys, until

End = Literal["delete", "deadline", "gone", "finish"]


@pytest.mark.parametrize("how", ["delete", "deadline", "gone", "finish"])
async def test_cancel_then_another_key_at_once(tmp_path: Path, how: End) -> None:
    randomness = random.Random(17)
    # Room for both, and none to spare: a slot that comes back too early is used at once.
    async with live(tmp_path, kv_only(4), storage={"stall_timeout_ms": 60_000}) as service:
        for turn in range(60):
            a, b = make_keys(2, f"a {turn}"), make_keys(2, f"b {turn}")
            service.store([*a, *b])
            late = randomness.choice([0, 1, 4000, 4096])
            service.storage.fault(0, a[randomness.randrange(2)], hold=not late, withheld_bytes=late)
            body = {"model": "m", "keys": [key.hex() for key in a], "request_id": "a", "wait_ms": 30_000}
            if how == "deadline":
                body["deadline_ms"] = 3
            sock = send_request(("127.0.0.1", service.port), "POST", "/v1/prefetch", body)
            if how != "deadline":
                await until(lambda: service.storage.open_reads > 0 or "a" in service.engine.jobs)
                for _ in range(randomness.randrange(8)):
                    await asyncio.sleep(0)
            asked = None
            if how == "delete":
                await service.client.cancel("a")
            elif how == "gone":
                leave(sock, "rst")
            elif how == "finish":
                asked = asyncio.create_task(service.client.finish("a"))
            job_b = asyncio.create_task(service.client.prefetch("m", b, request_id="b", wait_ms=20_000))
            await until(lambda: "b" in service.engine.jobs)
            service.storage.release()
            answer = await job_b
            assert answer.outcome == "complete"
            if asked is not None:
                await asked
            await service.quiet()  # every byte that is to be seen is right
            sock.close()
            await service.client.cancel("b")
            await service.client.cancel("a")
            service.storage.fault()
        await service.idle()
        assert (await service.client.prefetch("m", make_keys(4, "a 0")[:2], wait_ms=5000)).outcome == "complete"
