"""The commands that take token ids: prefetch, lookup and hash."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forestage.cli.main import main
from forestage_client.hashing import HashScheme, LoraAdapter
from support.configs import write_config
from support.running import Running, running

TOKENS = list(range(500, 570))
SGLANG, VLLM = HashScheme("sglang", 16), HashScheme("vllm-sha256-cbor", 16, seed="0")
MODEL_OF_VLLM = """
[[models]]
name = "v"
page_tokens = 16
hash = {scheme = "vllm-sha256-cbor", seed = "0"}
[[models.components]]
name = "kv"
bytes = 4096
slots = 4
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tokens")
    with running(write_config(folder, more=MODEL_OF_VLLM, scheme="sglang")) as service:
        yield service
        assert service.stop() == 0


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def _run(capsys: Captured, service: Running, command: str, *words: str) -> tuple[int, str, str]:
    code = main([command, "--url", service.url, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_hash(service: Running, capsys: Captured, tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _run(capsys, service, "hash", "--model", "m", "--tokens", tokens)
    assert plain == (0, "".join(f"{key.hex()}\n" for key in SGLANG.keys_of(TOKENS)), "")
    words = ["--model", "m", "--tokens", tokens, "--extra-key", "e", "--cache-salt", "s", "--lora", "l", "--json"]
    shown = json.loads(_run(capsys, service, "hash", *words)[1])
    expected = SGLANG.keys_of(TOKENS, extra_key="e", cache_salt="s", lora="l")
    assert (shown["scheme"], shown["keys"]) == ("sglang", [key.hex() for key in expected])
    monkeypatch.setattr(sys, "stdin", io.StringIO(" ".join(map(str, TOKENS))))
    words = ["--model", "v", "--tokens", "-", "--lora", "l", "--lora-path", "p"]
    adapted = [key.hex() for key in VLLM.keys_of(TOKENS, lora=LoraAdapter("l", "p"))]
    assert _run(capsys, service, "hash", *words)[1].split() == adapted


def test_lookup_and_prefetch(service: Running, capsys: Captured, tokens: str) -> None:
    code, out, _ = _run(capsys, service, "lookup", "--model", "m", "--tokens", tokens, "--json")
    assert (code, json.loads(out)["pages"]["requested"]) == (0, 4)
    code, out, _ = _run(capsys, service, "prefetch", "--model", "v", "--tokens", tokens, "--json")
    assert (code, json.loads(out)["shortfall"]) == (4, {"not_stored": 4})


def test_what_makes_no_sense(service: Running, capsys: Captured, tokens: str, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("one two")
    for command, *words in (
        ("hash",),
        ("hash", "--tokens", str(tmp_path / "missing")),
        ("hash", "--tokens", str(tmp_path / "words")),
        ("hash", "--tokens", tokens, "--lora-path", "p"),
        ("lookup", "--tokens", tokens, "ab" * 32),
        ("lookup", "--extra-key", "e", "ab" * 32),
        ("lookup", "--tokens", tokens, "--lora", "l", "--lora-path", "p"),
    ):
        code, out, errors = _run(capsys, service, command, "--model", "m", *words)
        assert (code, out, len(errors.splitlines())) == (2, "", 1), words
