"""What the files of one run tell, as arrays: NaN where they tell nothing. T steps, P probes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrofit import runfiles
from retrofit.errors import RetrofitError
from retrofit.runfiles import RunKey, count, items, number, table

Array = NDArray[np.float64]
Steps = NDArray[np.int64]
Rows = Sequence[Mapping[str, Any]]

LOGIT, ENTROPY, ATTENTION_GRADIENT, UPDATE = "largest logit", "entropy", "attention gradient", "update ratio"
GRADIENT, SCALE = "gradient norm", "loss scale"
LAYERED = {
    LOGIT: "logit_absmax",
    ENTROPY: "entropy_share",
    "q norm": "q_rms",
    "k norm": "k_rms",
    ATTENTION_GRADIENT: "grad_norm",
    UPDATE: "update_ratio",
}
"""Figures that each layer has, with their names in probes.jsonl."""
WHOLE = ""


@dataclass(frozen=True)
class Trained:
    key: RunKey
    diverged_at: int | None
    """None where the run finished."""
    validation_loss: float | None
    """None where the run diverged."""
    steps: Steps
    """[T], as are loss, grad_norm, lr and ids."""
    loss: Array
    grad_norm: Array
    lr: Array
    ids: NDArray[np.str_]
    """A fingerprint of each batch."""
    probed: Steps
    """[P]. A probe of step s reads the weights that step s begins with."""
    figures: Mapping[tuple[str, str], Array]
    """[P], by name and layer; WHOLE stands for the layer where a figure is that of the whole run."""
    bound: float | None
    """The largest logit that the norms allow in any layer at the last probe; None without a norm."""

    @classmethod
    def read(cls, run_dir: Path, key: RunKey) -> Trained:
        """A run from its folder, in whatever state that is."""
        place = run_dir / key.folder
        try:
            result = table(runfiles.read_json(place / runfiles.RESULT))
        except RetrofitError:
            result = {}
        rows = _by_step(runfiles.read_jsonl(place / runfiles.METRICS))
        probes = _by_step(runfiles.read_jsonl(place / runfiles.PROBES))
        layers = [{str(x.get("site")): x for x in map(table, items(p.get("layers"))) if x.get("site")} for p in probes]
        sites = tuple(dict.fromkeys(site for layer in layers for site in layer))

        def of_layer(site: str, name: str) -> Array:
            return _column((layer.get(site, {}) for layer in layers), name)

        steps, probed, grad_norm = _steps(rows), _steps(probes), _column(rows, "grad_norm")
        lr = _column(probes, "lr")
        lr[~(lr > 0)] = np.nan
        figures = {(figure, site): of_layer(site, name) for figure, name in LAYERED.items() for site in sites}
        figures |= {(UPDATE, site): figures[UPDATE, site] / lr for site in sites}
        figures[GRADIENT, WHOLE] = _since(steps, grad_norm, probed)
        figures[SCALE, WHOLE] = _column(probes, "loss_scale")
        bounds = [b for layer in (layers[-1] if layers else {}).values() if (b := number(layer.get("logit_bound")))]
        diverged = result.get("status") == "diverged"
        return cls(
            key=key,
            diverged_at=(count(result.get("diverged_at")) or len(rows)) if diverged else None,
            validation_loss=None if diverged else number(table(result.get("validation")).get("loss")),
            steps=steps,
            loss=_column(rows, "loss"),
            grad_norm=grad_norm,
            lr=_column(rows, "lr"),
            ids=np.array([str(r.get("ids")) for r in rows], np.str_),
            probed=probed,
            figures=figures,
            bound=max(bounds, default=None),
        )


def _since(steps: Steps, values: Array, probed: Steps) -> Array:
    """[P]: the median over the steps since the last probe; at step 0 the first step's own value."""
    edges = np.searchsorted(steps, probed).tolist()
    spans = [values[a:b] if b else values[:1] for a, b in zip([0, *edges], edges, strict=False)]
    return np.array([np.median(v[np.isfinite(v)]) if np.isfinite(v).any() else np.nan for v in spans], float)


def _by_step(rows: Rows) -> Rows:
    """The rows in the order of their steps; of a step that a resumed run wrote twice, the later row."""
    found = {step: row for row in rows if (step := count(row.get("step"))) is not None}
    return [found[step] for step in sorted(found)]


def _steps(rows: Rows) -> Steps:
    return np.array([row["step"] for row in rows], np.int64)


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> Array:
    return np.array([np.nan if (value := number(row.get(name))) is None else value for row in rows], float)
