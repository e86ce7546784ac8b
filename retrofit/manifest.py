"""run.json: what a run folder holds, how it was made, and whether what is asked for is the same study."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from retrofit import runfiles
from retrofit.checkpoint import fingerprint, versions
from retrofit.data import Splits
from retrofit.errors import RecipeError
from retrofit.recipe import Recipe, plain
from retrofit.runfiles import items, locked, read_json, table, write_json

_FREE = {"train.workers", "train.lockstep", "train.checkpoint_every", "train.trackers"}
"""Keys of a recipe that no result depends on."""


def check_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Raises RecipeError with the differing keys where the folder holds a study of another recipe."""
    earlier = _earlier(run_dir)
    if not earlier:
        return
    then, now = _flat(earlier.get("recipe", {})), _flat(runfiles.plain(plain(recipe)))
    differing = sorted(k for k in {*then, *now} if k not in _FREE and then.get(k) != now.get(k))
    if differing:
        shown = ", ".join(f"{k} ({then.get(k)} there, {now.get(k)} now)" for k in differing)
        raise RecipeError(f"{run_dir} holds a study of another recipe; take another -o. Differing: {shown}")


def check_contents(run_dir: Path, splits: Splits, original: nn.Module) -> dict[str, Any]:
    """What identifies images and weights. Raises RecipeError where the folder holds a study of others."""
    found = {name: getattr(splits, name) for name in ("train", "validation", "test")}
    data = {name: {"images": len(images), "sha256": images.fingerprint()} for name, images in found.items()}
    weights = fingerprint(original.state_dict())
    earlier = _earlier(run_dir)
    then = table(earlier.get("data"))
    changed = [name for name, now in data.items() if then.get(name, now) != now]
    if changed:
        raise RecipeError(
            f"{run_dir} holds a study of other images: {', '.join(changed)} has changed since; take another -o"
        )
    if earlier.get("weights", weights) != weights:
        raise RecipeError(f"{run_dir} holds a study of other weights: the model has changed since; take another -o")
    return {"classes": splits.classes, "data": data, "weights": weights}


def write_manifest(run_dir: Path, recipe: Recipe, contents: Mapping[str, Any], command: list[str]) -> None:
    """Writes run.json. How the folder was begun stays; each later command is added, with what was other than then.

    Args:
        contents: what `check_contents` returned.
    """
    with locked(run_dir, wait=True):
        earlier, now = _earlier(run_dir), _environment()
        began = table(earlier.get("environment")) or now
        when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        later = {"at": when, "command": command, "other": {k: v for k, v in now.items() if began.get(k) != v}}
        manifest = {
            "version": earlier.get("version", now["retrofit"]),
            "created": earlier.get("created", when),
            "command": earlier.get("command", command),
            "continued": [*items(earlier.get("continued")), *([later] if earlier else [])],
            "recipe": plain(recipe),
            "plan": recipe.plan(),
            "unmatched": {name: arm.train for name, arm in recipe.arms.items() if arm.train},
            **contents,
            "environment": began,
        }
        write_json(run_dir / runfiles.MANIFEST, manifest)


def _earlier(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / runfiles.MANIFEST
    return table(read_json(path)) if path.is_file() else {}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}{key}.").items()}
    return {path.rstrip("."): value}


def _environment() -> dict[str, Any]:
    device = PartialState().device
    return {
        "python": platform.python_version(),
        **versions(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
