"""What an arm leaves when its training is over: predictions, weights and, last, result.json."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np

from retrofit import runfiles
from retrofit.checkpoint import save
from retrofit.data import Splits, steps_per_epoch
from retrofit.evaluate import predictions, score
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import Recipe
from retrofit.train.arm import ArmRun


def finish(arm: ArmRun, recipe: Recipe, splits: Splits, preprocess: Preprocess, steps: int, added: int) -> None:
    """Evaluates, and writes predictions, weights and, last, result.json.

    Args:
        added: how many parameters the arm's norms have.
    """
    which = {name: getattr(arm.key, name) for name in ("arm", "lr", "seed", "precision")}
    results: dict[str, Any] = {"validation": None, "test": None}
    arrays: dict[str, Any] = {}
    if arm.alive:
        for name, images in (("validation", splits.validation), ("test", splits.test)):
            ids, labels, logits = predictions(arm.model, images, preprocess, arm.accelerator.device)
            arrays |= {f"{name}_ids": ids, f"{name}_labels": labels, f"{name}_logits": logits}
            results[name] = score(logits, labels)
        if any(result["loss"] is None for result in results.values()):
            arm.diverged_at = steps
    arm.close()
    model = arm.accelerator.unwrap_model(arm.model, keep_fp32_wrapper=False)
    if arm.alive:
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays)
        runfiles.write_bytes(arm.folder / runfiles.PREDICTIONS, buffer.getvalue())
        about = {"base": recipe.model.source, "data": recipe.data.source, **which, "steps": steps, **results}
        save(model, arm.folder / runfiles.FINAL, about=about)
    tail = arm.losses[-max(1, len(arm.losses) // 10) :]
    result = {
        **which,
        "status": "finished" if arm.alive else "diverged",
        "diverged_at": arm.diverged_at,
        "steps": steps,
        "epochs": round(steps / steps_per_epoch(len(splits.train), recipe.train.batch_size), 3),
        "batch_size": recipe.train.batch_size,
        "classes": len(splits.classes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_added": added,
        **results,
        "train_loss": sum(tail) / len(tail),
        "attention": arm.attention,
        "device": arm.accelerator.device.type,
        "seconds": round(arm.seconds, 3),
        "memory_bytes": arm.memory.peak,
        "memory_source": arm.memory.source,
    }
    runfiles.write_json(arm.folder / runfiles.RESULT, result)
