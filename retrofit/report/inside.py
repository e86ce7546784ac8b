"""Inside attention: the norm that went in, and what each layer did in training. Two sections and their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrofit.report.blocks import Block, Figure, Points, Prose, Section, Table
from retrofit.report.tables import Document, arm_of
from retrofit.report.words import NONE, accuracy, fixed, listed, number, rate


def insertion(document: Document) -> Section:
    if not document["insertion"]:
        return Section("shock", "Insertion shock", ())
    told = "; ".join(
        f"{row['arm']} from {start}: same top class on {accuracy(s['top1_agreement'])}, KL {number(s['kl'])} nats"
        for row in document["insertion"]
        for start, s in row["shock"].items()
    )
    blocks: list[Block] = [
        Prose(
            "How far the model's function moved when the norm went in, before any training, on images that "
            "did not calibrate it. Start ones is the norm as papers start it; the other is the start that "
            "was trained here. The accuracy of a norm that is not yet trained proves nothing on its own: "
            "training is what repairs the rest. KL of a layer is that of its attention, on the images that calibrated "
            "it."
        ),
        Figure(
            "shock",
            "What the insertion left of the original's function, by start: 1 is all of it. Hollow: a start that was "
            "not trained here.",
            f"Insertion shock: {told or 'not measured'}.",
        ),
        _shock(document),
    ]
    for row in document["insertion"]:
        if row["remarks"]:
            blocks.append(Points(tuple(f"{row['arm']}: {remark}" for remark in row["remarks"])))
        if row["layers"]:
            blocks.append(_calibration(row))
        if row["skipped"]:
            blocks.append(
                Points(tuple(f"{s['name'] or NONE} was left as it is: {s['reason'] or NONE}" for s in row["skipped"]))
            )
    return Section("shock", "Insertion shock", tuple(blocks))


def attention(document: Document) -> Section:
    if not document["traces"]:
        return Section("attention", "Attention, layer by layer", ())
    told = "; ".join(
        f"{arm_of(document, x)} at {rate(x['lr'])} from {number(x['before'])} to {number(x['after'])}"
        for x in document["logits"]
    )
    maps = "Heatmaps of the numbers in the table below, over the steps between."
    return Section(
        "attention",
        "Attention, layer by layer",
        (
            Prose(
                "Published marks for the largest attention logit: losses suffer from about 1 000, and "
                "every run above 10 000 diverged (Wortsman et al. 2023); Kimi K2 caps its logits at 100. "
                "They come from larger models trained from scratch. Low entropy alone is no fault: a head "
                "may well look at one place."
            ),
            Figure(
                "logit_lines",
                "Largest attention logit of any layer, on the probed images, against the step; the largest "
                "of all seeds. Dashed: the bound that the norm puts on it at the end. Dotted: 100, 1 000 "
                "and 10 000.",
                f"Largest logit before and after training: {told}.",
            ),
            Figure(
                "logit_maps",
                "Largest attention logit by layer and step, the largest of all seeds. One colour scale for all.",
                maps,
            ),
            _layer_logits(document),
            Figure(
                "entropy_maps",
                "Attention entropy by layer and step, as a share of its largest value, mean of all seeds: "
                "1 looks at all places alike, 0 at a single one.",
                maps,
            ),
            _layer_entropy(document),
            Figure(
                "q_maps",
                "Norm of q by layer and step, as attention gets it: root mean square over tokens and channels, mean of "
                "all seeds. One colour scale for q and k.",
                maps,
            ),
            _layer_norms(document, "q"),
            Figure("k_maps", "Norm of k by layer and step, on the same scale.", maps),
            _layer_norms(document, "k"),
        ),
    )


def _shock(document: Document) -> Table:
    rows = [
        (
            row["arm"],
            start + (" (trained here)" if start == row["init"] else ""),
            fixed(s["cosine_class_token"]),
            fixed(s["cosine_patch_tokens"]),
            number(s["kl"]),
            accuracy(s["top1_agreement"]),
            number(s["images"]),
        )
        for row in document["insertion"]
        for start, s in row["shock"].items()
    ]
    columns = (
        "Arm",
        "Start",
        "Cosine, class token",
        "Cosine, patches",
        "KL, nats",
        "Same top class",
        "Images",
    )
    return Table(
        "Function of the retrofitted model against the original's, before training",
        columns,
        tuple(rows),
        words=2,
    )


def _calibration(row: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            x["site"] or NONE,
            " → ".join(number(x[k], 2) for k in ("kl_ones", "kl_match", "kl")),
            f"{_range(x['gain_q'])}; {_range(x['gain_k'])}",
            # An arm that started at ones has no shift, and one before a rotation may have longer keys.
            NONE if x["shift_share"] is None else fixed(math.sqrt(max(0.0, 1 - x["shift_share"])), 2),
            f"{number(x['key_norm_cv_before'], 2)} → {number(x['key_norm_cv_after'], 2)}",
            number(x["logit_absmax_before"]),
            number(x["logit_bound"]),
        )
        for x in row["layers"]
    )
    columns = (
        "Layer",
        "KL: ones → match → here",
        "Gains of q; of k",
        "Key length after the shift",
        "Spread of key norms",
        "Largest logit before",
        "Bound after",
    )
    return Table(f"Calibration of {row['arm']} on {number(row['calibration_images'])} images", columns, rows)


def _range(values: Sequence[float]) -> str:
    """The least and the largest over the heads."""
    if not values:
        return NONE
    low, high = number(min(values), 2), number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def _layer_logits(document: Document) -> Table:
    """Layers down, arms and rates across."""
    table = _by_layer(document, "Largest attention logit before → after training", _logit_cell)
    bounds: dict[tuple[str, str], list[float]] = {}
    for x in document["layers"]:
        if x["logit_bound_after"] is not None:
            bounds.setdefault((x["precision"], x["arm"]), []).append(x["logit_bound_after"])
    told = [
        f"{arm_of(document, {'precision': p, 'arm': a})} at most {number(max(b))}" for (p, a), b in bounds.items() if b
    ]
    return Table(f"{table.caption}{f' (bound by the norm: {listed(told)})' if told else ''}", table.columns, table.rows)


def _layer_entropy(document: Document) -> Table:
    def cell(x: Mapping[str, Any]) -> str:
        return f"{fixed(x['entropy_share_before'], 2)} → {fixed(x['entropy_share_after'], 2)}"

    return _by_layer(document, "Attention entropy before → after training, share of the largest", cell)


def _layer_norms(document: Document, which: str) -> Table:
    def cell(x: Mapping[str, Any]) -> str:
        return f"{number(x[f'{which}_rms_before'])} → {number(x[f'{which}_rms_after'])}"

    return _by_layer(document, f"Norm of {which} before → after training", cell)


def _logit_cell(x: Mapping[str, Any]) -> str:
    return f"{number(x['logit_absmax_before'])} → {number(x['logit_absmax_after'])}"


def _by_layer(document: Document, caption: str, cell: Callable[[Mapping[str, Any]], str]) -> Table:
    places = list(dict.fromkeys((x["precision"], x["arm"], x["lr"]) for x in document["layers"]))
    sites = list(dict.fromkeys(x["site"] for x in document["layers"]))
    found = {(x["site"], x["precision"], x["arm"], x["lr"]): cell(x) for x in document["layers"]}
    heads = [f"{arm_of(document, {'precision': p, 'arm': a})} {rate(lr)}" for p, a, lr in places]
    rows = tuple((site, *(found.get((site, *place), NONE) for place in places)) for site in sites)
    return Table(caption, ("Layer", *heads), rows)
