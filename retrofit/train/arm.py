"""One arm's training run: its model, optimizer, schedule and Accelerator, what one step does, what it leaves."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
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
from tqdm import tqdm

from retrofit import runfiles
from retrofit.checkpoint import save
from retrofit.data import Batch, Splits, keyed_rng, steps_per_epoch
from retrofit.errors import RetrofitError
from retrofit.evaluate import predictions, score
from retrofit.models import evaluating, family_of, sites_of
from retrofit.models.preprocess import Preprocess
from retrofit.probes import probe
from retrofit.recipe import Recipe, Train
from retrofit.runfiles import JsonLines, RunKey
from retrofit.train.memory import StepMemory

_ROUNDING = 1.02
"""How far above its bound a logit may come out in bfloat16."""


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
    memory: StepMemory
    diverged_at: int | None = None
    warned: bool = False
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
            probes=JsonLines(folder / runfiles.PROBES),
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
        before = self._projections() if layers is not None else []
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
            for layer, (grad_norm, weights), now in zip(layers, before, self._projections(), strict=True):
                layer["grad_norm"] = grad_norm
                layer["update_ratio"] = _ratio(weights, now[1])
            self._write_probe(step, layers, row)
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
        with evaluating(self.model), probe(self.model) as seen:
            for batch in images:
                family_of(self.model).forward(self.model, batch.to(self.accelerator.device))
        rows = seen.rows()
        for row in rows:
            bound = row["logit_bound"]
            if bound is not None and row["logit_absmax"] > bound * _ROUNDING and not self.warned:
                self.warned = True
                tqdm.write(
                    f"{self.key.folder}: |logit| {row['logit_absmax']:.4g} in {row['site']} exceeds {bound:.4g}, the "
                    "bound that its norm sets; please report this",
                    file=sys.stderr,
                )
        return rows

    def last_probe(self, steps: int, images: Sequence[Tensor]) -> None:
        """What attention does after the last step."""
        self._write_probe(steps, self.attention_now(images), {})

    def _write_probe(self, step: int, layers: list[dict[str, Any]], metrics: Mapping[str, Any]) -> None:
        scaler = self.accelerator.scaler
        row = {
            "step": step,
            "loss": metrics.get("loss"),
            "lr": metrics.get("lr"),
            "autocast": self.key.precision,
            "loss_scale": None if scaler is None else scaler.get_scale(),
            "layers": layers,
        }
        self.probes.write(row)

    def _projections(self) -> list[tuple[float, list[Tensor]]]:
        """For each site, the norm of its projections' gradient and a copy of their weights."""
        found = []
        for site in sites_of(self.model)[0]:
            weights = site.projections
            gradients = [w.grad for w in weights if w.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
            found.append((norm.item(), [w.detach().clone() for w in weights]))
        return found

    def finish(self, recipe: Recipe, splits: Splits, preprocess: Preprocess, steps: int, added: int) -> None:
        """Evaluates, and writes predictions, weights and, last, result.json."""
        which = {name: getattr(self.key, name) for name in ("arm", "lr", "seed", "precision")}
        results: dict[str, Any] = {"validation": None, "test": None}
        arrays: dict[str, Any] = {}
        if self.alive:
            for name, images in (("validation", splits.validation), ("test", splits.test)):
                ids, labels, logits = predictions(self.model, images, preprocess, self.accelerator.device)
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
                "base": recipe.model.source,
                "data": recipe.data.source,
                **which,
                "steps": steps,
                **results,
            }
            save(model, self.folder / runfiles.FINAL, about=about)
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        result = {
            **which,
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
            "memory_bytes": self.memory.peak,
            "memory_source": self.memory.source,
        }
        runfiles.write_json(self.folder / runfiles.RESULT, result)


def _ratio(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """|change of weights| / |weights|, over all of them together."""
    changed = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True))
    size = sum(float(b.double().square().sum()) for b in before)
    return math.sqrt(changed / size) if size else 0.0


def _accelerator(precision: str) -> Accelerator:
    """An Accelerator of its own for a run. accelerate keeps one precision a process until its state is reset."""
    mixed = {"fp32": "no"}.get(precision, precision)
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed)
