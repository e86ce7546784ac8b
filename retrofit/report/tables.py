"""The report's tables, each from the document alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from retrofit.report.blocks import Table
from retrofit.report.words import (
    NONE,
    accuracy,
    band,
    fixed,
    interval,
    listed,
    number,
    points,
    rate,
    signed,
)

Document = Mapping[str, Any]


def arm(document: Document, row: Mapping[str, Any]) -> str:
    """The row's arm, with its precision where the study has several."""
    return f"{row['arm']} ({row['precision']})" if len(document["study"]["precisions"]) > 1 else str(row["arm"])


def compared_at(c: Mapping[str, Any]) -> str:
    if c["kind"] == "same_rate":
        return rate(c["lr"])
    return f"own best ({rate(c['lr'])}, {rate(c['baseline_lr'])})"


def means(document: Document) -> Iterable[dict[str, Any]]:
    """Mean test accuracy of each arm at each rate, as counted."""
    order = [a["name"] for a in document["study"]["arms"]]
    places = {(r["precision"], r["arm"], r["lr"]) for r in document["runs"] if r["counted_as"]}
    for precision, name, lr in sorted(places, key=lambda p: (p[0], order.index(p[1]), p[2])):
        runs = [
            r
            for r in document["runs"]
            if r["counted_as"] and (r["precision"], r["arm"], r["lr"]) == (precision, name, lr)
        ]
        yield {
            "arm": name,
            "precision": precision,
            "lr": lr,
            "runs": len(runs),
            "diverged": sum(r["status"] == "diverged" for r in runs),
            "accuracy": float(np.mean([r["counted_as"]["accuracy"] for r in runs])),
            "loss": float(np.mean([r["counted_as"]["loss"] for r in runs])),
        }


def best_rates(document: Document) -> Table:
    tested = {(m["precision"], m["arm"], m["lr"]): m for m in means(document)}
    rows = []
    for b in document["best_rates"]:
        m = tested.get((b["precision"], b["arm"], b["lr"]))
        rows.append(
            (
                arm(document, b),
                rate(b["lr"]) + (f" (the {b['edge']})" if b["edge"] else ""),
                accuracy(b["validation_accuracy"]),
                accuracy(m["accuracy"] if m else None),
                fixed(m["loss"] if m else None),
                str(m["runs"]) if m else NONE,
            )
        )
    columns = ("Arm", "Best rate", "Validation", "Test", "Test loss", "Runs")
    return Table("Each arm at its own best learning rate, chosen on validation; means over seeds", columns, tuple(rows))


def differences(document: Document, metric: str) -> Table:
    """Paired differences of one metric; accuracy in points, loss in nats."""
    scale, digits = (100.0, 1) if metric == "accuracy" else (1.0, 3)
    show: Callable[[float | None], str] = points if metric == "accuracy" else signed
    rows = []
    for c in document["comparisons"]:
        m = c[metric]
        rows.append(
            (
                arm(document, c),
                compared_at(c),
                m["verdict"],
                str(c["pairs"]),
                show(m["mean"]),
                interval(m["interval"], scale, digits),
                band(m["level"]) if m["interval"] else NONE,
                number(m["p_holm"]),
                number(m["sign_flip_p"]),
                number(m["sign_flip_floor"]),
                NONE if m["improvement"] is None else f"{number(m['improvement'] * c['pairs'])} of {c['pairs']}",
            )
        )
    unit = "test accuracy, in points" if metric == "accuracy" else "test loss, in nats (lower is better)"
    some = any(c[metric]["provisional"] for c in document["comparisons"])
    return Table(
        f"Paired differences in {unit}{'; verdicts under six pairs are provisional' if some else ''}",
        (
            "Arm",
            "At rate",
            "Verdict",
            "Pairs",
            "Mean",
            "Interval",
            "Level",
            "p, Holm",
            "Sign-flip p",
            "Its floor",
            "Higher in",
        ),
        tuple(rows),
        words=3,
    )


def sensitivity(document: Document) -> Table:
    rows = tuple(
        (
            arm(document, s),
            f"{rate(s['rates'][0])} to {rate(s['rates'][-1])} ({len(s['rates'])} rates)",
            fixed(s["mean"]),
            interval(s["interval"], 1.0, 3).replace("+", ""),
            str(len(s["by_seed"])),
        )
        for s in document["lr_sensitivity"]
    )
    columns = ("Arm", "Over", "Mean", "95 % interval", "Seeds")
    return Table("Learning-rate sensitivity, in nats of validation loss; less is steadier", columns, rows, words=2)


def runs(document: Document) -> Table:
    rows = []
    for r in sorted(document["runs"], key=lambda r: (r["precision"], r["lr"], r["seed"])):  # pairs stand together
        score = r["test"] or {}
        status = f"diverged at step {r['diverged_at']}" if r["diverged_at"] is not None else r["status"]
        rows.append(
            (
                arm(document, r),
                rate(r["lr"]),
                str(r["seed"]),
                status,
                accuracy(score.get("accuracy")),
                fixed(score.get("loss")),
                accuracy((r["validation"] or {}).get("accuracy")),
                fixed(r["train_loss"]),
                NONE if r["spike_score"] is None else f"{100 * r['spike_score']:.2g} %",
            )
        )
    columns = (
        "Arm",
        "Rate",
        "Seed",
        "Status",
        "Test",
        "Test loss",
        "Validation",
        "Train loss",
        "Spike score",
    )
    return Table("Every run of the plan", columns, tuple(rows), words=4)


def shock(document: Document) -> Table:
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


def calibration(row: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            x["site"] or NONE,
            NONE if x["shift_share"] is None else fixed(math.sqrt(max(0.0, 1 - x["shift_share"])), 2),
            f"{number(x['key_norm_cv_before'], 2)} → {number(x['key_norm_cv_after'], 2)}",
            number(x["logit_absmax_before"]),
            number(x["logit_bound"]),
        )
        for x in row["layers"]
    )
    columns = (
        "Layer",
        "Key length after the shift",
        "Spread of key norms",
        "Largest logit before",
        "Bound after",
    )
    return Table(f"Calibration of {row['arm']} on {number(row['calibration_images'])} images", columns, rows)


def layer_logits(document: Document) -> Table:
    """Layers down, arms and rates across."""
    table = _by_layer(document, "Largest attention logit before → after training", _logit_cell)
    bounds: dict[tuple[str, str], list[float]] = {}
    for x in document["layers"]:
        if x["logit_bound_after"] is not None:
            bounds.setdefault((x["precision"], x["arm"]), []).append(x["logit_bound_after"])
    told = [
        f"{arm(document, {'precision': p, 'arm': a})} at most {number(max(b))}" for (p, a), b in bounds.items() if b
    ]
    return Table(f"{table.caption}{f' (bound by the norm: {listed(told)})' if told else ''}", table.columns, table.rows)


def layer_entropy(document: Document) -> Table:
    def cell(x: Mapping[str, Any]) -> str:
        return f"{fixed(x['entropy_share_before'], 2)} → {fixed(x['entropy_share_after'], 2)}"

    return _by_layer(document, "Attention entropy before → after training, share of the largest", cell)


def _logit_cell(x: Mapping[str, Any]) -> str:
    return f"{number(x['logit_absmax_before'])} → {number(x['logit_absmax_after'])}"


def _by_layer(document: Document, caption: str, cell: Callable[[Mapping[str, Any]], str]) -> Table:
    places = list(dict.fromkeys((x["precision"], x["arm"], x["lr"]) for x in document["layers"]))
    sites = list(dict.fromkeys(x["site"] for x in document["layers"]))
    found = {(x["site"], x["precision"], x["arm"], x["lr"]): cell(x) for x in document["layers"]}
    heads = [f"{arm(document, {'precision': p, 'arm': a})} {rate(lr)}" for p, a, lr in places]
    rows = tuple((site, *(found.get((site, *place), NONE) for place in places)) for site in sites)
    return Table(caption, ("Layer", *heads), rows)


def cost(document: Document) -> Table:
    rows = []
    for c in document["cost"]:
        step = None if c["seconds_per_step"] is None else 1000 * c["seconds_per_step"]
        spread = c["time_ratio_range"]
        rows.append(
            (
                arm(document, c),
                NONE if c["parameters"] is None else f"{c['parameters']:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"),
                number(c["parameters_added"], 6),
                number(step),
                fixed(c["time_ratio"], 2),
                f"{fixed(spread[0], 2)} to {fixed(spread[1], 2)} ({c['pairs']})" if spread else NONE,
            )
        )
    columns = ("Arm", "Parameters", "Added", "ms a step", "Ratio to baseline", "Range (pairs)")
    return Table("What an arm costs", columns, tuple(rows))


def faults(document: Document) -> Table:
    rows = tuple((f["path"], f["reason"]) for f in document["faults"])
    return Table("Missing or wrong in the run folder", ("File or run", "What"), rows, words=2)


def arms(document: Document) -> Table:
    rows = []
    for a in document["study"]["arms"]:
        norm = a["formula"] or (str(a["qk_norm"]) if a["qk_norm"] else "the model as it is")
        rows.append((a["name"], norm, a["init"] or NONE))
    return Table("Arms", ("Arm", "QK-Norm", "Start"), tuple(rows), words=3)


def setting(document: Document) -> list[Table]:
    study = document["study"]
    facts = [
        ("command", " ".join(study["command"]) or NONE),
        ("begun", study["created"] or NONE),
        ("retrofit", study["retrofit_version"] or NONE),
        *((k, v or NONE) for k, v in study["environment"].items() if k != "retrofit"),
    ]
    result = []
    if study["splits"]:
        rows = tuple((n, (s["sha256"] or NONE)[:16], number(s["images"], 9)) for n, s in study["splits"].items())
        result.append(Table("Data", ("Split", "SHA-256 begins", "Images"), rows, words=2))
    return [*result, Table("Environment", ("What", "Value"), tuple(facts), words=2)]
