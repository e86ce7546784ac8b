"""Compares every arm with the baseline in pairs of runs: at each rate, and each at its own best one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from retrofit import stats
from retrofit.report.rates import Place, outcomes, precisions, rates
from retrofit.report.read import Study
from retrofit.report.runs import Fault, Run
from retrofit.runfiles import BASELINE


@dataclass(frozen=True)
class Match:
    """What is compared: an arm at a rate with the baseline at a rate. The unit of Holm's family."""

    precision: str
    arm: str
    lr: float
    baseline_lr: float


def comparisons(
    study: Study, best: Sequence[dict[str, Any]], margin: float
) -> tuple[list[dict[str, Any]], list[Fault]]:
    """Every comparison with its statistics, and the pairs left out because they do not match.

    `margin`: difference in accuracy, 0 to 1, within which arms are practically equal. Losses have none.
    """
    measured = outcomes(study.runs, study.classes)
    mismatched, faults = _mismatched(study)
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
        left_out = mismatched.get((match.precision, match.arm), set())
        seeds[match] = [
            s
            for s in sorted(arm_runs.keys() & base_runs.keys())
            if (match.lr, s) not in left_out and (match.baseline_lr, s) not in left_out
        ]
        values[match] = [np.subtract(arm_runs[s], base_runs[s]).tolist() for s in seeds[match]]
    summed: dict[tuple[Match, str], dict[str, Any]] = {}
    for column, (name, higher, within) in enumerate((("accuracy", True, margin), ("loss", False, None))):
        samples = [[d[column] for d in values[match]] for match in family]
        for match, sample, verdict in zip(family, samples, stats.verdicts(samples, higher, margin=within), strict=True):
            summed[match, name] = metric(sample, higher) | _judged(verdict)
    by_key = {(*_place(r), r.key.seed): r for r in study.runs}
    images = {match: _images(match, seeds[match], by_key, study.classes) for match in family}
    diverged = {k for k, r in by_key.items() if r.status == "diverged"}
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
            "images": images[m],
        }
        for kind, m in asked
    ]
    return rows, faults


def pairs(study: Study, runs: Iterable[Run]) -> Iterable[tuple[Run, Run]]:
    """(run, the baseline's run) of the same precision, rate and seed, where both are planned."""
    base = {(r.key.precision, r.key.lr, r.key.seed): r for r in study.runs if r.key.arm == BASELINE}
    for run in runs:
        other = base.get((run.key.precision, run.key.lr, run.key.seed))
        if run.key.arm != BASELINE and other is not None:
            yield run, other


def metric(differences: list[float], higher_is_better: bool) -> dict[str, Any]:
    """The summary of paired differences that knows of no other comparison."""
    summary = stats.paired(differences, higher_is_better)
    return {
        "differences": differences,
        "mean": summary.mean,
        "sd": summary.sd,
        "interval_alone": _interval(summary.low, summary.high),
        "p_alone": summary.p,
        "sign_flip_p": summary.sign_flip_p,
        "sign_flip_floor": summary.sign_flip_floor,
        "improvement": summary.improvement,
        "improvement_interval": _interval(summary.improvement_low, summary.improvement_high),
    }


def same_batches(run: Run, other: Run) -> bool:
    """Whether two runs saw the same batch at every step that both took."""
    seen = dict(zip(other.steps, other.ids, strict=True))
    return all(seen.get(step, ids) == ids for step, ids in zip(run.steps, run.ids, strict=True))


def _mismatched(study: Study) -> tuple[dict[tuple[str, str], set[tuple[float, int]]], list[Fault]]:
    """Pairs that saw other batches or other test images: their difference would mean nothing."""
    found: dict[tuple[str, str], set[tuple[float, int]]] = {}
    faults = []
    for run, other in pairs(study, study.runs):
        if not (run.counts and other.counts):
            continue
        batches = not same_batches(run, other)
        images = None not in (run.test_images, other.test_images) and run.test_images != other.test_images
        if batches or images:
            what = "batches" if batches else "test images"
            faults.append(Fault(run.key.folder, f"saw other {what} than {other.key.folder}; the pair is left out"))
            found.setdefault((run.key.precision, run.key.arm), set()).add((run.key.lr, run.key.seed))
    return found, faults


def _judged(verdict: stats.Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.word,
        "provisional": verdict.provisional,
        "interval": _interval(verdict.low, verdict.high),
        "level": verdict.level,
        "p_holm": verdict.p,
        "equivalence_interval": _interval(verdict.equal_low, verdict.equal_high),
        "equivalence_p_holm": verdict.equal_p,
        "more_pairs": verdict.more_pairs,
    }


def _images(
    match: Match, seeds: Sequence[int], runs: Mapping[tuple[str, str, float, int], Run], classes: int
) -> dict[str, Any] | None:
    """The same test images under both arms: McNemar for each pair, a two-way bootstrap over all of them.

    A diverged run is right on 1/K of each image in the bootstrap. None where no pair has predictions of both.
    """
    pairs = [
        (s, runs[match.precision, match.arm, match.lr, s], runs[match.precision, BASELINE, match.baseline_lr, s])
        for s in seeds
    ]
    told = [run for _, *both in pairs for run in both if run.test_right is not None]
    if not told or len({run.test_images for run in told}) > 1:
        return None
    size = len(told[0].test_right) if told[0].test_right is not None else 0
    chance = np.full(size, 1.0 / classes)
    by_seed, rows = [], []
    for seed, arm, base in pairs:
        if arm.test_right is not None and base.test_right is not None:
            found = stats.mcnemar(arm.test_right, base.test_right)
            rows.append({"seed": seed, "arm_only": found.arm_only, "baseline_only": found.baseline_only, "p": found.p})
        right = [chance if r.status == "diverged" else r.test_right for r in (arm, base)]
        if right[0] is not None and right[1] is not None:
            by_seed.append(np.subtract(right[0], right[1], dtype=float))
    whole = len(by_seed) == len(pairs)
    interval = stats.pigeonhole_interval(by_seed) if whole and by_seed else None
    return {"images": size, "pairs": rows, "interval": list(interval) if interval else None}


def _place(run: Run) -> Place:
    return run.key.precision, run.key.arm, run.key.lr


def _interval(low: float | None, high: float | None) -> list[float] | None:
    return None if low is None or high is None else [low, high]


def _mean(runs: Mapping[int, tuple[float, float]], seeds: Sequence[int]) -> dict[str, float | None]:
    """Mean test accuracy and loss over the seeds of a comparison."""
    if not seeds:
        return {"accuracy": None, "loss": None}
    accuracy, loss = np.mean([runs[s] for s in seeds], axis=0).tolist()
    return {"accuracy": accuracy, "loss": loss}
