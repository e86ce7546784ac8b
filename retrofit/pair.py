"""A study: plans arms x seeds x learning rates, runs what is missing, and asserts that the arms of a pair match."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from retrofit import runfiles
from retrofit.manifest import check_contents, check_recipe, write_manifest
from retrofit.recipe import Recipe, dump
from retrofit.runfiles import RunKey, write_text
from retrofit.study import Study, arm_model, norms_of, open_study, pixels_of, with_head
from retrofit.train import (
    RATE,
    Seen,
    check_devices,
    check_matched,
    check_shares,
    check_trackers,
    on_main,
    resume,
    runs_at_once,
    steps_of,
    stoppable,
    train_lockstep,
)


def run_pair(
    recipe: Recipe,
    run_dir: Path,
    *,
    shard: tuple[int, int] = (1, 1),
    force: bool = False,
    command: list[str] | None = None,
) -> bool:
    """Trains every run of the recipe's plan that `run_dir` does not hold yet; False where the shard holds no run.

    Args:
        shard: (I, N) trains only the I-th of N parts, whole pairs together.
        force: lets a folder that holds other things be written to.
        command: recorded in run.json.

    Raises:
        RecipeError: where the folder holds a study of another recipe, other images or another checkpoint.
        PairMismatch: where two arms of a pair did not see the same images in the same order.
        Interrupted: on SIGINT and SIGTERM, once what is being trained is saved.
        RetrofitError: for a model, data set or precision that cannot be had.
    """
    mine = _part(recipe.plan(), shard)
    if not mine:
        return False
    check_devices(recipe.train)
    check_trackers(recipe)
    on_main(lambda: _check_folder(recipe, run_dir, force))
    study = open_study(recipe, run_dir)
    check_shares(recipe.train, len(study.splits.train))
    missing, norms = on_main(lambda: _begin(study, mine, force, command or []))
    if missing:
        faults = _train(study, missing, norms)
        if faults and not any((run_dir / key.folder / runfiles.RESULT).is_file() for key in mine):
            raise faults[0]
    on_main(lambda: check_matched(run_dir, recipe.plan(), rates_differ=bool({*RATE} & {*recipe.unmatched})))
    return True


def _check_folder(recipe: Recipe, run_dir: Path, force: bool) -> None:
    runfiles.check_free(run_dir, runfiles.MANIFEST, force)
    check_recipe(run_dir, recipe)


def _begin(
    study: Study, mine: list[RunKey], force: bool, command: list[str]
) -> tuple[list[RunKey], dict[str, dict[str, Tensor]]]:
    """Writes what the study begins with, and gives the runs that the folder lacks, with the norms that they need."""
    run_dir, recipe = study.run_dir, study.recipe
    runfiles.claim(run_dir, runfiles.MANIFEST, force)
    missing = [key for key in mine if not (run_dir / key.folder / runfiles.RESULT).is_file()]
    for key in {*mine} - {*missing}:
        resume.remove(run_dir / key.folder)  # which a kill between the two may have left
    contents = check_contents(run_dir, study.splits, study.original)
    if not missing:
        return [], {}
    print(dump(recipe), file=sys.stderr)
    write_manifest(run_dir, recipe, contents, command)  # first: by it other parts know the folder for ours
    write_text(run_dir / runfiles.RECIPE, dump(recipe))
    return missing, {name: norms_of(study, name) for name, arm in recipe.arms.items() if arm.qk_norm is not None}


def _train(study: Study, missing: list[RunKey], norms: dict[str, dict[str, Tensor]]) -> list[Exception]:
    """Trains what is missing, and returns the faults of runs that failed."""
    recipe = study.recipe
    steps = steps_of(recipe.train, len(study.splits.train))
    probed = study.splits.validation.take(recipe.data.probe_images, "probed")
    probe_images = list(pixels_of(probed, study.preprocess))
    bar = tqdm(
        total=steps * len(missing),
        unit="step",
        smoothing=0.05,
        file=sys.stderr,
        disable=not PartialState().is_main_process,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 15.0,  # a log file wants a line now and then
    )

    def tick(words: str, done: int) -> None:
        bar.set_postfix_str(words, refresh=False)
        bar.update(done)

    faults: list[Exception] = []
    with bar, stoppable() as stop:
        for (_, seed), keys in groupby(missing, key=lambda k: (k.precision, k.seed)):
            base = with_head(study, seed)
            limit = recipe.train.lockstep
            size = study.preprocess.image_size
            at_once = on_main(partial(runs_at_once, base, recipe.train, size)) if limit == "auto" else limit
            for part in _side_by_side(list(keys), at_once):
                models = {key: arm_model(base, recipe, key, norms) for key in part}
                seen = Seen(study.run_dir, [key for key in recipe.plan() if key.seed == seed and key not in models])
                with ExitStack() as locks:
                    on_main(partial(_lock, locks, study, models))
                    faults += train_lockstep(
                        recipe,
                        models,
                        study.splits,
                        study.preprocess,
                        probe_images,
                        study.run_dir,
                        tick,
                        seen,
                        stop,
                    )
    return faults


def _lock(locks: ExitStack, study: Study, keys: Iterable[RunKey]) -> None:
    for key in keys:
        locks.enter_context(runfiles.locked(study.run_dir / key.folder))


def _side_by_side(keys: list[RunKey], at_once: int) -> Iterator[list[RunKey]]:
    """The keys in parts of at most `at_once`, pairs together where they fit."""
    part: list[RunKey] = []
    for _, pair in groupby(keys, key=lambda k: k.lr):
        arms = list(pair)
        if part and len(part) + len(arms) > at_once:
            yield part
            part = []
        part += arms
        while len(part) > at_once:
            yield part[:at_once]
            part = part[at_once:]
    if part:
        yield part


def _part(plan: list[RunKey], shard: tuple[int, int]) -> list[RunKey]:
    """The keys of one shard: pair number I of every N, with all its arms."""
    pairs = [list(keys) for _, keys in groupby(plan, key=lambda k: (k.precision, k.seed, k.lr))]
    return [key for i, keys in enumerate(pairs) if i % shard[1] == shard[0] - 1 for key in keys]
