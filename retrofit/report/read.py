"""Reads a run folder in whatever state: what is there becomes a Study, what is not a named fault.

Nothing beyond this file meets a value of the wrong type: numbers are finite floats or None.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.runfiles import BASELINE, RunKey, count, items, number, table

Status = Literal["finished", "diverged", "unfinished", "missing", "damaged"]


@dataclass(frozen=True)
class Score:
    accuracy: float
    """0 to 1."""
    loss: float | None
    """Mean negative log-likelihood in nats."""
    images: int | None


@dataclass(frozen=True)
class Layer:
    """One attention module at one probed step; see probes.py for what each number is."""

    site: str
    logit_absmax: float | None
    logit_bound: float | None
    entropy_share: float | None
    peaked_rows: float | None


@dataclass(frozen=True)
class Probe:
    step: int
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Run:
    """One training run of the plan. Only `finished` and `diverged` ones count as outcomes."""

    key: RunKey
    status: Status
    result: Mapping[str, Any] = field(default_factory=dict)
    """result.json; empty unless the run counts."""
    validation: Score | None = None
    test: Score | None = None
    steps: tuple[int, ...] = ()
    """The steps of metrics.jsonl; `loss`, `grad_norm` and `ids` run along it."""
    loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    ids: tuple[Any, ...] = ()
    """A fingerprint of each batch."""
    seconds: tuple[float, ...] = ()
    probes: tuple[Probe, ...] = ()
    test_images: str | None = None
    """A fingerprint of the test images' ids, from predictions.npz."""

    @property
    def counts(self) -> bool:
        return self.status in ("finished", "diverged")


@dataclass(frozen=True)
class Fault:
    """Something that is missing or wrong in the folder."""

    path: str
    reason: str


@dataclass(frozen=True)
class Study:
    manifest: Mapping[str, Any]
    """run.json; empty where it is missing or damaged."""
    arms: tuple[str, ...]
    """baseline first, the others in the recipe's order."""
    runs: tuple[Run, ...]
    """In the order of the plan."""
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
    manifest = _read_mapping(folder, runfiles.MANIFEST, faults)
    found = {p.parent.relative_to(folder).as_posix() for p in folder.glob(f"*/*/{runfiles.RESULT}")}
    plan = list(_plan(manifest, faults))
    if not plan:
        if manifest:
            faults.append(Fault(runfiles.MANIFEST, "holds no plan; what lies in the folder is reported"))
        plan = sorted(filter(None, (_key_on_disk(folder, name, faults) for name in found)))
    if not plan:
        raise RetrofitError(
            f"{folder} holds no run.json with a plan and no finished run: there is nothing to report on"
        )
    for name in sorted(found - {key.folder for key in plan}):
        faults.append(Fault(name, "is not in the plan of run.json and is left out"))
    runs = tuple(_read_run(folder, key, faults) for key in plan)
    arms = tuple(dict.fromkeys([*table(table(manifest.get("recipe")).get("arms")), *(k.arm for k in plan)]))
    arms = tuple(sorted((a for a in arms if any(k.arm == a for k in plan)), key=lambda a: a != BASELINE))
    insertions = {arm: i for arm in arms if (i := _read_insertion(folder, arm, manifest, faults))}
    return Study(manifest, arms, runs, insertions, tuple(faults), _classes(manifest, runs))


def _plan(manifest: Mapping[str, Any], faults: list[Fault]) -> Iterable[RunKey]:
    """The keys of run.json's plan, each once; entries that are none become a fault."""
    seen = set()
    for i, entry in enumerate(items(manifest.get("plan"))):
        key = _key(table(entry))
        if key is None:
            faults.append(Fault(runfiles.MANIFEST, f"entry {i} of its plan is damaged and is left out"))
        elif key.folder not in seen:
            seen.add(key.folder)
            yield key


def _key(entry: Mapping[str, Any]) -> RunKey | None:
    arm, lr, seed = entry.get("arm"), number(entry.get("lr")), count(entry.get("seed"))
    if not isinstance(arm, str) or lr is None or lr <= 0 or seed is None:
        return None
    key = RunKey.of(arm, lr, seed, str(entry.get("precision") or "unknown"))
    return replace(key, folder=entry["folder"]) if isinstance(entry.get("folder"), str) else key


def _key_on_disk(folder: Path, name: str, faults: list[Fault]) -> RunKey | None:
    """The key of a run that no plan names, from its own result.json."""
    result = _read_mapping(folder, f"{name}/{runfiles.RESULT}", faults)
    return _key({**result, "folder": name})


def _read_mapping(folder: Path, name: str, faults: list[Fault]) -> Mapping[str, Any]:
    """A JSON file that must hold an object; an empty one and a fault where it does not."""
    try:
        content = runfiles.read_json(folder / name)
    except RetrofitError:
        faults.append(Fault(name, "is damaged" if (folder / name).exists() else "is missing"))
        return {}
    if not isinstance(content, Mapping):
        faults.append(Fault(name, "is damaged: it holds no object"))
    return table(content)


def _read_run(folder: Path, key: RunKey, faults: list[Fault]) -> Run:
    """A run with everything that its folder still tells."""
    place = folder / key.folder
    rows = [r for r in runfiles.read_jsonl(place / runfiles.METRICS) if count(r.get("step")) is not None]
    run = Run(
        key,
        "missing",
        steps=tuple(int(r["step"]) for r in rows),
        loss=tuple(number(r.get("loss")) for r in rows),
        grad_norm=tuple(number(r.get("grad_norm")) for r in rows),
        ids=tuple(r.get("ids") for r in rows),
        seconds=tuple(
            s for r in runfiles.read_jsonl(place / runfiles.TIMINGS) if (s := number(r.get("seconds"))) and s > 0
        ),
        probes=_probes(place),
    )
    if not (place / runfiles.RESULT).exists():
        done = f"it stopped after {len(rows)} steps" if rows else "it has not begun"
        faults.append(Fault(key.folder, f"has no result: {done}"))
        return replace(run, status="unfinished") if rows else run
    result = _read_mapping(folder, f"{key.folder}/{runfiles.RESULT}", faults)
    if not result:
        return replace(run, status="damaged")
    validation, test, status = (
        _score(result.get("validation")),
        _score(result.get("test")),
        result.get("status"),
    )
    if status not in ("finished", "diverged") or (status == "finished" and test is None):
        what = "holds no test result" if status == "finished" else "has no status finished or diverged"
        faults.append(Fault(f"{key.folder}/{runfiles.RESULT}", f"{what}; the run is left out"))
        return replace(run, status="damaged")
    kept = ((runfiles.METRICS, run.steps), (runfiles.TIMINGS, run.seconds), (runfiles.PROBES, run.probes))
    for name, content in kept:
        if not content:
            faults.append(Fault(f"{key.folder}/{name}", "is missing or damaged"))
    run = replace(run, status=status, result=result, validation=validation, test=test)
    return replace(run, test_images=_check_predictions(folder, run, faults)) if status == "finished" else run


def _score(value: Any) -> Score | None:
    accuracy = number(table(value).get("accuracy"))
    if accuracy is None or not 0 <= accuracy <= 1:
        return None
    return Score(accuracy, number(value.get("loss")), count(value.get("images")))


def _probes(place: Path) -> tuple[Probe, ...]:
    probes = []
    for row in runfiles.read_jsonl(place / runfiles.PROBES):
        step = count(row.get("step"))
        layers = tuple(
            Layer(
                str(layer.get("site")),
                *(number(layer.get(k)) for k in ("logit_absmax", "logit_bound", "entropy_share", "peaked_rows")),
            )
            for layer in map(table, items(row.get("layers")))
            if layer.get("site")
        )
        if step is not None and layers:
            probes.append(Probe(step, layers))
    return tuple(probes)


def _check_predictions(folder: Path, run: Run, faults: list[Fault]) -> str | None:
    """Recomputes the accuracies from the predictions, and returns the fingerprint of the test images' ids."""
    name = f"{run.key.folder}/{runfiles.PREDICTIONS}"
    try:
        with np.load(folder / name, allow_pickle=False) as arrays:
            for split, score in (("validation", run.validation), ("test", run.test)):
                if score is None:
                    continue
                right = arrays[f"{split}_logits"].argmax(axis=1) == arrays[f"{split}_labels"]
                if abs(float(np.mean(right)) - score.accuracy) > 1e-6:
                    given = f"{np.mean(right):.4f}"
                    wrong = f"says {score.accuracy:.4f} {split} accuracy, its predictions give {given}"
                    faults.append(Fault(f"{run.key.folder}/{runfiles.RESULT}", wrong))
            return hashlib.sha256(np.ascontiguousarray(arrays["test_ids"]).tobytes()).hexdigest()
    except FileNotFoundError:
        faults.append(Fault(name, "is missing"))
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile):
        faults.append(Fault(name, "is damaged"))
    return None


def _read_insertion(
    folder: Path, arm: str, manifest: Mapping[str, Any], faults: list[Fault]
) -> Mapping[str, Any] | None:
    """insertion.json of an arm that has, or by the recipe should have, one."""
    name = f"{arm}/{runfiles.INSERTION}"
    wanted = table(table(table(manifest.get("recipe")).get("arms")).get(arm)).get("qk_norm")
    if not wanted and not (folder / name).exists():
        return None
    content = _read_mapping(folder, name, faults)
    if content and not table(content.get("shock")):
        faults.append(Fault(name, "holds no insertion shock"))
    return content


def _classes(manifest: Mapping[str, Any], runs: Iterable[Run]) -> int:
    """K: from the runs' own results, else from the names of the classes; 1 where nothing tells."""
    told = [k for run in runs if (k := count(run.result.get("classes")))]
    return max(told) if told else max(len(items(manifest.get("classes"))), 1)
