"""One arm's training run: its model, optimizer, schedule and Accelerator, and what one step does."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from retrofit import runfiles
from retrofit.data import Batch, keyed_rng
from retrofit.errors import RetrofitError
from retrofit.models import family_of
from retrofit.recipe import Train
from retrofit.runfiles import JsonLines, RunKey
from retrofit.train.memory import StepMemory
from retrofit.train.watch import Watch


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
    watch: Watch
    memory: StepMemory
    diverged_at: int | None = None
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def start(cls, key: RunKey, model: nn.Module, train: Train, steps: int, run_dir: Path) -> ArmRun:
        accelerator = _accelerator(key.precision)
        attention = attention_of(train, key.precision, accelerator.device)
        if attention == "unfused" and not family_of(model).unfuse(model):
            if train.attention == "unfused":
                raise RetrofitError(f"train.attention: {type(model).__name__} cannot be switched to unfused; take auto")
            attention = "fused"
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
        if hasattr(optimizer, "set_hessian"):
            raise RetrofitError(
                f"train.optimizer: {train.optimizer} needs second derivatives, which are not computed here"
            )
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
            watch=Watch(key, prepared, accelerator.device, JsonLines(folder / runfiles.PROBES)),
            memory=StepMemory(accelerator.device),
        )

    @property
    def alive(self) -> bool:
        return self.diverged_at is None

    def step(self, step: int, batch: Batch, train: Train, layers: list[dict[str, Any]] | None = None) -> None:
        """One optimizer step. A loss or a gradient that is not finite ends the run: it is a result.

        Args:
            layers: what attention did just before this step, where it was probed; written with what the step did to it.
        """
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
        before = self.watch.projections() if layers is not None else []
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
        scaler = self.accelerator.scaler  # fp16: it skips a step whose gradients overflow
        if (
            not math.isfinite(row["loss"])
            or not (scaler is not None or math.isfinite(row["grad_norm"]))
            or not self._updated()
        ):
            self.diverged_at = step
        if layers is not None:
            self.watch.add_update(layers, before)
            self.watch.write(step, layers, row, self._loss_scale())
        self.optimizer.zero_grad()
        self.losses.append(row["loss"])
        self.metrics.write(row)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.timings.write({"step": step, "seconds": round(spent, 6)})

    def _updated(self) -> bool:
        """Steps the optimizer; False where the update does not fit into float32, as at absurd learning rates."""
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if "overflow" in str(error):
                return False
            raise
        return True

    def attention_now(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        """What attention does on the fixed images, a row a layer, computed as in training."""
        return self.watch.attention(images)

    def last_probe(self, steps: int, images: Sequence[Tensor]) -> None:
        """What attention does after the last step."""
        self.watch.write(steps, self.watch.attention(images), {}, self._loss_scale())

    def _loss_scale(self) -> float | None:
        scaler = self.accelerator.scaler
        return None if scaler is None else float(scaler.get_scale())

    def close(self) -> None:
        for log in (self.metrics, self.timings, self.watch.rows):
            log.close()


def _accelerator(precision: str) -> Accelerator:
    """An Accelerator of its own for a run. accelerate keeps one precision a process until its state is reset."""
    mixed = {"fp32": "no"}.get(precision, precision)
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed)
