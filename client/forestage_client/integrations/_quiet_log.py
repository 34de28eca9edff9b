"""Warnings that are the same again and again, said once in a while."""

import logging

__all__ = ["QuietLog"]


class QuietLog:
    """Passes each text on at most once in `every_s` seconds; threads that race may say one twice."""

    def __init__(self, logger: logging.Logger, every_s: float = 60.0) -> None:
        self._logger = logger
        self._every_s = every_s
        self._said: dict[str, float] = {}

    def tell(self, text: str, now: float, error: BaseException | None = None) -> None:
        """Log a warning, with the traceback of `error` where there is one, unless it was said a short while ago."""
        last = self._said.get(text)
        if last is not None and now - last < self._every_s:
            return
        if len(self._said) >= 256:
            self._said.clear()
        self._said[text] = now
        self._logger.warning(text, exc_info=error)
