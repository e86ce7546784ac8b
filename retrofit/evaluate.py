"""What a trained model says of images, and how well it does: every image once, in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from retrofit.data import Images, eval_batches, share
from retrofit.models.preprocess import Preprocess

_BATCH = 64


def score(logits: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Accuracy and mean cross-entropy in nats; the loss is None where a logit is not finite."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity: the loss is then None
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(labels)), labels]
    loss = float(losses.mean())
    accuracy = float((logits.argmax(-1) == labels).mean())
    return {"accuracy": accuracy, "loss": loss if math.isfinite(loss) else None, "images": len(labels)}


def predictions(
    forward: Callable[[Tensor], Tensor], images: Images, preprocess: Preprocess, device: torch.device
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ids [n], labels [n] and logits [n, K] of every image, in order; `forward` makes [B, K] of [B, 3, H, W].

    Where there are several processes, each computes its share of every batch, and all get the whole.
    """
    state = PartialState()
    processes = state.num_processes
    size = _BATCH * processes
    found = []
    with torch.no_grad():
        for batch in eval_batches(images, preprocess, size, part=(state.process_index, processes)):
            n, pixels = len(batch.pixels), batch.pixels.to(device)
            if n == 0:  # no image is left for this process; FSDP still waits for its forward pass
                pixels = pixels.new_zeros(1, *pixels.shape[1:])
            found.append(forward(pixels)[:n].float().cpu().numpy())
    shares = [found] if processes == 1 else gather_object([found])
    logits = np.zeros((len(images), found[0].shape[-1]), np.float32)
    for number in range(len(found)):
        rows = np.arange(len(images))[number * size : (number + 1) * size]
        for process, parts in enumerate(shares):
            logits[share(rows, (process, processes))] = parts[number]
    return np.array(images.ids), images.labels, logits
