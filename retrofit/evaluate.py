"""What a trained model says of images, and how well it does: every image once, in order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from retrofit.data import Images, eval_batches
from retrofit.models import evaluating, family_of
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
    model: nn.Module, images: Images, preprocess: Preprocess, device: torch.device
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ids [n], labels [n] and logits [n, K] of every image, in order."""
    ids: list[str] = []
    labels, logits = [], []
    with evaluating(model):
        for batch in eval_batches(images, preprocess, _BATCH):
            out = family_of(model).logits(model, batch.pixels.to(device))
            assert out is not None
            ids += batch.ids
            labels.append(batch.labels.numpy())
            logits.append(out.float().cpu().numpy())
    return np.array(ids), np.concatenate(labels), np.concatenate(logits)
