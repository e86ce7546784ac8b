"""The verdict in words. No sentence says more than the comparisons behind it carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrofit.report.limits import limits
from retrofit.report.words import (
    accuracy,
    band,
    difference,
    fixed,
    interval,
    listed,
    number,
    plural,
    points,
    rate,
)
from retrofit.runfiles import BASELINE
from retrofit.stats import FIRM_PAIRS, MIN_PAIRS, MOST_PAIRS

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
        "sentences": [*_unmatched(document), *sentences, *_divergence(document), *_noise(document)],
        "limits": limits(document, pairs),
        "objections": _objections(document),
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
    """The verdict in one sentence: numbers, number of pairs, what was tested and no more."""
    if len(arms) < 2:
        return f"A training report: {arms[0]} has no second arm to compare with"
    most = max((c["pairs"] for c in document["comparisons"]), default=0)
    if not most:
        return "Nothing to compare yet: no pair of runs has a result"
    pairs = min((c["pairs"] for c in own), default=0)
    counted = plural(pairs, "pair")
    opening = f"Undecided, {counted}" if pairs < MIN_PAIRS else f"Provisional, {counted}"
    if pairs >= FIRM_PAIRS:
        opening = f"Over {counted}"
    told = ", ".join(_headline_words(document, c, alone=len(own) == 1) for c in own)
    study = document["study"]
    tested = f"{study['model'] or 'one checkpoint'} on {study['data'] or 'one data set'}"
    return f"{opening}: against {BASELINE} at the best learning rates, {told}; nothing but {tested} was tested"


def _headline_words(document: Mapping[str, Any], c: Mapping[str, Any], alone: bool) -> str:
    """What is said of one arm; `alone` where no other arm needs the room."""
    name = _named(c["arm"], c, document)
    if not c["pairs"]:
        return f"{name} has no pair yet"
    if _all_diverged(c):
        return f"{name} is undecided, since every run of both diverged"
    m = c["accuracy"]
    if c["pairs"] < MIN_PAIRS:
        return f"{name} differs by {difference(m['mean'])}"
    band_told = f", {band(m['level'])} interval {interval(m['interval'])}" if m["interval"] and alone else ""
    told = f"{name} is {m['verdict']} ({difference(m['mean'])}{band_told})"
    for word in ("better", "worse"):
        rates = [s for s in _same_rate(document, c) if s["accuracy"]["verdict"] == word and s["lr"] != c["lr"]]
        if rates and alone:
            means = listed([points(s["accuracy"]["mean"]) for s in rates])
            told += f" and {word} at {listed([rate(s['lr']) for s in rates])} ({means} points)"
    return told


def _unmatched(document: Mapping[str, Any]) -> list[str]:
    """What the recipe lets differ between arms beside the norm: it stands before everything else."""
    if not (keys := document["study"]["unmatched"]):
        return []
    own = [
        f"{a['name']} has {listed([f'{k} {_shown(v)}' for k, v in a['own'].items()])}"
        for a in document["study"]["arms"]
        if a["own"]
    ]
    return [
        f"The arms do not differ in the norm alone: the recipe leaves {listed(keys)} unmatched"
        f"{f' ({chr(59).join(own)})' if own else ''}. No difference below is the norm's by itself."
    ]


def _shown(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return listed([f"{v:g}" if isinstance(v, float) else str(v) for v in values])


def _all_diverged(c: Mapping[str, Any]) -> bool:
    return bool(c["diverged"]["arm"] == c["diverged"]["baseline"] == c["pairs"])


def _own_best(document: Mapping[str, Any], c: Mapping[str, Any]) -> str:
    """The fair comparison of quality: each arm at the rate that validation chose for it."""
    arm = _named(c["arm"], c, document)
    if not c["pairs"]:
        return (
            f"At their own best learning rates ({arm} {rate(c['lr'])}, {BASELINE} {rate(c['baseline_lr'])}) "
            f"the two arms have no seed in common yet."
        )
    if _all_diverged(c):
        return (
            f"Every run of {arm} and of {BASELINE} diverged, at the best of the tested learning rates too: nothing was "
            f"evaluated, and what stands in the tables is chance."
        )
    return (
        f"Each at its own best learning rate, chosen on validation, {arm} (at {rate(c['lr'])}) is right on "
        f"{accuracy(c['means']['arm']['accuracy'])} of the test images and {BASELINE} (at "
        f"{rate(c['baseline_lr'])}) on {accuracy(c['means']['baseline']['accuracy'])}: a difference of "
        f"{difference(c['accuracy']['mean'])}{_support(document, c)}{_loss_clause(c)}."
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
    text = f"At learning rate {rate(c['lr'])}, {place}, {arm} {ends}{_support(document, c)}"
    return [text + _logit_clause(document, c) + "."]


def _divergence(document: Mapping[str, Any]) -> list[str]:
    """Every arm and rate with a run that diverged."""
    lost = [o for o in document["outcomes"] if o["diverged"]]
    if not lost:
        return []
    told = [
        f"{o['diverged']} of {plural(o['runs'], 'run')} of {_named(o['arm'], o, document)} at {rate(o['lr'])}"
        for o in sorted(lost, key=lambda o: -o["lr"])
    ]
    return [f"Diverged, and counted as chance: {listed(told)}."]


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


def _support(document: Mapping[str, Any], c: Mapping[str, Any]) -> str:
    """`(98.3 % interval …, 3 pairs: undecided; about 4 more seeds would decide)`, or as much of it as there is."""
    m = c["accuracy"]
    told = [f"{band(m['level'])} interval {interval(m['interval'])}"] if m["interval"] else []
    told.append(plural(c["pairs"], "pair") + (" that differ alike" if c["pairs"] > 1 and not m["interval"] else ""))
    word = m["verdict"] if c["pairs"] >= MIN_PAIRS else "undecided, fewer than three pairs decide nothing"
    return f" ({', '.join(told)}: {word}{_nearness(document, c)})"


def _nearness(document: Mapping[str, Any], c: Mapping[str, Any]) -> str:
    """How the difference stands to the margin, and how many more seeds would decide."""
    m, margin = c["accuracy"], f"{document['study']['margin']['points']:g} points"
    if m["verdict"] == "practically equal":
        inside = f", {interval(m['equivalence_interval'])} lies" if m["equivalence_interval"] else ""
        return f"{inside} within ±{margin}"
    if m["verdict"] != "undecided":
        return f", by less than {margin}" if 100 * abs(m["mean"]) < document["study"]["margin"]["points"] else ""
    if c["pairs"] < 2:
        return ""
    if m["more_pairs"] is None:
        return f"; at this mean and spread more than {number(MOST_PAIRS)} seeds would be needed"
    return f"; about {plural(m['more_pairs'], 'more seed')} would decide at this mean and spread"


def _noise(document: Mapping[str, Any]) -> list[str]:
    """What baseline and its twin differ by, beside what the arms do at the same rate."""
    told = []
    best = {b["precision"]: b["lr"] for b in document["best_rates"] if b["arm"] == BASELINE}
    for precision in dict.fromkeys(row["precision"] for row in document["noise_floor"]):
        rows = [r for r in document["noise_floor"] if r["precision"] == precision and r["pairs"]]
        if not rows:
            continue
        row = min(rows, key=lambda r: (r["lr"] != best.get(precision), -r["pairs"]))
        values = row["accuracy"]["differences"]
        where = f"at {rate(row['lr'])}" + (f" in {precision}" if len(document["study"]["precisions"]) > 1 else "")
        twin = f"{BASELINE} and its twin, the same run from weights that differ by a millionth,"
        if not any(values) and not any(row["loss"]["differences"]):
            told.append(f"Noise floor (A/A) {where}: {twin} end exactly alike ({plural(row['pairs'], 'pair')}).")
            continue
        spread = f", standard deviation {fixed(100 * row['accuracy']['sd'], 1)}" if row["pairs"] > 1 else ""
        others = [
            f"{c['arm']} and {BASELINE} by {difference(c['accuracy']['mean'])}"
            + (f", standard deviation {fixed(100 * c['accuracy']['sd'], 1)}" if c["pairs"] > 1 else "")
            for c in document["comparisons"]
            if (c["kind"], c["precision"], c["lr"]) == ("same_rate", precision, row["lr"]) and c["pairs"]
        ]
        told.append(
            f"Noise floor (A/A) {where}: {twin} differ by {difference(row['accuracy']['mean'])} and by "
            f"{difference(max(map(abs, values)), sign=False)} at most ({plural(row['pairs'], 'pair')}{spread})"
            f"{'; ' if others else ''}{'; '.join(others)}."
        )
    return told


def _objections(document: Mapping[str, Any]) -> list[str]:
    """What `report --check` answers no for: verdicts of worse, and divergence in an arm that is not the baseline."""
    found = []
    for c in document["comparisons"]:
        worse = [name for name in ("accuracy", "loss") if c[name]["verdict"] == "worse"]
        if worse:
            at = rate(c["lr"]) if c["kind"] == "same_rate" else f"its own best rate ({rate(c['lr'])})"
            found.append(f"{_named(c['arm'], c, document)} at {at} is worse in test {listed(worse)}")
    for row in document["outcomes"]:
        if row["arm"] != BASELINE and row["diverged"]:
            named = _named(row["arm"], row, document)
            found.append(f"{named} at {rate(row['lr'])} diverged in {row['diverged']} of {plural(row['runs'], 'run')}")
    return found


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
