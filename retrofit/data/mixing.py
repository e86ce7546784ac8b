"""Mixup and CutMix, by timm: one draw a batch, keyed by (seed, step)."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.functional import one_hot

from retrofit import recipe
from retrofit.data.batches import Batch
from retrofit.data.keyed import keyed_rng


def mixed(batch: Batch, train: recipe.Train, classes: int, seed: int, step: int) -> Batch:
    """The batch with every image mixed with the one opposite, and labels [B, K] in the same proportion.

    Image i of n goes with image n-1-i, as in timm. The one in the middle of an odd number stays as it is. Batches are
    as they were where the recipe wants no mixing.
    """
    if not (train.mixup or train.cutmix):
        return batch
    from timm.data import Mixup  # here, since it imports torchvision

    mix = Mixup(train.mixup, train.cutmix, prob=train.mixup_prob, label_smoothing=0.0, num_classes=classes)
    half = len(batch.labels) // 2
    pairs = [i for i in range(len(batch.labels)) if i < half or i >= len(batch.labels) - half]
    pixels, labels = batch.pixels.clone(), one_hot(batch.labels, classes).float()
    if half:
        with keyed_rng("mix", seed, step):
            pixels[pairs], labels[pairs] = mix(batch.pixels[pairs], batch.labels[pairs])
    return replace(batch, pixels=pixels, labels=labels)
