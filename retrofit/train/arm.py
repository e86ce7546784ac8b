"""One arm's training run: its model, optimizer, schedule and Accelerator, and what one step does."""

from __future__ import annotations

import math
import sys
import time
import traceback
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
from tqdm import tqdm

from retrofit import runfiles
from retrofit.data import Batch, keyed_rng
from retrofit.errors import RetrofitError
from retrofit.models import family_of
from retrofit.norms import set_ramp
from retrofit.recipe import Train
from retrofit.runfiles import JsonLines, RunKey
from retrofit.train import resume
from retrofit.train.memory import StepMemory
from retrofit.train.optim import freeze, optimizer_of, schedule_of
from retrofit.train.processes import check_same_for_all, sharded
from retrofit.train.state import restore, state_of
from retrofit.train.track import Trackers
from retrofit.train.watch import Watch
from retrofit.train.wrapped import Classifier, accelerator_of, compiled, whole

_PATIENCE = 32
"""Steps in a row that may be left out: twice the halvings that bring the first loss scale, 65536, to 1."""
_LOGS = (runfiles.METRICS, runfiles.TIMINGS, runfiles.PROBES)


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
    trackers: Trackers | None = None
    at: int = 0
    """Steps that are done."""
    diverged_at: int | None = None
    diverged_by: str | None = None
    """What was not finite: loss, gradient, update or evaluation."""
    nonfinite: int = 0
    """Steps whose loss or gradient was not finite, and that changed nothing."""
    in_a_row: int = 0
    """How many of them there were at the end."""
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    resumed_at: list[int] = field(default_factory=list)
    """Where the run went on from a checkpoint."""
    closed: bool = False
    ramp_steps: float = 0.0
    """Steps over which the norms come in."""

    @classmethod
    def start(cls, key: RunKey, model: nn.Module, train: Train, steps: int, run_dir: Path, ramp: float = 0.0) -> ArmRun:
        freeze(model, train.freeze)
        if ramp:
            set_ramp(model, 0.0)
        accelerator = accelerator_of(key.precision, model)
        attention = attention_of(train, key.precision, accelerator.device)
        if attention == "unfused" and not family_of(model).unfuse(model):
            if train.attention == "unfused":
                raise RetrofitError(f"train.attention: {type(model).__name__} cannot be switched to unfused; take auto")
            attention = "fused"
        if train.grad_checkpointing:
            family_of(model).checkpoint_gradients(model)
        optimizer = optimizer_of(model, train, key.lr, accelerator.device.type)
        schedule = schedule_of(optimizer, train, key.lr, steps)
        eager, optimizer = accelerator.prepare(Classifier(model.train()), optimizer)
        folder, main = run_dir / key.folder, accelerator.is_main_process
        if main:
            runfiles.sweep(folder)
            (folder / runfiles.FAILURE).unlink(missing_ok=True)
        saved = None if sharded() else resume.read(folder)
        check_same_for_all(folder, 0 if saved is None else saved["step"])
        kept = {} if saved is None else saved["logs"]
        metrics, timings, probes = (JsonLines(folder / n if main else None, kept.get(n, 0)) for n in _LOGS)
        arm = cls(
            key,
            folder,
            accelerator,
            model,
            eager,
            compiled(eager, train.compile),
            optimizer,
            schedule,
            attention,
            metrics=metrics,
            timings=timings,
            watch=Watch(key, model, eager, accelerator.device, probes),
            memory=StepMemory(accelerator.device),
            ema=None if train.ema is None else ModelEmaV3(model, train.ema),
            ramp_steps=ramp * steps,
        )
        if saved is not None:
            restore(arm, saved)
            arm._ramp()
        return arm

    @property
    def alive(self) -> bool:
        return self.diverged_at is None

    @property
    def loss(self) -> float:
        """Of the last step; NaN before the first."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def going(self) -> bool:
        """Whether it has steps to take, or its end to come."""
        return not self.closed

    def step(
        self, step: int, batch: Batch, train: Train, layers: list[dict[str, Any]] | None = None, waited: float = 0.0
    ) -> None:
        """One optimizer step. A loss or a gradient that is not finite is a result (Train.on_nonfinite).

        Args:
            layers: what attention did just before this step, where it was probed; written with what the step did to it.
            waited: this arm's share of the seconds that the batch was waited for.
        """
        began = time.perf_counter()
        self.schedule.step_update(step)
        with self.watch.batch(layers is not None and train.probe_batch) as attention_of_batch:
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
            **batch.fingerprint,
        }
        self._update(step, row["loss"], row["grad_norm"], train)
        if layers is not None:
            self.watch.add_update(layers, before)
            self.watch.write(step, layers, row, self._loss_scale(), attention_of_batch)
        self.optimizer.zero_grad()
        if self.ema is not None and not self.in_a_row:
            self.ema.update(self.model)
        self.losses.append(row["loss"])
        self.metrics.write(row)
        if self.trackers is not None:
            self.trackers.step(row, layers)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.timings.write({"step": step, "seconds": round(spent, 6), "data_seconds": round(waited, 6)})
        self.at = step + 1
        self._ramp()

    def _ramp(self) -> None:
        """Puts the norms where the next step needs them, between the model as it was and the plain norm."""
        if self.ramp_steps:
            for model in (self.model, self.result_model):
                set_ramp(model, min(1.0, self.at / self.ramp_steps))

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

    def _update(self, step: int, loss: float, grad_norm: float, train: Train) -> None:
        """Moves the weights. What is not finite moves none, and is counted or ends the run."""
        by = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(grad_norm) else None
        scaled = self.accelerator.scaler is not None
        if by is None or scaled:  # fp16: the scaler looks itself, and takes a smaller scale where gradients overflow
            try:
                with keyed_rng("update", self.key.seed, step):  # a few optimizers draw, such as Kron
                    self.optimizer.step()
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                by = "update"  # it does not fit into float32, as at absurd learning rates
        self.nonfinite += by is not None
        self.in_a_row = 0 if by is None else self.in_a_row + 1
        harmless = (train.on_nonfinite == "skip" and by != "update") or (by == "gradient" and scaled)
        if by is not None and not (harmless and self.in_a_row < _PATIENCE):
            self.diverged_at, self.diverged_by = step, by

    def save(self) -> None:
        """Writes the checkpoint that `start` goes on from."""
        state = state_of(self)
        if self.accelerator.is_main_process:
            logs = {log.path.name: log.synced() for log in self._logs if log.path is not None}
            resume.write(self.folder, self.at, {**state, "logs": logs})

    @property
    def _logs(self) -> tuple[JsonLines, ...]:
        return self.metrics, self.timings, self.watch.rows

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
        for log in self._logs:
            log.close()
        if self.trackers is not None:
            self.trackers.close()
        self.closed = True

    def fail(self, error: Exception) -> None:
        """Ends the run without a result, and says why; the same command tries it again from its last checkpoint."""
        self.close()
        told = "".join(traceback.format_exception(error))
        runfiles.write_json(self.folder / runfiles.FAILURE, {"step": self.at, "error": told})
        tqdm.write(f"retrofit: {self.key.folder} failed in step {self.at}; the others go on\n{told}", file=sys.stderr)
