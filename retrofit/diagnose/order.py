"""Which figures of a run moved, between which probes, and from which step on its loss was worse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from retrofit.diagnose.trained import ENTROPY, LOGIT, SCALE, WHOLE, Array, Steps, Trained

FACTOR = 1.5
FACTOR_ALONE = 3.0
"""Without a twin."""
SOFT = 3.0
"""A largest |logit| under this has not moved: one key can then outweigh another by e^6, 400 times, at most."""
WORSE = 0.02
"""Nats: losses that differ by less do not differ."""
_FALLING = {ENTROPY, SCALE}


@dataclass(frozen=True)
class Movement:
    """A figure that moved. Of several layers, `sites` names those that moved first; the numbers are its first one's."""

    figure: str
    sites: tuple[str, ...]
    """Those that moved most stand first. Empty where the figure is that of the whole run."""
    after: int | None
    """The last probed step at which it had not moved; None where no earlier probe tells."""
    by: int
    """The probed step at which it had."""
    start: float | None
    """At step 0, or at the probe that `movements` was told to start from."""
    twin: float | None
    """The twin's, at step `by`."""
    value: float
    """At step `by`."""
    last: float
    """At the last probe that counts: up to a spike, else that of the run."""
    lasting: bool
    """At the onset and at that last probe it is still moved, and there by no less than at step `by`."""
    rise: float
    """value / start, else value / twin; the inverse where it moves by falling."""

    def before(self, step: int) -> bool:
        return self.by < step

    def not_before(self, step: int) -> bool:
        return self.after is not None and self.after >= step


def movements(
    run: Trained, twin: Trained | None, onset: int, since: int = 0, until: int | None = None
) -> list[Movement]:
    """Every figure of every layer that moved before the onset, else after it; the earliest first.

    Args:
        since: figures are compared with what they were at the last probe up to this step.
        until: the step up to which a movement must last; None for the end of the run.
    """
    found = [_movement(run, twin, figure, site, onset, since, until) for figure, site in run.figures]
    return sorted((m for m in found if m), key=lambda m: (m.by, -m.rise))


def summary(moved: Iterable[Movement]) -> tuple[Movement, ...]:
    """One entry a figure: that of the layers that moved first."""
    firsts: dict[str, list[Movement]] = {}
    for m in moved:
        group = firsts.setdefault(m.figure, [])
        if not group or m.by == group[0].by:
            group.append(m)
    return tuple(_merged(group) for group in firsts.values())


def last_judged(run: Trained, twin: Trained | None, figure: str) -> int | None:
    """The last probed step at which it is known of some layer whether the figure has moved; None for step 0 alone."""
    steps = [int(s) for name, site in run.figures if name == figure for s in _judged(run, twin, name, site)[0] if s]
    return max(steps, default=None)


def loss_onset(run: Trained, twin: Trained | None, last: int) -> int | None:
    """The step from which the loss is worse than the twin's; None where its last `last` values are not.

    Without a twin, worse than the lowest mean of ten losses so far.
    """
    steps, excess = _excess(run, twin)
    if not excess.size:
        return None
    end = min(float(np.median(excess[-last:])), 1.0)
    if end < WORSE:
        return None
    sums = np.cumsum(np.clip(excess, -end, end) - end / 4)
    return int(steps[np.argmin([0.0, *sums[:-1]])])


def _excess(run: Trained, twin: Trained | None) -> tuple[Steps, Array]:
    """Steps with a finite loss, and by how much it lies above the twin's on the same batch."""
    finite = np.isfinite(run.loss)
    steps, loss = run.steps[finite], run.loss[finite]
    if twin is None:
        means = [loss[max(0, i - 9) : i + 1].mean() for i in range(loss.size)]
        return steps, loss - np.minimum.accumulate(means) if loss.size else loss
    same = {(s, i): v for s, i, v in zip(twin.steps, twin.ids, twin.loss, strict=True)}
    theirs = np.array([same.get(k, np.nan) for k in zip(steps, run.ids[finite], strict=True)], float)
    shared = np.isfinite(theirs)
    return steps[shared], (loss - theirs)[shared]


def _judged(
    run: Trained, twin: Trained | None, figure: str, site: str, since: int = 0
) -> tuple[Steps, NDArray[np.bool_], Array]:
    """(steps, moved, twin's value) at the probes that can be judged."""
    values = run.figures[figure, site]
    start = np.full_like(values, _start(run, figure, site, since))
    theirs = np.full_like(values, np.nan)
    if twin is not None and (figure, site) in twin.figures:
        at = dict(zip(twin.probed.tolist(), twin.figures[figure, site], strict=True))
        theirs = np.array([at.get(s, np.nan) for s in run.probed.tolist()], float)
    over_start, over_twin = (_rise(figure, values, reference) for reference in (start, theirs))
    alone = np.isnan(over_twin)
    above_start = np.isnan(over_start) | (over_start >= np.where(alone, FACTOR_ALONE, FACTOR))
    moved = above_start & (alone | (over_twin >= FACTOR)) & (run.probed >= since)
    if figure == LOGIT:
        moved &= values >= SOFT
    known = ~(np.isnan(over_start) & alone)
    return run.probed[known], moved[known], theirs[known]


def _movement(
    run: Trained, twin: Trained | None, figure: str, site: str, onset: int, since: int, until: int | None
) -> Movement | None:
    steps, moved, theirs = _judged(run, twin, figure, site, since)
    if not moved.any():
        return None
    by = int(np.argmax(moved))
    upto = int(np.searchsorted(steps, onset, "right"))
    held = by >= upto or bool(moved[upto - 1])
    if by < upto and held:  # it has moved at the onset: since when without a break?
        by = upto - int(np.argmin([*moved[:upto][::-1], False]))
    end = max(by, steps.size - 1 if until is None else int(np.searchsorted(steps, until, "right")) - 1)
    values = run.figures[figure, site][np.isin(run.probed, steps)]
    start = _start(run, figure, site, since)
    value, last = float(values[by]), float(values[end])
    references = [r for r in (start, float(theirs[by])) if np.isfinite(r)]
    return Movement(
        figure=figure,
        sites=(site,) if site != WHOLE else (),
        after=int(steps[by - 1]) if by else None,
        by=int(steps[by]),
        start=start if np.isfinite(start) else None,
        twin=float(theirs[by]) if np.isfinite(theirs[by]) else None,
        value=value,
        last=last,
        lasting=held and bool(moved[end]) and (last <= value if figure in _FALLING else last >= value),
        rise=float(_rise(figure, np.array([value]), np.array(references[:1]))[0]),
    )


def _merged(group: list[Movement]) -> Movement:
    first = group[0]
    return replace(first, sites=tuple(site for m in group for site in m.sites))


def _start(run: Trained, figure: str, site: str, since: int) -> float:
    """At the last probe up to `since`; NaN without one."""
    at = int(np.searchsorted(run.probed, since, "right")) - 1
    return float(run.figures[figure, site][at]) if at >= 0 else np.nan


def _rise(figure: str, values: Array, references: Array) -> Array:
    """How many times its reference a figure is; the inverse where trouble makes it fall. NaN where one is missing."""
    over, under = (references, values) if figure in _FALLING else (values, references)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(references > 0, over / under, np.nan)
