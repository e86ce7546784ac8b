"""The document as a page of blocks: every sentence and table, made once for Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report import inside, losses, pairs, setting, tables, trouble
from retrofit.report.blocks import Block, Figure, Page, Points, Prose, Section
from retrofit.report.definitions import DEFINITIONS, of_the_probes
from retrofit.report.words import accuracy, fixed, joined, listed, plural, rate


def page(document: Mapping[str, Any]) -> Page:
    study, verdict = document["study"], document["verdict"]
    arms = [a["name"] for a in study["arms"]]
    about = [
        " against ".join([*arms[1:], arms[0]]) if len(arms) == 2 else listed(arms),
        study["model"] and f"model {study['model']}",
        study["data"] and f"data {study['data']}",
        f"{plural(len(study['lrs']), 'learning rate')} × {plural(len(study['seeds']), 'seed')}",
        study["created"] and f"begun {study['created'][:10]}",
    ]
    built = (
        _against_rates(document),
        pairs.section(document),
        inside.insertion(document),
        losses.section(document),
        inside.attention(document),
        trouble.section(document),
        _cost(document),
        setting.section(document),
        Section("method", "Definitions and sources", (Points(DEFINITIONS), *of_the_probes())),
    )
    return Page(
        title="QK-Norm comparison" if len(arms) > 1 else "Training report",
        subtitle=joined(about, " · "),
        headline=verdict["headline"],
        sentences=tuple(verdict["sentences"]),
        limits=tuple(verdict["limits"]),
        sections=tuple(section for section in built if section.blocks),
        provisional=verdict["provisional"],
    )


def _against_rates(document: Mapping[str, Any]) -> Section:
    blocks: list[Block] = []
    if any(r["counted_as"] for r in document["runs"]):
        blocks = [
            Figure(
                "accuracy",
                "Test accuracy against learning rate. A mark is a run, lines join the means; a cross is a "
                "run that diverged and counts as chance, the dotted line.",
                _accuracy_alt(document),
            ),
            tables.best_rates(document),
            tables.outcomes(document),
            *_sensitivity(document),
        ]
    return Section("rates", "Accuracy against learning rate", tuple(blocks))


def _sensitivity(document: Mapping[str, Any]) -> list[Block]:
    if not document["lr_sensitivity"]:
        return []
    caps = sorted({fixed(s["initial_loss"], 2) for s in document["lr_sensitivity"]})
    return [
        tables.sensitivity(document),
        Prose(
            f"A validation loss above the initial one ({listed(caps)} nats) counts as the initial one. The sensitivity "
            "compares only over the same range of rates. It weakens as a measure where an arm changes what a rate "
            "means: under QK-Norm the weights of q and k, without bias, act only by their direction, so that the same "
            "rate and weight decay are another step for them (Wortsman et al. 2023, appendix B)."
        ),
    ]


def _accuracy_alt(document: Mapping[str, Any]) -> str:
    told = []
    for row in document["outcomes"]:
        diverged = f", {row['diverged']} diverged" if row["diverged"] else ""
        told.append(
            f"{tables.arm_of(document, row)} at {rate(row['lr'])}: {accuracy(row['accuracy'])} "
            f"({plural(row['runs'], 'run')}{diverged})"
        )
    return f"Mean test accuracy. {'; '.join(told)}."


def _cost(document: Mapping[str, Any]) -> Section:
    if not document["cost"]:
        return Section("cost", "Cost", ())
    paths = sorted({r["attention"] for r in document["runs"] if r["attention"]})
    devices = sorted({r["device"] for r in document["runs"] if r["device"]})
    where = joined([listed(devices), f"{listed(paths)} attention" if paths else ""], ", ")
    sources = {c["memory_source"] for c in document["cost"] if c["memory_source"]}
    memory = {
        "allocator": "Memory is what the arm holds between steps and the most that a step takes on top, as the "
        "allocator counts it.",
        "tensors": "Memory is weights, their gradients, optimizer state and what the backward pass keeps, counted "
        "tensor by tensor; the workspace of kernels is not in it.",
    }
    note = (
        f"Times are medians over steps, measured here{f' ({where})' if where else ''}; the ratio to the baseline's is "
        "the median over pairs of the same rate and seed. Another machine or attention kernel gives another "
        f"ratio. {' '.join(memory[s] for s in sorted(sources & set(memory)))}"
    ).strip()
    return Section("cost", "Cost", (tables.cost(document), Prose(note)))
