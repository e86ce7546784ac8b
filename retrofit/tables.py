"""What the command line prints for a person: tables in 100 columns, and a reading in plain words."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from retrofit.calibrate import LayerCalibration
    from retrofit.registry import Entry
    from retrofit.shock import Shock

WATCH, WARN, FAIL = 1e2, 1e3, 1e4
"""Largest |logit|: Kimi K2 caps at 100; Wortsman et al. 2023 saw loss suffer from about 1e3, and every run above 1e4
diverge; ViT-22B saw over 50,000 before it had a norm."""


def print_probe(document: Mapping[str, Any]) -> None:
    """The table of `retrofit probe`, layers down, and what it means."""
    title = f"{document['model']} on {document['images']} images of {document['data']}"
    table = Table(title=title, title_justify="left")
    headings = ("layer", "q rms", "k rms", "common key", "largest logit", "bound", "entropy", "flags")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("layer", "flags") else "right", no_wrap=True)
    for row in document["layers"]:
        bound = row["logit_bound"]
        table.add_row(
            row["site"],
            f"{row['q_rms']:.3g}",
            f"{row['k_rms']:.3g}",
            f"{row['key_common_share']:.0%}",
            f"{row['logit_absmax']:.4g}",
            "none" if bound is None else f"{bound:.4g}",
            f"{row['entropy_share']:.0%}",
            flags(row),
        )
    console = Console(file=sys.stdout, width=min(100, Console(file=sys.stdout).width) if sys.stdout.isatty() else 100)
    console.print(table)
    for line in reading(document):
        console.print(line, highlight=False, markup=False)


def flags(row: Mapping[str, Any]) -> str:
    """What is out of the ordinary in a layer, in a word or two."""
    if not math.isfinite(row["logit_absmax"]):
        return "not finite"
    words = [word for band, word in ((FAIL, "fail"), (WARN, "warn"), (WATCH, "watch")) if row["logit_absmax"] > band][
        :1
    ]
    words += ["low entropy"] if row["low_entropy_heads"] else []
    return ", ".join(words)


def print_models(entries: Sequence[Entry]) -> None:
    """What `retrofit models` found: a count a library, then every model with its attention layers or the reason."""
    console = Console(file=sys.stdout, width=100, soft_wrap=True)
    for library in dict.fromkeys(e.library for e in entries):
        of = [e for e in entries if e.library == library]
        console.print(f"{library}: {sum(e.supported for e in of)} of {len(of)} can take QK-Norm", highlight=False)
        for entry in of:
            what = f"{entry.sites} attention layers" if entry.supported else "no"
            told = f"  {entry.name:48} {what}{'; ' if entry.reason else ''}{entry.reason}"
            console.print(told, highlight=False, markup=False)


def reading(document: Mapping[str, Any]) -> list[str]:
    """What the figures of a probe say, against published bands; no more than they carry."""
    layers = [row for row in document["layers"] if math.isfinite(row["logit_absmax"])]
    lost = [row["site"] for row in document["layers"] if row not in layers]
    lines = []
    if lost:
        lines += [
            f"In {len(lost)} of {len(document['layers'])} layers logits are not finite (first: {lost[0]}): the model "
            "has diverged, its weights are damaged, or its dtype is too narrow for them."
        ]
    if layers:
        lines += [_largest(layers)]
    common = [row["site"] for row in layers if row["key_common_share"] > 0.5]
    if common:
        lines += [
            f"In {len(common)} of {len(layers)} layers most key energy is common to all tokens (first: {common[0]}): "
            "softmax does not see it, a norm does, so that calibration takes it off first."
        ]
    low = [row["site"] for row in layers if row["low_entropy_heads"]]
    if low:
        lines += [
            f"{len(low)} of {len(layers)} layers have heads with entropy under 5 % of its largest (first: {low[0]}). "
            "That alone is no fault: borders and matches need sharp attention."
        ]
    norm = document["qk_norm"]
    if norm["refusal"] is not None:
        lines += [f"QK-Norm cannot go in: {norm['refusal']}."]
    else:
        lines += [
            f"QK-Norm can go into {norm['sites']} attention layers. {norm['formula']}, calibrated on these images, "
            f"would hold every |logit| under {norm['largest_bound']:.4g}."
        ]
        lines += [f"Left out: {norm['left_out']}."] if norm["left_out"] else []
    return lines


def _largest(layers: Sequence[Mapping[str, Any]]) -> str:
    """The largest logit of all layers, and in which published band it lies."""
    worst = max(layers, key=lambda row: row["logit_absmax"])
    largest = worst["logit_absmax"]
    bands = [
        (FAIL, "every published run above 10,000 diverged (Wortsman et al. 2023); ViT-22B saw over 50,000"),
        (WARN, "loss suffers from about 1,000 on (Wortsman et al. 2023)"),
        (WATCH, "Kimi K2 caps logits at 100; watch whether it grows in training"),
        (0.0, "no published trouble starts there; what counts is whether it grows in training"),
    ]
    words = next(text for band, text in bands if largest >= band)
    return f"Largest |logit|: {largest:.4g} in {worst['site']}: {words}."


def print_calibration(layers: Sequence[LayerCalibration]) -> None:
    """What calibration did, layers down: KL of attention in nats, gains, shift, lengths, logits."""
    if not layers:
        return
    print("KL of the original's attention from the normed one, variation of |q| and |k| before and after the shift:")
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("layer", "KL ones", "KL now", "gain q", "gain k", "CV q", "CV k", "k length", "largest", "bound")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for x in layers:
        table.add_row(
            x.site,
            f"{x.kl_ones:.3f}",
            f"{x.kl:.4f}",
            f"{statistics.mean(x.gain_q):.3g}",
            f"{statistics.mean(x.gain_k):.3g}",
            f"{x.query_norm_cv_before:.2f} {x.query_norm_cv_after:.2f}",
            f"{x.key_norm_cv_before:.2f} {x.key_norm_cv_after:.2f}",
            f"x {math.sqrt(max(0.0, 1 - x.shift_share)):.2f}" if x.shifted else "no shift",
            f"{x.logit_absmax_before:.3g}",
            "none" if x.logit_bound is None else f"{x.logit_bound:.3g}",
        )
    Console(file=sys.stdout, width=100).print(table)


def shock_lines(shocks: Mapping[str, Shock]) -> Iterable[str]:
    """How far the model moved when the norm went in, a line a start."""
    for init, shock in shocks.items():
        parts = [
            f"{name} {value:.3f}"
            for name, value in (
                ("cosine of class tokens", shock.cosine_class),
                ("cosine of patch tokens", shock.cosine_patch),
                ("same top class", shock.top1_agreement),
            )
            if value is not None
        ]
        figures = ", ".join(parts) or "not measurable"
        yield f"start {init}, before any training, {shock.images} held-out images: {figures}"
