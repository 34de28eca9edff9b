"""Tells what happens to several who count or write it down, in their order."""

from collections.abc import Sequence

from forestage.core.job import Job
from forestage.prefetch.service import JobObserver
from forestage.storage.wrap import StorageObserver

__all__ = ["JobObservers", "StorageObservers"]


class JobObservers:
    """One JobObserver for several."""

    def __init__(self, observers: Sequence[JobObserver]) -> None:
        self._observers = observers

    def job_finished(self, job: Job) -> None:
        for observer in self._observers:
            observer.job_finished(job)


class StorageObservers:
    """One StorageObserver for several."""

    def __init__(self, observers: Sequence[StorageObserver]) -> None:
        self._observers = observers

    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        for observer in self._observers:
            observer.storage_read(pages, num_bytes, seconds)

    def storage_error(self, kind: str, count: int) -> None:
        for observer in self._observers:
            observer.storage_error(kind, count)

    def storage_up(self, is_up: bool) -> None:
        for observer in self._observers:
            observer.storage_up(is_up)
