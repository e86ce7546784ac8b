"""Reads a run folder in whatever state: what is there becomes a Study, what is not a named fault.

Nothing beyond this file and runs.py meets a value of the wrong type: numbers are finite floats or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.report.runs import UNKNOWN, Fault, Run, read_mapping, read_run
from retrofit.runfiles import AA, BASELINE, RunKey, count, items, number, table


@dataclass(frozen=True)
class Study:
    manifest: Mapping[str, Any]
    """run.json; empty where it is missing or damaged."""
    arms: tuple[str, ...]
    """baseline first, the others in the recipe's order."""
    runs: tuple[Run, ...]
    """Those of the arms, in the order of the plan."""
    twins: tuple[Run, ...]
    """Those of the baseline's twin (A/A), which is no arm."""
    insertions: Mapping[str, Mapping[str, Any]]
    """insertion.json by arm."""
    faults: tuple[Fault, ...]
    classes: int
    """Number of classes K; a run that answers at random is right in 1/K."""


def read_study(folder: Path) -> Study:
    """Everything a report needs from a run folder.

    Raises RetrofitError where the folder does not exist or holds no run at all.
    """
    if not folder.is_dir():
        raise RetrofitError(f"{folder} is not a folder; name a run folder, as `retrofit pair` writes it")
    faults: list[Fault] = []
    manifest = read_mapping(folder, runfiles.MANIFEST, faults)
    found = {p.parent.relative_to(folder).as_posix() for p in folder.glob(f"*/*/{runfiles.RESULT}")}
    plan = list(_plan(manifest, faults))
    if not plan:
        if manifest:
            faults.append(Fault(runfiles.MANIFEST, "holds no plan; what lies in the folder is reported"))
        plan = sorted(_once(((n, _key_on_disk(folder, n, faults)) for n in sorted(found)), faults))
        found = set()
    if not plan:
        raise RetrofitError(
            f"{folder} holds no run.json with a plan and no finished run: there is nothing to report on"
        )
    for name in sorted(found - {key.folder for key in plan}):
        faults.append(Fault(name, "is not in the plan of run.json and is left out"))
    named = table(table(manifest.get("recipe")).get("arms"))
    twins = {k for k in plan if k.arm == AA and AA not in named and any(k.arm != AA for k in plan)}
    arms = tuple(dict.fromkeys([*named, *(k.arm for k in plan if k not in twins)]))
    arms = tuple(sorted((a for a in arms if any(k.arm == a for k in plan)), key=lambda a: a != BASELINE))
    runs = [read_run(folder, key, faults) for key in plan]
    insertions = {arm: i for arm in arms if (i := _read_insertion(folder, arm, manifest, faults))}
    return Study(
        manifest,
        arms,
        tuple(run for run in runs if run.key not in twins),
        tuple(run for run in runs if run.key in twins),
        insertions,
        tuple(faults),
        _classes(manifest, runs),
    )


def _plan(manifest: Mapping[str, Any], faults: list[Fault]) -> Iterable[RunKey]:
    """The keys of run.json's plan; entries that are none become a fault."""
    keys = [_key(table(entry)) for entry in items(manifest.get("plan"))]
    for i, key in enumerate(keys):
        if key is None:
            faults.append(Fault(runfiles.MANIFEST, f"entry {i} of its plan is damaged and is left out"))
    return _once(((runfiles.MANIFEST, key) for key in keys), faults)


def _once(keys: Iterable[tuple[str, RunKey | None]], faults: list[Fault]) -> Iterable[RunKey]:
    """Each key once, by what is trained and by where it lies; `keys` come with the file that names them."""
    seen: set[Any] = set()
    for name, key in keys:
        if key is None:
            continue
        run = (key.arm, key.lr, key.seed, key.precision)
        if seen.isdisjoint((run, key.folder)):
            yield key
        else:
            what = f"{key.arm} at learning rate {key.lr:g} with seed {key.seed}"
            faults.append(Fault(name, f"names {what} a second time; this one is left out"))
        seen |= {run, key.folder}


def _key(entry: Mapping[str, Any]) -> RunKey | None:
    arm, lr, seed = entry.get("arm"), number(entry.get("lr")), count(entry.get("seed"))
    if not isinstance(arm, str) or lr is None or lr <= 0 or seed is None:
        return None
    precision = entry.get("precision")
    key = RunKey.of(arm, lr, seed, precision if precision and isinstance(precision, str) else UNKNOWN)
    return replace(key, folder=entry["folder"]) if isinstance(entry.get("folder"), str) else key


def _key_on_disk(folder: Path, name: str, faults: list[Fault]) -> RunKey | None:
    """The key of a run that no plan names, from its own result.json."""
    result = read_mapping(folder, f"{name}/{runfiles.RESULT}", faults)
    return _key({**result, "folder": name})


def _read_insertion(
    folder: Path, arm: str, manifest: Mapping[str, Any], faults: list[Fault]
) -> Mapping[str, Any] | None:
    """insertion.json of an arm that has, or by the recipe should have, one."""
    name = f"{arm}/{runfiles.INSERTION}"
    wanted = table(table(table(manifest.get("recipe")).get("arms")).get(arm)).get("qk_norm")
    if not wanted and not (folder / name).exists():
        return None
    content = read_mapping(folder, name, faults)
    if content and not table(content.get("shock")):
        faults.append(Fault(name, "holds no insertion shock"))
    return content


def _classes(manifest: Mapping[str, Any], runs: Iterable[Run]) -> int:
    """K: from the runs' own results, else from the names of the classes; 1 where nothing tells."""
    told = [k for run in runs if (k := count(run.result.get("classes")))]
    return max(told) if told else max(len(items(manifest.get("classes"))), 1)
