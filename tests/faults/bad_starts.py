"""Starts that must be refused: each makes its situation, and yields the configuration and what to start it with."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.configs import write_config
from support.running import running

__all__ = ["BAD_STARTS", "NEEDS_ROOT", "BadStart"]


@dataclass(frozen=True, slots=True)
class BadStart:
    """A configuration, and the words before the command that starts a service with it."""

    config: Path
    wrapper: Sequence[str] = ()


Situation = Iterator[BadStart]
#: Root without capabilities is refused by the modes of files as everybody else is.
_NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@contextmanager
def _port_in_use(folder: Path) -> Situation:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield BadStart(write_config(folder, server=f"port = {taken.getsockname()[1]}"))


@contextmanager
def _foreign_address(folder: Path) -> Situation:
    yield BadStart(write_config(folder, server='host = "192.0.2.1"\nport = 0'))


@contextmanager
def _file_at_socket(folder: Path) -> Situation:
    (folder / "s").write_text("a file of somebody")
    yield BadStart(write_config(folder, server=f'port = 0\nuds = "{folder}/s"'))
    assert (folder / "s").read_text() == "a file of somebody"


@contextmanager
def _file_at_regions_socket(folder: Path) -> Situation:
    (folder / "r").write_text("a file of somebody")
    yield BadStart(write_config(folder, server=f'port = 0\nuds = "{folder}/s"\nregions_uds = "{folder}/r"'))
    assert (folder / "r").read_text() == "a file of somebody"
    assert not (folder / "s").exists()


@contextmanager
def _socket_in_use(folder: Path) -> Situation:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "s"))
        other.listen()
        yield BadStart(write_config(folder, server=f'port = 0\nuds = "{folder}/s"'))


@contextmanager
def _pool_in_use(folder: Path) -> Situation:
    config = write_config(folder)
    with running(config) as owner:
        status = (folder / "pool").stat()
        assert status.st_blocks * 512 >= status.st_size > 64 * 4096  # all of it is there
        yield BadStart(config)
        assert owner.stop() == 0  # which the refused one has not disturbed


def _elsewhere(config: Path, folder: Path, pool: str) -> Path:
    config.write_text(config.read_text().replace(f'path = "{folder}/pool"', f'path = "{pool}"'))
    return config


@contextmanager
def _small_mount(folder: Path) -> Situation:
    mount = folder / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], check=True)
    try:
        yield BadStart(_elsewhere(write_config(folder, slots=512), folder, f"{mount}/pool"))
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@contextmanager
def _small_cgroup(folder: Path) -> Situation:
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    above = Path("/sys/fs/cgroup") if version_2 else Path("/sys/fs/cgroup/memory")
    group = above / f"forestage-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(300 << 20))
        config = write_config(folder, slots=16384, pool_bytes="128MiB")
        shared = Path("/dev/shm") / folder.name
        join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        yield BadStart(_elsewhere(config, folder, f"{shared}/pool"), ("sh", "-c", join, "sh"))
        assert not shared.exists()
    finally:
        group.rmdir()


@contextmanager
def _no_place_for_pool(folder: Path) -> Situation:
    yield BadStart(_elsewhere(write_config(folder), folder, "/proc/forestage/pool"))


@contextmanager
def _foreign_pool(folder: Path) -> Situation:
    (folder / "pool").write_text("letters of somebody\n" * 1000)
    yield BadStart(write_config(folder))
    assert (folder / "pool").read_text() == "letters of somebody\n" * 1000


@contextmanager
def _link_to_pool(folder: Path) -> Situation:
    (folder / "elsewhere").write_text("a file of somebody")
    (folder / "pool").symlink_to("elsewhere")
    yield BadStart(write_config(folder))
    assert (folder / "elsewhere").read_text() == "a file of somebody"


@contextmanager
def _no_place_for_l3(folder: Path) -> Situation:
    (folder / "file").write_text("")
    yield BadStart(write_config(folder, **{"storage.file": f'root = "{folder}/file/l3"'}))  # type: ignore[arg-type]


@contextmanager
def _l3_not_ours(folder: Path) -> Situation:
    (folder / "theirs").mkdir(mode=0o555)
    config = write_config(folder, **{"storage.file": f'root = "{folder}/theirs/l3"'})  # type: ignore[arg-type]
    yield BadStart(config, _NO_CAPABILITIES)


@contextmanager
def _token_not_there(folder: Path) -> Situation:
    yield BadStart(write_config(folder, server='port = 0\ntoken_file = "/nonexistent"'))


@contextmanager
def _token_not_ours(folder: Path) -> Situation:
    (folder / "token").write_text("secret-of-somebody")
    (folder / "token").chmod(0)
    yield BadStart(write_config(folder, server=f'port = 0\ntoken_file = "{folder}/token"'), _NO_CAPABILITIES)


@contextmanager
def _two_callers_one_token(folder: Path) -> Situation:
    (folder / "token").write_text("secret-of-somebody")
    more = f'[[tokens]]\nrole = "read"\ntoken_file = "{folder}/token"'
    yield BadStart(write_config(folder, server=f'port = 0\ntoken_file = "{folder}/token"', more=more))


NEEDS_ROOT: Mapping[str, str] = {
    "pool larger than its mount": "mounting",
    "pool larger than its cgroup": "making cgroups",
}
BAD_STARTS: dict[str, Callable[[Path], AbstractContextManager[BadStart]]] = {
    "port in use": _port_in_use,
    "address of another machine": _foreign_address,
    "a file where the unix socket should be": _file_at_socket,
    "a file where the socket for regions should be": _file_at_regions_socket,
    "unix socket in use": _socket_in_use,
    "pool in use": _pool_in_use,
    "pool larger than its mount": _small_mount,
    "pool larger than its cgroup": _small_cgroup,
    "no place for the pool": _no_place_for_pool,
    "another program's file where the pool should be": _foreign_pool,
    "a link where the pool should be": _link_to_pool,
    "no place for L3": _no_place_for_l3,
    "a place for L3 that others own": _l3_not_ours,
    "token file that is not there": _token_not_there,
    "token file that others own": _token_not_ours,
    "one token for two callers": _two_callers_one_token,
}
