"""stats.py against scipy, against counting by hand, and by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofit import stats

DIFFERENCES = st.lists(st.integers(-1000, 1000).map(lambda k: k / 1000), min_size=0, max_size=9)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_t_interval_and_p_are_scipys(n: int, level: float) -> None:
    d = np.random.default_rng(n).normal(0.3, 1, n)
    reference = scipy.stats.ttest_1samp(d, 0)
    interval = reference.confidence_interval(level)
    assert stats.t_interval(list(d), level) == pytest.approx((interval.low, interval.high))
    assert stats.t_p(list(d)) == pytest.approx(reference.pvalue)


@pytest.mark.parametrize("n", range(1, 11))
def test_sign_flip_p_counts_every_pattern(n: int) -> None:
    d = np.random.default_rng(n).integers(-4, 6, n) / 10  # ties between patterns are frequent
    patterns = np.array(list(itertools.product([-1, 1], repeat=n)))
    means = np.abs(patterns @ np.abs(d)) / n
    by_hand = np.mean(means >= abs(d.mean()) - 1e-12)
    assert stats.sign_flip_p(list(d)) == pytest.approx(by_hand)


def test_sign_flip_p_is_scipys_permutation_test() -> None:
    d = np.random.default_rng(1).normal(0.5, 1, 12)
    reference = scipy.stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=2**12)
    assert stats.sign_flip_p(list(d)) == pytest.approx(reference.pvalue)


def test_sign_flip_p_goes_on_smoothly_where_it_is_no_longer_counted() -> None:
    d = list(np.random.default_rng(0).normal(0.2, 1, 60))
    z = abs(sum(d)) / math.sqrt(sum(x * x for x in d))
    assert stats.sign_flip_p(d) == pytest.approx(2 * scipy.stats.norm.sf(z))
    counted, limit = (
        stats.sign_flip_p(d[:40]),
        2 * scipy.stats.norm.sf(abs(sum(d[:40])) / math.hypot(*d[:40])),
    )
    assert counted == pytest.approx(limit, abs=0.01)


def test_five_pairs_never_reach_005() -> None:
    assert stats.sign_flip_floor(5) == stats.sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0]) == 0.0625
    assert stats.sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 0.03125
    assert stats.sign_flip_floor(0) is None


def test_holm_by_hand() -> None:
    adjusted, levels = stats.holm([0.01, 0.04, 0.03, 0.005])
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])  # the textbook's example
    assert levels == pytest.approx([1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05 / 2, 1 - 0.05 / 4])
    assert stats.holm([]) == ([], [])


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([], "undecided"),
        ([0.5], "undecided"),
        ([0.5, 0.51], "undecided"),
        ([0.5, 0.51, 0.52], "better"),
        ([-0.5, -0.51, -0.52], "worse"),
        ([0.5, -0.4, 0.1], "undecided"),
        ([0.0, 0.0, 0.0], "undecided"),
        ([0.1, 0.1, 0.1], "undecided"),  # no spread: t is undefined, and three signs decide nothing
        ([0.1] * 6, "better"),
        ([0.8 - 0.7, 0.9 - 0.8, 0.3 - 0.2], "undecided"),  # equal but for the last digit
    ],
)
def test_verdict_on_small_and_degenerate_samples(differences: list[float], word: str) -> None:
    (verdict,) = stats.verdicts([differences])
    assert verdict.word == word
    assert verdict.provisional == (len(differences) < 6)


def test_loss_counts_the_other_way() -> None:
    falling = [-0.5, -0.51, -0.52]
    assert [v.word for v in stats.verdicts([falling], higher_is_better=False)] == ["better"]


def test_a_comparison_of_too_few_pairs_costs_the_others_nothing() -> None:
    strong = [0.5, 0.52, 0.55]
    alone, beside = stats.verdicts([strong])[0], stats.verdicts([[0.1], strong, [0.2, 0.3]])[1]
    assert alone == beside


@given(DIFFERENCES)
def test_swapping_the_arms_mirrors_everything(d: list[float]) -> None:
    mirrored = [-x for x in d]
    one, other = stats.paired(d), stats.paired(mirrored)
    assert one.p == other.p
    assert one.sign_flip_p == other.sign_flip_p
    if d:
        assert one.mean == -other.mean  # type: ignore[operator]
        assert one.improvement == pytest.approx(1 - other.improvement)  # type: ignore[operator]
    if one.low is not None:
        assert (one.low, one.high) == (-other.high, -other.low)  # type: ignore[operator]
    opposite = {"better": "worse", "worse": "better", "undecided": "undecided"}
    assert stats.verdicts([mirrored])[0].word == opposite[stats.verdicts([d])[0].word]


@given(DIFFERENCES, st.randoms(use_true_random=False))
def test_the_order_of_pairs_means_nothing(d: list[float], random) -> None:
    shuffled = random.sample(d, len(d))
    one, other = stats.paired(d), stats.paired(shuffled)
    for a, b in zip(vars(one).values(), vars(other).values(), strict=True):
        assert a == b if a is None else a == pytest.approx(b)


@given(st.lists(DIFFERENCES, max_size=5))
def test_nothing_is_nan_and_verdicts_agree_with_intervals(family: list[list[float]]) -> None:
    for d, verdict in zip(family, stats.verdicts(family), strict=True):
        for value in (*vars(stats.paired(d)).values(), verdict.low, verdict.high, verdict.p, verdict.level):
            assert value is None or math.isfinite(value)
        if verdict.low is not None and len(d) >= 3:
            assert verdict.high is not None
            excludes_zero = verdict.low > 0 or verdict.high < 0
            assert excludes_zero == (verdict.word != "undecided")


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_interval_covers_what_it_says(n: int) -> None:
    studies = np.random.default_rng(n).normal(0.7, 2.0, (4000, n))
    covered = 0
    for d in studies:
        low, high = stats.t_interval(list(d))  # type: ignore[misc]
        covered += low <= 0.7 <= high
    assert covered / len(studies) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("images", [None, 1000])
def test_false_verdicts_stay_under_five_percent_in_studies_of_equal_arms(images: int | None) -> None:
    """2,000 studies of three learning rates and 3, 5 or 8 seeds; with `images`, accuracies come in steps."""
    rng = np.random.default_rng(0)
    wrong = 0
    for study in range(2000):
        seeds = (3, 5, 8)[study % 3]
        a, b = 0.8 + 0.01 * rng.standard_normal((2, 3, seeds))
        if images:
            a, b = rng.binomial(images, a) / images, rng.binomial(images, b) / images
        wrong += any(v.word != "undecided" for v in stats.verdicts([list(d) for d in a - b]))
    assert wrong <= scipy.stats.binom.ppf(0.999, 2000, 0.05)  # five percent, and the simulation's own noise


def test_diverged_runs_count_as_chance() -> None:
    assert stats.outcome(True, 0.9, 0.1, 10) == (0.1, math.log(10))
    assert stats.outcome(False, 0.9, math.nan, 10) == (0.9, math.log(10))
    assert stats.outcome(False, 0.9, 0.1, 10) == (0.9, 0.1)


def test_lr_sensitivity_by_hand() -> None:
    assert stats.lr_sensitivity([0.5, 0.5, 0.5], 2.0) == 0
    # Capped at the initial loss: (0 + 0.5 + 1.5 + 1.5) / 4
    assert stats.lr_sensitivity([0.5, 1.0, 7.0, None], 2.0) == pytest.approx(3.5 / 4)
    assert stats.lr_sensitivity([None, math.inf], 2.0) == 0
    assert stats.lr_sensitivity([0.5], 2.0) is None


def naive_spikes(values: list[float], window: int, sigmas: float) -> list[bool]:
    found = []
    for i, value in enumerate(values):
        before = values[i - window : i] if i >= window else []
        deviation = np.std(before) if before else 0.0
        found.append(bool(before and deviation >= 1e-10 and value > np.mean(before) + sigmas * deviation))
    return found


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), max_size=40), st.integers(2, 8), st.floats(0.5, 3))
def test_spikes_are_those_of_the_rule_read_literally(values: list[float], window: int, sigmas: float) -> None:
    assert list(stats.spikes(values, stats.SpikeRule(window, sigmas))) == naive_spikes(values, window, sigmas)


def test_spike_score() -> None:
    noise = list(np.random.default_rng(0).normal(1, 0.1, 400))
    loss, norm = list(noise), list(noise)
    loss[200], loss[390], norm[200], norm[300] = 9.0, 9.0, 9.0, 9.0
    loss[250] = None  # type: ignore[call-overload]
    assert stats.spike_score(loss, norm) == pytest.approx(3 / 400)  # 200 and 390 in the loss, 300 in the norm
    assert list(np.flatnonzero(stats.spikes(loss))) == [200, 390]
    assert stats.spike_score(noise[:128], noise[:128]) is None
    assert not stats.spikes([1.0] * 200 + [2.0]).any()  # a constant has no deviation to measure by


def test_more_than_three_sigma_is_meant_strictly() -> None:
    window = [-1.0, 1.0] * 2  # mean 0, population deviation 1
    assert not stats.spikes([*window, 3.0], stats.SpikeRule(4, 3.0))[-1]
    assert stats.spikes([*window, 3.0001], stats.SpikeRule(4, 3.0))[-1]
