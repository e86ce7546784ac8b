"""One training run of a run folder in whatever state: what its files tell, and a fault for each that tells nothing."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.runfiles import RunKey, count, items, number, table, text

UNKNOWN = "unknown"
"""The precision of a run of which no file tells it."""

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
    q_rms: float | None
    k_rms: float | None


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
    test_right: NDArray[np.bool_] | None = None
    """Whether each test image was named rightly, in the order of those ids."""

    @property
    def counts(self) -> bool:
        return self.status in ("finished", "diverged")


@dataclass(frozen=True)
class Fault:
    """Something that is missing or wrong in the folder."""

    path: str
    reason: str


def read_mapping(folder: Path, name: str, faults: list[Fault]) -> Mapping[str, Any]:
    """A JSON file that must hold an object; an empty one and a fault where it does not."""
    try:
        content = runfiles.read_json(folder / name)
    except RetrofitError:
        faults.append(Fault(name, "is damaged" if (folder / name).exists() else "is missing"))
        return {}
    if not isinstance(content, Mapping):
        faults.append(Fault(name, "is damaged: it holds no object"))
    return table(content)


def read_run(folder: Path, key: RunKey, faults: list[Fault]) -> Run:
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
    result = read_mapping(folder, f"{key.folder}/{runfiles.RESULT}", faults)
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
    if others := _others(result, key):
        faults.append(Fault(f"{key.folder}/{runfiles.RESULT}", f"is of another run ({others}); the run is left out"))
        return replace(run, status="damaged")
    kept = ((runfiles.METRICS, run.steps), (runfiles.TIMINGS, run.seconds), (runfiles.PROBES, run.probes))
    for name, content in kept:
        if not content:
            faults.append(Fault(f"{key.folder}/{name}", "is missing or damaged"))
    run = replace(run, status=status, result=result, validation=validation, test=test)
    return _with_predictions(folder, run, faults) if status == "finished" else run


def _others(result: Mapping[str, Any], key: RunKey) -> str:
    """In what a result says to be of another run than its folder is for; nothing where it is of that one."""
    names = ("arm", "lr", "seed", *(("precision",) if key.precision != UNKNOWN else ()))
    own = {name: getattr(key, name) for name in names}
    return ", ".join(f"{k} {text(result[k]) or 'damaged'}" for k, v in own.items() if k in result and result[k] != v)


def _score(value: Any) -> Score | None:
    accuracy = number(table(value).get("accuracy"))
    if accuracy is None or not 0 <= accuracy <= 1:
        return None
    return Score(accuracy, number(value.get("loss")), count(value.get("images")))


def _probes(place: Path) -> tuple[Probe, ...]:
    probes = []
    figures = ("logit_absmax", "logit_bound", "entropy_share", "peaked_rows", "q_rms", "k_rms")
    for row in runfiles.read_jsonl(place / runfiles.PROBES):
        step = count(row.get("step"))
        layers = tuple(
            Layer(str(layer.get("site")), *(number(layer.get(k)) for k in figures))
            for layer in map(table, items(row.get("layers")))
            if layer.get("site")
        )
        if step is not None and layers:
            probes.append(Probe(step, layers))
    return tuple(probes)


def _with_predictions(folder: Path, run: Run, faults: list[Fault]) -> Run:
    """The run with what it said of each test image; a fault where its accuracies are not those of its predictions."""
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
            ids = np.ascontiguousarray(arrays["test_ids"])
            right = np.asarray(right, bool)
            if right.shape != ids.shape[:1]:
                raise ValueError
            return replace(run, test_images=hashlib.sha256(ids.tobytes()).hexdigest(), test_right=right)
    except FileNotFoundError:
        faults.append(Fault(name, "is missing"))
    except (OSError, ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile):
        faults.append(Fault(name, "is damaged"))
    return run
