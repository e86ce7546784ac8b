"""What the probes saw of each layer's attention, over the seeds of an arm at a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from retrofit.report.rates import precisions, rates
from retrofit.report.read import Study
from retrofit.report.runs import Fault, Layer, Probe, Run

_ROUNDING = 1.02
"""How far above its bound a logit may come out in bfloat16."""


def traces(study: Study) -> list[dict[str, Any]]:
    """Largest logit (maximum over seeds), entropy and norms of q and k (means over seeds), by layer and probed step.

    Entropy is a share of its largest possible value, log of the number of visible keys: 1 is uniform
    attention. Norms are root mean squares over tokens and channels, as attention gets them.
    """
    return [
        {
            **place,
            "sites": sites,
            "steps": steps,
            "logit_absmax": _grid(runs, sites, steps, lambda layer: layer.logit_absmax, max),
            "entropy_share": _grid(runs, sites, steps, lambda layer: layer.entropy_share, _mean),
            "q_rms": _grid(runs, sites, steps, lambda layer: layer.q_rms, _mean),
            "k_rms": _grid(runs, sites, steps, lambda layer: layer.k_rms, _mean),
        }
        for place, runs, sites in _places(study)
        for steps in [sorted({probe.step for run in runs for probe in run.probes})]
    ]


def layers(study: Study) -> list[dict[str, Any]]:
    """Each layer before the first step and at the last probe, over the seeds as in `traces`."""
    rows = []
    for place, runs, sites in _places(study):
        for site in sites:
            first, last, ever = [], [], []
            for run in runs:
                seen = [(p.step, layer) for p in run.probes for layer in p.layers if layer.site == site]
                first += [layer for step, layer in seen[:1] if step == 0]
                last += [layer for _, layer in seen[-1:]]
                ever += [layer for _, layer in seen]
            rows.append(
                {
                    **place,
                    "site": site,
                    "logit_absmax_before": _over(first, lambda x: x.logit_absmax, max),
                    "logit_absmax_after": _over(last, lambda x: x.logit_absmax, max),
                    "logit_absmax_ever": _over(ever, lambda x: x.logit_absmax, max, whole=True),
                    "logit_bound_after": _over(last, lambda x: x.logit_bound, max),
                    "entropy_share_before": _over(first, lambda x: x.entropy_share, _mean),
                    "entropy_share_after": _over(last, lambda x: x.entropy_share, _mean),
                    "q_rms_before": _over(first, lambda x: x.q_rms, _mean),
                    "q_rms_after": _over(last, lambda x: x.q_rms, _mean),
                    "k_rms_before": _over(first, lambda x: x.k_rms, _mean),
                    "k_rms_after": _over(last, lambda x: x.k_rms, _mean),
                    "peaked_rows_after": _over(last, lambda x: x.peaked_rows, _mean),
                }
            )
    return rows


def extremes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest logit of any layer, by arm and rate: before, after, ever; from the rows of `layers`."""
    result = []
    for place in dict.fromkeys((r["precision"], r["arm"], r["lr"]) for r in rows):
        here = [r for r in rows if (r["precision"], r["arm"], r["lr"]) == place]
        largest = {
            name: max(
                (r[f"logit_absmax_{name}"] for r in here if r[f"logit_absmax_{name}"] is not None),
                default=None,
            )
            for name in ("before", "after", "ever")
        }
        if any(r["logit_absmax_ever"] is None for r in here):  # it left the finite numbers: no largest can be told
            largest["ever"] = None
        result.append({"arm": place[1], "precision": place[0], "lr": place[2], **largest})
    return result


def beyond_bounds(study: Study) -> Iterable[Fault]:
    """Logits above the bound that their norm sets, by more than rounding: the probe or the norm is then wrong."""
    for run in study.runs:
        for step, layer in ((probe.step, layer) for probe in run.probes for layer in probe.layers):
            largest, bound = layer.logit_absmax, layer.logit_bound
            if largest is not None and bound is not None and largest > _ROUNDING * bound:
                told = f"has a logit of {largest:.4g} in {layer.site} at step {step}"
                yield Fault(run.key.folder, f"{told}, above {bound:.4g}, the bound that its norm sets")
                break


def _places(study: Study) -> Iterable[tuple[dict[str, Any], list[Run], list[str]]]:
    """Each arm at each rate that was probed, with its runs and the names of its layers in order."""
    for precision, arm in product(precisions(study), study.arms):
        for lr in rates(study, precision, arm):
            runs = [
                r for r in study.runs if r.probes and (r.key.precision, r.key.arm, r.key.lr) == (precision, arm, lr)
            ]
            sites = list(dict.fromkeys(layer.site for r in runs for p in r.probes for layer in p.layers))
            if runs:
                yield (
                    {"arm": arm, "precision": precision, "lr": lr, "seeds": [r.key.seed for r in runs]},
                    runs,
                    sites,
                )


def _grid(
    runs: Sequence[Run],
    sites: Sequence[str],
    steps: Sequence[int],
    read: Callable[[Layer], float | None],
    join: Callable[[list[float]], float],
) -> list[list[float | None]]:
    """[sites][steps]; None where no run has a finite value."""
    seen: dict[tuple[str, int], list[Layer]] = {}
    for probe in (p for run in runs for p in _once(run.probes)):
        for layer in probe.layers:
            seen.setdefault((layer.site, probe.step), []).append(layer)
    return [[_over(seen.get((site, step), []), read, join) for step in steps] for site in sites]


def _once(probes: Sequence[Probe]) -> Iterable[Probe]:
    """A resumed run may probe a step again: the later row stands."""
    return {probe.step: probe for probe in probes}.values()


def _over(
    layers: Sequence[Layer],
    read: Callable[[Layer], float | None],
    join: Callable[[list[float]], float],
    whole: bool = False,
) -> float | None:
    """Over the layers that have the figure; None where none has, and, if `whole`, where one was not finite."""
    values = [v for layer in layers if (v := read(layer)) is not None]
    return join(values) if values and not (whole and len(values) < len(layers)) else None


def _mean(values: list[float]) -> float:
    return float(np.mean(values))
