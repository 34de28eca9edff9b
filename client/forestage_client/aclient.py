"""The client for asyncio; the same surface as `Client`, to be awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forestage_client import _calls
from forestage_client._codec import Encoding, Key, Keys
from forestage_client._errors import DeadlineExceeded, ForestageError, Gone, NotFound, Unreachable
from forestage_client._http import AsyncLink, Wire, open_async_transport
from forestage_client._pool_events import Returning
from forestage_client._types import (
    Evicted,
    Hashed,
    Hinted,
    Info,
    Lease,
    Leased,
    Lookup,
    Model,
    Pinned,
    Pool,
    PoolEvent,
    Prefetch,
    Readiness,
    Timeline,
    Write,
    WritePart,
    WriteStatus,
)
from forestage_client._waiting import Waiting
from forestage_client.hashing.prompt import Prompt
from forestage_client.hint import Hint

if TYPE_CHECKING:
    import httpx2

    from forestage_client.page_writer import PageWriter
    from forestage_client.pool_view import PoolView

__all__ = ["AsyncClient"]


class AsyncClient:
    """Talk to a Forestage service from one event loop; any number of tasks may share one.

    Connections are kept open and reused. A call whose connection breaks is sent once more on a fresh one, unless it
    is `lease`, `pin` or `begin_write`, which are not safe to repeat. Use it as an async context manager, or call
    `aclose`. Cancelling a call closes its connection.

    Every call raises the leaves of ForestageError and nothing else of its own: see `docs/client.md`.

    Args:
        url: `http://host:port` or `unix:/path/to.sock`.
        token: what the service's `server.token_file` holds; blanks around it are dropped. Never logged or shown.
        timeout_s: how long a call may take, in seconds, beyond the wait that the call itself asks for.
        encoding: "msgpack" or "json" bodies; the results are the same.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8470",
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        encoding: Encoding = "msgpack",
    ) -> None:
        """Check the arguments (ValueError); connects with the first call."""
        self._wire = Wire(url, token, timeout_s, encoding)
        self._link = AsyncLink(self._wire, self._connect)

    def _connect(self) -> httpx2.AsyncBaseTransport:
        return open_async_transport(self._wire.unix_socket)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wire.url!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; jobs and leases live on. Idempotent."""
        await self._link.aclose()

    async def prefetch(
        self,
        model: str,
        keys: Keys,
        *,
        request_id: str | None = None,
        device_pages: int = 0,
        min_pages: int | None = None,
        priority: int | None = None,
        deadline_ms: int | None = None,
        wait_ms: int | None = None,
        lease_ms: int | None = None,
        tenant: str | None = None,
    ) -> Prefetch:
        """Start a job that brings the pages of `keys` (hex or bytes) into the pool, and return it as it then is.

        A Prompt in place of `keys` leaves it to the service to derive them from token ids; so it does in all calls.
        Lengths are in pages. With `wait_ms` the answer comes when the job is done or that time is over; if this
        call is broken off meanwhile, the service cancels the job. With a known `request_id` and the same arguments
        that job is returned; None makes an id. What is None is left to the service's configuration.

        Raises NotFound (no such model), Conflict (id used for another request), QueueFull, BadRequest, TooLarge.
        """
        return await self._link.send(
            _calls.prefetch(
                model,
                keys,
                request_id=request_id,
                device_pages=device_pages,
                min_pages=min_pages,
                priority=priority,
                deadline_ms=deadline_ms,
                wait_ms=wait_ms,
                lease_ms=lease_ms,
                tenant=tenant,
            )
        )

    async def get_prefetch(self, request_id: str, wait_ms: int = 0) -> Prefetch:
        """Return a job as it is now, or as soon as it is done within `wait_ms`.

        Raises NotFound for a job that is unknown, cancelled or forgotten (`prefetch.keep_done_ms` after its end).
        """
        return await self._link.send(_calls.get_prefetch(request_id, wait_ms))

    async def wait(self, request_id: str, timeout_s: float) -> Prefetch:
        """Return a job once it is done. Raises DeadlineExceeded after `timeout_s` seconds; the job goes on."""
        waiting = Waiting(request_id, timeout_s)
        job = await self._link.send(waiting.next_poll())
        while not job.done:
            job = await self._link.send(waiting.next_poll(job))
        return job

    async def finish(self, request_id: str) -> Prefetch:
        """Stop a job now, keep what is ready, and return it done. A done job is returned as it is."""
        return await self._link.send(_calls.finish(request_id))

    async def cancel(self, request_id: str) -> None:
        """Cancel a job, release its lease and forget it. Idempotent."""
        await self._link.send(_calls.cancel(request_id))

    async def lookup(self, model: str, keys: Keys, device_pages: int = 0, *, tenant: str | None = None) -> Lookup:
        """Say what a prefetch would find now. Holds, fetches and changes nothing."""
        return await self._link.send(_calls.lookup(model, keys, device_pages, tenant))

    async def hash(self, model: str, prompt: Prompt) -> Hashed:
        """Return the page keys of a prompt; those of whole pages only. Raises BadRequest if the model has no scheme."""
        return await self._link.send(_calls.hash_prompt(model, prompt))

    async def lease(
        self, model: str, keys: Keys, device_pages: int = 0, lease_ms: int | None = None, *, tenant: str | None = None
    ) -> Leased:
        """Lease the longest restorable prefix that is in the pool now. Never reads L3.

        Not repeated when a connection breaks: after Unreachable with `maybe_sent` a lease may be held until it
        expires.
        """
        return await self._link.send(_calls.lease(model, keys, device_pages, lease_ms, tenant))

    async def renew(self, lease_id: str, lease_ms: int) -> Lease:
        """Let a lease, a job's included, last `lease_ms` from now on. Raises Gone once it has ended."""
        return await self._link.send(_calls.renew(lease_id, lease_ms))

    async def release(self, lease_id: str) -> None:
        """End a lease: its slots must not be read from here on. Idempotent."""
        await self._link.send(_calls.release(lease_id))

    async def begin_write(
        self,
        model: str,
        keys: Sequence[Key],
        tails: Mapping[str, Sequence[int]] | None = None,
        *,
        tenant: str | None = None,
        part: WritePart | None = None,
    ) -> Write:
        """Reserve slots for pages that the caller will put into the pool and then commit.

        `tails` names, per tail component, the indexes of the pages that carry a state. What is stored already gets no
        slot, and neither do pages from `Write.granted` on. With `part` several processes fill the write together.
        Raises NotFound (no such model), BadRequest, TooLarge, and Conflict when another process fills that part.

        Not repeated when a connection breaks: after Unreachable with `maybe_sent` slots may be reserved until they
        expire.
        """
        return await self._link.send(_calls.begin_write(model, keys, tails, tenant, part))

    async def commit_write(self, write_id: str) -> WriteStatus:
        """Publish the pages of a write: resident at once, and written to L3 behind. Idempotent while remembered.

        All slots of the write hold their pages, and nobody writes to them any more. Raises Gone when the write had
        expired, NotFound when it is unknown.
        """
        return await self._link.send(_calls.commit_write(write_id))

    async def drop_write(self, write_id: str) -> None:
        """Give the slots of a write back; nobody writes to them from here on. What was committed stays. Idempotent."""
        await self._link.send(_calls.drop_write(write_id))

    async def write_status(self, write_id: str, wait_ms: int = 0) -> WriteStatus:
        """Return how far a write is now, or as soon as it is settled within `wait_ms`. Raises NotFound, Gone."""
        return await self._link.send(_calls.write_status(write_id, wait_ms))

    @asynccontextmanager
    async def write(
        self,
        view: PoolView,
        model: str,
        keys: Sequence[Key],
        tails: Mapping[str, Sequence[int]] | None = None,
        *,
        tenant: str | None = None,
        part: WritePart | None = None,
    ) -> AsyncIterator[PageWriter]:
        """Reserve slots, hand them to the `with` block to be filled, and commit them; drop them on an exception.

        `view` is attached `writable`. In the block `put` every page: a page that got no slot is passed over, one that
        got one and was not put is a ValueError at the end, and nothing is committed. Then `PageWriter.result` is there.
        Raises Stale when the write ended or the service was started anew meanwhile.
        """
        from forestage_client.page_writer import PageWriter
        from forestage_client.pool_view import Stale

        write = await self.begin_write(model, keys, tails, tenant=tenant, part=part)
        try:
            writer = PageWriter(view, write)
            yield writer
            writer.require_whole()
        except BaseException:
            with suppress(ForestageError):
                await self.drop_write(write.id)
            raise
        try:
            writer.result = await self.commit_write(write.id)
        except (Gone, NotFound) as error:
            raise Stale(f"write {write.id} ended before it was committed: {error}") from error

    async def pin(
        self, model: str, keys: Keys, ttl_ms: int, device_pages: int = 0, *, tenant: str | None = None
    ) -> Pinned:
        """Keep the longest restorable prefix that is in the pool now for `ttl_ms`, without slots to read.

        Never reads L3: prefetch first. Not repeated when a connection breaks: after Unreachable with `maybe_sent` a pin
        may be there until it expires.
        """
        return await self._link.send(_calls.pin(model, keys, ttl_ms, device_pages, tenant))

    async def unpin(self, pin_id: str) -> None:
        """End a pin; the pages stay until somebody needs their slots. Idempotent."""
        await self._link.send(_calls.unpin(pin_id))

    async def evict(self, model: str, keys: Keys, device_pages: int = 0, *, tenant: str | None = None) -> Evicted:
        """Let the pages of a prefix that are in the pool and that nobody holds be the first to go, deepest first.

        Those below `device_pages` are left alone. Pages stay, and are found, until somebody needs their slots.
        """
        return await self._link.send(_calls.evict(model, keys, device_pages, tenant))

    async def hints(self, actions: Sequence[Hint], *, message_id: str | None = None, wait_ms: int = 0) -> Hinted:
        """Send wishes in one envelope, and return what became of each, in their order.

        One that is wrong stops no other: it is "rejected". An envelope that comes twice under one `message_id` is
        carried out once; None makes an id, "" sends none, and then it is not repeated when a connection breaks.
        `wait_ms` waits for its prefetches. Raises Conflict (id used for other hints), BadRequest.
        """
        return await self._link.send(_calls.hints(actions, message_id, wait_ms))

    async def events(
        self, model: str | None = None, last_id: str | None = None, *, reconnect_s: float = 60.0
    ) -> AsyncGenerator[PoolEvent, None]:
        """Yield what comes into the pool and leaves it, from `last_id` on or beginning with all that is resident.

        Endless: close it, or the loop around it, to stop. A stream that breaks is taken up again where it broke, and
        only after `reconnect_s` seconds without success the error is raised (Unreachable, Stopping, QueueFull). If
        events were missed meanwhile, "gap" and "reset" come, and then all that is resident. Raises NotFound for a
        model that is not configured, and what the first attempt to connect raises.
        """
        import asyncio  # whoever awaits this has loaded it; importing the package does not

        returning = Returning(model, last_id, reconnect_s)
        while True:
            try:
                async with aclosing(self._link.follow(returning)) as stream:
                    async for event in stream:
                        yield event
            except ForestageError as error:
                await asyncio.sleep(returning.pause_after(error))

    async def pool(self) -> Pool:
        """Return where the pool file lies and where each component's slots are in it. Valid until a restart."""
        return await self._link.send(_calls.pool())

    async def models(self) -> tuple[Model, ...]:
        """Return the configured models."""
        return await self._link.send(_calls.models())

    async def info(self) -> Info:
        """Return what runs there."""
        return await self._link.send(_calls.info())

    async def healthy(self) -> bool:
        """Say whether the service is alive; False, not an error, when it cannot be reached."""
        try:
            return await self._link.send(_calls.healthy())
        except (Unreachable, DeadlineExceeded):
            return False

    async def ready(self) -> Readiness:
        """Say whether the service takes work; not ready, and no error, when it cannot be reached."""
        try:
            return await self._link.send(_calls.ready())
        except (Unreachable, DeadlineExceeded):
            return Readiness(False)

    async def status(self) -> Mapping[str, Any]:
        """Return the service at work as its page shows it, see `docs/observing.md`; members may be added to it."""
        return await self._link.send(_calls.status())

    async def timeline(self, request_id: str) -> Timeline:
        """Return what happened when to a prefetch, as long as it is remembered; raises NotFound."""
        return await self._link.send(_calls.timeline(request_id))

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text form."""
        return await self._link.send(_calls.metrics())
