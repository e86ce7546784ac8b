"""Which model of a run folder is meant, and what its files tell of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from retrofit import runfiles
from retrofit.checkpoint import MANIFEST, load, read_manifest
from retrofit.errors import RetrofitError, nearest
from retrofit.export.folder import Target, check_target, export_model
from retrofit.export.proof import FIXTURE, TOLERANCES
from retrofit.runfiles import AA, BASELINE, read_json
from retrofit.stats import paired, t_interval


def export_run(
    run_dir: Path,
    folder: Path,
    *,
    to: Target = "retrofit",
    arm: str | None = None,
    seed: int | None = None,
    lr: float | None = None,
    ema: bool | None = None,
    dtype: str | None = None,
    finish_ramp: bool = False,
    force: bool = False,
) -> list[str]:
    """Exports a fine-tuned model of a run folder, or a model that lies in a folder of retrofit's.

    Args:
        to: see `export_model`.
        arm: None: the first that is to be judged, not the baseline.
        seed: None: the plan's first that finished.
        lr: None: the arm's best by mean validation loss over its seeds.
        ema: the moving average of the weights, or the weights that it is the average of. None: what was evaluated,
            which is the average where the recipe kept one.
        dtype: `float32`, `float16` or `bfloat16`; None keeps what was saved.
        finish_ramp: see `export_model`.

    Raises RetrofitError where there is no such finished run.
    """
    runfiles.check_free(folder, MANIFEST, force)
    if dtype is not None and dtype not in TOLERANCES:
        raise RetrofitError(f"dtype={dtype!r} is not one of {', '.join(TOLERANCES)}")
    check_target(to)
    options: dict[str, Any] = {
        "to": to,
        "dtype": dtype and getattr(torch, dtype),
        "finish_ramp": finish_ramp,
        "force": force,
    }
    if (run_dir / MANIFEST).is_file():
        _check_apart(folder, run_dir, [run_dir])
        if (arm, seed, lr, ema) != (None, None, None, None):
            raise RetrofitError(f"{run_dir} holds one model; arm, seed, lr and ema choose in a run folder")
        about = read_manifest(run_dir).get("about", {})
        model = load(run_dir)
        if (run_dir / FIXTURE).is_file():  # real images, on which it was proven before
            options["images"] = safetensors.torch.load_file(run_dir / FIXTURE)["images"]
        return export_model(model, folder, about=about, **options)
    result, others = _choose(run_dir, arm, seed, lr)
    manifest = read_json(run_dir / runfiles.MANIFEST)
    _check_apart(folder, run_dir, [run_dir / k["folder"] / w for k in manifest["plan"] for w in _WEIGHTS])
    recipe = manifest["recipe"]
    weights = runfiles.FINAL
    averaged = result.get("without_ema") is not None
    if ema and not averaged:
        raise RetrofitError(f"{result['folder']} kept no average of its weights; a recipe asks for one by train.ema")
    if averaged and ema is False:
        weights, result = runfiles.WITHOUT_EMA, {**result, **result["without_ema"]}
        others = [{**other, **other["without_ema"]} for other in others]
    told = {k: recipe["train"].get(k) for k in _TOLD}
    if recipe["train"].get("steps"):  # which stand in the place of epochs
        told.pop("epochs")
    about = {
        "base": recipe["model"]["source"],
        "base_sha256": manifest.get("weights"),
        "data": recipe["data"]["source"],
        **{k: result[k] for k in ("arm", "lr", "seed", "precision", "steps", "validation", "test")},
        "recipe": told | {"batch_size": result["batch_size"]},
        "ema": recipe["train"].get("ema") if averaged and ema is not False else None,
        "spread": _spread(others, result["arm"]),
    }
    insertion = run_dir / result["arm"] / runfiles.INSERTION
    if insertion.is_file():
        record = read_json(insertion)
        about |= {k: record[k] for k in ("init", "calibration_images", "shock")}
    return export_model(load(run_dir / result["folder"] / weights), folder, about=about, **options)


_WEIGHTS = (runfiles.FINAL, runfiles.WITHOUT_EMA)
_TOLD = ("epochs", "optimizer", "weight_decay", "warmup", "schedule", "layer_decay", "freeze", "mixup", "cutmix", "ema")
"""Keys of a recipe that the model card tells."""


def _check_apart(folder: Path, source: Path, kept: list[Path]) -> None:
    """Raises RetrofitError where writing to `folder` would replace what is exported, or what was trained beside it."""
    if folder.resolve() in [path.resolve() for path in kept]:
        raise RetrofitError(f"{folder} belongs to {source}, which is exported; name a folder of its own to write to")


def _spread(finished: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Test accuracy of an arm over its seeds, and its difference to the baseline's with the same seeds, in points."""

    def of(name: str) -> dict[int, float]:
        runs = (r for r in finished if r["arm"] == name and r["test"] is not None)
        return {r["seed"]: 100 * r["test"]["accuracy"] for r in runs}

    own, base = of(arm), of(BASELINE)
    low, high = t_interval(list(own.values())) or (None, None)
    spread: dict[str, Any] = {"seeds": len(own), "mean": sum(own.values()) / len(own), "low": low, "high": high}
    both = sorted(own.keys() & base.keys())
    if arm != BASELINE and both:
        difference = paired([own[seed] - base[seed] for seed in both])
        spread["difference"] = {k: getattr(difference, k) for k in ("n", "mean", "low", "high")}
    return spread


def _choose(
    run_dir: Path, arm: str | None, seed: int | None, lr: float | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result.json of the run that is meant, with its folder, and those of all arms at its rate and precision."""
    if not (run_dir / runfiles.MANIFEST).is_file():
        raise RetrofitError(f"{run_dir} is neither a run folder ({runfiles.MANIFEST}) nor a checkpoint ({MANIFEST})")
    plan = read_json(run_dir / runfiles.MANIFEST)["plan"]
    arms = list(dict.fromkeys(key["arm"] for key in plan))
    if arm is None:
        arm = next((a for a in arms if a not in (BASELINE, AA)), arms[0])
    if arm not in arms:
        raise RetrofitError(f"there is no arm {arm}{nearest(arm, arms)} (arms: {', '.join(arms)})")
    everyone = []
    for key in plan:
        path = run_dir / key["folder"] / runfiles.RESULT
        if path.is_file():
            result = read_json(path)
            if result["status"] == "finished":
                everyone.append({**result, "folder": key["folder"]})
    finished = [result for result in everyone if result["arm"] == arm]
    if not finished:
        diverged = [
            k["folder"] for k in plan if k["arm"] == arm and (run_dir / k["folder"] / runfiles.RESULT).is_file()
        ]
        why = "every one that ended diverged" if diverged else "`retrofit pair` goes on with them"
        raise RetrofitError(f"no run of arm {arm} in {run_dir} has finished: {why}")
    runs = Counter(r["lr"] for r in finished)
    lrs = [rate for rate, count in runs.items() if count == max(runs.values())]  # a rate half diverged is no best one

    def mean_loss(rate: float) -> float:
        losses = [r["validation"]["loss"] for r in finished if r["lr"] == rate]
        return float(sum(losses) / len(losses))

    rate = min(lrs, key=mean_loss) if lr is None else lr
    for result in finished:
        if result["lr"] == rate and (seed is None or result["seed"] == seed):
            same = {key: result[key] for key in ("lr", "precision")}
            return result, [r for r in everyone if {key: r[key] for key in same} == same]
    there = ", ".join(f"lr {r['lr']:g} seed {r['seed']}" for r in finished)
    raise RetrofitError(f"arm {arm} has no finished run with lr {rate:g} and seed {seed}; there are: {there}")
