"""The events of a run, and whether each started in attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from retrofit import stats
from retrofit.diagnose.order import WORSE, Movement, last_judged, loss_onset, movements, summary
from retrofit.diagnose.trained import ATTENTION_GRADIENT, GRADIENT, LOGIT, SCALE, Trained
from retrofit.runfiles import RunKey

Event = Literal["divergence", "degradation", "loss spike", "gradient spike"]
Answer = Literal["yes", "no", "cannot tell"]
Phase = Literal["warm-up", "peak", "decay"]
Reason = Literal[
    "logits first",
    "loss first",
    "no logit moved",
    "overflow first",
    "same batch",
    "gradient first",
    "attention gradients alone",
    "same interval",
    "did not last",
    "loss does not show it",
    "no probe since",
    "no probes",
]

Place: TypeAlias = tuple[str, str, float, int]
"""(precision, arm, learning rate, seed)."""
Judgement: TypeAlias = tuple[Answer, Reason, Movement | None]
"""With the logit, if any, that it stands on."""
_SAME_SPIKE = 8
"""A gradient spike so few steps from a loss spike is one event with it."""


@dataclass(frozen=True)
class Diagnosis:
    key: RunKey
    event: Event
    step: int | None
    """None for a degradation."""
    excess: float | None
    """Of a degradation: validation loss less the twin's, in nats."""
    answer: Answer
    reason: Reason
    onset: int | None
    """The step from which the loss was worse; None where the training loss does not show it."""
    phase: Phase | None
    """Where the learning rate stood then."""
    twin_lr: float | None
    """Rate of the twin; None without one."""
    probe_every: int | None
    """The longest way between two probes, in steps: no order is known more finely."""
    bound: float | None
    """The largest logit that the arm's norms allow at the last probe; None without a norm."""
    moved: tuple[Movement, ...]
    """First movers first."""


def diagnose(runs: Sequence[Trained], best: Mapping[tuple[str, str], float]) -> list[Diagnosis]:
    """The events of every run, the gravest of a run first.

    Args:
        runs: those that finished or diverged.
        best: the best rate of each (precision, arm), chosen on validation.
    """
    by_key = {_place(run.key): run for run in runs}
    found = []
    for run in runs:
        precision, arm, lr, seed = _place(run.key)
        best_lr = best.get((precision, arm), lr)
        twin = by_key.get((precision, arm, best_lr, seed)) if best_lr != lr else None
        twin = None if twin and twin.diverged_at is not None else twin
        degraded = lr > best_lr and _degraded(by_key, run, best_lr)
        found += [_diagnosis(run, twin, event, step) for event, step in _events(run, degraded)]
    return found


def _place(key: RunKey) -> Place:
    return key.precision, key.arm, key.lr, key.seed


def _degraded(by_key: Mapping[Place, Trained], run: Trained, best_lr: float) -> bool:
    """Whether a run's rate ends worse than its arm's best one, by the rule at the head of this package."""
    precision, arm, lr, _ = _place(run.key)
    losses = {
        (rate, seed): other.validation_loss
        for (p, a, rate, seed), other in by_key.items()
        if (p, a) == (precision, arm) and other.validation_loss is not None
    }
    there = {seed: loss for (rate, seed), loss in losses.items() if rate == best_lr}
    worse = {seed: loss - there[seed] for (rate, seed), loss in losses.items() if rate == lr and seed in there}
    spread = float(np.std(list(there.values()), ddof=1)) if len(there) > 1 else 0.0
    return run.key.seed in worse and min(worse.values()) > 0 and float(np.mean([*worse.values()])) > max(spread, WORSE)


def _events(run: Trained, degraded: bool) -> Iterator[tuple[Event, int | None]]:
    if run.diverged_at is not None:
        yield "divergence", run.diverged_at
        return  # its spikes are part of it
    if degraded:
        yield "degradation", None
    loss, gradient = (run.steps[stats.spikes(v)] for v in (run.loss.tolist(), run.grad_norm.tolist()))
    if loss.size:
        yield "loss spike", int(loss[0])
    alone = [int(s) for s in gradient if not loss.size or np.abs(loss - s).min() > _SAME_SPIKE]
    if alone:
        yield "gradient spike", alone[0]


def _diagnosis(run: Trained, twin: Trained | None, event: Event, step: int | None) -> Diagnosis:
    spike = event in ("loss spike", "gradient spike")
    if spike:
        onset = step
    elif event == "divergence":
        onset = loss_onset(run, twin, last=3)
        onset = step if onset is None else onset  # it fell at once
    else:
        onset = loss_onset(run, twin, last=max(3, run.steps.size // 10))
    when = int(run.steps[-1]) if onset is None and run.steps.size else onset or 0
    # A spike stands out of a window; what moved long before it, as in any training, without a twin proves nothing.
    since = max(0, when - stats.OLMO_CORE.window) if spike and twin is None else 0
    moved = movements(run, twin, when, since, until=when if spike else None)
    if event == "degradation" and onset is None:
        answer, reason, logit = _unseen(run, twin, moved)
    elif spike and twin is not None and _spiked(twin, event, when):
        answer, reason, logit = "no", "same batch", None
    else:
        answer, reason, logit = _judge(run, twin, moved, when)
    if logit is not None:  # of all logits, the evidence names those that the answer stands on
        like = (logit.by, logit.lasting)
        moved = [m for m in moved if m.figure != LOGIT or (m.by, m.lasting) == like]
    gaps = np.diff(run.probed)
    return Diagnosis(
        key=run.key,
        event=event,
        step=step,
        excess=_excess(run, twin) if event == "degradation" else None,
        answer=answer,
        reason=reason,
        onset=onset,
        phase=_phase(run, when),
        twin_lr=twin.key.lr if twin else None,
        probe_every=int(gaps.max()) if gaps.size else None,
        bound=run.bound,
        moved=summary(moved),
    )


def _judge(run: Trained, twin: Trained | None, moved: Sequence[Movement], onset: int) -> Judgement:
    last = last_judged(run, twin, LOGIT)
    if last is None:
        return "cannot tell", "no probes", None
    logits = [m for m in moved if m.figure == LOGIT]
    overflow = next((m for m in moved if m.figure == SCALE and not m.not_before(onset)), None)
    first = next((m for m in logits if m.before(onset) and m.lasting), None)
    if first is not None:
        if overflow and overflow.by <= first.by:
            known = first.not_before(overflow.by)
            return ("no", "overflow first", first) if known else ("cannot tell", "same interval", first)
        if any(m.figure == GRADIENT and first.not_before(m.by) for m in moved):
            return "cannot tell", "gradient first", first
        return "yes", "logits first", first
    if gone := next((m for m in logits if m.before(onset)), None):
        return "cannot tell", "did not last", gone
    if overflow and all(m.by > overflow.by for m in logits):
        return "no", "overflow first", None
    if unclear := next((m for m in logits if not m.not_before(onset)), None):
        return "cannot tell", "same interval", unclear
    if logits:
        return "no", "loss first", logits[0]
    if last < onset:
        return "cannot tell", "no probe since", None
    if _moved_before(moved, ATTENTION_GRADIENT, onset) and not _moved_before(moved, GRADIENT, onset):
        return "cannot tell", "attention gradients alone", None
    return "no", "no logit moved", None


def _unseen(run: Trained, twin: Trained | None, moved: Sequence[Movement]) -> Judgement:
    """Of a degradation that validation shows and training does not: without an order, only a no is possible."""
    if last_judged(run, twin, LOGIT) is None:
        return "cannot tell", "no probes", None
    if risen := next((m for m in moved if m.figure == LOGIT), None):
        return "cannot tell", "loss does not show it", risen
    return "no", "no logit moved", None


def _moved_before(moved: Sequence[Movement], figure: str, onset: int) -> bool:
    return any(m.figure == figure and m.before(onset) for m in moved)


def _spiked(twin: Trained, event: Event, step: int) -> bool:
    values = twin.loss if event == "loss spike" else twin.grad_norm
    return step in twin.steps[stats.spikes(values.tolist())]


def _excess(run: Trained, twin: Trained | None) -> float | None:
    if twin is None or run.validation_loss is None or twin.validation_loss is None:
        return None
    return run.validation_loss - twin.validation_loss


def _phase(run: Trained, step: int) -> Phase | None:
    """peak: within 5 percent of the highest rate; warm-up before that, decay after."""
    rates = run.lr[np.isfinite(run.lr)]
    here = run.lr[run.steps <= step][-1:]
    if not rates.size or not np.isfinite(here).all() or not here.size:
        return None
    peak = 0.95 * rates.max()
    if here[0] >= peak:
        return "peak"
    return "warm-up" if step < run.steps[np.nanargmax(run.lr)] else "decay"
