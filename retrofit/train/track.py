"""Experiment trackers, through accelerate: one tracked run for each training run, over the same steps."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from retrofit.errors import RetrofitError
from retrofit.recipe import Recipe, plain
from retrofit.runfiles import RunKey


class Trackers:
    """The trackers of one run. Those of other runs may be open beside them."""

    def __init__(self, recipe: Recipe, key: RunKey, run_dir: Path, first_step: int) -> None:
        """first_step: what an earlier process has tracked from there on is done again."""
        config = _flat({"arm": key.arm, "lr": key.lr, "seed": key.seed, "precision": key.precision, **plain(recipe)})
        made = [_MAKERS[name](key, run_dir, config, first_step) for name in recipe.train.trackers]
        for tracker in made:
            # In a context of its own: trackio ends the run that it finds open in this one.
            contextvars.Context().run(tracker.start)
            if tracker.name == "tensorboard" and first_step == 0:
                tracker.store_init_configuration(config)
        self._open = made

    def step(self, row: Mapping[str, Any], layers: Sequence[Mapping[str, Any]] | None) -> None:
        """What a step did: a row of metrics.jsonl, and the largest logit of attention where it was probed before."""
        values = {f"train/{name}": row[name] for name in ("loss", "lr", "grad_norm")}
        if layers:
            values["attention/logit_absmax"] = max(layer["logit_absmax"] for layer in layers)
        self._log(values, row["step"])

    def result(self, steps: int, results: Mapping[str, Any]) -> None:
        """The scores of the finished run."""
        names = ((split, name) for split in ("validation", "test") for name in ("accuracy", "loss"))
        self._log({f"{split}/{name}": results[split][name] for split, name in names}, steps)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._open:
            tracker.log(dict(values), step=step)

    def close(self) -> None:
        for tracker in self._open:
            tracker.finish()
        self._open = []


def check_trackers(recipe: Recipe) -> None:
    """Raises RetrofitError for a tracker that is not installed."""
    for name in recipe.train.trackers:
        if name not in map(str, get_available_trackers()):
            raise RetrofitError(f"train.trackers: {name} is not installed; pip install 'qknorm-retrofit[{name}]'")


def _tensorboard(key: RunKey, run_dir: Path, config: Mapping[str, Any], first_step: int) -> Any:
    return LOGGER_TYPE_TO_CLASS["tensorboard"](key.folder, run_dir / "tensorboard", purge_step=first_step)


def _wandb(key: RunKey, run_dir: Path, config: Mapping[str, Any], first_step: int) -> Any:
    return LOGGER_TYPE_TO_CLASS["wandb"](
        run_dir.name,
        name=key.folder,
        id=f"{run_dir.name}-{key.folder}".replace("/", "-"),
        group=f"lr{key.lr:g}-s{key.seed}",
        config=dict(config),
        dir=run_dir,
        resume="allow",
        reinit="create_new",
    )


def _trackio(key: RunKey, run_dir: Path, config: Mapping[str, Any], first_step: int) -> Any:
    return LOGGER_TYPE_TO_CLASS["trackio"](run_dir.name, name=key.folder, config=dict(config), resume="allow")


_MAKERS: Mapping[str, Callable[[RunKey, Path, Mapping[str, Any], int], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def _flat(value: Any, path: str = "") -> dict[str, bool | int | float | str]:
    """Dotted names and scalars, which is all that every tracker takes for a configuration."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}{key}.").items()}
    return {path.rstrip("."): value if isinstance(value, bool | int | float | str) else str(value)}
