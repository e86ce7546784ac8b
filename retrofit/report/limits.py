"""What the numbers of a report cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report.words import listed, number, plural, rate
from retrofit.stats import FIRM_PAIRS, MIN_PAIRS, sign_flip_floor


def limits(document: Mapping[str, Any], pairs: int) -> list[str]:
    """What the numbers above cannot show; `pairs` as in the headline."""
    study: Mapping[str, Any] = document["study"]
    told: list[str] = []
    floor = f"the exact sign-flip p cannot fall below {number(sign_flip_floor(pairs))}"
    if 0 < pairs < MIN_PAIRS:
        told.append(f"With {plural(pairs, 'pair')} no verdict is given; three are the least, six make it firm.")
    elif 0 < pairs < FIRM_PAIRS:
        told.append(
            f"With {pairs} pairs {floor}: the verdicts rest on the t interval, which assumes roughly normal "
            "differences. Six pairs make a verdict firm."
        )
    elif pairs:
        told.append(f"With {pairs} pairs {floor}.")
    margin = study["margin"]
    if pairs and margin["set_by"] == "option":
        told.append(
            f"The margin of {margin['points']:g} points within which arms are called practically equal was chosen for "
            "this report, when the results could be seen."
        )
    if any(c["accuracy"]["more_pairs"] for c in document["comparisons"]):
        told.append(
            "How many more seeds would decide is an estimate from few pairs: were the mean exactly as observed, so "
            "many seeds would decide about every other time."
        )
    if pairs:
        told.append("Undecided means that these runs cannot tell, not that the arms are equal.")
    edges = [f"{b['arm']}'s ({rate(b['lr'])}, the {b['edge']})" for b in document["best_rates"] if b["edge"]]
    if edges:
        told.append(
            f"A best learning rate at the edge of those tested may have a better one beyond it: {listed(edges)}."
        )
    if pairs and any(a["qk_norm"] or a["formula"] for a in study["arms"]):
        told.append(
            "The same learning rate is another step for an arm with QK-Norm: the scale of its q and k "
            "weights, bias apart, no longer matters."
        )
    if left := study["runs_planned"] - study["runs_counted"]:
        told.append(
            f"{left} of {plural(study['runs_planned'], 'planned run')} {'has' if left == 1 else 'have'} no result and "
            f"{'is' if left == 1 else 'are'} not counted. Best learning rates were chosen on the seeds that every rate "
            "of an arm has, and may change when the rest is there."
        )
    if study["runs_counted"]:
        model, data = study["model"] or "name not known", study["data"] or "name not known"
        told.append(
            f"One checkpoint ({model}), one data set ({data}), one recipe: other models, data and lengths "
            "of training were not tested."
        )
    return told
