"""The sample L3 directories and what is expected of them (tests/data/README.md)."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forestage.core.layout import Component, Covers, HicacheNaming, ModelLayout

__all__ = ["DATA", "Sample", "payload"]

DATA = Path(__file__).resolve().parent.parent / "data"


def payload(key: str, component: str, rank: int, size: int) -> bytes:
    """Recompute a payload by the samples' rule."""
    names = (f"forestage-sample-v1|{key}|{component}|{rank}|{i}" for i in range(-(-size // 32)))
    return b"".join(hashlib.sha256(name.encode()).digest() for name in names)[:size]


@dataclass(frozen=True)
class Sample:
    """One sample directory with its manifest."""

    name: str
    manifest: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> "Sample":
        return cls(name, json.loads((DATA / name / "manifest.json").read_text()))

    @property
    def root(self) -> Path:
        return DATA / self.name / "l3"

    def cases(self) -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = self.manifest["cases"]
        return cases

    def case(self, case_id: str) -> dict[str, Any]:
        return next(case for case in self.cases() if case["id"] == case_id)

    def layout(self, pool_slots: dict[str, int] | None = None) -> ModelLayout:
        model = self.manifest["model"]
        components = tuple(
            Component(
                c["name"],
                c["bytes"],
                shards=model["shards"],
                covers=Covers(c["covers"]),
                window=c.get("window", 0),
                slots=(pool_slots or {}).get(c["name"]),
            )
            for c in model["components"]
        )
        naming = HicacheNaming(model["name"], self.manifest["tp_size"], mla=self.manifest["is_mla_model"])
        return ModelLayout(
            model["name"], model["page_tokens"], components, model["shards"], model["dtype"], model["layout"], naming
        )

    def keys(self, request: dict[str, Any]) -> list[str]:
        """The page keys that a case asks for."""
        keys: list[str] = self.manifest["chains"][request["chain"]]["keys"][: request["first_pages"]]
        unknown: list[str] = self.manifest["unknown_keys"][: request.get("then_unknown", 0)]
        return keys + unknown
