"""The pairs: differences by seed, what they decide, and what each image and the noise floor add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report import tables
from retrofit.report.blocks import Block, Figure, Prose, Section
from retrofit.report.words import points, rate
from retrofit.runfiles import BASELINE


def section(document: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if any(c["pairs"] for c in document["comparisons"]):
        blocks += _differences(document)
    if any(row["pairs"] for row in document["noise_floor"]):
        blocks.append(
            Prose(
                f"A/A is {BASELINE} against its twin: the same seed, the same everything, from weights that differ by "
                "a relative 1e-6, which training amplifies. What A/A differs by is the noise of a matched pair; it is "
                "no arm and is not judged. With its weights untouched the twin would end exactly alike."
            )
        )
    if any(c["images"] for c in document["comparisons"]):
        blocks += [
            tables.images(document),
            Prose(
                "McNemar's test, exact, is about two checkpoints: of the images on which one alone is right, how "
                "unlike a fair coin do they split? It does not speak of the methods, since another seed makes other "
                "checkpoints. The two-way bootstrap resamples seeds and images apart from each other (95 % interval, "
                "in points); with few seeds it is too short, so that no verdict stands on it."
            ),
        ]
    blocks.append(tables.runs(document))
    return Section("results", "Pairs", tuple(blocks))


def _differences(document: Mapping[str, Any]) -> list[Block]:
    told = [
        f"{tables.arm_of(document, c)} at {tables.compared_at(c)} {points(c['accuracy']['mean'])}"
        for c in document["comparisons"]
        if c["pairs"]
    ]
    told += [
        f"{tables.TWIN} at {rate(row['lr'])} {points(row['accuracy']['mean'])}"
        for row in document["noise_floor"]
        if row["pairs"]
    ]
    return [
        Prose(
            f"Every difference is the arm's value minus {BASELINE}'s with the same seed: the same "
            "images in the same order, the same augmentation, the same first head. Intervals are "
            "paired t intervals, widened for the number of comparisons after Holm, so that one leaves "
            "out 0 exactly where the verdict is better or worse."
        ),
        Figure(
            "differences",
            f"Difference in test accuracy to {BASELINE}, in points, by seed: a mark is a pair, with the number of its "
            "seed, the stroke their mean, the bar the interval of the table, the band round 0 the margin of "
            "equivalence. Hollow: a run of the pair diverged.",
            f"Mean differences in points: {'; '.join(told)}.",
        ),
        tables.differences(document, "accuracy"),
        tables.equivalence(document),
        tables.differences(document, "loss"),
    ]
