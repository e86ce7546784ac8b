"""Run folder -> the document that every form of the report shows: report.json, by schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrofit import stats
from retrofit.diagnose import Trained, diagnose
from retrofit.report import attention, noise, rates, trouble
from retrofit.report.compare import comparisons
from retrofit.report.cost import cost
from retrofit.report.read import Study, read_study
from retrofit.report.runs import Run
from retrofit.report.verdict import verdict
from retrofit.runfiles import count, items, number, plain, table, text

SCHEMA = "qknorm-retrofit/report/1"
"""Stands in every report.json, and marks it as one that retrofit wrote."""
DEFAULT_MARGIN = 0.5
"""Points of accuracy, for a folder whose recipe names no margin."""
_LAYER_NUMBERS = (
    "shift_share",
    "key_norm_cv_before",
    "key_norm_cv_after",
    "logit_absmax_before",
    "logit_bound",
    "kl_ones",
    "kl_match",
    "kl",
)


def build_report(run_dir: Path, margin: float | None = None) -> dict[str, Any]:
    """The report's document for a run folder, from its files alone; the same files give the same document.

    Args:
        margin: points of accuracy within which arms are practically equal; None for the recipe's.

    Raises RetrofitError where the folder does not exist or holds no run.
    """
    study = read_study(Path(run_dir))
    points = _margin(study, margin)
    best = rates.best_rates(study)
    compared, mismatched = comparisons(study, best, points["points"] / 100)
    layers = attention.layers(study)
    diagnosed = diagnose(
        [Trained.read(Path(run_dir), run.key) for run in study.runs if run.counts],
        {(b["precision"], b["arm"]): b["lr"] for b in best},
    )
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "verdict": {},
        "study": _study(study) | {"margin": points},
        "runs": [_run(run, study.classes) for run in study.runs],
        "twins": [_run(run, study.classes) for run in study.twins],
        "outcomes": rates.table(study),
        "best_rates": best,
        "comparisons": compared,
        "noise_floor": noise.noise_floor(study),
        "lr_sensitivity": rates.sensitivity(study),
        "insertion": [_insertion(arm, content) for arm, content in study.insertions.items() if content],
        "logits": attention.extremes(layers),
        "layers": layers,
        "traces": attention.traces(study),
        "trouble": trouble.findings(diagnosed, study.arms),
        "curves": [_curve(run) for run in study.runs if run.loss],
        "loss_differences": noise.loss_differences(study),
        "cost": cost(study),
        "faults": [
            {"path": f.path, "reason": f.reason} for f in (*study.faults, *mismatched, *attention.beyond_bounds(study))
        ],
    }
    document["verdict"] = verdict(document)
    result: dict[str, Any] = plain(document)
    return result


def _margin(study: Study, given: float | None) -> dict[str, Any]:
    """The margin of equivalence in points, and who set it."""
    planned = number(table(study.manifest.get("recipe")).get("margin"))
    if given is not None:
        return {"points": given, "set_by": "option"}
    if planned is not None and planned > 0:
        return {"points": planned, "set_by": "recipe"}
    return {"points": DEFAULT_MARGIN, "set_by": "default"}


def _study(study: Study) -> dict[str, Any]:
    """What was run: everything that run.json tells, and the axes of the plan."""
    manifest = study.manifest
    recipe = table(manifest.get("recipe"))
    arms = table(recipe.get("arms"))
    every = [*study.runs, *study.twins]
    return {
        "retrofit_version": text(manifest.get("version")),
        "created": text(manifest.get("created")),
        "command": _texts(manifest.get("command")),
        "model": text(table(recipe.get("model")).get("source")),
        "data": text(table(recipe.get("data")).get("source")),
        "arms": [
            {
                "name": arm,
                "qk_norm": dict(table(table(arms.get(arm)).get("qk_norm"))) or None,
                "formula": text(study.insertions.get(arm, {}).get("formula")),
                "init": text(table(arms.get(arm)).get("init")) if table(arms.get(arm)).get("qk_norm") else None,
                "own": dict(table(table(arms.get(arm)).get("train"))),
            }
            for arm in study.arms
        ],
        "lrs": sorted({run.key.lr for run in study.runs}),
        "seeds": sorted({run.key.seed for run in study.runs}),
        "precisions": rates.precisions(study),
        "classes": study.classes,
        "class_names": _texts(manifest.get("classes")),
        "runs_planned": len(every),
        "runs_counted": sum(run.counts for run in every),
        "unmatched": _texts(recipe.get("unmatched")),
        "recipe": dict(recipe),
        "splits": {
            str(name): {
                "images": count(table(split).get("images")),
                "sha256": text(table(split).get("sha256")),
            }
            for name, split in table(manifest.get("data")).items()
        },
        "environment": {str(k): text(v) for k, v in table(manifest.get("environment")).items()},
    }


def _run(run: Run, classes: int) -> dict[str, Any]:
    result = run.result
    counted = None
    if run.counts:
        score = run.test
        accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
        accuracy, loss = stats.outcome(run.status == "diverged", accuracy, loss, classes)
        counted = {"accuracy": accuracy, "loss": loss}
    return {
        "arm": run.key.arm,
        "lr": run.key.lr,
        "seed": run.key.seed,
        "precision": run.key.precision,
        "folder": run.key.folder,
        "status": run.status,
        "diverged_at": count(result.get("diverged_at")),
        "diverged_by": text(result.get("diverged_by")),
        "nonfinite_steps": count(result.get("nonfinite_steps")),
        "test": _score(run, "test"),
        "validation": _score(run, "validation"),
        "counted_as": counted,
        "train_loss": number(result.get("train_loss")),
        "steps": count(result.get("steps")),
        "epochs": number(result.get("epochs")),
        "batch_size": count(result.get("batch_size")),
        "parameters": count(result.get("parameters")),
        "parameters_added": count(result.get("parameters_added")),
        "attention": text(result.get("attention")),
        "device": text(result.get("device")),
        "seconds": number(result.get("seconds")),
        "seconds_per_step": float(np.median(run.seconds)) if run.seconds else None,
        "memory_bytes": count(result.get("memory_bytes")),
        "spike_score": stats.spike_score(run.loss, run.grad_norm),
        "spike_score_olmo2": stats.spike_score(run.loss, run.grad_norm, stats.OLMO2),
    }


def _score(run: Run, split: str) -> dict[str, Any] | None:
    """The split's score; none of a diverged run's weights, which mean nothing."""
    score = getattr(run, split)
    if score is None or run.status == "diverged":
        return None
    return {"accuracy": score.accuracy, "loss": score.loss, "images": score.images}


def _insertion(arm: str, content: Any) -> dict[str, Any]:
    """insertion.json with every number checked."""
    shock = {
        str(start): {
            "cosine_class_token": number(table(table(s).get("cosine_tokens")).get("class")),
            "cosine_patch_tokens": number(table(table(s).get("cosine_tokens")).get("patch")),
            "kl": number(table(s).get("kl")),
            "top1_agreement": number(table(s).get("top1_agreement")),
            "images": count(table(s).get("images")),
        }
        for start, s in table(content.get("shock")).items()
    }
    return {
        "arm": arm,
        "formula": text(content.get("formula")),
        "init": text(content.get("init")),
        "sites": count(content.get("sites")),
        "skipped": [
            {"name": text(table(s).get("name")), "reason": text(table(s).get("reason"))}
            for s in items(content.get("skipped"))
        ],
        "remarks": _texts(content.get("remarks")),
        "calibration_images": count(content.get("calibration_images")),
        "held_out_images": count(content.get("held_out_images")),
        "shock": shock,
        "layers": [
            {
                "site": text(table(x).get("site")),
                **{
                    k: [g for v in items(table(x).get(k)) if (g := number(v)) is not None] for k in ("gain_q", "gain_k")
                },
                **{k: number(table(x).get(k)) for k in _LAYER_NUMBERS},
            }
            for x in items(content.get("layers"))
        ],
    }


def _curve(run: Run) -> dict[str, Any]:
    """The training loss, each point the mean of a few steps, so that a report of many runs stays small."""
    width = -(-len(run.loss) // noise.POINTS)
    starts = range(0, len(run.loss), width)
    return {
        "arm": run.key.arm,
        "precision": run.key.precision,
        "lr": run.key.lr,
        "seed": run.key.seed,
        "steps_per_point": width,
        "steps": [float(np.mean(run.steps[i : i + width])) for i in starts],
        "loss": [_mean(run.loss[i : i + width]) for i in starts],
        "spikes": [run.steps[i] for i in np.flatnonzero(stats.spikes(run.loss))],
        "spikes_olmo2": [run.steps[i] for i in np.flatnonzero(stats.spikes(run.loss, stats.OLMO2))],
        "validation_loss": run.validation.loss if run.validation and run.status == "finished" else None,
        "diverged_at": count(run.result.get("diverged_at")),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None]
    return float(np.mean(finite)) if finite else None


def _texts(value: Any) -> list[str]:
    """Those items of a list that can be shown in words."""
    return [shown for item in items(value) if (shown := text(item)) is not None]
