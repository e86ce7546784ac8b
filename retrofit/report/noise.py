"""How far a matched pair drifts apart: step by step, and the noise floor that the baseline's twin sets (A/A)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from retrofit.report.compare import metric, pairs, same_batches
from retrofit.report.rates import outcomes
from retrofit.report.read import Study
from retrofit.report.runs import Run
from retrofit.runfiles import AA, BASELINE

POINTS = 60
"""At most so many points make a curve, so that a report of many runs stays small."""


def noise_floor(study: Study) -> list[dict[str, Any]]:
    """Differences between the baseline's twin and the baseline at each rate, as those of an arm; no verdict.

    The twin is the same run from weights that differ by a millionth, so that the differences show what a matched pair
    differs in when the method is the same.
    """
    measured = outcomes([*study.runs, *study.twins], study.classes)
    rows = []
    for precision, lr in sorted({(r.key.precision, r.key.lr) for r in study.twins}):
        twin, base = (measured.get((precision, arm, lr), {}) for arm in (AA, BASELINE))
        left_out = {
            r.key.seed
            for r, other in pairs(study, study.twins)
            if (r.key.precision, r.key.lr) == (precision, lr) and not same_batches(r, other)
        }
        seeds = [s for s in sorted(twin.keys() & base.keys()) if s not in left_out]
        values = [np.subtract(twin[s], base[s]).tolist() for s in seeds]
        rows.append(
            {
                "precision": precision,
                "lr": lr,
                "pairs": len(seeds),
                "seeds": seeds,
                "accuracy": metric([v[0] for v in values], True),
                "loss": metric([v[1] for v in values], False),
            }
        )
    return rows


def loss_differences(study: Study) -> list[dict[str, Any]]:
    """Training loss of each arm, and of the twin, minus the baseline's on the very same batch, over the steps.

    Each point joins a few steps: the mean over them and over the seeds, and the lowest and highest seed's mean.
    """
    rows = []
    groups: dict[tuple[str, float, int, bool], list[tuple[Run, Run]]] = {}
    for twin, runs in ((False, study.runs), (True, study.twins)):
        for run, other in pairs(study, runs):
            if same_batches(run, other):
                order = 0 if twin else study.arms.index(run.key.arm)
                groups.setdefault((run.key.precision, run.key.lr, order, twin), []).append((run, other))
    for (precision, lr, order, twin), group in sorted(groups.items(), key=lambda g: g[0]):
        series = {run.key.seed: d for run, other in group if (d := _difference(run, other))}
        steps = sorted({step for d in series.values() for step in d})
        if not steps:
            continue
        width = -(-len(steps) // POINTS)
        points = [steps[i : i + width] for i in range(0, len(steps), width)]
        binned = [[_mean(d[s] for s in point if s in d) for d in series.values()] for point in points]
        rows.append(
            {
                "arm": AA if twin else study.arms[order],
                "twin": twin,
                "precision": precision,
                "lr": lr,
                "seeds": sorted(series),
                "steps_per_point": width,
                "steps": [float(np.mean(point)) for point in points],
                "mean": [_mean(values) for values in binned],
                "low": [min(v for v in values if v is not None) for values in binned],
                "high": [max(v for v in values if v is not None) for values in binned],
                "last_tenth": _mean(_mean(list(d.values())[-max(1, len(d) // 10) :]) for d in series.values()),
            }
        )
    return rows


def _difference(run: Run, other: Run) -> dict[int, float]:
    """Loss of a run minus the other's, by step, where both are finite."""
    theirs = dict(zip(other.steps, other.loss, strict=True))
    return {
        step: loss - base
        for step, loss in zip(run.steps, run.loss, strict=True)
        if loss is not None and (base := theirs.get(step)) is not None
    }


def _mean(values: Iterable[float | None] | Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None]
    return float(np.mean(finite)) if finite else None
