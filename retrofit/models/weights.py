"""The weights in a folder, whatever file they came in. Nothing that is read runs code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from retrofit.errors import ModelError

_NAMES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_SUFFIXES = (".safetensors", ".pth", ".pth.tar", ".pt", ".bin")
"""In order of preference; the first that stands for one file is taken."""
_WRAPPED = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Under which of these a training script keeps its weights: as timm reads them, a moving average before all others."""
_PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name, one around the other too."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The state dict of a folder: one file, or the shards that an index names; without a wrapper's prefixes.

    Raises ModelError where there is none, or where it holds more than tensors.
    """
    state: dict[str, Tensor] = {}
    for path in _files(folder):
        state |= _read(path)
    return without_prefixes(state)


def without_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without a prefix that all of them have. What stands inside a name, or before some names only, stays."""
    state = dict(state)
    while state:
        common = next((p for p in _PREFIXES if all(name.startswith(p) for name in state)), None)
        if common is None:
            break
        state = {name.removeprefix(common): tensor for name, tensor in state.items()}
    return state


def _files(folder: Path) -> list[Path]:
    for index in (*sorted(folder.glob("*.safetensors.index.json")), *sorted(folder.glob("*.bin.index.json"))):
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"{index} is no index of weights") from None
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} is not whole: {missing[0]}, which {index.name} names, is missing")
        return [folder / name for name in names]
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
    for suffix in _SUFFIXES:
        found = sorted(p for p in folder.glob(f"*{suffix}") if not p.name.startswith("."))
        if len(found) == 1:
            return found
        if found:
            listed = ", ".join(p.name for p in found)
            raise ModelError(f"{folder} holds several {suffix} files ({listed}); name the weights {_NAMES[0]}")
    raise ModelError(
        f"{folder} holds no weights: {_NAMES[0]}, an index of shards, or a {', '.join(_SUFFIXES[1:])} file"
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} is damaged, or holds more than plain tensors: {reason}") from error
    if isinstance(content, dict):
        content = next((content[key] for key in _WRAPPED if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
        raise ModelError(f"{path} holds no state dict")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
