"""Log records as lines: JSON for machines, words and `key=value` for people.

Law: one record is one line of JSON, whatever is in it; and no secret that is known here is in any line of either form.
Records carry their values in `extra={"fields": {...}}`.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping

__all__ = ["MASK", "JsonLines", "Lines", "TextLines"]

MASK = "****"

# Made once: json.dumps makes one for each call that asks for anything but the default.
_to_json = json.JSONEncoder(ensure_ascii=False, default=str).encode


_NUMBERS = (int, float)


class Lines(logging.Formatter):
    """What both forms share. `secrets` are masked wherever they turn up: in words, values and stack traces."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        # The longest first: one may be a part of another.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._second = -1, ""

    def mask(self, secrets: Iterable[str]) -> None:
        """Mask these, too, from now on."""
        self._secrets = sorted({*self._secrets, *filter(None, secrets)}, key=len, reverse=True)

    def masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        if not self._secrets:
            return dict(fields)
        return {name: self._value(value) for name, value in fields.items()}

    def _value(self, value: object) -> object:
        if value is None or isinstance(value, _NUMBERS):
            return value
        if isinstance(value, dict):
            return {str(name): self._value(inner) for name, inner in value.items()}
        return self.masked(str(value))

    def stack_of(self, record: logging.LogRecord) -> str:
        return self.masked(self.formatException(record.exc_info)) if record.exc_info else ""

    def time_of(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second[0]:
            self._second = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second[1]}.{int(record.msecs):03d}Z"


class JsonLines(Lines):
    """One JSON object a record: time (UTC), level, logger, message, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.time_of(record),
            "level": record.levelname,
            "logger": record.name,
            "message": self.masked(record.getMessage()),
            **self.fields_of(record),
        }
        if stack := self.stack_of(record):
            line["exception"] = stack
        return _to_json(line)


class TextLines(Lines):
    """Words, then fields as `key=value`; a stack trace follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [self.time_of(record), record.levelname, record.name, self.masked(record.getMessage())]
        for name, value in self.fields_of(record).items():
            shown = _quoted(value) if isinstance(value, str) else _to_json(value)
            parts.append(f"{name}={shown}")
        line = " ".join(parts)
        stack = self.stack_of(record)
        return f"{line}\n{stack}" if stack else line


def _quoted(text: str) -> str:
    plain = text.isprintable() and text and not any(letter in ' "=' for letter in text)
    return text if plain else _to_json(text)
