"""Runs the service: pool, storage, engine and API up, and down again within the grace."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from forestage import __version__
from forestage.api.app import create_app
from forestage.api.context import Context
from forestage.api.keyring import Keyring
from forestage.assembly import Assembly, assemble, build_storage, pool_settings
from forestage.config import Config, read_grants
from forestage.connections import Connection
from forestage.core.errors import StartError
from forestage.crowd import SPARE, Crowd
from forestage.observe.tracing import start_tracing
from forestage.open_files import allow_open_files
from forestage.pool.file import PoolFile
from forestage.prefetch.regions import MAX_FILES, MAX_REGIONS
from forestage.reload import Reload
from forestage.sockets import bind_tcp, bind_unix

__all__ = ["run"]

log = logging.getLogger("forestage.server")

# Reader threads give the interpreter away around every system call; the loop must not wait the default 5 ms for it.
_SWITCH_INTERVAL_S = 0.0005
_KEEP_ALIVE_S = 75  # longer than the idle time of common client pools, so that they close first
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGHUP)
_LAST_ANSWERS_S = 0.5  # of the grace, kept for writing answers out
_LAST_SPANS_S = (0.1, 2.0)  # at least and at most, within the grace, for a collector to take what is left


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals, that says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or ():
            sock.listen(self.config.backlog)  # uvloop would only log that it cannot
        await super().startup(sockets)
        self.listening.set()

    def reset_connections(self) -> None:
        """Break off what has had no answer by now, which ends `serve` soon."""
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _StoppedError(Exception):
    """A signal came before the service was ready."""


class _Signals:
    """SIGTERM and SIGINT: the first asks to stop, the second ends the grace. SIGHUP: tokens are to be read again.

    The handlers stay to the end of the process. Those of an event loop go with the loop, and a signal that came then
    would turn a clean end into a kill.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            signal.signal(signum, self._caught)

    def check(self, *_: int) -> None:
        """Raise if a signal came: called while the pool is prefaulted, which may take a while."""
        if self.stop.is_set():
            raise _StoppedError

    def _caught(self, signum: int, _frame: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._received, signum)

    def _received(self, signum: int) -> None:
        if signum == signal.SIGHUP:
            self.reload.set()
        else:
            (self.now if self.stop.is_set() else self.stop).set()


def run(config: Config, grace_s: float, announce: Callable[[str], None], reread: Callable[[], Config]) -> int:
    """Serve until a signal; return the exit code.

    `announce` gets the one line that says the service is ready; `reread` loads the configuration again, for SIGHUP.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        try:
            clean = runner.run(_serve(config, grace_s, announce, reread))
        except StartError as error:
            print(f"forestage: {error.detail}", file=sys.stderr)
            return 2
        if not clean:
            # A reader thread hangs in a system call. Closing the loop would wait for it, and outlast any grace.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # the end of the interpreter would make them deadly again
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # optional: asyncio's own loop serves as well, slower
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(config: Config, grace_s: float, announce: Callable[[str], None], reread: Callable[[], Config]) -> bool:
    signals = _Signals()
    regions_files = MAX_REGIONS * (1 + MAX_FILES) if config.server.regions_uds else 0
    allow_open_files(config.server.max_connections + SPARE + regions_files)
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(bind_tcp(config.server.host, config.server.port))
        sockets = [tcp]
        if config.server.uds:
            sockets.append(stack.enter_context(bind_unix(config.server.uds)))
            stack.callback(_unlink, config.server.uds)
        regions = None
        if config.server.regions_uds:
            path = config.server.regions_uds
            regions = stack.enter_context(bind_unix(path, key="server.regions_uds"))
            stack.callback(_unlink, path)
        keyring = Keyring(read_grants(config))
        storage = build_storage(config)
        try:
            create = partial(PoolFile.create, pool_settings(config), config.layouts(), signals.check)
            pool = await asyncio.to_thread(create)
        except _StoppedError:
            return True
        stack.callback(pool.close)
        parts = assemble(config, pool, storage, start_tracing(os.environ))
        reload = Reload(config, keyring, reread)
        return await _serve_pool(parts, sockets, regions, keyring, reload, signals, grace_s, announce)


async def _serve_pool(
    parts: Assembly,
    sockets: list[socket.socket],
    regions: socket.socket | None,
    keyring: Keyring,
    reload: Reload,
    signals: _Signals,
    grace_s: float,
    announce: Callable[[str], None],
) -> bool:
    config, service = parts.config, parts.service
    exposition, history = parts.metrics.exposition, parts.history
    context = Context(config, service, parts.pool, parts.storage.is_up, exposition, __version__, history)
    server = _Server(
        uvicorn.Config(
            create_app(context, keyring),
            http=Connection.within(Crowd(config.server.max_connections), config.server.request_timeout_ms / 1e3),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )
    await parts.storage.open()
    if parts.publisher is not None:
        parts.publisher.open()
    if regions is not None:
        service.regions.listen_on(regions)
    started = asyncio.Event()
    running = asyncio.create_task(service.run(started))
    await started.wait()
    serving = asyncio.create_task(server.serve(sockets))
    await _first_of(serving, asyncio.create_task(server.listening.wait()))
    if serving.done():
        raise StartError(f"server.port: cannot listen: {serving.exception()}")
    # What is alive now stays; jobs and pages make no cycles, so full collections only cost time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    announce(_ready_line(config, parts, sockets[0]))
    stop = asyncio.create_task(signals.stop.wait())
    reloading = asyncio.create_task(reload.run(signals.reload))
    await _first_of(stop, running, serving, reloading)
    reloading.cancel()
    deadline = time.monotonic() + grace_s
    context.stopping = True
    log.info("stopping within %.1f s", grace_s)
    hurry = asyncio.create_task(signals.now.wait())
    settling = asyncio.create_task(service.stop(max(0.0, grace_s - _LAST_ANSWERS_S)))
    await _first_of(settling, hurry)
    server.should_exit = True
    await _first_of(serving, hurry, timeout_s=deadline - time.monotonic())
    server.force_exit = hurry.done()
    service.fills.close()
    copying = asyncio.create_task(service.fills.wait_for_copies())
    await _first_of(copying, timeout_s=deadline - time.monotonic())
    if not service.fills.copying:
        # Else a client would take the end of its connection for that of the copy. The end of the process is both.
        server.reset_connections()
    await _first_of(serving, timeout_s=_LAST_ANSWERS_S)
    await _first_of(running, timeout_s=deadline - time.monotonic() if settling.done() else 0)
    for task in (hurry, stop, settling, copying):
        task.cancel()
    await parts.storage.aclose()
    if parts.tracing is not None:
        least, most = _LAST_SPANS_S
        await parts.tracing.aclose(min(most, max(least, deadline - time.monotonic())))
    clean = running.done() and not service.fills.copying
    for ended in (running, serving, reloading):
        if ended.done() and not ended.cancelled():
            ended.result()
    if not clean:
        log.warning("leaving although reads or writes hang in the storage")
        running.cancel()
    return clean


async def _first_of(*tasks: asyncio.Task[Any], timeout_s: float | None = None) -> None:
    timeout_s = None if timeout_s is None else max(0.1, timeout_s)
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _ready_line(config: Config, parts: Assembly, tcp: socket.socket) -> str:
    host, port = tcp.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    places = f"http://{shown}:{port}"
    if config.server.uds:
        places += f" unix:{config.server.uds}"
    return f"forestage ready {places} pool={parts.pool.path} storage={config.storage.kind}"


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
