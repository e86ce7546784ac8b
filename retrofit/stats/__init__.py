"""What a handful of paired runs can and cannot show. numpy and scipy only.

paired.py      a sample of paired differences: interval, tests, probability of improvement
verdicts.py    better, worse, practically equal or undecided, over a family of comparisons
images.py      two checkpoints on the same images; seeds and images resampled together
training.py    what a run counts with, learning-rate sensitivity, spikes

Differences are arm minus baseline, one a pair: the same seed, so the same data order, augmentation and head
initialisation (Bouthillier et al. 2021, arXiv:2103.03098: vary what can vary, and pair on it). Nothing here
returns NaN: what cannot be computed is None.
"""

from retrofit.stats.images import Discordance, mcnemar, pigeonhole_interval
from retrofit.stats.paired import (
    Paired,
    improvement,
    improvement_interval,
    paired,
    sign_flip_floor,
    sign_flip_p,
    t_interval,
    t_p,
)
from retrofit.stats.training import OLMO2, OLMO_CORE, SpikeRule, lr_sensitivity, outcome, spike_score, spikes
from retrofit.stats.verdicts import (
    FIRM_PAIRS,
    MIN_PAIRS,
    MOST_PAIRS,
    Verdict,
    Word,
    equivalence_p,
    holm,
    more_pairs,
    verdicts,
)

__all__ = [
    "FIRM_PAIRS",
    "MIN_PAIRS",
    "MOST_PAIRS",
    "OLMO2",
    "OLMO_CORE",
    "Discordance",
    "Paired",
    "SpikeRule",
    "Verdict",
    "Word",
    "equivalence_p",
    "holm",
    "improvement",
    "improvement_interval",
    "lr_sensitivity",
    "mcnemar",
    "more_pairs",
    "outcome",
    "paired",
    "pigeonhole_interval",
    "sign_flip_floor",
    "sign_flip_p",
    "spike_score",
    "spikes",
    "t_interval",
    "t_p",
    "verdicts",
]
