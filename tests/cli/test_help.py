"""Every command explains itself, and refuses what makes no sense with exit code 2."""

import argparse
from collections.abc import Iterator

import pytest

from forestage import __version__
from forestage.cli.main import _parser, main


def _parsers(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _parsers(inner, (*words, name))


COMMANDS = list(_parsers(_parser()))


def _exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_contracts_commands_are_there() -> None:
    expected = {"serve", "config", "prefetch", "lookup", "hash", "status", "pool", "l3"}
    assert {words[0] for words in COMMANDS if words} >= expected
    assert ("l3", "put") in COMMANDS


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words) or "forestage") for words in COMMANDS])
def test_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(*words, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {' '.join(('forestage', *words))}")
    assert "exit codes:" in said
    if words:
        assert f"example:\n  {' '.join(('forestage', *words[:1]))}" in said or "example:\n  FORESTAGE_" in said
    assert all(len(line) <= 110 for line in said.splitlines())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--version") == 0
    assert capsys.readouterr().out == f"forestage {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("unknown",),
        ("serve", "--grace", "-1"),
        ("serve", "--grace", "soon"),
        ("serve", "--grace", "nan"),
        ("serve", "--log-level", "loud"),
        ("prefetch",),
        ("prefetch", "--model", "m", "--device-pages", "many"),
        ("l3",),
        ("l3", "put", "--config", "c"),
    ],
)
def test_bad_command_lines(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(*words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: forestage")
    assert "Traceback" not in errors
