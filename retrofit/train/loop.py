"""One training loop over the arms of a pair, in lockstep: every batch is decoded once and given to each arm.

Each arm has a model, an optimizer and an Accelerator of its own. Dropout and drop path are keyed by (seed, step), so
that an arm's numbers do not depend on the others beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from retrofit.data import Batch, Splits, mixed, steps_per_epoch, train_batches
from retrofit.errors import Interrupted, PairMismatch, RetrofitError
from retrofit.models.preprocess import Preprocess
from retrofit.recipe import Recipe, Train
from retrofit.runfiles import RunKey
from retrofit.train.arm import ArmRun
from retrofit.train.finish import finish
from retrofit.train.match import Seen
from retrofit.train.processes import join, known_to_all, on_main
from retrofit.train.resume import Cadence
from retrofit.train.signals import Stop
from retrofit.train.track import Trackers


def steps_of(train: Train, images: int) -> int:
    """Optimizer steps of a run."""
    return train.steps or max(1, math.ceil(train.epochs * steps_per_epoch(images, train.batch_size)))


def probed_at(step: int, train: Train, steps: int) -> bool:
    """Whether attention is read before this step of so many.

    More often at first, where the learning rate rises and order in time tells most.
    """
    every = train.probe_every or max(1, steps // 10)
    return step % every == 0 or (step < every and step % max(1, every // 4) == 0)


def train_lockstep(
    recipe: Recipe,
    models: Mapping[RunKey, tuple[nn.Module, int]],
    splits: Splits,
    preprocess: Preprocess,
    probe_images: Sequence[Tensor],
    run_dir: Path,
    tick: Callable[[str, int], None],
    seen: Seen,
    stop: Stop,
) -> list[Exception]:
    """Trains runs of one seed and precision side by side, each to its end, from their checkpoints where they have one.

    Args:
        models: for each run its model, ready to train, and how many parameters its norms added.
        probe_images: fixed held-out batches on which attention is read.
        tick: called with a word on how an arm goes, and how many more of its steps are done.
        seen: the batches that other runs of this seed were given.
        stop: holds signals back while a step is computed.

    Returns the faults of runs that failed; the others go on.

    Raises:
        PairMismatch: where the runs are not given what `seen` says, or an arm changes a batch that others are given.
        Interrupted: on a signal, when all is saved.
    """
    train, state = recipe.train, join()
    seed = next(iter(models)).seed
    steps = steps_of(train, len(splits.train))
    arms = [
        ArmRun.start(key, model, recipe.train_of(key.arm), steps, run_dir, recipe.arm_of(key.arm).ramp)
        for key, (model, _) in models.items()
    ]
    if state.is_main_process and train.trackers:
        for arm in arms:
            arm.trackers = Trackers(recipe, arm.key, run_dir, arm.at)
    faults: list[Exception] = []
    cadence = Cadence(train.checkpoint_every)

    def end(arm: ArmRun) -> None:
        with _outlived(arm, faults):
            finish(arm, recipe, splits, preprocess, steps, models[arm.key][1])

    try:
        for arm in arms:
            tick(arm.key.folder, arm.at if arm.alive else steps)
            if not arm.alive:
                end(arm)
        first = min((arm.at for arm in arms if arm.going), default=steps)
        batches = train_batches(
            splits.train,
            preprocess,
            recipe.data,
            seed=seed,
            batch_size=train.batch_size,
            steps=steps,
            first_step=first,
            workers=train.workers,
            part=(state.process_index, state.num_processes),
        )
        asked = time.perf_counter()
        for step, batch in enumerate(batches, first):
            stop.agree()
            batch = known_to_all(mixed(batch, train, len(splits.classes), seed, step))
            waited = time.perf_counter() - asked
            seen.check(step, batch)
            probed = probed_at(step, train, steps)
            # Arms that a kill has left at different steps wait for the one that is behind.
            due = [arm for arm in arms if arm.going and arm.at == step]
            for arm in due:
                with stop.hold(), _outlived(arm, faults), _unchanged(arm, batch):
                    layers = arm.attention_now(probe_images) if probed else None
                    with arm.memory.measured(arm.model, arm.optimizer, compiled=train.compile is not None):
                        arm.step(step, batch, recipe.train_of(arm.key.arm), layers, waited / len(due))
                    if step + 1 == steps and arm.alive:
                        arm.last_probe(steps, probe_images)
                    elif not (arm.alive or probed):
                        arm.last_probe(step, probe_images)
                if not arm.alive:
                    end(arm)
                tick(f"{arm.key.folder} loss {arm.loss:.3f}", 1 if arm.going else steps - step)
            if on_main(partial(cadence.due, step + 1)):
                with stop.hold(), cadence.saving():
                    for arm in arms:
                        if arm.going:
                            arm.save()
            if not any(arm.going for arm in arms):
                break
            asked = time.perf_counter()
        for arm in arms:
            if arm.going:
                end(arm)
    except Interrupted:
        for arm in arms:
            if arm.going:
                arm.save()
        raise
    return faults


@contextmanager
def _outlived(arm: ArmRun, faults: list[Exception]) -> Iterator[None]:
    """A fault of ours ends one arm; the others go on. What a user or the machine has to mend ends all."""
    try:
        yield
    except (RetrofitError, OSError):
        raise
    except Exception as error:
        if arm.accelerator.num_processes > 1:  # the others wait for this one
            raise
        arm.fail(error)
        faults.append(error)


@contextmanager
def _unchanged(arm: ArmRun, batch: Batch) -> Iterator[None]:
    """Raises PairMismatch where an arm writes into the batch that the others are given."""
    before = batch.pixels._version, batch.labels._version
    yield
    if before != (batch.pixels._version, batch.labels._version):
        raise PairMismatch(f"{arm.key.folder} changed the batch in place that the arms beside it are given")
