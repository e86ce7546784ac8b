"""Better, worse, practically equal or undecided: one word for each comparison of a family."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from retrofit.stats.paired import no_spread, t_interval, t_p

Word = Literal["better", "worse", "practically equal", "undecided"]

MIN_PAIRS = 3
"""Under so many pairs no verdict is given, whatever the numbers."""
FIRM_PAIRS = 6
"""Under so many pairs a verdict is provisional: the sign-flip p cannot reach 0.05 (2 / 2^5 = 0.0625)."""
MOST_PAIRS = 1000
"""Beyond so many pairs in all it is not asked how many would decide."""


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
    equal_low: float | None
    """The interval that lies inside the margin exactly where the equivalence test holds. None without a margin,
    under two pairs and without spread."""
    equal_high: float | None
    equal_p: float | None
    """Holm-adjusted p of the equivalence test. None without a margin and under three pairs."""
    more_pairs: int | None
    """So many more would decide what is undecided, if mean and spread stayed. None where it is decided, where no
    spread is known, and where more than 1,000 pairs would be needed."""


def equivalence_p(differences: Sequence[float], margin: float) -> float | None:
    """p of two one-sided t tests (TOST, Schuirmann 1987): that the mean difference lies outside (-margin, margin).

    Assumptions as for `t_interval`. At most alpha exactly where the interval of level 1 - 2 alpha lies inside
    the margin. Without spread the one-sided sign-flip p, 1 / 2^n, takes its place. None under two pairs.
    """
    d = np.asarray(differences, float)
    if d.size < 2:
        return None
    inside = margin - abs(float(d.mean()))
    if no_spread(d):
        return 0.5**d.size if inside > 0 else 1.0
    return float(stdtr(d.size - 1, -inside / (float(d.std(ddof=1)) / math.sqrt(d.size))))


def more_pairs(
    differences: Sequence[float], level: float, margin: float | None = None, equal_level: float = 0.9
) -> int | None:
    """How many more pairs would decide, if these differences' mean and standard deviation stayed as they are.

    The smallest number with which the t interval of `level` leaves out 0, or that of `equal_level` lies inside
    the margin. It stands on an estimate: with the mean as observed, the next study decides about every other
    time. None under two pairs, and where it would take more than 1,000 in all.
    """
    d = np.asarray(differences, float)
    if d.size < 2:
        return None
    mean, sd, flat = abs(float(d.mean())), float(d.std(ddof=1)), no_spread(d)

    def decides(n: int) -> bool:
        """Grows with n alone: the intervals shrink round a mean that stays."""
        if flat:
            apart, equal = mean > 0 and 0.5 ** (n - 1) <= 1 - level, 0.5**n <= (1 - equal_level) / 2
        else:
            apart = float(stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n) < mean
            equal = mean + float(stdtrit(n - 1, 0.5 + equal_level / 2)) * sd / math.sqrt(n) < (margin or 0.0)
        return apart or (equal and margin is not None and mean < margin)

    sizes = range(max(d.size + 1, MIN_PAIRS), MOST_PAIRS + 1)
    first = bisect_left(sizes, True, key=decides)
    return sizes[first] - d.size if first < len(sizes) else None


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


def verdicts(
    family: Sequence[Sequence[float]],
    higher_is_better: bool = True,
    alpha: float = 0.05,
    margin: float | None = None,
) -> list[Verdict]:
    """One verdict for each sample of paired differences in a family, Holm-adjusted over the family.

    Under three pairs: undecided. Else better or worse where the adjusted interval excludes 0, however small the
    difference; else practically equal where, with a margin, the equivalence test holds; else undecided. The tests
    of difference and those of equivalence are two families, each held at `alpha`. Samples that can get no verdict
    cost the others nothing: their number is fixed before any result is seen. Where all differences are equal, the
    sign-flip p decides, which takes six pairs.
    """
    tested = [i for i, d in enumerate(family) if len(d) >= MIN_PAIRS]
    adjusted, levels = holm([t_p(family[i]) or 0.0 for i in tested], alpha)
    equal, equal_levels = holm([_equivalence(family[i], margin) for i in tested], alpha)
    rank = {i: k for k, i in enumerate(tested)}
    result = []
    for i, differences in enumerate(family):
        level = levels[rank[i]] if i in rank else 1.0 - alpha
        equal_level = 2 * (equal_levels[rank[i]] if i in rank else 1.0 - alpha) - 1
        p = adjusted[rank[i]] if i in rank else None
        equal_p = equal[rank[i]] if i in rank and margin is not None else None
        word: Word = "undecided"
        if p is not None and p <= alpha:
            word = "better" if (float(np.mean(differences)) > 0) == higher_is_better else "worse"
        elif equal_p is not None and equal_p <= alpha:
            word = "practically equal"
        low, high = t_interval(differences, level) or (None, None)
        equal_low, equal_high = (margin is not None and t_interval(differences, equal_level)) or (None, None)
        more = more_pairs(differences, level, margin, equal_level) if word == "undecided" else None
        provisional = len(differences) < FIRM_PAIRS
        result.append(Verdict(word, provisional, level, low, high, p, equal_low, equal_high, equal_p, more))
    return result


def _equivalence(differences: Sequence[float], margin: float | None) -> float:
    p = None if margin is None else equivalence_p(differences, margin)
    return 1.0 if p is None else p
