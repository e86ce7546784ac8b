"""What a run counts with, how much a learning rate matters, and where a run had a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SpikeRule:
    window: int
    """So many values before a value are what it is measured by."""
    sigmas: float


_CHUNK = 4096
"""So many windows are held at once."""
OLMO_CORE = SpikeRule(128, 6.0)
"""OLMo-core's StabilityMonitorCallback."""
OLMO2 = SpikeRule(1000, 7.0)
"""The spike score of OLMo 2 (arXiv:2501.00656); for runs of more than 1,000 steps. Read one-sided here: the paper says
away from the mean, and a fall of the loss is no trouble."""


def outcome(diverged: bool, accuracy: float | None, loss: float | None, classes: int) -> tuple[float, float]:
    """(accuracy, loss in nats) that a run counts with; 1/K and log K for K classes where it diverged.

    A model that answers at random does no worse, so a run that blew up is an outcome like any other and is
    never left out. A finished run whose loss is not finite counts with log K as well.
    """
    chance, uniform = 1.0 / max(classes, 1), math.log(max(classes, 1))
    if diverged:
        return chance, uniform
    return (
        accuracy if accuracy is not None and math.isfinite(accuracy) else chance,
        loss if loss is not None and math.isfinite(loss) else uniform,
    )


def lr_sensitivity(losses: Sequence[float | None], initial_loss: float) -> float | None:
    """Learning-rate sensitivity of Wortsman et al. 2023 (arXiv:2309.14322, section 2.2), in nats.

    `losses`: final validation loss at each rate of a sweep, None where the run diverged. The mean over the
    sweep of min(loss, initial loss) minus the best of them. Rates should be evenly spaced on a log axis;
    values compare only over the same range. None under two rates. The paper warns that it loses its meaning
    where an intervention changes what a learning rate means, as QK-Norm does for W_q and W_k.
    """
    if len(losses) < 2:
        return None
    capped = [min(x, initial_loss) if x is not None and math.isfinite(x) else initial_loss for x in losses]
    return float(np.mean(capped)) - min(capped)


def spikes(values: Sequence[float | None], rule: SpikeRule = OLMO_CORE) -> NDArray[np.bool_]:
    """Which values are spikes by a rule.

    A spike lies above the mean of the window of values before it by strictly more than `sigmas` of their
    population standard deviations. One-sided; only with a full window; windows with a deviation under 1e-10
    mark nothing. A value that is not finite is no spike (it is a divergence) and stays out of the windows.
    """
    series = np.array([np.nan if v is None else v for v in values], float)
    marked = np.zeros(series.size, bool)
    finite = np.flatnonzero(np.isfinite(series))
    if finite.size <= rule.window:
        return marked
    windows = np.lib.stride_tricks.sliding_window_view(series[finite], rule.window)[:-1]  # [values - window, window]
    for start in range(0, len(windows), _CHUNK):
        before, now = windows[start : start + _CHUNK], finite[rule.window + start :][:_CHUNK]
        mean, deviation = before.mean(axis=1), before.std(axis=1)
        marked[now] = (series[now] > mean + rule.sigmas * deviation) & (deviation >= 1e-10)
    return marked


def spike_score(
    loss: Sequence[float | None], grad_norm: Sequence[float | None], rule: SpikeRule = OLMO_CORE
) -> float | None:
    """Share of steps with a spike in loss or gradient norm (OLMo 2, arXiv:2501.00656).

    None where no step has a full window before it, so that a short run is not called calm.
    """
    if len(loss) <= rule.window:
        return None
    either = spikes(loss, rule)
    either[: len(grad_norm)] |= spikes(grad_norm, rule)[: len(loss)]
    return float(either.mean())
