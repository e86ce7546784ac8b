"""What each arm came to at each learning rate, which rate was its best, and how much the rate matters to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np

from retrofit import stats
from retrofit.report.read import Study
from retrofit.report.runs import Run
from retrofit.runfiles import BASELINE

Place = tuple[str, str, float]
"""(precision, arm, learning rate)."""
Outcomes = Mapping[Place, Mapping[int, tuple[float, float]]]
"""(accuracy, loss) by place and seed."""


def outcomes(runs: Iterable[Run], classes: int, split: str = "test") -> Outcomes:
    """(accuracy, loss) of every run that counts, by place and seed; diverged runs at chance."""
    result: dict[Place, dict[int, tuple[float, float]]] = {}
    for run in runs:
        score = getattr(run, split)
        if run.counts and (run.status == "diverged" or score is not None):
            accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
            counted = stats.outcome(run.status == "diverged", accuracy, loss, classes)
            result.setdefault((run.key.precision, run.key.arm, run.key.lr), {})[run.key.seed] = counted
    return result


def table(study: Study) -> list[dict[str, Any]]:
    """Mean test outcome of every arm at every rate, with the share of its runs that diverged."""
    measured = outcomes(study.runs, study.classes)
    rows = []
    for place in sorted(measured, key=lambda p: (p[0], study.arms.index(p[1]), p[2])):
        counted = list(measured[place].values())
        here = [r for r in study.runs if r.counts and (r.key.precision, r.key.arm, r.key.lr) == place]
        diverged = sum(r.status == "diverged" for r in here)
        rows.append(
            {
                "arm": place[1],
                "precision": place[0],
                "lr": place[2],
                "runs": len(counted),
                "diverged": diverged,
                "diverged_share": diverged / len(counted),
                "accuracy": float(np.mean([a for a, _ in counted])),
                "accuracy_sd": float(np.std([a for a, _ in counted], ddof=1)) if len(counted) > 1 else None,
                "loss": float(np.mean([x for _, x in counted])),
            }
        )
    return rows


def best_rates(study: Study) -> list[dict[str, Any]]:
    """Each arm's best rate by mean validation accuracy, then loss, then the lower rate; never by test.

    Judged on the seeds that every rate with a run has, so that a half-finished rate wins or loses by what it did and
    not by which seeds it lacks. Where the rates share no seed, only those with the most runs take part.
    """
    measured = outcomes(study.runs, study.classes, "validation")
    rows = []
    for precision, arm in product(precisions(study), study.arms):
        runs = {lr: r for (p, a, lr), r in measured.items() if (p, a) == (precision, arm)}
        if not runs:
            continue
        shared = set.intersection(*(set(r) for r in runs.values()))
        if not shared:
            most = max(map(len, runs.values()))
            runs = {lr: r for lr, r in runs.items() if len(r) == most}
        mean = {lr: np.mean([r[s] for s in shared or r], axis=0) for lr, r in runs.items()}
        best = min(runs, key=lambda lr: (-mean[lr][0], mean[lr][1], lr))
        edges = [name for name, lr in (("lowest", min(runs)), ("highest", max(runs))) if lr == best]
        rows.append(
            {
                "arm": arm,
                "precision": precision,
                "lr": best,
                "validation_accuracy": float(mean[best][0]),
                "seeds": sorted(shared or runs[best]),
                "edge": edges[0] if len(runs) > 1 and edges else None,
            }
        )
    return rows


def sensitivity(study: Study) -> list[dict[str, Any]]:
    """Wortsman's learning-rate sensitivity of each arm: mean over the seeds that have every rate of the plan.

    Stands on final validation loss, capped at the initial loss. `difference` is arm minus baseline, paired by
    seed, where both have been swept over the same rates.
    """
    measured = outcomes(study.runs, study.classes, "validation")
    rows = []
    for precision in precisions(study):
        cap, base = _initial_loss(study, precision), None
        for arm in study.arms:
            swept = rates(study, precision, arm)
            runs = [measured.get((precision, arm, lr), {}) for lr in swept]
            complete = sorted(set.intersection(*(set(r) for r in runs))) if len(swept) > 1 else []
            found = {k: stats.lr_sensitivity([r[k][1] for r in runs], cap) for k in complete}
            by_seed = {k: s for k, s in found.items() if s is not None}
            if not by_seed:
                continue
            own = (swept, by_seed)
            base = own if arm == BASELINE else base
            rows.append(
                {
                    "arm": arm,
                    "precision": precision,
                    "mean": float(np.mean(list(by_seed.values()))),
                    "interval": _interval(list(by_seed.values())),
                    "by_seed": list(by_seed.values()),
                    "seeds": list(by_seed),
                    "rates": list(swept),
                    "initial_loss": cap,
                    "difference": _difference(own, base) if arm != BASELINE and base else None,
                }
            )
    return rows


def precisions(study: Study) -> list[str]:
    return list(dict.fromkeys(run.key.precision for run in study.runs))


def rates(study: Study, precision: str, arm: str) -> list[float]:
    """The planned learning rates of an arm, rising."""
    return sorted({r.key.lr for r in study.runs if (r.key.precision, r.key.arm) == (precision, arm)})


def _initial_loss(study: Study, precision: str) -> float:
    """The median over the baseline's runs of the loss at step 0, before any update; at most log K, chance."""
    first = [
        run.loss[0]
        for run in study.runs
        if (run.key.arm, run.key.precision, run.steps[:1]) == (BASELINE, precision, (0,)) and run.loss[0] is not None
    ]
    chance = math.log(study.classes)
    return min(float(np.median(first)), chance) if first else chance


def _difference(
    own: tuple[list[float], dict[int, float]], base: tuple[list[float], dict[int, float]]
) -> dict[str, Any] | None:
    shared = [s for s in own[1] if s in base[1]]
    if own[0] != base[0] or not shared:
        return None
    values = [own[1][s] - base[1][s] for s in shared]
    return {"mean": float(np.mean(values)), "interval": _interval(values), "seeds": shared}


def _interval(values: list[float]) -> list[float] | None:
    interval = stats.t_interval(values)
    return list(interval) if interval else None
