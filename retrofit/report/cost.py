"""What an arm costs: parameters, time of a step, throughput and memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np

from retrofit.report.compare import pairs
from retrofit.report.rates import precisions
from retrofit.report.read import Study
from retrofit.runfiles import BASELINE, count, text


def cost(study: Study) -> list[dict[str, Any]]:
    """Every arm's cost, medians over its runs; the ratio of step times is the median over pairs of a rate and seed."""
    rows = []
    for precision, arm in product(precisions(study), study.arms):
        runs = [r for r in study.runs if r.counts and (r.key.precision, r.key.arm) == (precision, arm)]
        if not runs:
            continue
        ratios = [
            float(np.median(run.seconds) / np.median(other.seconds))
            for run, other in pairs(study, runs)
            if run.seconds and other.seconds
        ]
        seconds = [float(np.median(r.seconds)) for r in runs if r.seconds]
        sizes = ((count(r.result.get("batch_size")), r.seconds) for r in runs)
        throughput = [size / float(np.median(s)) for size, s in sizes if size and s]
        memory = [m for r in runs if (m := count(r.result.get("memory_bytes")))]
        rows.append(
            {
                "arm": arm,
                "precision": precision,
                "parameters": _first(count(r.result.get("parameters")) for r in runs),
                "parameters_added": _first(count(r.result.get("parameters_added")) for r in runs),
                "seconds_per_step": float(np.median(seconds)) if seconds else None,
                "images_per_second": float(np.median(throughput)) if throughput else None,
                "time_ratio": float(np.median(ratios)) if ratios and arm != BASELINE else None,
                "time_ratio_range": [min(ratios), max(ratios)] if ratios and arm != BASELINE else None,
                "pairs": len(ratios),
                "memory_bytes": max(memory, default=None),
                "memory_source": _first(text(r.result.get("memory_source")) for r in runs) if memory else None,
            }
        )
    return rows


def _first(values: Iterable[Any]) -> Any:
    return next((v for v in values if v is not None), None)
