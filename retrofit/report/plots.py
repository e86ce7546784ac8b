"""How each kind of panel is drawn: marks on a pair of axes, from rows of the report's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from retrofit.report.svg import INK, MUTED, RULE, arm_colour
from retrofit.report.words import number, rate

Rows = Sequence[Mapping[str, Any]]
_MARKERS = "os^Dv*"
_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1, 1, 1)), (0, (6, 2)), (0, (2, 2)))
_PUBLISHED = (100, 1_000, 10_000)
"""Largest logits: Kimi K2's cap; where losses suffer; above which runs diverged (Wortsman et al. 2023)."""
_LINE = 11
"""Height of a pair's line, in CSS pixels."""
_NOTE: dict[str, Any] = {"textcoords": "offset points", "color": MUTED}
_LEFT = {
    "cosine_class_token": "cosine, class token",
    "cosine_patch_tokens": "cosine, patches",
    "top1_agreement": "same top class",
}
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


def row_height(pairs: int) -> int:
    """Height in CSS pixels of a comparison's row: every pair has a line of its own."""
    return max(26, _LINE * pairs + 8)


def differences(axes: Axes, rows: Rows, arm: int, low: float, high: float, margin: float) -> None:
    """A row a comparison: pairs as marks in the order of their seeds, the mean as a stroke, the interval as a bar."""
    axes.axvspan(-100 * margin, 100 * margin, color=RULE, alpha=0.5, lw=0)
    axes.axvline(0, color=INK, lw=1)
    room, top, middles = 4 * (high - low) or 1.0, 0, []
    for row in rows:
        told, height, floor = row["accuracy"], row_height(row["pairs"]), row["kind"] == "noise_floor"
        colour, middle = MUTED if floor else arm_colour(arm), top + height / 2
        if interval := told["interval_alone" if floor else "interval"]:
            axes.plot(np.multiply(interval, 100), [middle] * 2, color=colour, lw=5, alpha=0.3)
        axes.plot([100 * told["mean"]] * 2, [top + 3, top + height - 3], color=colour, lw=1.6)
        shape: dict[str, Any] = {"color": colour, "ls": "", "marker": "o" if floor else _MARKERS[arm % 6], "ms": 4.5}
        for k, (seed, value) in enumerate(zip(row["seeds"], told["differences"], strict=True)):
            at = (100 * value, middle + _LINE * (k - (row["pairs"] - 1) / 2))
            hollow: dict[str, Any] = {"mfc": "none", "mew": 1.2} if seed in row["lost"] else {"mew": 0}
            axes.plot(*at, **shape, **hollow)
            axes.annotate(str(seed), at, (4, 0), **_NOTE, fontsize=6.5, va="center_baseline")
        middles.append(middle)
        top += height
        axes.axhline(top, color=RULE, lw=0.6)
    axes.set_yticks(middles, [_row_name(c) for c in rows])
    axes.set_ylim(top, 0)
    axes.set_xlim(100 * low - room, 100 * high + room)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("difference, points of test accuracy")
    axes.set_ylabel("learning rate")


def studies(axes: Axes, rows: Rows, names: Sequence[str]) -> None:
    """A row a study and arm: the mean difference and its interval."""
    axes.axvline(0, color=INK, lw=1)
    for y, row in enumerate(rows):
        if row["interval"]:
            axes.plot(np.multiply(row["interval"], 100), [y, y], color=arm_colour(1), lw=5, alpha=0.3)
        axes.plot(100 * row["difference"], y, color=arm_colour(1), ls="", marker=_MARKERS[1], ms=5, mew=0)
    axes.set_yticks(range(len(names)), [name if len(name) < 29 else f"…{name[-28:]}" for name in names])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("difference, points of test accuracy")


def _row_name(row: Mapping[str, Any]) -> str:
    if row["kind"] == "noise_floor":
        return f"A/A {rate(row['lr'])}"
    return rate(row["lr"]) if row["kind"] == "same_rate" else "own best"


def shock(axes: Axes, row: Mapping[str, Any], arm: int) -> None:
    """What is left of the original's function by start: the one that was trained filled, the other hollow."""
    shown = [k for k in _LEFT if any(s[k] is not None for s in row["shock"].values())]
    for y, key in enumerate(shown):
        values = {start: s[key] for start, s in row["shock"].items() if s[key] is not None}
        axes.plot([min(values.values()), max(values.values())], [y, y], color=RULE, lw=3, zorder=1)
        for start, value in values.items():
            hollow: dict[str, Any] = {} if start == row["init"] else {"mfc": "none"}
            axes.plot(value, y, color=arm_colour(arm), ls="", marker=_MARKERS[arm % 6], ms=6, mew=1.4, **hollow)
            axes.annotate(start, (value, y), (0, 6), **_NOTE, fontsize=8, ha="center")
    axes.set_yticks(range(len(shown)), [_LEFT[k] for k in shown])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    lowest = min((s[k] for s in row["shock"].values() for k in shown if s[k] is not None), default=0.0)
    axes.set_xlim(min(0.0, lowest) - 0.05, 1.05)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("1: the original's function")


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
        if c["validation_loss"] is not None and steps.size:
            axes.plot(steps[-1], min(c["validation_loss"], high), "o", mfc="none", mec=arm_colour(i), ms=6, mew=1.2)
        for k in np.flatnonzero(np.isfinite(loss))[-1:]:
            axes.plot(steps[k], min(loss[k], high), **_mark(i, c["diverged_at"] is not None, 3.5))
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats")


def loss_differences(axes: Axes, rows: Rows, arms: Sequence[str], low: float, high: float) -> None:
    """Loss minus the baseline's on the same batch against step: mean of the seeds, their range; the twin grey."""
    axes.axhline(0, color=INK, lw=1)
    for r in rows:
        i = 0 if r["twin"] else arms.index(r["arm"])
        colour = MUTED if r["twin"] else arm_colour(i)
        if len(r["seeds"]) > 1:
            axes.fill_between(r["steps"], r["low"], r["high"], color=colour, alpha=0.18, lw=0)
        axes.plot(r["steps"], r["mean"], color=colour, ls=":" if r["twin"] else _DASHES[i % 6], lw=1.2)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("difference, nats")


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
    cells = np.ma.masked_invalid(_floats(trace[key]))
    size = (0, len(trace["steps"]), len(trace["sites"]), 0)
    axes.imshow(cells, norm=scale, cmap=_MAP["cmap"], interpolation="none", aspect="auto", extent=size)
    for axis, names, most in (("x", trace["steps"], 6), ("y", range(len(trace["sites"])), 8)):
        shown = range(0, len(names), -(-len(names) // most))
        getattr(axes, f"set_{axis}ticks")([k + 0.5 for k in shown], [str(names[k]) for k in shown])
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
    """Plain numbers at those of `ticks` that lie on a log axis; its ends, where fewer than two do."""
    shown = [v for v in ticks if low <= v <= high]
    shown = shown if len(shown) > 1 else [low, high]
    getattr(axes, f"set_{axis}ticks")(shown, [number(v) for v in shown])
    axes.minorticks_off()


def _percent(run: Mapping[str, Any]) -> float:
    return 100.0 * float(run["counted_as"]["accuracy"])


def _floats(values: Any) -> NDArray[np.float64]:
    """Numbers with None as NaN."""
    return np.array(values, dtype=float)
