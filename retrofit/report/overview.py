"""Several studies in one table: what each found at its best learning rates, and in which settings they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrofit.report.blocks import Block, Figure, Page, Prose, Section, Table
from retrofit.report.setting import arm_rows, settings
from retrofit.report.words import NONE, accuracy, band, fixed, interval, listed, plural, points, rate, signed
from retrofit.runfiles import BASELINE
from retrofit.stats import FIRM_PAIRS

SCHEMA = "qknorm-retrofit/overview/1"
"""Stands in the report.json of several studies, by overview.schema.json."""
_SETTINGS = 60
"""At most so many differing settings are shown."""


def overview(studies: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document over several studies: each one's report document, by name."""
    rows = [row for name, document in studies.items() for row in _rows(name, document)]
    return {
        "schema": SCHEMA,
        "headline": _headline(rows, len(studies)),
        "studies": [
            {
                "name": name,
                "model": d["study"]["model"],
                "data": d["study"]["data"],
                "headline": d["verdict"]["headline"],
                "unmatched": d["study"]["unmatched"],
                "runs_planned": d["study"]["runs_planned"],
                "runs_counted": d["study"]["runs_counted"],
                "faults": len(d["faults"]),
            }
            for name, d in studies.items()
        ],
        "rows": rows,
        "settings": _differing(studies),
    }


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of its parents as tell it from the others."""
    parts = [path.resolve().parts for path in run_dirs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def page(document: Mapping[str, Any]) -> Page:
    rows = document["rows"]
    compared = [r for r in rows if r["pairs"]]
    blocks: list[Block] = []
    if compared:
        told = "; ".join(f"{_label(r, rows)} {points(r['difference'])}" for r in compared)
        caption = (
            f"Difference in test accuracy to {BASELINE}, each arm at its own best learning rate: mean and the interval "
            "of the table."
        )
        blocks.append(Figure("studies", caption, f"Mean differences in points: {told}."))
    blocks.append(_table(rows))
    missing = [s for s in document["studies"] if s["faults"] or s["runs_counted"] < s["runs_planned"]]
    if missing:
        blocks.append(
            Table(
                "Not whole; each study's own report names what is missing",
                ("Study", "Runs with a result", "Missing or wrong"),
                tuple((s["name"], f"{s['runs_counted']} of {s['runs_planned']}", str(s["faults"])) for s in missing),
            )
        )
    sections = [Section("studies", "At the best learning rates", tuple(blocks))]
    if document["settings"]:
        columns = ("Setting", *(s["name"] for s in document["studies"]))
        shown = tuple((x["key"], *(v or NONE for v in x["values"])) for x in document["settings"][:_SETTINGS])
        left = len(document["settings"]) - len(shown)
        more = [Prose(f"{plural(left, 'more setting')} in report.json.")] if left else []
        table = Table("Settings in which the studies differ", columns, shown, words=len(columns))
        sections.append(Section("settings", "In what they differ", (table, *more)))
    return Page(
        title="QK-Norm studies",
        subtitle=listed([s["name"] for s in document["studies"]]),
        headline=document["headline"],
        sentences=tuple(f"{s['name']}: {s['headline']}." for s in document["studies"]),
        limits=(
            "Every verdict is that of its own study, where it was corrected for the comparisons of that study alone: "
            "the more studies, the likelier that one of them is wrong by chance.",
            "Studies of other models, data or settings stand beside each other here; nothing is averaged over them.",
        ),
        sections=tuple(sections),
        provisional=any(r["provisional"] for r in rows),
    )


def _rows(name: str, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each arm and precision of a study; one without a comparison where it has only one arm."""
    sensitivity = {(s["arm"], s["precision"]): s["mean"] for s in document["lr_sensitivity"]}
    ratios = {(c["arm"], c["precision"]): c["time_ratio"] for c in document["cost"]}
    rows = []
    for c in (c for c in document["comparisons"] if c["kind"] == "own_best"):
        place, floor = (c["arm"], c["precision"]), (BASELINE, c["precision"])
        diverged = {
            arm: sum(o["diverged"] for o in document["outcomes"] if (o["arm"], o["precision"]) == (arm, c["precision"]))
            for arm in (c["arm"], BASELINE)
        }
        rows.append(
            {
                "study": name,
                "arm": c["arm"],
                "precision": c["precision"],
                "lr": c["lr"],
                "baseline_lr": c["baseline_lr"],
                "pairs": c["pairs"],
                "provisional": c["pairs"] < FIRM_PAIRS,
                "accuracy": c["means"]["arm"]["accuracy"],
                "baseline_accuracy": c["means"]["baseline"]["accuracy"],
                "difference": c["accuracy"]["mean"],
                "interval": c["accuracy"]["interval"],
                "level": c["accuracy"]["level"],
                "verdict": c["accuracy"]["verdict"],
                "loss_difference": c["loss"]["mean"],
                "loss_verdict": c["loss"]["verdict"],
                "lr_sensitivity": sensitivity.get(place),
                "baseline_lr_sensitivity": sensitivity.get(floor),
                "diverged": diverged[c["arm"]],
                "baseline_diverged": diverged[BASELINE],
                "time_ratio": ratios.get(place),
            }
        )
    return rows


def _headline(rows: Sequence[Mapping[str, Any]], studies: int) -> str:
    if not rows:
        return f"{plural(studies, 'study')} with nothing to compare yet".replace("studys", "studies")
    words = Counter(r["verdict"] for r in rows)
    told = listed([f"{n} {word}" for word, n in sorted(words.items())])
    counted = f"{plural(len(rows), 'comparison')} with {BASELINE} in {studies} studies"
    few = min(r["pairs"] for r in rows)
    opening = f"Provisional, from {plural(few, 'pair')} on: " if few < FIRM_PAIRS else ""
    return f"{opening}{counted}, each arm at its best learning rate: {told}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = tuple(
        (
            r["study"],
            _arm(r, rows),
            r["verdict"],
            str(r["pairs"]),
            f"{accuracy(r['baseline_accuracy'])} ({rate(r['baseline_lr'])})",
            f"{accuracy(r['accuracy'])} ({rate(r['lr'])})",
            points(r["difference"]),
            f"{interval(r['interval'])} ({band(r['level'])})" if r["interval"] else NONE,
            signed(r["loss_difference"]),
            f"{fixed(r['baseline_lr_sensitivity'])} → {fixed(r['lr_sensitivity'])}",
            f"{r['baseline_diverged']} → {r['diverged']}",
            fixed(r["time_ratio"], 2),
        )
        for r in rows
    )
    columns = (
        "Study",
        "Arm",
        "Verdict",
        "Pairs",
        "Baseline (rate)",
        "Arm (rate)",
        "Points",
        "Interval",
        "Loss, nats",
        "Rate sensitivity",
        "Diverged runs",
        "Step time",
    )
    caption = "Each arm at its own best learning rate, chosen on validation, reported on test; arrows: baseline → arm"
    return Table(caption, columns, shown, words=3)


def _arm(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    several = len({r["precision"] for r in rows}) > 1
    return f"{row['arm']} ({row['precision']})" if several else str(row["arm"])


def _label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{row['study']}, {_arm(row, rows)}"


def _differing(studies: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys of the resolved recipes, an arm as one of them, whose values are not the same in all studies."""
    flat = [_settings(d["study"]) for d in studies.values()]
    keys = dict.fromkeys(key for recipe in flat for key in recipe)
    rows = [{"key": key, "values": [recipe.get(key) for recipe in flat]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def _settings(study: Mapping[str, Any]) -> dict[str, str]:
    recipe = {k: v for k, v in study["recipe"].items() if k != "arms"}
    arms = {
        f"arms.{name}": f"{norm}{f', start {start}' if start != NONE else ''}" for name, norm, start in arm_rows(study)
    }
    return dict(line.split("=", 1) for line in (settings(recipe) if recipe else ())) | arms
