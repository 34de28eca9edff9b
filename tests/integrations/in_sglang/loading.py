"""A pytest plugin that imports SGLang from an unpacked wheel, on a machine without a GPU and most of its requirements.

Named by `-p` in the process that runs the checks of this folder. Two things stand in for what SGLang imports and these
checks never use: a `torchvision`, and the model configurations, which only serve isinstance checks.
"""

import enum
import os
import sys
import types
from pathlib import Path

__all__ = ["ROOT", "VERSION", "pytest_ignore_collect"]

ROOT = os.environ["FORESTAGE_SGLANG_ROOT"]
VERSION = os.environ["FORESTAGE_SGLANG_VERSION"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is for another version: `check_old_*` is for 0.5.13, `check_new_*` for 0.5.23."""
    other = "check_new_" if VERSION == "0.5.13" else "check_old_"
    return True if collection_path.name.startswith(other) else None


class _Configs(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"model_type": name})
        setattr(self, name, made)
        return made


class _Transforms(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda given=None, *_, **__: given


def _load() -> None:
    sys.path.insert(0, ROOT)
    # transformers asks once whether torchvision is there, and is to be told the truth.
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()
    vision = types.ModuleType("torchvision")
    transforms, functional = _Transforms("torchvision.transforms"), _Transforms("torchvision.transforms.functional")
    modes = enum.Enum("modes", "NEAREST BILINEAR BICUBIC LANCZOS")
    vision.__path__, transforms.__path__ = [], []
    for module in (transforms, functional):
        vars(module)["InterpolationMode"] = modes
    vars(transforms)["functional"] = functional
    vars(vision).update(io=_Transforms("torchvision.io"), transforms=transforms)
    sys.modules |= {module.__name__: module for module in (vision, vars(vision)["io"], transforms, functional)}

    configs = _Configs("sglang.srt.configs")
    configs.__path__ = [f"{ROOT}/sglang/srt/configs"]
    sys.modules[configs.__name__] = configs
    import sglang.srt

    vars(sglang.srt)["configs"] = configs


_load()
