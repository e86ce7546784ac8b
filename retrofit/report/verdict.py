"""The verdict in words. No sentence says more than the comparisons behind it carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrofit.report.words import (
    accuracy,
    band,
    difference,
    fixed,
    interval,
    listed,
    number,
    plural,
    rate,
)
from retrofit.runfiles import BASELINE
from retrofit.stats import FIRM_PAIRS, MIN_PAIRS, sign_flip_floor

_RISE = 1.5
"""A largest logit that grows by less than this factor is called steady."""


def verdict(document: Mapping[str, Any]) -> dict[str, Any]:
    """The headline, the sentences under it, what they cannot show, and the verdicts they stand on."""
    compared = [c for c in document["comparisons"] if c["pairs"]]
    own = [c for c in document["comparisons"] if c["kind"] == "own_best"]
    arms = [a["name"] for a in document["study"]["arms"]]
    pairs = min((c["pairs"] for c in own), default=0)
    sentences = [s for c in own for s in (_own_best(document, c), *_rate_finding(document, c))]
    if not own:
        sentences = [_nothing_compared(document, arms), *_training(document)]
    return {
        "headline": _headline(document, own, arms),
        "pairs": pairs,
        "provisional": bool(compared) and pairs < FIRM_PAIRS,
        "sentences": sentences,
        "limits": _limits(document, pairs),
        "arms": [
            {
                "arm": c["arm"],
                "precision": c["precision"],
                "at_own_best_rate": c["accuracy"]["verdict"],
                "at_same_rate": [
                    {"lr": s["lr"], "pairs": s["pairs"], "verdict": s["accuracy"]["verdict"]}
                    for s in _same_rate(document, c)
                ],
            }
            for c in own
        ],
    }


def _headline(document: Mapping[str, Any], own: Sequence[Any], arms: Sequence[str]) -> str:
    if len(arms) < 2:
        return "A training report: no second arm to compare with"
    most = max((c["pairs"] for c in document["comparisons"]), default=0)
    if not most:
        return "Nothing to compare yet"
    if most < MIN_PAIRS:
        return f"Undecided: {plural(most, 'pair')} cannot decide"
    words = {_named(c["arm"], c, document): c["accuracy"]["verdict"] for c in own}
    if len(own) == 1:
        (name, word), *_ = words.items()
        told = f"{name} against {BASELINE}: {word} at the best learning rates"
        decided = [(c["accuracy"]["verdict"], rate(c["lr"])) for c in _same_rate(document, own[0])]
        for word in ("better", "worse"):
            rates = [lr for verdict, lr in decided if verdict == word]
            told += f", {word} at {listed(rates)}" if rates else ""
    else:
        told = f"Against {BASELINE} at the best learning rates: " + ", ".join(f"{n} {w}" for n, w in words.items())
    pairs = min(c["pairs"] for c in own)
    return f"Provisional, {plural(pairs, 'pair')}. {told}" if pairs < FIRM_PAIRS else told


def _own_best(document: Mapping[str, Any], c: Mapping[str, Any]) -> str:
    """The fair comparison of quality: each arm at the rate that validation chose for it."""
    arm = _named(c["arm"], c, document)
    if not c["pairs"]:
        return (
            f"At their own best learning rates ({arm} {rate(c['lr'])}, {BASELINE} {rate(c['baseline_lr'])}) "
            f"the two arms have no seed in common yet."
        )
    lost = c["diverged"]
    if lost["arm"] == lost["baseline"] == c["pairs"]:
        return (
            f"Every run of {arm} and of {BASELINE} diverged, at the best of the tested learning rates too: nothing was "
            f"evaluated, and what stands in the tables is chance."
        )
    return (
        f"Each at its own best learning rate, chosen on validation, {arm} (at {rate(c['lr'])}) is right on "
        f"{accuracy(c['means']['arm']['accuracy'])} of the test images and {BASELINE} (at "
        f"{rate(c['baseline_lr'])}) on {accuracy(c['means']['baseline']['accuracy'])}: a difference of "
        f"{difference(c['accuracy']['mean'])}{_support(c)}{_loss_clause(c)}."
    )


def _loss_clause(c: Mapping[str, Any]) -> str:
    """What the test loss decides; nothing where it is undecided."""
    loss = c["loss"]
    if loss["verdict"] == "undecided":
        return ""
    return f"; its test loss is {loss['verdict']} by {fixed(abs(loss['mean']))} nats"


def _rate_finding(document: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Above the baseline's best rate: the highest rate with a decided verdict, else the highest tested."""
    arm = _named(own["arm"], own, document)
    above = [c for c in _same_rate(document, own) if c["pairs"] and c["lr"] > own["baseline_lr"]]
    if not above:
        return [f"No higher learning rate than {BASELINE}'s best was tested with both arms."]
    decided = [c for c in above if c["accuracy"]["verdict"] != "undecided"]
    c = max(decided or above, key=lambda c: float(c["lr"]))
    change = c["accuracy"]["mean"]
    place = "the highest tested" if c["lr"] == max(a["lr"] for a in above) else f"above {BASELINE}'s best"
    direction = "higher" if change > 0 else "lower"
    ends = f"ends {difference(abs(change), sign=False)} {direction}" if change else "ends level"
    text = f"At learning rate {rate(c['lr'])}, {place}, {arm} {ends}{_support(c)}"
    diverged = [(BASELINE, c["diverged"]["baseline"]), (arm, c["diverged"]["arm"])]
    if told := [f"{n} of {c['pairs']} runs of {name}" for name, n in diverged if n]:
        text += f"; {listed(told)} diverged and count as chance"
    return [text + _logit_clause(document, c) + "."]


def _logit_clause(document: Mapping[str, Any], c: Mapping[str, Any]) -> str:
    """What the largest attention logit did meanwhile, where the probes of both arms tell."""
    told = {x["arm"]: x for x in document["logits"] if (x["precision"], x["lr"]) == (c["precision"], c["lr"])}
    base, arm = told.get(BASELINE), told.get(c["arm"])
    if not base or not arm or None in (base["before"], base["ever"], arm["before"], arm["ever"]):
        return ""
    rose = base["ever"] >= _RISE * base["before"]
    held = arm["ever"] < _RISE * arm["before"]
    one = f"{BASELINE}'s largest attention logit " + (
        f"rose from {number(base['before'])} to {number(base['ever'])}"
        if rose
        else f"stayed within {number(base['ever'])}"
    )
    other = (
        f"{c['arm']}'s stayed within {number(arm['ever'])}"
        if held
        else f"{c['arm']}'s rose from {number(arm['before'])} to {number(arm['ever'])}"
    )
    return f"; {one}, {other}"


def _support(c: Mapping[str, Any]) -> str:
    """`(98.3 % interval …, 3 pairs): undecided`, or as much of it as there is."""
    m = c["accuracy"]
    told = [f"{band(m['level'])} interval {interval(m['interval'])}"] if m["interval"] else []
    told.append(plural(c["pairs"], "pair"))
    word = m["verdict"] if c["pairs"] >= MIN_PAIRS else "undecided, fewer than three pairs decide nothing"
    return f" ({', '.join(told)}: {word})"


def _limits(document: Mapping[str, Any], pairs: int) -> list[str]:
    """What the numbers above cannot show; `pairs` as in the headline."""
    study, limits = document["study"], []
    floor = f"the exact sign-flip p cannot fall below {number(sign_flip_floor(pairs))}"
    if 0 < pairs < MIN_PAIRS:
        limits.append(f"With {plural(pairs, 'pair')} no verdict is given; three are the least, six make it firm.")
    elif 0 < pairs < FIRM_PAIRS:
        limits.append(
            f"With {pairs} pairs {floor}: the verdicts rest on the t interval, which assumes roughly normal "
            "differences. Six pairs make a verdict firm."
        )
    elif pairs:
        limits.append(f"With {pairs} pairs {floor}.")
    if pairs:
        limits.append("Undecided means that these runs cannot tell, not that the arms are equal.")
    edges = [f"{b['arm']}'s ({rate(b['lr'])}, the {b['edge']})" for b in document["best_rates"] if b["edge"]]
    if edges:
        limits.append(
            f"A best learning rate at the edge of those tested may have a better one beyond it: {listed(edges)}."
        )
    if pairs and any(a["qk_norm"] or a["formula"] for a in study["arms"]):
        limits.append(
            "The same learning rate is another step for an arm with QK-Norm: the scale of its q and k "
            "weights, bias apart, no longer matters."
        )
    if left := study["runs_planned"] - study["runs_counted"]:
        limits.append(
            f"{left} of {plural(study['runs_planned'], 'planned run')} {'has' if left == 1 else 'have'} no result and "
            f"{'is' if left == 1 else 'are'} not counted. A learning rate that lacks a run of an arm cannot be that "
            "arm's best, so that the rates named best may change when it is there."
        )
    if study["runs_counted"]:
        model, data = study["model"] or "name not known", study["data"] or "name not known"
        limits.append(
            f"One checkpoint ({model}), one data set ({data}), one recipe: other models, data and lengths "
            "of training were not tested."
        )
    return limits


def _nothing_compared(document: Mapping[str, Any], arms: Sequence[str]) -> str:
    if len(arms) < 2:
        return f"Only one arm, {arms[0]}, was trained, so nothing is compared."
    done = listed([f"{a} {sum(r['arm'] == a and r['counted_as'] is not None for r in document['runs'])}" for a in arms])
    return f"No verdict: not every arm has a run with a result (runs with one: {done})."


def _training(document: Mapping[str, Any]) -> list[str]:
    """What a plain training came to."""
    told = []
    for best in document["best_rates"]:
        runs = [
            r["counted_as"]["accuracy"]
            for r in document["runs"]
            if r["counted_as"] and (r["arm"], r["precision"], r["lr"]) == (best["arm"], best["precision"], best["lr"])
        ]
        told.append(
            f"At its best learning rate, {rate(best['lr'])}, chosen on validation, "
            f"{_named(best['arm'], best, document)} is right on {accuracy(sum(runs) / len(runs))} of the "
            f"test images (mean of {plural(len(runs), 'run')})."
        )
    return told


def _same_rate(document: Mapping[str, Any], own: Mapping[str, Any]) -> list[Any]:
    return [
        c
        for c in document["comparisons"]
        if c["kind"] == "same_rate" and (c["arm"], c["precision"]) == (own["arm"], own["precision"])
    ]


def _named(arm: str, row: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The arm, with its precision where the study has several."""
    return f"{arm} in {row['precision']}" if len(document["study"]["precisions"]) > 1 else arm
