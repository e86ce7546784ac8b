"""Compares every arm with the baseline in pairs of runs: at each rate, and each at its own best one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from retrofit import stats
from retrofit.report.read import Fault, Run, Study
from retrofit.runfiles import BASELINE

Place = tuple[str, str, float]
"""(precision, arm, learning rate)."""


@dataclass(frozen=True)
class Match:
    """What is compared: an arm at a rate with the baseline at a rate. The unit of Holm's family."""

    precision: str
    arm: str
    lr: float
    baseline_lr: float


def outcomes(study: Study, split: str = "test") -> dict[Place, dict[int, tuple[float, float]]]:
    """(accuracy, loss) of every run that counts, by place and seed; diverged runs at chance."""
    result: dict[Place, dict[int, tuple[float, float]]] = {}
    for run in study.runs:
        score = getattr(run, split)
        if run.counts and (run.status == "diverged" or score is not None):
            accuracy, loss = (score.accuracy, score.loss) if score else (None, None)
            counted = stats.outcome(run.status == "diverged", accuracy, loss, study.classes)
            result.setdefault((run.key.precision, run.key.arm, run.key.lr), {})[run.key.seed] = counted
    return result


def best_rates(study: Study) -> list[dict[str, Any]]:
    """Each arm's best rate by mean validation accuracy, then loss, then the lower rate; never by test.

    Only rates with as many runs as the arm has at any rate take part, so that a half-finished one cannot win.
    """
    measured = outcomes(study, "validation")
    rows = []
    for precision, arm in product(precisions(study), study.arms):
        seeds = {lr: r for (p, a, lr), r in measured.items() if (p, a) == (precision, arm)}
        if not seeds:
            continue
        full = {lr: r for lr, r in seeds.items() if len(r) == max(map(len, seeds.values()))}
        mean = {lr: np.mean(list(r.values()), axis=0) for lr, r in full.items()}
        best = min(full, key=lambda lr: (-mean[lr][0], mean[lr][1], lr))
        edges = [name for name, lr in (("lowest", min(seeds)), ("highest", max(seeds))) if lr == best]
        rows.append(
            {
                "arm": arm,
                "precision": precision,
                "lr": best,
                "validation_accuracy": float(mean[best][0]),
                "seeds": sorted(full[best]),
                "edge": edges[0] if len(seeds) > 1 and edges else None,
            }
        )
    return rows


def comparisons(study: Study, best: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Every comparison with its statistics, and the pairs left out because they do not match."""
    measured = outcomes(study)
    unmatched, faults = _unmatched(study)
    best_lr = {(b["precision"], b["arm"]): b["lr"] for b in best}
    asked: list[tuple[str, Match]] = []
    for precision, arm in product(precisions(study), (a for a in study.arms if a != BASELINE)):
        planned = rates(study, precision, arm)
        asked += [
            ("same_rate", Match(precision, arm, lr, lr)) for lr in rates(study, precision, BASELINE) if lr in planned
        ]
        if (precision, arm) in best_lr and (precision, BASELINE) in best_lr:
            own = Match(precision, arm, best_lr[precision, arm], best_lr[precision, BASELINE])
            asked.append(("own_best", own))
    family = list(dict.fromkeys(match for _, match in asked))
    seeds: dict[Match, list[int]] = {}
    values: dict[Match, Any] = {}
    for match in family:
        arm_runs = measured.get((match.precision, match.arm, match.lr), {})
        base_runs = measured.get((match.precision, BASELINE, match.baseline_lr), {})
        left_out = unmatched.get((match.precision, match.arm), set())
        seeds[match] = [
            s
            for s in sorted(arm_runs.keys() & base_runs.keys())
            if (match.lr, s) not in left_out and (match.baseline_lr, s) not in left_out
        ]
        values[match] = [np.subtract(arm_runs[s], base_runs[s]).tolist() for s in seeds[match]]
    summed = {}
    for column, (metric, higher) in enumerate((("accuracy", True), ("loss", False))):
        samples = [[d[column] for d in values[match]] for match in family]
        for match, sample, verdict in zip(family, samples, stats.verdicts(samples, higher), strict=True):
            summed[match, metric] = _metric(sample, verdict)
    diverged = {(r.key.precision, r.key.arm, r.key.lr, r.key.seed) for r in study.runs if r.status == "diverged"}
    rows = [
        {
            "kind": kind,
            "arm": m.arm,
            "precision": m.precision,
            "lr": m.lr,
            "baseline_lr": m.baseline_lr,
            "pairs": len(seeds[m]),
            "seeds": seeds[m],
            "diverged": {
                "arm": sum((m.precision, m.arm, m.lr, s) in diverged for s in seeds[m]),
                "baseline": sum((m.precision, BASELINE, m.baseline_lr, s) in diverged for s in seeds[m]),
            },
            "means": {
                "arm": _mean(measured.get((m.precision, m.arm, m.lr), {}), seeds[m]),
                "baseline": _mean(measured.get((m.precision, BASELINE, m.baseline_lr), {}), seeds[m]),
            },
            "accuracy": summed[m, "accuracy"],
            "loss": summed[m, "loss"],
        }
        for kind, m in asked
    ]
    return rows, faults


def lr_sensitivity(study: Study) -> list[dict[str, Any]]:
    """Wortsman's learning-rate sensitivity of each arm: mean over the seeds that have every rate of the plan.

    Stands on final validation loss, capped at log K, the loss of a head that knows nothing yet.
    """
    measured = outcomes(study, "validation")
    rows = []
    for precision, arm in product(precisions(study), study.arms):
        swept = rates(study, precision, arm)
        runs = [measured.get((precision, arm, lr), {}) for lr in swept]
        complete = sorted(set.intersection(*(set(r) for r in runs))) if len(swept) > 1 else []
        by_seed = [
            s
            for k in complete
            if (s := stats.lr_sensitivity([r[k][1] for r in runs], float(np.log(study.classes)))) is not None
        ]
        if by_seed:
            interval = stats.t_interval(by_seed)
            rows.append(
                {
                    "arm": arm,
                    "precision": precision,
                    "mean": float(np.mean(by_seed)),
                    "interval": list(interval) if interval else None,
                    "by_seed": by_seed,
                    "seeds": complete,
                    "rates": list(swept),
                }
            )
    return rows


def precisions(study: Study) -> list[str]:
    return list(dict.fromkeys(run.key.precision for run in study.runs))


def rates(study: Study, precision: str, arm: str) -> list[float]:
    """The planned learning rates of an arm, rising."""
    return sorted({r.key.lr for r in study.runs if (r.key.precision, r.key.arm) == (precision, arm)})


def pairs(study: Study) -> Iterable[tuple[Run, Run]]:
    """(run of an arm, run of the baseline) of the same precision, rate and seed, where both are planned."""
    base = {(r.key.precision, r.key.lr, r.key.seed): r for r in study.runs if r.key.arm == BASELINE}
    for run in study.runs:
        twin = base.get((run.key.precision, run.key.lr, run.key.seed))
        if run.key.arm != BASELINE and twin is not None:
            yield run, twin


def _unmatched(study: Study) -> tuple[dict[tuple[str, str], set[tuple[float, int]]], list[Fault]]:
    """Pairs that saw other batches or other test images: their difference would mean nothing."""
    found: dict[tuple[str, str], set[tuple[float, int]]] = {}
    faults = []
    for run, twin in pairs(study):
        if not (run.counts and twin.counts):
            continue
        seen = dict(zip(twin.steps, twin.ids, strict=True))
        batches = any(seen.get(step, ids) != ids for step, ids in zip(run.steps, run.ids, strict=True))
        images = None not in (run.test_images, twin.test_images) and run.test_images != twin.test_images
        if batches or images:
            what = "batches" if batches else "test images"
            faults.append(Fault(run.key.folder, f"saw other {what} than {twin.key.folder}; the pair is left out"))
            found.setdefault((run.key.precision, run.key.arm), set()).add((run.key.lr, run.key.seed))
    return found, faults


def _metric(differences: list[float], verdict: stats.Verdict) -> dict[str, Any]:
    summary = stats.paired(differences)
    return {
        "differences": differences,
        "mean": summary.mean,
        "sd": summary.sd,
        "verdict": verdict.word,
        "provisional": verdict.provisional,
        "interval": _interval(verdict.low, verdict.high),
        "level": verdict.level,
        "p_holm": verdict.p,
        "interval_alone": _interval(summary.low, summary.high),
        "p_alone": summary.p,
        "sign_flip_p": summary.sign_flip_p,
        "sign_flip_floor": summary.sign_flip_floor,
        "improvement": summary.improvement,
    }


def _interval(low: float | None, high: float | None) -> list[float] | None:
    return None if low is None or high is None else [low, high]


def _mean(runs: dict[int, tuple[float, float]], seeds: Sequence[int]) -> dict[str, float | None]:
    """Mean test accuracy and loss over the seeds of a comparison."""
    if not seeds:
        return {"accuracy": None, "loss": None}
    accuracy, loss = np.mean([runs[s] for s in seeds], axis=0).tolist()
    return {"accuracy": accuracy, "loss": loss}
