"""What the benchmark of copies asks of CUDA, or the same on the CPU, where copies are done when they return."""

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CopyDevice", "Work"]

Work = Callable[[], None]


class CopyDevice:
    """A device with one stream for copies and one for computing."""

    def __init__(self, name: str) -> None:
        self.is_cuda = name == "cuda"
        self.device = torch.device(name)
        self.name = "cpu"
        if self.is_cuda:
            self._copying, self._computing = torch.cuda.Stream(), torch.cuda.Stream()
            self.name = str(torch.cuda.get_device_name())

    def empty(self, size: int) -> Any:
        """Return device memory, in bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> Any:
        """Return host memory that torch pins; ordinary memory where there is nothing to pin it for."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_cuda)

    def time_copies(self, copies: Work) -> float:
        """Return the seconds from the start of the first copy to the end of the last, by the device's own clock."""
        if not self.is_cuda:
            return self.time_both(copies, None)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._copying):
            first.record()
            copies()
            last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def time_both(self, copies: Work | None, compute: Work | None) -> float:
        """Return the seconds until all is done that was started at once, by the clock on the wall."""
        if not self.is_cuda:
            begin = time.perf_counter()
            for work in filter(None, (compute, copies)):
                work()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        begin = time.perf_counter()
        # Computing first: a copy from pageable memory keeps this thread, which could not start computing meanwhile.
        if compute:
            with torch.cuda.stream(self._computing):
                compute()
        if copies:
            with torch.cuda.stream(self._copying):
                copies()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def computing(self, seconds: float) -> Work:
        """Return work for this device that takes about so long."""
        size, most = (2048, 100_000) if self.is_cuda else (32, 64)
        left = torch.ones((size, size), dtype=torch.float32, device=self.device)
        right, out = torch.ones_like(left), torch.empty_like(left)

        def times(count: int) -> Work:
            def work() -> None:
                for _ in range(count):
                    torch.matmul(left, right, out=out)

            return work

        self.time_both(None, times(8))  # the first one loads the library
        one = self.time_both(None, times(32)) / 32
        return times(max(1, min(most, round(seconds / one))))
