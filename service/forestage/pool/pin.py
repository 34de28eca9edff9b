"""Keep the pool's memory in place: registered with CUDA, locked, or neither. The only importer of torch here.

Law: either the whole pool is pinned one way, or nothing of it is; `Pinned.how` says what was achieved.
"""

import ctypes
import importlib
import logging
import math
import os
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forestage.core.errors import StartError
from forestage.core.geometry import Region
from forestage.pool import libc
from forestage.pool.limits import in_units

__all__ = ["GPU_NODES", "HostRegistry", "PinFailedError", "Pinned", "TorchCuda", "pin_chunks", "pin_memory"]

_log = logging.getLogger("forestage.pool")

GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0")
# One registration of 512 GiB or more is refused, and thousands of small ones meet a ceiling.
CHUNK_BYTES = 16 << 30
_PAGE = 4096
_CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every context of the process, not only the current one


class PinFailedError(Exception):
    """The memory could not be pinned; the text says why. Nothing of it is pinned then."""


class HostRegistry(Protocol):
    """What CUDA offers for memory that it did not allocate."""

    def register(self, address: int, size: int) -> str | None:
        """Pin a range; return the text of the error, None when it worked."""

    def unregister(self, address: int) -> str | None:
        """Undo `register`."""

    def clear_error(self) -> None:
        """Forget the last error, which the next unrelated CUDA call would report otherwise."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """How the pool is pinned ("cuda", "mlock" or "none"). Call `release` once, before the memory is unmapped."""

    how: str
    release: Callable[[], None]


class TorchCuda:
    """Host registration through the CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        """Load torch and initialise CUDA (about 600 MB on device 0). Raises PinFailedError where there is none."""
        try:
            torch: Any = importlib.import_module("torch")
        except (ImportError, OSError) as error:
            raise PinFailedError(f"torch cannot be imported: {error}") from error
        if not torch.cuda.is_available():
            raise PinFailedError(f"torch {torch.__version__} finds no usable CUDA device")
        try:
            self._cudart: Any = torch.cuda.cudart()
        except Exception as error:  # torch has several kinds for a driver that does not come up
            raise PinFailedError(f"CUDA cannot be initialised: {error}") from error
        self._torch = torch

    def register(self, address: int, size: int) -> str | None:
        return self._text(self._cudart.cudaHostRegister(address, size, _CUDA_HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> str | None:
        return self._text(self._cudart.cudaHostUnregister(address))

    def clear_error(self) -> None:
        # torch does not offer cudaGetLastError, so take it from the runtime library that torch has loaded.
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = re.search(r" (/\S*/libcudart[^/\s]*\.so\S*)$", maps.read(), re.MULTILINE)
        if loaded:
            ctypes.CDLL(loaded[1]).cudaGetLastError()
            return
        # A runtime that is linked into torch: the check behind the next kernel launch takes the error, and raises it.
        try:
            self._torch.zeros(1, device="cuda")
        except RuntimeError:
            _log.debug("took the pending CUDA error")

    def _text(self, code: Any) -> str | None:
        number = int(code)
        return f"CUDA error {number}: {self._cudart.cudaGetErrorString(code)}" if number else None


def pin_chunks(regions: Sequence[Region], size: int, limit: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Cut the file into (offset, length) pieces of at most `limit` bytes, none of them through a slot.

    A copy between GPU and host may not cross from one registration into another, hence whole slots only; and two
    registrations may not share a page. A slot larger than `limit` is a piece of its own.
    """
    cuts = [0]
    for region in sorted(regions, key=lambda region: region.offset):
        end = region.offset + region.data_bytes
        if end - cuts[-1] > limit:
            unit = math.lcm(region.component.slot_bytes, _PAGE)
            cuts.extend(range(region.offset, end, max(1, limit // unit) * unit))
    return [(start, end - start) for start, end in zip(cuts, [*cuts[1:], size], strict=True)]


def pin_memory(
    address: int,
    chunks: Sequence[tuple[int, int]],
    setting: str,
    *,
    load_cuda: Callable[[], HostRegistry] = TorchCuda,
    gpu_nodes: Sequence[str] = GPU_NODES,
) -> Pinned:
    """Pin the chunks (offset, length in bytes) of the memory at `address` as `pool.pin` says.

    "auto" takes CUDA where a GPU is, else locks, else leaves it, and says so in the log. Raises StartError when a way
    that was asked for by name fails.
    """
    has_gpu = any(os.path.exists(node) for node in gpu_nodes)
    try:
        if setting == "cuda" or (setting == "auto" and has_gpu):
            return _pin_cuda(address, chunks, load_cuda)
    except PinFailedError as error:
        if setting == "cuda":
            raise StartError(f"pool.pin: cuda was asked for and failed: {error}") from error
        _log.warning("the pool is not registered with CUDA: %s", error)
    try:
        if setting in {"mlock", "auto"}:
            return _lock(address, chunks)
    except PinFailedError as error:
        if setting == "mlock":
            raise StartError(f"pool.pin: {error}") from error
        _log.info("the pool is not pinned: %s", error)
    return Pinned("none", lambda: None)


def _pin_cuda(address: int, chunks: Sequence[tuple[int, int]], load: Callable[[], HostRegistry]) -> Pinned:
    cuda = load()
    done: list[int] = []

    def release() -> None:
        while done:
            failure = cuda.unregister(done.pop())
            if failure:
                cuda.clear_error()
                _log.warning("a part of the pool could not be unregistered: %s", failure)

    for offset, length in chunks:
        failure = cuda.register(address + offset, length)
        if failure:
            cuda.clear_error()
            release()
            raise PinFailedError(f"{in_units(length)} at offset {offset}: {failure}")
        done.append(address + offset)
    return Pinned("cuda", release)


def _lock(address: int, chunks: Sequence[tuple[int, int]]) -> Pinned:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    done: list[tuple[int, int]] = []

    def release() -> None:
        while done:
            libc.munlock(*done.pop())

    for offset, length in chunks:
        number = libc.mlock(address + offset, length)
        if number:
            release()
            need = sum(length for _, length in chunks)
            allowed = "no limit" if hard == resource.RLIM_INFINITY else in_units(hard)
            raise PinFailedError(
                f"need {in_units(need)} of locked memory, mlock: {os.strerror(number)}, have {allowed}"
            )
        done.append((address + offset, length))
    return Pinned("mlock", release)
