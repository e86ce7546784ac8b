"""What a handful of paired runs can and cannot show. numpy and scipy only.

Differences are arm minus baseline, one a pair: the same seed, so the same data order, augmentation and head
initialisation (Bouthillier et al. 2021, arXiv:2103.03098: vary what can vary, and pair on it). Nothing here
returns NaN: what cannot be computed is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtr, stdtrit

Word = Literal["better", "worse", "undecided"]

MIN_PAIRS = 3
"""Under so many pairs no verdict is given, whatever the numbers."""
FIRM_PAIRS = 6
"""Under so many pairs a verdict is provisional: the sign-flip p cannot reach 0.05 (2 / 2^5 = 0.0625)."""
_EXACT_PAIRS = 40
"""Up to so many pairs the sign-flip p is counted; the two halves of the count then hold 2^20 sums each."""


@dataclass(frozen=True)
class Paired:
    """A sample of paired differences, summed up, in the unit of the differences."""

    n: int
    mean: float | None
    """None without a pair."""
    sd: float | None
    """Sample standard deviation of the differences. None under two pairs."""
    low: float | None
    """Paired t interval. None under two pairs, and where all differences are equal."""
    high: float | None
    p: float | None
    """Two-sided p of the paired t test; of the sign-flip test where all differences are equal."""
    sign_flip_p: float | None
    sign_flip_floor: float | None
    improvement: float | None
    """Share of pairs in which the arm's value is the larger, ties counting half."""


@dataclass(frozen=True)
class Verdict:
    """What a paired comparison allows to say, as one of a family of comparisons."""

    word: Word
    provisional: bool
    level: float
    """Level of the interval: that at which Holm's procedure tests this comparison."""
    low: float | None
    high: float | None
    p: float | None
    """Holm-adjusted p."""


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


def t_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Paired t interval (Student 1908) for the mean difference.

    Assumes independent pairs and roughly normal differences. None under two pairs and without spread, where
    it is not defined. Chosen over the bootstrap: at 3 pairs a BCa interval of nominal 95 percent covers 68
    (simulated).
    """
    d = np.asarray(differences, float)
    if d.size < 2 or _no_spread(d):
        return None
    half = float(stdtrit(d.size - 1, 0.5 + level / 2)) * float(d.std(ddof=1)) / math.sqrt(d.size)
    return float(d.mean()) - half, float(d.mean()) + half


def t_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of the paired t test that the mean difference is 0; assumptions as for `t_interval`.

    Without spread the t statistic does not exist and the sign-flip p takes its place. None under two pairs.
    """
    d = np.asarray(differences, float)
    if d.size < 2:
        return None
    if _no_spread(d):
        return sign_flip_p(differences)
    t = abs(float(d.mean())) / (float(d.std(ddof=1)) / math.sqrt(d.size))
    return min(1.0, 2.0 * float(stdtr(d.size - 1, -t)))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of Fisher's sign-flip test (1935): the share of all 2^n sign patterns as far from 0.

    Assumes only that a difference is as likely as its opposite when nothing differs. Counted exactly up to 40
    pairs (the sums of the two halves are met in the middle); beyond, the normal limit of the same
    distribution.
    """
    d = np.abs(np.asarray(differences, float))
    if d.size == 0:
        return None
    observed = abs(float(np.sum(np.asarray(differences, float))))
    observed -= 1e-9 * float(d.sum())  # equal sums differ in their last digits
    if observed <= 0:
        return 1.0
    if d.size > _EXACT_PAIRS:
        return 2.0 * float(ndtr(-observed / math.sqrt(float(d @ d))))
    left, right = _flipped_sums(d[: d.size // 2]), np.sort(_flipped_sums(d[d.size // 2 :]))
    above = right.size - np.searchsorted(right, observed - left, side="left")
    return 2.0 * float(above.sum()) / float(2**d.size)


def sign_flip_floor(pairs: int) -> float | None:
    """The smallest two-sided p that the sign-flip test can give with so many pairs: 2 / 2^n."""
    return 2.0 ** (1 - pairs) if pairs > 0 else None


def improvement(differences: Sequence[float]) -> float | None:
    """Share of pairs with a positive difference, ties counting half: P(arm > baseline) of Bouthillier et al.
    2021.

    Unlike the Mann-Whitney form, it keeps the pairing.
    """
    d = np.asarray(differences, float)
    return float(((d > 0) + 0.5 * (d == 0)).mean()) if d.size else None


def paired(differences: Sequence[float], level: float = 0.95) -> Paired:
    """The summary of paired differences, with an interval that knows of no other comparison."""
    n = len(differences)
    low, high = t_interval(differences, level) or (None, None)
    return Paired(
        n=n,
        mean=float(np.mean(differences)) if n else None,
        sd=float(np.std(differences, ddof=1)) if n > 1 else None,
        low=low,
        high=high,
        p=t_p(differences),
        sign_flip_p=sign_flip_p(differences),
        sign_flip_floor=sign_flip_floor(n),
        improvement=improvement(differences),
    )


def holm(p_values: Sequence[float], alpha: float = 0.05) -> tuple[list[float], list[float]]:
    """Holm's step-down procedure (1979): (adjusted p, level of the interval) for each of a family of tests.

    Holds the chance of any false rejection at `alpha`, whatever the dependence between the tests. The level
    is one minus the alpha at which the procedure comes to test that comparison; those behind the first that
    is not rejected share its level. So an interval excludes 0 exactly where the adjusted p is below alpha.
    All intervals together do not cover with 1 - alpha: they are the tests drawn, not a simultaneous set.
    """
    m = len(p_values)
    adjusted, levels = [1.0] * m, [1.0 - alpha] * m
    largest, divisor, rejecting = 0.0, m, True
    for rank, i in enumerate(sorted(range(m), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        divisor = m - rank if rejecting else divisor
        rejecting = rejecting and largest <= alpha
        adjusted[i], levels[i] = largest, 1.0 - alpha / divisor
    return adjusted, levels


def verdicts(family: Sequence[Sequence[float]], higher_is_better: bool = True, alpha: float = 0.05) -> list[Verdict]:
    """One verdict for each sample of paired differences in a family, Holm-adjusted over the family.

    Under three pairs: undecided. Else better or worse where the adjusted interval excludes 0, else undecided.
    Samples that can get no verdict cost the others nothing: their number is fixed before any result is seen.
    Where all differences are equal, the sign-flip p decides, which takes six pairs.
    """
    tested = [i for i, d in enumerate(family) if len(d) >= MIN_PAIRS]
    adjusted, levels = holm([t_p(family[i]) or 0.0 for i in tested], alpha)
    rank = {i: k for k, i in enumerate(tested)}
    result = []
    for i, differences in enumerate(family):
        level = levels[rank[i]] if i in rank else 1.0 - alpha
        p = adjusted[rank[i]] if i in rank else None
        word: Word = "undecided"
        if p is not None and p <= alpha:
            word = "better" if (float(np.mean(differences)) > 0) == higher_is_better else "worse"
        low, high = t_interval(differences, level) or (None, None)
        result.append(Verdict(word, len(differences) < FIRM_PAIRS, level, low, high, p))
    return result


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


def spikes(values: Sequence[float | None], window: int = 128, sigmas: float = 6.0) -> NDArray[np.bool_]:
    """Which values are spikes by the rule of OLMo-core's StabilityMonitorCallback.

    A spike lies above the mean of the `window` values before it by strictly more than `sigmas` of their
    population standard deviations. One-sided; only with a full window; windows with a deviation under 1e-10
    mark nothing. A value that is not finite is no spike (it is a divergence) and stays out of the windows.
    """
    series = np.array([np.nan if v is None else v for v in values], float)
    marked = np.zeros(series.size, bool)
    finite = np.flatnonzero(np.isfinite(series))
    if finite.size <= window:
        return marked
    before = np.lib.stride_tricks.sliding_window_view(series[finite], window)[:-1]  # [values - window, window]
    mean, deviation = before.mean(axis=1), before.std(axis=1)
    marked[finite[window:]] = (series[finite[window:]] > mean + sigmas * deviation) & (deviation >= 1e-10)
    return marked


def spike_score(
    loss: Sequence[float | None], grad_norm: Sequence[float | None], window: int = 128, sigmas: float = 6.0
) -> float | None:
    """Share of steps with a spike in loss or gradient norm (OLMo 2, arXiv:2501.00656; OLMo-core's rule).

    None where no step has a full window before it, so that a short run is not called calm.
    """
    if len(loss) <= window:
        return None
    either = spikes(loss, window, sigmas)
    either[: len(grad_norm)] |= spikes(grad_norm, window, sigmas)[: len(loss)]
    return float(either.mean())


def _no_spread(d: NDArray[np.float64]) -> bool:
    """All differences equal, up to the last digits that subtraction leaves."""
    return bool(np.ptp(d) <= 1e-9 * np.abs(d).max())


def _flipped_sums(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of d under every pattern of signs, 2^n of them."""
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return sums
