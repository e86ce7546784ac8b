"""What attention does while an arm trains: read at probed steps, and written to probes.jsonl."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from retrofit.models import evaluating, sites_of
from retrofit.probes import Probe, probe
from retrofit.runfiles import JsonLines, RunKey
from retrofit.train.wrapped import unsharded, whole

_ROUNDING = 1.02
"""How far above its bound a logit may come out in bfloat16."""


@dataclass
class Watch:
    """The probes of one arm."""

    key: RunKey
    model: nn.Module
    forward: nn.Module
    """The model as accelerate has prepared it, uncompiled."""
    device: torch.device
    rows: JsonLines
    warned: bool = False

    def attention(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        """What attention does on the fixed images, a row a layer, computed as in training."""
        with evaluating(self.model), probe(self.model) as seen:
            for batch in images:
                self.forward(batch.to(self.device))
        return self._checked(seen)

    @contextmanager
    def batch(self, reading: bool) -> Iterator[list[dict[str, Any]]]:
        """A list that holds, after the block, what attention did in the forward passes of training inside it.

        Of several processes, what it did in this one's share of the batch.
        """
        layers: list[dict[str, Any]] = []
        if not reading:
            yield layers
            return
        with probe(self.model) as seen:
            yield layers
        layers += self._checked(seen)

    def _checked(self, seen: Probe) -> list[dict[str, Any]]:
        """A row a layer; a logit above its bound is told, once."""
        with unsharded(self.forward):  # a row has the gains of the norms, too
            layers = seen.rows()
        for layer in layers:
            bound = layer["logit_bound"]
            if bound is not None and layer["logit_absmax"] > bound * _ROUNDING and not self.warned:
                self.warned = True
                tqdm.write(
                    f"{self.key.folder}: |logit| {layer['logit_absmax']:.4g} in {layer['site']} exceeds {bound:.4g}, "
                    "the bound that its norm sets; please report this",
                    file=sys.stderr,
                )
        return layers

    def projections(self) -> list[tuple[float, list[Tensor]]]:
        """For each site, the norm of its projections' gradient and a copy of their weights."""
        found = []
        for site in sites_of(self.model)[0]:
            weights = site.projections
            gradients = [w.grad for w in weights if w.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
            found.append((whole(norm).item(), [whole(w.detach()).clone() for w in weights]))
        return found

    def add_update(self, layers: list[dict[str, Any]], before: list[tuple[float, list[Tensor]]]) -> None:
        """Adds to each layer the gradient before the step and how far the step moved the weights."""
        for layer, (grad_norm, weights), now in zip(layers, before, self.projections(), strict=True):
            layer["grad_norm"] = grad_norm
            layer["update_ratio"] = _ratio(weights, now[1])

    def write(
        self,
        step: int,
        layers: list[dict[str, Any]],
        metrics: Mapping[str, Any],
        loss_scale: float | None,
        batch: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """A row of probes.jsonl.

        Args:
            layers: what attention did on the held-out images.
            batch: the same of the training batch; left out where it was not read.
        """
        row = {
            "step": step,
            "loss": metrics.get("loss"),
            "lr": metrics.get("lr"),
            "autocast": self.key.precision,
            "loss_scale": loss_scale,
            "layers": layers,
            **({"batch": batch} if batch else {}),
        }
        self.rows.write(row)


def _ratio(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """|change of weights| / |weights|, over all of them together."""
    changed = sum(float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True))
    size = sum(float(b.double().square().sum()) for b in before)
    return math.sqrt(changed / size) if size else 0.0
