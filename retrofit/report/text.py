"""The document as a page of blocks: every sentence and table, made once for Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report import tables, trouble
from retrofit.report.blocks import Block, Figure, Listing, Page, Points, Prose, Section
from retrofit.report.definitions import DEFINITIONS, of_the_probes
from retrofit.report.words import NONE, accuracy, joined, listed, number, plural, points, rate
from retrofit.runfiles import BASELINE


def page(document: Mapping[str, Any]) -> Page:
    study, verdict = document["study"], document["verdict"]
    arms = [a["name"] for a in study["arms"]]
    about = [
        " against ".join([*arms[1:], arms[0]]) if len(arms) == 2 else listed(arms),
        study["model"] and f"model {study['model']}",
        study["data"] and f"data {study['data']}",
        f"{plural(len(study['lrs']), 'learning rate')} × {plural(len(study['seeds']), 'seed')}",
        study["created"] and f"begun {study['created'][:10]}",
    ]
    built = (
        _against_rates(document),
        _results(document),
        _insertion(document),
        _losses(document),
        _attention(document),
        trouble.section(document),
        _cost(document),
        _what_was_run(document),
        Section("method", "Definitions and sources", (Points(DEFINITIONS), *of_the_probes())),
    )
    return Page(
        title="QK-Norm comparison" if len(arms) > 1 else "Training report",
        subtitle=joined(about, " · "),
        headline=verdict["headline"],
        sentences=tuple(verdict["sentences"]),
        limits=tuple(verdict["limits"]),
        sections=tuple(section for section in built if section.blocks),
    )


def _against_rates(document: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if any(r["counted_as"] for r in document["runs"]):
        blocks = [
            Figure(
                "accuracy",
                "Test accuracy against learning rate. A mark is a run, lines join the means; a cross is a "
                "run that diverged and counts as chance, the dotted line.",
                _accuracy_alt(document),
            ),
            tables.best_rates(document),
        ]
    return Section("rates", "Accuracy against learning rate", tuple(blocks))


def _accuracy_alt(document: Mapping[str, Any]) -> str:
    told = []
    for row in tables.means(document):
        diverged = f", {row['diverged']} diverged" if row["diverged"] else ""
        told.append(
            f"{tables.arm(document, row)} at {rate(row['lr'])}: {accuracy(row['accuracy'])} "
            f"({plural(row['runs'], 'run')}{diverged})"
        )
    return f"Mean test accuracy. {'; '.join(told)}."


def _results(document: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if any(c["pairs"] for c in document["comparisons"]):
        told = [
            f"{tables.compared_at(c)} {points(c['accuracy']['mean'])}" for c in document["comparisons"] if c["pairs"]
        ]
        blocks += [
            Prose(
                f"Every difference is the arm's value minus {BASELINE}'s with the same seed: the same "
                "images in the same order, the same augmentation, the same first head. Intervals are "
                "paired t intervals, widened for the number of comparisons after Holm, so that one leaves "
                "out 0 exactly where the verdict is better or worse."
            ),
            Figure(
                "differences",
                f"Difference in test accuracy to {BASELINE}, in points. A mark is a pair, the bar the "
                "interval of the table.",
                f"Mean differences in points: {'; '.join(told)}.",
            ),
            tables.differences(document, "accuracy"),
            tables.differences(document, "loss"),
        ]
    if document["lr_sensitivity"]:
        blocks += [
            tables.sensitivity(document),
            Prose(
                "Learning-rate sensitivity compares only over the same range of rates. It weakens as a "
                "measure where an arm changes what a rate means: under QK-Norm the weights of q and k, "
                "without bias, act only by their direction, so that the same rate and weight decay are "
                "another step for them (Wortsman et al. 2023, appendix B)."
            ),
        ]
    blocks.append(tables.runs(document))
    return Section("results", "Results and paired differences", tuple(blocks))


def _insertion(document: Mapping[str, Any]) -> Section:
    if not document["insertion"]:
        return Section("shock", "Insertion shock", ())
    blocks: list[Block] = [
        Prose(
            "How far the model's function moved when the norm went in, before any training, on images that "
            "did not calibrate it. Start ones is the norm as papers start it; the other is the start that "
            "was trained here. The accuracy of a norm that is not yet trained proves nothing on its own: "
            "training is what repairs the rest."
        ),
        tables.shock(document),
    ]
    for row in document["insertion"]:
        blocks.append(tables.calibration(row))
        if row["skipped"]:
            blocks.append(
                Points(tuple(f"{s['name'] or NONE} was left as it is: {s['reason'] or NONE}" for s in row["skipped"]))
            )
    return Section("shock", "Insertion shock", tuple(blocks))


def _losses(document: Mapping[str, Any]) -> Section:
    curves = document["curves"]
    if not curves:
        return Section("loss", "Training loss", ())
    steps = sorted({c["steps_per_point"] for c in curves})
    width = f"the mean of {listed([str(s) for s in steps])} steps" if steps != [1] else "one step"
    short = max(len(c["steps"]) * c["steps_per_point"] for c in curves) <= 128
    note = (
        "No run is long enough for the spike rule, which needs 128 steps before the one it judges."
        if short
        else f"Spikes in the loss by OLMo-core's rule: {'; '.join(_spikes(document)) or 'none'}."
    )
    caption = (
        "Training loss in nats, a line a run, one panel a learning rate, all on the same axes. Each point "
        f"is {width}. Triangles mark spikes, a cross the step at which a run diverged."
    )
    ends = "; ".join(
        f"{tables.arm(document, group[0])} at {rate(group[0]['lr'])} {number(min(ends))} to {number(max(ends))}"
        for group in _by_place(document)
        if (ends := [last for c in group if (last := _last(c["loss"])) is not None])
    )
    return Section("loss", "Training loss", (Figure("losses", caption, f"The curves end at: {ends}."), Prose(note)))


def _by_place(document: Mapping[str, Any]) -> list[list[Any]]:
    """The curves of each arm at each rate, rates rising."""
    places: dict[Any, list[Any]] = {}
    for c in document["curves"]:
        places.setdefault((c["precision"], c["lr"], c["arm"]), []).append(c)
    return [places[k] for k in sorted(places, key=lambda k: k[:2])]


def _spikes(document: Mapping[str, Any]) -> list[str]:
    return [
        f"{tables.arm(document, group[0])} at {rate(group[0]['lr'])} has {sum(counts)} in {plural(len(counts), 'run')}"
        for group in _by_place(document)
        if (counts := [len(c["spikes"]) for c in group]) and any(counts)
    ]


def _last(values: list[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


def _attention(document: Mapping[str, Any]) -> Section:
    if not document["traces"]:
        return Section("attention", "Attention, layer by layer", ())
    told = "; ".join(
        f"{tables.arm(document, x)} at {rate(x['lr'])} from {number(x['before'])} to {number(x['after'])}"
        for x in document["logits"]
    )
    return Section(
        "attention",
        "Attention, layer by layer",
        (
            Prose(
                "Published marks for the largest attention logit: losses suffer from about 1 000, and "
                "every run above 10 000 diverged (Wortsman et al. 2023); Kimi K2 caps its logits at 100. "
                "They come from larger models trained from scratch. Low entropy alone is no fault: a head "
                "may well look at one place."
            ),
            Figure(
                "logit_lines",
                "Largest attention logit of any layer, on the probed images, against the step; the largest "
                "of all seeds. Dashed: the bound that the norm puts on it at the end. Dotted: 100, 1 000 "
                "and 10 000.",
                f"Largest logit before and after training: {told}.",
            ),
            Figure(
                "logit_maps",
                "Largest attention logit by layer and step, the largest of all seeds. One colour scale for all.",
                "Heatmaps of the numbers in the table below, over the steps between.",
            ),
            tables.layer_logits(document),
            Figure(
                "entropy_maps",
                "Attention entropy by layer and step, as a share of its largest value, mean of all seeds: "
                "1 looks at all places alike, 0 at a single one.",
                "Heatmaps of the numbers in the table below, over the steps between.",
            ),
            tables.layer_entropy(document),
        ),
    )


def _cost(document: Mapping[str, Any]) -> Section:
    if not document["cost"]:
        return Section("cost", "Cost", ())
    paths = sorted({r["attention"] for r in document["runs"] if r["attention"]})
    devices = sorted({r["device"] for r in document["runs"] if r["device"]})
    where = joined([listed(devices), f"{listed(paths)} attention" if paths else ""], ", ")
    note = (
        f"Times are medians over steps, measured here{f' ({where})' if where else ''}; the ratio is the "
        "median over pairs of the same rate and seed. Another machine or attention kernel gives another "
        "ratio."
    )
    return Section("cost", "Cost", (tables.cost(document), Prose(note)))


def _what_was_run(document: Mapping[str, Any]) -> Section:
    study = document["study"]
    blocks: list[Block] = [
        Prose(f"{study['runs_counted']} of {plural(study['runs_planned'], 'planned run')} have a result."),
    ]
    if document["faults"]:
        blocks.append(tables.faults(document))
    blocks += [tables.arms(document), *tables.setting(document)]
    if study["recipe"]:
        blocks.append(Listing("The resolved recipe, as overrides", tuple(_flat(study["recipe"]))))
    return Section("setting", "What was run", tuple(blocks))


def _flat(value: Any, path: str = "") -> list[str]:
    """A mapping as `key.sub=value` lines, as `retrofit pair` takes them."""
    if isinstance(value, Mapping) and value:
        return [line for k, v in value.items() for line in _flat(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        return [f"{path}=[{', '.join(_scalar(v) for v in value)}]"]
    return [f"{path}={_scalar(value)}"]


def _scalar(value: Any) -> str:
    shown = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return shown[value]
    return "{}" if value == {} else " ".join(f"{value:g}".split() if isinstance(value, float) else str(value).split())
