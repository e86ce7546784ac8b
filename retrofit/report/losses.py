"""Training loss, its spikes by both rules, and its difference to the baseline's step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report import tables
from retrofit.report.blocks import Block, Figure, Prose, Section
from retrofit.report.words import listed, number, plural, rate, signed
from retrofit.runfiles import BASELINE
from retrofit.stats import OLMO2, OLMO_CORE


def section(document: Mapping[str, Any]) -> Section:
    curves = document["curves"]
    if not curves:
        return Section("loss", "Training loss", ())
    steps = sorted({c["steps_per_point"] for c in curves})
    width = f"the mean of {listed([str(s) for s in steps])} steps" if steps != [1] else "one step"
    caption = (
        "Training loss in nats, a line a run, one panel a learning rate, all on the same axes. Each point "
        f"is {width}. Triangles mark spikes, a cross the step at which a run diverged, a ring the validation loss at "
        "the end, which is without augmentation and label smoothing and so may lie lower."
    )
    ends = "; ".join(
        f"{tables.arm_of(document, group[0])} at {rate(group[0]['lr'])} {number(min(ends))} to {number(max(ends))}"
        for group in _by_place(document)
        if (ends := [last for c in group if (last := _last(c["loss"])) is not None])
    )
    blocks: list[Block] = [Figure("losses", caption, f"The curves end at: {ends or 'no finite loss'}.")]
    blocks += [Prose(_told(document)), *_differences(document)]
    return Section("loss", "Training loss", tuple(blocks))


def _told(document: Mapping[str, Any]) -> str:
    longest = max(round(len(c["steps"]) * c["steps_per_point"]) for c in document["curves"])
    if longest <= OLMO_CORE.window:
        return "No run is long enough for the spike rules, which need 128 and 1 000 steps before the one they judge."
    told = f"Spikes in the loss by OLMo-core's rule: {'; '.join(_spikes(document, 'spikes')) or 'none'}."
    if longest <= OLMO2.window:
        return f"{told} No run is long enough for OLMo 2's rule, which needs 1 000 steps before the one it judges."
    return f"{told} By OLMo 2's: {'; '.join(_spikes(document, 'spikes_olmo2')) or 'none'}."


def _differences(document: Mapping[str, Any]) -> list[Block]:
    rows = document["loss_differences"]
    if not rows:
        return []
    told = "; ".join(
        f"{tables.arm_of(document, {**r, 'arm': tables.TWIN} if r['twin'] else r)} at {rate(r['lr'])} "
        f"{signed(r['last_tenth'])}"
        for r in rows
    )
    return [
        Figure(
            "loss_differences",
            f"Training loss minus {BASELINE}'s on the very same batch, in nats: the mean of the seeds, their range "
            "shaded. Below 0 the arm is ahead. More sensitive than two curves side by side: what makes a batch hard "
            f"cancels out.{' Grey: A/A.' if any(r['twin'] for r in rows) else ''}",
            f"Over the last tenth of the steps the loss lies above {BASELINE}'s by: {told}.",
        ),
        Prose(f"Over the last tenth of the steps, mean difference of the training loss in nats: {told}."),
    ]


def _by_place(document: Mapping[str, Any]) -> list[list[Any]]:
    """The curves of each arm at each rate, rates rising."""
    places: dict[Any, list[Any]] = {}
    for c in document["curves"]:
        places.setdefault((c["precision"], c["lr"], c["arm"]), []).append(c)
    return [places[k] for k in sorted(places, key=lambda k: k[:2])]


def _spikes(document: Mapping[str, Any], rule: str) -> list[str]:
    return [
        f"{tables.arm_of(document, group[0])} at {rate(group[0]['lr'])} has {sum(counts)} in "
        f"{plural(len(counts), 'run')}"
        for group in _by_place(document)
        if (counts := [len(c[rule]) for c in group]) and any(counts)
    ]


def _last(values: list[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)
