"""One training loop over the arms of a pair, in lockstep: every batch is decoded once and given to each arm.

Each arm has a model, an optimizer and an Accelerator of its own. Dropout and drop path are keyed by (seed, step), so
that an arm's numbers do not depend on the others beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accelerate import PartialState
from torch import Tensor, nn

from retrofit.data import Splits, mixed, steps_per_epoch, train_batches
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import Recipe, Train
from retrofit.runfiles import RunKey
from retrofit.train.arm import ArmRun
from retrofit.train.finish import finish


def steps_of(train: Train, images: int) -> int:
    """Optimizer steps of a run."""
    return train.steps or max(1, math.ceil(train.epochs * steps_per_epoch(images, train.batch_size)))


def train_lockstep(
    recipe: Recipe,
    models: Mapping[RunKey, tuple[nn.Module, int]],
    splits: Splits,
    preprocess: Preprocess,
    probe_images: Sequence[Tensor],
    run_dir: Path,
    tick: Callable[[str], None],
) -> None:
    """Trains the arms of one seed, learning rate and precision side by side, to the end of each.

    Args:
        models: for each run its model, ready to train, and how many parameters its norms added.
        probe_images: fixed held-out batches on which attention is read.
        tick: called after each step of each arm, with a word on how it goes.
    """
    train, state = recipe.train, PartialState()
    seed = next(iter(models)).seed
    steps = steps_of(train, len(splits.train))
    every = train.probe_every or max(1, steps // 10)
    arms = [ArmRun.start(key, model, train, steps, run_dir) for key, (model, _) in models.items()]
    batches = train_batches(
        splits.train,
        preprocess,
        recipe.data,
        seed=seed,
        batch_size=train.batch_size,
        steps=steps,
        workers=train.workers,
        part=(state.process_index, state.num_processes),
    )
    for step, batch in enumerate(batches):
        batch = mixed(batch, train, len(splits.classes), seed, step)
        for arm in arms:
            if arm.alive:
                # More often at first, where the learning rate rises and order in time tells most.
                due = step % every == 0 or (step < every and step % max(1, every // 4) == 0)
                layers = arm.attention_now(probe_images) if due else None
                with arm.memory.measured(arm.model, arm.optimizer, compiled=train.compile is not None):
                    arm.step(step, batch, train, layers)
                if not (arm.alive or due):
                    arm.last_probe(step, probe_images)
            tick(f"{arm.key.folder} loss {arm.losses[-1]:.3f}")
    for arm in arms:
        if arm.alive:
            arm.last_probe(steps, probe_images)
        finish(arm, recipe, splits, preprocess, steps, models[arm.key][1])
