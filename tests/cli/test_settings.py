"""`forestage config`: what is in effect, without secrets; and what is said when it is wrong."""

import os
import tomllib
from pathlib import Path

import pytest

from forestage.cli.main import main
from support.configs import write_config

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("FORESTAGE_"):
            monkeypatch.delenv(name)


def test_what_is_in_effect(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"storage.redis": 'url = "rediss://user:pa55word@cache:6379/0"'}
    config = write_config(tmp_path, **sections)  # type: ignore[arg-type]
    monkeypatch.setenv("FORESTAGE_POOL__BYTES", "32Mi")
    assert main(["config", "--config", str(config)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "pa55word" not in said.out
    shown = tomllib.loads(said.out)
    assert shown["pool"]["bytes"] in ("32MiB", 32 << 20)
    assert shown["storage"]["redis"]["url"].startswith("rediss://user:")
    assert shown["storage"]["redis"]["url"].endswith("@cache:6379/0")
    assert shown["models"][0]["components"][0]["slots"] == 64


def test_what_is_printed_is_a_configuration_again(tmp_path: Path, capsys: Captured) -> None:
    config = write_config(tmp_path, states=4)
    assert main(["config", "--config", str(config)]) == 0
    said = capsys.readouterr().out
    config.write_text(said)
    assert main(["config", "--config", str(config)]) == 0
    assert capsys.readouterr().out == said


def test_one_line_a_mistake(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, pool='pni = "none"')
    monkeypatch.setenv("FORESTAGE_POOL__BYTES", "lots")
    monkeypatch.setenv("FORESTAGE_SERVER__PRT", "1")
    monkeypatch.setenv("FORESTAGE_STORAGE__REDIS__URL", "http://:pa55word@h")
    assert main(["config", "--config", str(config)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "pa55word" not in said.err
    lines = said.err.splitlines()
    assert all(line.startswith("forestage: ") for line in lines)
    named = {line.split()[1].rstrip(":,") for line in lines}
    assert named == {"pool.pni", "pool.bytes", "FORESTAGE_SERVER__PRT", "storage.redis.url"}


def test_no_file_at_all(capsys: Captured) -> None:
    assert main(["config"]) == 2  # no model
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("forestage: models: ")
