"""Sockets: reuse, broken connections, time limits, tokens; both clients, real servers."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from client.both_clients import Clients
from client.stub_server import Answering, StubServer
from forestage_client import (
    AsyncClient,
    BadRequest,
    Client,
    DeadlineExceeded,
    ForestageError,
    Readiness,
    ServerFault,
    Unreachable,
)
from forestage_client.testing import FakeForestage

KEYS = [bytes([page]) * 32 for page in range(4)]
TOKEN = "s3cret-token"


@pytest.fixture
def fake() -> FakeForestage:
    fake = FakeForestage()
    fake.store("demo", KEYS)
    return fake


@pytest.fixture
def hung() -> Iterator[Answering]:
    """Answer nothing until the end of the test."""
    over = threading.Event()

    def answer(_: httpx2.Request) -> None:
        over.wait(60)

    yield answer
    over.set()


def breaking(fake: FakeForestage, *numbers: int) -> Answering:
    """Break the connection instead of answering the n-th request."""
    seen = iter(range(1, 1000))
    return lambda request: None if next(seen) in numbers else fake.answer(request)


def eventually(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.002)


@pytest.fixture(params=["tcp", "unix"])
def unix_socket(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "forestage.sock" if request.param == "unix" else None


def test_one_connection_serves_all_calls(clients: Clients, fake: FakeForestage, unix_socket: Path | None) -> None:
    with StubServer(fake.answer, unix_socket) as server:
        client = clients.connect(server.url)
        for _ in range(5):
            client.models()
            client.prefetch("demo", KEYS)
        assert (len(server.requests), len(server.sockets)) == (10, 1)


def test_idle_connections_may_be_closed(clients: Clients, fake: FakeForestage, unix_socket: Path | None) -> None:
    with StubServer(fake.answer, unix_socket, close_when_idle=True) as server:
        client = clients.connect(server.url)
        for _ in range(5):
            client.models()
            assert client.prefetch("demo", KEYS, request_id="r").outcome == "complete"
            client.cancel("r")


REPEATABLE: dict[str, Callable[[Client], object]] = {
    "prefetch": lambda client: client.prefetch("demo", KEYS, request_id="r"),
    "prefetch without id": lambda client: client.prefetch("demo", KEYS),
    "lookup": lambda client: client.lookup("demo", KEYS),
    "models": lambda client: client.models(),
    "cancel": lambda client: client.cancel("r"),
    "release": lambda client: client.release("l"),
}


@pytest.mark.parametrize("name", REPEATABLE)
def test_a_call_is_repeated_when_its_connection_breaks(
    clients: Clients, fake: FakeForestage, unix_socket: Path | None, name: str
) -> None:
    # The race that no look at an idle connection can exclude: it is closed while the request travels.
    with StubServer(breaking(fake, 2), unix_socket) as server:
        client = clients.connect(server.url)
        client.info()
        REPEATABLE[name](client)
        _, lost, repeated = server.requests
        assert (lost.method, lost.url, lost.content) == (repeated.method, repeated.url, repeated.content)
        assert len(server.sockets) == 2


def test_a_call_is_repeated_only_once(clients: Clients, fake: FakeForestage) -> None:
    with StubServer(breaking(fake, 1, 2)) as server:
        client = clients.connect(server.url)
        with pytest.raises(Unreachable, match="broke"):
            client.info()
        assert len(server.requests) == 2


class Restarting:
    """Breaks every connection that was there when the service restarted, as soon as it is used again."""

    def __init__(self, fake: FakeForestage) -> None:
        self.fake = fake
        self.server = StubServer(self.answer)
        self.dead = 0

    def answer(self, request: httpx2.Request) -> httpx2.Response | None:
        return self.fake.answer(request) if len(self.server.sockets) > self.dead else None

    def restart(self) -> None:
        self.fake.resume()
        self.dead = len(self.server.sockets)
        assert self.dead == 4


def test_a_restart_breaks_all_kept_connections_and_no_call(fake: FakeForestage) -> None:
    service = Restarting(fake)
    with service.server as server, Client(server.url) as client, ThreadPoolExecutor(4) as threads:
        fake.hold()
        jobs = [threads.submit(client.prefetch, "demo", KEYS, wait_ms=60_000) for _ in range(4)]
        eventually(lambda: len(server.requests) == 4)
        service.restart()
        assert all(job.result().done for job in jobs)
        assert client.info().version == "fake"
        assert len(server.requests) == 6


async def test_a_restart_breaks_all_kept_connections_and_no_awaited_call(fake: FakeForestage) -> None:
    service = Restarting(fake)
    with service.server as server:
        async with AsyncClient(server.url) as client:
            fake.hold()
            jobs = [asyncio.create_task(client.prefetch("demo", KEYS, wait_ms=60_000)) for _ in range(4)]
            await asyncio.to_thread(eventually, lambda: len(server.requests) == 4)
            service.restart()
            assert all(job.done for job in await asyncio.gather(*jobs))
            assert (await client.info()).version == "fake"
            assert len(server.requests) == 6


def test_a_lease_is_not_taken_twice(clients: Clients, fake: FakeForestage) -> None:
    with StubServer(breaking(fake, 2), None) as server:
        client = clients.connect(server.url)
        client.prefetch("demo", KEYS)
        with pytest.raises(Unreachable) as raised:
            client.lease("demo", KEYS)
        assert raised.value.maybe_sent
        assert isinstance(raised.value.__cause__, httpx2.HTTPError)
        assert len(server.requests) == 2
        assert client.lease("demo", KEYS).pages.ready == 4


def test_nobody_listens(clients: Clients, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{unused.getsockname()[1]}", f"unix:{tmp_path}/none.sock"):
            client = clients.connect(url)
            with pytest.raises(Unreachable, match="cannot connect to") as raised:
                client.prefetch("demo", KEYS, wait_ms=60_000)
            assert (raised.value.maybe_sent, raised.value.status) == (False, None)
            assert isinstance(raised.value.__cause__, httpx2.ConnectError)
            assert client.healthy() is False
            assert client.ready() == Readiness(False)


def test_answers_cut_short_are_broken_connections(clients: Clients) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def cut_twice() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        thread = threading.Thread(target=cut_twice)
        thread.start()
        client = clients.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(Unreachable) as raised:
            client.models()
        assert raised.value.maybe_sent
        thread.join()


def test_what_does_not_speak_http_is_no_service(clients: Clients) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"+PONG\r\n" * 3)

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(Unreachable):
            clients.connect(f"http://127.0.0.1:{listener.getsockname()[1]}").models()
        thread.join()


def test_a_service_that_hangs_exceeds_the_deadline(clients: Clients, hung: Answering, unix_socket: Path | None) -> None:
    with StubServer(hung, unix_socket) as server:
        client = clients.connect(server.url, timeout_s=0.1)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within 0.1 s") as raised:
            client.models()
        assert isinstance(raised.value.__cause__, httpx2.TimeoutException)
        with pytest.raises(DeadlineExceeded, match=r"within 0.2 s"):
            client.prefetch("demo", KEYS, wait_ms=100)
        assert not client.healthy()
        assert time.monotonic() - began < 5
        eventually(lambda: len(server.requests) >= 3)
        assert len(server.requests) == 3  # a deadline is not a reason to ask again


def test_waits_may_outlast_the_timeout(clients: Clients, fake: FakeForestage) -> None:
    fake.hold()
    with fake.client() as other:
        other.prefetch("demo", KEYS, request_id="r")
    with StubServer(fake.answer) as server:
        client = clients.connect(server.url, timeout_s=0.3)
        resume = threading.Timer(0.6, fake.resume)
        resume.start()
        assert client.get_prefetch("r", wait_ms=60_000).done
        resume.join()


def test_wait_polls_until_the_job_is_done(clients: Clients, fake: FakeForestage) -> None:
    with StubServer(fake.answer) as server:
        client = clients.connect(server.url)
        fake.hold()
        client.prefetch("demo", KEYS, request_id="r")
        with pytest.raises(DeadlineExceeded, match=r"job r is still loading after 0\.02 s"):
            client.wait("r", 0.02)
        resume = threading.Timer(0.05, fake.resume)
        resume.start()
        assert client.wait("r", 60).outcome == "complete"
        resume.join()
        assert client.wait("r", 0).done
        polls = [int(dict(request.url.params).get("wait_ms", "0")) for request in server.requests[1:]]
        assert 0 < polls[0] <= 20
        assert polls[-2:] == [20_000, 0]


async def test_a_cancelled_call_leaves(hung: Answering, unix_socket: Path | None) -> None:
    with StubServer(hung, unix_socket) as server:
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.prefetch("demo", KEYS, wait_ms=60_000))
            await asyncio.to_thread(eventually, lambda: len(server.requests) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            server.sockets[0].settimeout(10)
            assert await asyncio.to_thread(server.sockets[0].recv, 1, socket.MSG_PEEK) == b""


async def test_tasks_share_an_async_client(fake: FakeForestage) -> None:
    with StubServer(fake.answer) as server:
        async with AsyncClient(server.url) as client:
            fake.hold()
            jobs = [asyncio.create_task(client.prefetch("demo", KEYS, wait_ms=60_000)) for _ in range(20)]
            await asyncio.to_thread(eventually, lambda: len(server.requests) == 20)
            assert await client.healthy()  # long polls do not stand in the way
            fake.resume()
            assert {job.outcome for job in await asyncio.gather(*jobs)} == {"complete"}


def test_threads_share_a_client(fake: FakeForestage, unix_socket: Path | None) -> None:
    with StubServer(fake.answer, unix_socket) as server, Client(server.url) as client, ThreadPoolExecutor(8) as threads:
        ids = [f"r-{number}" for number in range(80)]
        jobs = threads.map(lambda request_id: client.prefetch("demo", KEYS, request_id=request_id), ids)
        assert [job.request_id for job in jobs] == ids
        assert len(server.sockets) <= 8


def test_the_token_is_sent_and_never_shown(clients: Clients, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    fake = FakeForestage(token=TOKEN)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    with StubServer(breaking(fake, 3, 4)) as server:
        client = clients.connect(server.url, token=(tmp_path / "token").read_text())
        client.models()
        with pytest.raises(ForestageError) as raised:
            client.prefetch("nope", KEYS)
        with pytest.raises(Unreachable) as broken:
            client.models()
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    shown = [
        repr(client),
        caplog.text,
        *(f"{e.value!r} {e.value.__cause__!r} {vars(e.value)}" for e in (raised, broken)),
    ]
    assert not [text for text in shown if TOKEN in text]
    assert server.url in repr(client)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "nön", "nul\0"])
def test_tokens_that_cannot_be_sent_are_refused_unshown(clients: Clients, token: str) -> None:
    with pytest.raises(ValueError, match="token must be printable") as raised:
        clients.connect("http://127.0.0.1:1", token=token)
    assert not token or token not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8470",
        "https://127.0.0.1:8470",
        "http://",
        "http://127.0.0.1:8470/api",
        "http://127.0.0.1:8470?x=1",
        "http://127.0.0.1:port",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://nul\0:80",
        "unix:relative.sock",
        "unix://host/path.sock",
    ],
)
def test_other_urls_are_refused(clients: Clients, url: str) -> None:
    with pytest.raises(ValueError, match=r"url must"):
        clients.connect(url)


@pytest.mark.parametrize("url", ["http://user:hunter2@127.0.0.1:8470", "http://user:hunter2@[::1"])
def test_credentials_in_the_url_are_refused_unshown(clients: Clients, url: str) -> None:
    with pytest.raises(ValueError, match="give token") as raised:
        clients.connect(url)
    assert "hunter2" not in str(raised.value)


def test_odd_options_are_refused(clients: Clients) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        clients.connect("http://127.0.0.1:1", timeout_s=0)
    with pytest.raises(ValueError, match="encoding"):
        clients.connect("http://127.0.0.1:1", encoding="xml")  # type: ignore[arg-type]


def test_proxies_of_the_environment_do_not_matter(
    clients: Clients, fake: FakeForestage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with StubServer(fake.answer) as server:
        assert clients.connect(server.url).healthy()


def test_keys_that_are_no_keys_never_leave(clients: Clients, fake: FakeForestage) -> None:
    with StubServer(fake.answer) as server:
        client = clients.connect(server.url)
        for ask in (client.prefetch, client.lookup, client.lease):
            with pytest.raises(BadRequest, match="page key must be hex"):
                ask("demo", ["zz"])
        assert server.requests == []


def test_an_endless_id_never_leaves(clients: Clients, fake: FakeForestage) -> None:
    with pytest.raises(BadRequest, match="URL too long"):
        clients.of(fake).get_prefetch("r" * 100_000)


def test_a_foreign_server_is_a_fault(clients: Clients) -> None:
    page = httpx2.Response(200, content=b"<html>hello</html>", headers={"content-type": "text/html"})
    moved = httpx2.Response(302, headers={"location": "http://127.0.0.1:1/"})
    with StubServer(lambda request: moved if request.url.path == "/v1/info" else page) as server:
        client = clients.connect(server.url)
        with pytest.raises(ServerFault, match="text/html"):
            client.models()
        with pytest.raises(ServerFault, match="302"):
            client.info()


def test_a_closed_client_says_so(clients: Clients, fake: FakeForestage) -> None:
    client = clients.of(fake)
    client.models()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()
