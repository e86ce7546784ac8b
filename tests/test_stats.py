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


@pytest.mark.parametrize("n", [2, 3, 5, 10, 30])
@pytest.mark.parametrize("mean", [-0.8, 0.0, 0.3])
def test_equivalence_is_two_one_sided_t_tests(n: int, mean: float) -> None:
    d = np.random.default_rng(n).normal(mean, 0.5, n)
    above = scipy.stats.ttest_1samp(d, -0.5, alternative="greater").pvalue
    below = scipy.stats.ttest_1samp(d, 0.5, alternative="less").pvalue
    assert stats.equivalence_p(list(d), 0.5) == pytest.approx(max(above, below))


@pytest.mark.parametrize(
    ("differences", "margin", "word"),
    [
        ([0.1, -0.1, 0.05, 0.0], 0.5, "practically equal"),
        ([0.1, -0.1, 0.05, 0.0], None, "undecided"),
        ([0.1, -0.1, 0.05, 0.0], 0.05, "undecided"),
        ([0.1, -0.1], 5.0, "undecided"),  # two pairs decide nothing
        ([0.10, 0.11, 0.12], 0.5, "better"),  # a difference is one, however small
        ([0.0, 0.0, 0.0], 0.5, "undecided"),  # no spread, and three signs are few
        ([0.0] * 5, 0.5, "practically equal"),  # 1 / 2^5
        ([0.9] * 5, 0.5, "undecided"),
    ],
)
def test_practically_equal(differences: list[float], margin: float | None, word: str) -> None:
    (verdict,) = stats.verdicts([differences], margin=margin)
    assert verdict.word == word
    assert (verdict.equal_p is None) == (margin is None or len(differences) < 3)
    if verdict.equal_low is not None and len(differences) >= 3:
        inside = -margin < verdict.equal_low and verdict.equal_high < margin  # type: ignore[operator]
        assert inside == (verdict.equal_p <= 0.05)  # type: ignore[operator]


@pytest.mark.parametrize("d", [[0.3, -0.1], [0.5, -0.2, 0.4], [0.2, 0.1, -0.3, 0.1], [1e-3, 0.5, -0.4, 0.1, 0.2]])
@pytest.mark.parametrize("margin", [None, 0.25])
def test_so_many_more_pairs_decide_and_one_fewer_does_not(d: list[float], margin: float | None) -> None:
    """Samples of the same mean and standard deviation, made for every size."""
    (verdict,) = stats.verdicts([d], margin=margin)
    assert verdict.word == "undecided"

    def word(n: int) -> str:
        shape = np.array([-1.0, 1.0] * (n // 2) + [0.0] * (n % 2))
        sample = np.mean(d) + shape / shape.std(ddof=1) * np.std(d, ddof=1)
        return str(stats.verdicts([list(sample)], margin=margin)[0].word)

    decided = [n for n in range(max(3, len(d) + 1), 1001) if word(n) != "undecided"]
    assert verdict.more_pairs == (decided[0] - len(d) if decided else None)


def test_more_pairs_of_samples_without_spread() -> None:
    assert stats.more_pairs([0.2, 0.2, 0.2], 0.95) == 3  # 2 / 2^6
    assert stats.more_pairs([0.0, 0.0, 0.0], 0.95) is None
    assert stats.more_pairs([0.0, 0.0, 0.0], 0.95, margin=0.5) == 2  # 1 / 2^5
    assert stats.more_pairs([0.2], 0.95) is None
    assert stats.more_pairs([], 0.95, margin=0.5) is None


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_probability_of_improvement_has_the_exact_binomial_interval(n: int) -> None:
    for wins in range(n + 1):
        d = [1.0] * wins + [-1.0] * (n - wins)
        share = stats.improvement(d)
        assert share == pytest.approx(wins / n)
        assert stats.improvement(d, higher_is_better=False) == pytest.approx(1 - wins / n)
        exact = scipy.stats.binomtest(wins, n).proportion_ci(method="exact")
        assert stats.improvement_interval(wins / n, n) == pytest.approx((exact.low, exact.high))
    assert stats.improvement([0.0, 0.0, 1.0, -1.0]) == 0.5  # ties count half
    assert stats.improvement([]) is None


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
        found = stats.verdicts([list(d) for d in a - b], margin=0.005)
        wrong += any(v.word in ("better", "worse") for v in found)
    assert wrong <= scipy.stats.binom.ppf(0.999, 2000, 0.05)  # five percent, and the simulation's own noise


@pytest.mark.parametrize("n", [3, 10])
def test_arms_as_far_apart_as_the_margin_are_seldom_called_equal(n: int) -> None:
    """The worst case of the equivalence test: three rates, each with a true difference of exactly the margin."""
    rng = np.random.default_rng(n)
    studies = 0.5 + rng.normal(0, 0.4, (1000, 3, n))
    wrong = sum(any(v.word == "practically equal" for v in stats.verdicts(s.tolist(), margin=0.5)) for s in studies)
    assert wrong <= scipy.stats.binom.ppf(0.999, 1000, 0.05)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    rng = np.random.default_rng(0)
    for images in (0, 1, 5, 400):
        a, b = rng.random((2, images)) < [[0.8], [0.7]]
        found = stats.mcnemar(a, b)
        assert found.arm_only == int(np.sum(a & ~b))
        assert found.baseline_only == int(np.sum(b & ~a))
        split = found.arm_only + found.baseline_only
        assert found.p == pytest.approx(scipy.stats.binomtest(found.arm_only, split).pvalue if split else 1.0)


def test_the_two_way_bootstrap_is_that_of_seeds_and_images_drawn_by_hand() -> None:
    rng = np.random.default_rng(0)
    d = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.7, 0.2], size=(4, 150)) + np.array([[0.1], [-0.1], [0.0], [0.2]])
    by_hand = [
        d[rng.integers(0, 4, 4)][:, rng.integers(0, 150, 150)].mean()  # rows and columns, each with replacement
        for _ in range(4000)
    ]
    found = stats.pigeonhole_interval(d, resamples=4000)
    assert found == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])), abs=0.015)
    assert found == stats.pigeonhole_interval(d, resamples=4000)
    shuffled = stats.pigeonhole_interval(d[:, rng.permutation(150)], resamples=4000)
    assert found == shuffled  # images have no order


@pytest.mark.parametrize(("seeds", "lowest", "highest"), [(3, 0.65, 0.80), (10, 0.84, 0.93)])
def test_the_two_way_bootstrap_is_too_short_where_few_seeds_make_the_spread(
    seeds: int, lowest: float, highest: float
) -> None:
    """What its docstring says, and why no verdict stands on it."""
    rng = np.random.default_rng(seeds)
    covered = []
    for _ in range(300):
        d = rng.normal(0, 1, (seeds, 1)) + rng.normal(0, 0.01, (seeds, 40))
        low, high = stats.pigeonhole_interval(d, resamples=300)  # type: ignore[misc]
        covered.append(low <= 0 <= high)
    assert lowest <= np.mean(covered) <= highest


def test_where_seeds_or_images_lack_there_is_no_two_way_bootstrap() -> None:
    assert stats.pigeonhole_interval([]) is None
    assert stats.pigeonhole_interval([[1.0, 0.0]]) is None
    assert stats.pigeonhole_interval([[], []]) is None
    assert stats.pigeonhole_interval([[0.0, 0.0], [0.0, 0.0]]) == (0.0, 0.0)


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


def test_the_rule_of_olmo_2_needs_a_thousand_steps() -> None:
    noise = np.random.default_rng(0).normal(1, 0.1, 6000)
    noise[[500, 5500]] = 1.0 + 0.1 * 9
    values = list(noise)
    assert list(np.flatnonzero(stats.spikes(values, stats.OLMO2))) == [5500]  # 500 has no full window before it
    assert stats.spike_score(values, [], stats.OLMO2) == pytest.approx(1 / 6000)
    assert stats.spike_score(values[:1000], [], stats.OLMO2) is None


def test_more_than_three_sigma_is_meant_strictly() -> None:
    window = [-1.0, 1.0] * 2  # mean 0, population deviation 1
    assert not stats.spikes([*window, 3.0], stats.SpikeRule(4, 3.0))[-1]
    assert stats.spikes([*window, 3.0001], stats.SpikeRule(4, 3.0))[-1]
