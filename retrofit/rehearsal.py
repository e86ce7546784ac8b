"""`retrofit pair --dry-run`: the plan, rehearsed for a few steps on random pixels, so that what would fail is told now.

Time and memory are measured on the very models, optimizers and precisions of the plan. Nothing is written.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from retrofit.data import Batch, share, train_batches
from retrofit.models import evaluating
from retrofit.recipe import Recipe, dump
from retrofit.runfiles import RunKey
from retrofit.study import Study, open_study, with_head
from retrofit.surgery import insert_qk_norm
from retrofit.train import (
    ArmRun,
    check_devices,
    check_shares,
    check_trackers,
    held_bytes,
    join,
    on_main,
    probed_at,
    runs_at_once,
    steps_of,
)

_STEPS, _SECONDS = 4, 10.0
"""Steps that are taken, the first of them a warm-up; no other begins once so many seconds have passed."""


@dataclass(frozen=True)
class Rehearsed:
    """One arm in one precision, after a few steps."""

    groups: list[dict[str, Any]]
    """The optimizer's parameter groups."""
    parameters: int
    added: int
    """Parameters of its norms."""
    sites: int
    steps: int
    """Timed steps."""
    step: float
    """Seconds a step without its batch, the median."""
    probe: float
    """Seconds to read attention on `data.probe_images`."""
    image: float
    """Seconds to evaluate an image."""
    held: int
    """Bytes between steps."""
    peak: int | None
    """Bytes in a step (memory.StepMemory); None where they cannot be counted."""


def rehearse(recipe: Recipe) -> str:
    """What the recipe comes to, in words. Raises RetrofitError for what would fail before or in its first steps."""
    check_devices(recipe.train)
    check_trackers(recipe)
    study = open_study(recipe, Path())
    check_shares(recipe.train, len(study.splits.train))
    base, plan = with_head(study, recipe.train.seeds[0]), recipe.plan()
    batch = _batch_seconds(study)
    found: dict[tuple[str, str], Rehearsed] = {}
    for key in plan:
        if (key.arm, key.precision) not in found:
            found[key.arm, key.precision] = _rehearsed(study, base, key)
    sizes = ", ".join(f"{n} {len(getattr(study.splits, n))}" for n in ("train", "validation", "test"))
    return "\n".join(
        [
            dump(recipe),
            f"images: {sizes}",
            f"classes: {len(study.splits.classes)}",
            *_arms(recipe, found),
            *_estimate(study, base, found, batch),
            f"{len(plan)} runs of {steps_of(recipe.train, len(study.splits.train))} steps:",
            *(f"  {key.folder}" for key in plan),
        ]
    )


def _rehearsed(study: Study, base: nn.Module, key: RunKey) -> Rehearsed:
    """Trains one arm for a few steps, its norms at their formula's own start, which costs as much as any other."""
    recipe, model = study.recipe, copy.deepcopy(base)
    train, arm = recipe.train_of(key.arm), recipe.arm_of(key.arm)
    insertion = None if arm.qk_norm is None else insert_qk_norm(model, arm.qk_norm, init="ones")
    parameters = sum(p.numel() for p in model.parameters())
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        run = ArmRun.start(key, model, train, _STEPS, Path(scratch), arm.ramp)
        device = run.accelerator.device
        began = time.perf_counter()
        for step in range(_STEPS):
            batch = _random_batch(study, step)
            with run.memory.measured(model, run.optimizer, compiled=train.compile is not None):
                spent.append(_seconds(device, lambda: run.step(step, batch, train)))  # noqa: B023
            if on_main(lambda: time.perf_counter() - began > _SECONDS):  # none steps on alone
                break
        images = torch.zeros(recipe.data.probe_images, 3, *[study.preprocess.image_size] * 2)
        probe = _seconds(device, lambda: run.attention_now(images.split(64)))
        with evaluating(model):
            evaluation = _seconds(device, lambda: run.eager(images.to(device)))
        run.close()
    timed = spent[1:] or spent
    return Rehearsed(
        groups=run.optimizer.param_groups,
        parameters=parameters,
        added=parameters - sum(p.numel() for p in base.parameters()),
        sites=0 if insertion is None else len(insertion.sites),
        steps=len(timed),
        step=statistics.median(timed),
        probe=probe,
        image=evaluation / len(images),
        held=held_bytes(model, run.optimizer),
        peak=run.memory.peak,
    )


def _random_batch(study: Study, step: int) -> Batch:
    """This process's share of a batch of noise, of the size and with the labels that training has."""
    train, state = study.recipe.train, join()
    size, side = min(train.batch_size, len(study.splits.train)), study.preprocess.image_size
    mine = len(share(np.arange(size), (state.process_index, state.num_processes)))
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(len(study.splits.classes), (mine,), generator=generator)
    return Batch(torch.randn(mine, 3, side, side, generator=generator), labels, [str(i) for i in range(size)], 0)


def _batch_seconds(study: Study) -> float:
    """Seconds to decode and augment a batch of training in one process, the better of two."""
    recipe, state = study.recipe, join()
    batches = train_batches(
        study.splits.train,
        study.preprocess,
        recipe.data,
        seed=recipe.train.seeds[0],
        batch_size=recipe.train.batch_size,
        steps=2,
        part=(state.process_index, state.num_processes),
    )
    return min(_seconds(torch.device("cpu"), lambda: next(batches)) for _ in range(2))


def _seconds(device: torch.device, do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _arms(recipe: Recipe, found: Mapping[tuple[str, str], Rehearsed]) -> Iterator[str]:
    """Each arm with its parameter groups."""
    yield "arms, each with its parameter groups:"
    for arm in dict.fromkeys(arm for arm, _ in found):
        one = found[arm, recipe.train.precision[0]]
        spec = recipe.arm_of(arm).qk_norm
        norms = f", of which {one.added:,} in {one.sites} QK-Norms: {spec.describe()}" if spec is not None else ""
        yield f"  {arm}: {one.parameters:,} parameters{norms}"
        for group in one.groups:
            count = sum(p.numel() for p in group["params"])
            yield (
                f"    {group['name']:40s} {len(group['params']):4d} tensors {count:12,d} parameters   "
                f"lr x {group['lr_scale']:.4g}   weight decay {group['weight_decay']:g}"
            )


def _estimate(study: Study, base: nn.Module, found: Mapping[tuple[str, str], Rehearsed], batch: float) -> Iterator[str]:
    recipe, state = study.recipe, join()
    train, steps = recipe.train, steps_of(recipe.train, len(study.splits.train))
    probes = 1 + sum(probed_at(step, train, steps) for step in range(steps))
    images = (len(study.splits.validation) + len(study.splits.test)) * (2 if train.ema is not None else 1)
    limit = train.lockstep
    at_once = runs_at_once(base, train, study.preprocess.image_size) if limit == "auto" else limit
    seconds, peak, most = 0.0, 0, 1
    for _, keys in groupby(recipe.plan(), key=lambda k: (k.precision, k.seed)):
        runs = [found[key.arm, key.precision] for key in keys]
        for i in range(0, len(runs), at_once):
            part = runs[i : i + at_once]
            together = sum(run.step for run in part)
            waited = max(0.0, batch / train.workers - together) if train.workers else batch
            seconds += steps * (together + waited)
            seconds += sum(probes * run.probe + images * run.image / state.num_processes for run in part)
            most = max(most, len(part))
            peak = max(peak, sum(r.held for r in part) + max((r.peak or r.held) - r.held for r in part))
    for (arm, precision), one in found.items():
        memory = "" if one.peak is None else f", {_bytes(one.peak)} at most"
        yield f"a step of {arm} in {precision}: {one.step:.3g} s{memory}"
    beside = " side by side" if most > 1 else ""
    timed = min(one.steps for one in found.values())
    measured = (
        f"{timed} step{'s' * (timed > 1)} on random pixels, one real batch ({batch:.3g} s), a probe, an evaluation"
    )
    device = state.device.type if state.num_processes == 1 else f"{state.num_processes} x {state.device.type}"
    counted = "the allocator's peak" if state.device.type == "cuda" else "tensors, without the kernels' workspace"
    yield (
        f"estimate: {_duration(seconds)}, {_bytes(peak)} with {most} run{'s' * (most > 1)}{beside}. Measured now on "
        f"{device}: {measured}; memory is {counted}. Calibration and the report are not counted."
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}"
    return f"about {seconds:.0f} seconds" if seconds >= 1.5 else "a second or two"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
