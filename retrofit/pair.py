"""A study: plans arms x seeds x learning rates, runs what is missing, and asserts that the arms of a pair match."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor, nn
from tqdm import tqdm

from retrofit import runfiles
from retrofit.checkpoint import load_model
from retrofit.data import Images, Splits, eval_batches, keyed_seed, open_splits
from retrofit.errors import RetrofitError
from retrofit.manifest import check_contents, check_recipe, write_manifest
from retrofit.models import family_of
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import AA, Recipe, dump
from retrofit.runfiles import RunKey, write_json, write_text
from retrofit.surgery import Insertion, insert_qk_norm, insert_same
from retrofit.train import (
    RATE,
    Seen,
    check_devices,
    check_matched,
    check_shares,
    check_trackers,
    on_main,
    runs_at_once,
    steps_of,
    stoppable,
    train_lockstep,
)


@dataclass(frozen=True)
class Study:
    """All that the runs of a plan have in common."""

    recipe: Recipe
    run_dir: Path
    splits: Splits
    preprocess: Preprocess
    original: nn.Module
    """The checkpoint as it is, with its own head."""


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
    study = _open(recipe, run_dir)
    check_shares(recipe.train, len(study.splits.train))
    missing, insertions = on_main(lambda: _begin(study, mine, force, command or []))
    if missing:
        faults = _train(study, missing, insertions)
        if faults and not any((run_dir / key.folder / runfiles.RESULT).is_file() for key in mine):
            raise faults[0]
    on_main(lambda: check_matched(run_dir, recipe.plan(), rates_differ=bool({*RATE} & {*recipe.unmatched})))
    return True


def _check_folder(recipe: Recipe, run_dir: Path, force: bool) -> None:
    runfiles.check_free(run_dir, runfiles.MANIFEST, force)
    check_recipe(run_dir, recipe)


def _begin(
    study: Study, mine: list[RunKey], force: bool, command: list[str]
) -> tuple[list[RunKey], dict[str, Insertion]]:
    """Writes what the study begins with, and gives the runs that the folder lacks, with the norms that they need."""
    run_dir, recipe = study.run_dir, study.recipe
    runfiles.claim(run_dir, runfiles.MANIFEST, force)
    missing = [key for key in mine if not (run_dir / key.folder / runfiles.RESULT).is_file()]
    contents = check_contents(run_dir, study.splits, study.original)
    if not missing:
        return [], {}
    write_text(run_dir / runfiles.RECIPE, dump(recipe))
    write_manifest(run_dir, recipe, contents, command)
    return missing, {name: _insert(study, name) for name, arm in recipe.arms.items() if arm.qk_norm is not None}


def describe_plan(recipe: Recipe) -> str:
    """The resolved recipe and what it will train, without loading a model."""
    splits = open_splits(recipe.data)
    plan, steps = recipe.plan(), steps_of(recipe.train, len(splits.train))
    sizes = ", ".join(f"{n} {len(getattr(splits, n))}" for n in ("train", "validation", "test"))
    runs = "\n".join(f"  {key.folder}" for key in plan)
    return (
        f"{dump(recipe)}\nimages: {sizes}\nclasses: {len(splits.classes)}\n{len(plan)} runs of {steps} steps:\n{runs}"
    )


def _open(recipe: Recipe, run_dir: Path) -> Study:
    splits = open_splits(recipe.data)
    original = _load(recipe, None, seed=recipe.train.seeds[0])
    return Study(recipe, run_dir, splits, family_of(original).preprocess(original), original)


def _load(recipe: Recipe, num_classes: int | None, seed: int) -> nn.Module:
    rate = recipe.train.drop_path
    model = load_model(
        recipe.model.source,
        num_classes,
        image_size=recipe.data.image_size,
        seed=seed,
        model_args={**recipe.model.model_args, **({} if rate is None else {"drop_path_rate": rate})},
        pretrained=recipe.model.pretrained,
    )
    drops = any("droppath" in type(m).__name__.lower() and getattr(m, "drop_prob", 0) for m in model.modules())
    if rate and not drops:
        raise RetrofitError(f"train.drop_path: {type(model).__name__} has no drop path; leave it out")
    return model


def _insert(study: Study, name: str) -> Insertion:
    """Calibrates one arm's norms on a copy of the checkpoint as it is, and records shock and calibration."""
    arm = study.recipe.arms[name]
    assert arm.qk_norm is not None
    data = study.recipe.data
    calibration = study.splits.train.take(data.calibration_images, "calibration")
    held_out = _held_out(study)
    insertion = insert_qk_norm(
        copy.deepcopy(study.original),
        arm.qk_norm,
        images=_pixels(calibration, study.preprocess),
        init=arm.init,
        held_out=_pixels(held_out, study.preprocess),
    )
    record = {
        "arm": name,
        "formula": arm.qk_norm.describe(),
        "qk_norm": arm.qk_norm,
        "init": arm.init,
        "sites": len(insertion.sites),
        "skipped": insertion.skipped,
        "calibration_images": len(calibration),
        "held_out_images": len(held_out),
        "layers": insertion.layers,
        "shock": {init: shock.document() for init, shock in insertion.shock.items()},
    }
    write_json(study.run_dir / name / runfiles.INSERTION, record)
    return insertion


def _train(study: Study, missing: list[RunKey], insertions: dict[str, Insertion]) -> list[Exception]:
    """Trains what is missing, and returns the faults of runs that failed."""
    recipe = study.recipe
    steps = steps_of(recipe.train, len(study.splits.train))
    probed = study.splits.validation.take(recipe.data.probe_images, "probed")
    probe_images = list(_pixels(probed, study.preprocess))
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
            base = _with_head(study, seed)
            limit = recipe.train.lockstep
            size = study.preprocess.image_size
            at_once = on_main(partial(runs_at_once, base, recipe.train, size)) if limit == "auto" else limit
            for part in _side_by_side(list(keys), at_once):
                models = {key: _model(base, key, insertions) for key in part}
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


def _model(base: nn.Module, key: RunKey, insertions: dict[str, Insertion]) -> tuple[nn.Module, int]:
    """An arm's model, ready to train, and how many parameters its norms added."""
    model = copy.deepcopy(base)
    if key.arm in insertions:
        insert_same(model, insertions[key.arm])
    if key.arm == AA:
        _nudge(model, key.seed)
    return model, _size(model) - _size(base)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int, by: float = 1e-6) -> None:
    """Multiplies every weight by 1 + `by` * N(0, 1), keyed by the seed; what is 0, such as a fresh bias, stays 0."""
    generator = torch.Generator().manual_seed(keyed_seed("aa", seed))
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        weight.mul_(1 + by * noise.to(weight.device))


def _with_head(study: Study, seed: int) -> nn.Module:
    """The checkpoint with a head for the data's classes: its own where they are the same by name, else a fresh one."""
    family, classes = family_of(study.original), study.splits.classes
    if study.recipe.model.pretrained and family.labels(study.original) == classes:
        return copy.deepcopy(study.original)
    model = _load(study.recipe, len(classes), seed)
    family.set_labels(model, classes)
    return model


def _held_out(study: Study) -> Images:
    return study.splits.validation.take(study.recipe.data.held_out_images, "held out")


def _pixels(images: Images, preprocess: Preprocess) -> Iterator[Tensor]:
    return (batch.pixels for batch in eval_batches(images, preprocess, 64))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _part(plan: list[RunKey], shard: tuple[int, int]) -> list[RunKey]:
    """The keys of one shard: pair number I of every N, with all its arms."""
    pairs = [list(keys) for _, keys in groupby(plan, key=lambda k: (k.precision, k.seed, k.lr))]
    return [key for i, keys in enumerate(pairs) if i % shard[1] == shard[0] - 1 for key in keys]
