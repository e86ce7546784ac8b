"""How each kind of panel is drawn: marks on a pair of axes, from rows of the report's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from retrofit.report.svg import INK, MUTED, arm_colour
from retrofit.report.words import number, rate

Rows = Sequence[Mapping[str, Any]]
_MARKERS = "os^Dv*"
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1, 1, 1)), (0, (6, 2)), (0, (2, 2)))
_PUBLISHED = (100, 1_000, 10_000)
"""Largest logits: Kimi K2's cap; where losses suffer; above which runs diverged (Wortsman et al. 2023)."""
_MAP: dict[str, Any] = {
    "cmap": "cividis",
    "lw": 0.8,
    "edgecolors": "face",
}  # edges close the seams between cells


def accuracies(axes: Axes, runs: Rows, arms: Sequence[str], chance: float) -> None:
    """Accuracy against learning rate: a mark a run, lines through the means, arms side by side."""
    lrs = sorted({r["lr"] for r in runs})
    for i, arm in enumerate(arms):
        side = 1.0 + 0.05 * (i - (len(arms) - 1) / 2)
        reached = {lr: a for lr in lrs if (a := [_percent(r) for r in runs if (r["arm"], r["lr"]) == (arm, lr)])}
        axes.plot([side * lr for lr in reached], [np.mean(a) for a in reached.values()], **_line(i, 1.4))
        for r in runs:
            if r["arm"] == arm:
                axes.plot(side * r["lr"], _percent(r), **_mark(i, r["status"] == "diverged", 5), alpha=0.85)
    axes.axhline(100 * chance, color=MUTED, ls=":", lw=1)
    axes.set_xscale("log")
    axes.set_xticks(lrs, [rate(lr) for lr in lrs])
    axes.minorticks_off()
    axes.set_xlim(min(lrs) / 1.4, max(lrs) * 1.4)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test accuracy, %")


def differences(axes: Axes, comparisons: Rows, arm: int, low: float, high: float) -> None:
    """A row a comparison: pairs as marks, the mean as a stroke, the interval as a bar."""
    axes.axvline(0, color=INK, lw=1)
    for y, c in enumerate(comparisons):
        told = c["accuracy"]
        if told["interval"]:
            axes.plot(np.multiply(told["interval"], 100), [y, y], color=arm_colour(arm), lw=5, alpha=0.3)
        axes.plot([100 * told["mean"]] * 2, [y - 0.22, y + 0.22], color=arm_colour(arm), lw=2)
        for value in told["differences"]:
            axes.plot(100 * value, y, **_mark(arm, False, 4.5))
    axes.set_yticks(
        range(len(comparisons)),
        [rate(c["lr"]) if c["kind"] == "same_rate" else "own best" for c in comparisons],
    )
    axes.set_ylim(len(comparisons) - 0.4, -0.6)
    margin = 4 * (high - low) or 1.0
    axes.set_xlim(100 * low - margin, 100 * high + margin)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("difference, points of test accuracy")
    axes.set_ylabel("learning rate")


def losses(axes: Axes, curves: Rows, arms: Sequence[str], low: float, high: float) -> None:
    """Training loss against step, a line a run; triangles above spikes, a cross where a run diverged."""
    margin = 0.05 * (high - low) or 0.1
    for c in curves:
        i = arms.index(c["arm"])
        steps, loss = np.array(c["steps"]), _floats(c["loss"])
        axes.plot(steps, loss, **_line(i, 1.1), alpha=0.85)
        for step in c["spikes"]:
            above = np.interp(step, steps, loss) + 1.5 * margin
            axes.plot(step, min(above, high), "v", color=arm_colour(i), ms=6, mew=0)
        for k in np.flatnonzero(np.isfinite(loss))[-1:]:
            axes.plot(steps[k], min(loss[k], high), **_mark(i, c["diverged_at"] is not None, 3.5))
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats")


def logits(axes: Axes, traces: Rows, arms: Sequence[str], low: float, high: float) -> None:
    """The largest logit of any layer against step, with the norm's bound and the published marks."""
    for published in _PUBLISHED:
        axes.axhline(published, color=MUTED, ls=":", lw=1)
    for t in traces:
        i = arms.index(t["arm"])
        grid = _floats(t["logit_absmax"])
        largest = np.where(np.isfinite(grid).any(axis=0), np.nan_to_num(grid, nan=-np.inf).max(axis=0), np.nan)
        axes.plot(t["steps"], largest, **_line(i, 1.2), marker=_MARKERS[i % 6], ms=3)
        if t["bound"] is not None:
            axes.axhline(t["bound"], color=arm_colour(i), ls=(0, (5, 3)), lw=0.8)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.6, high * 1.6)
    _log_ticks(axes, "y", [10.0**k for k in range(-3, 9)], low / 1.6, high * 1.6)
    axes.set_xlabel("step")
    axes.set_ylabel("largest logit")


def heatmap(axes: Axes, trace: Mapping[str, Any], key: str, scale: Normalize) -> None:
    """Layers down, probed steps across; cells without a value stay empty."""
    axes.pcolormesh(np.ma.masked_invalid(_floats(trace[key])), norm=scale, **_MAP)
    for axis, names, most in (("x", trace["steps"], 6), ("y", range(len(trace["sites"])), 8)):
        shown = range(0, len(names), -(-len(names) // most))
        getattr(axes, f"set_{axis}ticks")([k + 0.5 for k in shown], [str(names[k]) for k in shown])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("step")
    axes.set_ylabel("layer")


def strip(axes: Axes, scale: Normalize, label: str) -> None:
    """The colours of a heatmap's scale along a line of numbers."""
    edges = np.asarray(scale.inverse(np.linspace(0, 1, 65)))
    axes.pcolormesh(edges, [0, 1], np.asarray(scale.inverse(np.linspace(0, 1, 64)))[None], norm=scale, **_MAP)
    if isinstance(scale, LogNorm):
        axes.set_xscale("log")
        ticks = [m * 10.0**k for k in range(-3, 9) for m in (1, 2, 5)]
        _log_ticks(axes, "x", ticks, edges[0], edges[-1])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlabel(label)


def _line(arm: int, width: float) -> dict[str, Any]:
    return {"color": arm_colour(arm), "ls": _DASHES[arm % 6], "lw": width}


def _mark(arm: int, diverged: bool, size: float) -> dict[str, Any]:
    """An arm's mark, or a cross for a run that diverged."""
    cross = {"marker": "x", "ms": 7, "mew": 1.8}
    shape = cross if diverged else {"marker": _MARKERS[arm % 6], "ms": size, "mew": 0}
    return {"color": arm_colour(arm), "ls": "", **shape}


def _log_ticks(axes: Axes, axis: str, ticks: Sequence[float], low: float, high: float) -> None:
    """Plain numbers at those of `ticks` that lie on a log axis; where none does, matplotlib's own stay."""
    shown = [v for v in ticks if low <= v <= high]
    if shown:
        getattr(axes, f"set_{axis}ticks")(shown, [number(v) for v in shown])
    axes.minorticks_off()


def _percent(run: Mapping[str, Any]) -> float:
    return 100.0 * float(run["counted_as"]["accuracy"])


def _floats(values: Any) -> NDArray[np.float64]:
    """Numbers with None as NaN."""
    return np.array(values, dtype=float)
