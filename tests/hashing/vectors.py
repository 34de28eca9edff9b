"""The hash vectors of the samples: what the engines themselves computed (tests/data/README.md)."""

import json
from dataclasses import dataclass
from typing import Any

from forestage_client.hashing import HashScheme, LoraAdapter, MmItem, PageHasher, SchemeName, SglangHasher
from support.manifests import DATA

__all__ = ["RAW", "SGLANG", "VLLM", "Vector"]

RAW: dict[str, Any] = json.loads((DATA / "hash-vectors.json").read_text())


@dataclass(frozen=True)
class Vector:
    """One vector: inputs, and the page keys in order."""

    id: str
    scheme: HashScheme
    tokens: list[int]
    keys: list[bytes]
    inputs: dict[str, Any]
    prior: bytes | None = None

    def hasher(self) -> PageHasher:
        """Begin the chain of the vector."""
        if self.prior is not None:
            return SglangHasher(self.scheme.page_tokens, prior=self.prior, old=self.scheme.name == "sglang-old")
        return self.scheme.hasher(**self.inputs)

    def body(self) -> dict[str, Any]:
        """Return what a request says of the prompt beside its token ids."""
        body = {name: value for name, value in self.inputs.items() if value is not None}
        if isinstance(lora := body.get("lora"), LoraAdapter):
            body["lora"] = {"name": lora.name, "path": lora.path}
        if "mm" in body:
            body["mm"] = [{"identifier": i.identifier, "offset": i.offset, "length": i.length} for i in body["mm"]]
        return body


def _sglang(raw: dict[str, Any]) -> Vector:
    scheme = HashScheme(
        "sglang-old" if raw["version"] == "0.5.13" else "sglang", raw["page_tokens"], bigram=raw.get("bigram", False)
    )
    inputs: dict[str, Any] = {name: raw[name] for name in ("extra_key", "cache_salt") if name in raw}
    prior = bytes.fromhex(raw["prior"]) if raw.get("prior") else None
    return Vector(raw["id"], scheme, raw["tokens"], list(map(bytes.fromhex, raw["page_keys"])), inputs, prior)


def _vllm(raw: dict[str, Any]) -> Vector:
    name: SchemeName = "vllm-xxhash-cbor" if raw["algorithm"] == "xxhash_cbor" else "vllm-sha256-cbor"
    scheme = HashScheme(name, raw["block_tokens"], seed=raw["PYTHONHASHSEED"])
    inputs: dict[str, Any] = {"cache_salt": raw.get("cache_salt")}
    if "lora" in raw:
        inputs["lora"] = LoraAdapter(**raw["lora"])
    if "mm" in raw:
        inputs["mm"] = [MmItem(**item) for item in raw["mm"]]
    return Vector(raw["id"], scheme, raw["tokens"], list(map(bytes.fromhex, raw["block_hashes"])), inputs)


SGLANG = [_sglang(raw) for raw in RAW["sglang"]["vectors"]]
VLLM = [_vllm(raw) for raw in RAW["vllm"]["vectors"]]
