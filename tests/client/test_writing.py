"""Writing pages through a writable view: only in time, only into lent slots of the same pool, whole or not at all."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from client.both_clients import Kind
from client.guide import run_example
from client.stub_server import StubServer
from client.writing_service import WritingService
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.pool.file import PoolFile, PoolSettings
from forestage_client import AsyncClient, Client, PageWriter, PoolView, Stale, Unreachable, WriteStatus

MODEL = ModelLayout(
    "acme/hybrid",
    16,
    (Component("kv", 5000, shards=2), Component("mamba", 100, shards=3, covers=Covers.TAIL, window=1, slots=6)),
    shards=2,
)
NAME = MODEL.name
KEYS = [bytes([page]) * 32 for page in range(8)]
TAILS = {"mamba": [3, 7]}
Body = Callable[[PageWriter], None]


def page_of(component: str, page: int) -> bytes:
    size = 10_000 if component == "kv" else 300
    return bytes((page * 31 + at * (7 if component == "kv" else 11)) % 251 for at in range(size))


def put_all(writer: PageWriter) -> None:
    for page in range(8):
        writer.put("kv", page, page_of("kv", page))
    for page in TAILS["mamba"]:
        writer.put("mamba", page, page_of("mamba", page))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[WritingService]:
    service = WritingService(PoolSettings(str(tmp_path / "pool"), 1 << 20, pin="none"), MODEL)
    yield service
    service.pool.close()


@pytest.fixture
def url(service: WritingService) -> Iterator[str]:
    with StubServer(service.answer) as server:
        yield server.url


@pytest.fixture
def view(service: WritingService) -> Iterator[PoolView]:
    with PoolView(service.pool.path, writable=True) as view:
        yield view


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return cast("Kind", request.param)


def write(kind: Kind, url: str, view: PoolView, body: Body) -> PageWriter:
    """Run `body` in the `with` block of a client's `write`."""
    if kind == "sync":
        with Client(url) as client, client.write(view, NAME, KEYS, TAILS) as writer:
            body(writer)
        return writer

    async def awaited() -> PageWriter:
        async with AsyncClient(url) as client, client.write(view, NAME, KEYS, TAILS) as writer:
            body(writer)
        return writer

    return asyncio.run(awaited())


def test_pages_are_written_and_committed(kind: Kind, service: WritingService, url: str, view: PoolView) -> None:
    writer = write(kind, url, view, put_all)
    assert writer.result == WriteStatus(committed=8, durable=0, failed=0)
    assert not writer.result.settled
    assert service.calls == ["POST writes", "POST commit"]
    assert sorted(service.published) == [*(("kv", page) for page in range(8)), ("mamba", 3), ("mamba", 7)]
    with PoolView(service.pool.path) as reader:
        for (component, page), slot in service.published.items():
            assert reader.copy(NAME, component, slot, KEYS[page]) == page_of(component, page)
    # They are dirty until somebody says that L3 has them: a restart knows which those are.
    service.restart()
    assert [(page.page, page.dirty) for page in service.pool.adopted[1]] == [(3, True), (7, True)]


def test_only_what_has_a_slot_is_put(kind: Kind, service: WritingService, url: str, view: PoolView) -> None:
    service.stored, service.granted = {0, 3}, 6

    def body(writer: PageWriter) -> None:
        assert (writer.write.stored, writer.write.granted, writer.write.reason) == ((0, 3), 6, "back_pressure")
        assert writer.write.slots["mamba"] == (None, None)
        assert [writer.put("kv", page, page_of("kv", page)) for page in range(8)] == [
            page in {1, 2, 4, 5} for page in range(8)
        ]
        assert not writer.put("mamba", 7, b"of any size, for it is not wanted")
        for component, page in (("kv", 8), ("kv", -1), ("mamba", 2), ("mmaba", 7)):
            with pytest.raises(ValueError, match="not among those"):
                writer.put(component, page, b"")
        for component, page in (("kv", 3), ("kv", 6), ("kv", 8), ("mamba", 3), ("nothing", 1)):
            assert not writer.wants(component, page)
            for way in (writer.views, lambda c, p: writer.copy_in(c, p, b"")):
                with pytest.raises(KeyError, match=f"no slot for page {page} of {component}"):
                    way(component, page)

    write(kind, url, view, body)
    assert sorted(page for _, page in service.published) == [1, 2, 4, 5]


def test_every_way_to_fill_a_slot(service: WritingService, url: str, view: PoolView) -> None:
    content = page_of("kv", 0)
    shards = [memoryview(content)[:5000], memoryview(content)[5000:]]

    def body(writer: PageWriter) -> None:
        writer.copy_in("kv", 0, content)
        writer.copy_in("kv", 1, bytearray(content))
        writer.copy_in("kv", 2, memoryview(content).cast("B", (100, 100)))
        writer.copy_in("kv", 3, shards)
        for target, shard in zip(writer.views("kv", 4), shards, strict=True):
            assert not target.readonly
            target[:] = shard
        for number, part in enumerate(shards):
            at = number * view.regions[NAME]["kv"].shard_bytes
            tensor = writer.tensor("kv", 5, torch.uint8, (at + 5000,))
            tensor[at:] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        writer.copy_in("kv", 6, memoryview(torch.frombuffer(bytearray(content), dtype=torch.uint8).numpy()))
        assert writer.untouched == (("kv", 7), ("mamba", 3), ("mamba", 7))
        writer.put("kv", 7, content)
        for page in (3, 7):
            writer.put("mamba", page, page_of("mamba", page))

    write("sync", url, view, body)
    with PoolView(service.pool.path) as reader:
        for page in range(8):
            assert reader.copy(NAME, "kv", service.published["kv", page], KEYS[page]) == content


def test_another_size_is_refused_and_nothing_is_copied(service: WritingService, url: str, view: PoolView) -> None:
    def body(writer: PageWriter) -> None:
        slot = writer.write.slots["kv"][0]
        assert slot is not None
        for data in (b"", bytes([1]) * 9_999, bytes([1]) * 10_001):
            with pytest.raises(ValueError, match="a page of kv has 10000 bytes, not"):
                writer.copy_in("kv", 0, data)
        one = memoryview(bytes([1]) * 5000)
        for shards in ([], [one], [one, one, one], [one, one[1:]]):
            with pytest.raises(ValueError, match="has 2 shards of 5000 bytes"):
                writer.copy_in("kv", 0, shards)
        assert all(bytes(shard) == bytes(5000) for shard in view.shard_views(NAME, "kv", slot))
        assert ("kv", 0) in writer.untouched
        put_all(writer)

    write("sync", url, view, body)


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_exception_drops_the_write(
    kind: Kind, service: WritingService, url: str, view: PoolView, is_gone: bool
) -> None:
    def body(writer: PageWriter) -> None:
        put_all(writer)
        service.stopping = is_gone  # the exception is the caller's own even then
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        write(kind, url, view, body)
    assert service.calls == ["POST writes", "DELETE w"]
    assert service.published == {}
    assert bool(service.lent) == is_gone
    states = {entry.state for entry in view.slots(NAME, "kv")}
    assert states == ({"free", "filling"} if is_gone else {"free"})


def test_a_page_that_was_not_put_is_not_published(
    kind: Kind, service: WritingService, url: str, view: PoolView
) -> None:
    def body(writer: PageWriter) -> None:
        put_all(writer)
        writer._untouched["kv", 5] = None  # as if it had been forgotten

    with pytest.raises(ValueError, match=r"^1 pages of write w were never put: kv 5$"):
        write(kind, url, view, body)
    with pytest.raises(ValueError, match=r"^10 pages of write w were never put: kv 0, kv 1"):
        write(kind, url, view, lambda writer: None)
    assert service.calls == ["POST writes", "DELETE w"] * 2
    assert service.published == {}


def test_a_cancelled_task_drops_the_write(service: WritingService, url: str, view: PoolView) -> None:
    async def run() -> None:
        entered = asyncio.Event()

        async def writes() -> None:
            async with AsyncClient(url) as client, client.write(view, NAME, KEYS, TAILS):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(writes())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert service.calls == ["POST writes", "DELETE w"]
    assert service.lent == []


def test_the_guide_writes_pages(
    service: WritingService, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_example("def write_prefix")
    # Its pool is found where the service says, which this one does not.
    monkeypatch.setattr(Client, "pool", lambda client: SimpleNamespace(path=service.pool.path))
    pages = [page_of("kv", page) for page in range(8)]
    states = {page: page_of("mamba", page) for page in (3, 7)}
    service.stored, service.granted = {0}, 7
    assert names["write_prefix"](url, NAME, KEYS, pages, states) == 6
    assert capsys.readouterr().out == "1 pages were there, 7 of 8 granted (back_pressure)\n"
    with PoolView(service.pool.path) as reader:
        for (component, page), slot in service.published.items():
            assert reader.copy(NAME, component, slot, KEYS[page]) == page_of(component, page)


# ---- refused slots


def test_a_read_only_view_writes_nothing(kind: Kind, service: WritingService, url: str) -> None:
    with PoolView(service.pool.path) as view:
        with pytest.raises(ValueError, match="writable=True"):
            write(kind, url, view, put_all)
        assert service.calls == ["POST writes", "DELETE w"]
        with pytest.raises(ValueError, match="read-only"):
            view.copy_in(NAME, "kv", 0, bytes(10_000))


@pytest.mark.parametrize("refused", ["at once", "later"])
def test_a_write_that_has_expired_is_refused(
    kind: Kind, service: WritingService, url: str, view: PoolView, refused: str
) -> None:
    service.expires_in_ms = 0 if refused == "at once" else 800

    def body(writer: PageWriter) -> None:
        assert refused == "later"
        put_all(writer)
        while time.monotonic() < writer.write.expires_at_s:
            time.sleep(0.01)
        for way in (writer.views, lambda c, p: writer.copy_in(c, p, bytes(10_000)), lambda c, p: writer.check()):
            with pytest.raises(Stale, match="expired after 800 ms"):
                way("kv", 0)
        writer.put("kv", 0, bytes(10_000))

    with pytest.raises(Stale, match="expired"):
        write(kind, url, view, body)
    assert service.calls == ["POST writes", "DELETE w"]


def test_its_time_counts_from_before_the_request(service: WritingService, url: str, view: PoolView) -> None:
    service.expires_in_ms = 5000
    with Client(url) as client:
        before = time.monotonic()
        granted = client.begin_write(NAME, KEYS)
        assert before + 5 <= granted.expires_at_s <= time.monotonic() + 5
        assert granted.slots["mamba"] == ()
        slow = threading.Event()
        answer = service.answer

        def late(request: object) -> object:
            slow.wait(0.3)
            return answer(request)  # type: ignore[arg-type]

        service.answer = late  # type: ignore[method-assign,assignment]
        with StubServer(service.answer) as server, Client(server.url) as patient:
            before = time.monotonic()
            assert patient.begin_write(NAME, KEYS).expires_at_s < before + 5.2 <= time.monotonic() + 5


@pytest.mark.parametrize("how", ["restarted", "replaced"])
def test_another_start_of_the_service_is_refused(
    kind: Kind, service: WritingService, url: str, view: PoolView, how: str, tmp_path: Path
) -> None:
    def body(writer: PageWriter) -> None:
        assert writer.put("kv", 0, page_of("kv", 0))
        service.restart()
        writer.put("kv", 1, page_of("kv", 1))

    if how == "replaced":  # the service has a new file at the path, the view still the old one
        service.pool.close()
        Path(service.pool.path).unlink()
        service.pool = PoolFile.create(service.settings, (MODEL,))
    with pytest.raises(Stale, match="another start of the service, or in another pool file"):
        write(kind, url, view, body)
    assert service.published == {}


def test_a_slot_that_was_taken_back_is_refused(service: WritingService, url: str, view: PoolView) -> None:
    with Client(url) as client:
        writer = PageWriter(view, client.begin_write(NAME, KEYS, TAILS))
        slot = writer.write.slots["kv"][2]
        assert slot is not None
        table = service.pool.tables[0]
        for change in ("freed", "being read into", "resident"):
            if change == "freed":
                table.clear(slot)
            elif change == "being read into":
                table.begin_fill(slot)
            else:
                table.publish(slot, KEYS[2])
            with pytest.raises(Stale, match="is not lent any more"):
                writer.copy_in("kv", 2, page_of("kv", 2))
        assert view.copy(NAME, "kv", slot, KEYS[2]) == bytes(10_000)
        writer.copy_in("kv", 3, page_of("kv", 3))


def test_a_reservation_is_not_asked_for_twice(service: WritingService) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StubServer(lambda request: None))
        client = stack.enter_context(Client(server.url))
        with pytest.raises(Unreachable) as raised:
            client.begin_write(NAME, KEYS)
        assert raised.value.maybe_sent
        assert len(server.requests) == 1
