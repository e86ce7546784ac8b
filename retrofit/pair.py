"""A study: plans arms x seeds x learning rates, runs what is missing, and asserts that the arms of a pair match."""

from __future__ import annotations

import copy
import datetime
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from tqdm import tqdm

from retrofit import runfiles
from retrofit.checkpoint import load_model, versions
from retrofit.data import Images, Splits, eval_batches, open_splits
from retrofit.errors import PairMismatch, RecipeError, RetrofitError
from retrofit.models import family_of
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import Recipe, dump, plain
from retrofit.runfiles import RunKey, read_json, read_jsonl, write_json, write_text
from retrofit.surgery import Insertion, insert_qk_norm, insert_same
from retrofit.train import steps_of, train_lockstep


@dataclass(frozen=True)
class Study:
    """All that the runs of a plan have in common."""

    recipe: Recipe
    run_dir: Path
    splits: Splits
    preprocess: Preprocess
    original: nn.Module
    """The checkpoint as it is, with its own head."""


def run_pair(
    recipe: Recipe,
    run_dir: Path,
    *,
    shard: tuple[int, int] = (1, 1),
    force: bool = False,
    command: list[str] | None = None,
) -> bool:
    """Trains every run of the recipe's plan that `run_dir` does not hold yet; False where the shard holds no run.

    Args:
        shard: (I, N) trains only the I-th of N parts, whole pairs together.
        force: lets a folder that holds other things be written to.
        command: recorded in run.json.

    Raises:
        RecipeError: where the folder holds a study of another recipe.
        PairMismatch: where two arms of a pair did not see the same images in the same order.
        RetrofitError: for a model, data set or precision that cannot be had.
    """
    mine = _part(recipe.plan(), shard)
    if not mine:
        return False
    _check_machine(recipe)
    runfiles.check_free(run_dir, runfiles.MANIFEST, force)
    _check_same(recipe, run_dir)
    study = _open(recipe, run_dir)
    runfiles.claim(run_dir, runfiles.MANIFEST, force)
    missing = [key for key in mine if not (run_dir / key.folder / runfiles.RESULT).is_file()]
    manifest = _manifest(study, command or [])
    if missing:
        write_text(run_dir / runfiles.RECIPE, dump(recipe))
        write_json(run_dir / runfiles.MANIFEST, manifest)
        insertions = {name: _insert(study, name) for name, arm in recipe.arms.items() if arm.qk_norm is not None}
        _train(study, missing, insertions)
    check_matched(run_dir, recipe.plan())
    return True


def describe_plan(recipe: Recipe) -> str:
    """The resolved recipe and what it will train, without loading a model."""
    splits = open_splits(recipe.data)
    plan, steps = recipe.plan(), steps_of(recipe.train, len(splits.train))
    sizes = ", ".join(f"{n} {len(getattr(splits, n))}" for n in ("train", "validation", "test"))
    runs = "\n".join(f"  {key.folder}" for key in plan)
    return (
        f"{dump(recipe)}\nimages: {sizes}\nclasses: {len(splits.classes)}\n{len(plan)} runs of {steps} steps:\n{runs}"
    )


def check_matched(run_dir: Path, plan: list[RunKey]) -> None:
    """Raises PairMismatch unless the finished arms of each pair saw the same batches at the same learning rates."""
    for _, keys in groupby(plan, key=lambda k: (k.precision, k.seed, k.lr)):
        results = {key: run_dir / key.folder / runfiles.RESULT for key in keys}
        seen = {key: _seen(run_dir, key) for key, result in results.items() if result.is_file()}
        for key, other in combinations(seen, 2):
            # A run that diverged is shorter; the steps that both took must be the same.
            at = next((i for i, (a, b) in enumerate(zip(seen[key], seen[other], strict=False)) if a != b), None)
            if at is not None:
                raise PairMismatch(
                    f"{key.folder} and {other.folder} differ in images, epoch or learning rate at step {at}; "
                    "remove both and run again"
                )


def _seen(run_dir: Path, key: RunKey) -> list[tuple[Any, ...]]:
    """What a finished run was given at each step. Raises PairMismatch where its metrics are not whole."""
    rows = read_jsonl(run_dir / key.folder / runfiles.METRICS)
    result = read_json(run_dir / key.folder / runfiles.RESULT)
    ended = result.get("diverged_at")
    steps = result.get("steps", 0) if ended is None else min(ended + 1, result.get("steps", 0))
    if len(rows) != steps:
        raise PairMismatch(f"{key.folder} has {len(rows)} rows of metrics for {steps} steps; remove it and run again")
    return [tuple(row.get(name) for name in ("step", "epoch", "lr", "ids")) for row in rows]


def _open(recipe: Recipe, run_dir: Path) -> Study:
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


def _insert(study: Study, name: str) -> Insertion:
    """Calibrates one arm's norms on a copy of the checkpoint as it is, and records shock and calibration."""
    arm = study.recipe.arms[name]
    assert arm.qk_norm is not None
    data = study.recipe.data
    calibration = study.splits.train.take(data.calibration_images, "calibration")
    held_out = _held_out(study)
    insertion = insert_qk_norm(
        copy.deepcopy(study.original),
        arm.qk_norm,
        images=_pixels(calibration, study.preprocess),
        init=arm.init,
        held_out=_pixels(held_out, study.preprocess),
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
        "shock": {init: shock.document() for init, shock in insertion.shock.items()},
    }
    write_json(study.run_dir / name / runfiles.INSERTION, record)
    return insertion


def _train(study: Study, missing: list[RunKey], insertions: dict[str, Insertion]) -> None:
    recipe = study.recipe
    steps = steps_of(recipe.train, len(study.splits.train))
    probe_images = list(_pixels(_held_out(study), study.preprocess))
    bar = tqdm(
        total=steps * len(missing),
        unit="step",
        smoothing=0.05,
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 15.0,  # a log file wants a line now and then
    )

    def tick(words: str) -> None:
        bar.set_postfix_str(words, refresh=False)
        bar.update()

    with bar:
        for (_, seed, _), keys in groupby(missing, key=lambda k: (k.precision, k.seed, k.lr)):
            base = _with_head(study, seed)
            models = {}
            for key in keys:
                model = copy.deepcopy(base)
                before = _size(model)
                if key.arm in insertions:
                    insert_same(model, insertions[key.arm])
                models[key] = (model, _size(model) - before)
            with ExitStack() as locks:
                for key in models:
                    locks.enter_context(runfiles.locked(study.run_dir / key.folder))
                train_lockstep(recipe, models, study.splits, study.preprocess, probe_images, study.run_dir, tick)


def _with_head(study: Study, seed: int) -> nn.Module:
    """The checkpoint with a head for the data's classes: its own where they are the same by name, else a fresh one."""
    family, classes = family_of(study.original), study.splits.classes
    if study.recipe.model.pretrained and family.labels(study.original) == classes:
        return copy.deepcopy(study.original)
    model = _load(study.recipe, len(classes), seed)
    family.set_labels(model, classes)
    return model


def _held_out(study: Study) -> Images:
    return study.splits.validation.take(study.recipe.data.held_out_images, "held out")


def _pixels(images: Images, preprocess: Preprocess) -> Iterator[Tensor]:
    return (batch.pixels for batch in eval_batches(images, preprocess, 64))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _part(plan: list[RunKey], shard: tuple[int, int]) -> list[RunKey]:
    """The keys of one shard: pair number I of every N, with all its arms."""
    pairs = [list(keys) for _, keys in groupby(plan, key=lambda k: (k.precision, k.seed, k.lr))]
    return [key for i, keys in enumerate(pairs) if i % shard[1] == shard[0] - 1 for key in keys]


def _check_machine(recipe: Recipe) -> None:
    if "fp16" in recipe.train.precision and PartialState().device.type == "cpu":
        raise RetrofitError(
            "train.precision: fp16 needs a GPU (accelerate computes float32 on a CPU); take bf16 or fp32"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RetrofitError("several processes are not supported yet; run `retrofit pair` in one, or use --shard I/N")


def _check_same(recipe: Recipe, run_dir: Path) -> None:
    """Raises RecipeError with the differing keys where the folder holds a study of another recipe."""
    if not (run_dir / runfiles.MANIFEST).is_file():
        return
    manifest = read_json(run_dir / runfiles.MANIFEST)
    earlier = _flat(manifest.get("recipe", {})) if isinstance(manifest, dict) else {}
    now = _flat(runfiles.plain(plain(recipe)))
    free = {"train.workers", "train.lockstep", "train.checkpoint_every"}
    differing = sorted(k for k in {*earlier, *now} - free if earlier.get(k) != now.get(k))
    if differing:
        shown = ", ".join(f"{k} ({earlier.get(k)} there, {now.get(k)} now)" for k in differing[:8])
        raise RecipeError(f"{run_dir} holds a study of another recipe; take another -o. Differing: {shown}")


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}{key}.").items()}
    return {path.rstrip("."): value}


def _manifest(study: Study, command: list[str]) -> dict[str, Any]:
    """run.json. Raises RecipeError where the folder holds a study of other images."""
    splits = {n: getattr(study.splits, n) for n in ("train", "validation", "test")}
    path = study.run_dir / runfiles.MANIFEST
    data = {n: {"images": len(images), "sha256": images.fingerprint()} for n, images in splits.items()}
    earlier = read_json(path) if path.is_file() else {}
    changed = [n for n, now in data.items() if now != earlier.get("data", data).get(n)]
    if changed:
        raise RecipeError(
            f"{study.run_dir} holds a study of other images: {', '.join(changed)} has changed since; take another -o"
        )
    created = earlier.get("created")
    return {
        "version": versions()["retrofit"],
        "created": created or datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "recipe": plain(study.recipe),
        "plan": study.recipe.plan(),
        "classes": study.splits.classes,
        "data": data,
        "environment": {
            "python": platform.python_version(),
            **versions(),
            "platform": platform.platform(),
            "device": _device_name(),
            "cpu": _cpu_name(),
            "cpu_threads": torch.get_num_threads(),
        },
    }


def _device_name() -> str:
    device = PartialState().device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cpu_name() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
