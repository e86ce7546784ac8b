"""What the report's words mean, and where they come from: its last section."""

from __future__ import annotations

import ast
import re
from importlib.resources import files

from retrofit.report.blocks import Prose, Table


def of_the_probes() -> tuple[Prose, Table, Prose]:
    """How attention is measured: the docstring of retrofit.probes, read as text, since importing it needs torch."""
    tree = ast.parse(files("retrofit").joinpath("probes", "__init__.py").read_text(encoding="utf-8"))
    _, how, figures, rules = (ast.get_docstring(tree) or "").split("\n\n")
    lines = re.sub(r"\n {9,}", " ", figures).splitlines()  # a long definition goes on below itself
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines]
    table = Table("Figures of attention", ("figure", "definition"), tuple((name, words) for name, words in rows), 2)
    return Prose(" ".join(how.split())), table, Prose(" ".join(rules.split()))


DEFINITIONS = (
    "Pair: two runs with the same seed, learning rate, data order, augmentation and first head, one with "
    "and one without the norm (Bouthillier et al. 2021, arXiv:2103.03098). At their own best rates the two "
    "runs of a pair share the seed and differ in the rate.",
    "Verdict: better or worse where the Holm-adjusted paired t interval leaves out 0, from three pairs on, however "
    "small the difference; else practically equal where the equivalence test holds; else undecided; provisional "
    "under six pairs. Holm (1979) holds the chance of any false better or worse in a table at 5 percent, over its "
    "learning rates and arms, and that of any false practically equal likewise. Accuracy and loss are two families.",
    "Practically equal: two one-sided t tests (Schuirmann 1987) find the difference in accuracy within the margin, "
    "which the recipe sets before results are seen. Losses have no margin.",
    "More seeds to decide: the smallest number with which an interval would leave out 0 or lie inside the margin, with "
    "the mean and the standard deviation of these pairs.",
    "Sign-flip p: the share of all 2^n ways to swap the arms within pairs that give a mean difference as "
    "large (Fisher 1935). It assumes nothing about the distribution and cannot fall below 2/2^n.",
    "P(better): probability that the arm is better in a pair (Bouthillier et al. 2021), here the share of pairs, ties "
    "counting half, with its exact interval (Clopper and Pearson 1934).",
    "McNemar's test (1947): exact binomial test of the images on which one of two checkpoints alone is right. Two-way "
    "bootstrap: seeds and images resampled apart from each other (the pigeonhole bootstrap, Owen 2007); nominal 95 "
    "percent covers about 73 at 3 seeds where seeds make the spread (simulated).",
    "A/A: the baseline against its twin, the same run from weights with a keyed relative perturbation of 1e-6.",
    "Diverged: the loss or a gradient stopped being finite. Such a run counts with accuracy 1/K and loss "
    "log K for K classes, and is never left out.",
    "Learning-rate sensitivity: mean over the tested rates of min(validation loss, initial loss) minus the best of "
    "them, in nats (Wortsman et al. 2023, arXiv:2309.14322). Initial loss: the median over the baseline's runs at step "
    "0, at most log K.",
    "Spike: a value more than 6 standard deviations above the mean of the 128 before it (OLMo-core, "
    "StabilityMonitorCallback), or 7 above the mean of the 1 000 before it (OLMo 2, arXiv:2501.00656, read one-sided). "
    "Spike score: share of steps with one, in loss or gradient norm.",
    "Largest logit: the largest absolute value of scale × q·k before the softmax. Entropy: of the softmax's "
    "rows, divided by the logarithm of the number of visible keys.",
    "Bound: the largest logit that the norm's gains allow, sqrt(d) × max |gain of q × gain of k| for a norm "
    "over each head without bias.",
    "Insertion shock: cosine between the final tokens of the retrofitted and the original model (1: "
    "unmoved), and KL divergence of the class probabilities, original to retrofitted.",
    "Loss worse from a step on: D is the loss less that of the run at the best rate on the same batch, E its "
    "median at the end, at most 1 nat, and D is clipped to E either way; the step is where the running sum of "
    "D - E/4 is lowest (a change point by cumulative sums, Page 1954). Ends worse: validation loss higher in every "
    "seed of both rates, in the mean by more than 0.02 nats and than its deviation over seeds at the best rate.",
    "Kimi K2's cap of 100: arXiv:2507.20534.",
)
