"""Page keys from token ids, as the engines compute them: SGLang's page hashes and vLLM's block hashes.

Importing it loads nothing outside the standard library; only the scheme `vllm-xxhash-cbor` needs the package xxhash.
"""

from forestage_client.hashing.chain import PageHasher
from forestage_client.hashing.prompt import LoraAdapter, MmItem, Prompt
from forestage_client.hashing.scheme import SCHEME_NAMES, HashScheme, SchemeName
from forestage_client.hashing.sglang import SglangHasher
from forestage_client.hashing.vllm import VllmHasher

__all__ = [
    "SCHEME_NAMES",
    "HashScheme",
    "LoraAdapter",
    "MmItem",
    "PageHasher",
    "Prompt",
    "SchemeName",
    "SglangHasher",
    "VllmHasher",
]
