"""The report's tables, each from the document alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrofit.report.blocks import Table
from retrofit.report.words import (
    NONE,
    accuracy,
    band,
    fixed,
    interval,
    number,
    plural,
    points,
    rate,
    signed,
)

Document = Mapping[str, Any]
TWIN = "A/A"
"""How the baseline's twin is called on the page."""


def arm_of(document: Document, row: Mapping[str, Any]) -> str:
    """The row's arm, with its precision where the study has several."""
    return f"{row['arm']} ({row['precision']})" if len(document["study"]["precisions"]) > 1 else str(row["arm"])


def compared_at(c: Mapping[str, Any]) -> str:
    if c["kind"] == "same_rate":
        return rate(c["lr"])
    rates = dict.fromkeys((rate(c["lr"]), rate(c["baseline_lr"])))
    return f"own best ({', '.join(rates)})"


def outcomes(document: Document) -> Table:
    rows = tuple(
        (
            arm_of(document, m),
            rate(m["lr"]),
            str(m["runs"]),
            f"{m['diverged']} ({100 * m['diverged_share']:.0f} %)" if m["diverged"] else "0",
            accuracy(m["accuracy"]),
            NONE if m["accuracy_sd"] is None else fixed(100 * m["accuracy_sd"], 1),
            fixed(m["loss"]),
        )
        for m in document["outcomes"]
    )
    columns = ("Arm", "Rate", "Runs", "Diverged", "Test", "Its deviation", "Test loss")
    return Table("Every arm at every learning rate; a diverged run counts as chance", columns, rows, words=2)


def best_rates(document: Document) -> Table:
    tested = {(m["precision"], m["arm"], m["lr"]): m for m in document["outcomes"]}
    rows = []
    for b in document["best_rates"]:
        m = tested.get((b["precision"], b["arm"], b["lr"]))
        rows.append(
            (
                arm_of(document, b),
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
    """Paired differences of one metric, the noise floor below them; accuracy in points, loss in nats."""
    scale, digits = (100.0, 1) if metric == "accuracy" else (1.0, 3)
    show: Callable[[float | None], str] = points if metric == "accuracy" else signed
    rows = []
    for c in document["comparisons"]:
        m = c[metric]
        rows.append(
            (
                arm_of(document, c),
                compared_at(c),
                m["verdict"],
                str(c["pairs"]),
                show(m["mean"]),
                _banded(m["interval"], m["level"], scale, digits),
                number(m["p_holm"]),
                *_alone(m, c["pairs"]),
            )
        )
    for row in document["noise_floor"]:
        m = row[metric]
        told = ("noise floor", str(row["pairs"]), show(m["mean"]), _banded(m["interval_alone"], 0.95, scale, digits))
        twin = arm_of(document, {**row, "arm": TWIN})
        rows.append((twin, rate(row["lr"]), *told, NONE, *_alone(m, row["pairs"])))
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
            "p, Holm",
            "Sign-flip p",
            "Better in",
            "P(better), 95 %",
        ),
        tuple(rows),
        words=3,
    )


def _banded(bounds: Sequence[float] | None, level: float, scale: float, digits: int) -> str:
    return f"{interval(bounds, scale, digits)} ({band(level)})" if bounds else NONE


def _alone(m: Mapping[str, Any], pairs: int) -> tuple[str, ...]:
    """Sign-flip p with its floor, pairs in which the arm is better, and what that leaves for its probability."""
    low_high = m["improvement_interval"]
    return (
        NONE if m["sign_flip_p"] is None else f"{number(m['sign_flip_p'])} (floor {number(m['sign_flip_floor'])})",
        NONE if m["improvement"] is None else f"{number(m['improvement'] * pairs)} of {pairs}",
        NONE if low_high is None else f"{fixed(low_high[0], 2)} to {fixed(low_high[1], 2)}",
    )


def equivalence(document: Document) -> Table:
    margin = f"±{document['study']['margin']['points']:g} points"
    rows = tuple(
        (
            arm_of(document, c),
            compared_at(c),
            c["accuracy"]["verdict"],
            str(c["pairs"]),
            interval(c["accuracy"]["equivalence_interval"]),
            number(c["accuracy"]["equivalence_p_holm"]),
            NONE if c["accuracy"]["more_pairs"] is None else str(c["accuracy"]["more_pairs"]),
        )
        for c in document["comparisons"]
    )
    columns = ("Arm", "At rate", "Verdict", "Pairs", f"Inside {margin}?", "p, Holm", "More seeds to decide")
    return Table(
        f"Practically equal? Two one-sided tests that the difference in test accuracy lies within {margin}",
        columns,
        rows,
        words=3,
    )


def images(document: Document) -> Table:
    """McNemar of each pair at the best rates, and the two-way bootstrap of each comparison."""
    rows = []
    for c in document["comparisons"]:
        told = c["images"]
        if told and c["kind"] == "own_best":
            rows += [
                (
                    arm_of(document, c),
                    compared_at(c),
                    f"seed {pair['seed']}",
                    str(pair["arm_only"]),
                    str(pair["baseline_only"]),
                    number(pair["p"]),
                    NONE,
                )
                for pair in told["pairs"]
            ]
        if told and told["interval"]:
            where = (arm_of(document, c), compared_at(c), f"all {c['pairs']} seeds")
            rows.append((*where, NONE, NONE, NONE, interval(told["interval"])))
    columns = ("Arm", "At rate", "Which", "Only arm right", "Only baseline right", "McNemar p", "Two-way bootstrap")
    return Table("Image by image", columns, tuple(rows), words=3)


def sensitivity(document: Document) -> Table:
    rows = tuple(
        (
            arm_of(document, s),
            f"{rate(s['rates'][0])} to {rate(s['rates'][-1])} ({len(s['rates'])} rates)",
            fixed(s["mean"]),
            interval(s["interval"], 1.0, 3).replace("+", ""),
            str(len(s["by_seed"])),
            signed(s["difference"]["mean"]) if s["difference"] else NONE,
            interval(s["difference"]["interval"], 1.0, 3) if s["difference"] else NONE,
        )
        for s in document["lr_sensitivity"]
    )
    columns = ("Arm", "Over", "Mean", "95 % interval", "Seeds", "To baseline", "95 % interval")
    return Table("Learning-rate sensitivity, in nats of validation loss; less is steadier", columns, rows, words=2)


def runs(document: Document) -> Table:
    rows = []
    every = [*document["runs"], *({**r, "arm": TWIN} for r in document["twins"])]
    for r in sorted(every, key=lambda r: (r["precision"], r["lr"], r["seed"])):  # pairs stand together
        score = r["test"] or {}
        rows.append(
            (
                arm_of(document, r),
                rate(r["lr"]),
                str(r["seed"]),
                _status(r),
                accuracy(score.get("accuracy")),
                fixed(score.get("loss")),
                accuracy((r["validation"] or {}).get("accuracy")),
                fixed(r["train_loss"]),
                _share(r["spike_score"]),
                _share(r["spike_score_olmo2"]),
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
        "Spikes, 128",
        "Spikes, 1000",
    )
    return Table("Every run of the plan; spikes as a share of steps, by either rule", columns, tuple(rows), words=4)


def _status(run: Mapping[str, Any]) -> str:
    told = str(run["status"])
    if run["diverged_at"] is not None:
        told += f" at step {run['diverged_at']}" + (f", {run['diverged_by']}" if run["diverged_by"] else "")
    left_out = run["nonfinite_steps"] if run["status"] == "finished" else None
    return f"{told}, {plural(left_out, 'step')} not finite" if left_out else told


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.2g} %"


def cost(document: Document) -> Table:
    rows = []
    for c in document["cost"]:
        step = None if c["seconds_per_step"] is None else 1000 * c["seconds_per_step"]
        spread = c["time_ratio_range"]
        rows.append(
            (
                arm_of(document, c),
                NONE if c["parameters"] is None else f"{c['parameters']:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"),
                number(c["parameters_added"], 6),
                number(step),
                fixed(c["time_ratio"], 2),
                f"{fixed(spread[0], 2)} to {fixed(spread[1], 2)} ({c['pairs']})" if spread else NONE,
                number(c["images_per_second"]),
                NONE if c["memory_bytes"] is None else f"{number(c['memory_bytes'] / 2**20)} MiB",
            )
        )
    columns = ("Arm", "Parameters", "Added", "ms a step", "Ratio", "Range (pairs)", "Images a second", "Memory")
    return Table("What an arm costs", columns, tuple(rows))
