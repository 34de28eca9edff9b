"""Hashing needs the standard library alone, and says what xxhash_cbor needs where xxhash is not installed."""

import subprocess
import sys
from pathlib import Path

import forestage_client

_WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
from forestage_client.hashing import HashScheme
print(len(HashScheme("sglang", 4).keys_of(range(8))), len(HashScheme("vllm-sha256-cbor", 4).keys_of(range(8))))
try:
    HashScheme("vllm-xxhash-cbor", 4, seed="0")
except ModuleNotFoundError as error:
    print(error, "|", error.name)
"""


def _run(code: str) -> list[str]:
    path = str(Path(forestage_client.__file__).parent.parent)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_extra_is_named() -> None:
    assert _run(_WITHOUT_XXHASH) == [
        "2 2",
        'xxhash_cbor needs the package xxhash: pip install "forestage[serve]" | xxhash',
    ]


def test_nothing_heavy_is_loaded() -> None:
    code = "import forestage_client.hashing; print(*sys.modules)"
    loaded = set(_run(code)[0].split())
    assert not loaded & {"httpx2", "msgpack", "xxhash", "numpy", "torch", "asyncio", "socket", "pydantic", "forestage"}
