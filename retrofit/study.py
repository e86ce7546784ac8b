"""What the runs of a plan have in common: images, the checkpoint, and each arm's model made of it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from retrofit import runfiles
from retrofit.checkpoint import file_hash, load_model
from retrofit.data import Images, Splits, eval_batches, keyed_seed, open_splits
from retrofit.errors import RetrofitError
from retrofit.models import family_of
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import AA, Recipe
from retrofit.runfiles import RunKey, read_json, table, write_json
from retrofit.surgery import insert_qk_norm, insert_same


@dataclass(frozen=True)
class Study:
    """All that the runs of a plan have in common."""

    recipe: Recipe
    run_dir: Path
    splits: Splits
    preprocess: Preprocess
    original: nn.Module
    """The checkpoint as it is, with its own head."""


def open_study(recipe: Recipe, run_dir: Path) -> Study:
    """Opens images and checkpoint. Raises RetrofitError for what cannot be had."""
    splits = open_splits(recipe.data)
    original = _load(recipe, None, seed=recipe.train.seeds[0])
    return Study(recipe, run_dir, splits, family_of(original).preprocess(original), original)


def _load(recipe: Recipe, num_classes: int | None, seed: int) -> nn.Module:
    rate = recipe.train.drop_path
    model = load_model(
        recipe.model.source,
        num_classes,
        image_size=recipe.data.image_size,
        seed=seed,
        model_args={**recipe.model.model_args, **({} if rate is None else {"drop_path_rate": rate})},
        pretrained=recipe.model.pretrained,
    )
    drops = any("droppath" in type(m).__name__.lower() and getattr(m, "drop_prob", 0) for m in model.modules())
    if rate and not drops:
        raise RetrofitError(f"train.drop_path: {type(model).__name__} has no drop path; leave it out")
    return model


def norms_of(study: Study, name: str) -> dict[str, Tensor]:
    """One arm's norms, calibrated once in a run folder: every run of the arm, in whatever process, starts from them."""
    folder = study.run_dir / name
    with runfiles.locked(folder, wait=True):
        record = read_json(folder / runfiles.INSERTION) if (folder / runfiles.INSERTION).is_file() else {}
        kept = folder / runfiles.NORMS
        if kept.is_file() and file_hash(kept) == table(record).get("norms"):
            return load_file(kept)
        return _calibrated(study, name)


def _calibrated(study: Study, name: str) -> dict[str, Tensor]:
    """Calibrates an arm's norms on a copy of the checkpoint as it is, and writes them, with shock and calibration."""
    arm = study.recipe.arms[name]
    assert arm.qk_norm is not None
    data = study.recipe.data
    calibration = study.splits.train.take(data.calibration_images, "calibration")
    held_out = _held_out(study)
    insertion = insert_qk_norm(
        copy.deepcopy(study.original),
        arm.qk_norm,
        images=pixels_of(calibration, study.preprocess),
        init=arm.init,
        held_out=pixels_of(held_out, study.preprocess),
    )
    record = {
        "arm": name,
        "formula": arm.qk_norm.describe(),
        "qk_norm": arm.qk_norm,
        "init": arm.init,
        "sites": len(insertion.sites),
        "skipped": insertion.skipped,
        "calibration_images": len(calibration),
        "held_out_images": len(held_out),
        "layers": insertion.layers,
        "remarks": insertion.remarks,
        "shock": {init: shock.document() for init, shock in insertion.shock.items()},
    }
    content = safetensors.torch.save(insertion.norms, {"format": "pt"})
    runfiles.write_bytes(study.run_dir / name / runfiles.NORMS, content)
    record["norms"] = hashlib.sha256(content).hexdigest()
    write_json(study.run_dir / name / runfiles.INSERTION, record)
    return insertion.norms


def with_head(study: Study, seed: int) -> nn.Module:
    """The checkpoint with a head for the data's classes: its own where they are the same by name, else a fresh one."""
    family, classes = family_of(study.original), study.splits.classes
    if study.recipe.model.pretrained and family.labels(study.original) == classes:
        return copy.deepcopy(study.original)
    model = _load(study.recipe, len(classes), seed)
    family.set_labels(model, classes)
    return model


def arm_model(
    base: nn.Module, recipe: Recipe, key: RunKey, norms: Mapping[str, Mapping[str, Tensor]]
) -> tuple[nn.Module, int]:
    """An arm's model, ready to train, and how many parameters its norms added.

    Args:
        norms: of each arm that has a norm, as `norms_of` gives them.
    """
    model = copy.deepcopy(base)
    spec = recipe.arm_of(key.arm).qk_norm
    if spec is not None:
        insert_same(model, spec, norms[key.arm])
    if key.arm == AA:
        _nudge(model, key.seed)
    return model, _size(model) - _size(base)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int, by: float = 1e-6) -> None:
    """Multiplies every weight by 1 + `by` * N(0, 1), keyed by the seed; what is 0, such as a fresh bias, stays 0."""
    generator = torch.Generator().manual_seed(keyed_seed("aa", seed))
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.mul_(1 + by * noise.to(weight.device))


def _held_out(study: Study) -> Images:
    return study.splits.validation.take(study.recipe.data.held_out_images, "held out")


def pixels_of(images: Images, preprocess: Preprocess) -> Iterator[Tensor]:
    """Preprocessed batches, [B, 3, H, W]."""
    return (batch.pixels for batch in eval_batches(images, preprocess, 64))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
