"""One arm's training run: its model, optimizer, schedule and Accelerator, and what one step does."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from retrofit import runfiles
from retrofit.data import Batch, keyed_rng
from retrofit.errors import RetrofitError
from retrofit.models import family_of
from retrofit.recipe import Train
from retrofit.runfiles import JsonLines, RunKey
from retrofit.train.memory import StepMemory
from retrofit.train.optim import freeze, optimizer_of, schedule_of
from retrofit.train.watch import Watch
from retrofit.train.wrapped import Classifier, accelerator_of, compiled, sharded, whole


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
    """The library's own module, unwrapped; its parameters are those that are trained."""
    eager: nn.Module
    """The model as accelerate has prepared it: [B, 3, H, W] to logits [B, K]."""
    forward: nn.Module
    """The same, compiled where the recipe says so."""
    optimizer: Any
    schedule: Scheduler
    attention: str
    metrics: JsonLines
    timings: JsonLines
    watch: Watch
    memory: StepMemory
    ema: ModelEmaV3 | None = None
    diverged_at: int | None = None
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def start(cls, key: RunKey, model: nn.Module, train: Train, steps: int, run_dir: Path) -> ArmRun:
        accelerator = accelerator_of(key.precision)
        attention = attention_of(train, key.precision, accelerator.device)
        if attention == "unfused" and not family_of(model).unfuse(model):
            if train.attention == "unfused":
                raise RetrofitError(f"train.attention: {type(model).__name__} cannot be switched to unfused; take auto")
            attention = "fused"
        if train.grad_checkpointing:
            family_of(model).checkpoint_gradients(model)
        freeze(model, train.freeze)
        optimizer = optimizer_of(model, train, key.lr)
        schedule = schedule_of(optimizer, train, key.lr, steps)
        if train.ema is not None and sharded():
            raise RetrofitError("train.ema: an average of weights that FSDP shards cannot be kept; leave it out")
        eager, optimizer = accelerator.prepare(Classifier(model.train()), optimizer)
        folder, main = run_dir / key.folder, accelerator.is_main_process
        return cls(
            key,
            folder,
            accelerator,
            model,
            eager,
            compiled(eager, train.compile),
            optimizer,
            schedule,
            attention,
            metrics=JsonLines(folder / runfiles.METRICS if main else None),
            timings=JsonLines(folder / runfiles.TIMINGS if main else None),
            watch=Watch(key, model, eager, accelerator.device, JsonLines(folder / runfiles.PROBES if main else None)),
            memory=StepMemory(accelerator.device),
            ema=None if train.ema is None else ModelEmaV3(model, train.ema),
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
        self.schedule.step_update(step)
        loss = self._gradients(step, batch, train)
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
            "grad_norm": whole(norm).item(),
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
        if self.ema is not None and self.alive:
            self.ema.update(self.model)
        self.losses.append(row["loss"])
        self.metrics.write(row)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.timings.write({"step": step, "seconds": round(spent, 6)})

    def _gradients(self, step: int, batch: Batch, train: Train) -> Tensor:
        """Leaves the gradient of the whole batch's mean loss in the parameters, and returns that loss.

        The batch is that of all processes; this one computes its share of it, in `train.accumulate` parts. Dropout and
        drop path are keyed by (seed, step, process, part).
        """
        self.forward.train()
        accelerator, device = self.accelerator, self.accelerator.device
        processes, rank = accelerator.num_processes, accelerator.process_index
        least = len(batch.ids) // 2 // processes * 2 or 1  # of a share, so that all have the same number of parts
        parts = min(train.accumulate, least)
        total = torch.zeros((), device=device)
        shares = zip(batch.pixels.tensor_split(parts), batch.labels.tensor_split(parts), strict=True)
        for part, (pixels, labels) in enumerate(shares):
            # Gradients are summed over the processes once, with the last part.
            waiting = nullcontext() if part == parts - 1 else accelerator.no_sync(self.eager)
            with keyed_rng("step", self.key.seed, step, rank, part), waiting:
                logits = self.forward(pixels.to(device)).float()
                smoothing = train.label_smoothing
                losses = F.cross_entropy(logits, labels.to(device), label_smoothing=smoothing, reduction="sum")
                loss = losses / len(batch.ids)
                accelerator.backward(loss * processes)  # gradients are averaged over the processes
            total += loss.detach()
        result: Tensor = accelerator.reduce(total)
        return result

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

    @property
    def result_model(self) -> nn.Module:
        """The model that is evaluated and saved: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def close(self) -> None:
        for log in (self.metrics, self.timings, self.watch.rows):
            log.close()
