"""Tasks of the service that are cancelled at random moments lose time, never a slot or a job."""

import asyncio
import random
from pathlib import Path

import pytest

from faults.dawdling import Dawdling
from forestage.core.audit import check_integrity
from forestage.core.errors import StoppingError
from forestage.core.job import PrefetchRequest
from support.live import Live, hybrid, live, make_keys, until

SEEDS = 60


def _store_into(storage: Dawdling, service: Live) -> None:
    service.memory = storage
    for chain in range(6):
        service.store(make_keys(12, f"chain {chain}"), states=[4, 8, 12])


def _submit(service: Live, randomness: random.Random, turn: int) -> None:
    keys = make_keys(randomness.randint(1, 12), f"chain {randomness.randrange(6)}")
    deadline_ms = randomness.choice([0, 0, 0, 3])
    request = PrefetchRequest(f"r{turn}", "m", tuple(keys), deadline_ms=deadline_ms, lease_ms=60_000)
    service.parts.service.submit(request)


async def _steps(randomness: random.Random) -> None:
    """Let the loop take a few turns, or a little time pass."""
    if randomness.random() < 0.3:
        await asyncio.sleep(randomness.uniform(0, 0.003))
    for _ in range(randomness.randrange(6)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 20))
async def test_the_service_itself_is_cancelled(tmp_path: Path, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        randomness = random.Random(seed)
        storage = Dawdling(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        async with live(folder, hybrid(24, 4), prefetch={"settle_ms": 5}, inner=storage) as service:
            _store_into(storage, service)
            waiting = []
            for turn in range(randomness.randint(1, 12)):
                _submit(service, randomness, turn)
                waiting.append(asyncio.create_task(service.parts.service.wait(service.engine.jobs[f"r{turn}"])))
                await _steps(randomness)
            await _steps(randomness)
            service.running.cancel()
            await asyncio.wait([service.running])
            # every job has ended and everybody who waited knows
            assert not service.engine.live
            await asyncio.wait_for(asyncio.gather(*waiting), 1)
            assert not service.storage.open_reads
            check_integrity(service.engine)
            for job in service.engine.jobs.values():
                job.check_integrity()
            for lease in list(service.engine.leases):
                service.engine.leases.release(lease.id)
            assert service.taken == 0
            with pytest.raises(StoppingError):
                _submit(service, randomness, 99)
            service.sweep()


@pytest.mark.parametrize("seed", range(3))
async def test_single_tasks_are_cancelled(tmp_path: Path, seed: int) -> None:
    randomness = random.Random(seed)
    storage = Dawdling(seed, loose=0.1)
    async with live(tmp_path, hybrid(24, 4), prefetch={"settle_ms": 5}, inner=storage) as service:
        _store_into(storage, service)
        tasks = service.parts.service._tasks
        assert tasks is not None
        for turn in range(300):
            _submit(service, randomness, turn)
            await _steps(randomness)
            for task in list(tasks._tasks):
                if randomness.random() < 0.2:
                    task.cancel()
            if randomness.random() < 0.5:
                service.parts.service.forget(f"r{randomness.randrange(turn + 1)}")
            if not turn % 25:
                check_integrity(service.engine)
        await until(lambda: not service.engine.live)
        for turn in range(300):
            service.parts.service.forget(f"r{turn}")
        assert not service.running.done()
        await service.idle()
        storage.loose = 0
        service.parts.storage._breaker.succeed()
        whole = make_keys(24, "whole")
        service.store(whole, states=[24])
        job = await service.client.prefetch("m", whole, wait_ms=20_000)
        assert (job.outcome, job.pages.ready) == ("complete", 24)
