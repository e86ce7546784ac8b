"""Insertion shock: how far a model's function moves when the norm goes in, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrofit.models import evaluating, own_random_state, owner_of


@dataclass(frozen=True)
class Outputs:
    """What a model says of some images: final tokens [B, N, C] and logits [B, K], either None where it has none."""

    tokens: Tensor | None
    logits: Tensor | None
    prefix: int


@dataclass(frozen=True)
class Shock:
    """How far two models' outputs lie apart on the same images, before any training."""

    cosine_class: float | None
    """Mean cosine similarity of the final prefix tokens (class, registers); None without any. 1 is no shock."""
    cosine_patch: float | None
    """The same of the patch tokens."""
    kl: float | None
    """Mean KL(original || retrofitted) of class probabilities, in nats; None without a head."""
    top1_agreement: float | None
    """Share of images whose most probable class is the same."""
    images: int

    def document(self) -> dict[str, Any]:
        """As insertion.json and retrofit.json hold it."""
        cosine = {"class": self.cosine_class, "patch": self.cosine_patch}
        return {
            "cosine_tokens": cosine,
            "kl": self.kl,
            "top1_agreement": self.top1_agreement,
            "images": self.images,
        }


def outputs(model: nn.Module, batches: Sequence[Tensor]) -> Outputs:
    """The model's outputs on some images, in evaluation mode and float32."""
    family = owner_of(model)
    with evaluating(model), own_random_state(0):  # some models, such as MAE, draw what they look at
        tokens = [family.tokens(model, b) if family else None for b in batches]
        logits = [family.logits(model, b) if family else _as_logits(model(b)) for b in batches]

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        there = [p.float() for p in parts if p is not None]
        return torch.cat(there) if there else None

    return Outputs(joined(tokens), joined(logits), family.prefix_tokens(model) if family else 0)


def _as_logits(output: object) -> Tensor | None:
    """What a module of neither library returns, where it looks like logits."""
    return output if isinstance(output, Tensor) and output.ndim == 2 else None


def shock(original: Outputs, retrofitted: Outputs, images: int) -> Shock:
    """How far the retrofitted model's outputs lie from the original's."""
    cosine_class = cosine_patch = kl = agreement = None
    if original.tokens is not None and retrofitted.tokens is not None:
        cosine = F.cosine_similarity(original.tokens, retrofitted.tokens, dim=-1)
        prefix, patches = cosine[:, : original.prefix], cosine[:, original.prefix :]
        cosine_class = float(prefix.mean()) if prefix.numel() else None
        cosine_patch = float(patches.mean()) if patches.numel() else None
    if original.logits is not None and retrofitted.logits is not None:
        p, q = original.logits.log_softmax(-1), retrofitted.logits.log_softmax(-1)
        kl = float(F.kl_div(q, p, reduction="batchmean", log_target=True))
        agreement = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    return Shock(cosine_class, cosine_patch, kl, agreement, images)
