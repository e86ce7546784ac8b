"""The report's figures: which panels each has, and what each panel shows.

A figure is a row of small panels that a phone shows below each other. Panels of a figure share the range of
their axes and their colours, so that arms and learning rates compare at a glance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize

from retrofit.report import plots
from retrofit.report.svg import svg, with_ids
from retrofit.report.words import rate
from retrofit.runfiles import AA, BASELINE

Document = Mapping[str, Any]
MARKS = "●■▲◆▼★"
"""The mark of each arm in legends, as plots.py draws it, so that colour is never the only difference."""
_WIDE, _SMALL = 360, 280
"""Widths in CSS pixels: a panel that stands alone, and one of several."""


@dataclass(frozen=True)
class Panel:
    title: str
    svg: str
    wide: bool = False


def panels(name: str, document: Document) -> list[Panel]:
    """The panels of a figure; none where the document has nothing to draw."""
    drawn = enumerate(_FIGURES[name](document))
    return [replace(panel, svg=with_ids(panel.svg, f"{name}-{i}")) for i, panel in drawn]


def legend(name: str, document: Document) -> list[str]:
    """The arms that a figure tells apart by mark and colour, in the order of MARKS."""
    return _arms(document) if name in ("accuracy", "losses", "loss_differences", "logit_lines") else []


def _accuracy(document: Document) -> Iterable[Panel]:
    chance = 1 / document["study"]["classes"]
    for precision in document["study"]["precisions"]:
        runs = [r for r in document["runs"] if r["counted_as"] and r["precision"] == precision]
        if runs:
            draw = partial(plots.accuracies, runs=runs, arms=_arms(document), chance=chance)
            yield Panel(_titled("", precision, document), svg(draw, (_WIDE, 220)), wide=True)


def _shock(document: Document) -> Iterable[Panel]:
    arms = _arms(document)
    for row in document["insertion"]:
        if row["shock"] and row["arm"] in arms:
            draw = partial(plots.shock, row=row, arm=arms.index(row["arm"]))
            title = row["arm"] if len(document["insertion"]) > 1 else ""
            yield Panel(title, svg(draw, (_WIDE, 150)), wide=True)


def _differences(document: Document) -> Iterable[Panel]:
    arms, lost = _arms(document), _diverged(document)
    compared = [{**c, "lost": lost(c)} for c in document["comparisons"] if c["pairs"]]
    floors = [{**r, "arm": AA, "baseline_lr": r["lr"]} for r in document["noise_floor"] if r["pairs"]]
    floors = [{**r, "kind": "noise_floor", "lost": lost(r)} for r in floors]
    told = [r["accuracy"] for r in (*compared, *floors)]
    shown = [0.0, *(v for t in told for v in t["differences"])]
    shown += [v for c in compared for v in c["accuracy"]["interval"] or ()]
    shown += [v for r in floors for v in r["accuracy"]["interval_alone"] or ()]
    limits = {"low": min(shown), "high": max(shown), "margin": document["study"]["margin"]["points"] / 100}
    for precision, arm in dict.fromkeys((c["precision"], c["arm"]) for c in compared):
        rows = [c for c in compared if (c["precision"], c["arm"]) == (precision, arm)]
        rows += [r for r in floors if r["precision"] == precision]
        height = 56 + sum(plots.row_height(c["pairs"]) for c in rows)
        draw = partial(plots.differences, rows=rows, arm=arms.index(arm), **limits)
        title = _titled(arm if len(arms) > 2 else "", precision, document)
        yield Panel(title, svg(draw, (_WIDE, height)), wide=True)


def _studies(document: Document) -> Iterable[Panel]:
    rows = [r for r in document["rows"] if r["pairs"]]
    names = [r["study"] if len({x["arm"] for x in rows}) == 1 else f"{r['study']}, {r['arm']}" for r in rows]
    draw = partial(plots.studies, rows=rows, names=names)
    yield Panel("", svg(draw, (_WIDE, 56 + 24 * len(rows))), wide=True)


def _diverged(document: Document) -> Callable[[Mapping[str, Any]], set[int]]:
    """For a row of comparisons, the seeds of which a run diverged."""
    gone = {
        (r["precision"], r["arm"], r["lr"], r["seed"])
        for r in (*document["runs"], *document["twins"])
        if r["status"] == "diverged"
    }

    def lost(row: Mapping[str, Any]) -> set[int]:
        places = ((row["arm"], row["lr"]), (BASELINE, row["baseline_lr"]))
        return {s for s in row["seeds"] for arm, lr in places if (row["precision"], arm, lr, s) in gone}

    return lost


def _losses(document: Document) -> Iterable[Panel]:
    curves = document["curves"]
    values = [v for c in curves for v in c["loss"] if v is not None]
    if not values:
        return
    high = float(np.percentile(values, 99))  # a blow-up must not flatten the rest
    ends = [c["validation_loss"] for c in curves if c["validation_loss"] is not None]
    limits = {"low": min(values + ends), "high": min(max([high, *ends]), 1.5 * high)}
    for precision, lr in _places(curves):
        here = [c for c in curves if (c["precision"], c["lr"]) == (precision, lr)]
        draw = partial(plots.losses, curves=here, arms=_arms(document), **limits)
        yield Panel(_titled(f"learning rate {rate(lr)}", precision, document), svg(draw, (_SMALL, 200)))


def _loss_differences(document: Document) -> Iterable[Panel]:
    rows = document["loss_differences"]
    ends = [v for r in rows for name in ("low", "high") for v in r[name]]
    if not ends:
        return
    low, high = (float(v) for v in np.percentile([0.0, *ends], [1, 99]))
    for precision, lr in _places(rows):
        here = [r for r in rows if (r["precision"], r["lr"]) == (precision, lr)]
        draw = partial(plots.loss_differences, rows=here, arms=_arms(document), low=low, high=high)
        yield Panel(_titled(f"learning rate {rate(lr)}", precision, document), svg(draw, (_SMALL, 180)))


def _logit_lines(document: Document) -> Iterable[Panel]:
    seen = _positive(document["traces"], "logit_absmax")
    if not seen:
        return
    for precision, lr in _places(document["traces"]):
        here = [
            {**t, "bound": _bound(document, t)}
            for t in document["traces"]
            if (t["precision"], t["lr"]) == (precision, lr)
        ]
        draw = partial(plots.logits, traces=here, arms=_arms(document), low=min(seen), high=max(seen))
        yield Panel(_titled(f"learning rate {rate(lr)}", precision, document), svg(draw, (_SMALL, 200)))


def _bound(document: Document, trace: Mapping[str, Any]) -> float | None:
    """The largest logit that the norms of an arm at a rate allow in any layer, at the last probe."""
    place = (trace["precision"], trace["arm"], trace["lr"])
    layers = [x for x in document["layers"] if (x["precision"], x["arm"], x["lr"]) == place]
    return max((x["logit_bound_after"] for x in layers if x["logit_bound_after"] is not None), default=None)


def _logit_maps(document: Document) -> Iterable[Panel]:
    seen = _positive(document["traces"], "logit_absmax")
    if seen:
        yield from _heatmaps(document, "logit_absmax", _log(seen), "largest logit")


def _entropy_maps(document: Document) -> Iterable[Panel]:
    if any(v is not None for t in document["traces"] for row in t["entropy_share"] for v in row):
        yield from _heatmaps(document, "entropy_share", Normalize(0, 1), "entropy, share of the largest")


def _norm_maps(document: Document, key: str) -> Iterable[Panel]:
    seen = _positive(document["traces"], "q_rms", "k_rms")
    if seen:
        yield from _heatmaps(document, key, _log(seen), f"norm of {key[0]}")


def _log(seen: Sequence[float]) -> LogNorm:
    low, high = min(seen), max(seen)
    return LogNorm(low, high if high > 1.01 * low else 2 * low)


def _heatmaps(document: Document, key: str, scale: Normalize, label: str) -> Iterable[Panel]:
    """A panel an arm and rate, under one strip that shows the colour scale of all."""
    yield Panel("", svg(partial(plots.strip, scale=scale, label=label), (_WIDE, 54)), wide=True)
    for trace in document["traces"]:
        title = _titled(f"{trace['arm']}, learning rate {rate(trace['lr'])}", trace["precision"], document)
        height = 70 + 14 * min(len(trace["sites"]), 16)
        draw = partial(plots.heatmap, trace=trace, key=key, scale=scale)
        yield Panel(title, svg(draw, (_SMALL, height), (40, 38, 8, 4)))


def _positive(traces: Sequence[Mapping[str, Any]], *keys: str) -> list[float]:
    """Every value that a log axis can show."""
    return [v for t in traces for key in keys for row in t[key] for v in row if v and v > 0]


def _arms(document: Document) -> list[str]:
    return [a["name"] for a in document["study"]["arms"]]


def _places(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """(precision, learning rate) of the panels, rates rising."""
    return sorted({(r["precision"], r["lr"]) for r in rows})


def _titled(title: str, precision: str, document: Document) -> str:
    if len(document["study"]["precisions"]) < 2:
        return title
    return f"{title}, {precision}" if title else precision


_FIGURES: dict[str, Callable[[Document], Iterable[Panel]]] = {
    "accuracy": _accuracy,
    "differences": _differences,
    "studies": _studies,
    "losses": _losses,
    "loss_differences": _loss_differences,
    "shock": _shock,
    "logit_lines": _logit_lines,
    "logit_maps": _logit_maps,
    "entropy_maps": _entropy_maps,
    "q_maps": partial(_norm_maps, key="q_rms"),
    "k_maps": partial(_norm_maps, key="k_rms"),
}
