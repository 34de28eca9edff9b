"""Pages of side pools that wait for the KV pages they belong to: SGLang writes them first, Forestage takes both.

Law: `num_bytes` is the sum of what is staged and never above `capacity_bytes`; the oldest make room for new ones.
"""

import threading

__all__ = ["StagedPages"]


class StagedPages:
    """Copies of pages by component and key. For several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._pages: dict[tuple[str, str], bytearray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, component: str, key: str, page: bytearray) -> bool:
        """Keep a page until it is taken; say whether it is small enough for that."""
        with self._lock:
            if len(page) > self.capacity_bytes:
                return False
            self._drop((component, key))
            while self.num_bytes + len(page) > self.capacity_bytes:
                self._drop(next(iter(self._pages)))
            self._pages[component, key] = page
            self.num_bytes += len(page)
            return True

    def get(self, component: str, key: str) -> bytearray | None:
        """Return a page and keep it; it must not be changed."""
        return self._pages.get((component, key))

    def drop(self, component: str, key: str) -> None:
        """Forget a page. Idempotent."""
        with self._lock:
            self._drop((component, key))

    def clear(self) -> None:
        """Forget all pages."""
        with self._lock:
            self._pages.clear()
            self.num_bytes = 0

    def _drop(self, name: tuple[str, str]) -> None:
        self.num_bytes -= len(self._pages.pop(name, b""))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the law at the top of this file holds."""
        with self._lock:
            assert self.num_bytes == sum(map(len, self._pages.values())) <= self.capacity_bytes
