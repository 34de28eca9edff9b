"""Records as lines: one each, with their values, and never with a secret."""

import json
import logging
import sys
from types import TracebackType

from hypothesis import given
from hypothesis import strategies as st

from config.toml_files import MINIMAL, load_text, mistakes_of
from forestage.config import StorageConfig, render
from forestage.config.secrets import secrets_of
from forestage.observe.log_lines import JsonLines, TextLines

_Caught = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


def _record(message: str, fields: dict[str, object] | None = None, caught: _Caught | None = None) -> logging.LogRecord:
    record = logging.LogRecord("forestage.test", logging.INFO, __file__, 1, "%s", (message,), caught)
    record.created, record.msecs = 0.25, 250.0
    if fields is not None:
        record.fields = fields
    return record


def test_a_line_of_json() -> None:
    line = JsonLines().format(_record("it ended", {"request_id": "r", "ms": {"total": 1.5}, "none": None}))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "INFO",
        "logger": "forestage.test",
        "message": "it ended",
        "request_id": "r",
        "ms": {"total": 1.5},
        "none": None,
    }


def test_a_line_of_text() -> None:
    line = TextLines().format(_record("it ended", {"id": "r", "why": "two words", "empty": "", "ms": {"total": 1}}))
    assert line == (
        '1970-01-01T00:00:00.250Z INFO forestage.test it ended id=r why="two words" empty="" ms={"total": 1}'
    )


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.dictionaries(st.text(), st.text())))
def test_whatever_is_in_it_json_stays_one_line(message: str, fields: dict[str, object]) -> None:
    line = JsonLines().format(_record(message, fields))
    assert len(line.splitlines()) == 1 or not any(end in line for end in "\r\n")
    assert json.loads(line).keys() >= fields.keys()


def test_secrets_are_masked_wherever_they_are() -> None:
    config = load_text(
        '[storage.redis]\nurl = "redis://me:p%40ss@host:6379/0?password=que%2Bry"' + MINIMAL,
    )
    secrets = secrets_of(config)
    assert secrets == {"p%40ss", "p@ss", "que%2Bry", "que+ry"}
    try:
        raise ValueError("cannot reach redis://me:p%40ss@host")
    except ValueError:
        caught = sys.exc_info()
    fields: dict[str, object] = {"url": "redis://me:p@ss@host", "deep": {"why": "que+ry"}, "number": 5}
    for form in (JsonLines(secrets), TextLines(secrets)):
        line = form.format(_record("tried p@ss and que%2Bry", fields, caught))
        assert not [secret for secret in secrets if secret in line]
        assert line.count("****") == 6  # a stack trace shows the line that raised as well
        assert "ValueError" in line


def test_the_secrets_of_every_storage_are_known() -> None:
    sections = [field.alias or name for name, field in StorageConfig.model_fields.items()]
    with_url = [
        section
        for section, field in zip(sections, StorageConfig.model_fields.values(), strict=True)
        if "url" in getattr(field.annotation, "model_fields", {})
    ]
    assert len(with_url) > 1
    for section in with_url:
        secret = f"s3cret-{section}"
        config = load_text(f'[storage.{section}]\nurl = "redis://me:{secret}@host:6379/0"' + MINIMAL)
        assert secret in secrets_of(config)
        assert secret not in render(config)
        assert secret not in repr(config)
        assert not [line for line in mistakes_of(f'[storage.{section}]\nurl = "{secret}"' + MINIMAL) if secret in line]


def test_one_secret_in_another_leaves_nothing_of_either() -> None:
    line = TextLines({"abc", "abcdef"}).format(_record("abcdef abc"))
    assert line.endswith(" **** ****")
