"""What was run: what is missing, arms, data, command, versions, hardware, the resolved recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofit.report.blocks import Block, Listing, Prose, Section, Table
from retrofit.report.tables import Document
from retrofit.report.words import NONE, listed, number, plural, rate

_SET_BY = {"recipe": "the recipe", "option": "chosen for this report", "default": "default"}


def section(document: Mapping[str, Any]) -> Section:
    study = document["study"]
    blocks: list[Block] = [
        Prose(f"{study['runs_counted']} of {plural(study['runs_planned'], 'planned run')} have a result."),
    ]
    if document["faults"]:
        blocks.append(_faults(document))
    if study["unmatched"]:
        blocks.append(_not_matched(document))
    blocks += [_arms(document), *_facts(document)]
    if study["recipe"]:
        blocks.append(Listing("The resolved recipe, as overrides", tuple(settings(study["recipe"]))))
    return Section("setting", "What was run", tuple(blocks))


def settings(value: Any, path: str = "") -> list[str]:
    """A mapping as `key.sub=value` lines, as `retrofit pair` takes them."""
    if isinstance(value, Mapping) and value:
        return [line for k, v in value.items() for line in settings(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        return [f"{path}=[{', '.join(_scalar(v) for v in value)}]"]
    return [f"{path}={_scalar(value)}"]


def _scalar(value: Any) -> str:
    shown = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return shown[value]
    return "{}" if value == {} else " ".join(f"{value:g}".split() if isinstance(value, float) else str(value).split())


def _faults(document: Document) -> Table:
    rows = tuple((f["path"], f["reason"]) for f in document["faults"])
    return Table("Missing or wrong in the run folder", ("File or run", "What"), rows, words=2)


def _arms(document: Document) -> Table:
    return Table("Arms", ("Arm", "QK-Norm", "Start"), tuple(arm_rows(document["study"])), words=3)


def arm_rows(study: Document) -> list[tuple[str, str, str]]:
    """Name, norm and start of each arm."""
    return [
        (a["name"], a["formula"] or (str(a["qk_norm"]) if a["qk_norm"] else "the model as it is"), a["init"] or NONE)
        for a in study["arms"]
    ]


def _not_matched(document: Document) -> Table:
    """What differs between arms beside the norm, as the recipe allows."""
    rows = [
        (key, *(_setting(a["own"].get(key)) for a in document["study"]["arms"]))
        for key in document["study"]["unmatched"]
    ]
    names = [a["name"] for a in document["study"]["arms"]]
    return Table("Left unmatched by the recipe", ("Key of train", *names), tuple(rows), words=1 + len(names))


def _setting(value: Any) -> str:
    return "as the recipe" if value is None else " ".join(str(value).split())


def _facts(document: Document) -> list[Table]:
    study = document["study"]
    facts = [
        ("command", " ".join(study["command"]) or NONE),
        ("begun", study["created"] or NONE),
        ("retrofit", study["retrofit_version"] or NONE),
        ("seeds", listed([str(s) for s in study["seeds"]])),
        ("learning rates", listed([rate(lr) for lr in study["lrs"]])),
        ("margin of equivalence", f"{study['margin']['points']:g} points ({_SET_BY[study['margin']['set_by']]})"),
        *((k, v or NONE) for k, v in study["environment"].items() if k != "retrofit"),
    ]
    result = []
    if study["splits"]:
        rows = tuple((n, (s["sha256"] or NONE)[:16], number(s["images"], 9)) for n, s in study["splits"].items())
        result.append(Table("Data", ("Split", "SHA-256 begins", "Images"), rows, words=2))
    return [*result, Table("Command, seeds, versions and hardware", ("What", "Value"), tuple(facts), words=2)]
