"""Every way out of a job from every phase of it gives back the same things (FAULTS S1).

Each pair runs in rounds; afterwards nothing may be left, and one prefetch must get the whole pool.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, get_args

import pytest

from api.raw import leave, send_request
from forestage.core.errors import StorageUnavailableError
from forestage.core.job import Job, JobState, Outcome, Reason
from forestage.storage.base import Presence, ReadOutcome
from support.live import Live, hybrid, live, make_keys, until

Phase = Literal["queued", "probing", "reserved", "begun", "part", "last", "settling", "done", "truncated"]
Exit = Literal["delete", "finish", "gone", "deadline", "storage_error", "stall", "shutdown"]

SLOTS = 16
WHOLE = make_keys(SLOTS, "whole")
ROUNDS: dict[Exit, int] = {"deadline": 3, "stall": 2, "shutdown": 1}


@asynccontextmanager
async def _service(folder: Path, how: Exit) -> AsyncIterator[Live]:
    stall_ms = 80 if how == "stall" else 60_000
    async with live(
        folder,
        hybrid(SLOTS, 4),
        storage={"stall_timeout_ms": stall_ms, "probe_timeout_ms": stall_ms},
        # A job that is told to finish or to shut down waits for what hangs as long as this; the others must be quicker.
        prefetch={"settle_ms": 60 if how in ("finish", "shutdown") else 5000, "max_inflight_fraction": 0.5},
    ) as service:
        service.store(WHOLE, states=[SLOTS])
        yield service


class _Round:
    """One job of its own pages on its way to a phase, and out of it."""

    def __init__(self, service: Live, phase: Phase, how: Exit, turn: int) -> None:
        self.service = service
        self.phase = phase
        self.how = how
        self.keys = make_keys(24 if phase == "truncated" else 8, f"{phase} {turn}")
        self.other = make_keys(8, f"other {phase} {turn}")
        service.store(self.keys, states=[8, 16, 24] if phase == "truncated" else [4, 8])
        service.store(self.other, states=[8])
        self.sock: socket.socket | None = None

    async def reach(self) -> Job:
        """Start the job and let it come to its phase, or to its deadline if that is sooner."""
        service, storage = self.service, self.service.storage
        held = {"begun": 0, "part": 3, "last": 7, "settling": 6, "truncated": 9}.get(self.phase)
        outcome = ReadOutcome.ERROR if self.how == "storage_error" else None
        if held is not None:
            storage.fault(0, self.keys[held], hold=True, outcome=outcome)
        if self.phase == "settling":
            storage.fault(1, self.keys[3], hold=True, outcome=outcome)
        elif self.phase == "queued":
            storage.fault(0, self.other[0], hold=True)
            await service.client.prefetch("m", self.other, request_id="other")
            await until(lambda: storage.open_reads == 1)
        elif self.phase == "probing":
            storage.hang_probes()
        elif self.phase == "reserved":
            service.parts.storage.batches_in_flight = 0
        body = {"model": "m", "keys": [key.hex() for key in self.keys], "request_id": "r", "wait_ms": 30_000}
        if self.how == "deadline":
            body["deadline_ms"] = 150
        # Nobody reads the answer: the socket is there to be closed.
        self.sock = await asyncio.to_thread(send_request, ("127.0.0.1", service.port), "POST", "/v1/prefetch", body)
        await until(lambda: "r" in service.engine.jobs)
        job = service.engine.jobs["r"]
        if self.phase == "done":
            await until(lambda: job.done)
        elif self.phase in ("queued", "probing"):
            await until(lambda: job.done or job.state.value == self.phase)
        elif self.phase == "reserved":
            await until(lambda: job.done or job.state is JobState.LOADING)
        else:
            await until(lambda: job.done or (job.contiguous == held and storage.open_reads > 0))
        if self.phase == "settling":
            self.finishing = asyncio.create_task(service.client.finish("r"))
            await until(lambda: job.stopped)
        if self.how not in ("deadline", "stall"):
            assert job.done == (self.phase == "done")
        return job

    async def leave(self, job: Job) -> None:
        """End the job, and let go of everything that was held back for it."""
        service = self.service
        if self.how == "delete":
            await service.client.cancel("r")
        elif self.how == "finish":
            await service.client.finish("r")
        elif self.how == "gone":
            assert self.sock is not None
            leave(self.sock, "rst")
            if self.phase != "done":
                await until(lambda: job.done, deadline_s=1)
        elif self.how == "storage_error":
            self._break()
            self._release()
        elif self.how == "shutdown":
            await service.parts.service.stop(0.1)
        if self.phase == "queued" and self.how == "stall":
            await until(lambda: service.engine.jobs["other"].done)
        elif self.phase == "reserved" and self.how == "stall":
            service.storage.fault(0, self.keys[0], hold=True)
            service.parts.storage.batches_in_flight = 4
            service.parts.service._progress()
        await until(lambda: job.done)
        self._release()
        if self.phase == "settling":
            await self.finishing
        assert self.sock is not None
        self.sock.close()

    def _break(self) -> None:
        async def refuse(*_: object) -> Presence:
            raise StorageUnavailableError("broken")

        if self.phase in ("queued", "probing"):
            self.service.memory.probe = refuse  # type: ignore[method-assign,assignment]
        elif self.phase == "reserved":
            self.service.storage.fault(0, self.keys[2], outcome=ReadOutcome.ERROR)

    def _release(self) -> None:
        self.service.storage.release()
        if self.phase == "reserved":
            self.service.parts.storage.batches_in_flight = 4
            self.service.parts.service._progress()

    async def clean(self) -> None:
        """Make the service as it was, but for what a leak would leave."""
        service = self.service
        service.storage.fault()
        service.memory.__dict__.pop("probe", None)
        service.parts.storage._breaker.succeed()
        await service.client.cancel("r")
        await service.client.cancel("other")
        await until(lambda: not service.storage.open_reads)
        await until(lambda: service.taken == 0, deadline_s=2)


async def _rounds(service: Live, phase: Phase, how: Exit) -> None:
    for turn in range(ROUNDS.get(how, 4)):
        one = _Round(service, phase, how, turn)
        job = await one.reach()
        await one.leave(job)
        job.check_integrity()
        assert job.outcome is not None
        assert job.ready <= job.contiguous
        if how in ("delete", "gone") and phase != "done":
            assert (job.outcome, job.lease) == (Outcome.CANCELLED, None)
        elif job.ready == 0:
            assert job.lease is None
        if how == "delete":
            await service.client.cancel("r")  # again
            assert "r" not in service.engine.jobs
        await one.clean()
    whole = await service.client.prefetch("m", WHOLE, wait_ms=20_000)
    assert (whole.outcome, whole.pages.ready, whole.pages.granted) == ("complete", SLOTS, SLOTS)
    await service.idle()


@pytest.mark.parametrize("how", [how for how in get_args(Exit) if how != "shutdown"])
async def test_exit(tmp_path: Path, how: Exit) -> None:
    async with _service(tmp_path, how) as service:
        for phase in get_args(Phase):
            print(phase)  # pytest shows it with a failure
            await _rounds(service, phase, how)


@pytest.mark.parametrize("phase", get_args(Phase))
async def test_shutdown(tmp_path: Path, phase: Phase) -> None:
    async with _service(tmp_path, "shutdown") as service:
        one = _Round(service, phase, "shutdown", 0)
        job = await one.reach()
        await one.leave(job)
        job.check_integrity()
        if phase not in ("done", "settling"):  # the first reason counts
            assert Reason.SHUTDOWN in job.shortfall
        await until(lambda: not service.engine.live and not service.storage.open_reads)
        for lease in list(service.engine.leases):
            await service.client.release(lease.id)
        await until(lambda: service.taken == 0, deadline_s=2)
