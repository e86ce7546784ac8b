"""Did the trouble start in attention? What diagnose found, over the seeds that agree, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from retrofit.diagnose import Diagnosis, Movement
from retrofit.report.blocks import Block, Points, Prose, Section
from retrofit.report.words import fixed, listed, number, plural, rate

TITLE = "Did the trouble start in attention?"
_EVENTS = ("divergence", "degradation", "loss spike", "gradient spike")
_SHOWN = 3
"""So many findings of an arm at a rate are on the page; report.json has all."""
_MARKS = (
    (10_000, "above 10 000, where every run of Wortsman et al. diverged"),
    (1_000, "above 1 000, where losses suffer in Wortsman et al."),
    (100, "above Kimi K2's cap of 100"),
    (0, "below every published mark"),
)
_PHASES = {"warm-up": "in warm-up", "peak": "at its peak", "decay": "decaying"}
_RULE = (
    "Yes: the largest logit of a layer moved before the loss was worse, stayed moved and grew. No: no layer's moved, "
    "or they moved only after the loss did, or the loss scale of half precision fell first, or the run at the best "
    "rate spiked on the same batch. Moved: 1.5 times the value at step 0 and 1.5 times that of the run of the same arm "
    "and seed at its best rate, at the same step; where there is no such run, 3 times the value at step 0, or just "
    "before the window that a spike stands out of; a logit under 3 never. Order in time is known only to the distance "
    "between probes, and what came first need not be the cause. A rate below the best one that ends worse has only "
    "learned less and is not listed."
)


def findings(found: Iterable[Diagnosis], arms: Sequence[str]) -> list[dict[str, Any]]:
    """Events by arm and rate, the gravest first; seeds with the same answer for the same reason are one."""
    groups: dict[tuple[Any, ...], list[Diagnosis]] = {}
    for d in sorted(found, key=lambda d: d.key.seed):
        place = (d.key.precision, arms.index(d.key.arm), d.key.lr, _EVENTS.index(d.event))
        groups.setdefault((*place, d.answer, d.reason), []).append(d)
    rows = [groups[k] for k in sorted(groups, key=lambda k: (*k[:4], -len(groups[k]), *k[4:]))]
    return [
        {
            "arm": same[0].key.arm,
            "precision": same[0].key.precision,
            "lr": same[0].key.lr,
            "event": same[0].event,
            "answer": same[0].answer,
            "reason": same[0].reason,
            "sentence": _sentence(same),
            "runs": [
                {
                    "seed": d.key.seed,
                    "step": d.step,
                    "excess": d.excess,
                    "onset": d.onset,
                    "phase": d.phase,
                    "twin_lr": d.twin_lr,
                    "probe_every": d.probe_every,
                    "logit_bound": d.bound,
                    "moved": d.moved,
                }
                for d in same
            ],
        }
        for same in rows
    ]


def section(document: Mapping[str, Any]) -> Section:
    if not any(run["counted_as"] for run in document["runs"]):
        return Section("trouble", TITLE, ())
    rows = document["trouble"]
    if not rows:
        none = "No run diverged, had a spike, or ended worse at a rate above its arm's best one: no trouble to place."
        return Section("trouble", TITLE, (Prose(none),))
    several = len(document["study"]["precisions"]) > 1
    told, left = [], 0
    for (precision, _, _), same in groupby(rows, key=lambda r: (r["precision"], r["arm"], r["lr"])):
        here = [f"In {precision}, {r['sentence']}" if several else r["sentence"] for r in same]
        told += here[:_SHOWN]
        left += len(here[_SHOWN:])
    blocks: list[Block] = [Points(tuple(told)), Prose(_RULE)]
    if left:
        blocks.insert(1, Prose(f"{plural(left, 'lesser finding')} more in report.json."))
    return Section("trouble", TITLE, tuple(blocks))


def _sentence(same: Sequence[Diagnosis]) -> str:
    """The event over the seeds, the answer, and the evidence of the first of them."""
    first = same[0]
    seeds = [str(d.key.seed) for d in same]
    where = f"{first.key.arm} at {rate(first.key.lr)}, seed{'s' * (len(seeds) > 1)} {listed(seeds)}"
    evidence = f"{_evidence(first)}{_others(first)}"
    told = f"In seed {seeds[0]}, {evidence}" if len(seeds) > 1 else evidence[0].upper() + evidence[1:]
    return f"{where}, {_event(same)}. Started in attention: {first.answer}. {told}."


def _event(same: Sequence[Diagnosis]) -> str:
    first = same[0]
    if first.event == "degradation":
        mean = float(np.mean([d.excess for d in same if d.excess is not None]))
        return f"ends {fixed(mean)} nats of validation loss above its best rate, {rate(first.twin_lr or 0)}"
    steps = sorted({d.step for d in same if d.step is not None})
    at = f"at step {steps[0]}" if len(steps) == 1 else f"at steps {listed([str(s) for s in steps])}"
    return f"diverged {at}" if first.event == "divergence" else f"has a {first.event} {at}"


def _evidence(d: Diagnosis) -> str:
    by_figure = {m.figure: m for m in d.moved}
    logit, scale, gradient, attention = (
        by_figure.get(name) for name in ("largest logit", "loss scale", "gradient norm", "attention gradient")
    )
    worse = "" if d.onset is None else f"the loss was worse from step {d.onset}"
    if d.event in ("loss spike", "gradient spike"):
        worse = f"the spike came at step {d.onset}"
    if d.phase and worse:
        worse += f", the learning rate {_PHASES[d.phase]}"
    if d.reason == "no probes":
        return "no probe tells what the logits did"
    if d.reason == "same batch":
        return f"the run at its best rate, {rate(d.twin_lr or 0)}, spikes on the same batch"
    if d.reason == "overflow first" and scale:
        return f"the loss scale of half precision fell first, {_between(scale)}: gradients overflowed; {worse}"
    if d.reason == "gradient first" and gradient and logit:
        return f"the gradient norm rose first, {_between(gradient)}, then {_moved(logit)}; {worse}"
    if d.reason == "attention gradients alone" and attention:
        return (
            f"the gradients of {_layers(attention)} rose, {_between(attention)}, without their logits and without the "
            f"gradient norm of the whole; {worse}"
        )
    if d.reason == "no probe since":
        return f"no logit had moved at the last probe, but {worse}, after it"
    if logit is None:
        held = f", which the norm holds under {number(d.bound)}" if d.bound is not None else ""
        return f"no layer's largest logit moved{held}{'; ' if worse else ''}{worse}"
    told = _moved(logit)
    if d.reason == "loss first":
        return f"{worse}, and only later {told}"
    if d.reason == "logits first":
        mark = next(text for least, text in _MARKS if max(logit.value, logit.last) >= least)
        return f"{told}, and then {worse}; the logit came to {number(logit.last)}, {mark}"
    if d.reason == "did not last":
        return f"{told}, but it did not stay so; {worse}"
    if d.reason == "loss does not show it":
        return f"{told}, but training loss does not show from when on the run was worse"
    return f"{told}; {worse}: probes {d.probe_every} steps apart cannot tell the order"


def _moved(m: Movement) -> str:
    twin = f", against {number(m.twin)} at the best rate" if m.twin is not None else ""
    return f"the largest logit of {_layers(m)} rose {_between(m)} from {number(m.start)} to {number(m.value)}{twin}"


def _between(m: Movement) -> str:
    return f"by step {m.by}" if m.after is None else f"between steps {m.after} and {m.by}"


def _layers(m: Movement) -> str:
    return listed([*m.sites[:2], *([f"{len(m.sites) - 2} more"] if len(m.sites) > 2 else [])])


def _others(d: Diagnosis) -> str:
    """What else had moved, in its order; the reason has told of the largest logit."""
    told = [f"{m.figure} (by step {m.by})" for m in d.moved if m.figure != "largest logit"]
    return f". Also moved: {listed(told)}" if told else ""
