"""One training loop over the arms of a pair, in lockstep: every batch is decoded once and given to each arm.

Each arm has a model, an optimizer and an Accelerator of its own. Dropout and drop path are keyed by (seed, step), so
that an arm's numbers do not depend on the others beside it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from retrofit import runfiles
from retrofit.checkpoint import save
from retrofit.data import Batch, Images, Splits, eval_batches, keyed_rng, steps_per_epoch, train_batches
from retrofit.errors import RetrofitError
from retrofit.models import evaluating, family_of
from retrofit.models.preprocess import Preprocess
from retrofit.probes import probe
from retrofit.recipe import Recipe, Train
from retrofit.runfiles import JsonLines, RunKey

_EVAL_BATCH = 256


def steps_of(train: Train, images: int) -> int:
    """Optimizer steps of a run."""
    return train.steps or max(1, math.ceil(train.epochs * steps_per_epoch(images, train.batch_size)))


def attention_of(train: Train, precision: str, device: torch.device) -> str:
    """`unfused` or `fused`. PyTorch's fused kernel is slow in the backward pass on CPUs in bfloat16."""
    if train.attention != "auto":
        return train.attention
    return "unfused" if device.type == "cpu" and precision == "bf16" else "fused"


@dataclass
class ArmRun:
    """One arm's training run: all that changes from step to step, and the files that it writes."""

    key: RunKey
    folder: Path
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    schedule: CosineLRScheduler
    attention: str
    metrics: JsonLines
    timings: JsonLines
    probes: JsonLines
    diverged_at: int | None = None
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def start(cls, key: RunKey, model: nn.Module, train: Train, steps: int, run_dir: Path) -> ArmRun:
        accelerator = _accelerator(key.precision)
        attention = attention_of(train, key.precision, accelerator.device)
        if attention == "unfused":
            family_of(model).unfuse(model)
        try:
            optimizer = create_optimizer_v2(
                model,
                opt=train.optimizer,
                lr=key.lr,
                param_group_fn=partial(
                    param_groups_weight_decay,
                    weight_decay=train.weight_decay,
                    no_weight_decay_list=family_of(model).no_weight_decay(model),
                ),
            )
        except (ValueError, AssertionError, ImportError) as error:
            raise RetrofitError(f"train.optimizer: {train.optimizer} cannot be used: {error}") from None
        warmup = min(int(train.warmup * steps), steps - 1)
        # From a first step above 0 to the peak, and from there to just above 0 at the last step.
        schedule = CosineLRScheduler(
            optimizer,
            t_initial=steps - warmup,
            warmup_t=warmup,
            warmup_lr_init=key.lr / (warmup + 1),
            warmup_prefix=True,
            t_in_epochs=False,
        )
        prepared, optimizer = accelerator.prepare(model.train(), optimizer)
        folder = run_dir / key.folder
        return cls(
            key,
            folder,
            accelerator,
            prepared,
            optimizer,
            schedule,
            attention,
            metrics=JsonLines(folder / runfiles.METRICS),
            timings=JsonLines(folder / runfiles.TIMINGS),
            probes=JsonLines(folder / runfiles.PROBES),
        )

    @property
    def alive(self) -> bool:
        return self.diverged_at is None

    def step(self, step: int, batch: Batch, train: Train) -> None:
        """One optimizer step. A loss or a gradient that is not finite ends the run: it is a result."""
        began = time.perf_counter()
        device = self.accelerator.device
        pixels, labels = batch.pixels.to(device), batch.labels.to(device)
        self.schedule.step_update(step)
        self.model.train()
        with keyed_rng("step", self.key.seed, step):
            logits = family_of(self.model).logits(self.model, pixels)
            assert logits is not None, "a model without a head is not trained"
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=train.label_smoothing)
            self.accelerator.backward(loss)
        self.accelerator.unscale_gradients()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if train.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), train.clip_grad, norm)
        row = {
            "step": step,
            "epoch": batch.epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "ids": hashlib.sha256("\n".join(batch.ids).encode()).hexdigest()[:16],
        }
        scaled = self.accelerator.scaler is not None  # fp16: the scaler skips a step whose gradients overflow
        if not math.isfinite(row["loss"]) or not (scaled or math.isfinite(row["grad_norm"])):
            self.diverged_at = step
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(row["loss"])
        self.metrics.write(row)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.timings.write({"step": step, "seconds": round(spent, 6)})

    def probe(self, step: int, images: Sequence[Tensor]) -> None:
        """Reads attention on the fixed images, as the model computes it in training."""
        with evaluating(self.model), probe(self.model) as seen:
            for batch in images:
                family_of(self.model).forward(self.model, batch.to(self.accelerator.device))
        self.probes.write({"step": step, "layers": seen.rows()})

    def finish(self, recipe: Recipe, splits: Splits, preprocess: Preprocess, steps: int, added: int) -> None:
        """Evaluates, and writes predictions, weights and, last, result.json."""
        results: dict[str, Any] = {"validation": None, "test": None}
        arrays: dict[str, Any] = {}
        if self.alive:
            for name, images in (("validation", splits.validation), ("test", splits.test)):
                ids, labels, logits = _predictions(self.model, images, preprocess, self.accelerator.device)
                arrays |= {f"{name}_ids": ids, f"{name}_labels": labels, f"{name}_logits": logits}
                results[name] = score(logits, labels)
            if any(result["loss"] is None for result in results.values()):
                self.diverged_at = steps
        for log in (self.metrics, self.timings, self.probes):
            log.close()
        if self.alive:
            buffer = BytesIO()
            np.savez_compressed(buffer, **arrays)
            runfiles.write_bytes(self.folder / runfiles.PREDICTIONS, buffer.getvalue())
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if self.alive:
            about = {
                "arm": self.key.arm,
                "lr": self.key.lr,
                "seed": self.key.seed,
                "precision": self.key.precision,
            }
            save(model, self.folder / runfiles.FINAL, about={**about, "base": recipe.model.source, **results})
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        result = {
            "arm": self.key.arm,
            "lr": self.key.lr,
            "seed": self.key.seed,
            "precision": self.key.precision,
            "status": "finished" if self.alive else "diverged",
            "diverged_at": self.diverged_at,
            "steps": steps,
            "epochs": round(steps / steps_per_epoch(len(splits.train), recipe.train.batch_size), 3),
            "batch_size": recipe.train.batch_size,
            "classes": len(splits.classes),
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameters_added": added,
            **results,
            "train_loss": sum(tail) / len(tail),
            "attention": self.attention,
            "device": self.accelerator.device.type,
            "seconds": round(self.seconds, 3),
        }
        runfiles.write_json(self.folder / runfiles.RESULT, result)


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
    train = recipe.train
    seed = next(iter(models)).seed
    steps = steps_of(train, len(splits.train))
    every = train.probe_every or max(1, steps // 10)
    arms = [ArmRun.start(key, model, train, steps, run_dir) for key, (model, _) in models.items()]
    for arm in arms:
        arm.probe(0, probe_images)
    batches = train_batches(
        splits.train,
        preprocess,
        recipe.data,
        seed=seed,
        batch_size=train.batch_size,
        steps=steps,
        workers=train.workers,
    )
    for step, batch in enumerate(batches):
        for arm in arms:
            if arm.alive:
                arm.step(step, batch, train)
                if (step + 1) % every == 0 or step + 1 == steps:
                    arm.probe(step + 1, probe_images)
            tick(f"{arm.key.folder} loss {arm.losses[-1]:.3f}")
    for arm in arms:
        arm.finish(recipe, splits, preprocess, steps, models[arm.key][1])


def score(logits: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Accuracy and mean cross-entropy in nats; the loss is None where a logit is not finite."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity: the loss is then None
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(labels)), labels]
    loss = float(losses.mean())
    accuracy = float((logits.argmax(-1) == labels).mean())
    return {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None, "images": len(labels)}


def _predictions(
    model: nn.Module, images: Images, preprocess: Preprocess, device: torch.device
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ids [n], labels [n] and logits [n, K] of every image, in order."""
    ids: list[str] = []
    labels, logits = [], []
    with evaluating(model):
        for batch in eval_batches(images, preprocess, _EVAL_BATCH):
            out = family_of(model).logits(model, batch.pixels.to(device))
            assert out is not None
            ids += batch.ids
            labels.append(batch.labels.numpy())
            logits.append(out.float().cpu().numpy())
    return np.array(ids), np.concatenate(labels), np.concatenate(logits)


def _accelerator(precision: str) -> Accelerator:
    """An Accelerator of its own for a run. accelerate keeps one precision a process until its state is reset."""
    mixed = {"fp32": "no"}.get(precision, precision)
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed)
