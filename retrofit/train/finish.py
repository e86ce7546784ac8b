"""What an arm leaves when its training is over: predictions, weights and, last, result.json."""

from __future__ import annotations

import shutil
from io import BytesIO
from typing import Any

import numpy as np

from retrofit import runfiles
from retrofit.checkpoint import save
from retrofit.data import Splits, steps_per_epoch
from retrofit.evaluate import predictions, score
from retrofit.models import evaluating
from retrofit.models.preprocess import Preprocess
from retrofit.norms import end_ramp
from retrofit.recipe import Recipe
from retrofit.runfiles import read_jsonl
from retrofit.train import resume
from retrofit.train.arm import ArmRun
from retrofit.train.wrapped import Classifier, whole


def finish(arm: ArmRun, recipe: Recipe, splits: Splits, preprocess: Preprocess, steps: int, added: int) -> None:
    """Evaluates, and writes predictions, weights and, last, result.json.

    Args:
        added: how many parameters the arm's norms have.
    """
    for model in (arm.model, arm.result_model):
        end_ramp(model)
    which = {name: getattr(arm.key, name) for name in ("arm", "lr", "seed", "precision")}
    results: dict[str, Any] = {"validation": None, "test": None}
    arrays: dict[str, Any] = {}
    if arm.alive:
        results, arrays = _evaluated(arm, splits, preprocess)
        if any(results[name]["loss"] is None for name in ("validation", "test")):
            arm.diverged_at, arm.diverged_by = steps, "evaluation"
    models = {runfiles.FINAL: arm.result_model} | ({} if arm.ema is None else {runfiles.WITHOUT_EMA: arm.model})
    weights = {
        name: {key: whole(value) for key, value in model.state_dict().items()}
        for name, model in (models.items() if arm.alive else ())
    }
    if not arm.accelerator.is_main_process:
        arm.close()
        return
    if arm.alive:
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays)
        runfiles.write_bytes(arm.folder / runfiles.PREDICTIONS, buffer.getvalue())
        about = {"base": recipe.model.source, "data": recipe.data.source, **which, "steps": steps}
        told = {runfiles.FINAL: results, runfiles.WITHOUT_EMA: results.get("without_ema")}
        for name, model in models.items():
            shutil.rmtree(arm.folder / name, ignore_errors=True)  # half of it, where a kill left that
            save(model, arm.folder / name, about={**about, **(told[name] or {})}, weights=weights[name])
    tail = arm.losses[-max(1, len(arm.losses) // 10) :]
    result = {
        **which,
        "status": "finished" if arm.alive else "diverged",
        "diverged_at": arm.diverged_at,
        "diverged_by": arm.diverged_by,
        "attention_before": None if arm.alive else _attention_before(arm),
        "nonfinite_steps": arm.nonfinite,
        "steps": steps,
        "epochs": round(steps / steps_per_epoch(len(splits.train), recipe.train.batch_size), 3),
        "batch_size": recipe.train.batch_size,
        "classes": len(splits.classes),
        "parameters": sum(p.numel() for p in arm.model.parameters()),
        "parameters_added": added,
        **results,
        "train_loss": sum(tail) / len(tail),
        "attention": arm.attention,
        "processes": arm.accelerator.num_processes,
        "device": arm.accelerator.device.type,
        "seconds": round(arm.seconds, 3),
        "memory_bytes": arm.memory.peak,
        "memory_source": arm.memory.source,
        "resumed_at": arm.resumed_at,
    }
    if arm.trackers is not None and arm.alive:
        arm.trackers.result(steps, results)
    arm.close()
    runfiles.write_json(arm.folder / runfiles.RESULT, result)
    resume.remove(arm.folder)


def _attention_before(arm: ArmRun) -> list[dict[str, Any]]:
    """The extremes of attention in the last two probes: at the step that diverged, and before it."""
    rows = []
    for row in read_jsonl(arm.folder / runfiles.PROBES)[-2:]:
        extremes: dict[str, Any] = {"step": row["step"]}
        for name, worst in (("logit_absmax", max), ("entropy_share", min), ("q_rms", max), ("k_rms", max)):
            told = [(layer[name], layer["site"]) for layer in row["layers"] if layer.get(name) is not None]
            extremes[name], extremes[f"{name}_site"] = worst(told, default=(None, None))
        rows.append(extremes)
    return rows


def _evaluated(arm: ArmRun, splits: Splits, preprocess: Preprocess) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores and predictions. Where there is a moving average they are its own, and `without_ema` holds the scores of
    the weights that it is the average of."""
    forward = arm.eager if arm.ema is None else Classifier(arm.ema.module)
    results: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, images in (("validation", splits.validation), ("test", splits.test)):
        with evaluating(arm.result_model), arm.accelerator.autocast():
            ids, labels, logits = predictions(forward, images, preprocess, arm.accelerator.device)
        arrays |= {f"{name}_ids": ids, f"{name}_labels": labels, f"{name}_logits": logits}
        results[name] = score(logits, labels)
        if arm.ema is not None:
            with evaluating(arm.model):
                _, labels, logits = predictions(arm.eager, images, preprocess, arm.accelerator.device)
            results.setdefault("without_ema", {})[name] = score(logits, labels)
    return results, arrays
